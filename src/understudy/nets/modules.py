"""Ordinary modules as pure functions: built without values, called with explicit ones."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
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


def beside(maps: Tensor, one_hot: Tensor) -> Tensor:
    """Put classes (n, classes) beside maps (n, c, h, w), as maps of their own."""
    return torch.cat([maps, one_hot[..., None, None].expand(*one_hot.shape, *maps.shape[2:])], 1)
