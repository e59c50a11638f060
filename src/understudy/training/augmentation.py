"""The augmentation of the evaluation protocol: each image is cropped, scaled or rotated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

CROP, SCALE, ROTATE = range(3)


def crop_scale_rotate(images: Tensor, generator: torch.Generator) -> Tensor:
    """Apply one of three changes to each normalised image, as dataset condensation does.

    Crop shifts by whole pixels, up to a seventh of the side (4 of 28 px); scale stretches each side
    by 0.8 to 1.2, to the nearest pixel; rotate turns by up to 45 degrees, between pixels. What
    comes in from outside has the mean value of all images; when scaling, zero.
    """
    count, _, height, width = images.shape

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
    matrix = torch.stack(
        [
            torch.stack([cos / scale[0], -sin / scale[0], shift[0]], dim=1),
            torch.stack([sin / scale[1], cos / scale[1], shift[1]], dim=1),
        ],
        dim=1,
    ).to(images.device)
    change = change.to(images.device)[:, None, None, None]
    mean = images.mean(dim=(0, 2, 3), keepdim=True)
    outside = torch.where(change == SCALE, torch.zeros_like(mean), mean)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    nearest, between = (
        F.grid_sample(images - outside, grid, mode=mode, align_corners=False)
        for mode in ("nearest", "bicubic")
    )
    return torch.where(change == ROTATE, between, nearest) + outside
