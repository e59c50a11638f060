"""A generator against a discriminator: losses of the two, steps of the generator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.nets.discriminators import Discriminator
from understudy.nets.generators import GeneratorNetwork
from understudy.nets.params import Params
from understudy.training.adam import Adam, AdamState

Loss = Literal["non-saturating", "hinge", "wasserstein"]
LOSSES = ("non-saturating", "hinge", "wasserstein")
SMALLEST_SLOPE = 1e-12
"""Squared; where an image has no slope, its norm has no derivative."""


@dataclass(frozen=True)
class Game:
    """What the discriminator and the generator want of scores (n,); each wants its loss low."""

    discriminator: Discriminator
    loss: Loss

    def of_real(self, scores: Tensor) -> Tensor:
        """Return the discriminator's loss on each real image."""
        if self.loss == "wasserstein":
            return -scores
        return F.softplus(-scores) if self.loss == "non-saturating" else F.relu(1 - scores)

    def of_fake(self, scores: Tensor) -> Tensor:
        """Return the discriminator's loss on each generated image."""
        if self.loss == "wasserstein":
            return scores
        return F.softplus(scores) if self.loss == "non-saturating" else F.relu(1 + scores)

    def of_generator(self, scores: Tensor) -> Tensor:
        """Return the generator's loss on each generated image."""
        return F.softplus(-scores) if self.loss == "non-saturating" else -scores

    def steepness(self, params: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Return by how much scores are steeper than 1 at generated images, squared, in the mean.

        The usual penalty looks between real and generated images, which would touch records.
        """
        places = images.detach().requires_grad_()
        scores = self.discriminator(params, places, labels)
        (slopes,) = torch.autograd.grad(scores.sum(), places, create_graph=True)
        norms = (slopes.flatten(1).square().sum(1) + SMALLEST_SLOPE).sqrt()
        return F.relu(norms - 1).square().mean()


GeneratorState = tuple[Params, AdamState, Params]
"""Parameters, what Adam remembers, and the moving average of the parameters."""


@dataclass(frozen=True)
class GeneratorStep:
    """One step of the generator; a frozen value, so that equal steps are compiled once."""

    network: GeneratorNetwork
    game: Game
    adam: Adam

    def start(self, params: Params) -> GeneratorState:
        """Return the state before the first step."""
        average = {
            name: weight.clone() for name, weight in params.items()
        }  # a file holds each once
        return params, self.adam.start(params), average

    def __call__(
        self,
        state: GeneratorState,
        codes: Tensor,
        labels: Tensor,
        known: Mapping[str, Any],
        lr: Tensor,
    ) -> GeneratorState:
        """Move the parameters so that images look more real, and their average after them.

        `known` are the parameters of the `discriminator`, and what is `kept` of the average.
        """
        params, moments, average = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        images = self.network(leaves, codes, labels)
        scores = self.game.discriminator(known["discriminator"], images, labels)
        loss = self.game.of_generator(scores).mean()
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        params, moments = self.adam.step(
            params, dict(zip(leaves, slopes, strict=True)), moments, lr
        )
        average = {n: torch.lerp(params[n], old, known["kept"]) for n, old in average.items()}
        return params, moments, average


def kept_at(ema: float, step: int) -> float:
    """Return how much of an average stays at `step`: less of its first, poor values.

    >>> [kept_at(0.9, step) for step in (0, 8, 1000)]
    [0.1, 0.5, 0.9]
    """
    return min(ema, (1 + step) / (10 + step))


def check_game(settings: Any) -> None:
    """Refuse settings of the two networks, and of how they are trained, that cannot work."""
    for name in ("turns", "code", "width", "critic_width"):
        if getattr(settings, name) < 1:
            raise InvalidSettings(f"{name} is {getattr(settings, name)}, expected at least 1")
    for name in ("lr", "critic_lr"):
        if not 0 < getattr(settings, name) < float("inf"):
            raise InvalidSettings(f"{name} is {getattr(settings, name)}, expected positive")
    for name in ("momentum", "ema"):
        if not 0 <= getattr(settings, name) < 1:
            raise InvalidSettings(f"{name} is {getattr(settings, name)}, expected 0 to below 1")
    if not 0 <= settings.penalty < float("inf"):
        raise InvalidSettings(f"penalty is {settings.penalty}, expected 0 or more")
    if settings.loss not in LOSSES:
        raise InvalidSettings(f"loss is '{settings.loss}', expected one of {', '.join(LOSSES)}")
