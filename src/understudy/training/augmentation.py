"""Augmentation: crop, scale or rotate, as papers evaluate; shifts and mirroring to pre-train."""

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


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image by whole pixels, up to an eighth of the side; outside it is black."""
    count, _, height, width = images.shape
    reach = [max(1, side // 8) for side in (height, width)]
    wide = F.pad(images, (reach[1], reach[1], reach[0], reach[0]))
    for dim, (side, most) in enumerate(zip((height, width), reach, strict=True), start=2):
        start = torch.randint(2 * most + 1, (count,), generator=generator).to(images.device)
        places = start[:, None] + torch.arange(side, device=images.device)
        view = (count, 1, side, 1) if dim == 2 else (count, 1, 1, side)
        sizes = list(wide.shape)
        sizes[dim] = side
        wide = wide.gather(dim, places.view(view).expand(sizes))
    return wide


def shifted_and_mirrored(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each image, and turn half of them left to right."""
    turn = torch.rand(len(images), generator=generator).to(images.device) < 0.5
    moved = shifted(images, generator)
    return torch.where(turn[:, None, None, None], moved.flip(3), moved)
