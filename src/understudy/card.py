"""The card: what a released set or classifier is, in words for the person who receives it.

Its header is the YAML block that data hubs read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from understudy.nets.params import parameter_count
from understudy.nets.released import Artefact, Classifier
from understudy.privacy.certificate import Certificate
from understudy.privacy.plan import PublicFacts
from understudy.synthetic import SyntheticSet

LARGEST_FACTOR = 1e6
"""From here on a factor is written as a power of ten."""
SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (10**6, "100K<n<1M"))


@dataclass(frozen=True, kw_only=True)
class About:
    """What a card tells about a set."""

    name: str
    method: str
    facts: PublicFacts
    epsilon: float | None
    """None without a guarantee."""
    delta: float
    grounds: str = ""
    """What else stands behind the guarantee."""

    @classmethod
    def certified(cls, certificate: Certificate) -> About:
        """Return what a certificate says."""
        content = certificate.content
        return cls(
            name=content["data_set"]["name"],
            method=content["method"]["name"],
            facts=PublicFacts.from_json(content["data_set"]["public_facts"]),
            epsilon=certificate.epsilon if certificate.has_guarantee else None,
            delta=certificate.delta,
            grounds=certificate.grounds,
        )


_SET_IS_FOR = """\
Training and testing models where the real data cannot go. The images are not photographs of
anything and need not look like the real ones."""
_SET_IS_NOT_FOR = """\
Conclusions about single persons, rare cases, or the exact frequencies of the real data. The set may
share biases of the real data."""
_CLASSIFIER_IS_FOR = """\
Naming images like those that it was trained on, where these cannot go. Training it further on other
data costs those who were in its training data no more privacy."""
_CLASSIFIER_IS_NOT_FOR = """\
Images of another kind, or decisions about persons without a test of how it errs for them: it may
share biases of the real data, and noise makes it worse for rare classes."""


def never_less(epsilon: float) -> float:
    """Round an epsilon for reading, upwards.

    >>> never_less(0.99941), never_less(2.0)
    (1.0, 2.0)
    """
    return math.ceil(epsilon * 1000) / 1000


def factor(epsilon: float) -> str:
    """Write e^epsilon for reading, rounded upwards, epsilon first: a card and a page say the same.

    >>> factor(0.0), factor(1.0), factor(5.0), factor(16.0), factor(800.0)
    ('1', '2.72', '149', '8.9e+6', 'more than 1e+308')
    """
    try:
        odds = math.exp(never_less(epsilon))
    except OverflowError:
        return "more than 1e+308"
    if odds >= LARGEST_FACTOR:
        return f"{Context(prec=2, rounding=ROUND_CEILING).create_decimal(odds):.1e}"
    return f"{math.ceil(odds):,}" if odds >= 100 else f"{math.ceil(100 * odds) / 100:g}"


def card_of(about: About, made: Artefact, files: Mapping[str, str]) -> str:
    """Write the card of what a run has made; `files` says what each file is."""
    if isinstance(made, Classifier):
        return model_card(about, made, files)
    return data_card(about, made, files)


def data_card(
    about: About,
    synthetic: SyntheticSet,
    files: Mapping[str, str],
    *,
    header: Sequence[str] = (),
) -> str:
    """Write the card of a set as Markdown.

    Args:
        about: what is known about the set.
        synthetic: the set.
        files: what each file that goes with the card is.
        header: further lines of the YAML header.
    """
    count = len(synthetic)
    kind = "labelled" if synthetic.is_labelled else "unlabelled"
    size = next((name for most, name in SIZES if count < most), "n>1M")
    title = f"A synthetic stand-in for {about.name}"
    fields = (
        f"pretty_name: {json.dumps(title, ensure_ascii=False)}",
        "task_categories:",
        "- image-classification",
        "size_categories:",
        f"- {size}",
    )
    return f"""{_header(about, fields, ["synthetic"], header)}
