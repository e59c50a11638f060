"""The data card: what a released set is, in words for the person who receives it.

Its header is the YAML block that data hubs read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


def data_card(
    about: About,
    synthetic: SyntheticSet,
    files: Mapping[str, str],
    *,
    header: Sequence[str] = (),
) -> str:
    """Write the card as Markdown.

    Args:
        about: what is known about the set.
        synthetic: the set.
        files: what each file that goes with the card is.
        header: further lines of the YAML header.
    """
    facts, count = about.facts, len(synthetic)
    kind = "labelled" if synthetic.is_labelled else "unlabelled"
    listed = "\n".join(f"- `{name}`: {what}" for name, what in files.items())
    classes = ", ".join(synthetic.class_names[:20]) + (", ..." if facts.classes > 20 else "")
    return f"""{_header(about, count, header)}
# A synthetic stand-in for {about.name}

{count} synthetic {kind} images ({" x ".join(map(str, facts.shape))}, {facts.classes} classes: \
{classes}), made by Understudy with the method `{about.method}`.

## Guarantee

{_guarantee(about)}

## What it is for

Training and testing models where the real data cannot go. The images are not photographs of
anything and need not look like the real ones.

## What it is not for

Conclusions about single persons, rare cases, or the exact frequencies of the real data. The set may
share biases of the real data. A guarantee for each {facts.unit} does not hide what is true of many.

## Files

{listed}
"""


def _header(about: About, count: int, further: Sequence[str]) -> str:
    size = next((name for most, name in SIZES if count < most), "n>1M")
    lines = [
        f"pretty_name: {json.dumps(f'A synthetic stand-in for {about.name}', ensure_ascii=False)}",
        "task_categories:",
        "- image-classification",
        "size_categories:",
        f"- {size}",
        "tags:",
        "- synthetic",
        *(["- differential-privacy"] if about.epsilon is not None else []),
        *further,
    ]
    return "\n".join(["---", *lines, "---"])


def _guarantee(about: About) -> str:
    if about.epsilon is None:
        return "**None.** This set was made without noise. Do not share it."
    unit = about.facts.unit
    epsilon = never_less(about.epsilon)
    return (
        f"Differential privacy with epsilon {epsilon:g} and delta {about.delta:g}, for "
        f"each {unit}: had the data of any one {unit} been emptied, every possible outcome would "
        f"have been about as likely, within a factor of e^epsilon = {factor(epsilon):.4g}, but "
        "for delta. The smaller epsilon is, the less can anyone learn from this set about a single "
        f"{unit}. `certificate.json` says how this was reached."
    )
