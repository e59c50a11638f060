"""Private Set Generation (Chen, Kerkouche, Fritz; NeurIPS 2022), Algorithm 1.

A few images per class are optimised directly, so that the gradient they give a freshly drawn
network points where the private data's gradient points. The set is useful for training by
construction, and nothing else has to be learned privately.

Private access: R * T * K `gradient` releases, each over a Poisson batch.
Deviations: see docs/methods/psg.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.method import Preset, setting
from understudy.nets.convnet import ConvNet
from understudy.nets.params import Params, moved, parameter_count
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.sgd import SGD, fit, mean_loss


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
    image_lr: float = setting(0.1, "Learning rate of the images.")
    image_momentum: float = setting(0.5, "Momentum of the images.")
    network_lr: float = setting(0.01, "Learning rate of the network on the set.")
    width: int = setting(128, "Filters per convolution of the network.")
    project: bool = setting(False, "Keep pixels within [0, 1] after every image step.")

    def __post_init__(self) -> None:
        for name in ("images_per_class", "rounds", "outer", "batches", "inner", "batch", "width"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected at least 1")
        for name in ("clip_norm", "image_lr", "network_lr"):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidSettings(
                    f"{name} is {getattr(self, name)}, expected a positive number"
                )

    @property
    def steps(self) -> int:
        """R * T * K: releases, and image steps."""
        return self.rounds * self.outer * self.batches


def _paper(_: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paper's schedule: T = spc, J = 500 / spc (1 at spc 1), R by epsilon."""
    per_class = max(1, int(given.get("images_per_class", 10)))
    return {
        "outer": per_class,
        "inner": max(1, 500 // per_class) if per_class > 1 else 1,
        "rounds": 1000 if epsilon >= 5 else 200,
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


def matching_distance(real: Params, synthetic: Params) -> Tensor:
    """Sum, over the rows of every weight matrix, 1 - cosine of the two gradients.

    Rows are output channels or units. Biases and norm scales (one dimension) are left out.
    """
    rows = []
    for name, noisy in real.items():
        if noisy.ndim >= 2:
            a, b = noisy.flatten(1), synthetic[name].flatten(1)
            rows.append(1 - (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1) + 1e-6))
    return torch.cat(rows).sum()


class PSG:
    """Private Set Generation: images matched to noisy gradients of many fresh networks."""

    config_class: ClassVar[type] = PSGConfig
    summary: ClassVar[str] = "a few images per class, optimised to give private data's gradients"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "MNIST and Fashion-MNIST, by the paper's authors"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose `small` for small images or few units."""
        return "small" if min(facts.shape[1:]) <= 16 or facts.units < 10_000 else "paper"

    def __init__(self, config: PSGConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.network = ConvNet(facts.shape, facts.classes, config.width)
        self._mean = torch.tensor(facts.mean).view(-1, 1, 1)
        self._std = torch.tensor(facts.std).view(-1, 1, 1)

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
        self._move_to(engine.device)
        per_run = config.outer * config.batches
        labels = torch.arange(self.facts.classes).repeat_interleave(config.images_per_class)
        labels = labels.to(engine.device)
        images = torch.randn(
            (len(labels), *self.facts.shape), generator=public_generator(self.seed, "images")
        ).to(engine.device)
        velocity, theta = torch.zeros_like(images), cast(Params, {})
        done, saved = curator.restore()
        if done:
            images, velocity = cast(Tensor, saved["images"]), cast(Tensor, saved["velocity"])
            theta = cast(Params, saved["theta"])

        for step in progress.steps(range(done, config.steps), spent=curator.epsilon_spent):
            if step % per_run == 0:  # a new run r: a fresh network
                theta = self._draw_network(step // per_run)
            g_real = curator.gradient(self._loss, theta, clip_norm=config.clip_norm)
            images, velocity = engine.run(self._image_step, images, velocity, labels, theta, g_real)
            is_last_batch = (step + 1) % config.batches == 0
            is_last_of_run = (step + 1) % per_run == 0
            if is_last_batch and not is_last_of_run:  # after the last t the network is thrown away
                theta = fit(
                    self.network,
                    theta,
                    images,
                    labels,
                    sgd=SGD(lr=config.network_lr, epochs=config.inner),
                    generator=public_generator(self.seed, "order", step),
                    engine=engine,
                )
            curator.checkpoint(step + 1, {"images": images, "velocity": velocity, "theta": theta})
        pixels = (images * self._std + self._mean).clamp(0, 1)
        return SyntheticSet(pixels.cpu(), labels.cpu(), self.facts.class_names)

    def _move_to(self, device: torch.device) -> None:
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        if device.type == "cuda":  # where bfloat16 halves the traffic, which is all the time
            self.network = replace(self.network, maps=torch.bfloat16)

    def _draw_network(self, number: int) -> Params:
        drawn = self.network.init(public_generator(self.seed, "network", number))
        return moved(drawn, self._mean.device)

    def _loss(self, theta: Params, image: Tensor, label: Tensor) -> Tensor:
        """Return the classification loss of one private record; runs behind the door."""
        normalised = (image - self._mean) / self._std
        return F.cross_entropy(self.network(theta, normalised[None]), label[None])

    def _image_step(
        self, images: Tensor, velocity: Tensor, labels: Tensor, theta: Params, g_real: Params
    ) -> tuple[Tensor, Tensor]:
        """Move the images so that the gradient they give gets nearer to the noisy one."""
        pixels = images.detach().requires_grad_()
        weights = {name: weight.detach().requires_grad_() for name, weight in theta.items()}
        loss = mean_loss(self.network, weights, pixels, labels)
        g_synthetic = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = matching_distance(g_real, dict(zip(weights, g_synthetic, strict=True)))
        (slope,) = torch.autograd.grad(distance, pixels)

        velocity = self.config.image_momentum * velocity + slope
        images = images - self.config.image_lr * velocity
        if self.config.project:
            black, white = -self._mean / self._std, (1 - self._mean) / self._std
            images = torch.minimum(torch.maximum(images, black), white)
        return images, velocity
