"""What Rehearsal practises with: lenses, steps of the refiner and of pixels, the teacher.

A lens is a network that was never trained. All steps are post-processing; `TeacherLoss` and a
lens's look at a record run behind the door.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.methods.class_gaussians import clipped
from understudy.methods.fitting import class_means, unbiased_gap
from understudy.nets.convnet import ConvNet
from understudy.nets.params import Params, per_channel
from understudy.nets.rehearsed import RehearsedGenerator
from understudy.seeds import public_generator
from understudy.training.adam import Adam, AdamState
from understudy.training.siamese import Siamese, changed

ADAM = Adam(betas=(0.9, 0.99))
AT_ONCE = 500
"""Samples that are looked at, or drawn, at a time."""
CENTRE, REACH = "centre", "reach"
NEAREST = 0.2
"""How far features of records may be from samples' at least: these may not vary at all."""
STEADY = 0.1
"""Added to standard deviations before a division, as a share of their mean."""
FLATTER = 0.3
"""The same, of variances of components."""
MORE, PASSES = 10, 4
"""Components that are followed but not kept, and how often, when the largest are looked for."""
WARM_STEPS, WARM_LR, MOMENTUM = 200, 20.0, 0.9


@dataclass(frozen=True)
class Lens:
    """What an untrained network sees in images: features of norm 1."""

    network: ConvNet
    mean: tuple[float, ...]
    std: tuple[float, ...]
    changes: Siamese | None = None
    """How images may be changed before a network sees them, all in the same way."""

    def drawn(self, seed: int, number: int) -> Params:
        """Draw the weights of a network, and a change of what it sees, if there is to be one."""
        weights = self.network.init(public_generator(seed, "network", number))
        if self.changes is None:
            return weights
        generator = public_generator(seed, "change", number)
        return weights | self.changes.draw(self.network.shape, generator)

    def __call__(self, weights: Params, images: Tensor) -> Tensor:
        """Map images (n, c, h, w) in [0, 1] to features (n, d)."""
        normalised = (images - per_channel(self.mean, images)) / per_channel(self.std, images)
        prepared = self.network.prepare(changed(normalised, weights))
        found = self.network.features(weights, prepared)
        return F.normalize(found.to(images.dtype), dim=1)


@dataclass(frozen=True)
class Beyond:
    """What a lens sees in a record and not in samples of its class; runs behind the door."""

    lens: Lens

    @torch.no_grad()
    def found(self, weights: Params, images: Tensor, labels: Tensor, *, classes: int) -> Params:
        """Look at samples through a network; classes have equally many.

        Returns:
            The weights with CENTRE, mean features of samples of each class (classes, d), and REACH,
            how far features may be from there (): half of the samples are nearer.
        """
        seen = torch.cat([self.lens(weights, part) for part in torch.split(images, AT_ONCE)])
        centre = classes * class_means(seen, labels, classes)
        spread = (seen - centre[labels]).norm(dim=1).median()
        return weights | {CENTRE: centre, REACH: spread.clamp(min=NEAREST)}

    def __call__(self, image: Tensor, label: Tensor, known: Params) -> list[Tensor]:
        """Return how a record differs from its class's centre, as a share of the reach: (d,)."""
        differs = self.lens(known, image[None])[0] - known[CENTRE][label]
        return [clipped(differs / known[REACH], 1.0)]


def as_such(known: Params) -> Params:
    """Return what asks for features themselves, whose norm is 1, whatever samples look like."""
    nothing, whole = torch.zeros_like(known[CENTRE]), torch.ones_like(known[REACH])
    return known | {CENTRE: nothing, REACH: whole}


def records_means(known: Params, sums: Tensor, sizes: Tensor) -> Tensor:
    """Return class means of records' features, from noisy sums of what they differ by."""
    return known[CENTRE] + known[REACH] * sums / sizes[:, None]


class Sight(NamedTuple):
    """A lens's weights, and what it should see: the mean features of each class."""

    weights: Params
    target: Tensor


State = tuple[Params, AdamState]
"""What is moved, and what Adam remembers."""


