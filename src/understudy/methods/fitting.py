"""Fit a generator to noisy sums of features: the post-processing that mean embeddings share.

The private data are asked once, before the first step. All that happens here is free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from understudy.nets.generators import GeneratorNetwork
from understudy.nets.params import Params, moved
from understudy.nets.released import Generator, divided
from understudy.privacy.curator import Curator
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam, AdamState

Distance = Callable[[Tensor, Tensor, Params], Tensor]
"""Map generated images, their labels, and what was released or is public, to a loss."""
ADAM = Adam()
DRAWN_AHEAD = 100
"""Steps whose codes are drawn at once."""
SMALLEST_SHARE = 1e-3
"""Of a class, whatever the noise says of its count."""


@dataclass(frozen=True)
class FitStep:
    """One step of a generator; a frozen value, so that equal steps are compiled once."""

    network: GeneratorNetwork
    distance: Distance
    adam: Adam = ADAM

    def __call__(
        self,
        state: tuple[Params, AdamState],
        codes: Tensor,
        labels: Tensor,
        known: Params,
        lr: Tensor,
    ) -> tuple[Params, AdamState]:
        """Move the parameters so that the images they give get nearer to what is known."""
        params, moments = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        images = self.network(leaves, codes, labels)
        slopes = torch.autograd.grad(self.distance(images, labels, known), list(leaves.values()))
        return self.adam.step(params, dict(zip(leaves, slopes, strict=True)), moments, lr)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long to train, and how fast."""

    steps: int
    batch: int
    lr: float
    decay: float = 1.0
    """What the learning rate is multiplied by, five times in all but once."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step.

        >>> [round(Schedule(steps=10, batch=1, lr=1, decay=0.9).lr_at(s), 2) for s in (0, 2, 9)]
        [1.0, 0.9, 0.66]
        """
        return self.lr * self.decay ** (5 * step // self.steps)


@dataclass(frozen=True, kw_only=True)
class GeneratorFit:
    """Train a generator, and draw the set from it.

    Args:
        step: one step.
        schedule: how many, and how large.
        facts: public facts of the data set.
        seed: of initialisation, codes and labels: public.
        shares: of the classes; None for equal parts.
    """

    step: FitStep
    schedule: Schedule
    facts: PublicFacts
    seed: int
    shares: tuple[float, ...] | None = None

    def run(self, known: Params, curator: Curator, progress: Progress) -> Params:
        """Return trained parameters; goes on from a checkpoint if there is one."""
        network, schedule, engine = self.step.network, self.schedule, curator.engine
        done, saved = curator.restore()
        if done:
            params, first, second = (
                cast(Params, saved[name]) for name in ("params", "first", "second")
            )
            state = params, AdamState(first, second, cast(Tensor, saved["steps"]))
        else:
            params = moved(network.init(public_generator(self.seed, "network")), engine.device)
            state = params, self.step.adam.start(params)
        batches = self._batches(done, engine.device)
        for at in progress.steps(range(done, schedule.steps), spent=curator.epsilon_spent):
            codes, labels = next(batches)
            lr = torch.full((), schedule.lr_at(at), device=engine.device)
            state = engine.run(self.step, state, codes, labels, known, lr)
            params, moments = state
            curator.checkpoint(at + 1, {"params": params, **moments._asdict()})
        return state[0]

    def _batches(self, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield codes and labels of each step from `start` on."""
        network, batch = self.step.network, self.schedule.batch
        classes = self.facts.classes
        for block in range(start // DRAWN_AHEAD, -(-self.schedule.steps // DRAWN_AHEAD)):
            generator = public_generator(self.seed, "codes", block)
            codes = network.codes(DRAWN_AHEAD * batch, generator).to(device)
            if self.shares is None:  # each class as often as the others, as far as that goes
                labels = torch.arange(DRAWN_AHEAD * batch) % classes
            else:
                counts = torch.tensor(divided(DRAWN_AHEAD * batch, self.shares))
                labels = torch.arange(classes).repeat_interleave(counts)
                labels = labels[torch.randperm(len(labels), generator=generator)]
            parts = (torch.split(drawn, batch) for drawn in (codes, labels.to(device)))
            pairs = zip(*parts, strict=True)
            for number, pair in enumerate(pairs):
                if block * DRAWN_AHEAD + number >= start:
                    yield pair

    def drawn(self, params: Params, images_per_class: int) -> SyntheticSet:
        """Draw the set, and keep the generator with it."""
        network, facts = self.step.network, self.facts
        statistics = network.statistics(params, public_generator(self.seed, "statistics"))
        released = Generator(network, params, statistics, self.shares)
        images, labels = released.sample(images_per_class * facts.classes, seed=self.seed)
        return SyntheticSet(images, labels, facts.class_names, generator=released)


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return each class's sum of features (n, d), divided by the number of all: (classes, d)."""
    is_in = torch.arange(classes, device=labels.device)[:, None] == labels
    return is_in.to(features.dtype) @ features / len(features)


def shares_of(counts: Tensor) -> tuple[float, ...]:
    """Turn noisy counts of classes into shares, none of them zero.

    >>> shares_of(torch.tensor([[30.0], [10.0], [-2.0]]))
    (0.749..., 0.249..., 0.0009...)
    """
    counts = counts.flatten().double().clamp(min=0)
    shares = (counts / counts.sum().clamp(min=1e-9)).clamp(min=SMALLEST_SHARE)
    return tuple((shares / shares.sum()).tolist())
