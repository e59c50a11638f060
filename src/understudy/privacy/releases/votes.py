"""Release the noisy sum of what the members of an ensemble say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from understudy.errors import PlanViolation
from understudy.privacy.bounded import clipped_sum, snapped
from understudy.privacy.ensemble import Ensemble
from understudy.privacy.sampling import Access


class Placed(NamedTuple):
    """A vote that is zero but for one of its blocks, so that the zeros need not be written out."""

    said: Tensor
    """What it says there."""
    place: Tensor
    """Which block that is, counted from 0, (). A vote on a block that there is not counts zero."""


def votes(
    access: Access,
    ensemble: Ensemble,
    ask: Callable[..., Tensor | Placed],
    public: Any,
    own: Any = None,
    *,
    dimension: int,
    bound: float,
    is_non_negative: bool = False,
    is_replaced: bool = False,
) -> Tensor:
    """Return the noisy sum of all members' votes (dimension,).

    Privacy:
        Reads: the state of every member, which depends on the records of its own shard.
        Bound: a member's vote is scaled to an L2 norm of at most `bound` (negatives clamped to zero
            where non-negativity is declared). Where a shard is one unit, a member whose unit has
            no record has no vote: it counts as zero, whatever it says. Of a vote that is `Placed`,
            the block is the whole vector's norm.
        Sensitivity: emptying a unit's slot changes the state of one member, whose vote may become
            any other: 2 * bound, or sqrt(2) * bound where votes are non-negative, for then
            |u - v|^2 = |u|^2 + |v|^2 - 2 <u, v> <= 2 * bound^2. Where a shard is one unit, the
            vote becomes zero: bound. Which of these holds follows from numbers that are public.
            Where `is_replaced`, a neighbour has any other data in place of a member's whole shard.
            Its vote may become any other then, however few units it has: 2 * bound, or
            sqrt(2) * bound; and neither the noise nor who has a vote tells how many they are.
        Dominating pair: N(0, z^2) against N(1, z^2).
        Charges: one Gaussian. Members are always all asked, so there is no amplification.
    Edge cases:
        A vote that is not finite: zero. A zero vote: zero.
    """
    if not (bound > 0 and math.isfinite(bound)):
        raise PlanViolation(f"a vote's bound is {bound:g}, expected a positive finite number")
    if access.sampling_rate != 1:
        raise PlanViolation(
            f"votes are planned at rate {access.sampling_rate:g}, but all members are asked; plan "
            "them at rate 1"
        )
    is_alone = ensemble.units_each == 1 and not is_replaced
    sensitivity = bound if is_alone else (math.sqrt(2) if is_non_negative else 2) * bound
    noise = access.randomness.normal(dimension)
    total = torch.zeros(dimension, dtype=torch.float64, device=noise.device)
    with torch.no_grad():
        for said in ensemble.answers(ask, public, own, if_any_record=is_alone):
            rows, blocks = _laid_out(said, dimension)
            rows = rows.clamp(min=0) if is_non_negative else rows
            total += clipped_sum([rows], bound, sums_of=[blocks])
    noise_std = access.noise_multiplier * sensitivity
    return snapped(total + noise_std * noise, noise_std)


def _laid_out(said: Tensor | Placed, dimension: int) -> tuple[Tensor, Tensor | None]:
    """Return what members say, a row each, and which rows are in each block, unless all are all."""
    if not isinstance(said, Placed):
        rows = said.flatten(1)
        if rows.shape[1] != dimension:
            raise PlanViolation(
                f"members vote with {rows.shape[1]} coordinates, expected {dimension}"
            )
        return rows, None
    rows, places = said.said.flatten(1), said.place
    width = rows.shape[1]
    if not width or dimension % width or places.shape != rows.shape[:1]:
        raise PlanViolation(
            f"members vote on blocks of {width} coordinates at places {tuple(places.shape[1:])}, "
            f"expected one that fits into {dimension}"
        )
    return rows, torch.arange(dimension // width, device=rows.device)[:, None] == places
