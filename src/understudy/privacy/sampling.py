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
"""Records whose gradients are in memory at once on a GPU; larger batches take several passes."""


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
        wanted = min(units * self.sampling_rate + 2 * spread, units, MOST_AT_ONCE)
        return BATCH_MULTIPLE * math.ceil(wanted / BATCH_MULTIPLE)

    def sample_units(self) -> Tensor:
        """Choose each unit held here independently with probability `sampling_rate`."""
        return self.randomness.choose(self.records.unit_count, self.sampling_rate)
