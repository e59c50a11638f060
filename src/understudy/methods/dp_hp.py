"""DP-HP (Vinaroz, Charusaie, Harder, Adamczewski, Park; ICML 2022): Hermite features, once.

Mehler's formula writes a Gaussian kernel as a sum of Hermite polynomials whose weights fall fast,
so a few of them say what thousands of random features say. Two embeddings are released with noise,
class by class: the features of every pixel by itself (sum kernel), and products of the features of
some pairs of pixels (product kernel). A generator is then trained to have the same.

Private access: one `class_sums` release of all records.
Deviations: see docs/methods/dp-hp.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.fitting import (
    GRAIN,
    DistanceStep,
    MeanEmbedding,
    class_means,
    unbiased_gap,
)
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
)
from understudy.nets.generators import ConvGenerator, DenseGenerator, GeneratorNetwork
from understudy.nets.params import Params
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Block, PublicFacts
from understudy.privacy.releases.class_sums import Embedding
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet

GRID = 10_001
"""Brightnesses at which the norm of features is looked up."""
SEEN = "MNIST and Fashion-MNIST, by training images, after a look at Fashion-MNIST's test set"
"""What the grain was chosen on."""


@dataclass(frozen=True, kw_only=True)
class DPHPConfig:
    """Settings of DP-HP."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    scale: float = setting(0.005, "Squared length scale of the kernel, for pixels in [0, 1].")
    sum_order: int = setting(100, "Highest Hermite polynomial of single pixels.")
    product_order: int = setting(20, "Highest Hermite polynomial of each pixel of a pair.")
    pairs: int = setting(10, "Pairs of pixels; 0 for single pixels alone.")
    product_ratio: float = setting(3.6, "Noise on products relative to single pixels.")
    sum_weight: float = setting(20.0, "Weight of single pixels in the loss; products have 1.")
    count_ratio: float = setting(
        0.0, "Noise on class counts relative to single pixels; 0: classes are known to be equal."
    )
    generator: str = setting("dense", "Generator: dense or conv.")
    code: int = setting(5, "Length of the generator's random code.")
    hidden: int = setting(500, "Width of the generator's hidden layers.")
    steps: int = setting(3000, "Steps of the generator.")
    batch: int = setting(200, "Images generated per step.")
    lr: float = setting(0.01, "Learning rate of the generator.")
    decay: float = setting(0.81, "What the learning rate is multiplied by after each fifth.")
    unbiased: bool = setting(False, "Leave the product of an image with itself out of the loss.")
    grain: float = setting(0.0, GRAIN)

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "sum_order", "product_order", "code", "hidden", "steps",
            "batch",
        )  # fmt: skip
        check_positive(self, "scale", "product_ratio", "sum_weight", "lr", "decay")
        check_not_negative(self, "grain", "pairs")
        if self.generator not in ("dense", "conv"):
            raise InvalidSettings(f"generator is '{self.generator}', expected dense or conv")


