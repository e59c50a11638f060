"""Private Set Generation (Chen, Kerkouche, Fritz; NeurIPS 2022), Algorithm 1.

A few images per class are optimised directly, so that the gradient they give a freshly drawn
network points where the private data's gradient points. The set is useful for training by
construction, and nothing else has to be learned privately.

Private access: R * T * K `gradient` releases, each over a Poisson batch.
Deviations: see docs/methods/psg.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.method import Preset, check_at_least_one, check_positive, setting
from understudy.nets.convnet import ConvNet
from understudy.nets.params import Params, moved, parameter_count, per_channel
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.sgd import SGD, RecordLoss, fit, mean_loss


@dataclass(frozen=True, kw_only=True)
class PSGConfig:
    """Settings of PSG; the letters are the paper's."""

    images_per_class: int = setting(10, "Synthetic images per class (spc).")
    rounds: int = setting(1000, "Networks drawn one after another (R).")
    outer: int = setting(10, "Outer iterations per network (T).")
    batches: int = setting(10, "Private batches, and image steps, per outer iteration (K).")
    inner: int = setting(50, "Epochs of the network on the set after each outer iteration (J).")
    batch: int = setting(256, "Expected number of units in a Poisson batch (B).")
    clip_norm: float = setting(0.1, "Bound on each unit's gradient norm (C).")
    start: float = setting(1.0, "Standard deviation of the noise that images start as.")
    image_lr: float = setting(0.1, "Learning rate of the images.")
    image_momentum: float = setting(0.5, "Momentum of the images.")
    network_lr: float = setting(0.01, "Learning rate of the network on the set.")
    width: int = setting(128, "Filters per convolution of the network.")
    project: bool = setting(False, "Keep pixels within [0, 1] after every image step.")
    smooth: float = setting(0.0, "Blur of every image step, a standard deviation in pixels.")
    image_steps: int = setting(1, "Image steps per private batch.")
    image_lr_end: float = setting(1.0, "Image learning rate at the end, as a share; linear.")
    average: float = setting(0.0, "Share of the run, at its end, whose images are averaged.")
    shrink: bool = setting(False, "Weigh rows of the noisy gradient by how far they exceed noise.")

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "rounds", "outer", "batches", "inner", "batch", "width",
            "image_steps",
        )  # fmt: skip
        if not 0 <= self.smooth < float("inf"):
            raise InvalidSettings(f"smooth is {self.smooth}, expected 0 or more")
        for name in ("image_lr_end", "average"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected 0 to 1")
        check_positive(self, "clip_norm", "start", "image_lr", "network_lr")

    @property
    def steps(self) -> int:
        """R * T * K: releases."""
        return self.rounds * self.outer * self.batches

    def lr_at(self, step: int) -> float:
        """Return the images' learning rate at `step`."""
        return self.image_lr * (1 - (1 - self.image_lr_end) * step / self.steps)


def _paper(_: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paper's schedule: T = spc, J = 500 / spc (1 at spc 1), R by epsilon."""
    per_class = max(1, int(given.get("images_per_class", 10)))
    return {
        "outer": per_class,
        "inner": max(1, 500 // per_class) if per_class > 1 else 1,
        "rounds": 1000 if epsilon >= 5 else 200,
    }


def _best(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fewer, larger batches, each used for ten smooth steps, on small networks.

    With little budget, networks are drawn and dropped quickly. A single image per class is matched
    on fresh networks alone: one trained on ten images only knows these by heart.
    """
    rounds, outer, inner = (1000, 10, 50) if epsilon >= 5 else (160, 5, 10)
    if given.get("images_per_class") == 1:
        rounds, outer, inner = rounds * outer, 1, 1
    return {
        "rounds": rounds,
        "outer": outer,
        "batches": 1,
        "inner": inner,
        "batch": max(1, round(facts.units / 24)),
        "width": 64,
        "start": 0.1,
        "image_lr": 0.3,
        "image_steps": 10,
        "smooth": 1.0,
        "average": 0.5,
        "project": True,
    }


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: a small network, large batches, bold steps."""
    return {
        "rounds": 150,
        "outer": 5,
        "batches": 1,
        "inner": 10,
        "batch": max(1, min(400, round(0.28 * facts.units))),
        "image_lr": 1.0,
        "width": 8,
        "project": True,
    }


def matching_distance(real: Params, synthetic: Params, *, noise_std: float = 0.0) -> Tensor:
    """Sum, over the rows of every weight matrix, 1 - cosine of the two gradients.

    Rows are output channels or units. Biases and norm scales (one dimension) are left out.

    Args:
        real: the noisy gradient.
        synthetic: the synthetic set's.
        noise_std: standard deviation of the noise in `real`; rows count by the share of their
            squared length that noise does not explain.
    """
    rows = []
    for name, noisy in real.items():
        if noisy.ndim >= 2:
            a, b = noisy.flatten(1), synthetic[name].flatten(1)
            distance = 1 - (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-6)
            if noise_std:
                explained = a.shape[1] * noise_std**2 / a.square().sum(1)
                distance = distance * (1 - explained).clamp(min=0)
            rows.append(distance)
    return torch.cat(rows).sum()


@dataclass(frozen=True)
class ImageStep:
    """One step of the images towards the gradient that they should give."""

    network: ConvNet
    momentum: float
    noise_std: float
    """What the matching distance is told of the noise."""
    pixel_range: tuple[tuple[float, ...], tuple[float, ...]] | None
    """Black and white of each channel, normalised, to keep pixels between."""
    smooth: float
    """Standard deviation, in pixels, of the blur of every step; 0 for none."""

    def __call__(
        self,
        state: tuple[Tensor, Tensor],
        labels: Tensor,
        theta: Params,
        g_real: Params,
        lr: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Move the images so that the gradient they give gets nearer to the noisy one."""
        images, velocity = state
        pixels = images.detach().requires_grad_()
        weights = {name: weight.detach().requires_grad_() for name, weight in theta.items()}
        loss = mean_loss(self.network, weights, pixels, labels)
        g_synthetic = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = matching_distance(
            g_real, dict(zip(weights, g_synthetic, strict=True)), noise_std=self.noise_std
        )
        (slope,) = torch.autograd.grad(distance, pixels)
        if self.smooth:
            slope = blurred(slope, self.smooth)

        velocity = self.momentum * velocity + slope
        images = images - lr * velocity
        if self.pixel_range:
            black, white = (per_channel(value, images) for value in self.pixel_range)
            images = torch.minimum(torch.maximum(images, black), white)
        return images, velocity


def blurred(images: Tensor, std: float) -> Tensor:
    """Blur with a Gaussian of `std` pixels; nothing comes in from outside."""
    reach = math.ceil(3 * std)
    offsets = torch.arange(-reach, reach + 1, device=images.device)
    weights = torch.exp(-0.5 * (offsets / std).square())
    weights = (weights / weights.sum()).to(images.dtype)
    planes = images.flatten(0, 1)[:, None]
    planes = F.conv2d(planes, weights.view(1, 1, -1, 1), padding=(reach, 0))
    return F.conv2d(planes, weights.view(1, 1, 1, -1), padding=(0, reach)).view_as(images)


class PSG:
    """Private Set Generation: images matched to noisy gradients of many fresh networks."""

    config_class: ClassVar[type] = PSGConfig
    summary: ClassVar[str] = "a few images per class, optimised to give private data's gradients"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "MNIST and Fashion-MNIST, by the paper's authors"),
        "best": Preset(_best, "a held-out sixth of MNIST's and Fashion-MNIST's training records"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    public_inputs: ClassVar[tuple[PublicInput, ...]] = ()

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose `small` for small images or few units."""
        return "small" if min(facts.shape[1:]) <= 16 or facts.units < 10_000 else "paper"

    def __init__(self, config: PSGConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.network = ConvNet(facts.shape, facts.classes, config.width)

    def plan(self) -> Plan:
        """R * T * K noisy gradients of the whole network."""
        weights = self.network.init(public_generator(self.seed, "plan"))
        return Plan(
            (
                PlannedRelease(
                    name="gradient",
                    kind="gradient",
                    count=self.config.steps,
                    sampling_rate=self.config.batch / self.facts.units,
                    dimension=parameter_count(weights),
                ),
            )
        )

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Algorithm 1; its loops over r, t and k are counted as one, so that it can be resumed."""
        config, engine = self.config, curator.engine
        network = self.network.on(engine.device)
        loss = RecordLoss(network, self.facts.mean, self.facts.std)
        image_step = self._image_step(network, curator.calibration.noise_multiplier)
        per_run = config.outer * config.batches
        averaged_from = config.steps - round(config.average * config.steps)
        labels = torch.arange(self.facts.classes).repeat_interleave(config.images_per_class)
        labels = labels.to(engine.device)
        done, images, velocity, average, theta = self._start(curator, len(labels))

        for step in progress.steps(range(done, config.steps), spent=curator.epsilon_spent):
            if step % per_run == 0:  # a new run r: a fresh network
                theta = self._draw(step // per_run, engine.device)
            g_real = curator.gradient(loss, theta, clip_norm=config.clip_norm)
            lr = torch.full((), config.lr_at(step), device=engine.device)
            images, velocity = engine.run(
                image_step,
                (images, velocity), labels, theta, g_real, lr,
                times=config.image_steps,
            )  # fmt: skip
            if step >= averaged_from:
                average = average + (images - average) / (step - averaged_from + 1)
            is_last_batch = (step + 1) % config.batches == 0
            is_last_of_run = (step + 1) % per_run == 0
            if is_last_batch and not is_last_of_run:  # after the last t the network is thrown away
                theta = fit(
                    network,
                    theta,
                    images,
                    labels,
                    sgd=SGD(lr=config.network_lr, epochs=config.inner),
                    generator=public_generator(self.seed, "order", step),
                    engine=engine,
                )
            state = {"images": images, "velocity": velocity, "average": average, "theta": theta}
            chosen = average if step >= averaged_from else images
            curator.checkpoint(step + 1, state, partial(self._set, chosen, labels))
        return self._set(average if averaged_from < config.steps else images, labels)

    def _start(self, curator: Curator, count: int) -> tuple[int, Tensor, Tensor, Tensor, Params]:
        """Return steps done, images, their velocity and average, and the network."""
        done, saved = curator.restore()
        if done:
            tensors = (cast(Tensor, saved[name]) for name in ("images", "velocity", "average"))
            return done, *tensors, cast(Params, saved["theta"])  # type: ignore[return-value]
        generator = public_generator(self.seed, "images")
        images = self.config.start * torch.randn((count, *self.facts.shape), generator=generator)
        images = images.to(curator.engine.device)
        return 0, images, torch.zeros_like(images), torch.zeros_like(images), {}

    def _set(self, images: Tensor, labels: Tensor) -> SyntheticSet:
        """Bring normalised images back to pixels."""
        mean, std = (per_channel(value, images) for value in (self.facts.mean, self.facts.std))
        pixels = images * std + mean
        if self.config.project:
            pixels = pixels.clamp(0, 1)  # only rounding is left to clamp
        return SyntheticSet(pixels.cpu(), labels.cpu(), self.facts.class_names)

    def _draw(self, number: int, device: torch.device) -> Params:
        drawn = self.network.init(public_generator(self.seed, "network", number))
        return moved(drawn, device)

    def _image_step(self, network: ConvNet, noise_multiplier: float) -> ImageStep:
        config = self.config
        noise_std = noise_multiplier * config.clip_norm / config.batch if config.shrink else 0.0
        pixel_range = None
        if config.project:
            normalise = zip(self.facts.mean, self.facts.std, strict=True)
            ends = [(-mean / std, (1 - mean) / std) for mean, std in normalise]
            pixel_range = tuple(e[0] for e in ends), tuple(e[1] for e in ends)
        return ImageStep(network, config.image_momentum, noise_std, pixel_range, config.smooth)
