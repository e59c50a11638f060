"""Rehearsal: a few noisy answers, asked once; then practise as long as it takes, for free.

1. Noisy counts, means and second moments of the images' low frequencies: a Gaussian of each class.
2. Noisy class means of what many networks that were never trained see in the records, beyond what
   they see in samples of these Gaussians. A small network refines samples until they look the same
   to all of them; of a small set, pixels are moved until they do.
3. For a large set, a linear teacher of scattering coefficients follows a few noisy gradients over
   all records, and labels the refined, warped samples softly.

Private access: `class_sums` once each for `overview`, `means` and `moments`, and once for each
network (`features`); `gradient` over all units, `teacher_steps` times (`teacher`).
Our own; what it owes to others: see docs/methods/rehearsal.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.acts import Acts
from understudy.methods.class_gaussians import (
    ClassGaussians,
    class_differences,
    clipped,
    upper_triangle,
)
from understudy.methods.method import (
    Preset,
    check_at_least_one,
    check_not_negative,
    check_positive,
    setting,
)
from understudy.methods.rehearsing import (
    AT_ONCE,
    Beyond,
    Lens,
    MatchStep,
    RefineStep,
    Sight,
    TeacherLoss,
    Teaching,
    as_such,
    falling,
    records_means,
    warm_start,
    whitening,
)
from understudy.methods.sized_sums import SizedSums, noise_of
from understudy.nets.convnet import ConvNet
from understudy.nets.frequencies import low_frequencies
from understudy.nets.params import Params, moved, per_channel
from understudy.nets.rehearsed import RehearsedGenerator
from understudy.nets.released import Generator
from understudy.nets.scattering import Scattering
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Block, Plan, PlannedRelease, PublicFacts
from understudy.privacy.records import View
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.engine import Engine
from understudy.training.siamese import KINDS, NONE, Siamese

LARGE = 200
"""Images per class from which on a set is drawn from the generator, and labelled by the teacher."""
LONG, MIDDLE, SHORT = 1.0, 0.8, 0.65
"""Bounds on a record, on what differs from the mean of all, and on what differs from its class's;
in root mean squares of an image, by the declared standard deviation of pixels."""
CLEAR = 20_000
"""Records of a class, times epsilon, from which on networks see changes, but for preset `best`."""
TEACHABLE = 5000
"""Records of a class, times epsilon, from which on a teacher is worth its budget."""
WAVES = 0.22
"""Waves of an image, as a share of its pixels; at least 36, at most 171."""
CHANGES = "crop,scale,rotate"
"""How networks see images changed; those who train on a set change its images, too."""


@dataclass(frozen=True, kw_only=True)
class RehearsalConfig:
    """Settings of Rehearsal. Shares are of the budget, each relative to their sum."""

    images_per_class: int = setting(10, "Synthetic images per class.")
    waves: int = setting(171, "Low frequencies of an image that its class's Gaussian is made of.")
    components: int = setting(40, "Directions in which samples of the Gaussians vary.")
    samples: int = setting(
        5000, "Samples by which features are centred, and what the teacher sees is whitened."
    )
    networks: int = setting(100, "Networks whose features are matched; 0: none, nor a refiner.")
    centre: bool = setting(
        True, "Ask how features differ from those of samples; else for features as such."
    )
    width: int = setting(128, "Filters per convolution of these networks.")
    augment: str = setting(
        NONE, f"How each sees all images changed, in its own way: some of {','.join(KINDS)}."
    )
    refine_steps: int = setting(3000, "Steps of the refiner; 0: samples are left as they are.")
    refine_batch: int = setting(400, "Samples per step of the refiner.")
    refine_lr: float = setting(1e-3, "Learning rate of the refiner.")
    hidden: int = setting(48, "Channels of the refiner.")
    match_steps: int = setting(3000, "Steps of the pixels of a small set; 0: it is drawn.")
    match_lr: float = setting(0.01, "Learning rate of the pixels.")
    teacher_steps: int = setting(0, "Noisy gradients of the teacher; 0: labels are the classes.")
    taught: int = setting(600, "Components of scattering that the teacher sees.")
    teacher_lr: float = setting(30.0, "Learning rate of the teacher.")
    teacher_clip: float = setting(1.0, "Bound on each unit's gradient of the teacher.")
    warp: bool = setting(True, "Warp the images of a set that is drawn.")
    overview_share: float = setting(0.01, "Budget of class counts and the mean of all.")
    means_share: float = setting(0.04, "Budget of class means.")
    moments_share: float = setting(0.2, "Budget of second moments.")
    features_share: float = setting(0.75, "Budget of networks' features.")
    teacher_share: float = setting(0.445, "Budget of the teacher.")

    def __post_init__(self) -> None:
        check_at_least_one(
            self, "images_per_class", "waves", "components", "samples", "width", "refine_batch",
            "hidden", "taught",
        )  # fmt: skip
        rates = ("refine_lr", "match_lr", "teacher_lr", "teacher_clip")
        check_positive(self, *rates, *(f.name for f in fields(self) if f.name.endswith("_share")))
        check_not_negative(self, "networks", "refine_steps", "match_steps", "teacher_steps")
        _ = Siamese.parse(self.augment)  # which checks itself
        if not self.networks and (self.refine_steps or self.match_steps):
            raise InvalidSettings(
                "networks is 0, so there is nothing to refine or match images by; set refine_steps "
                "and match_steps to 0, too"
            )
        if self.match_steps and self.teacher_steps:
            raise InvalidSettings(
                f"match_steps is {self.match_steps} and teacher_steps {self.teacher_steps}: pixels "
                "are moved in small sets, labels are taught for large ones; set one of them to 0"
            )


def _is_large(given: Mapping[str, Any]) -> bool:
    return int(given.get("images_per_class", 10)) >= LARGE


def _by_facts(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from public facts: waves, shares of the budget, and the teacher.

    The fewer records there are, and the less budget, the more of it goes to class means. A teacher
    of few records follows noise; then, as in a small set, features get its share.
    """
    records = epsilon * facts.units / facts.classes  # of a class, for each unit of epsilon
    means = min(0.3, max(0.04, 0.25 * (150 / records) ** 0.4))
    settings: dict[str, Any] = {
        "waves": min(171, max(36, round(WAVES * math.prod(facts.shape)))),
        "overview_share": means / 5,
        "means_share": means,
    }
    if not _is_large(given):
        return settings
    settings |= {"match_steps": 0}
    if records < TEACHABLE or given.get("teacher_steps") == 0:
        return settings
    steps, clip = (120, 0.7) if records >= 10 * TEACHABLE else (60, 1.0)
    return settings | {
        "teacher_steps": steps,
        "teacher_lr": min(60.0, records / 200),
        "teacher_clip": clip,
        "features_share": 0.3,
    }