def _paper(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _fashion(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {"scale": 0.15, "sum_weight": 10.0, "generator": "conv"}


def _best(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {"grain": 0.1}


def _best_fashion(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    return _fashion(facts, epsilon, given) | _best(facts, epsilon, given)


def _small(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {"images_per_class": 200, "sum_order": 20, "scale": 0.15, "steps": 1500}


def hermite_features(pixels: Tensor, scale: float, order: int) -> Tensor:
    """Return features (..., order + 1) whose products sum to exp(-(x - y)^2 / (2 scale)), nearly.

    They are normalised Hermite polynomials, times a Gaussian, times the root of their weight in
    Mehler's formula, by the three-term recursion of all that.
    """
    rho = _rho(scale)
    features = [(1 - rho**2) ** 0.25 * torch.exp(-rho / (1 + rho) * pixels.square())]
    if order > 0:
        features.append(math.sqrt(2 * rho) * pixels * features[0])
    for k in range(1, order):
        nearer = math.sqrt(2 * rho / (k + 1)) * pixels * features[k]
        features.append(nearer - rho * math.sqrt(k / (k + 1)) * features[k - 1])
    return torch.stack(features, dim=-1)


def _rho(scale: float) -> float:
    """Solve rho / (1 - rho^2) = 1 / (2 scale)."""
    return -scale + math.sqrt(scale**2 + 1)


def largest_norm(scale: float, order: int) -> float:
    """Return the largest norm that the features of a pixel in [0, 1] have.

    Below 1, for the polynomials beyond `order` are missing: at scale 0.005 and order 20 only 0.6.
    """
    pixels = torch.linspace(0, 1, GRID, dtype=torch.float64)
    return float(hermite_features(pixels, scale, order).norm(dim=-1).max())


@dataclass(frozen=True)
class Hermite:
    """The two embeddings."""

    scale: float
    sum_order: int
    product_order: int
    sum_weight: float
    unbiased: bool = False

    def single(self, images: Tensor) -> Tensor:
        """Return features of every pixel (n, pixels * (order + 1)), of norm at most `norms[0]`."""
        pixels = images.flatten(1)
        features = hermite_features(pixels, self.scale, self.sum_order)
        return features.flatten(1) / math.sqrt(pixels.shape[1])

    def products(self, images: Tensor, pairs: Tensor) -> Tensor:
        """Return products of features (n, pairs * (order + 1)^2), of norm at most `norms[1]`."""
        pixels = images.flatten(1)[:, pairs.flatten()].view(len(images), *pairs.shape)
        features = hermite_features(pixels, self.scale, self.product_order)
        both = features[:, :, 0, :, None] * features[:, :, 1, None, :]
        return both.flatten(1) / math.sqrt(len(pairs))

    @property
    def norms(self) -> tuple[float, float]:
        """Return the largest norms of both."""
        product = largest_norm(self.scale, self.product_order)
        return largest_norm(self.scale, self.sum_order), product**2

    def __call__(self, images: Tensor, labels: Tensor, known: Params) -> Tensor:
        """Return the squared distance of the images' embeddings from the private data's."""
        distance = self.sum_weight * self._gap(self.single(images), labels, known, "single")
        if "products" in known:
            found = self.products(images, known["pairs"])
            distance = distance + self._gap(found, labels, known, "products")
        return distance

    def _gap(self, features: Tensor, labels: Tensor, known: Params, name: str) -> Tensor:
        target = known[name]
        if self.unbiased:
            return unbiased_gap(features, labels, target, known["shares"])
        return (class_means(features, labels, len(target)) - target).square().sum()


class DPHP(MeanEmbedding):
    """A generator whose images have the private data's mean Hermite features."""

    config: DPHPConfig
    config_class: ClassVar[type] = DPHPConfig
    summary: ClassVar[str] = "a generator fitted to noisy means of Hermite features"
    presets: ClassVar[dict[str, Preset]] = {
        "best": Preset(_best, SEEN),
        "best-fashion": Preset(_best_fashion, SEEN),
        "paper": Preset(_paper, "MNIST, by the paper's authors"),
        "paper-fashion": Preset(_fashion, "Fashion-MNIST, by the paper's authors"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    def __init__(self, config: DPHPConfig, facts: PublicFacts, *, seed: int) -> None:
        super().__init__(config, facts, seed=seed)
        self.pixels = math.prod(facts.shape)
        self.embedding = Hermite(
            config.scale, config.sum_order, config.product_order, config.sum_weight,
            config.unbiased,
        )  # fmt: skip

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Single pixels, pairs, and counts if they are asked for."""
        config, (single, product) = self.config, self.embedding.norms
        blocks = [
            Block(name="single", dimension=self.pixels * (config.sum_order + 1), bound=single)
        ]
        if config.pairs:
            dimension = config.pairs * (config.product_order + 1) ** 2
            ratio = config.product_ratio
            blocks.append(Block(name="products", dimension=dimension, bound=product, ratio=ratio))
        if config.count_ratio:
            blocks.append(Block(name="counts", dimension=1, ratio=config.count_ratio))
        return tuple(blocks)

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Release both embeddings, train the generator, draw the set."""
        config, facts, blocks = self.config, self.facts, self.blocks
        pairs = self._pairs().to(curator.engine.device)

        def embed(image: Tensor) -> list[Tensor]:
            found = {"single": lambda: self.embedding.single(image[None])[0]}
            found["products"] = lambda: self.embedding.products(image[None], pairs)[0]
            found["counts"] = lambda: torch.ones(1, device=image.device)
            return [found[block.name]() for block in blocks]

        sums = curator.class_sums(Embedding(embed, blocks))
        counts = sums.pop("counts", None)
        fit = self.fit(DistanceStep(self._network(), self.embedding), counts=counts)
        known = {name: total / facts.units for name, total in sums.items()} | {"pairs": pairs}
        known["shares"] = fit.class_shares.to(pairs.device)
        params = fit.run(known, curator, progress)
        return fit.drawn(params, config.images_per_class, grain=config.grain)

    def _pairs(self) -> Tensor:
        """Draw pairs of different pixels, before anything is released."""
        generator = public_generator(self.seed, "pairs")
        drawn = [
            torch.randperm(self.pixels, generator=generator)[:2] for _ in range(self.config.pairs)
        ]
        return torch.stack(drawn) if drawn else torch.zeros((0, 2), dtype=torch.int64)

    def _network(self) -> GeneratorNetwork:
        config, facts = self.config, self.facts
        if config.generator == "conv":
            return ConvGenerator(facts.shape, facts.classes, code=config.code, hidden=config.hidden)
        return DenseGenerator(
            facts.shape, facts.classes, code=config.code, hidden=(config.hidden, config.hidden)
        )
