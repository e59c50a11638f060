"""Private records, laid out by unit, and the one loop that applies a function to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.data.images import LabelledImages
from understudy.privacy.sealed import Sealed

ROW_BYTES = 16 * 2**20
"""Memory that the rows of one chunk may take, whatever the batch."""
MOST_RECORDS = 256
"""Records that a function sees at once."""

Contribution = Callable[[Tensor, Tensor], Tensor]
"""Map records (images (n, c, h, w) in [0, 1], labels (n,)) to rows (n, dimension), one by one."""


class Records(Sealed):
    """Hold images, labels and the slot of each unit; a slot may be empty."""

    __slots__ = ("_images", "_labels", "_places", "_starts")

    def __init__(self, images: Tensor, labels: Tensor, places: Tensor, starts: Tensor) -> None:
        self._images = images  # (n, c, h, w) uint8, in the order of the source, maybe on disk
        self._labels = labels  # (n,)
        self._places = places  # where each record of these units is in the two above, by unit
        self._starts = starts  # (units + 1,): unit u owns places starts[u] to starts[u + 1]

    @classmethod
    def from_units(
        cls,
        data: LabelledImages,
        units: NDArray[np.int64],
        *,
        max_per_unit: int | None,
        device: torch.device,
    ) -> Records:
        """Put the given units of `data` into slots, with at most `max_per_unit` records each."""
        slot_of = np.full(int(data.units.max()) + 1, -1)
        slot_of[units] = np.arange(len(units))
        slots = slot_of[data.units]
        order = np.argsort(slots, kind="stable")
        order = order[slots[order] >= 0]
        slots = slots[order]
        if max_per_unit is not None:
            position = np.arange(len(slots)) - np.searchsorted(slots, slots, side="left")
            order, slots = order[position < max_per_unit], slots[position < max_per_unit]
        starts = np.searchsorted(slots, np.arange(len(units) + 1))
        return cls(
            torch.from_numpy(data.images).to(device),
            torch.from_numpy(data.labels).to(device),
            torch.from_numpy(order).to(device),
            torch.from_numpy(starts).to(device),
        )

    def unit_rows(
        self, units: Tensor, contribution: Contribution, dimension: int
    ) -> Iterator[Tensor]:
        """Yield, chunk by chunk, one row per unit: the sum of its records' contributions.

        Memory is bounded by the chunk, not by the number of units nor by the records of a unit.
        """
        starts = self._starts
        units_at_once = max(1, min(ROW_BYTES // (4 * dimension), MOST_RECORDS))
        for chunk in torch.split(units, units_at_once):
            counts = starts[chunk + 1] - starts[chunk]
            owner = torch.repeat_interleave(counts)  # position of each record's unit in the chunk
            if len(owner) == 0:  # no unit, or only empty slots: nothing to add
                continue
            first = torch.cumsum(counts, 0) - counts
            position = torch.arange(len(owner), device=owner.device) - first[owner]
            records = starts[chunk][owner] + position
            if bool((counts == 1).all()):
                yield self._contributions(records, contribution)
                continue
            rows = torch.zeros(len(chunk), dimension, device=units.device)
            for some in torch.split(torch.arange(len(owner)), units_at_once):
                rows.index_add_(0, owner[some], self._contributions(records[some], contribution))
            yield rows

    def _contributions(self, records: Tensor, contribution: Contribution) -> Tensor:
        places = self._places[records]
        return contribution(self._images[places].float() / 255, self._labels[places])

    def all_in_the_clear(self) -> tuple[Tensor, Tensor]:
        """Return images (as bytes) and labels. Only `disclosure` may call it."""
        return self._images[self._places], self._labels[self._places]
