"""The kernel of every release: sum what units contribute, each bounded, then add noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from understudy.errors import PlanViolation
from understudy.privacy.records import Contribution
from understudy.privacy.sampling import Access

GRID_BITS = 20
"""Answers are rounded to a grid of the noise's standard deviation / 2**20, or up to half that."""
CLIP_MARGIN = 1e-6
"""Contributions are scaled to just below the bound: float32 rounding must not carry them over."""

LARGEST_RATIO = 1e30
"""Rows longer than this many bounds count as not finite."""


def noisy_bounded_sum(
    access: Access, contribution: Contribution, *, dimension: int, bound: float
) -> Tensor:
    """Sample units, sum their bounded contributions, add Gaussian noise once.

    Privacy:
        Reads the records of the sampled units. A unit's records are summed, then the sum is scaled
        to an L2 norm of at most `bound`, so emptying one slot moves the total by at most `bound`.
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
    units = access.sample_units()
    total = torch.zeros(dimension, dtype=torch.float64, device=units.device)
    for rows in access.records.unit_rows(units, contribution, dimension):
        total += clipped_sum(rows, bound)
    noise_std = access.noise_multiplier * bound
    return snapped(total + noise_std * access.randomness.normal(dimension), noise_std)


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


def clipped_sum(rows: Tensor, bound: float) -> Tensor:
    """Scale each row to an L2 norm of at most `bound` and sum them in float64.

    Norms and the sum are float64: summing hundreds of float32 rows in float32 would let one unit
    change the rounding of all others. A row so large that float32 cannot hold its scale counts as
    not finite.
    """
    rows = rows.float()
    limit = bound * (1 - CLIP_MARGIN)
    norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    is_finite = norms < LARGEST_RATIO * limit  # false for NaN and infinity too
    scale = torch.where(is_finite, limit / norms.clamp(min=limit), 0).float()
    bounded = torch.where(is_finite[:, None], rows * scale[:, None], 0)
    return bounded.sum(dim=0, dtype=torch.float64)
