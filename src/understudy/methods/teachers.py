"""Teachers behind the door: what DataLens, G-PATE and PATE-GAN share.

Many critics each learn, without noise, from a few private records of their own. A generator shows
all of them the same images; what they say together, with noise, is all that it learns of the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.func import grad
from torch.utils import _pytree as pytree

from understudy.errors import InvalidSettings
from understudy.methods.fitting import (
    GRAIN,
    DistanceStep,
    GeneratorFit,
    Schedule,
    State,
    filled,
    leaves_of,
)
from understudy.methods.method import (
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
    small_or_paper,
)
from understudy.nets.critics import DenseCritic, Teacher, logit_loss
from understudy.nets.gallery import GalleryGenerator
from understudy.nets.generators import DeconvGenerator, GeneratorNetwork
from understudy.nets.params import Params, moved
from understudy.privacy.curator import Curator
from understudy.privacy.ensemble import Ensemble, shard_size
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.privacy.releases.votes import Placed
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam, AdamState

ADAM = Adam(betas=(0.5, 0.999))
SEEN = "MNIST and Fashion-MNIST, by training images, after a look at their test sets"
"""What presets of teachers that remember were tuned on."""


@dataclass(frozen=True, kw_only=True)
class TeachersConfig:
    """Settings of a generator that is taught."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    teachers: int = setting(4000, "Discriminators, each with a shard of its own.")
    steps: int = setting(150, "Rounds: teachers learn, teachers are asked, the generator follows.")
    batch: int = setting(15, "Images that teachers are asked about per round.")
    teacher_batch: int = setting(30, "Records of its own, at most, that a teacher sees per step.")
    teacher_steps: int = setting(2, "Steps of the teachers per round.")
    first_steps: int = setting(10, "Steps of the teachers in the first round.")
    teacher_lr: float = setting(1e-3, "Learning rate of the teachers.")
    lr: float = setting(1e-3, "Learning rate of the generator.")
    falling: bool = setting(False, "Let the generator's learning rate fall to zero.")
    generator: str = setting("deconv", "Generator: deconv or gallery.")
    code: int = setting(
        5, "Length of the generator's random code; of a gallery, pictures of each class."
    )
    width: int = setting(32, "Channels of a teacher's second convolution.")
    hidden: int = setting(256, "Width of a teacher's hidden layer.")
    norm: bool = setting(False, "Normalise batches inside teachers.")
    average: float = setting(0.0, "What the past counts in the average of generators; 0: the last.")
    grain: float = setting(0.0, GRAIN)
    critic: str = setting(
        "network", "What a teacher judges by: a network, or the records that it remembers."
    )
    reach: float = setting(
        0.05, "How much nearer, by root mean square, the image is that a record mostly chooses."
    )

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "teachers", "steps", "batch", "teacher_batch",
            "teacher_steps", "first_steps", "code", "width", "hidden",
        )  # fmt: skip
        check_positive(self, "lr", "teacher_lr", "reach")
        check_not_negative(self, "grain")
        if not 0 <= self.average < 1:
            raise InvalidSettings(f"average is {self.average:g}, expected 0 to below 1")
        if self.generator not in ("deconv", "gallery"):
            raise InvalidSettings(f"generator is '{self.generator}', expected deconv or gallery")
        if self.critic not in ("network", "records"):
            raise InvalidSettings(f"critic is '{self.critic}', expected network or records")


def remembering(facts: PublicFacts, pictures: int) -> dict[str, Any]:
    """Return settings of a teacher for each unit, who chooses a picture of its record's class.

    Args:
        facts: of the set.
        pictures: of each class.
    """
    return {
        "teachers": facts.units, "critic": "records", "teacher_steps": 1, "first_steps": 1,
        "batch": pictures * facts.classes, "generator": "gallery", "code": pictures,
        "falling": True,
    }  # fmt: skip


class Shown(NamedTuple):
    """What the generator shows in a round: public, and the same to all teachers."""

    images: Tensor
    labels: Tensor
    codes: Tensor


class Wishes(NamedTuple):
    """How some of the images should change, as one teacher sees it."""

    ways: Tensor
    """(wishes, pixels); zeros where there is no wish after all."""
    places: Tensor | None = None
    """Which image each is for (wishes,); None: for each in turn."""

    def of(self, values: Tensor) -> Tensor:
        """Return what belongs to the images that wishes are for, out of (n, ...)."""
        return values if self.places is None else values[self.places]

    def told(self, said: Tensor, images: int) -> Tensor | Placed:
        """Put what is said of wishes (wishes, ...) to their images; without a wish, nothing."""
        is_wish = (self.ways != 0).any(1)
        said = said * is_wish.view(-1, *[1] * (said.ndim - 1))
        if self.places is None:
            return said
        if len(said) == 1:
            return Placed(said[0], self.places[0])
        is_for = self.places == torch.arange(images, device=said.device)[:, None]
        return torch.einsum("iw,w...->i...", is_for.to(said.dtype), said)