def _changes(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return that networks see images changed, for a small set, where noise is low enough."""
    is_clear = epsilon * facts.units / facts.classes >= CLEAR
    return {"augment": CHANGES} if is_clear and not _is_large(given) else {}


def _cpu(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for two cores and a quarter of an hour: fewer and narrower networks."""
    settings = {
        "samples": 3000, "networks": 64, "width": 64, "refine_steps": 800, "refine_batch": 200,
        "hidden": 32,
    }  # fmt: skip
    return settings | _by_facts(facts, epsilon, given) | _changes(facts, epsilon, given)


def _quick(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for two cores and a few minutes: a quarter of the networks, half as wide."""
    settings = {
        "samples": 2000, "networks": 16, "width": 32, "refine_steps": 400, "refine_batch": 200,
        "hidden": 16, "match_steps": 1500,
    }  # fmt: skip
    return settings | _by_facts(facts, epsilon, given) | _changes(facts, epsilon, given)


def _small(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a few thousand small images: small networks, fewer steps."""
    settings = {
        "components": 20, "samples": 500, "networks": 40, "width": 16, "refine_steps": 200,
        "refine_batch": 100, "refine_lr": 5e-3, "hidden": 16, "taught": 200,
    }  # fmt: skip
    return settings | _by_facts(facts, epsilon, given) | _changes(facts, epsilon, given)


class Rehearsal:
    """Gaussians of classes, refined until untrained networks see in them what is in the records."""

    config_class: ClassVar[type] = RehearsalConfig
    summary: ClassVar[str] = "a few noisy answers, then images rehearsed against them for free"
    presets: ClassVar[dict[str, Preset]] = {
        "best": Preset(
            _by_facts,
            "digits and USPS, including their test splits; sizes and numbers of steps are those of "
            "a forerunner, tried on MNIST and Fashion-MNIST, including their test splits",
        ),
        "cpu": Preset(
            _cpu, "sizes fit a quarter of an hour on two cores at 28 px; the rest as `small`"
        ),
        "quick": Preset(
            _quick, "sizes fit a few minutes on two cores at 28 px; the rest as `small`"
        ),
        "small": Preset(
            _small,
            "digits (scikit-learn) and USPS, including their test splits; whether networks see "
            "changes, also on faces (UTKFace) by age group, at 16 px",
        ),
    }
    public_inputs: ClassVar[tuple[PublicInput, ...]] = ()

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose `small` for small images or few units."""
        return "small" if min(facts.shape[1:]) <= 16 or facts.units < 2000 else "best"

    def __init__(self, config: RehearsalConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        self.network = ConvNet(facts.shape, facts.classes, config.width)
        self.waves = low_frequencies(facts.shape, config.waves)
        is_drawn = not config.match_steps
        self.generator = RehearsedGenerator(
            facts.shape,
            facts.classes,
            code=min(config.components, len(self.waves)),
            hidden=config.hidden if config.refine_steps else 0,
            warps=config.warp and is_drawn,
            taught=min(config.taught, Scattering(facts.shape).dimension)
            if config.teacher_steps
            else 0,
        )
        pixels = facts.shape[1] * facts.shape[2]
        self.spread = math.sqrt(pixels * sum(std**2 for std in facts.std))
        """Root mean square of an image, if pixels vary as declared."""
        self.sums = SizedSums(facts)

    # What is asked

    def plan(self) -> Plan:
        """The lines that the settings ask for, under one budget."""
        config, waves, planned = self.config, len(self.waves), self.sums.planned
        long, middle, short = (bound * self.spread for bound in (LONG, MIDDLE, SHORT))
        mean = Block(name="mean", dimension=waves, bound=long, by_class=False)
        means = Block(name="means", dimension=waves, bound=middle)
        moments = Block(name="moments", dimension=waves * (waves + 1) // 2, bound=short**2)
        lines = [
            planned("overview", config.overview_share, mean, counts=True),
            planned("means", config.means_share, means),
            planned("moments", config.moments_share, moments),
        ]
        if config.networks:
            size = self.network.init(public_generator(self.seed, "plan"))["linear.weight"].shape[1]
            features = Block(name="features", dimension=size)
            share, count = config.features_share, config.networks
            lines.append(planned("features", share, features, count=count))
        if config.teacher_steps:
            lines.append(
                PlannedRelease(
                    name="teacher",
                    kind="gradient",
                    count=config.teacher_steps,
                    dimension=self.facts.classes * (self.generator.taught + 1),
                    noise_ratio=math.sqrt(config.teacher_steps / config.teacher_share),
                )
            )
        return Plan(tuple(lines))

    # The method

    def run(self, curator: Curator, progress: Progress) -> SyntheticSet:
        """Ask for all that is released at once; then rehearse, and go on where it was cut off."""
        config = self.config
        sizes, mean = self._overview(curator)
        fixed = self._gaussians(curator, sizes, mean).params
        sights = self._sights(curator, progress, fixed, sizes)

        acts = Acts(curator, progress)
        params = fixed | self._refined(acts, curator, fixed, sights)
        if config.match_steps:
            return self._matched(acts, curator, params, sights)
        if config.teacher_steps:
            params |= self._teacher(acts, curator, params)
        shares = tuple((sizes.double() / sizes.double().sum()).tolist())
        released = Generator(self.generator, params, {}, shares)
        count = config.images_per_class * self.facts.classes
        return released.drawn(self.facts.class_names, count, seed=self.seed)

    def _overview(self, curator: Curator) -> tuple[Tensor, Tensor]:
        """Ask how large the classes are, and for the mean of all records, in waves."""
        facts, waves = self.facts, self.waves.to(curator.engine.device)

        def embed(image: Tensor) -> list[Tensor]:
            return [clipped(waves @ self._centred(image), LONG * self.spread)]

        equal = waves.new_full((facts.classes,), facts.units / facts.classes)
        found, sizes = self.sums.asked(curator, "overview", embed, equal, takes_label=False)
        return sizes, found["mean"] / sizes.sum()

    def _gaussians(self, curator: Curator, sizes: Tensor, mean: Tensor) -> ClassGaussians:
        """Ask for means, then for second moments about them; fit a Gaussian to each class."""
        waves = self.waves.to(curator.engine.device)
        middle, short = MIDDLE * self.spread, SHORT * self.spread

        def from_all(image: Tensor) -> list[Tensor]:
            return [clipped(waves @ self._centred(image) - mean, middle)]

        found, sizes = self.sums.asked(curator, "means", from_all, sizes, takes_label=False)
        noise_std = middle * noise_of(curator, "means")
        means = mean + class_differences(found["means"], sizes, noise_std)

        def from_class(image: Tensor, label: Tensor) -> list[Tensor]:
            differs = clipped(waves @ self._centred(image) - means[label], short)
            return [upper_triangle(differs)]

        found, sizes = self.sums.asked(curator, "moments", from_class, sizes)
        fitted = ClassGaussians.fitted(
            means,
            found["moments"],
            sizes=sizes,
            noise_std=short**2 * noise_of(curator, "moments"),
            waves=waves,
            components=self.generator.code,
        )
        grey = per_channel(self.facts.mean, waves).expand(self.facts.shape).flatten()
        return replace(fitted, mean=fitted.mean + grey)

    def _sights(
        self, curator: Curator, progress: Progress, fixed: Params, sizes: Tensor
    ) -> list[Sight]:
        """Ask for each network's features of the records, beyond those of the Gaussians' samples.

        What samples look like is known. So only what differs from it is asked for, which is less,
        and so needs less noise.
        """
        config, device, classes = self.config, curator.engine.device, self.facts.classes
        if not config.networks:
            return []
        lens = self._lens(device)
        plain = replace(self.generator, hidden=0, warps=False, taught=0)
        images, labels = self._samples(plain, fixed, "plain")
        sights, beyond = [], Beyond(lens)
        spent = curator.epsilon_spent
        for number in progress.steps(range(config.networks), spent=spent, what="features"):
            weights = moved(lens.drawn(self.seed, number), device)
            known = beyond.found(weights, images, labels, classes=classes)
            known = known if config.centre else as_such(known)
            made = curator.released
            found, counted = self.sums.asked(curator, "features", beyond, sizes, public=known)
            if curator.released > made:  # and not only repeated, after a run was cut off
                curator.checkpoint(0, {})
            sights.append(Sight(weights, records_means(known, found["features"], counted)))
        return sights

    def _refined(self, acts: Acts, curator: Curator, fixed: Params, sights: list[Sight]) -> Params:
        """Train the refiner, each step on other samples and through another network."""
        config, engine, network = self.config, curator.engine, self._still
        step = RefineStep(network, self._lens(engine.device))
        batch = max(config.refine_batch, 2 * self.facts.classes)  # what a pair of images tells
        labels = (torch.arange(batch) % self.facts.classes).to(engine.device)

        def advance(at: int, state: Any) -> Any:
            generator = public_generator(self.seed, "codes", at)
            codes = network.codes(batch, generator).to(engine.device)
            lr = falling(config.refine_lr, at, config.refine_steps)
            sight = sights[at % len(sights)]
            return engine.run(step, state, (codes, labels), fixed, sight, self._number(lr, engine))

        params = moved(network.init(public_generator(self.seed, "refiner")), engine.device)
        state = (params, step.adam.start(params)) if params else ({}, ())
        state = acts.play("refiner", config.refine_steps, state, advance)
        refined: Params = state[0]
        return refined

    def _matched(
        self, acts: Acts, curator: Curator, params: Params, sights: list[Sight]
    ) -> SyntheticSet:
        """Start from refined samples, and move their pixels until all networks are content."""
        config, engine, facts = self.config, curator.engine, self.facts
        step = MatchStep(self._lens(engine.device))
        labels = torch.arange(facts.classes).repeat_interleave(config.images_per_class)
        there = labels.to(engine.device)

        def advance(at: int, state: Any) -> Any:
            lr = falling(config.match_lr, at, config.match_steps)
            return engine.run(
                step, state, there, sights[at % len(sights)], self._number(lr, engine)
            )

        codes = self._still.codes(len(labels), public_generator(self.seed, "start"))
        with torch.no_grad():
            start = {"images": self._still(params, codes.to(engine.device), there).clamp(0, 1)}
        state = start, step.adam.start(start)
        state = acts.play("pixels", config.match_steps, state, advance)
        return SyntheticSet(state[0]["images"].cpu(), labels, facts.class_names)

    def _teacher(self, acts: Acts, curator: Curator, params: Params) -> Params:
        """Teach what samples teach; then follow noisy gradients over all records."""
        config, device, teacher = self.config, curator.engine.device, self.generator.teacher
        assert teacher is not None
        images, labels = self._samples(self._still, params, "refined")
        parts = torch.split(images, AT_ONCE)

        def look(_: int, __: Any) -> Any:
            described = torch.cat([teacher.scattering(part) for part in parts])
            generator = public_generator(self.seed, "components")
            return whitening(described, teacher.dimension, generator)

        # An act of its own: looked for again, components may come out turned, by rounding alone.
        nothing = dict.fromkeys(("project", "offset"), images.new_zeros(0))
        sight = acts.play("components", 1, nothing, look)
        seen = torch.cat([teacher.sees(sight, part) for part in parts])
        view = View(lambda image: teacher.sees(sight, image[None])[0])
        loss, lr, half = TeacherLoss(), config.teacher_lr, config.teacher_steps // 2

        def advance(at: int, state: Any) -> Any:
            now = Teaching(*state)
            slopes = curator.gradient(
                loss, {"weight": now.ahead(lr)},
                clip_norm=config.teacher_clip, view=view, release="teacher",
            )  # fmt: skip
            return now.after(slopes["weight"], lr, at - half)

        state = warm_start(seen, labels, self.facts.classes)
        taught = Teaching(*acts.play("teacher", config.teacher_steps, state, advance))
        found = sight | {"weight": taught.average}
        return {f"teacher.{name}": values.to(device) for name, values in found.items()}

    # Small parts

    @property
    def _still(self) -> RehearsedGenerator:
        """The generator without warps, which are for the finished set alone, and without labels."""
        return replace(self.generator, warps=False, taught=0)

    def _lens(self, device: torch.device) -> Lens:
        changes = Siamese.parse(self.config.augment)
        return Lens(self.network.on(device), self.facts.mean, self.facts.std, changes)

    def _centred(self, image: Tensor) -> Tensor:
        """Take the declared mean from an image (c, h, w); return its pixels in a row."""
        return (image - per_channel(self.facts.mean, image)).flatten()

    @torch.no_grad()
    def _samples(
        self, network: RehearsedGenerator, params: Params, what: str
    ) -> tuple[Tensor, Tensor]:
        """Draw images within black and white, and their labels, of each class equally many."""
        device, classes = params["mean"].device, self.facts.classes
        count = classes * -(-self.config.samples // classes)
        labels = (torch.arange(count) % classes).to(device)
        codes = network.codes(count, public_generator(self.seed, what))
        parts = zip(torch.split(codes, AT_ONCE), torch.split(labels, AT_ONCE), strict=True)
        images = [network(params, code.to(device), label).clamp(0, 1) for code, label in parts]
        return torch.cat(images), labels

    @staticmethod
    def _number(value: float, engine: Engine) -> Tensor:
        return torch.full((), value, device=engine.device)
