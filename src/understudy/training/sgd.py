"""Stochastic gradient descent on networks that are pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.params import Network, Params
from understudy.training.engine import Engine

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Settings of a training loop."""

    lr: float
    epochs: int
    batch: int = 256
    momentum: float = 0.0
    weight_decay: float = 0.0
    drop_at: int | None = None
    """Epoch from which the learning rate is a tenth."""


State = tuple[Params, Params]
"""Parameters and their velocities."""


@dataclass(frozen=True)
class SGDStep:
    """One step; a frozen value, so that equal steps are compiled once."""

    network: Network
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __call__(self, state: State, prepared: Any, labels: Tensor, lr: Tensor) -> State:
        """Move parameters down the gradient of the mean loss of prepared images."""
        params, velocity = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        loss = F.cross_entropy(self.network.logits(leaves, prepared), labels)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        moved, pushed = {}, {}
        for (name, weight), slope in zip(params.items(), slopes, strict=True):
            push = slope + self.weight_decay * weight if self.weight_decay else slope
            if self.momentum:
                push = pushed[name] = self.momentum * velocity[name] + push
            moved[name] = weight - lr * push
        return moved, pushed


def mean_loss(network: Network, params: Params, images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of normalised `images`."""
    return F.cross_entropy(network(params, images), labels)


def fit(
    network: Network,
    params: Params,
    images: Tensor,
    labels: Tensor,
    *,
    sgd: SGD,
    generator: torch.Generator,
    augment: Augment | None = None,
    engine: Engine | None = None,
) -> Params:
    """Train `params` on normalised images; the order of batches and the augmentation are public."""
    engine = engine or Engine()
    state = (params, {n: torch.zeros_like(w) for n, w in params.items()} if sgd.momentum else {})
    drop_at = sgd.epochs if sgd.drop_at is None else min(sgd.drop_at, sgd.epochs)
    step = SGDStep(network, sgd.momentum, sgd.weight_decay)
    for speed, epochs in ((sgd.lr, drop_at), (0.1 * sgd.lr, sgd.epochs - drop_at)):
        lr = torch.full((), speed, device=images.device)  # torch.tensor would wait for a GPU
        if augment is None and len(images) <= sgd.batch and epochs:  # each epoch is the same step
            state = engine.run(step, state, network.prepare(images), labels, lr, times=epochs)
            continue
        for _ in range(epochs):
            for chosen in _batches(len(images), sgd.batch, generator):
                place = chosen.to(images.device)
                batch = images[place] if augment is None else augment(images[place], generator)
                state = engine.run(step, state, network.prepare(batch), labels[place], lr)
    return state[0]


def _batches(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    if count <= size:
        return (torch.arange(count),)
    return torch.split(torch.randperm(count, generator=generator), size)
