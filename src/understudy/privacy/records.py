"""Private records, laid out by unit, and the one loop that applies a function to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.data.images import LabelledImages
from understudy.errors import InvalidData
from understudy.nets.params import Params
from understudy.privacy.sealed import Sealed
from understudy.training.engine import Engine

ROW_BYTES = 10 * 2**20
"""Memory that the rows of one chunk should take: what a processor's cache holds."""
MOST_ROW_BYTES, FEW = 2**28, 16
"""Memory that they may take where that would be only a few rows."""
MOST_RECORDS, FEW_RECORDS = 256, 32
"""Records that a function sees at once, at most; and at least, where units have several."""
MOST_ON_GPU = 2048
"""The same of embeddings on a GPU, which between small batches waits for the host."""

Rows = list[Tensor]
"""One row per record or unit, in blocks (n, ...): a row is one slice of every block."""
StaticStep = Callable[..., Tensor]
Contribution = Callable[[Params, Tensor, Tensor], Rows]
"""Map inputs and records (images (n, c, h, w) in [0, 1], labels (n,)) to rows, one by one."""


@dataclass(frozen=True, eq=False)
class View:
    """What many releases see of a record's image instead of its pixels: computed once, and kept.

    The function is public and fixed. What it makes of a record depends on that record alone, and
    stays among the records, for as long as the view itself is kept.
    """

    function: Callable[[Tensor], Tensor]
    """Map an image (c, h, w) in [0, 1] to a tensor of any shape, the same for all."""


def seen(kept: Tensor) -> Tensor:
    """Bring bytes to [0, 1]; what a view has made of records is kept as it is."""
    return kept.float() / 255 if kept.dtype == torch.uint8 else kept


def _where(exist: Tensor, rows: Rows) -> Rows:
    """Return the rows of records that exist, and zeros for the others."""
    if exist.all():
        return rows
    there = exist.to(rows[0].device)
    return [torch.where(there.view(-1, *[1] * (row.ndim - 1)), row, 0) for row in rows]


def _sums_like(rows: Tensor, units: int) -> Tensor:
    """Return the sums of no rows yet, one for each unit, in float64.

    In the rows' own type a sum would be rounded wherever a pass over the records ends: in the midst
    of a unit, at a place that others have a part in.
    """
    return rows.new_zeros((units, *rows.shape[1:]), dtype=torch.float64)


def _add_in_order(sums: Tensor, owner: Tensor, rows: Tensor) -> None:
    """Add each record's row to its unit's sum, the first records of all units before the second.

    A unit's sum is then rounded alike wherever its records are and whatever others there are: a GPU
    adds rows of one call in any order.

    Args:
        sums: of the units, changed in place.
        owner: the place in `sums` of each record's unit; a unit's records stand together.
        rows: of the records, and maybe further ones that do not count.
    """
    rank = torch.arange(len(owner)) - torch.searchsorted(owner, owner)
    for turn in range(int(rank.max()) + 1):
        there = (rank == turn).nonzero().flatten()
        some = rows[there.to(rows.device)].to(sums.dtype)
        sums.index_add_(0, owner[there].to(sums.device), some)