# {_quoted(title)}

{count} synthetic {kind} images ({_sorts(about.facts)}), made by Understudy with the method \
`{_quoted(about.method)}`.

## Guarantee

{_guarantee(about, "set", "made")}

{_purpose(about, _SET_IS_FOR, _SET_IS_NOT_FOR)}

## Files

{_listed(files)}
"""


def model_card(about: About, classifier: Classifier, files: Mapping[str, str]) -> str:
    """Write the card of a classifier as Markdown; `files` says what each file is."""
    fields = ("pipeline_tag: image-classification", "library_name: understudy")
    size = f"{parameter_count(classifier.params):,} parameters"
    shape = f"(n, {', '.join(map(str, classifier.shape))})"
    return f"""{_header(about, fields, ["image-classification"])}
# A classifier trained on {_quoted(about.name)}

A network (`{classifier.name}`, {size}) that names images ({_sorts(about.facts)}), \
trained by Understudy with the method `{_quoted(about.method)}`.

```python
import understudy

classifier = understudy.load_classifier(".")  # the folder of this file
labels = classifier.predict(images)  # a tensor {shape}: bytes, or 0 black to 1 white
names = [classifier.class_names[label] for label in labels]
```

## Guarantee

{_guarantee(about, "classifier", "trained")}

{_purpose(about, _CLASSIFIER_IS_FOR, _CLASSIFIER_IS_NOT_FOR)}

## Files

{_listed(files)}
"""


def _quoted(name: str) -> str:
    r"""Return a name as Markdown that shows it: names may hold signs that make links or pages.

    >>> _quoted("T-shirt/top"), _quoted("<b>[x](y)")
    ('T-shirt/top', '\\<b\\>\\[x\\](y)')
    """
    return re.sub(r"([\\`\[\]<>])", r"\\\1", name)


def _sorts(facts: PublicFacts) -> str:
    """Describe images and their classes."""
    names = _quoted(", ".join(facts.class_names[:20])) + (", ..." if facts.classes > 20 else "")
    return f"{' x '.join(map(str, facts.shape))}, {facts.classes} classes: {names}"


def _listed(files: Mapping[str, str]) -> str:
    return "\n".join(f"- `{name}`: {what}" for name, what in files.items())


def _header(
    about: About, fields: Sequence[str], tags: Sequence[str], further: Sequence[str] = ()
) -> str:
    private = ["differential-privacy"] if about.epsilon is not None else []
    lines = [*fields, "tags:", *(f"- {tag}" for tag in [*tags, *private]), *further]
    return "\n".join(["---", *lines, "---"])


def _guarantee(about: About, what: str, done: str) -> str:
    if about.epsilon is None:
        return f"**None.** This {what} was {done} without noise. Do not share it."
    unit = _quoted(about.facts.unit)
    return (
        f"Differential privacy with epsilon {never_less(about.epsilon):g} and delta "
        f"{about.delta:g}, for each {unit}. If the data of any one {unit} were missing, every "
        f"possible outcome would still be as likely, within a factor of e^epsilon = "
        f"{factor(about.epsilon)}; delta bounds the probability that this fails. The smaller "
        f"epsilon is, the less can anyone learn from this {what} about a single {unit}. "
        "`certificate.json` says how this was reached."
    ) + (f"\n\n{about.grounds}" if about.grounds else "")


def _purpose(about: About, wanted: str, unwanted: str) -> str:
    """Say what to do with it: without a guarantee there is little that one may."""
    if about.epsilon is None:
        wanted = "Showing those who may see the private data what could be reached without noise."
        unwanted = f"Anything else: it may show the data of any one {_quoted(about.facts.unit)}."
    else:
        many = f"A guarantee for each {_quoted(about.facts.unit)} does not hide what is true of"
        unwanted += f"\n{many} many."
    return f"## What it is for\n\n{wanted}\n\n## What it is not for\n\n{unwanted}"
