"""Release what members of an ensemble would change in generated images, from a few of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad

from understudy.errors import PlanViolation
from understudy.privacy.bounded import clipped_sum, snapped
from understudy.privacy.ensemble import Ensemble
from understudy.privacy.sampling import Access

SampleLoss = Callable[[Any, Tensor, Tensor], Tensor]
"""Map a member's state, generated images (b, c, h, w) and their labels (b,) to a number."""


def sample_gradient(
    access: Access,
    ensemble: Ensemble,
    loss: SampleLoss,
    images: Tensor,
    labels: Tensor,
    *,
    bound: float,
) -> Tensor:
    """Return the noisy mean, over the expected number asked, of members' gradients by the images.

    Privacy:
        Reads: the state of a Poisson sample of members, each of which depends on the records of its
            own shard. Whether a member is asked is decided in secret, anew for each release, and
            changes nothing but the answer: all members learn alike.
        Bound: a member's gradient by all images together, one vector, is scaled to an L2 norm of at
            most C = `bound`.
        Sensitivity: emptying a unit's slot changes the state of one member. If that is asked, its
            answer u becomes some v: 2 * C. It does not vanish, so this is replacement, and
            add/remove with C would charge too little.
        Dominating pair: with s = z * 2 * C, (1 - q) N(0, s^2) + q N(C, s^2) against (1 - q)
            N(0, s^2) + q N(-C, s^2); in units of 2 * C, with means 1/2 and -1/2.
            Given all other coins the answers are distributed as (1 - q) N(0) + q N(u) and as
            (1 - q) N(0) + q N(v). What is one and the same in both cancels: their divergence at
            exp(e) is the largest q N(u)(A) - (exp(e) - 1) (1 - q) N(0)(A) - exp(e) q N(v)(A) of
            any set A. By Neyman and Pearson, a set that has probability p under N(u) has at least
            Phi(Phi^-1(p) - r / s) under a normal whose mean is r away. That falls with r, which is
            at most C for N(0) and 2 * C for N(v). The pair above has both distances on one line,
            where half-lines reach both bounds at once: no u and v are worse.
        Charges: one Poisson-sampled Gaussian under replacement, of rate q and noise multiplier z.
        The division is by q * members, a public number, after the noise.
    Edge cases:
        Nobody asked: noise. A gradient that is not finite: zero. A zero gradient: zero.
    """
    if not (bound > 0 and math.isfinite(bound)):
        raise PlanViolation(f"a gradient's bound is {bound:g}, expected a positive finite number")

    def ask(state: Any, public: tuple[Tensor, Tensor]) -> Tensor:
        return cast(Tensor, grad(loss, argnums=1)(state, *public)).flatten()

    chosen = access.randomness.choose(ensemble.members, access.sampling_rate)
    noise = access.randomness.normal(images.numel())
    total = torch.zeros(images.numel(), dtype=torch.float64, device=noise.device)
    with torch.no_grad():
        for rows in ensemble.answers(ask, (images, labels), chosen=chosen.to(noise.device)):
            total += clipped_sum([rows], bound)
    noise_std = access.noise_multiplier * 2 * bound
    released = snapped(total + noise_std * noise, noise_std)
    mean = released / (access.sampling_rate * ensemble.members)
    return mean.to(images.dtype).view(images.shape)
