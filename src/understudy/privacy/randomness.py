"""Secret randomness: batches and noise, from generators of their own.

Neither follows `--seed` nor torch's default generator, neither is ever written down, and both are
keyed with 128 bits or more from the operating system: torch's CPU generator would use only 32 bits
of a seed, few enough to try them all.

Noise is float64. Samplers stop somewhere in the tail: a float32 Box-Muller draw never exceeds 5.77
standard deviations, which alone would break delta = 1e-5 over 100 000 releases. On a CPU, numpy's
Ziggurat goes to about 12.2, and is built from 53-bit uniforms that resolve its density to one part
in 10^5 up to 10. On a GPU, a float64 Box-Muller draw stops at 8.65, the largest of them few and far
between; half the sum of four, from generators with a 64-bit key each, goes to 17.3. Up to 10 each
of the four is near a quarter of twice that, where they are dense, and what the stop at 8.65 takes
from the density of the sum is less than one part in 10^4. `tail_delta` bounds what stopping at 10
costs.

Philox, which all of these are, passes every statistical test but is no cipher: a fresh key does not
make it one. `secure.py` has a generator that is.
"""

from __future__ import annotations

import math
import secrets
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from understudy.errors import PlanViolation
from understudy.privacy.plan import REPLACING, Plan, PlannedRelease
from understudy.privacy.sealed import Sealed

SAMPLER_REACH = 10.0
DEVICE_DRAWS = 4
"""Normals that are summed to one on a GPU."""
Gaps = NDArray[np.int64] | NDArray[np.float64]


class Randomness(Protocol):
    """A source of the two secret draws that releases need."""

    @property
    def is_secret(self) -> bool:
        """Whether a guarantee may rest on it."""

    @property
    def generator(self) -> str:
        """What draws, for the record."""

    def take(self) -> None:
        """Give these draws to one run."""

    def choose(self, count: int, rate: float) -> Tensor:
        """Choose each of 0 ... count - 1 independently with probability `rate`; sorted, int64."""

    def normal(self, count: int) -> Tensor:
        """Draw standard normals, float64, for noise."""


class SecretSource(Sealed):
    """A source that a guarantee may rest on: one run's alone, whatever draws its bits."""

    __slots__ = ("_device", "_is_taken")

    is_secret = True
    generator: str

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_taken = device, False

    def take(self) -> None:
        """Give these draws to one run; a second run would share batches and noise with it."""
        if self._is_taken:
            raise PlanViolation(
                "two runs were to draw batches and noise from the same generators, which would "
                "tie their answers together; let each have its own"
            )
        self._is_taken = True

    def choose(self, count: int, rate: float) -> Tensor:
        """Choose each of `count` with probability `rate`, by the gaps between those chosen.

        Gaps are geometric: some hundred draws instead of one for each unit. They come from numbers
        of 53 significant bits, so the true rate differs from `rate` by its last bits.
        """
        if rate == 1:
            return torch.arange(count)
        expected = count * rate
        at_once = math.ceil(expected + 5 * math.sqrt(expected) + 10)
        last, parts = -1, []
        while last < count:
            # An exponential of exactly 0 would give a gap of 0, and a unit twice.
            gaps = np.clip(self._gaps(rate, at_once), 1, count + 1)
            parts.append(last + np.cumsum(gaps.astype(np.int64)))
            last = int(parts[-1][-1])
        chosen = np.concatenate(parts)
        return torch.from_numpy(chosen[chosen < count])

    @abstractmethod
    def _gaps(self, rate: float, count: int) -> Gaps:
        """Draw the distances from one that is chosen to the next."""

    @abstractmethod
    def normal(self, count: int) -> Tensor:
        """Draw standard normals, float64, for noise."""


class SecretRandomness(SecretSource):
    """Draw from Philox, keyed by the operating system; a new object has new keys."""

    __slots__ = ("_noise", "_noise_on_device", "_sampling")

    generator = "Philox"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._sampling = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        self._noise = np.random.Generator(np.random.Philox(key=secrets.randbits(128)))
        self._noise_on_device = [
            torch.Generator(device).manual_seed(secrets.randbits(64) - 2**63)
            for _ in range(DEVICE_DRAWS if device.type == "cuda" else 0)
        ]

    def _gaps(self, rate: float, count: int) -> Gaps:
        return self._sampling.geometric(rate, count)

    def normal(self, count: int) -> Tensor:
        """Draw `count` standard normals."""
        if not self._noise_on_device:
            return torch.from_numpy(self._noise.standard_normal(count)).to(self._device)
        draws = torch.empty(DEVICE_DRAWS, count, dtype=torch.float64, device=self._device)
        for part, generator in zip(draws, self._noise_on_device, strict=True):
            part.normal_(generator=generator)
        return draws.sum(0) / math.sqrt(DEVICE_DRAWS)


class InjectedRandomness:
    """Use draws given by a test. Whatever is released with it carries no guarantee."""

    is_secret = False
    generator = "injected"

    def __init__(self, uniform: Callable[[int], Tensor], normal: Callable[[int], Tensor]) -> None:
        self._uniform = uniform
        self.normal = normal

    def take(self) -> None:
        """Let tests give the same draws to several runs."""

    def choose(self, count: int, rate: float) -> Tensor:
        """Choose whatever has a uniform draw below `rate`."""
        return torch.nonzero((self._uniform(count) < rate) | (rate == 1))[:, 0]


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

    Where a sampled part u is replaced by v there are three boxes, around 0, u and v, u and v up to
    r apart and r / 2 from 0. A part that was not sampled must not leave the box of v; one that was,
    neither the box of 0 nor that of v: in all the bound for r / 2, and q times that for r.
    """
    return sum(line.count * _tail_of(line, noise_multiplier * line.noise_ratio) for line in plan)


def _tail_of(line: PlannedRelease, noise_multiplier: float) -> float:
    whole = _tail_per_release(line.dimension, 1 / noise_multiplier)
    if line.kind not in REPLACING or line.sampling_rate == 1:
        return whole
    half = _tail_per_release(line.dimension, 0.5 / noise_multiplier)
    return half + line.sampling_rate * whole


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
