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
ENOUGH_FOR_FEW = 100
"""Units of a class, times epsilon, from which on Rehearsal's several questions pay in small sets;
in large ones they do where it can afford a teacher. Measured: docs/results/choices.md."""


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

    >>> facts = PublicFacts(
    ...     units=1438, class_names=tuple("0123456789"), shape=(1, 8, 8), mean=(0.3,), std=(0.4,)
    ... )
    >>> choose(facts, 10, {}).method, choose(facts, 0.3, {}).method
    ('rehearsal', 'dp-merf')
    """
    wanted = settings.get("images_per_class", Common.images_per_class)
    enough = TEACHABLE if wanted >= LARGE else ENOUGH_FOR_FEW
    units = facts.units / facts.classes
    found = f"{units:.4g} units per class at epsilon {epsilon:g}"
    if units * epsilon >= enough:
        return Choice(
            "rehearsal",
            f"method rehearsal: {found} are enough for several questions (--method for another)",
        )
    return Choice(
        "dp-merf",
        f"method dp-merf: {found} are few, so that one question is best (--method for another)",
    )
