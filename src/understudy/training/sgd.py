"""Stochastic gradient descent on networks that are pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.params import Network, Params, per_channel
from understudy.training.augmentation import Augment
from understudy.training.engine import Engine
from understudy.training.siamese import changed

Epochs = Callable[[range], Iterator[int]]
MOST_REPEATED = 100
"""Equal steps that become one program: more would make it large, and show no progress."""
AHEAD = 64
"""Steps whose chances are drawn, and sent to the device, together."""


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Settings of a training loop."""

    lr: float
    epochs: int
    batch: int = 256
    momentum: float = 0.0
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    drop_at: tuple[int, ...] = ()
    """Epochs from which on the learning rate is `drop` times what it was."""
    drop: float = 0.1
    peak_at: int | None = None
    """Epoch at which the learning rate is `lr`; it rises from zero and falls to zero, linearly."""

    def lr_at(self, epoch: float) -> float:
        """Return the learning rate at a moment, counted in epochs.

        >>> [round(SGD(lr=1, epochs=4, drop_at=(2,)).lr_at(e), 3) for e in (0, 1.5, 2, 3)]
        [1.0, 1.0, 0.1, 0.1]
        >>> [round(SGD(lr=1, epochs=4, peak_at=1).lr_at(e), 3) for e in (0, 0.5, 1, 2.5)]
        [0.0, 0.5, 1.0, 0.5]
        """
        if self.peak_at is not None:
            falling = (self.epochs - epoch) / (self.epochs - self.peak_at)
            return self.lr * min(epoch / self.peak_at, falling)
        return self.lr * self.drop ** sum(epoch >= moment for moment in self.drop_at)


State = tuple[Params, Params]
"""Parameters and their velocities."""


@dataclass(frozen=True)
class SGDStep:
    """One step; a frozen value, so that equal steps are compiled once."""

    network: Network
    momentum: float = 0.0
    weight_decay: float = 0.0
    label_smoothing: float = 0.0

    def __call__(self, state: State, prepared: Any, labels: Tensor, lr: Tensor) -> State:
        """Move parameters down the gradient of the mean loss of prepared images."""
        params, velocity = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        logits = self.network.logits(leaves, prepared)
        loss = F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        moved, pushed = {}, {}
        for (name, weight), slope in zip(params.items(), slopes, strict=True):
            push = slope + self.weight_decay * weight if self.weight_decay else slope
            if self.momentum:
                push = pushed[name] = self.momentum * velocity[name] + push
            moved[name] = weight - lr * push
        return moved, pushed


@dataclass(frozen=True)
class BatchStep:
    """A step on some of the images, which are picked, changed and prepared on the way."""

    step: SGDStep
    shape: tuple[int, ...]
    """Of an image."""
    augment: Augment | None = None

    def __call__(  # noqa: PLR0917
        self,
        state: State,
        pixels: Tensor,
        labels: Tensor,
        picked: Tensor,
        drawn: Params,
        lr: Tensor,
    ) -> State:
        """Move parameters down the gradient on the picked rows of `pixels` (n, c * h * w)."""
        images = pixels[picked].view(-1, *self.shape)
        if self.augment is not None:
            images = self.augment(images, drawn)
        return self.step(state, self.step.network.prepare(images), labels[picked], lr)