class Critic(Protocol):
    """What one teacher makes of its records; runs behind the door, for all teachers at once."""

    def start(self, generator: torch.Generator) -> Any:
        """Return what a teacher knows at first: tensors, public, the same for all."""

    def __call__(
        self, state: Any, images: Tensor, labels: Tensor, exist: Tensor, shown: Shown
    ) -> Any:
        """Return what it knows after a look at some of its records, and at generated images."""

    def wish(self, state: Any, shown: Shown, turn: Tensor) -> Wishes:
        """Return how images should change to look more real to it.

        Args:
            state: what it knows.
            shown: the images.
            turn: a public number in [0, 1), (), of its own.
        """

    def voices(self, images: int) -> int:
        """Return how many wishes it has, of so many images."""


@dataclass(frozen=True)
class NetworkCritic:
    """A discriminator that learns to tell its records from generated images."""

    teacher: Teacher
    lr: float

    def start(self, generator: torch.Generator) -> tuple[Params, AdamState]:
        """Draw weights; Adam remembers nothing."""
        params = self.teacher.init(generator)
        return params, ADAM.start(params)

    def __call__(
        self, state: Any, images: Tensor, labels: Tensor, exist: Tensor, shown: Shown
    ) -> tuple[Params, AdamState]:
        """Make one step of Adam."""

        def loss(params: Params) -> Tensor:
            real = self.teacher(params, images, labels)
            fake = self.teacher(params, shown.images, shown.labels)
            return logit_loss(real, are_real=True, weights=exist) + logit_loss(fake, are_real=False)

        params, moments = state
        lr = torch.full((), self.lr, device=images.device)
        return ADAM.step(params, grad(loss)(params), moments, lr)

    def wish(self, state: Any, shown: Shown, turn: Tensor) -> Wishes:
        """Return against its loss's gradient."""
        return Wishes(wish(self.teacher, state[0], shown))

    def voices(self, images: int) -> int:
        """Return one for each image."""
        return images


