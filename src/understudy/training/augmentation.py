"""Augmentation: crop, scale or rotate, as papers evaluate; shifts and mirroring to pre-train.

Each is in two parts: what chance decides is drawn first, for as many steps ahead as one likes; the
rest is a pure function, which the engine can make part of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.params import Params, moved

CROP, SCALE, ROTATE = range(3)


class Augment(Protocol):
    """A random change of images."""

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Params:
        """Decide what happens to images of `shape` (n, c, h, w)."""

    def __call__(self, images: Tensor, drawn: Params) -> Tensor:
        """Change images (n, c, h, w) as decided."""


def augmented(images: Tensor, augment: Augment, generator: torch.Generator) -> Tensor:
    """Change images at random, now."""
    return augment(images, moved(augment.draw(images.shape, generator), images.device))


@dataclass(frozen=True)
class CropScaleOrRotate:
    """Apply one of three changes to each normalised image, as dataset condensation does.

    Crop shifts by whole pixels, up to a seventh of the side (4 of 28 px); scale stretches each side
    by 0.8 to 1.2, to the nearest pixel; rotate turns by up to 45 degrees, between pixels. What
    comes in from outside has the mean value of all images; when scaling, zero.
    """

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Params:
        """Return which change (n,), and the affine map it is (n, 2, 3)."""
        count, _, height, width = shape

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(count, generator=generator)

        change = torch.randint(3, (count,), generator=generator)
        still = torch.zeros(count)
        angle = torch.where(change == ROTATE, uniform(-math.pi / 4, math.pi / 4), still)
        scale = [torch.where(change == SCALE, uniform(0.8, 1.2), still + 1) for _ in range(2)]
        shift = []
        for side in (width, height):
            reach = max(1, side // 7)
            pixels = torch.randint(-reach, reach, (count,), generator=generator)
            shift.append(torch.where(change == CROP, pixels * 2 / side, still))
        cos, sin = angle.cos(), angle.sin()
        rows = [
            torch.stack([cos / scale[0], -sin / scale[0], shift[0]], dim=1),
            torch.stack([sin / scale[1], cos / scale[1], shift[1]], dim=1),
        ]
        return {"change": change, "matrix": torch.stack(rows, dim=1)}

    def __call__(self, images: Tensor, drawn: Params) -> Tensor:
        """Change images as decided."""
        change = drawn["change"][:, None, None, None]
        mean = images.mean(dim=(0, 2, 3), keepdim=True)
        outside = torch.where(change == SCALE, torch.zeros_like(mean), mean)
        grid = F.affine_grid(drawn["matrix"], list(images.shape), align_corners=False)
        nearest, between = (
            F.grid_sample(images - outside, grid, mode=mode, align_corners=False)
            for mode in ("nearest", "bicubic")
        )
        return torch.where(change == ROTATE, between, nearest) + outside


@dataclass(frozen=True)
class Shift:
    """Shift each image by whole pixels, up to an eighth of the side; outside it is black."""

    mirror: bool = False
    """Turn half of them left to right."""

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Params:
        """Return the row and the column to begin with (n,), and which images to turn (n,)."""
        count, _, height, width = shape
        turn = torch.rand(count, generator=generator) < 0.5 if self.mirror else None
        row, column = (
            torch.randint(2 * _reach(side) + 1, (count,), generator=generator)
            for side in (height, width)
        )
        return {"row": row, "column": column} | ({} if turn is None else {"turn": turn})

    def __call__(self, images: Tensor, drawn: Params) -> Tensor:
        """Change images as decided."""
        count, _, height, width = images.shape
        down, right = _reach(height), _reach(width)
        wide = F.pad(images, (right, right, down, down)).permute(0, 2, 3, 1)
        image, rows, columns = (torch.arange(n, device=wide.device) for n in (count, height, width))
        rows = drawn["row"][:, None, None] + rows[:, None]
        columns = drawn["column"][:, None, None] + columns
        shifted = wide[image[:, None, None], rows, columns].permute(0, 3, 1, 2)
        if not self.mirror:
            return shifted
        return torch.where(drawn["turn"][:, None, None, None], shifted.flip(3), shifted)


def _reach(side: int) -> int:
    return max(1, side // 8)
