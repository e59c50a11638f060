"""Release the noisy gradient of one loss of a whole Poisson batch, bounded as one vector."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from understudy.errors import InvalidSettings, PlanViolation
from understudy.nets.params import Params
from understudy.privacy.bounded import clipped_sum, snapped
from understudy.privacy.gradients import split_like
from understudy.privacy.sampling import Access

BatchLoss = Callable[[Params, Tensor, Tensor, Tensor], Tensor]
"""Map params, images (n, c, h, w) in [0, 1], labels (n,) and which of them count (n,) to a number.

Those that do not count fill the batch up: they are black, and no records. Among `params` are
the public tensors that the release was given beside the parameters.
"""


def batch_gradient(
    access: Access,
    loss: BatchLoss,
    params: Params,
    public: Params | None = None,
    *,
    bound: float,
) -> Params:
    """Return the noisy gradient of `loss` by `params`, shaped like these.

    The loss sees all sampled records together, so one record may change what every other one does,
    as in an optimal transport plan.

    Privacy:
        Reads: the records of a Poisson sample of units.
        Bound: the gradient by all parameters together, one vector, is scaled to an L2 norm of at
            most C = `bound`, whatever the loss, its public inputs and the batch are. No unit has a
            part of its own in it.
        Sensitivity: 2 * C. Let v be the answer of a batch without a unit, w that of the same batch
            with it: two vectors in a ball of radius C, and nothing more is known of them.
        Dominating pair: N(0, z^2) against (1 - q) N(0, z^2) + q N(1, z^2), both orders, in units of
            2 * C.
            A sampled slot that is empty leaves the batch as it is. So, given all other coins, the
            answer is distributed as N(v) if the unit's slot is empty, and as (1 - q) N(v) + q N(w)
            if it is not. Unlike in `sample_gradient`, v stands on both sides: moved by -v and
            turned, these are the pair above with a shift of |w - v| <= 2 * C, and a smaller shift
            is harder to tell. The other coins fall alike in both worlds, and a mixture of pairs
            is told apart no better than the worst of them.
        Charges: one Poisson-sampled Gaussian of rate q and noise multiplier z, on 2 * C.
        Nothing is divided: the batch's size is private, and used only inside the loss.
    Edge cases:
        Empty batch: noise. A gradient that is not finite: zero. A zero gradient: zero. Several
        processes: refused, for each would hold only a part of the batch.
    """
    if not (bound > 0 and math.isfinite(bound)):
        raise PlanViolation(f"a gradient's bound is {bound:g}, expected a positive finite number")
    if access.group.size > 1:
        raise InvalidSettings(
            "a loss of a whole batch needs all of its records in one process; run it without "
            "torchrun"
        )
    records, engine = access.records, access.engine
    dimension = sum(tensor.numel() for tensor in params.values())
    answer = torch.zeros(dimension, dtype=torch.float64, device=records.device)
    # How large a batch came out is private. On a CPU an engine compiles what it has run often
    # enough: that size would decide from which call on, and be a constant in code on disk.
    least = access.static_batch if engine.is_static else 0
    engine = engine if engine.is_static else replace(engine, compile=False)
    batch = records.whole_batch(access.sample_units(), least)
    if batch is not None:
        step = _BoundedGradient(loss, tuple(params), bound)
        answer = records.run_in_place(engine, step, params | (public or {}), *batch)
    noise_std = access.noise_multiplier * 2 * bound
    noisy = answer + noise_std * access.randomness.normal(dimension)
    return split_like(snapped(noisy, noise_std), params)


@dataclass(frozen=True)
class _BoundedGradient:
    """The bounded gradient on one static batch; equal ones are compiled once."""

    loss: BatchLoss
    names: tuple[str, ...]
    """Of the parameters; all other inputs are public."""
    bound: float

    def __call__(
        self, images: Tensor, labels: Tensor, inputs: Params, places: Tensor, counts: Tensor
    ) -> Tensor:
        # What fills the batch up is somebody's record: whatever the loss does, it sees none of it.
        pixels = torch.where(counts[:, None, None, None], images[places], 0).float() / 255
        classes = torch.where(counts, labels[places], 0)
        leaves = {name: inputs[name].detach().requires_grad_() for name in self.names}
        loss = self.loss(inputs | leaves, pixels, classes, counts)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        row = torch.cat([slope.flatten() for slope in slopes])[None]
        return clipped_sum([row], self.bound, torch.ones_like(counts[:1]))
