"""DP-Sinkhorn (Cao, Bie, Vahdat, Fidler, Kreis; NeurIPS 2021): a generator led by transport plans.

Each step asks what it would cost to turn a batch of generated images into a few private records,
and how to change the images so that it costs less. That gradient is bounded as one vector and gets
noise; the generator goes on from there by the chain rule. Nothing is adversarial, nothing learns
from records but the generator.

Private access: one `batch_gradient` release for each step.
Deviations: see docs/methods/dp-sinkhorn.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

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
from understudy.methods.transport import Transport
from understudy.nets.gallery import GalleryGenerator
from understudy.nets.generators import GeneratorNetwork, ResnetGenerator, TransposedGenerator
from understudy.nets.params import Params, moved
from understudy.nets.released import Generator
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet

MNIST_PIXELS, FACES_PIXELS = 784, 3072
"""Costs are sums over pixels: those of other sizes are in proportion."""
NETWORKS = ("transposed", "resnet", "gallery")


@dataclass(frozen=True, kw_only=True)
class DPSinkhornConfig:
    """Settings of DP-Sinkhorn."""

    images_per_class: int = setting(6000, "Synthetic images per class.")
    steps: int = setting(480_000, "Steps of the generator.")
    batch: int = setting(50, "Units per step, on average.")
    generated: int = setting(50, "Images generated per step.")
    clip_norm: float = setting(0.5, "Bound on the gradient by all images of a step.")
    absolute: float = setting(1.0, "Weight of absolute differences of pixels, beside squared ones.")
    label_cost: float = setting(480.0, "What it costs to change an image's class.")
    temperature: float = setting(0.05, "How freely a transport plan spreads.")
    fresh: float = setting(
        0.2, "Share of images replaced in the copy of a batch that it is compared with."
    )
    by_class: bool = setting(
        False, "Weigh records so that a batch has as much of each class as is generated."
    )
    lr: float = setting(1e-5, "Learning rate of the generator.")
    ema: float = setting(0.0, "How much of the averaged generator stays, each step.")
    smooth: float = setting(0.0, "Blur of what the generator is told, a deviation in pixels.")
    grain: float = setting(0.0, GRAIN)
    network: str = setting("transposed", f"Generator: {', '.join(NETWORKS)}.")
    code: int = setting(
        16, "Length of the generator's random code; of a gallery, pictures of each class."
    )
    width: int = setting(64, "Channels of the generator's last maps.")

    def __post_init__(self) -> None:
        check_at_least_one(self, "images_per_class", "steps", "batch", "generated", "code", "width")
        check_positive(self, "clip_norm", "temperature", "lr")
        check_not_negative(self, "absolute", "label_cost", "smooth", "grain")
        if not 0 <= self.fresh <= 1:
            raise InvalidSettings(f"fresh is {self.fresh:g}, expected a share from 0 to 1")
        if not 0 <= self.ema < 1:
            raise InvalidSettings(f"ema is {self.ema:g}, expected at least 0 and below 1")
        if self.network not in NETWORKS:
            raise InvalidSettings(f"network is '{self.network}', expected {', '.join(NETWORKS)}")

    @property
    def more(self) -> int:
        """Images generated beyond the batch, which take others' places in its copy."""
        return round(self.fresh * self.generated)