@dataclass(frozen=True)
class RecordsCritic:
    """A teacher without weights: each of its records chooses one image of its class.

    Which one is drawn by a public number, mostly the nearest. Where records pull what they choose,
    images part: each becomes the mean of the records that it is nearest to, as in k-means.
    """

    pixels: int
    records: int
    """How many it remembers: those it looked at last."""
    reach: float
    """By root mean square of pixels."""

    def start(self, _: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Remember nothing."""
        count = self.records
        return torch.zeros(count, self.pixels), torch.zeros(count), torch.zeros(count)

    def __call__(
        self, state: Any, images: Tensor, labels: Tensor, exist: Tensor, shown: Shown
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Remember these instead."""
        return images.flatten(1), labels.to(images.dtype), exist.to(images.dtype)

    def wish(self, state: Any, shown: Shown, turn: Tensor) -> Wishes:
        """Return the way from an image to each record that is there, if any is of its class."""
        place, is_there = self.chosen(state, shown, turn)
        ways = state[0] - shown.images.flatten(1)[place]
        return Wishes(torch.where(is_there[:, None], ways, 0), place)

    def chosen(self, state: Any, shown: Shown, turn: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image that each record chooses (records,), and whether there is any such."""
        remembered, labels, exist = state
        images = shown.images.flatten(1)
        lengths = images.square().sum(1)  # a record's own changes nothing between images
        gaps = (lengths - 2 * remembered @ images.T) / self.pixels
        is_like = (shown.labels == labels[:, None]) & (exist[:, None] > 0)
        far = torch.finfo(images.dtype).min
        shares = torch.where(is_like, -gaps / (2 * self.reach**2), far).softmax(1)
        place = (shares.cumsum(1) <= turn).sum(1).clamp(max=len(images) - 1)
        return place, is_like.gather(1, place[:, None])[:, 0]

    def voices(self, images: int) -> int:
        """Return one for each record."""
        return self.records


def stacked(state: Any, members: int) -> Any:
    """Return the state of so many members that are all in this one."""
    return pytree.tree_map(lambda leaf: leaf.expand(members, *leaf.shape), state)


def wish(teacher: Teacher | DenseCritic, params: Params, shown: Shown) -> Tensor:
    """Return how images should change to look more real to a teacher (n, pixels)."""

    def loss(images: Tensor) -> Tensor:
        return logit_loss(teacher(params, images, shown.labels), are_real=True)

    slope: Tensor = grad(loss)(shown.images)
    return -slope.flatten(1)


def towards(images: Tensor, _: Tensor, known: Any) -> Tensor:
    """Return a loss that falls where images move along the direction that was given."""
    along: Tensor = (images.flatten(1) * known["direction"]).sum()
    return -along


class Classroom:
    """The teachers of a run, and the generator that they teach."""

    def __init__(self, method: TaughtGenerator, curator: Curator) -> None:
        config, facts, seed = method.config, method.facts, method.seed
        self.curator, self.config, self.device = curator, config, curator.engine.device
        self._facts, self._seed, self._critic = facts, seed, method.critic
        # All start alike: what they say then differs by their records alone, and adds up.
        alike = method.critic.start(public_generator(seed, "teachers"))
        alike = pytree.tree_map(lambda leaf: leaf.to(self.device), alike)
        start = stacked(alike, config.teachers)
        heard = 1 if method.critic.voices(config.batch) == 1 else config.batch  # images spoken of
        self.members: Ensemble = curator.ensemble(
            start, members=config.teachers, answer=method.dimension // config.batch * heard
        )

        network = method.network
        self._step = DistanceStep(network, towards, ADAM)
        schedule = Schedule(steps=config.steps, batch=config.batch, lr=config.lr)
        self._fit = GeneratorFit(step=self._step, schedule=schedule, facts=facts, seed=seed)
        params = moved(network.init(public_generator(seed, "network")), self.device)
        self.public: dict[str, Any] = {"generator": self._step.start(params), "average": params}
        """What a run goes on with, beside its teachers: made of releases alone."""

    def shown(self, count: int, *purpose: str | int) -> Shown:
        """Draw images from the generator as it is; `purpose` seeds their codes."""
        generator = public_generator(self._seed, *purpose)
        codes = self._step.network.codes_to_show(count, generator).to(self.device)
        start = torch.randint(self._facts.classes, (1,), generator=generator)
        labels = ((start + torch.arange(count)) % self._facts.classes).to(self.device)
        with torch.no_grad():
            return Shown(
                self._step.network(self.public["generator"][0], codes, labels), labels, codes
            )

    def turns(self, at: int) -> Tensor:
        """Draw a public number in [0, 1) for each teacher (teachers,)."""
        generator = public_generator(self._seed, "turns", at)
        return torch.rand(self.config.teachers, generator=generator).to(self.device)

    def teach(self, shown: Shown, at: int) -> None:
        """Let all teachers learn: on a schedule that is public, each from records of its own."""
        steps = self.config.first_steps if at == 0 else self.config.teacher_steps
        shard = self.members.shard
        for step in range(steps):
            window = torch.arange(min(shard, self.config.teacher_batch))
            positions = (window + (at * steps + step) * len(window)) % shard
            self.members.learn(self._critic, positions, shown)

    def follow(self, shown: Shown, direction: Tensor, at: int) -> None:
        """Move the generator so that the images that were shown move along `direction`."""
        config = self.config
        falls = 1 - at / config.steps if config.falling else 1.0
        lr = torch.full((), config.lr * falls, device=self.device)
        known = {"direction": direction.to(shown.images.dtype)}
        state: State = self.curator.engine.run(
            self._step, self.public["generator"], shown.codes, shown.labels, known, lr
        )
        average, past = self.public["average"], config.average
        self.public["generator"] = state
        self.public["average"] = {
            name: torch.lerp(weight, average[name], past) for name, weight in state[0].items()
        }

    def restore(self) -> int:
        """Go on from the last checkpoint; return the rounds done."""
        done, saved = self.curator.restore()
        if done:
            self.public = filled(self.public, cast(Params, saved["public"]))
        return done

    def checkpoint(self, rounds: int) -> None:
        """Offer a point to go on from."""
        self.curator.checkpoint(rounds, {"public": leaves_of(self.public)}, self.drawn)

    def drawn(self) -> SyntheticSet:
        """Draw the set from the generator."""
        config = self.config
        return self._fit.drawn(self.public["average"], config.images_per_class, grain=config.grain)


class TaughtGenerator(ABC):
    """A method whose generator learns from a noisy sum of what teachers say."""

    config: TeachersConfig
    public_inputs: ClassVar[tuple[PublicInput, ...]] = ()

    default_preset = staticmethod(small_or_paper)

    def __init__(self, config: TeachersConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.pixels = math.prod(facts.shape)
        self.teacher = Teacher(facts.shape, facts.classes, config.width, config.hidden, config.norm)
        self.critic: Critic = NetworkCritic(self.teacher, config.teacher_lr)
        if config.critic == "records":
            seen = min(shard_size(facts, config.teachers), config.teacher_batch)
            self.critic = RecordsCritic(self.pixels, seen, config.reach)

    @property
    def network(self) -> GeneratorNetwork:
        """What is taught."""
        shape, classes, code = self.facts.shape, self.facts.classes, self.config.code
        if self.config.generator == "gallery":
            return GalleryGenerator(shape, classes, code=code)
        return DeconvGenerator(shape, classes, code=code)

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Number of values in what a teacher says per round."""

    @abstractmethod
    def rounds(self, room: Classroom) -> Callable[[Shown, int], None]:
        """Return what happens in each round, given the images shown and its number.

        The teachers are asked once about these images, and the generator learns from the answer.
        """

    def plan(self) -> Plan:
        """One release of votes per round."""
        line = PlannedRelease(
            name="votes", kind="votes", count=self.config.steps, dimension=self.dimension
        )
        return Plan((line,))

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Teachers learn, are asked, and the generator follows."""
        room = Classroom(self, curator)
        one_round = self.rounds(room)
        rounds = range(room.restore(), self.config.steps)
        for at in progress.steps(rounds, spent=curator.epsilon_spent):
            shown = room.shown(self.config.batch, "shown", at)
            room.teach(shown, at)
            one_round(shown, at)
            room.checkpoint(at + 1)
        return room.drawn()
