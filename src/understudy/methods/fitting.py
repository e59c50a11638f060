"""Fit a generator to noisy sums of features: the post-processing that mean embeddings share.

The private data are asked once, before the first step. All that happens here is free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from understudy.methods.method import small_or_paper
from understudy.nets.generators import GeneratorNetwork
from understudy.nets.params import Params, moved
from understudy.nets.released import Generator, divided
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Block, Plan, PublicFacts, one_embedding
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam, AdamState

State = tuple[Any, ...]
"""Parameters first, then what the optimiser remembers: tensors, nested."""
Known = Mapping[str, Any]
"""What was released, and what is public: tensors, nested."""
Distance = Callable[[Tensor, Tensor, Any], Tensor]
"""Map generated images, their labels, and what is known, to a loss."""
ADAM = Adam()
DRAWN_AHEAD = 100
"""Steps whose codes are drawn at once."""
GRAIN = "Standard deviation of the noise on pixels of what is drawn."
"""What a setting of that name says of itself."""
SMALLEST_SHARE = 1e-3
"""Of a class, whatever the noise says of its count."""


class Step(Protocol):
    """One step of a generator; a frozen value, so that equal steps are compiled once."""

    @property
    def network(self) -> GeneratorNetwork:
        """What is trained."""

    def start(self, params: Params) -> State:
        """Return the state before the first step."""

    def __call__(
        self, state: State, codes: Tensor, labels: Tensor, known: Known, lr: Tensor
    ) -> State:
        """Move the parameters so that the images they give get nearer to what is known."""


@dataclass(frozen=True)
class DistanceStep:
    """A step of Adam down a distance."""

    network: GeneratorNetwork
    distance: Distance
    adam: Adam = ADAM

    def start(self, params: Params) -> State:
        """Return the state before the first step."""
        return params, self.adam.start(params)

    def __call__(
        self, state: State, codes: Tensor, labels: Tensor, known: Known, lr: Tensor
    ) -> State:
        """Move the parameters so that the distance of the images they give falls."""
        params, moments = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        images = self.network(leaves, codes, labels)
        slopes = torch.autograd.grad(self.distance(images, labels, known), list(leaves.values()))
        return self.adam.step(params, dict(zip(leaves, slopes, strict=True)), moments, lr)


class AdvisedState(NamedTuple):
    """What an advised generator is: made of releases alone."""

    params: Params
    moments: AdamState
    average: Params
    """Moving average of the parameters: what is released."""


@dataclass(frozen=True, kw_only=True)
class AdvisedStep:
    """A step of Adam by the chain rule, from a gradient by images that was released."""

    network: GeneratorNetwork
    lr: float
    ema: float
    """How much of the average stays, each step; less at first."""
    adam: Adam = ADAM

    def start(self, params: Params) -> AdvisedState:
        """Return a generator that has learned nothing."""
        return AdvisedState(params, self.adam.start(params), copied(params))

    def __call__(
        self, state: AdvisedState, codes: Tensor, labels: Tensor, advice: Tensor
    ) -> AdvisedState:
        """Move the parameters so that the images of these codes go against `advice`."""
        leaves = {name: weight.detach().requires_grad_() for name, weight in state.params.items()}
        images = self.network(leaves, codes, labels)
        slopes = torch.autograd.grad(images, list(leaves.values()), advice)
        by_name = dict(zip(leaves, slopes, strict=True))
        lr = torch.full((), self.lr, device=codes.device)
        params, moments = self.adam.step(state.params, by_name, state.moments, lr)
        kept = (1 - 1 / moments.steps).clamp(max=self.ema)
        average = {n: torch.lerp(params[n], old, kept) for n, old in state.average.items()}
        return AdvisedState(params, moments, average)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long to train, and how fast."""

    steps: int
    batch: int
    lr: float
    decay: float = 1.0
    """What the learning rate is multiplied by after each fifth of the steps."""

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step.

        >>> [round(Schedule(steps=10, batch=1, lr=1, decay=0.9).lr_at(s), 2) for s in (0, 2, 9)]
        [1.0, 0.9, 0.66]
        """
        return self.lr * self.decay ** (5 * step // self.steps)


@dataclass(frozen=True)
class Selection:
    """Which of the generators on the way to keep: the one with the lowest score."""

    every: int
    """Steps from one look to the next."""
    score: Callable[[Params], Tensor]
    """By released statistics alone."""


@dataclass(frozen=True, kw_only=True)
class GeneratorFit:
    """Train a generator, and draw the set from it.

    Args:
        step: one step.
        schedule: how many, and how large.
        facts: public facts of the data set.
        seed: of initialisation, codes and labels: public.
        shares: of the classes; None for equal parts.
        selection: which generator to keep; None for the last.
    """

    step: Step
    schedule: Schedule
    facts: PublicFacts
    seed: int
    shares: tuple[float, ...] | None = None
    selection: Selection | None = None

    @property
    def class_shares(self) -> Tensor:
        """Return the share of each class (classes,)."""
        classes = self.facts.classes
        return torch.tensor(self.shares or [1 / classes] * classes)

    def run(self, known: Known, curator: Curator, progress: Progress) -> Params:
        """Return trained parameters; goes on from a checkpoint if there is one."""
        schedule, engine, selection = self.schedule, curator.engine, self.selection
        done, state, best, lowest = self._start(curator)
        batches = self._batches(done, engine.device)
        for at in progress.steps(range(done, schedule.steps), spent=curator.epsilon_spent):
            codes, labels = next(batches)
            lr = torch.full((), schedule.lr_at(at), device=engine.device)
            state = engine.run(self.step, state, codes, labels, known, lr)
            if selection and (at + 1) % selection.every == 0:
                score = selection.score(state[0])
                if score < lowest:
                    best, lowest = copied(state[0]), score
            chosen = {"best": best} if selection else {}
            curator.checkpoint(at + 1, {"state": leaves_of(state), "lowest": lowest, **chosen})
        return best if selection and lowest.isfinite() else state[0]

    def _start(self, curator: Curator) -> tuple[int, State, Params, Tensor]:
        """Return steps done, the state, and the best parameters so far with their score."""
        device = curator.engine.device
        drawn = self.step.network.init(public_generator(self.seed, "network"))
        state = self.step.start(moved(drawn, device))
        done, saved = curator.restore()
        if not done:
            return 0, state, copied(state[0]), torch.full((), torch.inf, device=device)
        state = filled(state, cast(Params, saved["state"]))
        best = cast(Params, saved.get("best", {}))
        return done, state, best, cast(Tensor, saved["lowest"])

    def _batches(self, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield codes and labels of each step from `start` on."""
        network, batch = self.step.network, self.schedule.batch
        for block in range(start // DRAWN_AHEAD, -(-self.schedule.steps // DRAWN_AHEAD)):
            generator = public_generator(self.seed, "codes", block)
            codes = network.codes(DRAWN_AHEAD * batch, generator)
            labels = self.labels(DRAWN_AHEAD * batch, generator)
            parts = (torch.split(drawn.to(device), batch) for drawn in (codes, labels))
            for number, pair in enumerate(zip(*parts, strict=True)):
                if block * DRAWN_AHEAD + number >= start:
                    yield pair

    def labels(self, count: int, generator: torch.Generator) -> Tensor:
        """Return labels of generated images: in turn, or by shares in random order."""
        classes = max(1, self.step.network.classes)
        if self.shares is None:
            return torch.arange(count) % classes
        counts = torch.tensor(divided(count, self.shares))
        labels = torch.arange(classes).repeat_interleave(counts)
        return labels[torch.randperm(count, generator=generator)]

    def drawn(self, params: Params, images_per_class: int, *, grain: float = 0.0) -> SyntheticSet:
        """Draw the set, with noise of standard deviation `grain`; keep the generator with it."""
        network, facts = self.step.network, self.facts
        statistics = network.statistics(params, public_generator(self.seed, "statistics"))
        released = Generator(network, params, statistics, self.shares, grain)
        count = images_per_class * facts.classes
        return released.drawn(facts.class_names, count, seed=self.seed)


def leaves_of(state: Any) -> Params:
    """Return the tensors of a nested state by number, as a checkpoint takes them."""
    return {str(number): leaf for number, leaf in enumerate(pytree.tree_leaves(state))}


def filled(like: Any, leaves: Params) -> Any:
    """Return a state of the same structure with tensors from a checkpoint."""
    in_order = [leaves[str(number)] for number in range(len(leaves))]
    return pytree.tree_unflatten(in_order, pytree.tree_structure(like))


class MeanEmbedding(ABC):
    """A method that releases one embedding of the records, and fits a generator to it."""

    public_inputs: Sequence[PublicInput] = ()

    default_preset = staticmethod(small_or_paper)

    def __init__(self, config: Any, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """Of the embedding."""

    def plan(self) -> Plan:
        """One release of all blocks."""
        return one_embedding(self.blocks, self.facts)

    def fit(
        self, step: Step, *, counts: Tensor | None, selection: Selection | None = None
    ) -> GeneratorFit:
        """Return how the generator is fitted; `counts` are noisy numbers of records by class."""
        config = self.config
        return GeneratorFit(
            step=step,
            schedule=Schedule(
                steps=config.steps, batch=config.batch, lr=config.lr, decay=config.decay
            ),
            facts=self.facts,
            seed=self.seed,
            shares=None if counts is None else shares_of(counts),
            selection=selection,
        )


def copied(params: Params) -> Params:
    """Copy parameters: a file of tensors must not hold one twice."""
    return {name: weight.clone() for name, weight in params.items()}


def class_means(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return each class's sum of features (n, d), divided by the number of all: (classes, d)."""
    is_in = torch.arange(classes, device=labels.device)[:, None] == labels
    return is_in.to(features.dtype) @ features / len(features)


def unbiased_gap(features: Tensor, labels: Tensor, target: Tensor, shares: Tensor) -> Tensor:
    """Estimate how far class means of endlessly many images are from `target`, by these few.

    The squared norm of a mean of n features counts the product of each with itself. With these left
    out, images of a class are driven apart as strongly as they are drawn to the private data's.

    Args:
        features: of the images (n, d).
        labels: their classes (n,).
        target: each class's share of the mean over all (classes, d).
        shares: of the classes (classes,).
    """
    count, classes = len(labels), len(target)
    own = features.square().sum(1, keepdim=True)
    sums = class_means(torch.cat([features, own, torch.ones_like(own)], 1), labels, classes)
    parts = sums[:, -1:].clamp(min=1 / count)  # of the batch
    means, own = sums[:, :-2] / parts, (sums[:, -2:-1] / parts)[:, 0]
    counts = count * parts[:, 0]
    # A class with a single image has no products of different ones.
    products = (counts * means.square().sum(1) - own) / (counts - 1).clamp(min=1)
    nearness = (means * target).sum(1)
    return (shares.square() * products - 2 * shares * nearness + target.square().sum(1)).sum()


def shares_of(counts: Tensor) -> tuple[float, ...]:
    """Turn noisy counts of classes into shares, none of them zero.

    >>> [round(share, 3) for share in shares_of(torch.tensor([[30.0], [10.0], [-2.0]]))]
    [0.749, 0.25, 0.001]
    """
    counts = counts.flatten().double().clamp(min=0)
    shares = (counts / counts.sum().clamp(min=1e-9)).clamp(min=SMALLEST_SHARE)
    return tuple((shares / shares.sum()).tolist())
