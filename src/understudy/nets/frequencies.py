"""The lowest frequencies of an image: cosine waves, orthonormal, coarse ones first.

Most of what an image shows lies in a few slow waves. A sum over records that is released with noise
is worth more the fewer numbers it has, so what is released of images is their lowest frequencies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from understudy.nets.modules import Shape

COLOUR_COST = 2.0
"""A wave of colour ranks as if it were so many times faster: eyes and networks need fewer."""


def cosine_waves(side: int) -> Tensor:
    """Return the orthonormal cosine transform of `side` samples (frequency, place), float64.

    >>> waves = cosine_waves(5)
    >>> bool(torch.allclose(waves @ waves.T, torch.eye(5, dtype=torch.float64)))
    True
    """
    number = torch.arange(side, dtype=torch.float64)
    place = (number + 0.5) / side
    waves = torch.cos(math.pi * number[:, None] * place) * math.sqrt(2 / side)
    waves[0] /= math.sqrt(2)
    return waves


def colour_axes(channels: int) -> Tensor:
    """Return orthonormal axes (axis, channel), float64: brightness first, then differences."""
    return cosine_waves(channels)


def low_frequencies(shape: Shape, count: int) -> Tensor:
    """Return the `count` lowest waves of an image, orthonormal rows (count, c * h * w).

    A wave ranks by its half periods over the height plus those over the width, each divided by the
    side; of a square grey image, these are the corner i + j < k of the cosine transform.
    """
    channels, height, width = shape
    rows, columns, axes = cosine_waves(height), cosine_waves(width), colour_axes(channels)
    pace = torch.arange(height)[:, None] / height + torch.arange(width) / width
    cost = torch.where(torch.arange(channels) > 0, COLOUR_COST, 1.0)
    # What has no pace of its own, an even colour, still comes after the brightness of its kind.
    ranks = cost[:, None, None] * (pace + 1 / max(height, width))
    chosen = torch.argsort(ranks.flatten().double(), stable=True)[:count]
    axis, row, column = torch.unravel_index(chosen, (channels, height, width))
    waves = axes[axis][:, :, None, None] * rows[row][:, None, :, None]
    return (waves * columns[column][:, None, None, :]).flatten(1).float()
