"""A linear classifier of the scattering transform, as Tramèr and Boneh train one (ICLR 2021).

All that is learned is one layer. What comes before it is fixed, so a classifier that is trained on
noisy gradients need not spend its budget on finding features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.modules import Shape
from understudy.nets.params import Params, uniform_fan_in
from understudy.nets.scattering import Scattering


@dataclass(frozen=True)
class ScatterNet:
    """Describe a linear layer on normalised scattering coefficients of images of `shape`."""

    shape: Shape
    classes: int

    @property
    def scattering(self) -> Scattering:
        """The transform."""
        return Scattering(self.shape)

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default (Kaiming uniform)."""
        seen = self.scattering.dimension
        return {
            f"linear.{part}": uniform_fan_in(size, fan_in=seen, generator=generator)
            for part, size in (("weight", (self.classes, seen)), ("bias", (self.classes,)))
        }

    def __call__(self, params: Params, images: Tensor) -> Tensor:
        """Map normalised images (n, c, h, w) to logits (n, classes)."""
        return self.logits(params, self.prepare(images))

    def prepare(self, images: Tensor) -> Tensor:
        """Map images to coefficients (n, d); maps of a kind have mean 0 together, variance about 1.

        Each image is normalised by itself: coefficients of fine waves are small, and would not be
        heard; a mean over records would have to be paid for.
        """
        found = self.scattering(images)
        kinds = found.view(len(images), self.shape[0], self.scattering.paths, -1)
        parts = torch.split(kinds, list(self.scattering.groups), 2)
        return torch.cat([F.layer_norm(part, part.shape[2:]) for part in parts], 2).flatten(1)

    def logits(self, params: Params, prepared: Tensor) -> Tensor:
        """Map coefficients (n, d) to logits (n, classes)."""
        return F.linear(prepared, params["linear.weight"], params["linear.bias"])
