"""DP-MEPF (Harder, Jalali Asadabadi, Sutherland, Park; TMLR 2023): perceptual features, once.

A network that was trained on public data sees in an image what matters to people. The mean of its
activations over the private images, class by class or over all, is released with noise; a generator
is then trained until its images have the same mean. Which generator on the way to keep is decided
by a further noisy statistic of the same release, never by the data.

Private access: one `class_sums` release of all records.
Deviations: see docs/methods/dp-mepf.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.fitting import Known, MeanEmbedding, Selection, State, class_means
from understudy.methods.method import Preset, check_at_least_one, check_positive, setting
from understudy.nets.encoders import Encoder
from understudy.nets.generators import ConvGenerator, GeneratorNetwork, ResnetGenerator
from understudy.nets.params import Params, moved
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Block, PublicFacts
from understudy.privacy.releases.class_sums import Embedding
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.adam import Adam
from understudy.training.pretrained import RANDOM, described_encoder, load_encoder

RESIDUAL_FROM = 32
"""Pixels from which on the generator is a residual network."""
SCORE_BATCH, SCORE_BATCHES = 250, 8
"""Generated images that a score is computed from."""
MOMENTS = ("first", "second")
ADAM = Adam(betas=(0.5, 0.999))


@dataclass(frozen=True, kw_only=True)
class DPMEPFConfig:
    """Settings of DP-MEPF."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    encoder: str = setting(
        "vgg16",
        "Public encoder: vgg16, vgg19, mobilenetv2, a file of `pretrain`, or random.",
        is_path=True,
    )
    layers: str = setting(":", "Layers of the encoder, as a slice: all, ':8', '-4:'.")
    moments: int = setting(2, "Match means (1), or means and mean squares (2), of activations.")
    labelled: bool = setting(True, "Match each class apart; without, the set has no labels.")
    looks: int = setting(20, "How often to look whether the generator is the best; 0: keep last.")
    look_ratio: float = setting(10.0, "Noise on what is looked at, relative to features.")
    count_ratio: float = setting(
        0.0, "Noise on class counts relative to features; 0: classes are known to be equal."
    )
    code: int = setting(90, "Length of the generator's random code.")
    hidden: int = setting(500, "Width of the hidden layer of a small generator.")
    steps: int = setting(20_000, "Steps of the generator.")
    batch: int = setting(100, "Images generated per step.")
    lr: float = setting(1e-3, "Learning rate of the generator.")
    decay: float = setting(1.0, "What the learning rate is multiplied by after each fifth.")
    rate: float = setting(0.01, "What one batch counts in the moving average of differences.")

    def __post_init__(self) -> None:
        check_at_least_one(self, "images_per_class", "code", "hidden", "steps", "batch")
        check_positive(self, "look_ratio", "lr", "decay")
        if not 0 < self.rate <= 1:
            raise InvalidSettings(f"rate is {self.rate:g}, expected above 0 and at most 1")
        if self.moments not in (1, 2):
            raise InvalidSettings(f"moments is {self.moments}, expected 1 or 2")
        if not 0 <= self.looks <= self.steps:
            raise InvalidSettings(f"looks is {self.looks}, expected 0 to steps ({self.steps})")
        if not self.labelled and self.count_ratio:
            raise InvalidSettings(
                f"count_ratio is {self.count_ratio:g} for a set without labels; leave it out"
            )


