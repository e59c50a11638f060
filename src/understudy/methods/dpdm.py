"""DPDM (Dockhorn, Cao, Vahdat, Kreis; TMLR 2023): a diffusion model trained on noisy gradients.

A network learns to take noise out of the private images. Each record is looked at with many noises
at once, and its losses are averaged before its gradient is clipped: a gradient that says more, at
the same price. Whoever has the network draws images from noise.

Private access: `steps` `gradient` releases, each over a Poisson batch.
Deviations: see docs/methods/dpdm.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.fitting import filled, leaves_of
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
    small_or_paper,
)
from understudy.nets.diffusion import Denoiser, DiffusionGenerator
from understudy.nets.params import Params, moved, parameter_count
from understudy.nets.released import Generator
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam, AdamState
from understudy.training.average import averaged, decay_at
from understudy.training.diffusion import DenoisingLoss, draws_of

MAPS_AT_ONCE = {"cuda": 2**27, "cpu": 2**23}
"""Values of the finest maps of all copies whose gradients are computed at once. A pass keeps a few
hundred times as many: some tens of gigabytes on a GPU."""
ADAM = Adam()


@dataclass(frozen=True, kw_only=True)
class DPDMConfig:
    """Settings of DPDM."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    steps: int = setting(4500, "Noisy gradients, one step of the network each.")
    batch: int = setting(4096, "Expected number of units in a Poisson batch.")
    copies: int = setting(32, "Noisy copies of a record whose losses are averaged (the paper's K).")
    stratified: bool = setting(
        False, "Spread the noise levels of a record's copies evenly instead of drawing each alone."
    )
    clip_norm: float = setting(1.0, "Bound on each unit's gradient norm.")
    lr: float = setting(3e-4, "Learning rate of Adam.")
    average: float = setting(0.999, "Decay of the moving average of parameters that is released.")
    label_dropout: float = setting(0.1, "How often the network is not told a record's class.")
    width: int = setting(32, "Channels of the finest maps; the coarser ones have twice as many.")
    levels: int = setting(3, "Sizes of maps, each half of the one before.")
    blocks: int = setting(2, "Residual blocks per size on the way down.")
    attention: int = setting(7, "Longer side of the maps up to which they get attention.")
    sample_steps: int = setting(1000, "Steps by which an image is drawn.")
    heun: bool = setting(
        True, "Correct each of these steps at its end; without it and churn the sampler is DDIM."
    )
    churn: float = setting(10.0, "Fresh noise while an image is drawn; 0: none.")
    churn_min: float = setting(0.025, "Noise level down to which there is fresh noise.")
    guidance: float = setting(0.0, "How far images are driven away from those of no class.")

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "steps", "batch", "copies", "width", "levels", "blocks",
            "sample_steps",
        )  # fmt: skip
        check_positive(self, "clip_norm", "lr")
        for name in ("average", "label_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected 0 to below 1")
        check_not_negative(self, "churn", "churn_min", "guidance")
        if self.width % 2:
            raise InvalidSettings(f"width is {self.width}, expected an even number")
        if self.guidance and not self.label_dropout:
            raise InvalidSettings(
                "guidance needs a network that knows images of no class; pass --label-dropout 0.1"
            )


def _epochs(facts: PublicFacts, epochs: int, batch: int) -> dict[str, Any]:
    """Return steps and batch; the last batch of an epoch counts as one."""
    batch = min(batch, facts.units)
    return {"steps": epochs * math.ceil(facts.units / batch), "batch": batch}


def _by_size(facts: PublicFacts) -> dict[str, Any]:
    """Return what the network is like: three sizes of maps to 32 px, one more for each doubling."""
    side, is_grey = max(facts.shape[1:]), facts.shape[0] == 1
    levels = 3 + max(0, math.ceil(math.log2(side / 32)))
    return {"levels": levels, "attention": 7 if is_grey and side <= 28 else 16}


