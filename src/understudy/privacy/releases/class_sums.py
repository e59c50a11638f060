"""Release noisy per-class sums of bounded features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from understudy.privacy.bounded import noisy_bounded_sum
from understudy.privacy.gradients import one_by_one
from understudy.privacy.sampling import Access


@dataclass(frozen=True)
class FeatureMap:
    """A function of one image, with what it declares of itself; the release enforces both."""

    function: Callable[[Tensor], Tensor]
    """Map an image (c, h, w) in [0, 1] to features (dimension,)."""
    dimension: int
    bound: float
    """L2 norm that features do not exceed."""
    is_non_negative: bool = False


def class_sums(access: Access, features: FeatureMap) -> Tensor:
    """Return the noisy sums of `features` over all records of each class: (classes, dimension).

    Privacy:
        Reads: the records of a Poisson sample of units, or of all units at rate 1.
        Bound: a record puts its features into the row of its class (negatives clamped to zero where
            non-negativity is declared); a unit's records are summed, and the whole (classes,
            dimension) matrix is scaled to a Frobenius norm of at most the declared bound.
        Sensitivity: the declared bound, when one unit is replaced by an empty one.
        Dominating pair: as for `gradient`; at rate 1, N(0, z^2) against N(1, z^2).
        Charges: one (Poisson-sampled) Gaussian.
        Sums are not divided: class counts are private.
    Edge cases:
        Empty batch or class: noise. Features that are not finite: the unit contributes zero.
    """

    def row(image: Tensor, label: Tensor) -> Tensor:
        values = features.function(image)
        if features.is_non_negative:
            values = values.clamp(min=0)
        in_class = torch.arange(access.classes, device=label.device) == label
        return torch.where(in_class[:, None], values[None], 0).flatten()

    total = noisy_bounded_sum(
        access,
        lambda _, images, labels: [cast(Tensor, one_by_one(row)(images, labels))],
        dimension=access.classes * features.dimension,
        bound=features.bound,
    )
    return total.view(access.classes, features.dimension).float()
