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
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.methods.method import Preset, check_at_least_one, check_positive, setting
from understudy.methods.teachers import (
    ADAM,
    Classroom,
    Shown,
    TaughtGenerator,
    TeachersConfig,
    wish,
)
from understudy.nets.critics import Teacher
from understudy.nets.params import moved
from understudy.privacy.plan import PublicFacts
from understudy.seeds import public_generator


@dataclass(frozen=True, kw_only=True)
class PATEGANConfig(TeachersConfig):
    """Settings of PATE-GAN."""

    student_steps: int = setting(5, "Steps of the student per round.")
    student_lr: float = setting(1e-3, "Learning rate of the student.")
    generator_steps: int = setting(1, "Steps of the generator per round.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(self, "student_steps", "generator_steps")
        check_positive(self, "student_lr")


def _paper(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {"batch": 64, "steps": 300}


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "images_per_class": 200, "teachers": max(1, facts.units // 10), "steps": 100, "batch": 40,
        "width": 8, "hidden": 32,
    }  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What a teacher says of each image: 1/2 if it looks real, -1/2 if not."""

    teacher: Teacher

    def __call__(self, state: Any, shown: Shown) -> Tensor:
        """Return the verdicts (n,), centred, so that their norm is half of what one can change."""
        return (self.teacher(state[0], shown.images, shown.labels) > 0).float() - 0.5


class Student:
    """A discriminator that sees generated images alone, and knows of others what teachers say."""

    def __init__(self, method: PATEGAN, room: Classroom) -> None:
        self.config, self.room, self.network = method.config, room, method.teacher
        generator = public_generator(method.seed, "student")
        params = moved(method.teacher.init(generator), room.device)
        room.public["student"] = params, ADAM.start(params)
        self._lr = torch.full((), method.config.student_lr, device=room.device)

    def __call__(self, shown: Shown, at: int) -> None:
        """Hear what teachers say of the images shown, learn it, and teach the generator."""
        config, room = self.config, self.room
        counts = room.curator.votes(
            room.members,
            Verdict(self.network),
            shown,
            dimension=config.batch,
            bound=math.sqrt(config.batch) / 2,
        )
        shares = (0.5 + counts / config.teachers).clamp(0, 1).float()
        for _ in range(config.student_steps):
            self._learn(shown, shares)
        for step in range(config.generator_steps):
            seen = shown if step == 0 else room.shown(config.batch, "fresh", at, step)
            room.follow(seen, wish(self.network, room.public["student"][0], seen), at)

    def _learn(self, shown: Shown, shares: Tensor) -> None:
        """Make one step towards the share of teachers that think an image real."""
        params, moments = self.room.public["student"]
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        logits = self.network(leaves, shown.images, shown.labels)
        loss = F.binary_cross_entropy_with_logits(logits, shares)
        slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        self.room.public["student"] = ADAM.step(params, slopes, moments, self._lr)


class PATEGAN(TaughtGenerator):
    """A generator that learns from a student of many teachers."""

    config: PATEGANConfig
    config_class: ClassVar[type] = PATEGANConfig
    summary: ClassVar[str] = "a generator that learns from a student of many teachers' verdicts"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "nothing: the paper has no images"),
        "small": Preset(_small, "nothing: a quick trial on few records"),
    }

    @property
    def dimension(self) -> int:
        """One verdict per image."""
        return self.config.batch

    def rounds(self, room: Classroom) -> Callable[[Shown, int], None]:
        """Let a student stand between teachers and generator."""
        return Student(self, room)