@dataclass(frozen=True)
class Draft:
    """Generate a batch and a few more images; say what would bring it nearer to its own copy.

    Pixels lie in [-1, 1] here, as in the paper.
    """

    network: GeneratorNetwork
    transport: Transport
    more: int

    def __call__(self, params: Params, codes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and the gradient of how near the batch is to its copy."""
        images = (2 * self.network(params, codes, labels) - 1).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.nearness(images, labels), images)
        return images.detach(), slope

    def nearness(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return minus the cost of turning the batch into its copy, of which a part is fresh.

        Transport between two batches of one and the same generator costs something too. Without
        taking that off, images would gather where they are near to many records.
        """
        size = len(images) - self.more
        batch, copy = slice(size), slice(self.more, None)
        return -self.transport.cost(images[batch], labels[batch], images[copy], labels[copy])


@dataclass(frozen=True)
class Remoteness:
    """The loss of a batch: how much it costs to turn it into records, twice, less its own part."""

    transport: Transport
    by_class: bool

    def __call__(self, inputs: Params, images: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
        """Return a number with the gradient of the loss; that of the batch's own part is known."""
        generated, given, slope = (inputs[name] for name in ("images", "labels", "own_slope"))
        rows, columns = torch.ones_like(generated[:, 0, 0, 0]), counts.to(generated.dtype)
        if self.by_class:
            rows, columns = evened_out(given, labels, columns)
        cost = self.transport.cost(generated, given, 2 * images - 1, labels, (rows, columns))
        return 2 * cost + (rows[:, None, None, None] * slope * generated).sum()


def evened_out(given: Tensor, labels: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh images and records so that each class has the same part of both.

    A small batch has too many records of some classes and none of others: without this, images are
    drawn to records of other classes. Images of a class that has no records wait.

    Args:
        given: classes of the images (n,).
        labels: of the records (m,).
        counts: which records count (m,), 0 or 1.
    """
    same = (given[:, None] == labels) * counts  # (n, m)
    rows = same.amax(1)
    alike = ((labels[:, None] == labels) * counts).sum(1)  # records of each record's class
    return rows, same.sum(0) / alike.clamp(min=1)


def _paper(
    facts: PublicFacts, _: float, __: Mapping[str, Any], *, absolute: float = 1.0
) -> dict[str, Any]:
    """Return the settings for 28 px; a class is 15 away from another in each of two coordinates."""
    scale = math.prod(facts.shape) / MNIST_PIXELS
    return {
        "absolute": absolute,
        "label_cost": scale * (2 * 15**2 + 2 * 15 * absolute),
        "temperature": scale * 0.05,
    }


def _best(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ten pictures of each class instead of a network, which take an eighth of the steps.

    Five of each class meet as many records of it, so each becomes the mean of those like it.
    """
    images = 5 * max(1, facts.classes)
    return _paper(facts, epsilon, given) | {
        "steps": 60_000, "batch": images, "generated": images, "fresh": 0.0, "by_class": True,
        "lr": 4.5e-3, "smooth": 1.0, "grain": 0.2, "network": "gallery", "code": 10,
    }  # fmt: skip


def _colour(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for faces of 32 px: squared differences alone, and plans that spread."""
    scale = math.prod(facts.shape) / FACES_PIXELS
    return {
        "steps": 211_000,
        "batch": 200,
        "generated": 200,
        "clip_norm": 0.1,
        "absolute": 0.0,
        "label_cost": scale * 450,
        "temperature": scale * 50,
        "fresh": 0.0,
        "network": "resnet",
        "code": 32,
    }


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: one of each class at a time, against much noise.

    Another class costs more than all pixels together, plans spread, and the code is short: what
    remains to be learned is little more than what each class looks like.
    """
    pixels, images = math.prod(facts.shape), max(10, facts.classes)
    return {
        "images_per_class": 200,
        "steps": 4000,
        "batch": min(images, facts.units),
        "generated": images,
        "label_cost": 8.0 * pixels,
        "temperature": pixels / 4,
        "fresh": 0.0,
        "by_class": True,
        "lr": 1e-3,
        "ema": 0.999,
        "code": 2,
        "width": 8,
    }


def generator_of(config: DPSinkhornConfig, facts: PublicFacts) -> GeneratorNetwork:
    """Return what is trained, without parameters."""
    shape, classes, code = facts.shape, facts.classes, config.code
    if config.network == "gallery":
        return GalleryGenerator(shape, classes, code=code)
    kind = ResnetGenerator if config.network == "resnet" else TransposedGenerator
    return kind(shape, classes, code=code, width=config.width)


class DPSinkhorn:
    """A generator that moves along noisy gradients of transport costs."""

    config: DPSinkhornConfig
    config_class: ClassVar[type] = DPSinkhornConfig
    summary: ClassVar[str] = "a generator trained on noisy gradients of optimal transport costs"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "MNIST, by the paper's authors"),
        "paper-fashion": Preset(
            partial(_paper, absolute=3.0), "Fashion-MNIST, by the paper's authors"
        ),
        "best": Preset(_best, "a sixth of MNIST's and Fashion-MNIST's training images"),
        "paper-colour": Preset(_colour, "CelebA at 32 px, by the paper's authors"),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }
    public_inputs: Sequence[PublicInput] = ()

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose by size, and by whether there is colour."""
        found = small_or_paper(facts)
        return "paper-colour" if found == "paper" and facts.shape[0] > 1 else found

    def __init__(self, config: DPSinkhornConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.network = generator_of(config, facts)
        self.transport = Transport(
            absolute=config.absolute, label_cost=config.label_cost, temperature=config.temperature
        )
        self.draft = Draft(self.network, self.transport, config.more)
        self.loss = Remoteness(self.transport, config.by_class)
        self.follow = AdvisedStep(network=self.network, lr=config.lr, ema=config.ema)

    def plan(self) -> Plan:
        """One `batch_gradient` for each step."""
        return Plan(
            (
                PlannedRelease(
                    name="batch_gradient",
                    kind="batch_gradient",
                    count=self.config.steps,
                    dimension=self.config.generated * math.prod(self.facts.shape),
                    sampling_rate=self.config.batch / self.facts.units,
                ),
            )
        )

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Train the generator; draw the set."""
        device = curator.engine.device
        params = moved(self.network.init(public_generator(self.seed, "network")), device)
        state = self.follow.start(params)
        done, saved = curator.restore()
        if done:
            state = filled(state, cast(Params, saved["state"]))
        batches = self._batches(done, device)
        for step in progress.steps(range(done, self.config.steps), spent=curator.epsilon_spent):
            state = self.turn(curator, state, *next(batches))
            curator.checkpoint(step + 1, {"state": leaves_of(state)}, partial(self.drawn, state))
        return self.drawn(state)

    def turn(
        self, curator: Curator, state: AdvisedState, codes: Tensor, labels: Tensor
    ) -> AdvisedState:
        """Generate a batch, ask how to bring it nearer to the records, and follow."""
        config, engine = self.config, curator.engine
        images, slope = engine.run(self.draft, state.params, codes, labels)
        size = config.generated
        asked = curator.batch_gradient(
            self.loss,
            {"images": images[:size]},
            {"labels": labels[:size], "own_slope": slope[:size]},
            bound=config.clip_norm,
        )
        # The others never met a record: their slope is bounded alike, to weigh alike, and exact.
        others = slope[size:] * (config.clip_norm / slope[size:].norm()).clamp(max=1)
        advice = 2 * torch.cat([asked["images"], others])  # by pixels in [0, 1]
        if config.smooth:
            advice = blurred(advice, config.smooth)
        return cast(AdvisedState, engine.run(self.follow, state, codes, labels, advice))

    def _batches(self, start: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield codes and labels of each step from `start` on; classes take turns."""
        size, more = self.config.generated, self.config.more
        order = torch.arange(size, device=device)
        for block in range(start // DRAWN_AHEAD, -(-self.config.steps // DRAWN_AHEAD)):
            generator = public_generator(self.seed, "codes", block)
            count = DRAWN_AHEAD * (size + more)
            codes = self.network.codes_to_show(count, generator).to(device)
            for number, part in enumerate(torch.split(codes, size + more)):
                if (step := block * DRAWN_AHEAD + number) >= start:
                    labels = (order + step * size) % max(1, self.facts.classes)
                    yield part, torch.cat([labels, labels[:more]])

    def drawn(self, state: AdvisedState) -> SyntheticSet:
        """Draw the set from the average generator, and keep that with it."""
        generator = public_generator(self.seed, "statistics")
        statistics = self.network.statistics(state.average, generator)
        released = Generator(self.network, state.average, statistics, grain=self.config.grain)
        images, labels = released.sample(per_class=self.config.images_per_class, seed=self.seed)
        return SyntheticSet(images, labels, self.facts.class_names, generator=released)
