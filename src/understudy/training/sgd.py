"""Stochastic gradient descent on networks that are pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad

from understudy.nets.params import Network, Params

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
) -> Params:
    """Train `params` on normalised images; the order of batches and the augmentation are public."""
    velocity: Params = {}
    gradient = grad(lambda p, x, y: mean_loss(network, p, x, y))
    for epoch in range(sgd.epochs):
        lr = sgd.lr * (0.1 if sgd.drop_at is not None and epoch >= sgd.drop_at else 1.0)
        order = (
            torch.randperm(len(images), generator=generator).to(images.device)
            if len(images) > sgd.batch
            else torch.arange(len(images), device=images.device)
        )
        for chosen in torch.split(order, sgd.batch):
            batch = images[chosen] if augment is None else augment(images[chosen], generator)
            step = gradient(params, batch, labels[chosen])
            if sgd.weight_decay:
                step = {name: step[name] + sgd.weight_decay * params[name] for name in params}
            if sgd.momentum:
                velocity = {
                    name: step[name] + sgd.momentum * velocity[name] if velocity else step[name]
                    for name in params
                }
                step = velocity
            params = {name: params[name] - lr * step[name] for name in params}
    return params
