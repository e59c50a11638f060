"""DP-GAN (Xie et al. 2018; as revisited by Bie, Kamath, Zhang, TMLR 2023), and DP-CGAN.

One discriminator learns to tell private from generated images. Its gradient on private records is
bounded and noisy; its gradient on generated images touches no record, and is free. So the
discriminator is private, and the generator that learns from it is post-processing. What makes it
work is that the noise leaves something to see: large batches, and many steps of the discriminator
for each one of the generator.

Private access: `steps` `gradient` releases, each over a Poisson batch; a `histogram` of the labels
before them, if classes are to have their shares.
Deviations: see docs/methods/dp-gan.md and docs/methods/dp-cgan.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.fitting import GeneratorFit, Schedule, filled, leaves_of, shares_of
from understudy.methods.method import (
    FEW_UNITS,
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
    small_or_paper,
)
from understudy.nets.discriminators import (
    ConvDiscriminator,
    DenseDiscriminator,
    Discriminator,
)
from understudy.nets.generators import ClassNormGenerator, DenseGenerator, GeneratorNetwork
from understudy.nets.params import Params, moved, parameter_count
from understudy.privacy.bounded import clipped_sum
from understudy.privacy.curator import Curator
from understudy.privacy.gradients import GradientRows, split_like
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam, AdamState
from understudy.training.adversarial import (
    Game,
    GeneratorState,
    GeneratorStep,
    check_game,
    kept_at,
)
from understudy.training.gan_pretraining import ARCHITECTURE, PretrainedGAN

NETWORKS = ("conv", "dense")
LARGE = 64
"""Pixels from which on the discriminator of `best` is narrower."""


@dataclass(frozen=True, kw_only=True)
class DPGANConfig:
    """Settings of DP-GAN and DP-CGAN."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    steps: int = setting(2000, "Noisy gradients, one step of the discriminator each.")
    turns: int = setting(5, "Steps of the discriminator for each one of the generator.")
    batch: int = setting(4096, "Expected number of units in a Poisson batch.")
    fakes: int = setting(256, "Images generated per step.")
    clip_norm: float = setting(1.0, "Bound on each unit's gradient norm; on each fake's, too.")
    loss: Literal["non-saturating", "hinge", "wasserstein"] = setting(
        "non-saturating", "What the two networks want of scores."
    )
    penalty: float = setting(0.0, "Weight of a penalty on scores that are steep at fakes.")
    weight_clip: float = setting(0.0, "Keep the discriminator's weights within this; 0: do not.")
    critic_lr: float = setting(5e-4, "Learning rate of the discriminator (Adam).")
    lr: float = setting(2e-4, "Learning rate of the generator (Adam).")
    momentum: float = setting(0.0, "Adam's first beta, of both.")
    ema: float = setting(0.999, "How much of the averaged generator stays, each of its steps.")
    network: Literal["conv", "dense"] = setting(
        "conv", "Convolutions, or one hidden layer in each of the two."
    )
    code: int = setting(60, "Length of the generator's random code.")
    width: int = setting(32, "Channels of the generator's last maps; its hidden layer if dense.")
    critic_width: int = setting(64, "Channels of the discriminator's first maps; or hidden layer.")
    norm: bool = setting(True, "Group norms in the discriminator.")
    labelled: bool = setting(True, "Learn each class apart; without, the set has no labels.")
    count_ratio: float = setting(
        0.0, "Noise on class counts relative to gradients'; 0: classes are known to be equal."
    )
    start: str = setting(
        "", "Networks to go on from: a file of `pretrain-gan`; by default none.", is_path=True
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "images_per_class", "steps", "batch", "fakes")
        check_positive(self, "clip_norm")
        check_game(self)
        if self.network not in NETWORKS:
            raise InvalidSettings(f"network is '{self.network}', expected {' or '.join(NETWORKS)}")
        check_not_negative(self, "weight_clip", "count_ratio")
        if not self.labelled and self.count_ratio:
            raise InvalidSettings(
                f"count_ratio is {self.count_ratio:g} for a set without labels; leave it out"
            )
        if self.start and self.network != "conv":
            raise InvalidSettings(
                f"start is given with network {self.network}; only networks of convolutions can be "
                "pre-trained"
            )


DiscriminatorState = tuple[Params, AdamState]


