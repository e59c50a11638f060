"""Release noisy label counts."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from understudy.nets.params import Params
from understudy.privacy.bounded import noisy_bounded_sum
from understudy.privacy.records import Rows
from understudy.privacy.sampling import Access


def histogram(access: Access) -> Tensor:
    """Return the noisy number of records of each class: (classes,).

    Privacy:
        Reads: the labels of a Poisson sample of units, or of all units at rate 1.
        Bound: a unit's label counts, scaled to an L2 norm of at most 1. A unit that is one record
            counts 1; a unit of several records weighs no more than one record does.
        Sensitivity: 1, when one unit is replaced by an empty one.
        Dominating pair and charge: as for `class_sums`.
    Edge cases:
        Empty class: noise, which may be negative.
    """

    def counts(_: Params, __: Tensor, labels: Tensor) -> Rows:
        return [F.one_hot(labels, access.classes).float()]

    return noisy_bounded_sum(access, counts, dimension=access.classes, bound=1.0).float()
