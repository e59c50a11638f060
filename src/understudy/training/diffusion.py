"""What a denoiser learns from one private record, and draws that a record brings with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from understudy.nets.diffusion import Denoiser, loss_weight
from understudy.nets.draws import WORDS, normals, seed_of, uniforms
from understudy.nets.params import Params, moved
from understudy.seeds import public_generator

KEY = "draws"
"""Name of the key of a step's draws, among the public inputs of the loss."""
INNER = 1 - 1e-6
"""Share of a normal distribution within which stratified noise levels stay."""
LEVELS, NOISE, DROPPED = range(3)
"""Streams of a record's draws."""


@dataclass(frozen=True)
class DenoisingLoss:
    """The weighted squared error of a denoiser, averaged over noisy copies of one record.

    Noise, noise levels and whether the class is told follow from the step's public key and the
    record itself. So the loss is a fixed function of its record, as a release wants it: emptying
    another unit's slot changes none of it. Whoever knows the record may know its draws: the
    gradient is clipped after they were made, and what is hidden is hidden by the release's noise.
    """

    denoiser: Denoiser
    copies: int
    """The paper's K. The mean over copies is one gradient, bounded like any other."""
    label_dropout: float = 0.1
    log_mean: float = -1.2
    log_std: float = 1.2
    """Of the logarithm of noise levels, which is normal."""
    stratified: bool = False
    """Whether copies share the range of noise levels among them, instead of each drawing alone."""

    def __call__(self, theta: Params, image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of `image`, pixels in [0, 1]."""
        pixels = (image * 255).round().long()
        seed = seed_of(torch.cat([pixels.flatten(), label.flatten()]), theta[KEY])
        clean, shape = 2 * image - 1, (self.copies, *image.shape)
        sigma = self._levels(seed)
        noisy = clean + sigma[:, None, None, None] * normals(seed, shape, stream=NOISE)
        is_dropped = uniforms(seed, (1,), stream=DROPPED) <= self.label_dropout
        told = torch.where(is_dropped, self.denoiser.network.classes, label)
        denoised = self.denoiser(theta, noisy, sigma, told.expand(self.copies))
        errors = (denoised - clean).square().mean((1, 2, 3))
        return (loss_weight(sigma) * errors).mean()

    def _levels(self, seed: Tensor) -> Tensor:
        if self.stratified:
            part = torch.arange(self.copies, device=seed.device)
            within = (part + uniforms(seed, (self.copies,), stream=LEVELS)) / self.copies
            drawn = math.sqrt(2) * torch.erfinv((2 * within - 1).clamp(-INNER, INNER))
        else:
            drawn = normals(seed, (self.copies,), stream=LEVELS)
        return (self.log_mean + self.log_std * drawn).exp()


def draws_of(step: int, *, seed: int, device: torch.device) -> Params:
    """Return the public key of a step's draws, as an input of the loss."""
    generator = public_generator(seed, "draws", step)
    key = torch.randint(2**32, (WORDS,), generator=generator)
    return moved({KEY: key}, device)
