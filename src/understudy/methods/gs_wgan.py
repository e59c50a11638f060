"""GS-WGAN (Chen, Orekondy, Fritz; NeurIPS 2020): critics see the data, the generator their advice.

Each critic learns to tell its own few records from generated images, without noise, and is never
released. What is released is how a few critics, chosen in secret, would change a batch of
generated images: the gradient by these images alone, bounded and noisy. The generator goes on from
there by the chain rule, which touches no record.

Private access: one `sample_gradient` release for each step of the generator.
Deviations: see docs/methods/gs-wgan.md; the published accounting does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.func import grad
from torch.utils import _pytree as pytree

from understudy.errors import InvalidSettings
from understudy.methods.canvas import blurred
from understudy.methods.fitting import (
    DRAWN_AHEAD,
    GRAIN,
    AdvisedState,
    AdvisedStep,
    filled,
    leaves_of,
)
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
    small_or_paper,
)
from understudy.nets.gallery import GalleryGenerator
from understudy.nets.generators import GeneratorNetwork, PixelNormGenerator
from understudy.nets.params import Params, moved
from understudy.nets.released import Generator
from understudy.nets.wgan import Critic
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam, AdamState

ADAM = Adam(betas=(0.5, 0.9))
DRIFT = 1e-3
"""Weight of the squared scores of real images, which keeps scores near zero."""
NOISE_KEPT = 0.5
"""Of the images that critics warm up on, how much is noise."""
NETWORKS = ("convolutions", "gallery")


@dataclass(frozen=True, kw_only=True)
class GSWGANConfig:
    """Settings of GS-WGAN."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    critics: int = setting(1000, "Critics, each with an equal share of the units.")
    asked: float = setting(40.0, "Critics asked per step, on average.")
    clip_norm: float = setting(0.1, "Bound on a critic's gradient by all images of a batch.")
    steps: int = setting(2000, "Steps of the generator.")
    batch: int = setting(16, "Images generated per step.")
    lr: float = setting(1e-3, "Learning rate of the generator.")
    ema: float = setting(0.999, "How much of the averaged generator stays, each step.")
    smooth: float = setting(0.0, "Blur of the critics' advice, a deviation in pixels.")
    grain: float = setting(0.0, GRAIN)
    network: str = setting("convolutions", f"Generator: {', '.join(NETWORKS)}.")
    code: int = setting(
        10, "Length of the generator's random code; of a gallery, pictures of each class."
    )
    width: int = setting(32, "Channels of the generator's last maps.")
    critic_lr: float = setting(1e-3, "Learning rate of the critics.")
    critic_batch: int = setting(32, "Records that a critic learns from at a time.")
    critic_steps: int = setting(1, "Steps of all critics per step of the generator.")
    critic_width: int = setting(16, "Channels of a critic's first maps.")
    critic_depth: int = setting(3, "Convolutions of a critic.")
    warm_up: int = setting(100, "Steps of all critics before the first of the generator.")

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "critics", "steps", "batch", "code", "width", "critic_batch",
            "critic_steps", "critic_width", "critic_depth",
        )  # fmt: skip
        check_positive(self, "asked", "clip_norm", "lr", "critic_lr")
        if self.asked > self.critics:
            raise InvalidSettings(
                f"asked is {self.asked:g}, expected at most the number of critics, {self.critics}"
            )
        if not 0 <= self.ema < 1:
            raise InvalidSettings(f"ema is {self.ema:g}, expected at least 0 and below 1")
        check_not_negative(self, "warm_up", "smooth", "grain")
        if self.network not in NETWORKS:
            raise InvalidSettings(f"network is '{self.network}', expected {', '.join(NETWORKS)}")

    @property
    def rate(self) -> float:
        """Probability that a critic is asked."""
        return self.asked / self.critics


class Critics(Protocol):
    """The critics, wherever they live. All they are told is public."""

    def advance(self, images: Tensor, labels: Tensor, turn: int) -> None:
        """Let every critic learn from its own records against these generated images.

        Args:
            images: generated.
            labels: their classes.
            turn: how often they learned before.
        """

    def gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sanitised mean gradient of the critics' scores by the images."""


class CriticState(NamedTuple):
    """What a critic is: private, but for its start."""

    params: Params
    directions: Params
    moments: AdamState


