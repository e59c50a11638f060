"""Parameters as plain dictionaries of tensors, and the few operations that every network shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

Params = dict[str, Tensor]


class Network(Protocol):
    """A network without state: parameters are an argument, so `torch.func` can transform it."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters from `generator`."""

    def __call__(self, params: Params, images: Tensor) -> Tensor:
        """Map normalised images (n, c, h, w) to logits (n, classes)."""

    def prepare(self, images: Tensor) -> Any:
        """Do what does not depend on parameters: once for many steps on the same images."""

    def logits(self, params: Params, prepared: Any) -> Tensor:
        """Map prepared images to logits (n, classes)."""


def uniform(shape: Sequence[int], *, bound: float, generator: torch.Generator) -> Tensor:
    """Draw from U(-bound, bound)."""
    weights = torch.rand(tuple(shape), generator=generator, device=generator.device)
    return (weights * 2 - 1) * bound


def uniform_fan_in(shape: Sequence[int], *, fan_in: int, generator: torch.Generator) -> Tensor:
    """Draw from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for all weights."""
    return uniform(shape, bound=1 / math.sqrt(fan_in), generator=generator)


def per_channel(values: Sequence[float], like: Tensor) -> Tensor:
    """Return `values` as a tensor (c, 1, 1) beside `like`, made there: nothing is copied."""
    return torch.cat(
        [torch.full((1, 1, 1), v, dtype=like.dtype, device=like.device) for v in values]
    )


def parameter_count(params: Params) -> int:
    """Count the scalars in `params`."""
    return sum(tensor.numel() for tensor in params.values())


def narrow_on(device: torch.device) -> torch.dtype | None:
    """Return the type of maps whose traffic is most of the work on `device`; None: as parameters.

    Processors without products of that type would be slower with it.
    """
    multiplies = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # there is no public way
    if device.type == "cuda" or (multiplies is not None and multiplies()):
        return torch.bfloat16
    return None


def moved(params: Params, device: torch.device) -> Params:
    """Bring `params` to `device`, without waiting for it."""
    if device.type == "cpu":
        return params
    return {n: w.pin_memory().to(device, non_blocking=True) for n, w in params.items()}
