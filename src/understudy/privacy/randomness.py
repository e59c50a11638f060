"""Secret randomness: batches and noise, from generators of their own.

Neither follows `--seed` nor torch's default generator, neither is ever written down, and both are
keyed with 128 bits from the operating system: torch's CPU generator would use only 32 bits of a
seed, few enough to try them all.

Noise is drawn in float64, by numpy's Ziggurat. Samplers stop somewhere in the tail: a float32
Box-Muller draw never exceeds 5.77 standard deviations, which alone would break delta = 1e-5 over
100 000 releases; numpy's Ziggurat goes to about 12.2, and is built from 53-bit uniforms that
resolve its density to one part in 10^5 up to 10. `tail_delta` bounds what stopping there costs.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from understudy.privacy.plan import Plan
from understudy.privacy.sealed import Sealed

SAMPLER_REACH = 10.0


class Randomness(Protocol):
    """A source of the two secret draws that releases need, both float64."""

    @property
    def is_secret(self) -> bool:
        """Whether a guarantee may rest on it."""

    def uniform(self, count: int) -> Tensor:
        """Draw from [0, 1), to sample units."""

    def normal(self, count: int) -> Tensor:
        """Draw standard normals, for noise."""


class SecretRandomness(Sealed):
    """Draw from generators keyed by the operating system; a new object has new keys."""

    __slots__ = ("_device", "_noise", "_sampling")

    is_secret = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sampling = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        self._noise = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))

    def uniform(self, count: int) -> Tensor:
        """Draw `count` numbers from [0, 1)."""
        return torch.from_numpy(self._sampling.random(count)).to(self._device)

    def normal(self, count: int) -> Tensor:
        """Draw `count` standard normals."""
        return torch.from_numpy(self._noise.standard_normal(count)).to(self._device)


class InjectedRandomness:
    """Use draws given by a test. Whatever is released with it carries no guarantee."""

    is_secret = False

    def __init__(self, uniform: Callable[[int], Tensor], normal: Callable[[int], Tensor]) -> None:
        self.uniform = uniform
        self.normal = normal


def tail_delta(plan: Plan, noise_multiplier: float) -> float:
    """Bound the probability that the sampler's missing tail shows in any release of `plan`.

    Noise truncated at T = `SAMPLER_REACH` has, up to a factor within 1e-5 of 1, the Gaussian's
    density inside its box, so the likelihood ratio of two neighbours is the Gaussian's wherever
    both boxes overlap. What remains is the probability of an outcome that only one neighbour can
    produce: a coordinate that lands within its own shift s_i of the edge. It is added to delta as
    it is, without a factor exp(epsilon).

    With g(s) = P(T - s < Z < T) and shifts (in standard deviations) of Euclidean norm r =
    1 / noise_multiplier over d coordinates, shifts up to t add at most sqrt(d) * r * g(t) / t (g is
    convex, Cauchy-Schwarz), the larger ones r**2 * max g(s) / s**2 over [t, r]; g(s) / s**2 falls,
    then rises, so its maximum is at an end. The sum over both is minimised over t.
    """
    return sum(
        line.count * _tail_per_release(line.dimension, 1 / (noise_multiplier * line.noise_ratio))
        for line in plan
    )


def _tail_per_release(dimension: int, radius: float) -> float:
    def edge(shift: float) -> float:
        return float(norm.sf(SAMPLER_REACH - shift) - norm.sf(SAMPLER_REACH))

    largest = edge(radius) / radius**2
    small = math.sqrt(dimension) * radius
    bounds = [
        small * edge(t) / t + radius**2 * max(edge(t) / t**2, largest)
        for t in np.geomspace(1e-3, 1, 31) * radius
    ]
    return float(min([1.0, *bounds]))
