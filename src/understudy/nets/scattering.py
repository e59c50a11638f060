"""The scattering transform (Bruna, Mallat, 2013): what a convolutional network sees untrained.

Wavelets, modulus, wavelets, modulus, and a blur: a description of images that changes little when
they are shifted or bent a little, and that a linear classifier reads well. All filters are fixed.
Here in the Fourier domain, where a wavelet is a bump, and where taking every second pixel of a
slow map folds its spectrum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.modules import Shape

LAST_MAP = 7
"""Side of the last maps, about, in cells."""
WIDTH, CENTRE = 0.8, 3 * math.pi / 4
"""Of the finest wavelet: standard deviation in pixels, radians per pixel."""


@dataclass(frozen=True)
class Scattering:
    """Describe the transform of images of `shape`, each channel by itself, up to two moduli."""

    shape: Shape
    orientations: int = 8

    @property
    def scales(self) -> int:
        """Number of octaves: 1 at 8 or 16 px, 2 at 28 or 32 px, 3 at 64 px."""
        return max(1, round(math.log2(min(self.shape[1:]) / LAST_MAP)))

    @property
    def cells(self) -> tuple[int, int]:
        """Height and width of the last maps."""
        cell = 2**self.scales
        height, width = (-(-side // cell) for side in self.shape[1:])
        return height, width

    @property
    def paths(self) -> int:
        """Number of maps of one channel."""
        return sum(self.groups)

    @property
    def groups(self) -> tuple[int, ...]:
        """Numbers of maps that differ in orientation alone, in their order.

        The blurred image; of each scale, after its wavelets, then after a coarser one's as well.
        """
        sizes = [1]
        for scale in range(self.scales):
            sizes += [self.orientations, *[self.orientations**2] * (self.scales - 1 - scale)]
        return tuple(sizes)

    @property
    def dimension(self) -> int:
        """Number of values that describe an image."""
        return self.shape[0] * self.paths * math.prod(self.cells)

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of what is transformed: a cell more on each side, mirrored."""
        cell = 2**self.scales
        height, width = (cell * (cells + 2) for cells in self.cells)
        return height, width

    def __call__(self, images: Tensor) -> Tensor:
        """Map images (n, c, h, w) to descriptions (n, dimension)."""
        cell = 2**self.scales
        rows, columns = (p - s for p, s in zip(self.padded, self.shape[1:], strict=True))
        images = F.pad(images, (cell, columns - cell, cell, rows - cell), mode=self._border)
        wavelets, blur = _filters(self, images.device)
        spectrum = torch.fft.fft2(images)[:, :, None]  # (n, c, 1, h, w)
        found = [self._blurred(spectrum, blur, 0)]
        for scale in range(self.scales):
            first = _modulus(spectrum * wavelets[scale], 2**scale)
            again = torch.fft.fft2(first)
            found.append(self._blurred(again, blur, scale))
            for coarser in range(scale + 1, self.scales):
                bumps = _folded(wavelets[coarser], 2**scale) * 4**scale
                second = _modulus(again[:, :, :, None] * bumps, 2 ** (coarser - scale))
                found.append(self._blurred(torch.fft.fft2(second.flatten(2, 3)), blur, coarser))
        return torch.cat(found, 2).flatten(1)

    @property
    def _border(self) -> str:
        """Mirror, where the image is large enough for it."""
        fits = all(side > 2 * 2**self.scales for side in self.shape[1:])
        return "reflect" if fits else "replicate"

    def _blurred(self, spectrum: Tensor, blur: Tensor, scale: int) -> Tensor:
        """Blur maps that are sampled every 2**scale pixels; keep one value per cell."""
        slow = spectrum * (_folded(blur, 2**scale) * 4**scale)
        maps: Tensor = torch.fft.ifft2(_folded(slow, 2 ** (self.scales - scale))).real
        height, width = self.cells
        return maps[..., 1 : 1 + height, 1 : 1 + width]


def _modulus(spectrum: Tensor, every: int) -> Tensor:
    maps: Tensor = torch.fft.ifft2(_folded(spectrum, every))
    return maps.abs()


def _folded(spectrum: Tensor, every: int) -> Tensor:
    """Return the spectrum (..., h, w) of every `every`-th pixel, both ways."""
    *others, height, width = spectrum.shape
    parts = spectrum.reshape(*others, every, height // every, every, width // every)
    return parts.mean((-4, -2))


@lru_cache(maxsize=8)
def _filters(like: Scattering, device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return spectra of wavelets (orientations, h, w) by scale, and of the blur (h, w)."""
    turns = math.pi * torch.arange(like.orientations, dtype=torch.float64) / like.orientations
    slant = 4 / like.orientations
    wavelets = []
    for scale in range(like.scales):
        width, centre = WIDTH * 2**scale, CENTRE / 2**scale
        bump = _bumps(like.padded, turns, width, width / slant, centre)
        still = _bumps(like.padded, turns, width, width / slant, 0.0)
        share = bump[:, :1, :1] / still[:, :1, :1]  # so that an even image gives nothing
        wavelets.append((bump - share * still).float().to(device))
    width = WIDTH * 2 ** (like.scales - 1)
    blur = _bumps(like.padded, turns[:1], width, width, 0.0)[0]
    return wavelets, blur.float().to(device)


def _bumps(
    sides: tuple[int, int], turns: Tensor, along: float, across: float, centre: float
) -> Tensor:
    """Return the spectra of Gaussian-windowed waves, one for each turn: (turns, h, w).

    Args:
        sides: of the image.
        turns: directions, as angles.
        along: standard deviation of the window in the wave's direction, in pixels.
        across: the same across it.
        centre: radians per pixel of the wave; 0 for the window alone.
    """
    height, width = (2 * math.pi * torch.fft.fftfreq(side, dtype=torch.float64) for side in sides)
    cos, sin = turns.cos()[:, None, None], turns.sin()[:, None, None]
    total = torch.zeros(len(turns), *sides, dtype=torch.float64)
    for down in (-1, 0, 1):  # sampling repeats a spectrum
        for right in (-1, 0, 1):
            y = (height + 2 * math.pi * down)[:, None]
            x = width + 2 * math.pi * right
            ahead, aside = x * cos + y * sin - centre, y * cos - x * sin
            total += torch.exp(-0.5 * ((along * ahead).square() + (across * aside).square()))
    return total
