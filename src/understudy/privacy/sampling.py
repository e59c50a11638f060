"""What a release works with, and the secret choice of units that it works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.privacy.randomness import Randomness
from understudy.privacy.records import Records


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

    @property
    def expected_batch(self) -> float:
        """Expected number of units in a batch: public, whatever the batch really was."""
        return self.sampling_rate * self.units

    def sample_units(self) -> Tensor:
        """Choose each unit independently with probability `sampling_rate`; possibly none.

        The uniform draw is a multiple of 2**-53, so the true rate exceeds the charged one by less
        than 2**-53.
        """
        draws = self.randomness.uniform(self.units)
        if self.sampling_rate == 1:
            return torch.arange(self.units, device=draws.device)
        return torch.nonzero(draws < self.sampling_rate)[:, 0]
