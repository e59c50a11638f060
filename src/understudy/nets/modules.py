"""Ordinary modules as pure functions: built without values, called with explicit ones."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from understudy.nets.params import Params, uniform

Shape = tuple[int, int, int]
"""Channels, height, width."""
DRAWS = (Tensor.uniform_, Tensor.normal_)
NORMS = (nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d)


class Described(Hashable, Protocol):
    """A value that says which module to build; equal values mean equal modules."""

    def build(self, *variant: Any) -> nn.Module:
        """Build the module."""


def skeleton(described: Described, *variant: Any) -> nn.Module:
    """Return the module without values; one per thread, for a call writes parameters into it."""
    return _skeleton(described, variant, threading.get_ident())


@lru_cache(maxsize=64)
def _skeleton(described: Described, variant: tuple[Any, ...], thread: int) -> nn.Module:
    with torch.device("meta"), _NoDraws():
        return described.build(*variant)


class _NoDraws(TorchFunctionMode):
    """Let layers draw no first values: a skeleton has none, and `vmap` would refuse the draws."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init" or func in DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def fan_in_bound(weight: Tensor) -> float:
    """Return the bound of PyTorch's default weights (Kaiming uniform)."""
    return 1 / math.sqrt(weight[0].numel())


def xavier_bound(weight: Tensor) -> float:
    """Return the bound of Xavier's uniform weights: forward and backward keep their variance."""
    return math.sqrt(6 / (weight[0].numel() + weight[:, 0].numel()))


def draw(
    module: nn.Module,
    generator: torch.Generator,
    *,
    bound: Callable[[Tensor], float] = fan_in_bound,
) -> Params:
    """Draw parameters for a skeleton: norms start as the identity, biases as PyTorch's do.

    Args:
        module: the skeleton.
        generator: where to draw from.
        bound: of a weight's uniform distribution around zero.
    """
    params: Params = {}
    for place, layer in module.named_modules():
        for part, like in layer.named_parameters(prefix=place, recurse=False):
            is_weight = part.endswith("weight")
            if isinstance(layer, NORMS):
                fill = torch.ones if is_weight else torch.zeros
                params[part] = fill(like.shape, device=generator.device)
                continue
            most = (bound if is_weight else fan_in_bound)(cast(Tensor, layer.weight))
            params[part] = uniform(like.shape, bound=most, generator=generator)
    return params


class Sum(nn.Module):
    """Add up what two modules make of the same maps."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Apply both."""
        return cast(Tensor, self.body(maps) + self.shortcut(maps))


class Doubling(nn.ConvTranspose2d):
    """A transposed convolution of stride 2, as a convolution and a shuffle of pixels.

    Every second pixel has a kernel of its own, of every second weight. PyTorch cannot compile the
    gradient of a transposed convolution to a single channel: it expects it laid out differently.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, *, padding: int = 0, more: int = 0):
        super().__init__(inputs, outputs, kernel, 2, padding, output_padding=more)

    def forward(self, maps: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Map (n, inputs, h, w) to (n, outputs, ...), about twice the sides."""
        kernel, cut = self.kernel_size[0], int(self.padding[0])
        taps, odd = -(-kernel // 2), kernel % 2
        whole = F.pad(self.weight, (0, odd, 0, odd))
        whole = whole.reshape(*self.weight.shape[:2], taps, 2, taps, 2)
        phases = whole.flip(2, 4).permute(1, 3, 5, 0, 2, 4).flatten(0, 2)
        bias = None if self.bias is None else self.bias.repeat_interleave(4)
        doubled = F.pixel_shuffle(F.conv2d(maps, phases, bias, padding=taps - 1), 2)
        rows, columns = (
            2 * side - 2 - 2 * cut + kernel + self.output_padding[0] for side in maps.shape[2:]
        )
        return doubled[:, :, cut : cut + rows, cut : cut + columns]


def beside(maps: Tensor, one_hot: Tensor) -> Tensor:
    """Put classes (n, classes) beside maps (n, c, h, w), as maps of their own."""
    return torch.cat([maps, one_hot[..., None, None].expand(*one_hot.shape, *maps.shape[2:])], 1)
