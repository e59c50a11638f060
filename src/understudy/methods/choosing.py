"""Which method to take when nobody says: by what is public, and for a reason that can be said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from understudy.methods.method import setting
from understudy.methods.rehearsal import LARGE, TEACHABLE
from understudy.privacy.plan import PublicFacts

AUTO = "auto"
"""In place of a method: choose one."""
TOO_FEW = 20
"""Units of a class, times epsilon, below which no method taught much: docs/results/choices.md."""


@dataclass(frozen=True, kw_only=True)
class Common:
    """Settings that all methods of images have."""

    images_per_class: int = setting(10, "Synthetic images per class.")


class Choice(NamedTuple):
    """A method, and why it, in a line."""

    method: str
    why: str


def choose(facts: PublicFacts, epsilon: float, settings: Mapping[str, Any]) -> Choice:
    """Choose by what is public of the records, the budget, and how many images are wanted.

    On small images Rehearsal was ahead in the mean over models at each budget that was tried
    (docs/results/choices.md): it is this one, and what to say differs.

    >>> facts = PublicFacts(
    ...     units=1438, class_names=tuple("0123456789"), shape=(1, 8, 8), mean=(0.3,), std=(0.4,)
    ... )
    >>> choose(facts, 10, {}).method
    'rehearsal'
    """
    units = facts.units / facts.classes
    found = f"{units:.4g} units per class at epsilon {epsilon:g}"
    if units * epsilon < TOO_FEW:
        why = f"{found} are too few for any method to teach much; raise epsilon, or merge classes"
    elif settings.get("images_per_class", Common.images_per_class) < LARGE:
        why = f"{found} are enough for a small set; --method takes another"
    elif units * epsilon < TEACHABLE:
        why = f"{found} are enough for a large set, with hard labels; --method takes another"
    else:
        why = f"{found} are enough for a large set, with soft labels; --method takes another"
    return Choice("rehearsal", f"method rehearsal: {why}")
