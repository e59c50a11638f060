"""Adam on parameters that are values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from understudy.nets.params import Params


class AdamState(NamedTuple):
    """What Adam remembers between steps: tensors alone, so that steps can be compiled."""

    first: Params
    """Moving averages of the slopes."""
    second: Params
    """Moving averages of their squares."""
    steps: Tensor
    """How many were made."""


@dataclass(frozen=True)
class Adam:
    """Adam without weight decay, as a pure function."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def start(self, params: Params) -> AdamState:
        """Return the state before the first step."""
        device = next(iter(params.values())).device
        first, second = ({n: torch.zeros_like(w) for n, w in params.items()} for _ in range(2))
        return AdamState(first, second, torch.zeros((), device=device))

    def step(
        self, params: Params, slopes: Params, state: AdamState, lr: Tensor
    ) -> tuple[Params, AdamState]:
        """Move parameters against their slopes.

        Args:
            params: the parameters.
            slopes: the gradient of the loss, by the same names.
            state: what `start` or the last step returned.
            lr: learning rate, 0-d.
        """
        steps = state.steps + 1
        # Averages that started at zero are too small by this; 1 - beta^n would lose digits.
        short_first, short_second = (
            -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)
            for beta in self.betas
        )
        moved: Params = {}
        first: Params = {}
        second: Params = {}
        for name, weight in params.items():
            slope = slopes[name]
            first[name] = torch.lerp(slope, state.first[name], self.betas[0])
            second[name] = torch.lerp(slope * slope, state.second[name], self.betas[1])
            scale = (second[name] / short_second).sqrt() + self.eps
            moved[name] = weight - lr * (first[name] / short_first) / scale
        return moved, AdamState(first, second, steps)