def _paper(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _best(_: PublicFacts, epsilon: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return deep layers alone: few values, so little noise; the less budget, the deeper."""
    layers, steps = ("4:", 40_000) if epsilon >= 5 else ("7:", 20_000)
    return {"layers": layers, "moments": 1, "batch": 128, "steps": steps}


def _small(_: PublicFacts, __: float, ___: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "images_per_class": 200, "encoder": RANDOM, "layers": ":2", "moments": 1, "looks": 5,
        "hidden": 200, "code": 5, "steps": 1500, "lr": 0.01, "rate": 1.0,
    }  # fmt: skip


@dataclass(frozen=True)
class Perception:
    """What an encoder makes of images: the blocks of the embedding."""

    encoder: Encoder
    moments: int

    def features(self, weights: Params, images: Tensor) -> dict[str, Tensor]:
        """Return activations, and their squares, each scaled to norm 1: (n, dimension)."""
        seen = self.encoder.activations(weights, images)
        found = {"first": F.normalize(seen, dim=1)}
        if self.moments == 2:
            found["second"] = F.normalize(seen.square(), dim=1)
        return found

    def glance(self, weights: Params, images: Tensor) -> Tensor:
        """Return the last layer's mean over pixels, scaled to norm 1: what is looked at."""
        last = self.encoder.activations(weights, images)[:, -self.encoder.sizes[-1] :]
        return F.normalize(last.view(len(images), self.glance_size, -1).mean(2), dim=1)

    @property
    def glance_size(self) -> int:
        """Channels of the last layer."""
        return self.encoder.maps[-1][0]


@dataclass(frozen=True)
class MovingAverageStep:
    """A step of generative feature matching: against a moving average of the difference.

    The difference between the two means is mostly noise when one of them is from a small batch. So
    the generator follows an average of it over many steps.
    """

    network: GeneratorNetwork
    perception: Perception
    classes: int
    """0 without labels."""
    rate: float
    """What the last step counts in the average."""
    adam: Adam = ADAM

    def start(self, params: Params) -> State:
        """Return the state before the first step, the average at zero."""
        shape = max(1, self.classes), self.perception.encoder.dimension
        device = next(iter(params.values())).device
        names = MOMENTS[: self.perception.moments]
        average = {name: torch.zeros(shape, device=device) for name in names}
        return params, self.adam.start(params), average

    def __call__(
        self, state: State, codes: Tensor, labels: Tensor, known: Known, lr: Tensor
    ) -> State:
        """Update the average, then move the parameters along it."""
        params, moments, average = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        images = self.network(leaves, codes, labels)
        means = {
            name: by_class(features, labels, self.classes)
            for name, features in self.perception.features(known["weights"], images).items()
        }
        average = {
            name: torch.lerp(average[name], known[name] - mean.detach(), self.rate)
            for name, mean in means.items()
        }
        towards = torch.stack([(average[name] * mean).sum() for name, mean in means.items()]).sum()
        slopes = torch.autograd.grad(-towards, list(leaves.values()))
        slopes_of = dict(zip(leaves, slopes, strict=True))
        return *self.adam.step(params, slopes_of, moments, lr), average


def by_class(features: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the mean features of each class, if they are equally frequent; of all without any."""
    if not classes:
        return features.mean(0, keepdim=True)
    return classes * class_means(features, labels, classes)


class DPMEPF(MeanEmbedding):
    """A generator whose images look to a public network, in the mean, as the private ones do."""

    config: DPMEPFConfig
    config_class: ClassVar[type] = DPMEPFConfig
    summary: ClassVar[str] = "a generator fitted to noisy mean activations of a public network"
    presets: ClassVar[dict[str, Preset]] = {
        "best": Preset(_best, "CIFAR-10, by training images, after a look at its test set"),
        "paper": Preset(_paper, "the paper's description; schedule shortened"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    @cached_property
    def _perception(self) -> Perception:
        config = self.config
        encoder = described_encoder(config.encoder, self.facts.shape, layers=config.layers)
        return Perception(encoder, config.moments)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Moments, what is looked at, and counts, as far as they are asked for."""
        config, perception = self.config, self._perception
        dimension = perception.encoder.dimension
        blocks = [
            Block(name=name, dimension=dimension, by_class=config.labelled)
            for name in MOMENTS[: config.moments]
        ]
        if config.looks:
            blocks.append(
                Block(
                    name="glance",
                    dimension=perception.glance_size,
                    ratio=config.look_ratio,
                    by_class=config.labelled,
                )
            )
        if config.count_ratio:
            blocks.append(Block(name="counts", dimension=1, ratio=config.count_ratio))
        return tuple(blocks)

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Release the embedding, train the generator, keep the best, draw the set."""
        config, facts, device = self.config, self.facts, curator.engine.device
        perception, weights = self._loaded(device, progress)
        sums = curator.class_sums(self._embedding(perception, weights))
        counts = sums.pop("counts", None)
        rows = max(1, self._classes)
        targets = {name: total.view(rows, -1) * rows / facts.units for name, total in sums.items()}
        known: Known = {"weights": weights, **targets}
        network = self._network()
        fit = self.fit(
            MovingAverageStep(network, perception, self._classes, config.rate),
            counts=counts,
            selection=self._selection(network, perception, known),
        )
        params = fit.run(known, curator, progress)
        return fit.drawn(params, config.images_per_class)

    def _loaded(self, device: torch.device, progress: Progress) -> tuple[Perception, Params]:
        """Get the encoder's weights; on a GPU its maps are bfloat16."""
        config, perception = self.config, self._perception
        if config.encoder == RANDOM:
            weights = perception.encoder.init(public_generator(self.seed, "encoder"))
        else:
            _, weights, origin = load_encoder(
                config.encoder, self.facts.shape, layers=config.layers, progress=progress
            )
            self.public_inputs = [origin]
        if device.type == "cuda":
            encoder = replace(perception.encoder, precision=torch.bfloat16)
            perception = replace(perception, encoder=encoder)
        return perception, moved(weights, device)

    def _embedding(self, perception: Perception, weights: Params) -> Embedding:
        names = [block.name for block in self.blocks]

        def embed(image: Tensor) -> list[Tensor]:
            found = perception.features(weights, image[None])
            found["glance"] = perception.glance(weights, image[None])
            found["counts"] = torch.ones(1, 1, device=image.device)
            return [found[name][0] for name in names]

        return Embedding(embed, self.blocks)

    def _selection(
        self, network: GeneratorNetwork, perception: Perception, known: Known
    ) -> Selection | None:
        """Score generators by how their images look at a glance, against the released answer."""
        if not self.config.looks:
            return None

        @torch.no_grad()
        def score(params: Params) -> Tensor:
            generator = public_generator(self.seed, "score")  # the same codes for all
            device, seen = known["glance"].device, []
            labels = torch.arange(SCORE_BATCH, device=device) % max(1, self._classes)
            for _ in range(SCORE_BATCHES):
                codes = network.codes(SCORE_BATCH, generator).to(device)
                seen.append(perception.glance(known["weights"], network(params, codes, labels)))
            mean = by_class(torch.cat(seen), labels.repeat(SCORE_BATCHES), self._classes)
            distance: Tensor = (mean - known["glance"]).square().sum()
            return distance

        return Selection(max(1, self.config.steps // self.config.looks), score)

    @property
    def _classes(self) -> int:
        return self.facts.classes if self.config.labelled else 0

    def _network(self) -> GeneratorNetwork:
        config, shape = self.config, self.facts.shape
        if min(shape[1:]) >= RESIDUAL_FROM:
            return ResnetGenerator(shape, self._classes, code=config.code)
        return ConvGenerator(shape, self._classes, code=config.code, hidden=config.hidden)
