"""Critics: small conditional networks that tell real images from generated ones.

Thousands of them are trained side by side, one set of weights each, under `vmap`. Convolutions are
products of patches and weights: with a set of weights for every member these become batched matrix
products, where a convolution would become one with thousands of groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.modules import Shape
from understudy.nets.params import Params

KERNEL, STRIDE, PADDING = 5, 2, 2
SLOPE = 0.2
NORM_EPS = 1e-5


@dataclass(frozen=True)
class Teacher:
    """The discriminator of DataLens and its kin: two convolutions, two linear layers.

    The class adds a bias of its own to every layer, which is what maps of ones and zeros beside the
    input of a layer amount to; the last layer has a row of weights for each class.

    >>> params = Teacher((1, 28, 28), 10).init(torch.Generator())
    >>> sum(weight.numel() for weight in params.values())
    544423
    """

    shape: Shape
    classes: int
    channels: int = 32
    hidden: int = 256
    norm: bool = False
    """Whether hidden layers are normalised, by the batch's own statistics."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw parameters of one member."""
        colours, classes = self.shape[0], self.classes
        first, second = colours + classes, self.channels + classes
        height, width = (halved(halved(side)) for side in self.shape[1:])
        sizes = {
            "conv0": (KERNEL**2 * colours, first),
            "conv1": (KERNEL**2 * first, second),
            "linear0": (second * height * width, self.hidden),
            "linear1": (self.hidden, classes),
        }
        params = _drawn(sizes, classes, generator)
        for name in ("conv1", "linear0") if self.norm else ():
            params[f"{name}.scale"] = torch.ones(sizes[name][1])
        return params

    def __call__(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Return one member's logits (n,) that images (n, c, h, w) of these classes are real."""
        one_hot = _one_hot(labels, self.classes, images)
        maps = leaky(_biased(params, "conv0", _conv(params, "conv0", images), one_hot))
        maps = self._normal(params, "conv1", _conv(params, "conv1", maps))
        maps = leaky(_biased(params, "conv1", maps, one_hot))
        hidden = self._normal(params, "linear0", _linear(params, "linear0", maps.flatten(1)))
        hidden = leaky(_biased(params, "linear0", hidden, one_hot))
        scores = _biased(params, "linear1", _linear(params, "linear1", hidden), one_hot)
        return (scores * one_hot).sum(1)

    def _normal(self, params: Params, name: str, values: Tensor) -> Tensor:
        """Normalise channels over the batch and all pixels, then scale them."""
        if not self.norm:
            return values
        over = [0, *range(2, values.ndim)]
        centred = values - values.mean(over, keepdim=True)
        spread = centred.square().mean(over, keepdim=True)
        scale = params[f"{name}.scale"].view(-1, *(1,) * (values.ndim - 2))
        return centred * torch.rsqrt(spread + NORM_EPS) * scale


@dataclass(frozen=True)
class DenseCritic:
    """Three linear layers, conditioned as a `Teacher`. What it wants of images has no texture.

    The slopes of convolutions repeat their filters all over an image; these follow the images that
    it has seen.
    """

    shape: Shape
    classes: int
    hidden: int = 256

    def init(self, generator: torch.Generator) -> Params:
        """Draw parameters."""
        sizes = {
            "linear0": (math.prod(self.shape), self.hidden),
            "linear1": (self.hidden, self.hidden),
            "linear2": (self.hidden, self.classes),
        }
        return _drawn(sizes, self.classes, generator)

    def __call__(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Return logits (n,) that images (n, c, h, w) of these classes are real."""
        one_hot = _one_hot(labels, self.classes, images)
        hidden = images.flatten(1)
        for name in ("linear0", "linear1"):
            hidden = leaky(_biased(params, name, _linear(params, name, hidden), one_hot))
        scores = _biased(params, "linear2", _linear(params, "linear2", hidden), one_hot)
        return (scores * one_hot).sum(1)


def _drawn(
    sizes: Mapping[str, tuple[int, int]], classes: int, generator: torch.Generator
) -> Params:
    """Draw weights of layers of some inputs and outputs, with biases of zero for each class."""
    params: Params = {}
    for name, (inputs, outputs) in sizes.items():
        weight = torch.randn((outputs, inputs), generator=generator)
        params[f"{name}.weight"] = weight / math.sqrt(inputs)
        params[f"{name}.bias"] = torch.zeros(classes, outputs)
    return params


def leaky(values: Tensor) -> Tensor:
    """Let a fifth of what is negative through."""
    return F.leaky_relu(values, SLOPE)


def patches(maps: Tensor) -> Tensor:
    """Cut maps (n, c, h, w) into what a convolution sees at each place: (n, c * 25, places).

    `F.unfold` does the same one image after the other: for small images, and on a GPU, that takes
    longer than all the rest of a critic.
    """
    height, width = (halved(side) for side in maps.shape[2:])
    padded = F.pad(maps, (PADDING,) * 4)
    rows = torch.stack([padded[:, :, k::STRIDE][:, :, :height] for k in range(KERNEL)], 2)
    seen = torch.stack([rows[..., k::STRIDE][..., :width] for k in range(KERNEL)], 3)
    return seen.flatten(1, 3).flatten(2)


def halved(side: int) -> int:
    """Return the side of maps after a convolution."""
    return (side + 2 * PADDING - KERNEL) // STRIDE + 1


def _conv(params: Params, name: str, maps: Tensor) -> Tensor:
    found = params[f"{name}.weight"] @ patches(maps)
    return found.view(*found.shape[:2], *(halved(side) for side in maps.shape[2:]))


def _linear(params: Params, name: str, values: Tensor) -> Tensor:
    return values @ params[f"{name}.weight"].transpose(-1, -2)


def _one_hot(labels: Tensor, classes: int, like: Tensor) -> Tensor:
    """Return (n, classes); F.one_hot looks at the values of labels, which tracing cannot."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).to(like.dtype)


def _biased(params: Params, name: str, values: Tensor, one_hot: Tensor) -> Tensor:
    """Add the bias of each image's class, found by a product, whose derivative knows `vmap`."""
    found = one_hot @ params[f"{name}.bias"]
    return values + found.view(*found.shape, *(1,) * (values.ndim - 2))


def logit_loss(logits: Tensor, *, are_real: bool, weights: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of saying that images are real, or are not.

    Args:
        logits: what the critic says (n,).
        are_real: what is true of all.
        weights: how much each counts (n,), 0 or 1; the mean is over those that do.
    """
    losses = F.softplus(-logits if are_real else logits)
    if weights is None:
        return losses.mean()
    return (losses * weights).sum() / weights.sum().clamp(min=1)
