"""A witness stands between a method and its curator, and sees how much canaries show.

It passes every request on to the real curator, but for records that are canaries it puts a function
of its own in the place of the method's: one that makes as much of them as the bound allows, each in
a coordinate of its own. The guarantee holds whatever functions a method hands over, so it must hold
for these, and they are the worst there are. What the method gets is what it asked for; what the
witness keeps are the noisy coordinates of the canaries. All are released answers: no part of the
privacy code knows of it, and nothing of a record comes out that did not come out before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.audit.canaries import number_of
from understudy.nets.params import Params
from understudy.privacy.curator import Curator
from understudy.privacy.ensemble import Ensemble, Learn
from understudy.privacy.gradients import Loss
from understudy.privacy.plan import Block, Plan, joint_bound
from understudy.privacy.records import View
from understudy.privacy.releases.batch_gradient import BatchLoss
from understudy.privacy.releases.class_sums import Embedding
from understudy.privacy.releases.sample_gradient import SampleLoss

OWN = "canaries"
LARGE = 1e6
"""What a canary would contribute if nothing bounded it."""
ADDED = (0.0, 1.0)
"""What a canary's coordinate holds without it and with it, in sensitivities, if it is sampled."""
REPLACED = (-0.5, 0.5)
EXTRA = {"gradient": 1, "batch_gradient": 1, "votes": 2, "sample_gradient": 2}
"""Coordinates per canary beyond the method's own, at most, by kind of release."""


def with_room(plan: Plan, canaries: int, pixels: int) -> Plan:
    """Return `plan` with room for the canaries' coordinates; they are charged for as all are."""
    return Plan(
        tuple(
            replace(line, dimension=line.dimension + EXTRA[line.kind] * canaries + pixels)
            if line.kind in EXTRA
            else line
            for line in plan
        )
    )


