"""What a release works with, and the secret choice of units that it works on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from understudy.privacy.group import ALONE, Group
from understudy.privacy.randomness import Randomness
from understudy.privacy.records import Records
from understudy.training.engine import Engine

BATCH_MULTIPLE = 32
MOST_AT_ONCE = 512
"""Records whose gradients are in memory at once, unless a release says fewer; larger batches take
several passes, summed in float64 before the noise."""


@dataclass(frozen=True, repr=False)
class Access:
    """The records, opened for one release of the plan."""

    records: Records
    randomness: Randomness
    units: int
    """N0, declared: rates and denominators come from it."""
    classes: int
    sampling_rate: float
    noise_multiplier: float
    engine: Engine
    group: Group = ALONE
    """The processes that hold the other units."""
    at_once: int = MOST_AT_ONCE
    """Records whose contributions are computed at once, at most."""

    @property
    def expected_batch(self) -> float:
        """Expected number of units in a batch: public, whatever the batch really was."""
        return self.sampling_rate * self.units

    @property
    def static_batch(self) -> int:
        """Size of the batches that are compiled: two standard deviations above the expected one.

        One batch in forty needs a second pass. More sizes would save a few percent of a release,
        and each would cost a compilation. Public: it follows from the rate and the number of units.
        """
        units = self.records.unit_count
        spread = math.sqrt(units * self.sampling_rate * (1 - self.sampling_rate))
        wanted = min(units * self.sampling_rate + 2 * spread, units)
        multiple = min(BATCH_MULTIPLE, self.at_once)
        return multiple * min(math.ceil(wanted / multiple), self.at_once // multiple)

    def sample_units(self) -> Tensor:
        """Choose each unit held here independently with probability `sampling_rate`."""
        return self.randomness.choose(self.records.unit_count, self.sampling_rate)
