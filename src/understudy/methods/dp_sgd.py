"""DP-SGD (Abadi et al.; CCS 2016): a classifier trained on noisy gradients.

No images are made: the trained network itself is released. Whoever needs one classifier for one
task gets the most accurate one this way; whoever needs data to work with does not.

Private access: `steps` `gradient` releases, each over a Poisson batch.
Deviations: see docs/methods/dp-sgd.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from understudy.errors import InvalidSettings, VerificationFailed
from understudy.files import file_digest
from understudy.methods.fitting import filled, leaves_of
from understudy.methods.method import (
    FEW_UNITS,
    Preset,
    check_at_least_one,
    check_positive,
    setting,
)
from understudy.nets.convnet import ConvNet
from understudy.nets.params import Params, moved, parameter_count
from understudy.nets.released import Classifier
from understudy.nets.scatternet import ScatterNet
from understudy.privacy import certificate as certificates
from understudy.privacy.certificate import Certificate
from understudy.privacy.curator import Curator
from understudy.privacy.gradients import Loss
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.privacy.records import View
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.runs import CLASSIFIER_FILE, classifier_file
from understudy.seeds import public_generator
from understudy.training.average import averaged, decay_at
from understudy.training.sgd import Prepared, RecordLoss, SeenLoss

NETWORKS = ("convnet", "scatternet")
BOLD = 10_000
"""Units, times epsilon, from which on one layer takes bold steps."""
SEEN_AT_MOST = 2**32
"""Bytes of what a network makes of all records at once, if it can: 4 GiB."""


@dataclass(frozen=True, kw_only=True)
class DPSGDConfig:
    """Settings of DP-SGD."""

    steps: int = setting(2400, "Noisy gradients, one step of the network each.")
    batch: int = setting(256, "Expected number of units in a Poisson batch.")
    clip_norm: float = setting(0.1, "Bound on each unit's gradient norm.")
    lr: float = setting(4.0, "Learning rate.")
    lr_end: float = setting(1.0, "Learning rate at the end, as a share; linear.")
    momentum: float = setting(0.0, "Momentum.")
    average: float = setting(
        0.0, "Decay of the moving average of parameters that is released; 0: the last ones are."
    )
    network: str = setting(
        "convnet", "What learns: a convnet, or one layer on scattering coefficients, a scatternet."
    )
    width: int = setting(128, "Filters per convolution of the convnet.")
    start: str = setting(
        "",
        "A released classifier to go on from: its run, or its file; by default none.",
        is_path=True,
    )

    def __post_init__(self) -> None:
        check_at_least_one(self, "steps", "batch", "width")
        check_positive(self, "clip_norm", "lr")
        for name in ("momentum", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected 0 to below 1")
        if self.network not in NETWORKS:
            raise InvalidSettings(f"network is '{self.network}', expected {' or '.join(NETWORKS)}")
        if not 0 <= self.lr_end <= 1:
            raise InvalidSettings(f"lr_end is {self.lr_end}, expected 0 to 1")

    def lr_at(self, step: int) -> float:
        """Return the learning rate at `step`."""
        return self.lr * (1 - (1 - self.lr_end) * step / self.steps)


def _paper(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return ten epochs of plain steps, with the batch and the bound of PSG's releases."""
    return {"steps": max(1, round(10 * facts.units / 256))}