@dataclass(frozen=True)
class RefineStep:
    """One step of the refiner towards what a lens should see; equal steps are compiled once."""

    network: RehearsedGenerator
    lens: Lens
    adam: Adam = ADAM

    def __call__(
        self, state: State, drawn: tuple[Tensor, Tensor], fixed: Params, sight: Sight, lr: Tensor
    ) -> State:
        """Move the refiner, by samples of drawn codes and labels, as if there were endlessly many.

        The rest of the generator is fixed.
        """
        (params, memory), (codes, labels) = state, drawn
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        seen = self.lens(sight.weights, self.network(fixed | leaves, codes, labels))
        shares = torch.full_like(sight.target[:, 0], 1 / len(sight.target))
        gap = unbiased_gap(seen, labels, shares[:, None] * sight.target, shares)
        slopes = torch.autograd.grad(gap, list(leaves.values()))
        return self.adam.step(params, dict(zip(leaves, slopes, strict=True)), memory, lr)


@dataclass(frozen=True)
class MatchStep:
    """One step of the pixels of a small set towards what a lens should see."""

    lens: Lens
    adam: Adam = ADAM

    def __call__(self, state: State, labels: Tensor, sight: Sight, lr: Tensor) -> State:
        """Move the images, within black and white; classes have equally many."""
        params, memory = state
        images = params["images"].detach().requires_grad_()
        classes = len(sight.target)
        means = classes * class_means(self.lens(sight.weights, images), labels, classes)
        gap = (means - sight.target).square().sum()
        (slope,) = torch.autograd.grad(gap, [images])
        moved, memory = self.adam.step(params, {"images": slope}, memory, lr)
        return {"images": moved["images"].clamp(0, 1)}, memory


def falling(rate: float, step: int, steps: int) -> float:
    """Return a learning rate that falls to zero along a cosine.

    >>> [round(falling(1.0, step, 4), 2) for step in range(4)]
    [1.0, 0.85, 0.5, 0.15]
    """
    return rate * (1 + math.cos(math.pi * step / steps)) / 2


@dataclass(frozen=True)
class TeacherLoss:
    """The loss of one record, as the teacher sees it; runs behind the door."""

    def __call__(self, params: Params, seen: Tensor, label: Tensor) -> Tensor:
        """Return the loss of what a view shows of a record (dimension + 1,)."""
        return F.cross_entropy(F.linear(seen, params["weight"])[None], label[None])


class Teaching(NamedTuple):
    """A teacher on its way: weights, their velocity, and the mean of the later weights."""

    weight: Tensor
    velocity: Tensor
    average: Tensor

    def ahead(self, lr: float) -> Tensor:
        """Return where momentum alone would lead: gradients are asked for there."""
        return self.weight - lr * MOMENTUM * self.velocity

    def after(self, slope: Tensor, lr: float, later: int) -> Teaching:
        """Return the next state; this is the `later`-th of the steps that are averaged, from 0."""
        velocity = MOMENTUM * self.velocity + slope
        weight = self.weight - lr * velocity
        average = self.average + (weight - self.average) / (max(0, later) + 1)
        return Teaching(weight, velocity, average)


def warm_start(seen: Tensor, labels: Tensor, classes: int) -> Teaching:
    """Teach the teacher the classes of generated images, as it sees them (n, dimension + 1)."""
    wanted = F.one_hot(labels, classes).to(seen.dtype)
    nothing = seen.new_zeros(classes, seen.shape[1])
    state = Teaching(nothing, nothing, nothing)
    for _ in range(WARM_STEPS):
        wrong = F.linear(seen, state.ahead(WARM_LR)).softmax(1) - wanted
        state = state.after(wrong.T @ seen / len(seen), WARM_LR, 0)
    return Teaching(state.weight, nothing, state.weight)


def whitening(described: Tensor, dimension: int, generator: torch.Generator) -> Params:
    """Return `project` (dimension, d) and `offset`: to the main components, nearly of variance 1.

    Args:
        described: generated images, as the scattering transform describes them (n, d).
        dimension: how many components.
        generator: where their search starts; public.
    """
    mean, std = described.mean(0), described.std(0)
    std = std + STEADY * std.mean()
    centred = (described - mean) / std
    wanted = min(dimension + MORE, described.shape[1])
    drawn = torch.randn((described.shape[1], wanted), generator=generator)
    directions = drawn.to(described.device)
    for _ in range(PASSES):
        directions = torch.linalg.qr(centred.T @ (centred @ directions)).Q
    inner = centred @ directions
    variances, turned = torch.linalg.eigh(inner.T @ inner / len(inner))
    variances, main = variances[-dimension:], (directions @ turned)[:, -dimension:]
    scale = (variances + FLATTER * variances.mean()).sqrt()
    project = (main / scale).T / std
    return {"project": project, "offset": project @ mean}
