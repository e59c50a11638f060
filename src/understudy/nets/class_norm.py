"""Norms with a scale and a shift for each class, as BigGAN's have, and blocks of a generator.

The class enters a network nowhere else, so one that was trained on some classes can be given
others: `discriminators.with_classes` exchanges the rows of every table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

MOST_GROUPS = 8
"""Of channels that are normalised together, within an image."""


class ClassNormBlocks(nn.Module):
    """From one-hot class and code to an image: a linear layer, then blocks.

    Args:
        classes: how many; without any, all images are of one kind.
        code: length of the code.
        channels: of the first maps, and after each block.
        sides: of the first maps.
        colours: channels of the image.
    """

    def __init__(
        self,
        classes: int,
        code: int,
        channels: Sequence[int],
        sides: tuple[int, int],
        colours: int,
    ) -> None:
        super().__init__()
        self.count = classes
        self.first = nn.Linear(code, channels[0] * sides[0] * sides[1])
        self.maps = nn.Unflatten(1, (channels[0], *sides))
        self.blocks = nn.ModuleList(
            ClassNormBlock(classes, inputs, outputs) for inputs, outputs in pairwise(channels)
        )
        self.norm = ClassNorm(classes, channels[-1])
        self.last = nn.Conv2d(channels[-1], colours, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map one-hot class and code (n, features) to images."""
        one_hot, codes = inputs[:, : self.count], inputs[:, self.count :]
        if not self.count:
            one_hot = torch.ones_like(codes[:, :1])
        maps = self.maps(self.first(codes))
        for block in self.blocks:
            maps = block(maps, one_hot)
        return torch.sigmoid(self.last(torch.relu(self.norm(maps, one_hot))))


class ClassNormBlock(nn.Module):
    """Double the sides of maps: two convolutions, beside a projection."""

    def __init__(self, classes: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm0, self.norm1 = ClassNorm(classes, inputs), ClassNorm(classes, outputs)
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.beside = nn.Conv2d(inputs, outputs, 1)
        self.doubled = nn.Upsample(scale_factor=2)

    def forward(self, maps: Tensor, one_hot: Tensor) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, 2 h, 2 w)."""
        found = self.conv0(self.doubled(torch.relu(self.norm0(maps, one_hot))))
        found = self.conv1(torch.relu(self.norm1(found, one_hot)))
        return cast(Tensor, found + self.doubled(self.beside(maps)))


class ClassNorm(nn.Module):
    """Normalise groups of channels within an image; scale and shift them by its class."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(math.gcd(channels, MOST_GROUPS), channels, affine=False)
        self.classes = ClassTable(classes, 2 * channels)

    def forward(self, maps: Tensor, one_hot: Tensor) -> Tensor:
        """Keep the shape (n, c, h, w)."""
        scale, shift = self.classes(one_hot)[..., None, None].chunk(2, 1)
        return cast(Tensor, self.norm(maps) * (1 + scale) + shift)


class ClassTable(nn.Module):
    """A row of numbers for each class; one if there are none."""

    def __init__(self, classes: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max(1, classes), features))

    def forward(self, one_hot: Tensor) -> Tensor:
        """Return the rows of classes (n, classes)."""
        return one_hot @ self.weight
