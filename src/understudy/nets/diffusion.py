"""A denoiser, and how images are drawn with it (Karras, Aittala, Aila, Laine; NeurIPS 2022).

Pixels are -1 for black and 1 for white in here. A denoiser gets an image with Gaussian noise of a
known level and answers with the mean of all images that it may have been. Following its answers
from pure noise down to no noise draws an image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from understudy.nets.draws import WORDS, normals, seed_of
from understudy.nets.generators import GeneratorNetwork
from understudy.nets.params import Params
from understudy.nets.unet import UNet

SIGMA_DATA = math.sqrt(1 / 3)
"""Standard deviation that pixels are taken to have: of numbers spread evenly over [-1, 1]."""
SIGMA_MIN, SIGMA_MAX, RHO = 0.002, 80.0, 7.0
"""Noise levels from which and to which images are drawn, and how much finer steps get."""
MOST_ADDED = math.sqrt(2) - 1
"""Of the noise level, by which a step of the stochastic sampler may raise it."""

Denoised = Callable[[Tensor, float], Tensor]
"""Map noisy images and their noise level to denoised ones."""


@dataclass(frozen=True)
class Denoiser:
    """A U-Net whose input, output and noise level are brought to a scale that suits networks."""

    network: UNet

    def __call__(self, params: Params, noisy: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        """Map images (n, c, h, w) with noise of levels `sigma` (n,) to the mean of what they were.

        Args:
            params: the parameters.
            noisy: images.
            sigma: the standard deviation of each image's noise.
            labels: classes; the number of classes itself where the class is not told.
        """
        level = sigma[:, None, None, None]
        total = (level.square() + SIGMA_DATA**2).sqrt()
        answer = self.network(params, noisy / total, sigma.log() / 4, labels)
        return noisy * (SIGMA_DATA / total).square() + answer * level * SIGMA_DATA / total


def loss_weight(sigma: Tensor) -> Tensor:
    """Return what makes errors at all noise levels equally large for an untrained network."""
    return (sigma.square() + SIGMA_DATA**2) / (sigma * SIGMA_DATA).square()


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How images are drawn: Heun's method, or Euler's, which is DDIM; maybe with fresh noise."""

    steps: int = 50
    heun: bool = True
    """Whether each step is corrected at its end: twice the work, far fewer steps."""
    churn: float = 0.0
    """Fresh noise over all steps; 0: none, an image follows from where it starts."""
    churn_min: float = 0.05
    churn_max: float = 50.0
    """Noise levels between which noise is added."""

    def levels(self) -> list[float]:
        """Return falling noise levels, and zero.

        >>> [round(level, 3) for level in Sampler(steps=4).levels()]
        [80.0, 9.723, 0.47, 0.002, 0.0]
        """
        ends = SIGMA_MAX ** (1 / RHO), SIGMA_MIN ** (1 / RHO)
        parts = [n / max(1, self.steps - 1) for n in range(self.steps)]
        return [(ends[0] + part * (ends[1] - ends[0])) ** RHO for part in parts] + [0.0]

    def _raised(self, level: float) -> float:
        is_churned = self.churn_min <= level <= self.churn_max
        return level * (1 + min(self.churn / self.steps, MOST_ADDED)) if is_churned else level

    def __call__(self, start: Tensor, denoised: Denoised, fresh: Callable[[int], Tensor]) -> Tensor:
        """Turn standard normal images into images of the denoiser's.

        Args:
            start: standard normal (n, c, h, w).
            denoised: the denoiser.
            fresh: maps the number of a step to standard normal images.
        """
        levels = self.levels()
        images = start * levels[0]
        for step, (level, then) in enumerate(pairwise(levels)):
            now = self._raised(level)
            if now > level:
                images = images + fresh(step) * math.sqrt(now**2 - level**2)
            slope = (images - denoised(images, now)) / now
            moved = images + (then - now) * slope
            if self.heun and then > 0:
                slope = (slope + (moved - denoised(moved, then)) / then) / 2
                moved = images + (then - now) * slope
            images = moved  # at the last step, what the denoiser answered
        return images


@dataclass(frozen=True)
class DiffusionGenerator(GeneratorNetwork):
    """A denoiser together with how to draw from it: a code is an image of noise."""

    code: int = 0
    """Not used: codes are as long as images have pixels."""
    width: int = 32
    levels: int = 3
    blocks: int = 2
    attention: int = 7
    guidance: float = 0.0
    """How far answers are driven away from those without a class; 0: not at all."""
    steps: int = 50
    heun: bool = True
    churn: float = 0.0
    churn_min: float = 0.05
    churn_max: float = 50.0

    @property
    def unet(self) -> UNet:
        """The network."""
        return UNet(**self._part(UNet, but=("maps",)))

    @property
    def sampler(self) -> Sampler:
        """How it is followed."""
        return Sampler(**self._part(Sampler))

    def _part(self, kind: type, but: tuple[str, ...] = ()) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(kind) if f.name not in but}

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module of the network; it keeps no statistics."""
        return self.unet.build()

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters."""
        return self.unet.init(generator)

    def codes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes (count, pixels)."""
        pixels = math.prod(self.shape)
        return torch.randn((count, pixels), generator=generator, device=generator.device)

    def __call__(
        self,
        params: Params,
        codes: Tensor,
        labels: Tensor | None,
        *,
        statistics: Params | None = None,
    ) -> Tensor:
        """Map codes (n, pixels) and labels (n,) to images (n, c, h, w), 0 black to 1 white.

        Noise on the way is a function of the code, so an image does not depend on its batch.
        """
        unet, start = self.unet, codes.view(-1, *self.shape)
        nobody = torch.full((len(codes),), self.classes, device=codes.device)
        told = nobody if labels is None else labels
        seeds = torch.func.vmap(_seed)(codes)
        denoiser = Denoiser(unet)

        def denoised(images: Tensor, sigma: float) -> Tensor:
            sigmas = torch.full((len(images),), sigma, device=images.device)
            answer = denoiser(params, images, sigmas, told)
            if not self.guidance:
                return answer
            untold = denoiser(params, images, sigmas, nobody)
            return answer + self.guidance * (answer - untold)

        def fresh(step: int) -> Tensor:
            return torch.func.vmap(lambda seed: normals(seed, self.shape, stream=step))(seeds)

        return self.sampler(start, denoised, fresh) / 2 + 0.5


def _seed(code: Tensor) -> Tensor:
    """Return the seed of a code: of its numbers, to a thousandth."""
    key = torch.arange(1, WORDS + 1, device=code.device)
    return seed_of((code * 1000).round().long() + 2**16, key)
