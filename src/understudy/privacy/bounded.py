"""The kernel of every release: sum what units contribute, each bounded, then add noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.errors import PlanViolation
from understudy.nets.params import Params
from understudy.privacy.records import Contribution, Rows, seen
from understudy.privacy.sampling import Access

GRID_BITS = 20
"""Answers are rounded to a grid of the noise's standard deviation / 2**20, or up to half that."""
CLIP_MARGIN = 1e-6
"""Contributions are scaled to just below the bound: rounding, of theirs and of others in a batch
that is larger by one, must not carry them over."""

LARGEST_RATIO = 1e100
"""Rows longer than this many bounds count as not finite."""

PARTS = 4
"""Parts of a batch, at least, where all but the last are full."""

LARGEST_PIECE = 2**25
"""Values that are in float64 at once."""


def noisy_bounded_sum(
    access: Access,
    contribution: Contribution,
    inputs: Params | None = None,
    *,
    dimension: int,
    bound: float,
    many_times: bool = False,
    by_class: Sequence[bool] | None = None,
) -> Tensor:
    """Sample units, sum their bounded contributions, add Gaussian noise once.

    Args:
        access: the records.
        contribution: what each record adds.
        inputs: what `contribution` gets beside the records.
        dimension: of the sum.
        bound: on the L2 norm of a unit's contribution.
        many_times: whether it pays to compile `contribution`.
        by_class: for each block of rows, whether each class's records are summed apart. A unit's
            contribution is then one vector with a part for each class.

    Privacy:
        Reads the records of the sampled units. A unit's records are summed, then the sum is scaled
        to an L2 norm of at most `bound`, so emptying one slot moves the total by at most `bound`.
        Where several processes hold the units, each samples its own, and one adds the noise.
        Charges one Poisson-sampled Gaussian with noise multiplier `access.noise_multiplier`.
    Edge cases:
        No unit sampled: noise alone. A contribution that is not finite: zero, chosen by `where`.
        Zero norm: unchanged. A bound that is not positive and finite: refused.

    Returns:
        The noisy total, float64, (dimension,).
    """
    if not (bound > 0 and math.isfinite(bound)):
        raise PlanViolation(
            f"a contribution bound of {bound:g} was given, expected a positive finite number"
        )
    records, engine = access.records, access.engine
    access.group.agree_on(bound)
    units = access.sample_units()
    total = torch.zeros(dimension, dtype=torch.float64, device=records.device)
    size = _static_size(access, dimension) if many_times and records.one_each else 0
    if size:
        step = _BoundedSum(contribution, bound, access.classes, tuple(by_class or ()))
        for places in records.padded_places(units, size):
            total += _whole(records.run_in_place(engine, step, inputs or {}, *places), dimension)
    elif by_class is not None and records.one_each:
        width = dimension // access.classes if all(by_class) else dimension
        for rows, labels in records.record_rows(units, contribution, inputs or {}, dimension=width):
            is_in = _is_in(labels, access.classes)
            sums_of = [is_in if apart else None for apart in by_class]
            total += _whole(clipped_sum(rows, bound, sums_of=sums_of), dimension)
    else:
        if by_class is not None:
            contribution = _InClass(contribution, access.classes, tuple(by_class))
        for rows in records.unit_rows(
            units, contribution, inputs or {}, dimension=dimension, at_most=access.at_once
        ):
            total += _whole(clipped_sum(rows, bound), dimension)
    noise_std = access.noise_multiplier * bound
    if access.group.leads:  # once, whatever the number of processes
        total = total + noise_std * access.randomness.normal(dimension)
    return snapped(access.group.add_up(total), noise_std)


def _static_size(access: Access, dimension: int) -> int:
    """Return how many records a step takes that may be compiled; 0 where shapes had better change.

    On a CPU a batch goes in parts that a cache holds. If there are several, only the last of them
    is filled up.
    """
    engine = access.engine
    if not engine.compile or engine.is_static:
        return access.static_batch if engine.is_static else 0
    part = access.records.units_at_once(dimension, access.at_once)
    return part if PARTS * part <= access.expected_batch else 0


def _whole(part: Tensor, dimension: int) -> Tensor:
    """Refuse rows of another length: a shorter one would be repeated, past its bound."""
    if part.shape != (dimension,):
        raise PlanViolation(
            f"contributions have {part.numel()} coordinates, expected {dimension} as declared"
        )
    return part


@dataclass(frozen=True)
class _BoundedSum:
    """The sum of bounded contributions of one static batch; equal ones are compiled once."""

    contribution: Contribution
    bound: float
    classes: int = 0
    by_class: tuple[bool, ...] = ()
    """For each block of rows, whether each class's are summed apart; none if no block's are."""

    def __call__(
        self, images: Tensor, labels: Tensor, inputs: Params, places: Tensor, counts: Tensor
    ) -> Tensor:
        rows = self.contribution(inputs, seen(images[places]), labels[places])
        is_in = _is_in(labels[places], self.classes)
        sums_of = [is_in if apart else None for apart in self.by_class]
        return clipped_sum(rows, self.bound, counts, sums_of=sums_of)


