"""A U-Net that predicts noise: down to coarse maps, up again, with what was seen on the way down.

The network of DPDM, which took it from score-based models: residual blocks with group norms, told
the noise level and the class, and self-attention where maps are small. Every parameter belongs to a
convolution, a linear layer, a group norm or an embedding, so that gradients of single records come
layer by layer (`privacy/layers.py`). Nothing mixes the images of a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from understudy.nets.modules import Shape, draw, skeleton, xavier_bound
from understudy.nets.params import Params

MOST_GROUPS, GROUP = 32, 4
"""Groups of a norm at most, and channels in one at least."""
NORM_EPS = 1e-6
SLOWEST = 1e4
"""Of the waves that describe a noise level, the longest compared with the shortest."""
ENDS = ("conv1", "found", "last")
"""Layers whose output is added to what was there before, or is the answer: they start at zero."""
HALVED = 1 / math.sqrt(2)
"""What keeps the variance of a sum of two."""


@dataclass(frozen=True)
class UNet:
    """Describe a U-Net for images of `shape`; `classes` is also the label of no class."""

    shape: Shape
    classes: int
    width: int = 32
    """Channels of the finest maps; the coarser ones have twice as many."""
    levels: int = 3
    blocks: int = 2
    """Residual blocks of each level on the way down."""
    attention: int = 7
    """Longer side of the maps up to which they get attention."""
    maps: torch.dtype | None = None
    """Type of the maps between layers; None for that of the parameters."""

    def on(self, device: torch.device) -> UNet:
        """Return the same network; on a GPU with maps in bfloat16, whose traffic is most of it."""
        return replace(self, maps=torch.bfloat16) if device.type == "cuda" else self

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width that can be halved as often as it takes."""
        multiple = 2 ** (self.levels - 1)
        height, width = (multiple * -(-side // multiple) for side in self.shape[1:])
        return height, width

    def build(self) -> nn.Module:
        """Build the module."""
        return Layers(self)

    def init(self, generator: torch.Generator) -> Params:
        """Draw parameters; layers that end a residual start at zero: each block passes on."""
        params = draw(skeleton(self), generator, bound=xavier_bound)
        for name, values in params.items():
            *_, layer, part = name.split(".")
            if part == "bias" or layer in ENDS:
                params[name] = torch.zeros_like(values)
        return params

    def __call__(self, params: Params, images: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """Map images (n, c, h, w), noise levels (n,) and labels (n,) to images, float32."""
        kind = self.maps or images.dtype
        own = {name: params[name].to(kind) for name, _ in skeleton(self).named_parameters()}
        (height, width), (_, rows, columns) = self.padded, self.shape
        whole = F.pad(images, (0, width - columns, 0, height - rows)).to(kind)
        seen = torch.func.functional_call(skeleton(self), own, (whole, levels, labels))
        return cast(Tensor, seen[..., :rows, :columns].float())


class Layers(nn.Module):
    """Layers of a `UNet`."""

    def __init__(self, like: UNet) -> None:
        super().__init__()
        width, told = like.width, 4 * like.width
        self.level0, self.level1 = nn.Linear(width, told), nn.Linear(told, told)
        self.label = nn.Embedding(like.classes + 1, told)
        channels, side = width, max(like.padded)
        self.first = nn.Conv2d(like.shape[0], width, 3, padding=1)
        kept, self.down, self.up = [width], nn.ModuleList(), nn.ModuleList()
        for level in range(like.levels):
            outputs = width * (2 if level else 1)
            for _ in range(like.blocks):
                self.down.append(Block(channels, outputs, told, attends=side <= like.attention))
                channels = outputs
                kept.append(channels)
            if level + 1 < like.levels:
                self.down.append(Block(channels, channels, told, scale=0.5))
                kept.append(channels)
                side //= 2
        self.middle = nn.ModuleList(
            [Block(channels, channels, told, attends=True), Block(channels, channels, told)]
        )
        for level in reversed(range(like.levels)):
            outputs = width * (2 if level else 1)
            for number in range(like.blocks + 1):
                attends = side <= like.attention and number == like.blocks
                joined = channels + kept.pop()
                self.up.append(Joined(joined, outputs, told, attends=attends))
                channels = outputs
            if level:
                self.up.append(Block(channels, channels, told, scale=2.0))
                side *= 2
        self.norm = norm(channels)
        self.last = nn.Conv2d(channels, like.shape[0], 3, padding=1)

    def forward(self, images: Tensor, levels: Tensor, labels: Tensor) -> Tensor:
        """Map noisy images, noise levels and labels to images."""
        described = self.level0(waves_of(levels, self.level0.in_features).to(images.dtype))
        told = F.silu(self.level1(F.silu(described)) + self.label(labels))
        maps = self.first(images)
        kept = [maps]
        for block in self.down:
            maps = block(maps, told)
            kept.append(maps)
        for block in self.middle:
            maps = block(maps, told)
        for block in self.up:
            beside = kept.pop() if isinstance(block, Joined) else None
            maps = block(maps if beside is None else torch.cat([maps, beside], -3), told)
        return cast(Tensor, self.last(F.silu(self.norm(maps))))


class Block(nn.Module):
    """Two convolutions beside a shortcut; maybe to other sides, maybe with attention after."""

    def __init__(
        self, inputs: int, outputs: int, told: int, *, scale: float = 1.0, attends: bool = False
    ) -> None:
        super().__init__()
        self.scale = scale
        self.norm0, self.norm1 = norm(inputs), norm(outputs)
        self.conv0 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.tell = nn.Linear(told, outputs)
        self.conv1 = nn.Conv2d(outputs, outputs, 3, padding=1)
        is_same = inputs == outputs and scale == 1
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1)
        self.attention = Attention(outputs) if attends else nn.Identity()

    def forward(self, maps: Tensor, told: Tensor) -> Tensor:
        """Map (n, c, h, w), told about noise and class by (n, told)."""
        hidden = self.conv0(self._scaled(F.silu(self.norm0(maps))))
        hidden = hidden + self.tell(told)[..., None, None]
        hidden = self.conv1(F.silu(self.norm1(hidden)))
        return cast(Tensor, self.attention((self.shortcut(self._scaled(maps)) + hidden) * HALVED))

    def _scaled(self, maps: Tensor) -> Tensor:
        """Halve the sides by means of four pixels, or double them."""
        if self.scale == 1:
            return maps
        return F.avg_pool2d(maps, 2) if self.scale < 1 else doubled(maps)


class Joined(Block):
    """A block that also sees maps of the way down."""


class Attention(nn.Module):
    """Every pixel looks at every other of its image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = norm(channels)
        self.look = nn.Linear(channels, 3 * channels)
        self.found = nn.Linear(channels, channels)

    def forward(self, maps: Tensor) -> Tensor:
        """Keep the shape (n, c, h, w)."""
        pixels = self.norm(maps).flatten(-2).transpose(-1, -2)  # (n, h w, c)
        query, key, value = self.look(pixels).chunk(3, -1)
        near = query @ key.transpose(-1, -2) / math.sqrt(maps.shape[-3])
        found = self.found(near.float().softmax(-1).to(value.dtype) @ value)
        back = cast(Tensor, found.transpose(-1, -2).reshape(maps.shape))
        return (maps + back) * HALVED


def norm(channels: int) -> nn.Module:
    """Normalise groups of channels of one image."""
    groups = max(1, min(channels // GROUP, MOST_GROUPS))
    while channels % groups:
        groups -= 1
    return nn.GroupNorm(groups, channels, eps=NORM_EPS)


def doubled(maps: Tensor) -> Tensor:
    """Double the sides of maps: each pixel becomes four."""
    *front, height, width = maps.shape
    wide = maps[..., None, :, None].expand(*front, height, 2, width, 2)
    return wide.reshape(*front, 2 * height, 2 * width)


def waves_of(levels: Tensor, count: int) -> Tensor:
    """Describe noise levels (n,) by cosines and sines of falling frequency: (n, count)."""
    half = count // 2
    at = torch.arange(half, device=levels.device) / max(1, half - 1)
    angles = levels[..., None] * SLOWEST**-at
    return torch.cat([angles.cos(), angles.sin()], -1)
