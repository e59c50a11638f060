"""Private Set Generation (Chen, Kerkouche, Fritz; NeurIPS 2022), Algorithms 1 and 2.

A few images per class are optimised directly, so that the gradient they give a freshly drawn
network points where the private data's gradient points. The set is useful for training by
construction, and nothing else has to be learned privately. Algorithm 2 optimises a generator that
paints the images instead of their pixels; canvas.py is all the difference.

Private access: R * T * K `gradient` releases, each over a Poisson batch; a `histogram` of the
labels before them, if classes are to have their shares of the set.
Deviations: see docs/methods/psg.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.canvas import Canvas, Pixels, Prior, State, to_pixels
from understudy.methods.class_counts import EQUAL, HISTOGRAM, given_counts, noisy_counts
from understudy.methods.fitting import filled, leaves_of
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
)
from understudy.nets.convnet import ConvNet
from understudy.nets.generators import DCGANGenerator
from understudy.nets.params import Params, moved, parameter_count
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.sgd import SGD, RecordLoss, fit, mean_loss
from understudy.training.siamese import Siamese, changed

PRIORS = ("none", "dcgan")
OF_PIXELS = ("start", "image_lr", "image_momentum", "smooth")
"""Settings that mean nothing with a prior."""
OF_PRIOR = ("prior_lr", "code")
"""Settings that mean nothing without."""


@dataclass(frozen=True, kw_only=True)
class PSGConfig:
    """Settings of PSG; the letters are the paper's."""

    images_per_class: int = setting(10, "Synthetic images per class (spc).")
    counts: str = setting(
        EQUAL,
        "Images of each class: equal; a list such as 20,10,5; or histogram: by noisy, charged "
        "shares of images-per-class times the classes.",
    )
    count_ratio: float = setting(4.0, "Noise of that histogram relative to gradients'.")
    prior: Literal["none", "dcgan"] = setting(
        "none", "Optimise pixels, or the generator that paints them (Algorithm 2)."
    )
    prior_lr: float = setting(0.01, "Learning rate of the generator.")
    code: int = setting(10, "Length of the generator's codes.")
    rounds: int = setting(1000, "Networks drawn one after another (R).")
    outer: int = setting(10, "Outer iterations per network (T).")
    batches: int = setting(10, "Private batches, and image steps, per outer iteration (K).")
    inner: int = setting(50, "Epochs of the network on the set after each outer iteration (J).")
    batch: int = setting(256, "Expected number of units in a Poisson batch (B).")
    clip_norm: float = setting(0.1, "Bound on each unit's gradient norm (C).")
    augment: str = setting(
        "none",
        "Changes of all images of a step: none, or some of color,crop,cutout,flip,scale,rotate.",
    )
    start: float = setting(1.0, "Standard deviation of the noise that images start as.")
    image_lr: float = setting(0.1, "Learning rate of the images.")
    image_momentum: float = setting(0.5, "Momentum of the images.")
    network_lr: float = setting(0.01, "Learning rate of the network on the set.")
    width: int = setting(128, "Filters per convolution of the network.")
    project: bool = setting(False, "Keep pixels within [0, 1] throughout.")
    smooth: float = setting(0.0, "Blur of every image step, a standard deviation in pixels.")
    image_steps: int = setting(1, "Image steps per private batch.")
    image_lr_end: float = setting(1.0, "Image learning rate at the end, as a share; linear.")
    average: float = setting(0.0, "Share of the run, at its end, whose images are averaged.")
    shrink: bool = setting(False, "Weigh rows of the noisy gradient by how far they exceed noise.")

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "rounds", "outer", "batches", "inner", "batch", "width",
            "image_steps", "code",
        )  # fmt: skip
        check_not_negative(self, "smooth")
        for name in ("image_lr_end", "average"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected 0 to 1")
        check_positive(
            self, "clip_norm", "start", "image_lr", "network_lr", "prior_lr", "count_ratio"
        )
        self._check_canvas()
        _ = given_counts(self.counts), self.siamese  # which check themselves

    def _check_canvas(self) -> None:
        if self.prior not in PRIORS:
            raise InvalidSettings(f"prior is '{self.prior}', expected {' or '.join(PRIORS)}")
        usual = {field.name: field.default for field in fields(self)}
        for name in OF_PIXELS if self.has_prior else OF_PRIOR:
            if (value := getattr(self, name)) != usual[name]:
                raise InvalidSettings(
                    f"{name} is {value:g}, which means nothing with prior {self.prior}; leave it "
                    "out"
                )

    @property
    def has_prior(self) -> bool:
        """Whether a generator paints the images."""
        return self.prior != "none"

    @property
    def siamese(self) -> Siamese | None:
        """Return what changes the images of a step, if anything does."""
        return Siamese.parse(self.augment)

    @property
    def steps(self) -> int:
        """R * T * K: releases."""
        return self.rounds * self.outer * self.batches

    def lr_at(self, step: int) -> float:
        """Return the learning rate of the images, or of what paints them, at `step`."""
        rate = self.prior_lr if self.has_prior else self.image_lr
        return rate * (1 - (1 - self.image_lr_end) * step / self.steps)


def _per_class(given: Mapping[str, Any]) -> int:
    """Return the images per class that the user asked for, on average if for each class apart."""
    if counts := given_counts(given.get("counts", EQUAL)):
        return max(1, round(sum(counts) / len(counts)))
    return max(1, int(given.get("images_per_class", 10)))


def _beside(given: Mapping[str, Any], **settings: Any) -> dict[str, Any]:
    """Return settings of a preset, but for what means nothing beside what the user asked for."""
    if given_counts(given.get("counts", EQUAL)) and "images_per_class" in given:
        raise InvalidSettings("counts and images_per_class say the same thing twice; pass one")
    has_prior = given.get("prior", "none") != "none"
    return {n: value for n, value in settings.items() if not (has_prior and n in OF_PIXELS)}


def _paper(_: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the paper's schedule: T = spc, J = 500 / spc (1 at spc 1), R by epsilon."""
    per_class = _per_class(given)
    return _beside(
        given,
        outer=per_class,
        inner=max(1, 500 // per_class) if per_class > 1 else 1,
        rounds=1000 if epsilon >= 5 else 200,
    )


def _best(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return fewer, larger batches, each used for ten smooth steps, on small networks.

    With little budget, networks are drawn and dropped quickly. A single image per class is matched
    on fresh networks alone: one trained on ten images only knows these by heart.
    """
    per_class = _per_class(given)
    rounds, outer, inner = (1000, 10, max(1, 500 // per_class)) if epsilon >= 5 else (160, 5, 10)
    if per_class == 1:
        rounds, outer, inner = rounds * outer, 1, 1
    shared = {
        "rounds": rounds, "outer": outer, "batches": 1, "inner": inner,
        "batch": max(1, round(facts.units / 24)), "width": 64, "image_steps": 10, "project": True,
    }  # fmt: skip
    if given.get("prior", "none") != "none":  # a mean of generators is not one of their images
        return _beside(given, **shared, prior_lr=0.003, image_lr_end=0.0)
    return _beside(given, **shared, start=0.1, image_lr=0.3, smooth=1.0, average=0.5)


def _small(facts: PublicFacts, _: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: a small network, large batches, bold steps."""
    return _beside(
        given,
        rounds=150,
        outer=5,
        batches=1,
        inner=10,
        batch=max(1, min(400, round(0.28 * facts.units))),
        image_lr=1.0,
        width=8,
        project=True,
    )


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

    canvas: Canvas
    network: ConvNet
    noise_std: float
    """What the matching distance is told of the noise."""

    def __call__(
        self,
        state: State,
        known: Params,
        theta: Params,
        g_real: Params,
        lr: Tensor,
    ) -> State:
        """Move what is painted so that the gradient of the images gets nearer to the noisy one.

        A drawn change of images, if there is one among what is `known`, is applied first.
        """
        painted, memory = state
        leaves = {name: part.detach().requires_grad_() for name, part in painted.items()}
        images = changed(self.canvas.images(leaves, known), known)
        weights = {name: weight.detach().requires_grad_() for name, weight in theta.items()}
        loss = mean_loss(self.network, weights, images, known["labels"])
        g_synthetic = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        distance = matching_distance(
            g_real, dict(zip(weights, g_synthetic, strict=True)), noise_std=self.noise_std
        )
        slopes = torch.autograd.grad(distance, list(leaves.values()))
        return self.canvas.step(painted, dict(zip(leaves, slopes, strict=True)), memory, lr)


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
        # Outputs start alike, so it does not matter which of them stand for classes of others.
        self.network = ConvNet(facts.shape, len(facts.all_classes), config.width)
        self.canvas = self._canvas()

    def plan(self) -> Plan:
        """R * T * K noisy gradients of the whole network; noisy counts of classes if asked for."""
        config, classes = self.config, self.facts.classes
        if len(given_counts(config.counts)) not in (0, classes):
            raise InvalidSettings(
                f"counts has {len(given_counts(config.counts))} numbers, expected one for each of "
                f"the {classes} classes"
            )
        gradients = PlannedRelease(
            name="gradient",
            kind="gradient",
            count=config.steps,
            sampling_rate=config.batch / self.facts.units,
            dimension=parameter_count(self.network.init(public_generator(self.seed, "plan"))),
        )
        if config.counts != HISTOGRAM:
            return Plan((gradients,))
        histogram = PlannedRelease(
            name="histogram",
            kind="histogram",
            count=1,
            dimension=classes,
            noise_ratio=config.count_ratio,
        )
        return Plan((histogram, gradients))

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Algorithm 1 or 2; loops over r, t and k are counted as one, so that it can be resumed."""
        config, canvas, engine = self.config, self.canvas, curator.engine
        network = self.network.on(engine.device)
        loss = RecordLoss(network, self.facts.mean, self.facts.std)
        image_step = self._image_step(network, curator.calibration.noise_multiplier)
        per_run = config.outer * config.batches
        averaged_from = config.steps - round(config.average * config.steps)
        known = canvas.known(self._labels(curator), self.seed)
        done, painted, memory, average, theta = self._start(curator, known)

        for step in progress.steps(range(done, config.steps), spent=curator.epsilon_spent):
            if step % per_run == 0:  # a new run r: a fresh network
                theta = self._draw(step // per_run, engine.device)
            change = self._change(step, engine.device)
            g_real = curator.gradient(loss, theta, change, clip_norm=config.clip_norm)
            lr = torch.full((), config.lr_at(step), device=engine.device)
            painted, memory = engine.run(
                image_step,
                (painted, memory), known | change, theta, g_real, lr,
                times=config.image_steps,
            )  # fmt: skip
            if step >= averaged_from:
                weight = 1 / (step - averaged_from + 1)
                average = {n: old + weight * (painted[n] - old) for n, old in average.items()}
            is_last_batch = (step + 1) % config.batches == 0
            is_last_of_run = (step + 1) % per_run == 0
            if is_last_batch and not is_last_of_run:  # after the last t the network is thrown away
                theta = fit(
                    network,
                    theta,
                    canvas.images(painted, known),
                    known["labels"],
                    sgd=SGD(lr=config.network_lr, epochs=config.inner),
                    generator=public_generator(self.seed, "order", step),
                    augment=config.siamese,
                    engine=engine,
                )
            state = {
                "painted": painted, "memory": leaves_of(memory), "average": average, "theta": theta
            }  # fmt: skip
            chosen = average if step >= averaged_from else painted
            curator.checkpoint(step + 1, state, partial(self._set, chosen, known))
        return self._set(average if averaged_from < config.steps else painted, known)

    def _start(self, curator: Curator, known: Params) -> tuple[int, Params, Any, Params, Params]:
        """Return steps done, what is painted, the optimiser's memory, the average, the network."""
        painted, memory = self.canvas.start(known, self.seed)
        done, saved = curator.restore()
        if not done:
            nothing = {name: torch.zeros_like(part) for name, part in painted.items()}
            return 0, painted, memory, nothing, {}
        groups = cast(Mapping[str, Params], saved)
        memory = filled(memory, groups["memory"])
        return done, groups["painted"], memory, groups["average"], groups["theta"]

    @torch.no_grad()
    def _set(self, painted: Params, known: Params) -> SyntheticSet:
        """Bring normalised images back to pixels; keep the generator with them, if there is one."""
        pixels = to_pixels(self.canvas.images(painted, known), self.facts)
        if self.config.project:
            pixels = pixels.clamp(0, 1)  # only rounding is left to clamp
        labels, shares = known["labels"].cpu(), None
        if self.config.counts != EQUAL:
            shares = tuple((labels.bincount().double() / len(labels)).tolist())
        return SyntheticSet(
            pixels.cpu(),
            labels,
            self.facts.class_names,
            generator=self.canvas.generator(painted, shares),
        )

    def _labels(self, curator: Curator) -> Tensor:
        """Return the labels of the set, class by class."""
        config, classes = self.config, self.facts.classes
        counts = given_counts(config.counts) or (config.images_per_class,) * classes
        if config.counts == HISTOGRAM:
            counts = noisy_counts(curator.histogram(), config.images_per_class * classes)
        labels = torch.arange(classes).repeat_interleave(torch.tensor(counts))
        return labels.to(curator.engine.device)

    def _change(self, step: int, device: torch.device) -> Params:
        """Draw the change of all images of a step, private and synthetic: public, like the seed.

        It must not be secret: it shows in the set. One change for all records keeps what a record
        contributes independent of which others were sampled; one for each place in the batch would
        not. Either way a contribution is clipped after the change, so its bound is the same.
        """
        siamese = self.config.siamese
        if siamese is None:
            return {}
        drawn = siamese.draw(self.facts.shape, public_generator(self.seed, "change", step))
        return moved(drawn, device)

    def _draw(self, number: int, device: torch.device) -> Params:
        drawn = self.network.init(public_generator(self.seed, "network", number))
        return moved(drawn, device)

    def _image_step(self, network: ConvNet, noise_multiplier: float) -> ImageStep:
        config = self.config
        noise_std = noise_multiplier * config.clip_norm / config.batch if config.shrink else 0.0
        return ImageStep(self.canvas, network, noise_std)

    def _canvas(self) -> Canvas:
        config, facts = self.config, self.facts
        if not config.has_prior:
            return Pixels(facts, config.start, config.image_momentum, config.smooth, config.project)
        mean, std = ((), ()) if config.project else (facts.mean, facts.std)
        return Prior(
            facts,
            DCGANGenerator(facts.shape, facts.classes, code=config.code, mean=mean, std=std),
        )
