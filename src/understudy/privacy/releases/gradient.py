"""Release the noisy sum of clipped per-unit parameter gradients of a Poisson batch."""

from __future__ import annotations

from dataclasses import replace

import torch

from understudy.nets.params import Params
from understudy.privacy.bounded import noisy_bounded_sum
from understudy.privacy.gradients import GradientRows, Loss, OneByOne, split_like
from understudy.privacy.records import View
from understudy.privacy.sampling import Access


def gradient(
    access: Access,
    loss: Loss,
    params: Params,
    public: Params | None = None,
    *,
    clip_norm: float,
    view: View | None = None,
) -> Params:
    """Return the noisy mean gradient over the expected batch, shaped like `params`.

    The loss also gets `public`: tensors that are the same for all records, and known to everyone.
    With a `view`, it gets what that shows of a record in place of the image.

    Privacy:
        Reads: the records of a Poisson sample of units. A view is of all records, each by itself;
            it is made at the first release that asks for it and stays behind the door.
        Bound: the gradients of a unit's records are summed, over all parameters as one vector,
            which is scaled to an L2 norm of at most `clip_norm`, whatever the loss and its public
            inputs are. A unit's gradient depends on these and its own records alone, seen through
            a view or not.
        Sensitivity: `clip_norm`, when one unit is replaced by an empty one.
        Dominating pair: N(0, z^2) against (1 - q) N(0, z^2) + q N(1, z^2), both orders.
        Charges: one Poisson-sampled Gaussian of rate q and noise multiplier z.
        The division is by q * N0, a public number, after the noise.
    Edge cases:
        Empty batch: noise. Unit with a gradient that is not finite: contributes zero. Zero
        gradient: contributes zero. Infinite clip norm: refused.
    """
    dimension = sum(tensor.numel() for tensor in params.values())
    if access.group.size > 1:  # rounding may have led the others' parameters elsewhere
        flat = torch.cat([tensor.flatten() for tensor in params.values()])
        params = split_like(access.group.from_leader(flat), params)
    if view:
        shown = access.records.through(view, torch.no_grad()(OneByOne(view.function)))
        access = replace(access, records=shown)
    known = public or {}
    rows = GradientRows(loss, public=known)
    total = noisy_bounded_sum(
        access, rows, params | known, dimension=dimension, bound=clip_norm, many_times=True
    )
    return split_like(total / access.expected_batch, params)