@dataclass(frozen=True)
class RecordLoss:
    """The classification loss of one private record; runs behind the door."""

    network: Network
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, theta: Params, image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of `image`, pixels in [0, 1], under the network's parameters.

        A drawn change of images, if there is one among `theta`, is applied first.
        """
        normalised = (image - per_channel(self.mean, image)) / per_channel(self.std, image)
        return F.cross_entropy(self.network(theta, changed(normalised[None], theta)), label[None])


@dataclass(frozen=True)
class Prepared:
    """What a network makes of one private record without its parameters; runs behind the door."""

    network: Network
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Tensor) -> Tensor:
        """Prepare `image` (c, h, w), pixels in [0, 1]."""
        normalised = (image - per_channel(self.mean, image)) / per_channel(self.std, image)
        prepared: Tensor = self.network.prepare(normalised[None])
        return prepared[0]


@dataclass(frozen=True)
class SeenLoss:
    """The classification loss of one private record that was prepared; runs behind the door."""

    network: Network

    def __call__(self, theta: Params, seen: Tensor, label: Tensor) -> Tensor:
        """Return the loss of what was made of a record, under the network's parameters."""
        return F.cross_entropy(self.network.logits(theta, seen[None]), label[None])


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
    epochs: Epochs = iter,
) -> Params:
    """Train `params` on normalised images; the order of batches and the augmentation are public.

    Args:
        network: the network.
        params: where to start.
        images: normalised images.
        labels: their classes (n,), or probabilities of classes (n, classes).
        sgd: how to train.
        generator: of batches and augmentation.
        augment: changes each batch.
        engine: where to compute.
        epochs: iterates over a range of epochs, to show how far the training is.
    """
    engine = engine or Engine()
    state = (params, {n: torch.zeros_like(w) for n, w in params.items()} if sgd.momentum else {})
    step = SGDStep(network, sgd.momentum, sgd.weight_decay, sgd.label_smoothing)
    is_one_step = augment is None and len(images) <= sgd.batch and sgd.peak_at is None
    if is_one_step and sgd.epochs <= MOST_REPEATED:  # each epoch is the same step
        prepared = network.prepare(images)
        for speed, equal in groupby(range(sgd.epochs), sgd.lr_at):
            lr = torch.full((), speed, device=images.device)  # torch.tensor would wait for a GPU
            state = engine.run(step, state, prepared, labels, lr, times=len(list(equal)))
        return state[0]
    speed, lr = -1.0, torch.zeros((), device=images.device)
    each = BatchStep(step, tuple(images.shape[1:]), augment)
    pixels = images.flatten(1)
    picks = _picks(images, augment, sgd, generator)
    for _ in epochs(range(sgd.epochs)):
        for when, picked, drawn in islice(picks, -(-len(images) // sgd.batch)):
            if (now := sgd.lr_at(when)) != speed:
                speed, lr = now, torch.full((), now, device=images.device)
            state = engine.run(each, state, pixels, labels, picked, drawn, lr)
    return state[0]


Pick = tuple[float, Tensor, Params]
"""When a step is, in epochs; which images it takes; what was drawn of their augmentation."""


def _picks(
    images: Tensor, augment: Augment | None, sgd: SGD, generator: torch.Generator
) -> Iterator[Pick]:
    """Yield what each step needs of chance."""
    ahead: list[Pick] = []
    for epoch in range(sgd.epochs):
        batches = _batches(len(images), sgd.batch, generator)
        for number, picked in enumerate(batches):
            shape = (len(picked), *images.shape[1:])
            drawn = augment.draw(shape, generator) if augment is not None else {}
            ahead.append((epoch + number / len(batches), picked, drawn))
            if len(ahead) == AHEAD:
                yield from _sent(ahead, images.device)
                ahead = []
    yield from _sent(ahead, images.device)


def _sent(picks: Sequence[Pick], device: torch.device) -> Iterator[Pick]:
    """Send what many steps need to a device, as one tensor of each kind: a transfer waits."""
    columns = []
    for parts in zip(*((picked, *drawn.values()) for _, picked, drawn in picks), strict=True):
        sent = torch.cat([part.flatten() for part in parts]).to(device)
        pieces = torch.split(sent, [part.numel() for part in parts])
        columns.append([piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)])
    for (when, _, drawn), (picked, *values) in zip(picks, zip(*columns, strict=True), strict=True):
        yield when, picked, dict(zip(drawn, values, strict=True))


def _batches(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    if count <= size:
        return (torch.arange(count),)
    return torch.split(torch.randperm(count, generator=generator), size)