@dataclass(frozen=True)
class RealLoss:
    """The discriminator's loss on one private record; runs behind the door."""

    game: Game
    labelled: bool = True

    def __call__(self, params: Params, image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of an image, pixels in [0, 1]."""
        if not self.labelled:
            label = torch.zeros_like(label)
        return self.game.of_real(self.game.discriminator(params, image[None], label[None]))[0]


@dataclass(frozen=True)
class FakeLoss:
    """The same on one generated image."""

    game: Game

    def __call__(self, params: Params, image: Tensor, label: Tensor) -> Tensor:
        """Return the loss of an image, pixels in [0, 1]."""
        return self.game.of_fake(self.game.discriminator(params, image[None], label[None]))[0]


@dataclass(frozen=True)
class DiscriminatorStep:
    """One step along a released gradient and that of generated images; all of it is public."""

    network: GeneratorNetwork
    game: Game
    adam: Adam
    clip_norm: float
    penalty: float
    weight_clip: float

    def __call__(
        self,
        state: DiscriminatorState,
        released: Params,
        generator: Params,
        batch: tuple[Tensor, Tensor],
        lr: Tensor,
    ) -> DiscriminatorState:
        """Move the discriminator so that it tells the two apart better.

        Args:
            state: its parameters, and what Adam remembers.
            released: the noisy gradient on private records.
            generator: parameters of the generator.
            batch: codes and labels of images to generate.
            lr: learning rate.
        """
        (params, moments), (codes, labels) = state, batch
        with torch.no_grad():
            images = self.network(generator, codes, labels)
        # Each fake's gradient is bounded as each record's is, lest the two sides weigh unequally.
        rows = GradientRows(FakeLoss(self.game))(params, images, labels)
        count = torch.ones(len(images), dtype=torch.bool, device=images.device)
        fake = split_like(clipped_sum(rows, self.clip_norm, count) / len(images), params)
        # In units of the bound, which then decides what is bounded and not how far a step goes.
        slopes = {n: (slope + fake[n]) / self.clip_norm for n, slope in released.items()}
        if self.penalty:
            steep = self._steep(params, images, labels)
            slopes = {n: slope + self.penalty * steep[n] for n, slope in slopes.items()}
        params, moments = self.adam.step(params, slopes, moments, lr)
        if most := self.weight_clip:
            params = {n: weight.clamp(-most, most) for n, weight in params.items()}
        return params, moments

    def _steep(self, params: Params, images: Tensor, labels: Tensor) -> Params:
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        loss = self.game.steepness(leaves, images, labels)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, slopes, strict=True))


def _paper(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Wasserstein GAN with clipped weights, 20 epochs of small batches."""
    return {
        "steps": max(1, round(20 * facts.units / 64)),
        "batch": 64,
        "fakes": 64,
        "loss": "wasserstein",
        "weight_clip": 0.01,
        "critic_lr": 5e-5,
        "lr": 5e-5,
        "norm": False,
        "ema": 0.0,
    }


def _best(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return large batches, and several steps of the discriminator for each of the generator.

    At 64 px there is one more convolution, and no more weights for the noise to fall on.
    """
    return {
        "batch": max(1, round(facts.units / 15)),
        "critic_width": 64 if max(facts.shape[1:]) < LARGE else 32,
    }


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: small networks, large batches."""
    return {
        "images_per_class": 200,
        "steps": 600,
        "turns": 3,
        "batch": max(1, round(facts.units / 3)),
        "fakes": 64,
        "critic_lr": 2e-3,
        "lr": 2e-3,
        "ema": 0.98,
        "code": 10,
        "width": 16,
        "critic_width": 16,
    }


def _dense(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published networks, batch and bound; Adam moves both."""
    return {
        "steps": 30_000,
        "turns": 1,
        "batch": 600,
        "fakes": 600,
        "clip_norm": 1.1,
        "critic_lr": 1e-3,
        "lr": 1e-3,
        "momentum": 0.9,
        "ema": 0.0,
        "network": "dense",
        "code": 100,
        "width": 128,
        "critic_width": 128,
    }


def _dense_small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: bold steps, one in turn."""
    return _small(facts, _, __) | {
        "steps": 800,
        "turns": 1,
        "fakes": 32,
        "critic_lr": 1e-2,
        "lr": 3e-3,
        "momentum": 0.5,
        "network": "dense",
        "code": 4,
        "width": 128,
        "critic_width": 128,
    }


class DPGAN:
    """A generator against a discriminator that learns from noisy gradients."""

    config: DPGANConfig
    config_class: ClassVar[type] = DPGANConfig
    summary: ClassVar[str] = "a generator against a discriminator trained on noisy gradients"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "nothing: the usual settings of a Wasserstein GAN"),
        "best": Preset(_best, "nothing yet: batch, turns and learning rates of DPImageBench"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose `small` for few units, else `best`: the settings of 2018 learn next to nothing."""
        return "small" if facts.units < FEW_UNITS else "best"

    def __init__(self, config: DPGANConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.class_names = facts.class_names if config.labelled else ()
        self.network, self.discriminator = networks(config, facts.shape, len(self.class_names))
        adam, game = Adam(betas=(config.momentum, 0.999)), Game(self.discriminator, config.loss)
        self.generator_step = GeneratorStep(self.network, game, adam)
        self.discriminator_step = DiscriminatorStep(
            self.network, game, adam, config.clip_norm, config.penalty, config.weight_clip
        )
        self.real_loss = RealLoss(game, config.labelled)

    @cached_property
    def start(self) -> tuple[PretrainedGAN, PublicInput] | None:
        """What to go on from, checked, and its origin; None for fresh networks."""
        if not self.config.start:
            return None
        found, origin = PretrainedGAN.load(Path(self.config.start))
        header, config = found.header, self.config
        if header.shape != self.facts.shape:
            raise InvalidSettings(
                f"the networks to start from make images of shape {header.shape}, the data set has "
                f"{self.facts.shape}; expected the same"
            )
        if any(getattr(header, name) != getattr(config, name) for name in ARCHITECTURE):
            raise InvalidSettings(
                "the networks to start from are other ones than the settings say; pass --code "
                f"{header.code} --width {header.width} --critic-width {header.critic_width} "
                f"{'--norm' if header.norm else '--no-norm'}"
            )
        return found, origin

    @property
    def public_inputs(self) -> Sequence[PublicInput]:
        """What was trained on public images and is used here."""
        return (self.start[1],) if self.start else ()

    def plan(self) -> Plan:
        """One noisy gradient of the discriminator for each of its steps; counts if asked for."""
        config, facts = self.config, self.facts
        _, drawn = self._first()
        gradients = PlannedRelease(
            name="gradient",
            kind="gradient",
            count=config.steps,
            sampling_rate=config.batch / facts.units,
            dimension=parameter_count(drawn),
        )
        if not config.count_ratio:
            return Plan((gradients,))
        histogram = PlannedRelease(
            name="histogram",
            kind="histogram",
            count=1,
            dimension=facts.classes,
            noise_ratio=config.count_ratio,
        )
        return Plan((histogram, gradients))

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Let the discriminator learn from noisy gradients, the generator from it; draw the set."""
        config, engine = self.config, curator.engine
        fit = self._fit(curator)
        done, judge, maker = self._restored(curator)
        critic_lr, lr = (
            torch.full((), speed, device=engine.device) for speed in (config.critic_lr, config.lr)
        )
        for step in progress.steps(range(done, config.steps), spent=curator.epsilon_spent):
            released = curator.gradient(self.real_loss, judge[0], clip_norm=config.clip_norm)
            batch = self._batch(fit, step, engine.device)
            judge = engine.run(self.discriminator_step, judge, released, maker[0], batch, critic_lr)
            if (step + 1) % config.turns == 0:
                kept = kept_at(config.ema, step // config.turns)
                known = {
                    "discriminator": judge[0],
                    "kept": torch.full((), kept, device=engine.device),
                }
                maker = engine.run(self.generator_step, maker, *batch, known, lr)
            so_far = partial(fit.drawn, maker[2], config.images_per_class)
            curator.checkpoint(step + 1, {"state": leaves_of((judge, maker))}, so_far)
        return fit.drawn(maker[2], config.images_per_class)

    def _fit(self, curator: Curator) -> GeneratorFit:
        """Return what draws labels and the set; shares of classes by noise, if asked for."""
        config = self.config
        return GeneratorFit(
            step=self.generator_step,
            schedule=Schedule(steps=config.steps, batch=config.fakes, lr=config.lr),
            facts=self.facts,
            seed=self.seed,
            shares=shares_of(curator.histogram()) if config.count_ratio else None,
        )

    def _batch(self, fit: GeneratorFit, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return codes and labels of the images of a step."""
        drawn, count = public_generator(self.seed, "codes", step), self.config.fakes
        labels = fit.labels(count, drawn)
        batch = moved({"codes": self.network.codes(count, drawn), "labels": labels}, device)
        return batch["codes"], batch["labels"]

    def _first(self) -> tuple[Params, Params]:
        """Return the generator and the discriminator before the first step."""
        if self.start:
            return self.start[0].for_classes(self.class_names, seed=self.seed)
        return (
            self.network.init(public_generator(self.seed, "network")),
            self.discriminator.init(public_generator(self.seed, "critic")),
        )

    def _restored(self, curator: Curator) -> tuple[int, DiscriminatorState, GeneratorState]:
        """Return steps done, and the two networks after them."""
        maker, judge = (moved(params, curator.engine.device) for params in self._first())
        state = (
            (judge, self.discriminator_step.adam.start(judge)),
            self.generator_step.start(maker),
        )
        done, saved = curator.restore()
        if done:
            state = filled(state, cast(Params, saved["state"]))
        return done, *state


def networks(
    config: DPGANConfig, shape: tuple[int, int, int], classes: int
) -> tuple[GeneratorNetwork, Discriminator]:
    """Return the generator and the discriminator, without parameters."""
    if config.network == "dense":
        hidden = (config.width,)
        return (
            DenseGenerator(shape, classes, code=config.code, hidden=hidden, norm=False),
            DenseDiscriminator(shape, classes, config.critic_width),
        )
    return (
        ClassNormGenerator(shape, classes, code=config.code, width=config.width),
        ConvDiscriminator(shape, classes, config.critic_width, config.norm),
    )


class DPCGAN(DPGAN):
    """DP-CGAN (Torkzadehmahani, Kairouz, Paten; CVPR workshops 2019): the same, small and dense.

    The published code bounds the gradient of each tensor by itself; here, as everywhere, the whole
    gradient of a unit is one vector.
    """

    summary: ClassVar[str] = "a dense conditional GAN, its discriminator trained on noisy gradients"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_dense, "MNIST, by the paper's authors; learning rates are Adam's own"),
        "small": Preset(_dense_small, "digits (scikit-learn), including its test split"),
    }

    default_preset = staticmethod(small_or_paper)
