"""DataLens (Wang, Wu, Long, Rimanic, Zhang, Li; CCS 2021): teachers vote on how images should move.

Thousands of discriminators each see a few private records of their own. A generator shows all of
them the same images, and each says, by the signs of the k largest entries of its gradient, how the
images should change. The noisy sum of these votes (TopAgg), cut at a threshold, is the direction
that the generator follows.

Private access: one `votes` release per round, of all images of the round together.
Deviations: see docs/methods/datalens.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.method import (
    Preset,
    check_not_negative,
    setting,
)
from understudy.methods.teachers import (
    SEEN,
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

SKETCH_ROWS = 5
SKETCH_SHARE = 0.2
"""Columns of a sketch, as a share of the pixels."""
LEVELS = 4


@dataclass(frozen=True, kw_only=True)
class DataLensConfig(TeachersConfig):
    """Settings of DataLens; the letters are the paper's."""

    compression: str = setting(
        "signs", "How gradients become votes: signs (TopAgg), levels (D2P-Fed), sketch (FetchSGD)."
    )
    top: int = setting(200, "Entries of an image's gradient that a teacher votes on (k); 0: all.")
    clip: float = setting(1e-5, "Gradient at which a vote is certain (c); 0: each image's largest.")
    threshold: float = setting(
        0.7, "Share of teachers that votes must reach to count (beta); 0: follow their sum."
    )
    stochastic: bool = setting(True, "Vote by chance, in proportion to the gradient.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "top", "clip")
        if self.compression not in COMPRESSIONS:
            raise InvalidSettings(
                f"compression is '{self.compression}', expected one of {', '.join(COMPRESSIONS)}"
            )
        if not 0 <= self.threshold < 1:
            raise InvalidSettings(f"threshold is {self.threshold:g}, expected 0 to below 1")


def _paper(_: PublicFacts, epsilon: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for MNIST, as many rounds as exact accounting affords at their noise."""
    if epsilon >= 5:
        return {"top": 300, "threshold": 0.2, "steps": 142}
    return {"steps": 149}


def _fashion(_: PublicFacts, epsilon: float, __: Mapping[str, Any]) -> dict[str, Any]:
    if epsilon >= 5:
        return {"top": 350, "threshold": 0.27, "steps": 190}
    return {"threshold": 0.9, "steps": 149}


def _best(facts: PublicFacts, epsilon: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return teachers that remember, and no chance in their signs: it is noise of their own."""
    top = max(1, 3 * math.prod(facts.shape) // 8)
    return remembering(facts, pictures=20 if epsilon >= 5 else 5) | {
        "steps": 20, "lr": 0.5, "top": top, "clip": 0.0, "threshold": 0.0, "stochastic": False,
        "grain": 0.2,
    }  # fmt: skip


def _small(facts: PublicFacts, epsilon: float, _: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "images_per_class": 200, "teachers": max(1, facts.units // 10), "steps": 100, "batch": 10,
        "top": 20, "threshold": 0.2 if epsilon >= 5 else 0.7, "width": 8, "hidden": 32,
    }  # fmt: skip


class Compression(Protocol):
    """How a teacher's gradient becomes a vote, and the noisy sum of votes a direction."""

    def __call__(self, wishes: Tensor, chance: Tensor) -> Tensor:
        """Map the gradient of each image (n, pixels), and dice of that shape, to a vote (n, d)."""

    @property
    def dimension(self) -> int:
        """Values in the vote on one image."""

    @property
    def bound(self) -> float:
        """L2 norm of the vote on one image, at most."""

    def direction(self, said: Tensor, threshold: float) -> Tensor:
        """Map the noisy sum (n, d) to how images should move (n, pixels).

        Args:
            said: the sum.
            threshold: votes that it takes; 0: take the sum itself.
        """


def scaled(wishes: Tensor, clip: float) -> Tensor:
    """Bring gradients (n, pixels) to [-1, 1]: cut at `clip`, or at each image's largest."""
    limit = wishes.abs().amax(1, keepdim=True).clamp(min=torch.finfo(wishes.dtype).tiny)
    if clip:
        limit = limit.clamp(max=clip)
    return (wishes / limit).clamp(-1, 1)


def passing(said: Tensor, threshold: float) -> Tensor:
    """Return the sign of votes beyond a threshold, zero for the others; all as they are without.

    >>> passing(torch.tensor([-5.0, -1.0, 2.0, 9.0]), 1.5).tolist()
    [-1.0, 0.0, 1.0, 1.0]
    """
    return torch.where(said.abs() > threshold, said.sign(), 0) if threshold else said


@dataclass(frozen=True)
class Signs:
    """TopAgg: the signs of the k largest entries, drawn in proportion to them."""

    pixels: int
    top: int
    clip: float
    stochastic: bool

    def __call__(self, wishes: Tensor, chance: Tensor) -> Tensor:
        """Return -1 or 1 for the largest entries, 0 for the others."""
        values = scaled(wishes, self.clip)
        certain = values.sign() if not self.stochastic else values
        signs = torch.where(chance < (1 + certain) / 2, 1.0, -1.0)
        if self.top == self.pixels:
            return signs
        largest = wishes.abs().topk(self.top, dim=1).indices
        return signs * torch.zeros_like(wishes).scatter(1, largest, 1.0)

    @property
    def dimension(self) -> int:
        """One value per pixel."""
        return self.pixels

    @property
    def bound(self) -> float:
        """Norm of k signs."""
        return math.sqrt(self.top)

    def direction(self, said: Tensor, threshold: float) -> Tensor:
        """Return where enough want the same."""
        return passing(said, threshold)


@dataclass(frozen=True)
class Levels:
    """D2P-Fed in sound form: every entry, rounded by chance to one of a few levels.

    The levels are symmetric about zero: the published ones are not, so that a zero gradient is sent
    as a push towards black.
    """

    pixels: int
    clip: float

    def __call__(self, wishes: Tensor, chance: Tensor) -> Tensor:
        """Return each entry as one of the levels from -1 to 1."""
        places = (scaled(wishes, self.clip) + 1) / 2 * (LEVELS - 1)
        return (places + chance).floor().clamp(max=LEVELS - 1) / (LEVELS - 1) * 2 - 1

    @property
    def dimension(self) -> int:
        """One value per pixel."""
        return self.pixels

    @property
    def bound(self) -> float:
        """Norm of as many ones as there are pixels."""
        return math.sqrt(self.pixels)

    def direction(self, said: Tensor, threshold: float) -> Tensor:
        """Return where enough want the same."""
        return passing(said, threshold)


@dataclass(frozen=True, eq=False)
class Sketch:
    """FetchSGD in sound form: each teacher's own count sketch is bounded; entries are chosen after.

    The published code chooses the largest entries of the sum before noise is added.
    """

    places: Tensor
    """Where in the table, row after row, each pixel is counted (rows, pixels): public."""
    signs: Tensor
    columns: int
    top: int

    def __call__(self, wishes: Tensor, chance: Tensor) -> Tensor:
        """Return the sketch of each image's gradient, scaled to norm 1 (n, rows * columns)."""
        tiny = torch.finfo(wishes.dtype).tiny
        units = wishes / wishes.norm(dim=1, keepdim=True).clamp(min=tiny)
        table = torch.zeros(len(wishes), self.dimension, dtype=wishes.dtype, device=wishes.device)
        places, signs = self.places.to(wishes.device), self.signs.to(wishes.device)
        return table.index_add(1, places.flatten(), (units[:, None] * signs).flatten(1))

    @property
    def dimension(self) -> int:
        """Entries of the table."""
        return len(self.places) * self.columns

    @property
    def bound(self) -> float:
        """Norm of the sketch of a unit vector, on the average; longer ones are scaled down."""
        return math.sqrt(len(self.places))

    def direction(self, said: Tensor, threshold: float) -> Tensor:
        """Estimate each entry by the median of its rows; keep the largest."""
        found = said[:, self.places.to(said.device)] * self.signs.to(said.device)
        estimate = found.median(1).values
        largest = estimate.abs().topk(self.top, dim=1).indices
        return torch.zeros_like(estimate).scatter(1, largest, estimate.gather(1, largest))


COMPRESSIONS = ("signs", "levels", "sketch")


@dataclass(frozen=True)
class Vote:
    """What a teacher says of the images shown."""

    critic: Critic
    compression: Compression

    def __call__(self, state: Any, public: tuple[Shown, Tensor], turn: Tensor) -> Tensor | Placed:
        """Return its compressed gradient. Dice are everyone's, turned by a number of its own."""
        shown, dice = public
        wishes = self.critic.wish(state, shown, turn[0])
        said = self.compression(wishes.ways, (wishes.of(dice) + turn[1]) % 1)
        return wishes.told(said, len(dice))


class DataLens(TaughtGenerator):
    """A generator that follows the noisy votes of many discriminators."""

    config: DataLensConfig
    config_class: ClassVar[type] = DataLensConfig
    summary: ClassVar[str] = "a generator that follows noisy votes of many small discriminators"
    presets: ClassVar[dict[str, Preset]] = {
        "best": Preset(_best, SEEN),
        "paper": Preset(_paper, "MNIST, by the paper's authors, including its test set"),
        "paper-fashion": Preset(_fashion, "Fashion-MNIST, by the authors, including its test set"),
        "small": Preset(_small, "nothing: a quick trial on few records"),
    }

    def __init__(self, config: DataLensConfig, facts: PublicFacts, *, seed: int) -> None:
        super().__init__(config, facts, seed=seed)
        if config.top > self.pixels:
            raise InvalidSettings(f"top is {config.top}, but an image has {self.pixels} pixels")

    @cached_property
    def _compression(self) -> Compression:
        config, pixels = self.config, self.pixels
        top = config.top or pixels
        if config.compression == "signs":
            return Signs(pixels, top, config.clip, config.stochastic)
        if config.compression == "levels":
            return Levels(pixels, config.clip)
        columns = max(1, round(SKETCH_SHARE * pixels))
        generator = public_generator(self.seed, "sketch")
        shape = (SKETCH_ROWS, pixels)
        places = torch.randint(columns, shape, generator=generator)
        places += columns * torch.arange(SKETCH_ROWS)[:, None]
        signs = torch.randint(2, shape, generator=generator) * 2.0 - 1
        return Sketch(places, signs, columns, top)

    @property
    def dimension(self) -> int:
        """Values in the vote on all images of a round."""
        return self.config.batch * self._compression.dimension

    def rounds(self, room: Classroom) -> Callable[[Shown, int], None]:
        """Let teachers vote on each image; follow what enough of them want."""
        return partial(self._round, room)

    def _round(self, room: Classroom, shown: Shown, at: int) -> None:
        config, compression = self.config, self._compression
        generator = public_generator(self.seed, "dice", at)
        dice = torch.rand(config.batch, self.pixels, generator=generator).to(room.device)
        turns = torch.rand(config.teachers, 2, generator=generator).to(room.device)
        said = room.curator.votes(
            room.members,
            Vote(self.critic, compression),
            (shown, dice),
            turns,
            dimension=self.dimension,
            bound=math.sqrt(self.critic.voices(config.batch)) * compression.bound,
        )
        threshold = config.threshold * config.teachers
        room.follow(shown, compression.direction(said.view(config.batch, -1), threshold), at)
