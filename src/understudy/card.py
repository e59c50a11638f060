"""The card: what a released set or classifier is, in words for the person who receives it.

Its header is the YAML block that data hubs read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.nets.params import parameter_count
from understudy.nets.released import Artefact, Classifier
from understudy.privacy.certificate import Certificate
from understudy.privacy.plan import PublicFacts
from understudy.synthetic import SyntheticSet

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
        )


def never_less(epsilon: float) -> float:
    """Round an epsilon for reading, upwards.

    >>> never_less(0.99941), never_less(2.0)
    (1.0, 2.0)
    """
    return math.ceil(epsilon * 1000) / 1000


def factor(epsilon: float) -> float:
    """Return e^epsilon, infinite where floating-point numbers end.

    >>> factor(0), factor(1e4)
    (1.0, inf)
    """
    try:
        return math.exp(epsilon)
    except OverflowError:
        return math.inf


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
    unit = _quoted(about.facts.unit)
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

## What it is for

Training and testing models where the real data cannot go. The images are not photographs of
anything and need not look like the real ones.

## What it is not for

Conclusions about single persons, rare cases, or the exact frequencies of the real data. The set may
share biases of the real data. A guarantee for each {unit} does not hide what is true of many.

## Files

{_listed(files)}
"""


def model_card(about: About, classifier: Classifier, files: Mapping[str, str]) -> str:
    """Write the card of a classifier as Markdown; `files` says what each file is."""
    fields = ("pipeline_tag: image-classification", "library_name: understudy")
    size = f"{parameter_count(classifier.params):,} parameters"
    shape = f"(n, {', '.join(map(str, classifier.shape))})"
    unit = _quoted(about.facts.unit)
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

## What it is for

Naming images like those that it was trained on, where these cannot go. It can be trained on, at no
cost in privacy for who was in its training data.

## What it is not for

Images of another kind, or decisions about persons without a test of how it errs for them: it may
share biases of the real data, and noise makes it worse for rare classes. A guarantee for each
{unit} does not hide what is true of many.

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
    epsilon = never_less(about.epsilon)
    return (
        f"Differential privacy with epsilon {epsilon:g} and delta {about.delta:g}, for "
        f"each {unit}: had the data of any one {unit} been emptied, every possible outcome would "
        f"have been about as likely, within a factor of e^epsilon = {factor(epsilon):.4g}, but "
        f"for delta. The smaller epsilon is, the less can anyone learn from this {what} about a "
        f"single {unit}. `certificate.json` says how this was reached."
    )
