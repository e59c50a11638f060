"""What an audit found: a claim, lower bounds, and tests that should not fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NO_VIOLATION, VIOLATION = "no violation found", "VIOLATION"
UNLIKELY = 1e-3
"""A test of a true statement fails with this probability."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One row of the table."""

    subject: str
    attack: str
    """What was tried, in words."""
    claimed: float
    delta: float
    bound: float
    """The lower bound on epsilon that counts."""
    how: str
    """Where it comes from, in words."""
    repetitions: int
    """Of a release, or canaries of a run."""
    further: Mapping[str, float] = field(default_factory=dict)
    """Other lower bounds, by where they come from."""
    tests: Mapping[str, float] = field(default_factory=dict)
    """Probabilities of what was seen, if all is as it should be, by what should be."""
    seconds: float = 0.0

    @property
    def is_violation(self) -> bool:
        """Whether something is wrong, or the audit had bad luck."""
        bounds = (self.bound, *self.further.values())
        return max(bounds) > self.claimed or min(self.tests.values(), default=1.0) < UNLIKELY

    @property
    def verdict(self) -> str:
        """What may be said. Never that there is no fault."""
        return VIOLATION if self.is_violation else NO_VIOLATION

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return vars(self) | {
            "further": dict(self.further),
            "tests": dict(self.tests),
            "verdict": self.verdict,
        }