class EnsembleCritics:
    """Critics in this process, behind the curator's door."""

    def __init__(self, curator: Curator, config: GSWGANConfig, *, seed: int) -> None:
        facts, device = curator.facts, curator.engine.device
        network = Critic(
            facts.shape, facts.classes, width=config.critic_width, depth=config.critic_depth
        )
        self.curator, self.config, self.learning = curator, config, Learning(network)
        starts = [
            self.learning.start(network.init(public_generator(seed, "critic", number)))
            for number in range(config.critics)
        ]
        stacked = pytree.tree_map(lambda *leaves: torch.stack(leaves).to(device), *starts)
        self.ensemble = curator.ensemble(stacked, members=config.critics)
        self.lr = torch.full((), config.critic_lr, device=device)

    def advance(self, images: Tensor, labels: Tensor, turn: int) -> None:
        """Let every critic take some steps, each on the next records of its shard."""
        shard, steps = self.ensemble.shard, self.config.critic_steps
        batch = min(self.config.critic_batch, shard)
        for step in range(turn * steps, (turn + 1) * steps):
            positions = (torch.arange(batch) + step * batch) % shard
            self.ensemble.learn(self.learning, positions, (images, labels, self.lr))

    def gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        """Ask a few critics, in secret, how to change the images."""
        return self.curator.sample_gradient(
            self.ensemble, self.learning.scaled_score, images, labels, bound=self.config.clip_norm
        )


