"""The augmentation of the evaluation protocol: each image is cropped, scaled or rotated."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_scale_rotate(images: Tensor, generator: torch.Generator) -> Tensor:
    """Apply one of three changes to each image, by nearest-neighbour resampling.

    Crop shifts by up to a seventh of the side (4 of 28 px), scale stretches each side by 0.8 to
    1.2, rotate turns by up to 45 degrees. What comes in from outside has the image's mean value.
    """
    count = len(images)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, generator=generator)

    choice = torch.randint(3, (count,), generator=generator)
    still = torch.zeros(count)
    angle = torch.where(choice == 2, uniform(-math.pi / 4, math.pi / 4), still)
    scale = [torch.where(choice == 1, uniform(0.8, 1.2), still + 1) for _ in range(2)]
    shift = [torch.where(choice == 0, uniform(-2 / 7, 2 / 7), still) for _ in range(2)]
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack(
        [
            torch.stack([cos / scale[0], -sin / scale[0], shift[0]], dim=1),
            torch.stack([sin / scale[1], cos / scale[1], shift[1]], dim=1),
        ],
        dim=1,
    ).to(images.device)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    mean = images.mean(dim=(2, 3), keepdim=True)
    return F.grid_sample(images - mean, grid, mode="nearest", align_corners=False) + mean
