"""The ConvNet of dataset condensation: blocks of {conv 3x3, instance norm, ReLU, average pool}.

The paper's network for 28 and 32 px images has three blocks of 128 filters that end in 4x4 maps.
Here the depth follows the image size so that the last maps stay near 4x4: one block at 8 px, two at
16 px, three at 28 or 32 px, four at 64 px. An image smaller than 4 * 2**depth is padded by the
first convolution (28 px become 32 px maps, as in the paper).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.params import Params, uniform_fan_in

LAST_MAP = 4


@dataclass(frozen=True)
class ConvNet:
    """Describe a ConvNet for images of `shape` (channels, height, width)."""

    shape: tuple[int, int, int]
    classes: int
    width: int = 128

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return max(1, round(math.log2(min(self.shape[1:]) / LAST_MAP)))

    def _padded(self) -> tuple[int, int]:
        smallest = LAST_MAP * 2**self.depth
        return max(self.shape[1], smallest), max(self.shape[2], smallest)

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default (Kaiming uniform)."""
        params: Params = {}
        channels = self.shape[0]
        for block in range(self.depth):
            self._init_layer(params, f"conv{block}", (self.width, channels, 3, 3), generator)
            params[f"norm{block}.weight"] = torch.ones(self.width, device=generator.device)
            params[f"norm{block}.bias"] = torch.zeros(self.width, device=generator.device)
            channels = self.width
        height, width = (side // 2**self.depth for side in self._padded())
        features = channels * height * width
        self._init_layer(params, "linear", (self.classes, features), generator)
        return params

    @staticmethod
    def _init_layer(
        params: Params, name: str, shape: tuple[int, ...], generator: torch.Generator
    ) -> None:
        fan_in = math.prod(shape[1:])
        for part, size in (("weight", shape), ("bias", shape[:1])):
            params[f"{name}.{part}"] = uniform_fan_in(size, fan_in=fan_in, generator=generator)

    def __call__(self, params: Params, images: Tensor) -> Tensor:
        """Map normalised images (n, c, h, w) to logits (n, classes)."""
        rows, columns = (
            padded - side for padded, side in zip(self._padded(), self.shape[1:], strict=True)
        )
        if rows or columns:
            top, left = rows // 2, columns // 2
            images = F.pad(images, (left, columns - left, top, rows - top))
        hidden = images
        for block in range(self.depth):
            hidden = F.conv2d(
                hidden, params[f"conv{block}.weight"], params[f"conv{block}.bias"], padding=1
            )
            hidden = F.group_norm(
                hidden, self.width, params[f"norm{block}.weight"], params[f"norm{block}.bias"]
            )
            hidden = F.avg_pool2d(F.relu(hidden), 2)
        return F.linear(hidden.flatten(1), params["linear.weight"], params["linear.bias"])
