"""Discriminators: one network that scores images of a class, the higher the more real.

Nothing in them mixes the images of a batch, so that the gradient of one private record can be
bounded by itself. They are built of layers that `privacy/layers.py` has a rule for. Whatever there
is one of for each class is a table called `classes.weight`, a row for each: `with_classes` can then
exchange the classes of a trained network for others. Without classes there is one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.class_norm import MOST_GROUPS
from understudy.nets.critics import KERNEL, PADDING, STRIDE, halved, leaky
from understudy.nets.modules import Shape
from understudy.nets.params import Params, uniform_fan_in

LAST_MAP = 4
"""Sides of the last maps are about this."""
CLASS_TABLE = "classes.weight"


class Discriminator(Protocol):
    """Tell real from generated images, without state."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters."""

    def __call__(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Score images (n, c, h, w), 0 black to 1 white, of classes (n,): (n,)."""


@dataclass(frozen=True)
class ConvDiscriminator:
    """Convolutions of stride 2 with group norms, then a score with a part for the class."""

    shape: Shape
    classes: int
    width: int = 64
    """Channels of the first maps; doubled by each further convolution."""
    norm: bool = True
    """Whether maps after the first are normalised, by groups of channels of one image."""

    @property
    def depth(self) -> int:
        """Number of convolutions: one at 8 px, three at 28 or 32 px, four at 64 px."""
        return max(1, round(math.log2(min(self.shape[1:]) / LAST_MAP)))

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default; the classes start alike."""
        params: Params = {}
        channels = [self.shape[0], *(self.width * 2**layer for layer in range(self.depth))]
        for layer, (inputs, outputs) in enumerate(pairwise(channels)):
            size = (outputs, inputs, KERNEL, KERNEL)
            params |= _drawn(f"conv{layer}", size, generator)
            if layer and self.norm:
                params[f"norm{layer}.weight"] = torch.ones(outputs, device=generator.device)
                params[f"norm{layer}.bias"] = torch.zeros(outputs, device=generator.device)
        height, width = self.shape[1:]
        for _ in range(self.depth):
            height, width = halved(height), halved(width)
        features = channels[-1] * height * width
        params |= _drawn("score", (1, features), generator)
        rows = max(1, self.classes)
        params[CLASS_TABLE] = torch.zeros(rows, features, device=generator.device)
        return params

    def __call__(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Score images by their features, and by how these lie along their class's row."""
        maps = 2 * images - 1
        for layer in range(self.depth):
            weight, bias = params[f"conv{layer}.weight"], params[f"conv{layer}.bias"]
            maps = F.conv2d(maps, weight, bias, stride=STRIDE, padding=PADDING)
            if layer and self.norm:
                scale, shift = params[f"norm{layer}.weight"], params[f"norm{layer}.bias"]
                maps = F.group_norm(maps, math.gcd(MOST_GROUPS, maps.shape[1]), scale, shift)
            maps = leaky(maps)
        features = maps.flatten(1)
        score = F.linear(features, params["score.weight"], params["score.bias"])[:, 0]
        return score + (features * F.embedding(labels, params[CLASS_TABLE])).sum(1)


@dataclass(frozen=True)
class DenseDiscriminator:
    """The discriminator of DP-CGAN: pixels and one-hot class, one hidden layer, a score."""

    shape: Shape
    classes: int
    width: int = 128
    """Of the hidden layer."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default."""
        pixels = math.prod(self.shape)
        rows = max(1, self.classes)  # each a column of the hidden layer
        table = uniform_fan_in((rows, self.width), fan_in=pixels + rows, generator=generator)
        return {
            **_drawn("hidden", (self.width, pixels), generator),
            CLASS_TABLE: table,
            **_drawn("score", (1, self.width), generator),
        }

    def __call__(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Score images beside their classes."""
        pixels = (2 * images - 1).flatten(1)
        hidden = F.linear(pixels, params["hidden.weight"], params["hidden.bias"])
        hidden = F.relu(hidden + F.embedding(labels, params[CLASS_TABLE]))
        return F.linear(hidden, params["score.weight"], params["score.bias"])[:, 0]


def _drawn(name: str, shape: Sequence[int], generator: torch.Generator) -> Params:
    fan_in = math.prod(shape[1:])
    return {
        f"{name}.weight": uniform_fan_in(shape, fan_in=fan_in, generator=generator),
        f"{name}.bias": uniform_fan_in(shape[:1], fan_in=fan_in, generator=generator),
    }


def with_classes(params: Params, rows: Sequence[int]) -> Params:
    """Return a network for other classes, each of which starts as the one whose number is given."""
    return {n: w[list(rows)] if n.endswith(CLASS_TABLE) else w for n, w in params.items()}