def _best(facts: PublicFacts, epsilon: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return large batches, few steps, momentum, and the average of the parameters.

    One layer takes bold steps where noise does not lead them astray.
    """
    settings = {"lr_end": 0.1, "momentum": 0.9}
    if given.get("network") == "convnet":
        steps, batch = 1500 if epsilon >= 5 else 500, facts.units / 15
        return settings | {
            "steps": steps,
            "batch": max(1, round(batch)),
            "average": 0.99,
            "width": 64,
        }
    return settings | {
        "network": "scatternet",
        "steps": 200,
        "batch": max(1, round(facts.units / 5)),
        "lr": 8.0 if epsilon * facts.units >= BOLD else 2.0,
        "average": 0.95,
    }


def _small(facts: PublicFacts, _: float, __: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings for a thousand small images: a small network, large batches."""
    return {
        "steps": 200,
        "batch": max(1, round(facts.units / 3)),
        "lr_end": 0.1,
        "momentum": 0.9,
        "average": 0.95,
        "width": 16,
    }


State = tuple[Params, Params, Params]
"""Parameters, their velocities, and the moving average of the parameters."""


@dataclass(frozen=True)
class NoisyStep:
    """One step along a released gradient; a frozen value, so that equal steps are compiled once."""

    momentum: float

    def __call__(self, state: State, slopes: Params, lr: Tensor, decay: Tensor) -> State:
        """Move the parameters, and their average after them."""
        params, velocity, average = state
        velocity = {n: self.momentum * velocity[n] + slope for n, slope in slopes.items()}
        params = {n: weight - lr * velocity[n] for n, weight in params.items()}
        return params, velocity, averaged(average, params, decay)


@dataclass(frozen=True)
class Start:
    """A released classifier to go on from."""

    classifier: Classifier
    certificate: Certificate
    origin: PublicInput

    @classmethod
    def load(cls, place: Path) -> Start:
        """Read a classifier that its certificate vouches for; `place` is its run, or its file."""
        file = classifier_file(place)
        classifier = Classifier.load(file)
        certificate = certificates.read(file.with_name(certificates.FILE_NAME))
        content, digest = certificate.content, file_digest(file)
        if content["files"].get(CLASSIFIER_FILE) != digest:
            raise VerificationFailed(f"{file} is not the file that the certificate beside it names")
        target = content["guarantee"].get("target_epsilon", math.inf)
        origin = PublicInput(
            kind="released",
            name=f"classifier of run {content['run']}",
            trained_on=f"{content['data_set']['name']} with epsilon {target:g}",
            sha256=digest,
        )
        return cls(classifier, certificate, origin)

    def check(self, config: DPSGDConfig, facts: PublicFacts) -> None:
        """Refuse a classifier of other images or classes, or of another network."""
        found, names = self.classifier, facts.all_classes
        if (found.shape, sorted(found.class_names)) != (facts.shape, sorted(names)):
            raise InvalidSettings(
                f"the classifier to start from takes images of shape {found.shape} and has the "
                f"classes {', '.join(found.class_names[:5])}, the data set {facts.shape} and "
                f"{', '.join(names[:5])}; expected the same"
            )
        if found.name != config.network:
            raise InvalidSettings(
                f"the classifier to start from is a {found.name}, the settings say "
                f"{config.network}; pass --network {found.name}"
            )
        if found.name == "convnet" and found.width != config.width:
            raise InvalidSettings(
                f"the classifier to start from is a {found.name} of width {found.width}, the "
                f"settings say width {config.width}; pass --width {found.width}"
            )

    def check_guarantee(self, curator: Curator) -> None:
        """Refuse to certify what began as something that is not private."""
        if curator.has_guarantee and not self.certificate.has_guarantee:
            raise InvalidSettings(
                "the classifier to start from has no guarantee, so what is made of it would have "
                "none; start from another, or from none"
            )


class DPSGD:
    """A network trained by stochastic gradient descent, on noisy gradients alone."""

    config_class: ClassVar[type] = DPSGDConfig
    summary: ClassVar[str] = "a classifier, trained on noisy gradients of private records"
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(_paper, "nothing: ordinary settings, with the network of the PSG paper"),
        "best": Preset(
            _best,
            "digits and USPS, including their test splits; of the convnet, learning rates alone, "
            "on a held-out sixth of MNIST's and Fashion-MNIST's training records",
        ),
        "small": Preset(_small, "digits (scikit-learn), including its test split"),
    }

    @staticmethod
    def default_preset(facts: PublicFacts) -> str:
        """Choose `small` for few units."""
        return "small" if facts.units < FEW_UNITS else "best"

    def __init__(self, config: DPSGDConfig, facts: PublicFacts, *, seed: int) -> None:
        self.config, self.facts, self.seed = config, facts, seed
        others = [name for name in facts.all_classes if name not in facts.class_names]
        self.classes = (*facts.class_names, *others)  # own ones first: labels are their places
        shape, classes = facts.shape, len(self.classes)
        self.network: ConvNet | ScatterNet = (
            ScatterNet(shape, classes)
            if config.network == "scatternet"
            else ConvNet(shape, classes, config.width)
        )

    @cached_property
    def start(self) -> Start | None:
        """What to go on from, checked; None for a fresh network."""
        if not self.config.start:
            return None
        start = Start.load(Path(self.config.start))
        start.check(self.config, self.facts)
        return start

    @property
    def public_inputs(self) -> Sequence[PublicInput]:
        """What was released before and is used here."""
        return (self.start.origin,) if self.start else ()

    def plan(self) -> Plan:
        """One noisy gradient of the whole network for each step."""
        return Plan(
            (
                PlannedRelease(
                    name="gradient",
                    kind="gradient",
                    count=self.config.steps,
                    sampling_rate=self.config.batch / self.facts.units,
                    dimension=parameter_count(self._first().params),
                ),
            )
        )

    def run(self, curator: Curator, progress: Progress) -> Classifier:
        """Follow noisy gradients of the mean loss, from a fresh network or from a released one."""
        config, engine = self.config, curator.engine
        if self.start:
            self.start.check_guarantee(curator)
        first = self._first()
        loss, view = self._loss(first, engine.device)
        step_forward = NoisyStep(config.momentum)
        done, state = self._restored(curator, first.params)
        for step in progress.steps(range(done, config.steps), spent=curator.epsilon_spent):
            slopes = curator.gradient(loss, state[0], clip_norm=config.clip_norm, view=view)
            lr, decay = (
                torch.full((), value, device=engine.device)
                for value in (config.lr_at(step), decay_at(step, most=config.average))
            )
            state = engine.run(step_forward, state, slopes, lr, decay)
            so_far = partial(_with_average, first, state)
            curator.checkpoint(step + 1, {"state": leaves_of(state)}, so_far)
        return _with_average(first, state)

    def _loss(self, first: Classifier, device: torch.device) -> tuple[Loss, View | None]:
        """Return a record's loss, and what of the work on a record is done once for all steps."""
        network, facts = self.network, self.facts
        if isinstance(network, ConvNet):
            return RecordLoss(network.on(device), first.mean, first.std), None
        records = facts.units * (facts.max_per_unit or 1)
        if 4 * records * network.scattering.dimension > SEEN_AT_MOST:
            return RecordLoss(network, first.mean, first.std), None
        return SeenLoss(network), View(Prepared(network, first.mean, first.std))

    def _first(self) -> Classifier:
        """Return the classifier before the first step; one to go on from keeps its constants."""
        if self.start:
            return self.start.classifier.ordered(self.classes)
        facts = self.facts
        return Classifier(
            name=self.config.network,
            shape=facts.shape,
            width=self.config.width,
            class_names=self.classes,
            mean=facts.mean,
            std=facts.std,
            params=self.network.init(public_generator(self.seed, "network")),
        )

    def _restored(self, curator: Curator, first: Params) -> tuple[int, State]:
        """Return steps done, and the state after them."""
        params = moved(first, curator.engine.device)
        state = params, {n: torch.zeros_like(w) for n, w in params.items()}, params
        done, saved = curator.restore()
        return done, filled(state, cast(Params, saved["state"])) if done else state


def _with_average(first: Classifier, state: State) -> Classifier:
    return replace(first, params=state[2]).to(torch.device("cpu"))
