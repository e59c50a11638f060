"""PATE-GAN (Jordon, Yoon, van der Schaar; ICLR 2019): a student learns from the teachers' votes.

Teachers only say whether a generated image looks real. A student discriminator learns from their
noisy count, on generated images alone, and the generator learns from the student, as often as it
likes.

Private access: one `votes` release per round: the noisy counts for all images of the round.
Deviations: see docs/methods/pate-gan.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.canvas import blurred
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
)
from understudy.methods.teachers import (
    ADAM,
    SEEN,
    Classroom,
    RecordsCritic,
    Shown,
    TaughtGenerator,
    TeachersConfig,
    remembering,
    wish,
)
from understudy.nets.critics import DenseCritic, Teacher
from understudy.nets.params import moved
from understudy.privacy.plan import PublicFacts
from understudy.seeds import public_generator

RECALLED = 4
"""Rounds, beside the last, that a student with a memory learns from at each step."""


@dataclass(frozen=True, kw_only=True)
class PATEGANConfig(TeachersConfig):
    """Settings of PATE-GAN."""

    student: str = setting("conv", "The student's network: conv, as the teachers', or dense.")
    student_steps: int = setting(5, "Steps of the student per round.")
    student_lr: float = setting(1e-3, "Learning rate of the student.")
    memory: int = setting(1, "Rounds, the last ones, that the student learns from.")
    generator_steps: int = setting(1, "Steps of the generator per round.")
    spread: float = setting(0.0, "Standard deviation of the noise on images that are shown.")
    smooth: float = setting(0.0, "Blur of that noise and of the generator's steps, in pixels.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "student_steps", "generator_steps", "memory")
        check_positive(self, "student_lr")
        if self.student not in ("conv", "dense"):
            raise InvalidSettings(f"student is '{self.student}', expected conv or dense")
        check_not_negative(self, "spread", "smooth")


def _paper(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {"batch": 64, "steps": 300}


def _best(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of teachers that remember, and few pictures, whatever the budget."""
    return remembering(facts, pictures=5) | {
        "batch": 20 * facts.classes, "steps": 100, "lr": 0.1, "reach": 0.02, "spread": 0.2,
        "smooth": 2.0, "student": "dense", "student_steps": 10, "memory": 20, "generator_steps": 4,
        "grain": 0.2,
    }  # fmt: skip


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "images_per_class": 200, "teachers": max(1, facts.units // 10), "steps": 100, "batch": 40,
        "width": 8, "hidden": 32,
    }  # fmt: skip


class Verdict(Protocol):
    """What a teacher says of the images shown, and what the noisy sum of it means."""

    is_non_negative: ClassVar[bool]

    def __call__(self, state: Any, shown: Shown, turn: Tensor) -> Tensor:
        """Return a value for each image (n,).

        Args:
            state: what the teacher knows.
            shown: the images.
            turn: a public number in [0, 1), (), of its own.
        """

    def bound(self, images: int) -> float:
        """Return the L2 norm of these values, at most."""

    def shares(self, counts: Tensor, teachers: int) -> Tensor:
        """Return how real images look (n,), from 0 to 1, by the noisy sum."""


@dataclass(frozen=True)
class YesOrNo:
    """1/2 for each image that looks real to the teacher's network, -1/2 for each that does not."""

    is_non_negative: ClassVar[bool] = False
    teacher: Teacher

    def __call__(self, state: Any, shown: Shown, turn: Tensor) -> Tensor:
        """Return the verdicts (n,), centred, so that their norm is half of what one can change."""
        return (self.teacher(state[0], shown.images, shown.labels) > 0).float() - 0.5

    def bound(self, images: int) -> float:
        """Return half a vote for each image."""
        return math.sqrt(images) / 2

    def shares(self, counts: Tensor, teachers: int) -> Tensor:
        """Return the share of teachers that say yes."""
        return (0.5 + counts / teachers).clamp(0, 1)


@dataclass(frozen=True)
class Favourites:
    """1 for the image that looks most like a record that the teacher remembers, 0 for others."""

    is_non_negative: ClassVar[bool] = True
    critic: RecordsCritic

    def __call__(self, state: Any, shown: Shown, turn: Tensor) -> Tensor:
        """Return how many of its records choose each image (n,)."""
        place, is_there = self.critic.chosen(state, shown, turn)
        images = torch.arange(len(shown.labels), device=place.device)
        return ((place[:, None] == images) & is_there[:, None]).float().sum(0)

    def bound(self, images: int) -> float:
        """Return one vote for each record; they may all choose the same image."""
        return float(self.critic.records)

    def shares(self, counts: Tensor, teachers: int) -> Tensor:
        """Return 1/2 for an image with its due of votes, 2/3 for one with twice as many."""
        due = teachers * self.critic.records / len(counts)
        odds = counts.clamp(min=0) / due
        return odds / (1 + odds)