def _is_in(labels: Tensor, classes: int) -> Tensor:
    """Return which records are in which class (classes, n)."""
    return torch.arange(classes, device=labels.device)[:, None] == labels


@dataclass(frozen=True)
class _InClass:
    """Rows with a part for each class, zero but for the record's own: units may be in several."""

    contribution: Contribution
    classes: int
    by_class: tuple[bool, ...]

    def __call__(self, inputs: Params, images: Tensor, labels: Tensor) -> Rows:
        is_in = _is_in(labels, self.classes).T
        rows = self.contribution(inputs, images, labels)
        return [
            torch.where(is_in[..., None], block.flatten(1)[:, None], 0) if apart else block
            for block, apart in zip(rows, self.by_class, strict=True)
        ]


@torch.library.custom_op("understudy::settle", mutates_args=("rows",))
def settle(rows: Tensor) -> None:
    """Do nothing, behind a compiler's back: rows are what lies in memory from here on.

    A compiler may take the norm of rows on their way to memory and their sum from there, where they
    are rounded, or compute them twice, each time a little otherwise. Then the row that is summed
    would not be the one that is bounded. For all that a compiler knows, rows change here.
    """


@settle.register_fake
def _(rows: Tensor) -> None:
    pass


def snapped(values: Tensor, noise_std: float) -> Tensor:
    """Round to a fixed public grid, a millionth of the noise or finer.

    Floating-point numbers are denser near zero than the noise added to them, so their last bits can
    show which sum they started from (Mironov, 2012). On a grid much coarser than float64, the same
    whatever the sum, every value can come from every sum.
    """
    if noise_std == 0:
        return values
    grid = 2.0 ** (math.floor(math.log2(noise_std)) - GRID_BITS)
    return torch.round(values / grid) * grid


def clipped_sum(
    rows: Rows,
    bound: float,
    counts: Tensor | None = None,
    *,
    sums_of: Sequence[Tensor | None] | None = None,
) -> Tensor:
    """Scale each row to an L2 norm of at most `bound` and sum them, flat, block by block.

    All in float64: summing hundreds of float32 rows in float32 would let one unit change the
    rounding of all others. Rows may be narrower: what is bounded is the row as it was rounded.

    Args:
        rows: blocks (n, ...), of any floating type.
        bound: the bound.
        counts: which rows count (n,); all by default.
        sums_of: for each block, which of several sums (sums, n) a row is part of, at most one; None
            for one sum of all.
    """
    for block in rows:
        settle(block)
    limit = bound * (1 - CLIP_MARGIN)
    orders = [_memory_order(block) for block in rows]
    blocks = [
        block.permute(order).reshape(len(block), -1)
        for block, order in zip(rows, orders, strict=True)
    ]
    norms = torch.linalg.vector_norm(
        torch.stack(
            [torch.linalg.vector_norm(piece, dim=1) for block in blocks for piece in _wide(block)]
        ),
        dim=0,
    )
    is_kept = norms < LARGEST_RATIO * limit  # false for NaN and infinity too
    if counts is not None:
        is_kept = is_kept & counts
    scale = torch.where(is_kept, limit / norms.clamp(min=limit), 0)
    is_mixed = counts is not None or not bool(is_kept.all())
    sums = []
    for row, block, order, of in zip(
        rows, blocks, orders, sums_of or [None] * len(rows), strict=True
    ):
        weights = scale[None] if of is None else torch.where(of, scale, 0)
        parts = []
        for piece in _wide(block):
            # Nothing times zero is zero, if finite.
            finite = torch.where(is_kept[:, None], piece, 0) if is_mixed else piece
            parts.append(weights @ finite)
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        sides = [row.shape[dim] for dim in order[1:]]
        back = [order.index(dim) for dim in range(1, row.ndim)]
        sums.append(whole.view(-1, *sides).permute(0, *back).flatten())
    return torch.cat(sums)


def _wide(block: Tensor) -> Iterator[Tensor]:
    """Yield rows in float64, in pieces of columns where all at once would take much memory."""
    columns = max(1, LARGEST_PIECE // max(1, len(block)))
    yield from (piece.double() for piece in torch.split(block, columns, dim=1))


def _memory_order(block: Tensor) -> list[int]:
    """Order the dimensions as they lie in memory, rows first, so that nothing has to be moved."""
    return [0, *sorted(range(1, block.ndim), key=block.stride, reverse=True)]
