"""Siamese augmentation (Zhao, Bilen; ICML 2021): one random change for all images of a step.

A change is a few tensors, drawn on the host from public randomness. What it does to an image is a
pure function of both, differentiable in the image. So one change can be drawn for a step, handed to
a release as a public input, and applied to private records and synthetic images alike; and all
changes go through one compiled program.

Images are normalised: what comes in from outside, or is cut out, is zero, the mean pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.nets.params import Params

NONE = "none"
KINDS = ("color", "crop", "cutout", "flip", "scale", "rotate")
GRID, KEPT, COLOUR = "change.grid", "change.kept", "change.colour"
"""Where each pixel comes from (h, w, 2); which stay (h, w); brightness, saturation, contrast."""
LARGEST_SHIFT, LARGEST_SCALE, LARGEST_TURN = 1 / 8, 1.2, math.radians(15)
HOLE = 1 / 2
"""Side of what is cut out, as a share of the image's."""


@dataclass(frozen=True)
class Siamese:
    """Kinds of changes, one of which is drawn each time."""

    kinds: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Siamese | None:
        """Read kinds with commas between; None for `none`.

        >>> Siamese.parse("crop, flip")
        Siamese(kinds=('crop', 'flip'))
        """
        if text == NONE:
            return None
        kinds = tuple(kind.strip() for kind in text.split(","))
        for kind in kinds:
            if kind not in KINDS:
                raise InvalidSettings(
                    f"augment has '{kind}', expected none, or some of {','.join(KINDS)}"
                )
        return cls(kinds)

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Params:
        """Draw a change for images of `shape` (..., h, w); `generator` is public."""
        sides = shape[-2], shape[-1]
        number = torch.randint(len(self.kinds), (), generator=generator)
        kind = self.kinds[int(number)]
        # Always as many, so that what is drawn does not depend on what else there is to draw.
        draws = torch.rand(3, generator=generator).tolist()
        matrix, kept, colour = _affine(kind, sides, draws), torch.ones(sides), torch.zeros(3)
        if kind == "cutout":
            kept = _without_hole(sides, draws)
        if kind == "color":
            colour = torch.tensor([draws[0] - 0.5, 2 * draws[1] - 1, draws[2] - 0.5])
        grid = F.affine_grid(torch.tensor(matrix)[None], [1, 1, *sides], align_corners=False)
        return {GRID: grid[0], KEPT: kept, COLOUR: colour}

    def __call__(self, images: Tensor, drawn: Params) -> Tensor:
        """Apply a drawn change to images (n, c, h, w)."""
        return changed(images, drawn)


def changed(images: Tensor, change: Params) -> Tensor:
    """Apply a drawn change, found among `change` by its names, to images (n, c, h, w); if any."""
    if GRID not in change:
        return images
    brightness, saturation, contrast = change[COLOUR].unbind()
    images = images + brightness
    grey = images.mean(1, keepdim=True)
    images = images + saturation * (images - grey)
    middle = images.mean((1, 2, 3), keepdim=True)
    images = images + contrast * (images - middle)
    grid = change[GRID].expand(len(images), *change[GRID].shape)
    return F.grid_sample(images, grid, align_corners=False) * change[KEPT]


def _affine(kind: str, sides: tuple[int, int], draws: list[float]) -> list[list[float]]:
    """Return where pixels come from, as rows of x and y; coordinates go from -1 to 1."""
    across, down = 1.0, 1.0
    angle = right = below = 0.0
    if kind == "crop":  # by whole pixels
        height, width = sides
        below, right = (
            2 * round((2 * draw - 1) * max(1, LARGEST_SHIFT * side)) / side
            for draw, side in zip(draws, (height, width), strict=False)
        )
    elif kind == "flip":
        across = -1.0 if draws[0] < 0.5 else 1.0
    elif kind == "scale":
        across, down = (
            1 / LARGEST_SCALE + d * (LARGEST_SCALE - 1 / LARGEST_SCALE) for d in draws[:2]
        )
    elif kind == "rotate":
        angle = (2 * draws[0] - 1) * LARGEST_TURN
    cos, sin = math.cos(angle), math.sin(angle)
    return [[across * cos, -sin, right], [sin, down * cos, below]]


def _without_hole(sides: tuple[int, int], draws: list[float]) -> Tensor:
    """Return ones, but zeros in a rectangle around a pixel, as far as it is within."""
    within = []
    for draw, side in zip(draws, sides, strict=False):
        first = int(draw * side) - int(HOLE * side) // 2
        place = torch.arange(side)
        within.append((place >= first) & (place < first + int(HOLE * side)))
    return 1 - (within[0][:, None] & within[1]).float()
