"""DP-MERF (Harder, Adamczewski, Park; AISTATS 2021): random features of the private data, once.

The mean of random Fourier features, class by class, is released with noise. A generator is then
trained until its images have the same mean features. The data are never touched again.

Private access: one `class_sums` release of all records.
Deviations: see docs/methods/dp-merf.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from understudy.methods.fitting import DistanceStep, MeanEmbedding, class_means, unbiased_gap
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
)
from understudy.nets.generators import ConvGenerator
from understudy.nets.params import Params
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Block, PublicFacts
from understudy.privacy.releases.class_sums import Embedding
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet

MNIST_SCALE, FASHION_SCALE, MNIST_PIXELS = 105.0, 127.0, 784
"""The paper's squared length scales; for other sizes, in proportion to the pixels."""


@dataclass(frozen=True, kw_only=True)
class DPMERFConfig:
    """Settings of DP-MERF."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    features: int = setting(10_000, "Random features: a cosine and a sine of each frequency.")
    scale: float = setting(MNIST_SCALE, "Squared length scale of the kernel.")
    finer: int = setting(0, "Further kernels, each of half the length scale of the one before.")
    count_ratio: float = setting(
        0.0, "Noise on class counts relative to features; 0: classes are known to be equal."
    )
    code: int = setting(5, "Length of the generator's random code.")
    hidden: int = setting(200, "Width of the generator's hidden layer.")
    unbiased: bool = setting(
        False,
        "Correct the loss for how few images of a class a step sees; else they get too alike.",
    )
    steps: int = setting(3000, "Steps of the generator.")
    batch: int = setting(100, "Images generated per step.")
    lr: float = setting(0.01, "Learning rate of the generator.")
    decay: float = setting(0.9, "What the learning rate is multiplied by after each fifth.")

    def __post_init__(self) -> None:
        check_at_least_one(self, "images_per_class", "features", "code", "hidden", "steps", "batch")
        check_positive(self, "scale", "lr", "decay")
        check_not_negative(self, "finer")


def _paper(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    return {"scale": MNIST_SCALE * math.prod(facts.shape) / MNIST_PIXELS}


def _fashion(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    return {"scale": FASHION_SCALE * math.prod(facts.shape) / MNIST_PIXELS}


def _best(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return three kernels, an unbiased loss, and a longer code; the generator is trained longer.

    One wide kernel sees little more than blurred images, which do for it, but not for a network
    that is trained on them for long.
    """
    return _paper(facts, epsilon, given) | {
        "finer": 2,
        "unbiased": True,
        "code": 20,
        "steps": 10_000,
        "batch": 500,
        "decay": 0.5,
    }


def _small(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: fewer features, so that noise leaves more."""
    return _paper(facts, epsilon, given) | {"images_per_class": 200, "features": 1000}


def drawn_frequencies(
    count: int, pixels: int, *, scale: float, finer: int, generator: torch.Generator
) -> Tensor:
    """Draw frequencies (count, pixels) of each Gaussian kernel in turn; together, of their mean.

    Args:
        count: of frequencies.
        pixels: of an image.
        scale: squared length scale of the widest kernel.
        finer: how many more there are, each of half the length scale of the one before.
        generator: public.
    """
    drawn = torch.randn((count, pixels), generator=generator) / math.sqrt(scale)
    return drawn * 2.0 ** (torch.arange(count) % (finer + 1))[:, None]


def random_features(images: Tensor, frequencies: Tensor) -> Tensor:
    """Map images (n, c, h, w) to cosines and sines (n, 2 * frequencies), of norm 1."""
    angles = images.flatten(1) @ frequencies.T
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(len(frequencies))


def embedding_distance(images: Tensor, labels: Tensor, known: Params) -> Tensor:
    """Return the squared distance of the images' embedding from the private data's."""
    features = random_features(images, known["frequencies"])
    target = known["target"]
    return (class_means(features, labels, len(target)) - target).square().sum()


def unbiased_distance(images: Tensor, labels: Tensor, known: Params) -> Tensor:
    """Estimate the distance that endlessly many images would have, by these few."""
    features = random_features(images, known["frequencies"])
    return unbiased_gap(features, labels, known["target"], known["shares"])


class DPMERF(MeanEmbedding):
    """A generator whose images have the private data's mean random features."""

    config: DPMERFConfig
    config_class: ClassVar[type] = DPMERFConfig
    summary: ClassVar[str] = "a generator fitted to the noisy mean of random Fourier features"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "MNIST, by the paper's authors"),
        "paper-fashion": Preset(_fashion, "Fashion-MNIST, by the paper's authors"),
        "best": Preset(_best, "a held-out sixth of MNIST's and Fashion-MNIST's training records"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Features, and counts if they are asked for."""
        features = Block(name="features", dimension=2 * self._frequency_count)
        if not self.config.count_ratio:
            return (features,)
        return features, Block(name="counts", dimension=1, ratio=self.config.count_ratio)

    @property
    def _frequency_count(self) -> int:
        return max(1, self.config.features // 2)

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Release the embedding, train the generator, draw the set."""
        config, facts, device = self.config, self.facts, curator.engine.device
        frequencies = drawn_frequencies(
            self._frequency_count,
            math.prod(facts.shape),
            scale=config.scale,
            finer=config.finer,
            generator=public_generator(self.seed, "frequencies"),
        ).to(device)

        def embed(image: Tensor) -> list[Tensor]:
            features = random_features(image[None], frequencies)[0]
            return [features, torch.ones(1, device=image.device)][: len(self.blocks)]

        sums = curator.class_sums(Embedding(embed, self.blocks))
        network = ConvGenerator(facts.shape, facts.classes, code=config.code, hidden=config.hidden)
        distance = unbiased_distance if config.unbiased else embedding_distance
        fit = self.fit(DistanceStep(network, distance), counts=sums.get("counts"))
        known = {
            "frequencies": frequencies,
            "target": sums["features"] / facts.units,
            "shares": fit.class_shares.to(device),
        }
        params = fit.run(known, curator, progress)
        return fit.drawn(params, config.images_per_class)
