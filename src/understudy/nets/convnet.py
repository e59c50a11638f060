"""The ConvNet of dataset condensation: blocks of {conv 3x3, instance norm, ReLU, average pool}.

The paper's network for 28 and 32 px images has three blocks of 128 filters that end in 4x4 maps.
Here the depth follows the image size so that the last maps stay near 4x4: one block at 8 px, two at
16 px, three at 28 or 32 px, four at 64 px. An image whose sides are not multiples of 2**depth, or
smaller than 4 * 2**depth, is padded by the first convolution (28 px become 32 px maps, as in the
paper). The paper's convolutions have a bias, which the norm takes out again; ours have none.

The maps of the first block are by far the largest, and hardly any arithmetic goes into them: with
one input channel, nine products. So they are not normalised at all. The mean and variance of
a convolution's output follow from those of the 3x3 patches of its input, and the norm then changes
nine weights per image and filter instead of a thousand pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets import fused
from understudy.nets.fused import NORM_EPS
from understudy.nets.params import Params, narrow_on, uniform_fan_in

LAST_MAP = 4
ALIGNED = 16
"""Matrix products are fast where the length of a row is a multiple of this."""
LARGEST_FUSED_MAP = 4096
"""Pixels of a map that still fit into the registers of a GPU kernel."""

Patches = tuple[Tensor, Tensor]
"""Patches (n, pixels, k), a one and zeros appended, and the means of their products (n, k, k)."""


@dataclass(frozen=True)
class ConvNet:
    """Describe a ConvNet for images of `shape` (channels, height, width)."""

    shape: tuple[int, int, int]
    classes: int
    width: int = 128
    maps: torch.dtype | None = None
    """Type of the maps between layers; None for that of the parameters. Norms have the latter."""

    def on(self, device: torch.device) -> ConvNet:
        """Return the same network, with maps in bfloat16 where that is fast: mostly on a GPU."""
        return replace(self, maps=narrow_on(device))

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return max(1, round(math.log2(min(self.shape[1:]) / LAST_MAP)))

    @property
    def padded(self) -> tuple[int, int]:
        """Height and width of the first block's maps."""
        multiple = 2**self.depth
        height, width = (multiple * max(LAST_MAP, -(-s // multiple)) for s in self.shape[1:])
        return height, width

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default (Kaiming uniform)."""
        params: Params = {}
        channels = self.shape[0]
        for block in range(self.depth):
            shape = (self.width, channels, 3, 3)
            params[f"conv{block}.weight"] = uniform_fan_in(
                shape, fan_in=9 * channels, generator=generator
            )
            params[f"norm{block}.weight"] = torch.ones(self.width, device=generator.device)
            params[f"norm{block}.bias"] = torch.zeros(self.width, device=generator.device)
            channels = self.width
        height, width = (side // 2**self.depth for side in self.padded)
        features = channels * height * width
        for part, size in (("weight", (self.classes, features)), ("bias", (self.classes,))):
            params[f"linear.{part}"] = uniform_fan_in(size, fan_in=features, generator=generator)
        return params

    def __call__(self, params: Params, images: Tensor) -> Tensor:
        """Map normalised images (n, c, h, w) to logits (n, classes)."""
        return self.logits(params, self.prepare(images))

    def prepare(self, images: Tensor) -> Patches:
        """Do what does not depend on parameters: cut the images into patches."""
        rows, columns = (
            padded - side for padded, side in zip(self.padded, self.shape[1:], strict=True)
        )
        top, left = rows // 2 + 1, columns // 2 + 1  # one more: the convolution's own padding
        images = F.pad(images, (left, columns + 2 - left, top, rows + 2 - top))
        images = images - images.mean((1, 2, 3), keepdim=True)  # which the norm does not see
        patches = _patches_by_quad(images)
        patches = torch.cat([patches, torch.ones_like(patches[..., :1])], dim=-1)
        patches = F.pad(patches, (0, -patches.shape[-1] % ALIGNED))
        moments = torch.matmul(patches.transpose(1, 2), patches) / patches.shape[1]
        return patches.to(self.maps or images.dtype), moments

    def logits(self, params: Params, prepared: Patches) -> Tensor:
        """Map prepared images to logits (n, classes)."""
        weight, bias = params["linear.weight"], params["linear.bias"]
        return F.linear(self.features(params, prepared).to(bias.dtype), weight, bias)

    def features(self, params: Params, prepared: Patches) -> Tensor:
        """Map prepared images to what the last layer sees (n, d). Maps have channels last."""
        hidden = self._first_block(params, prepared)
        for block in range(1, self.depth):
            weight, scale, shift = _of_block(params, block)
            maps = F.conv2d(hidden.permute(0, 3, 1, 2), weight.to(hidden.dtype), padding=1)
            hidden = _norm_relu_pool(maps.permute(0, 2, 3, 1), scale, shift)
        return hidden.permute(0, 3, 1, 2).flatten(1)

    def _first_block(self, params: Params, prepared: Patches) -> Tensor:
        patches, moments = prepared
        weight, scale, shift = _of_block(params, 0)
        count, filters, taps = len(patches), weight.shape[0], 9 * self.shape[0]
        mean = moments[:, taps, :taps]  # against the ones
        covariance = moments[:, :taps, :taps] - mean[:, :, None] * mean[:, None, :]
        weight = weight.reshape(filters, taps)
        squares = (weight[:, :, None] * weight[:, None, :]).flatten(1)
        variance = covariance.flatten(1) @ squares.T  # of each filter's map: w^T C w
        gain = scale * torch.rsqrt(variance.clamp(min=0) + NORM_EPS)
        offset = shift - gain * (mean @ weight.T)
        weight = torch.cat([gain[..., None] * weight, offset[..., None]], dim=-1)
        weight = F.pad(weight, (0, -weight.shape[-1] % ALIGNED))
        height, width = (side // 2 for side in self.padded)
        return _conv_relu_pool(patches, weight).view(count, height, width, filters)


def _of_block(params: Params, block: int) -> tuple[Tensor, Tensor, Tensor]:
    norm = f"norm{block}"
    return params[f"conv{block}.weight"], params[f"{norm}.weight"], params[f"{norm}.bias"]


def _conv_relu_pool(patches: Tensor, weight: Tensor) -> Tensor:
    """Multiply patches by each image's own filters, apply ReLU, average over 2x2 squares."""
    if patches.is_cuda:
        return fused.masked_pool(patches, weight, patches, weight)  # type: ignore[no-any-return]
    quarter = (weight / 4).to(patches.dtype)  # ReLU lets the factor through; here it is small
    by_quarter = patches.view(len(patches), 4, -1, patches.shape[-1])
    return F.relu(torch.matmul(by_quarter, quarter.transpose(1, 2)[:, None])).sum(1)


def _norm_relu_pool(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Normalise each map, apply ReLU, average over 2x2 squares."""
    count, height, width, filters = maps.shape
    if maps.is_cuda and height * width <= LARGEST_FUSED_MAP:
        scale, shift = (part.expand(count, filters) for part in (scale, shift))
        return fused.norm_relu_pool(maps, scale, shift, NORM_EPS)  # type: ignore[no-any-return]
    wide = maps.to(scale.dtype)
    wide = wide - wide.mean((1, 2), keepdim=True)
    variance = wide.square().mean((1, 2), keepdim=True)
    wide = F.relu(wide * (scale / 4 * torch.rsqrt(variance + NORM_EPS)) + shift / 4)
    pooled = wide.reshape(count, height // 2, 2, width // 2, 2, filters).sum((2, 4))
    return pooled.to(maps.dtype)


def _patches_by_quad(images: Tensor) -> Tensor:
    """Cut padded images (n, c, h + 2, w + 2) into 3x3 patches (n, 4 * h/2 * w/2, 9c).

    The four patches that average pooling will join lie a quarter of the rows apart.
    """
    count, channels, height, width = (*images.shape[:2], images.shape[2] - 2, images.shape[3] - 2)
    shifted = [
        images[:, :, row : row + height, column : column + width]
        for row in range(3)
        for column in range(3)
    ]
    quads = torch.stack(shifted, dim=-1).view(count, channels, height // 2, 2, width // 2, 2, 9)
    return quads.permute(0, 3, 5, 2, 4, 1, 6).reshape(count, height * width, 9 * channels)