class Student:
    """A discriminator that sees generated images alone, and knows of others what teachers say."""

    def __init__(self, method: PATEGAN, room: Classroom) -> None:
        self.config, self.room, self.network = method.config, room, method.student
        self._verdict, self._seed = method.verdict, method.seed
        params = moved(self.network.init(public_generator(method.seed, "student")), room.device)
        room.public["student"] = params, ADAM.start(params)
        past = self.config.memory, self.config.batch
        room.public["past"] = {
            "images": torch.zeros(*past, *method.facts.shape, device=room.device),
            "labels": torch.zeros(past, dtype=torch.long, device=room.device),
            "shares": torch.zeros(past, device=room.device),
        }
        self._lr = torch.full((), method.config.student_lr, device=room.device)

    def __call__(self, shown: Shown, at: int) -> None:
        """Hear what teachers say of the images shown, learn it, and teach the generator."""
        config, room = self.config, self.room
        shown = self._varied(shown, "vary", at)
        counts = room.curator.votes(
            room.members,
            self._verdict,
            shown,
            room.turns(at),
            dimension=config.batch,
            bound=self._verdict.bound(config.batch),
            is_non_negative=self._verdict.is_non_negative,
        )
        shares = self._verdict.shares(counts, config.teachers).float()
        self._remember(shown, shares, at)
        for step in range(config.student_steps):
            self._learn(self._recalled(at, step))
        for step in range(config.generator_steps):
            if step:
                shown = self._varied(room.shown(config.batch, "fresh", at, step), "vary", at, step)
            room.follow(shown, self._wish(shown), at)

    def _varied(self, shown: Shown, *purpose: str | int) -> Shown:
        """Add smooth noise to images: so that the student hears of what is near to them."""
        spread, smooth = self.config.spread, self.config.smooth
        if not spread:
            return shown
        noise = torch.randn(shown.images.shape, generator=public_generator(self._seed, *purpose))
        if smooth:
            noise = blurred(noise, smooth)
            noise = noise / noise.std()
        varied = shown.images + spread * noise.to(self.room.device)
        return shown._replace(images=varied.clamp(0, 1))

    def _remember(self, shown: Shown, shares: Tensor, at: int) -> None:
        """Write a round over the oldest that is remembered."""
        place = torch.tensor([at % self.config.memory], device=self.room.device)
        now = {"images": shown.images, "labels": shown.labels, "shares": shares}
        self.room.public["past"] = {
            name: values.index_copy(0, place, now[name][None])
            for name, values in self._past.items()
        }

    def _recalled(self, at: int, step: int) -> list[int]:
        """Return the places of the last round, and of some of those before."""
        places = [at % self.config.memory]
        if known := min(at, self.config.memory - 1):
            generator = public_generator(self._seed, "recall", at, step)
            before = 1 + torch.randint(known, (RECALLED,), generator=generator)
            places += [(at - int(back)) % self.config.memory for back in before]
        return places

    def _learn(self, places: list[int]) -> None:
        """Make one step towards what teachers said of the images of some rounds."""
        past = {name: values[places].flatten(0, 1) for name, values in self._past.items()}
        params, moments = self.room.public["student"]
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        logits = self.network(leaves, past["images"], past["labels"])
        loss = F.binary_cross_entropy_with_logits(logits, past["shares"])
        slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        self.room.public["student"] = ADAM.step(params, slopes, moments, self._lr)

    def _wish(self, seen: Shown) -> Tensor:
        """Return how images should change to look more real to the student (n, pixels)."""
        ways = wish(self.network, self.room.public["student"][0], seen)
        if not self.config.smooth:
            return ways
        return blurred(ways.view_as(seen.images), self.config.smooth).flatten(1)

    @property
    def _past(self) -> dict[str, Tensor]:
        past: dict[str, Tensor] = self.room.public["past"]
        return past


class PATEGAN(TaughtGenerator):
    """A generator that learns from a student of many teachers."""

    config: PATEGANConfig
    config_class: ClassVar[type] = PATEGANConfig
    summary: ClassVar[str] = "a generator that learns from a student of many teachers' verdicts"
    presets: ClassVar[dict[str, Preset]] = {
        "best": Preset(_best, SEEN),
        "paper": Preset(_paper, "nothing: the paper has no images"),
        "small": Preset(_small, "nothing: a quick trial on few records"),
    }

    @property
    def student(self) -> Teacher | DenseCritic:
        """What learns from the verdicts."""
        if self.config.student == "conv":
            return self.teacher
        return DenseCritic(self.facts.shape, self.facts.classes, self.config.hidden)

    @property
    def verdict(self) -> Verdict:
        """What teachers are asked for."""
        if isinstance(self.critic, RecordsCritic):
            return Favourites(self.critic)
        return YesOrNo(self.teacher)

    @property
    def dimension(self) -> int:
        """One verdict per image."""
        return self.config.batch

    def rounds(self, room: Classroom) -> Callable[[Shown, int], None]:
        """Let a student stand between teachers and generator."""
        return Student(self, room)