def _paper(facts: PublicFacts, epsilon: float, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration for MNIST (grey) or CelebA (colour)."""
    batch = 4096 if facts.shape[0] == 1 else 2048
    churn_min = 0.025 if epsilon >= 5 else 0.1
    return _by_size(facts) | _epochs(facts, 300, batch) | {"churn_min": churn_min}


def _cifar(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    return _by_size(facts) | _epochs(facts, 500, 2048) | {"copies": 8}


def _best(facts: PublicFacts, epsilon: float, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return fewer copies, spread evenly, and fewer steps: what one GPU does in half an hour."""
    pixels = math.prod(facts.shape[1:])
    copies = max(2, min(8, 8 * 28**2 // pixels))
    return _by_size(facts) | {
        "batch": min(4096 if facts.shape[0] == 1 else 2048, facts.units),
        "steps": 3000 if epsilon >= 5 else 2000,
        "copies": copies,
        "stratified": True,
        "sample_steps": 40,
    }


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: a small network, large batches."""
    return {
        "images_per_class": 200,
        "steps": 250,
        "batch": max(1, round(facts.units / 8)),
        "copies": 4,
        "stratified": True,
        "lr": 5e-3,
        "average": 0.97,
        "width": 8,
        "levels": 2,
        "blocks": 1,
        "attention": 4,
        "sample_steps": 20,
    }


State = tuple[Params, AdamState, Params]
"""Parameters, what Adam remembers, and the moving average of the parameters."""


def step_forward(state: State, slopes: Params, lr: Tensor, decay: Tensor) -> State:
    """Move the parameters along a released gradient, and their average after them."""
    params, moments, average = state
    params, moments = ADAM.step(params, slopes, moments, lr)
    return params, moments, averaged(average, params, decay)


class DPDM:
    """A denoiser trained on noisy gradients alone, and images drawn with it."""

    config_class: ClassVar[type] = DPDMConfig
    summary: ClassVar[str] = "a diffusion model, trained on noisy gradients of private records"
    public_inputs: Sequence[PublicInput] = ()
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "MNIST and CelebA, by the paper's authors"),
        "paper-cifar10": Preset(_cifar, "CIFAR-10, by the paper's authors"),
        "best": Preset(_best, "nothing: the paper's settings, cut to what one GPU does"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    default_preset = staticmethod(small_or_paper)

    def __init__(self, config: DPDMConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.network = DiffusionGenerator(
            facts.shape,
            facts.classes,
            width=config.width,
            levels=config.levels,
            blocks=config.blocks,
            attention=config.attention,
            guidance=config.guidance,
            steps=config.sample_steps,
            heun=config.heun,
            churn=config.churn,
            churn_min=config.churn_min,
        )

    def plan(self) -> Plan:
        """One noisy gradient of the whole network for each step."""
        return Plan(
            (
                PlannedRelease(
                    name="gradient",
                    kind="gradient",
                    count=self.config.steps,
                    sampling_rate=self.config.batch / self.facts.units,
                    dimension=parameter_count(self._first()),
                ),
            )
        )

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Follow noisy gradients of the denoising loss, then draw the set."""
        config, device = self.config, curator.engine.device
        loss = DenoisingLoss(
            Denoiser(self.network.unet.on(device)),
            config.copies,
            label_dropout=config.label_dropout,
            stratified=config.stratified,
        )
        at_once = self._at_once(device)
        done, state = self._restored(curator)
        lr = torch.full((), config.lr, device=device)
        for step in progress.steps(range(done, config.steps), spent=curator.epsilon_spent):
            draws = draws_of(step, seed=self.seed, device=device)
            slopes = curator.gradient(
                loss, state[0], draws, clip_norm=config.clip_norm, at_once=at_once
            )
            decay = torch.full((), decay_at(step, most=config.average), device=device)
            state = curator.engine.run(step_forward, state, slopes, lr, decay)
            so_far = partial(self._drawn, state[2])
            curator.checkpoint(step + 1, {"state": leaves_of(state)}, so_far)
        return self._drawn(state[2])

    def _at_once(self, device: torch.device) -> int:
        """Records whose copies fit into memory together."""
        height, width = self.network.unet.padded
        maps = self.config.copies * self.config.width * height * width
        return max(1, MAPS_AT_ONCE[device.type] // maps)

    def _first(self) -> Params:
        return self.network.init(public_generator(self.seed, "network"))

    def _restored(self, curator: Curator) -> tuple[int, State]:
        """Return steps done, and the state after them."""
        params = moved(self._first(), curator.engine.device)
        state = params, ADAM.start(params), params
        done, saved = curator.restore()
        return done, filled(state, cast(Params, saved["state"])) if done else state

    def _drawn(self, params: Params) -> SyntheticSet:
        """Draw the set, and keep the generator with it."""
        facts, released = self.facts, Generator(self.network, params, {})
        count = self.config.images_per_class * facts.classes
        images, labels = released.sample(count, seed=self.seed)
        return SyntheticSet(images, labels, facts.class_names, generator=released)