@dataclass(frozen=True, eq=False)
class Observation:
    """One release, as far as it shows canaries: a noisy number for each, in sensitivities."""

    values: NDArray[np.float64]
    rate: float
    noise: float
    """Standard deviation that the values should have."""
    means: tuple[float, float] = ADDED

    def evidence(self) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of in against out, for each canary: the best test."""
        without, with_it = (self._log_density(mean) for mean in self.means)
        return with_it - without

    def _log_density(self, mean: float) -> NDArray[np.float64]:
        """Return the log-density, up to a part that is the same for all means."""
        lean = (2 * self.values * mean - mean**2) / (2 * self.noise**2)
        if self.rate == 1:
            return lean
        return np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + lean)


class Witness:
    """What a method takes for its curator.

    Args:
        curator: the real one; its plan has room for the canaries.
        canaries: how many, in or out.
        others: answers for the records that are no canaries, without noise: an attacker knows them.
        holders: for each canary the member of an ensemble that holds its slot.
    """

    def __init__(
        self,
        curator: Curator,
        canaries: int,
        *,
        others: Curator | None = None,
        holders: NDArray[np.int64] | None = None,
    ) -> None:
        self.curator, self._count = curator, canaries
        self._others, self._holders = others, holders
        self._marks: list[tuple[Tensor, float, float, tuple[float, float]]] = []
        self._turn: list[Tensor] = []
        self._views: dict[View, View] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.curator, name)

    @property
    def seen(self) -> list[Observation]:
        """What each release has shown; fetched only now, so that no release waits for a GPU."""
        return [
            Observation(values.cpu().numpy(), rate, noise, means)
            for values, rate, noise, means in self._marks
        ]

    def evidence(self) -> NDArray[np.float64]:
        """Return the log-likelihood ratio of each canary over all that was released."""
        total: NDArray[np.float64] = sum(
            (one.evidence() for one in self.seen), start=np.zeros(self._count)
        )
        return total

    def gradient(
        self,
        loss: Loss,
        params: Params,
        public: Params | None = None,
        *,
        clip_norm: float,
        release: str = "gradient",
        at_once: int | None = None,
        view: View | None = None,
    ) -> Params:
        """Pass on, with one more parameter for each canary, which only that canary moves."""
        own = torch.zeros(self._count, device=self.curator.engine.device)
        crafted = CanaryLoss(loss, self._count)
        if view:
            crafted = replace(crafted, shape=self._shape(view))
            view = self._views.setdefault(view, View(Numbered(view, self._count)))
        answer = self.curator.gradient(
            crafted, params | {OWN: own}, public,
            clip_norm=clip_norm, release=release, at_once=at_once, view=view,
        )  # fmt: skip
        expected = self.curator.plan[release].sampling_rate * self.curator.facts.units
        self._see(release, answer.pop(OWN) * expected / clip_norm)
        return answer

    def _shape(self, view: View) -> torch.Size:
        """Return the shape of what a view makes of an image."""
        facts, device = self.curator.facts, self.curator.engine.device
        return view.function(torch.zeros(facts.shape, device=device)).shape

    def batch_gradient(
        self,
        loss: BatchLoss,
        params: Params,
        public: Params | None = None,
        *,
        bound: float,
        release: str = "batch_gradient",
    ) -> Params:
        """Pass on; the whole batch turns round for one canary, each in its turn.

        All records share one bound, so several canaries at a time would each show less. What the
        method gets is noise.
        """
        number, own = len(self._turn), torch.zeros(1, device=self.curator.engine.device)
        answer = self.curator.batch_gradient(
            CanaryBatch(number, self._count), params | {OWN: own}, public,
            bound=bound, release=release,
        )  # fmt: skip
        # Bare, a coordinate is -bound without the canary in the batch, and bound with it.
        self._turn.append(answer.pop(OWN) / (2 * bound) + 0.5)
        if len(self._turn) == self._count:
            self._see(release, torch.cat(self._turn))
            self._turn = []
        return answer

    def class_sums(self, embedding: Embedding, *, release: str = "class_sums") -> dict[str, Tensor]:
        """Pass on; a canary's features are all in one place of each block that has enough."""
        classes, blocks = self.curator.facts.classes, embedding.blocks
        numbers = torch.arange(self._count)
        places = {
            block.name: (numbers % classes, numbers // classes) if block.by_class else (numbers,)
            for block in blocks
            if block.sums(classes) * block.dimension >= self._count
        }
        features = CanaryFeatures(embedding, self._count, classes, tuple(places))
        crafted = replace(embedding, function=features)
        answer = self.curator.class_sums(crafted, release=release)
        if not places:
            return answer
        known = self._others.class_sums(embedding, release=release) if self._others else {}
        rate = self.curator.plan[release].sampling_rate
        norm = math.sqrt(sum(block.ratio**-2 for block in blocks if block.name in places))
        values = torch.zeros(self._count, dtype=torch.float64)
        for block in blocks:
            if block.name in places:
                rest = answer[block.name].double()
                if known:
                    rest = rest - rate * known[block.name].double()
                part = rest.cpu()[places[block.name]] / (block.bound * block.ratio)
                values += part / block.ratio / norm**2
        self._see(release, values, spread=joint_bound(blocks) / norm)
        return answer

    def histogram(self, *, release: str = "histogram") -> Tensor:
        """Pass on; canaries show where each has a class of its own."""
        answer = self.curator.histogram(release=release)
        if self.curator.facts.classes >= self._count:
            known = self._others.histogram(release=release) if self._others else 0
            self._see(release, (answer - known)[: self._count])
        return answer

    def ensemble(self, state: Any, *, members: int, answer: int = 0) -> WitnessedEnsemble:
        """Pass on; members that hold a canary's slot find out whether it is in."""
        device = self.curator.engine.device
        numbers = torch.full((members,), -1, device=device)
        if self._holders is not None:
            numbers[torch.from_numpy(self._holders).to(device)] = torch.arange(
                self._count, device=device
            )
        whole = {"own": state, "number": numbers, "seen": torch.zeros(members, device=device)}
        made = WitnessedEnsemble(
            self.curator.ensemble(whole, members=members, answer=answer), self._count
        )
        made.look()
        return made

    def votes(
        self,
        ensemble: WitnessedEnsemble,
        ask: Callable[..., Tensor],
        public: Any = None,
        own: Any = None,
        *,
        dimension: int,
        bound: float,
        is_non_negative: bool = False,
        release: str = "votes",
    ) -> Tensor:
        """Pass on; members with a canary's slot vote for it or against it."""
        extra = self._count * (2 if is_non_negative else 1)
        said = self.curator.votes(
            ensemble.real, CanaryVote(ask, self._count, is_non_negative), public, own,
            dimension=dimension + extra, bound=bound, is_non_negative=is_non_negative,
            release=release,
        )  # fmt: skip
        answer, marks = said[:dimension], said[dimension:]
        if is_non_negative:
            marks = marks[: self._count] - marks[self._count :]
        if ensemble.real.units_each == 1:  # without its unit, a member has no vote
            self._see(release, marks / bound)
        else:
            self._see(release, marks / (2 * bound), means=REPLACED)
        return answer

    def sample_gradient(
        self,
        ensemble: WitnessedEnsemble,
        loss: SampleLoss,
        images: Tensor,
        labels: Tensor,
        *,
        bound: float,
        release: str = "sample_gradient",
    ) -> Tensor:
        """Pass on, with further images whose pixels members with a canary's slot want changed."""
        more = math.ceil(self._count / images[0].numel())
        padded = torch.cat([images, images.new_zeros(more, *images.shape[1:])])
        mean = self.curator.sample_gradient(
            ensemble.real, CanarySampleLoss(loss, len(images)), padded, labels,
            bound=bound, release=release,
        )  # fmt: skip
        asked = self.curator.plan[release].sampling_rate * ensemble.members
        marks = mean[len(images) :].flatten()[: self._count]
        self._see(release, marks * asked / (2 * bound), means=REPLACED)
        return mean[: len(images)]

    def _see(
        self,
        release: str,
        values: Tensor,
        *,
        means: tuple[float, float] = ADDED,
        spread: float = 1.0,
    ) -> None:
        line = self.curator.plan[release]
        noise = self.curator.calibration.noise_multiplier * line.noise_ratio * spread
        self._marks.append((values.double(), line.sampling_rate, noise, means))


@dataclass(frozen=True)
class CanaryLoss:
    """A loss that only canaries' own parameters move for a canary, and none of them else."""

    loss: Loss
    count: int
    shape: torch.Size | None = None
    """Of what a view makes of an image, if the loss sees records through one."""

    def __call__(self, params: Params, image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of one record."""
        rest = {name: tensor for name, tensor in params.items() if name != OWN}
        if self.shape is None:
            number = number_of(image, self.count)
        else:
            number, image = image[: self.count], image[self.count :].view(self.shape)
        own = LARGE * (params[OWN] * number).sum()
        return torch.where(number.sum() > 0, own, self.loss(rest, image, label))


@dataclass(frozen=True, eq=False)
class Numbered:
    """What a view makes of an image, after the number of the canary that it is."""

    view: View
    count: int

    def __call__(self, image: Tensor) -> Tensor:
        """Return both in a row."""
        return torch.cat([number_of(image, self.count), self.view.function(image).flatten()])


@dataclass(frozen=True)
class CanaryBatch:
    """A loss whose slope says whether one canary is in the batch, and nothing else."""

    number: int
    count: int

    def __call__(self, params: Params, images: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Return the loss of a batch."""
        found = torch.func.vmap(lambda image: number_of(image, self.count)[self.number])(images)
        is_there = (found * counts).amax()
        return LARGE * (2 * is_there - 1) * params[OWN].sum()


@dataclass(frozen=True)
class CanaryFeatures:
    """Features of an image; of a canary, one in a place of its own."""

    embedding: Embedding
    count: int
    classes: int
    roomy: tuple[str, ...]
    """Blocks that have a place for each."""

    def __call__(self, image: Tensor, *more: Any) -> list[Tensor]:
        """Return the features of each block."""
        number = number_of(image, self.count)
        found = self.embedding.function(image, *more)
        blocks = zip(found, self.embedding.blocks, strict=True)
        return [
            torch.where(number.sum() > 0, self._mark(number, block).to(of.dtype), of)
            for of, block in blocks
        ]

    def _mark(self, number: Tensor, block: Block) -> Tensor:
        if block.name not in self.roomy:
            return number.new_zeros(block.dimension)
        step = self.classes if block.by_class else 1
        at = (number * torch.arange(self.count, device=number.device)).sum() // step
        return LARGE * (torch.arange(block.dimension, device=number.device) == at)


@dataclass(frozen=True)
class WitnessedEnsemble:
    """What a method takes for its ensemble."""

    real: Ensemble
    count: int

    @property
    def members(self) -> int:
        """How many."""
        return self.real.members

    @property
    def shard(self) -> int:
        """Places in a shard."""
        return self.real.shard

    def learn(self, learn: Learn, positions: Tensor, public: Any = None) -> None:
        """Let every member learn what the method wants it to."""
        self.real.learn(Learning(learn), positions, public)

    def look(self) -> None:
        """Let every member look for its canary, once, in its whole shard."""
        self.real.learn(Looking(self.count), torch.arange(self.shard))


@dataclass(frozen=True)
class Learning:
    """Learn as the method says, and remember the canary."""

    learn: Learn

    def __call__(
        self, state: Any, images: Tensor, labels: Tensor, counts: Tensor, public: Any
    ) -> Any:
        """Return the next state."""
        return state | {"own": self.learn(state["own"], images, labels, counts, public)}


@dataclass(frozen=True)
class Looking:
    """See whether the canary is there."""

    count: int

    def __call__(
        self, state: Any, images: Tensor, labels: Tensor, counts: Tensor, public: Any
    ) -> Any:
        """Return the next state."""
        numbers = torch.func.vmap(lambda image: number_of(image, self.count).sum())(images)
        return state | {"seen": (numbers * counts).amax()}


def _mark_of(state: Any, count: int) -> Tensor:
    """Return a member's vote on its canary, for or against; zeros if it holds none's slot."""
    places = torch.arange(count, device=state["seen"].device)
    mark: Tensor = LARGE * (2 * state["seen"] - 1) * (places == state["number"])
    return mark


@dataclass(frozen=True)
class CanaryVote:
    """A vote on the canary by members that hold its slot, of the others the method's."""

    ask: Callable[..., Tensor]
    count: int
    is_non_negative: bool

    def __call__(self, state: Any, public: Any, *own: Any) -> Tensor:
        """Return a vote, then the marks."""
        vote, mark = self.ask(state["own"], public, *own).flatten(), _mark_of(state, self.count)
        marks = torch.cat([mark.relu(), (-mark).relu()]) if self.is_non_negative else mark
        vote = torch.where(state["number"] >= 0, 0, vote)
        return torch.cat([vote, marks.to(vote.dtype)])


@dataclass(frozen=True)
class CanarySampleLoss:
    """A score whose gradient is the canary's mark in further images, of others the method's."""

    loss: SampleLoss
    images: int

    def __call__(self, state: Any, images: Tensor, labels: Tensor) -> Tensor:
        """Return the score of one member."""
        further = images[self.images :].flatten()
        mark = (_mark_of(state, len(further)) * further).sum()
        score = self.loss(state["own"], images[: self.images], labels)
        return torch.where(state["number"] >= 0, mark.to(score.dtype), score)
