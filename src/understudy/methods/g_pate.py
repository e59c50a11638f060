"""G-PATE (Long, Wang, Yang, Kailkhura, Zhang, Gunter, Li; NeurIPS 2021): votes on projections.

As in DataLens, discriminators say how generated images should change. Their gradients are projected
to a few random directions and sorted into bins; of each projection, the bin that most teachers
chose is what the generator follows, if enough of them did.

Private access: one `votes` release per round: the noisy counts of all bins of all projections.
Deviations: see docs/methods/g-pate.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from understudy.methods.datalens import scaled
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    setting,
)
from understudy.methods.teachers import (
    Classroom,
    Critic,
    Shown,
    TaughtGenerator,
    TeachersConfig,
    remembering,
)
from understudy.privacy.plan import PublicFacts
from understudy.privacy.releases.votes import Placed
from understudy.seeds import public_generator


@dataclass(frozen=True, kw_only=True)
class GPATEConfig(TeachersConfig):
    """Settings of G-PATE."""

    projections: int = setting(10, "Random directions that gradients are projected to.")
    bins: int = setting(10, "Bins that a projection is sorted into.")
    clip: float = setting(1e-4, "Projection that the last bin ends at; 0: each image's largest.")
    threshold: float = setting(0.5, "Share of teachers that a bin must reach to count.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "projections", "bins")
        check_not_negative(self, "threshold", "clip")


def _paper(_: PublicFacts, epsilon: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return the authors' teachers and batches; rounds as worst-case accounting affords them."""
    if epsilon >= 5:
        return {"teachers": 2000, "batch": 30, "steps": 100}
    return {"steps": 250}


def _best(facts: PublicFacts, epsilon: float, __: Mapping[str, Any]) -> dict[str, Any]:
    settings = remembering(facts, pictures=20 if epsilon >= 5 else 5)
    more = {"steps": 150, "lr": 0.2, "projections": 20, "clip": 0.0, "threshold": 0.0}
    return settings | more


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "images_per_class": 200, "teachers": max(1, facts.units // 10), "steps": 100, "batch": 10,
        "threshold": 0.2, "width": 8, "hidden": 32, "clip": 0.0,
    }  # fmt: skip


def in_bins(values: Tensor, bins: int) -> Tensor:
    """Mark the bin of each value in [-1, 1].

    >>> in_bins(torch.tensor([-1.0, -0.2, 1.0]), 4).tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    """
    places = ((values + 1) / 2 * bins).long().clamp(0, bins - 1)
    return (places[..., None] == torch.arange(bins, device=values.device)).to(values.dtype)


def chosen(counts: Tensor, least: float) -> Tensor:
    """Return the middle of the fullest bin (of the last dimension), 0 where none is full enough.

    >>> chosen(torch.tensor([[1.0, 5.0, 0.0, 2.0], [1.0, 2.0, 2.5, 1.0]]), 3.0).tolist()
    [-0.25, 0.0]
    """
    bins = counts.shape[-1]
    most, place = counts.max(-1)
    middle = (2 * place + 1) / bins - 1
    return torch.where(most >= least, middle.to(counts.dtype), 0)


@dataclass(frozen=True)
class BinVote:
    """What a teacher says: the bin of each projection of its gradient, image by image."""

    critic: Critic
    bins: int
    clip: float

    def __call__(self, state: Any, public: tuple[Shown, Tensor], turn: Tensor) -> Tensor | Placed:
        """Return a one in each bin that was hit (n, projections, bins)."""
        shown, projection = public
        wishes = self.critic.wish(state, shown, turn)
        said = in_bins(scaled(wishes.ways @ projection, self.clip), self.bins)
        return wishes.told(said, len(shown.labels))


class GPATE(TaughtGenerator):
    """A generator that follows where most teachers want its images to go."""

    config: GPATEConfig
    config_class: ClassVar[type] = GPATEConfig
    summary: ClassVar[str] = "a generator that follows the most frequent wish of many teachers"
    presets: ClassVar[dict[str, Preset]] = {
        "best": Preset(_best, "MNIST and Fashion-MNIST, by their training images"),
        "paper": Preset(_paper, "MNIST, by the paper's authors, including its test set"),
        "small": Preset(_small, "nothing: a quick trial on few records"),
    }

    @property
    def dimension(self) -> int:
        """Bins of all projections of all images of a round."""
        return self.config.batch * self.config.projections * self.config.bins

    def rounds(self, room: Classroom) -> Callable[[Shown, int], None]:
        """Let teachers count into bins; follow the fullest of each projection."""
        return partial(self._round, room)

    def _round(self, room: Classroom, shown: Shown, at: int) -> None:
        config = self.config
        shape = (self.pixels, config.projections)
        drawn = torch.randn(shape, generator=public_generator(self.seed, "projection", at))
        projection = (drawn / math.sqrt(config.projections)).to(room.device)
        counts = room.curator.votes(
            room.members,
            BinVote(self.critic, config.bins, config.clip),
            (shown, projection),
            room.turns(at),
            dimension=self.dimension,
            bound=math.sqrt(self.critic.voices(config.batch) * config.projections),
            is_non_negative=True,
        )
        least = config.threshold * config.teachers
        wished = chosen(counts.view(config.batch, config.projections, config.bins), least)
        room.follow(shown, wished.to(projection.dtype) @ projection.T, at)