@dataclass(frozen=True)
class Learning:
    """How one critic learns, and what it says; applied to all under `vmap`."""

    network: Critic

    def start(self, params: Params) -> CriticState:
        """Return a critic that has seen nothing."""
        return CriticState(params, self.network.directions(params), ADAM.start(params))

    def __call__(
        self, state: CriticState, images: Tensor, labels: Tensor, exist: Tensor, public: Any
    ) -> CriticState:
        """Take one step of Adam; the records are the critic's own."""
        generated, given, lr = public

        def loss(params: Params) -> tuple[Tensor, Params]:
            weights, directions = self.network.normalised(params, state.directions)
            real, fake = (
                self.network(weights, *pair) for pair in ((images, labels), (generated, given))
            )
            share = exist / exist.sum().clamp(min=1)
            # Each class of generated images weighs what it does among the records: a critic must
            # not take a class for generated because its few records have none of it.
            same = (given[:, None] == labels).to(share.dtype)
            weight = (same / same.sum(0).clamp(min=1)) @ share
            gap = weight @ fake - share @ real + DRIFT * (share @ real.square())
            return gap, directions

        slopes, directions = grad(loss, has_aux=True)(state.params)
        params, moments = ADAM.step(state.params, slopes, state.moments, lr)
        return CriticState(params, directions, moments)

    def scaled_score(self, state: CriticState, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of scores, scaled so that larger batches have no steeper slope."""
        weights, _ = self.network.normalised(state.params, state.directions)
        return self.network(weights, images, labels).sum() / math.sqrt(len(images))


def _paper(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _best(facts: PublicFacts, _: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ten pictures of each class instead of a network, and many small critics.

    What many critics agree on adds up, and the noise is that of one; a picture has nothing to learn
    but its pixels, and less noise to follow than a network has.
    """
    critics = given.get("critics", max(1, facts.units // 15))
    return {
        "critics": critics, "asked": critics / 10, "steps": 800, "batch": 5 * max(1, facts.classes),
        "lr": 0.05, "ema": 0.99, "smooth": 1.0, "grain": 0.2, "network": "gallery", "code": 10,
        "critic_batch": 15, "critic_depth": 1, "warm_up": 50,
    }  # fmt: skip


def _small(facts: PublicFacts, _: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: critics with a dozen records, few pictures."""
    critics = given.get("critics", max(1, min(100, facts.units // 4)))
    return {
        "images_per_class": 200, "critics": critics, "asked": critics / 4, "steps": 600,
        "batch": 10, "lr": 0.05, "ema": 0.98, "smooth": 0.7, "grain": 0.2, "network": "gallery",
        "code": 2, "critic_depth": 1, "critic_lr": 3e-3,
    }  # fmt: skip


def generator_of(config: GSWGANConfig, facts: PublicFacts) -> GeneratorNetwork:
    """Return what is trained, without parameters."""
    shape, classes = facts.shape, facts.classes
    if config.network == "gallery":
        return GalleryGenerator(shape, classes, code=config.code)
    return PixelNormGenerator(shape, classes, code=config.code, width=config.width)


class GSWGAN:
    """A generator that follows the noisy advice of critics."""

    config: GSWGANConfig
    config_class: ClassVar[type] = GSWGANConfig
    summary: ClassVar[str] = "a generator trained on noisy gradients of many small critics"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "nothing: the paper's own settings have no usable guarantee"),
        "best": Preset(_best, "nothing yet: what helped on digits, in larger"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }
    public_inputs: Sequence[PublicInput] = ()

    default_preset = staticmethod(small_or_paper)

    def __init__(self, config: GSWGANConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.network = generator_of(config, facts)
        self.follow = AdvisedStep(network=self.network, lr=config.lr, ema=config.ema, adam=ADAM)

    def plan(self) -> Plan:
        """One `sample_gradient` for each step."""
        return Plan(
            (
                PlannedRelease(
                    name="sample_gradient",
                    kind="sample_gradient",
                    count=self.config.steps,
                    dimension=self.config.batch * math.prod(self.facts.shape),
                    sampling_rate=self.config.rate,
                ),
            )
        )

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Train on critics that live in this process; draw the set."""
        critics = EnsembleCritics(curator, self.config, seed=self.seed)
        state = self.start(curator.engine.device)
        done, saved = curator.restore()
        if done:
            state = filled(state, cast(Params, saved["state"]))
        else:
            self.warm_up(critics, state)
        for step in progress.steps(range(done, self.config.steps), spent=curator.epsilon_spent):
            state = self.turn(critics, state, step)
            curator.checkpoint(step + 1, {"state": leaves_of(state)}, partial(self.drawn, state))
        return self.drawn(state)

    def start(self, device: torch.device) -> AdvisedState:
        """Return a generator that has learned nothing."""
        params = moved(self.network.init(public_generator(self.seed, "network")), device)
        return self.follow.start(params)

    def warm_up(self, critics: Critics, state: AdvisedState) -> None:
        """Let critics learn before they are asked, which costs nothing."""
        for turn in range(self.config.warm_up):
            critics.advance(*self._warm_up_batch(state.params, turn), turn)

    def turn(self, critics: Critics, state: AdvisedState, step: int) -> AdvisedState:
        """Let the critics learn, ask them, and follow their advice."""
        device = next(iter(state.params.values())).device
        codes, labels = self._batch(device, "codes", step)
        with torch.no_grad():
            images = self.network(state.params, codes, labels)
        critics.advance(images, labels, self.config.warm_up + step)
        advice = critics.gradient(images, labels)
        if self.config.smooth:
            advice = blurred(advice, self.config.smooth)
        return self.follow(state, codes, labels, -advice)  # scores go up

    def _batch(self, device: torch.device, purpose: str, step: int) -> tuple[Tensor, Tensor]:
        """Return codes and labels of a step; classes take turns, and so do a gallery's pictures."""
        size, (block, place) = self.config.batch, divmod(step, DRAWN_AHEAD)
        generator = public_generator(self.seed, purpose, block)
        codes = self.network.codes_to_show(DRAWN_AHEAD * size, generator)
        labels = torch.arange(DRAWN_AHEAD * size) % max(1, self.facts.classes)
        part = slice(place * size, (place + 1) * size)
        return codes[part].to(device), labels[part].to(device)

    @torch.no_grad()
    def _warm_up_batch(self, params: Params, step: int) -> tuple[Tensor, Tensor]:
        """Return images of the untrained generator under noise: so wrong that all critics agree."""
        device = next(iter(params.values())).device
        codes, labels = self._batch(device, "warm-up", step)
        drawn = public_generator(self.seed, "warm-up noise", step)
        noise = torch.rand((self.config.batch, *self.facts.shape), generator=drawn).to(device)
        return torch.lerp(self.network(params, codes, labels), noise, NOISE_KEPT), labels

    def drawn(self, state: AdvisedState) -> SyntheticSet:
        """Draw the set from the average generator, and keep that with it."""
        released = Generator(self.network, state.average, statistics={}, grain=self.config.grain)
        count = self.config.images_per_class
        images, labels = released.sample(per_class=count, seed=self.seed)
        return SyntheticSet(images, labels, self.facts.class_names, generator=released)