class Records(Sealed):
    """Hold images, labels and the slot of each unit; a slot may be empty."""

    __slots__ = ("_images", "_labels", "_places", "_starts", "_views", "one_each")

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        places: Tensor,
        starts: Tensor,
        *,
        one_each: bool = False,
    ) -> None:
        self._images = images  # (n, c, h, w) uint8, in the order of the source, maybe on disk
        self._labels = labels  # (n,)
        # These two stay with the host, which chooses the units of a batch.
        self._places = places  # where each record of these units is in the two above, by unit
        self._starts = starts  # (units + 1,): unit u owns places starts[u] to starts[u + 1]
        # Whether no unit has several records. Declared, not found: which kernels run must not
        # depend on any one unit, for they round differently.
        self.one_each = one_each
        self._views: WeakKeyDictionary[View, Records] = WeakKeyDictionary()
        if one_each and bool((torch.diff(starts) > 1).any()):
            raise InvalidData("a unit has several records, expected one; name the unit otherwise")

    @classmethod
    def from_units(
        cls,
        data: LabelledImages,
        units: NDArray[np.int64],
        *,
        max_per_unit: int | None,
        device: torch.device,
        one_each: bool = False,
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
            torch.from_numpy(order),
            torch.from_numpy(starts),
            one_each=one_each,
        )

    @property
    def unit_count(self) -> int:
        """Number of slots held here, empty ones included: public."""
        return len(self._starts) - 1

    @property
    def device(self) -> torch.device:
        """Where functions of records run."""
        return self._images.device

    @property
    def _at_once(self) -> int:
        return MOST_ON_GPU if self.device.type == "cuda" else MOST_RECORDS

    @staticmethod
    def units_at_once(dimension: int, at_most: int = MOST_RECORDS) -> int:
        """Return how many rows a processor's cache holds, or a few if it cannot hold those."""
        most = min(at_most, MOST_RECORDS)
        fitting = max(1, min(ROW_BYTES // (4 * dimension), most))
        if fitting < FEW:
            fitting = max(1, min(MOST_ROW_BYTES // (4 * dimension), FEW, most))
        return fitting

    def unit_rows(
        self,
        units: Tensor,
        contribution: Contribution,
        inputs: Params,
        *,
        dimension: int,
        at_most: int = MOST_RECORDS,
    ) -> Iterator[Rows]:
        """Yield, chunk by chunk, one row per unit: the sum of its records' contributions.

        Memory is bounded by the chunk, not by the number of units nor by the records of a unit.
        """
        units_at_once = self.units_at_once(dimension, at_most)
        for chunk in torch.split(units, units_at_once):
            if self.one_each:
                places, exist = self._slots(chunk)
                if exist.any():
                    yield _where(exist, self._contributions(places, contribution, inputs))
                continue
            places, owner = self._all_places(chunk)
            rows: Rows = []
            # As many at a time as there are units, or a few: a number that no record has a part in.
            at_once = min(units_at_once, max(len(chunk), FEW_RECORDS))
            for some in torch.split(torch.arange(len(owner)), at_once):
                if len(some) == 0:  # no unit, or only empty slots: nothing to add
                    continue
                there, _ = self._filled(places[some], None, at_once)
                found = self._contributions(there, contribution, inputs)
                rows = rows or [_sums_like(block, len(chunk)) for block in found]
                for block, more in zip(rows, found, strict=True):
                    _add_in_order(block, owner[some], more)
            if rows:
                yield rows

    def _slots(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the records of units of one record are, and whether they exist.

        An empty slot keeps its place in a batch, so that the others keep theirs. In a batch of
        another size kernels may round otherwise, and one unit would move what all others add.
        """
        if len(self._places) == 0:
            return torch.zeros_like(units), torch.zeros_like(units, dtype=torch.bool)
        first = self._starts[units]
        exist = self._starts[units + 1] > first
        return self._places[first.clamp(max=len(self._places) - 1)], exist

    def _all_places(self, units: Tensor) -> tuple[Tensor, Tensor]:
        """Return where all records of units are, and the position of each one's unit in `units`."""
        starts = self._starts
        counts = starts[units + 1] - starts[units]
        owner = torch.repeat_interleave(counts)
        first = torch.cumsum(counts, 0) - counts
        position = torch.arange(len(owner)) - first[owner]
        return self._places[starts[units][owner] + position], owner

    def _contributions(self, places: Tensor, contribution: Contribution, inputs: Params) -> Rows:
        there = places.to(self.device)
        return contribution(inputs, seen(self._images[there]), self._labels[there])

    def through(self, view: View, one_by_one: Callable[[Tensor], Tensor]) -> Records:
        """Return the same records as a view shows them; `one_by_one` applies it to several."""
        if view not in self._views:
            count = len(self._places)
            parts = torch.split(self._places, self._at_once)  # an empty one, if there is no record
            there = [self._filled(part, None, self._at_once)[0] for part in parts]
            shown = torch.cat([one_by_one(seen(self._images[part])) for part in there])
            self._views[view] = Records(
                shown[: max(1, count)],
                self._labels[there[0][:1] if count == 0 else self._places.to(self.device)],
                torch.arange(count),
                self._starts,
                one_each=self.one_each,
            )
        return self._views[view]

    def record_rows(
        self, units: Tensor, contribution: Contribution, inputs: Params, *, dimension: int
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Yield, chunk by chunk, each record's row, zero without one, and its label.

        For units of one record.
        """
        at_once = max(1, min(MOST_ROW_BYTES // (4 * dimension), self._at_once))
        for chunk in torch.split(units, at_once):
            places, exist = self._slots(chunk)
            if exist.any():
                rows = _where(exist, self._contributions(places, contribution, inputs))
                yield rows, self._labels[places.to(self.device)]

    def padded_places(self, units: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, `size` by `size`, where the units' records are, and which of the places count.

        For units of one record. The last part is filled up with places that do not count; nothing
        is ever left out. A part of empty slots is a part, too: an engine counts its calls, and from
        which one on it is compiled must not depend on any one unit.
        """
        for chunk in torch.split(units, size):
            yield self._filled(*self._slots(chunk), size)

    def whole_batch(self, units: Tensor, least: int) -> tuple[Tensor, Tensor] | None:
        """Return where all records of units are, and which of the places count; None without any.

        There are `least` places, or twice, four times, ... as many if that is too few: a handful of
        shapes, and nothing is ever left out. With 0, as many as there are records.
        """
        places, _ = self._all_places(units)
        if len(places) == 0:
            return None
        size = least or len(places)
        while size < len(places):
            size *= 2
        return self._filled(places, None, size)

    def _filled(self, places: Tensor, exist: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
        """Fill places up to `size` with some that do not count; all that `exist` do."""
        filled = torch.zeros(2, size, dtype=torch.int64)
        filled[0, : len(places)] = places
        filled[1, : len(places)] = 1 if exist is None else exist
        if self.device.type == "cuda":  # so that the copy does not wait for the GPU
            filled = filled.pin_memory().to(self.device, non_blocking=True)
        return filled[0], filled[1].bool()

    def run_in_place(
        self, engine: Engine, step: StaticStep, inputs: Params, *places: Tensor
    ) -> Tensor:
        """Run `step(images, labels, inputs, *places)`: the records stay where they are."""
        return cast(
            Tensor, engine.run(step, inputs, *places, resident=(self._images, self._labels))
        )

    def places_of(self, slots: Tensor, per_unit: int) -> tuple[Tensor, Tensor]:
        """Return where the records of units are, `per_unit` for each, and which of them exist.

        Args:
            slots: (members, units).
            per_unit: records of a unit, at most.

        Returns:
            Places and whether they count, both (members, units * per_unit); where a unit has fewer
            records, some other place, which does not.
        """
        starts, rank = self._starts, torch.arange(per_unit)
        first, count = starts[slots], starts[slots + 1] - starts[slots]
        exists = rank < count[..., None]
        last = max(0, len(self._places) - 1)
        places = self._places[(first[..., None] + rank).clamp(max=last)]
        return places.flatten(1), exists.flatten(1)

    def at(self, places: Tensor, exist: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return images (..., c, h, w) in [0, 1], labels, and whether they exist, at `places`.

        Where they do not, zeros: what lies there is another unit's. For an ensemble alone.
        """
        there, exist = places.to(self.device), exist.to(self.device)
        images = torch.where(exist[..., None, None, None], self._images[there], 0).float() / 255
        return images, torch.where(exist, self._labels[there], 0), exist

    def all_in_the_clear(self) -> tuple[Tensor, Tensor]:
        """Return images (as bytes) and labels. Only `disclosure` may call it."""
        return self._images[self._places], self._labels[self._places]
