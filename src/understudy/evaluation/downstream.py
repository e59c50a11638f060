"""Downstream accuracy: fresh classifiers trained on the synthetic set, tested on real images."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.errors import InvalidData, InvalidSettings
from understudy.evaluation.classical import CLASSICAL, predictions
from understudy.evaluation.protocols import Asked, Recipe, Scale
from understudy.nets.classifiers import classifier
from understudy.nets.params import moved
from understudy.nets.released import Classifier
from understudy.privacy.disclosure import RealImages
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.augmentation import CropScaleOrRotate
from understudy.training.engine import Engine
from understudy.training.sgd import Epochs, fit

TEST_BATCH = 1000
SIDE_BY_SIDE = ("cuda",)
"""Kinds of devices that several networks are trained on at a time."""
MOST_BESIDE = 8
SYNTHETIC, REAL = "synthetic", "real"
NOISY = "private records, with noise"
"""What a released classifier was trained on."""
RELEASED = "released classifier"
"""Protocol and model of a classifier that is tested as it was released."""

SAME = ("protocol", "model", "trained_on", "tested_on", "options")
"""Measurements that agree in these are repetitions of one another."""


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """What classifiers learn from."""

    images: Tensor
    """(n, c, h, w): floats, 0 black to 1 white, or bytes."""
    labels: Tensor
    soft_labels: Tensor | None = None
    what: str = SYNTHETIC

    def subsample(self, per_class: int, class_names: Sequence[str], seed: int) -> TrainingSet:
        """Return `per_class` images of each class, drawn by `seed`."""
        generator = public_generator(seed, "subsample")
        chosen = []
        for label, name in enumerate(class_names):
            places = (self.labels == label).nonzero().flatten()
            if len(places) < per_class:
                raise InvalidSettings(
                    f"subsample is {per_class}, but there are {len(places)} {self.what} images of "
                    f"class '{name}'; ask for that many or fewer"
                )
            chosen.append(places[torch.randperm(len(places), generator=generator)[:per_class]])
        kept = torch.cat(chosen)
        soft = None if self.soft_labels is None else self.soft_labels[kept]
        return replace(self, images=self.images[kept], labels=self.labels[kept], soft_labels=soft)


@dataclass(frozen=True, kw_only=True)
class Utility:
    """How well one model does on real images: an entry of `utility` in `metrics.json`."""

    protocol: str
    model: str
    trained_on: str
    tested_on: str
    test_images: int
    train_images: int
    accuracies: list[float]
    """Share of test images that were recognised, one per seed."""
    per_class: list[float | None]
    """The same for each class, over all seeds; None for a class that the test set lacks."""
    confusion: list[list[int]]
    """Rows are true classes, columns predicted ones; counts summed over seeds."""
    seconds: float
    device: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Standard deviation over the seeds."""
        return pstdev(self.accuracies)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"mean": self.mean, "std": self.std}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Utility:
        """Read what `to_json` returned."""
        return cls(**{name: entry[name] for name in cls.__dataclass_fields__})


def check_fit(synthetic: SyntheticSet, real: RealImages, facts: PublicFacts) -> None:
    """Refuse a synthetic set or a test set that the one cannot be trained on, or tested with."""
    if len(synthetic) == 0 or not synthetic.is_labelled:
        raise InvalidData(
            "the synthetic set has no labels, so no classifier can be trained on it; make a set "
            "with a method that labels its images"
        )
    if not bool(synthetic.images.isfinite().all()):
        raise InvalidData(
            "the synthetic set holds pixels that are NaN or infinite; make it again, with smaller "
            "steps if the method has such a setting"
        )
    if real.images.shape[1:] != synthetic.images.shape[1:]:
        raise InvalidData(
            f"test images have shape {tuple(real.images.shape[1:])}, the synthetic ones "
            f"{tuple(synthetic.images.shape[1:])}; expected the same; give a test set like the "
            "data set"
        )
    for what, labels in (("test", real.labels), ("synthetic", synthetic.labels)):
        _check_labels(what, labels, facts.classes)


def _check_labels(what: str, labels: Tensor, classes: int) -> None:
    if int(labels.max()) >= classes:
        raise InvalidData(
            f"the {what} set has label {int(labels.max())}, the data set {classes} classes; "
            "expected labels below that; check that the sets belong together"
        )


def utility_of(
    released: Classifier,
    real: RealImages,
    *,
    units: int,
    device: torch.device,
    known: Sequence[Mapping[str, Any]] = (),
) -> Utility:
    """Test a released classifier as it is.

    Args:
        released: the classifier.
        real: what to test on.
        units: how many units it was trained on.
        device: where to compute.
        known: earlier results; one that agrees is not computed again.
    """
    started, classes = time.perf_counter(), len(released.class_names)
    same: dict[str, Any] = {
        "protocol": RELEASED,
        "model": RELEASED,
        "trained_on": NOISY,
        "tested_on": real.what,
        "options": {"network": released.name, "width": released.width},
    }
    if before := _agreeing(same, known):
        return before
    _check_labels("test", real.labels, classes)
    found = released.to(device).predict(real.images)
    return _scored(
        same, [found], real.labels, classes,
        train_images=units, seconds=time.perf_counter() - started, device=_device_name(device),
    )  # fmt: skip


def _agreeing(same: Mapping[str, Any], known: Sequence[Mapping[str, Any]]) -> Utility | None:
    """Return an earlier result of the same measurement."""
    before = [entry for entry in known if all(entry.get(k) == same[k] for k in SAME)]
    return Utility.from_json(before[0]) if before else None


def _scored(
    same: Mapping[str, Any],
    predicted: Sequence[Tensor],
    true: Tensor,
    classes: int,
    *,
    train_images: int,
    seconds: float,
    device: str,
) -> Utility:
    """Compare what was predicted, once per seed, with the truth."""
    pairs = [true * classes + found for found in predicted]
    confusion = torch.bincount(torch.cat(pairs), minlength=classes**2).view(classes, classes)
    totals, right = confusion.sum(1).tolist(), confusion.diagonal().tolist()
    return Utility(
        **same,
        test_images=len(true),
        train_images=train_images,
        accuracies=[float((found == true).double().mean()) for found in predicted],
        per_class=[r / t if t else None for r, t in zip(right, totals, strict=True)],
        confusion=confusion.tolist(),
        seconds=round(seconds, 3),
        device=device,
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Train models and test them on real images.

    Args:
        real: what to test on.
        facts: public facts of the data set.
        asked: protocol, models and options.
        engine: where networks are trained.
        progress: where to report.
    """

    real: RealImages
    facts: PublicFacts
    asked: Asked
    engine: Engine = field(default_factory=Engine)
    progress: Progress = field(default_factory=Progress)

    def run(
        self, train: TrainingSet, *, known: Sequence[Mapping[str, Any]] = ()
    ) -> Iterator[Utility]:
        """Train every model on `train`; yield each result as soon as it is there.

        What agrees with an entry of `known` is not computed again.
        """
        asked, facts = self.asked, self.facts
        if asked.subsample is not None:
            train = train.subsample(asked.subsample, facts.class_names, asked.seed)
        for model in asked.left_out(facts.shape[0]):
            self.progress.say(f"{model} is not installed, so it is left out")
        for model in asked.chosen_models(facts.shape[0]):
            same: dict[str, Any] = {
                "protocol": asked.name,
                "model": model,
                "trained_on": train.what,
                "tested_on": self.real.what,
                "options": self._options(model, train),
            }
            found = _agreeing(same, known) or self._measured(same, train)
            self.progress.say(f"{model}, trained on {train.what} images: {100 * found.mean:.1f} %")
            yield found

    def _options(self, model: str, train: TrainingSet) -> dict[str, Any]:
        """Return what distinguishes one measurement of a model from another."""
        asked = self.asked
        options = {
            "seeds": asked.seeds_of(model), "seed": asked.seed, "subsample": asked.subsample,
        }  # fmt: skip
        if model in CLASSICAL:
            return options
        options |= {
            "epochs": self._recipe(train).sgd.epochs,
            "soft_labels": train.soft_labels is not None,
        }
        options |= {} if asked.augment else {"augment": False}
        return options | ({"width": asked.width} if model == "convnet" else {})

    def _recipe(self, train: TrainingSet) -> Recipe:
        return self.asked.recipe(self.facts.shape[0], len(train.labels) / self.facts.classes)

    def _measured(self, same: Mapping[str, Any], train: TrainingSet) -> Utility:
        started, model = time.perf_counter(), same["model"]
        predicted = self.predicted(model, train)
        return _scored(
            same, predicted, self.real.labels, self.facts.classes,
            train_images=len(train.labels),
            seconds=time.perf_counter() - started,
            device="cpu" if model in CLASSICAL else _device_name(self.engine.device),
        )  # fmt: skip

    def predicted(self, model: str, train: TrainingSet) -> list[Tensor]:
        """Train `model` once per seed; return the classes that each finds in the test images."""
        return (self._classical if model in CLASSICAL else self._network)(model, train)

    def _network(self, model: str, train: TrainingSet) -> list[Tensor]:
        """Train a network once per seed; return what each predicts.

        A seed's network does not depend on how many others there are: on a CPU they are trained in
        turn, on a GPU side by side, each on a stream of its own. (One stacked model is slower on a
        CPU, where convolutions by many sets of filters are slow, and rounds otherwise.)
        """
        asked, device, count = self.asked, self.engine.device, self.asked.seeds_of(model)
        network = classifier(model, self.facts.shape, self.facts.classes, width=asked.width)
        scaled = _scaler(asked.scale, self.facts, device)
        images, recipe = scaled(train.images), self._recipe(train)
        labels = (train.labels if train.soft_labels is None else train.soft_labels).to(device)

        def one(number: int, engine: Engine, epochs: Epochs) -> Tensor:
            generator = public_generator(asked.seed, "evaluation", number)
            params = fit(
                network,
                moved(network.init(generator), device),
                images,
                labels,
                sgd=recipe.sgd,
                generator=generator,
                augment=CropScaleOrRotate() if recipe.augment else None,
                engine=engine,
                epochs=epochs,
            )
            parts = torch.split(self.real.images, TEST_BATCH)
            return torch.cat([network(params, scaled(part)).argmax(1).cpu() for part in parts])

        def beside(number: int) -> Tensor:
            engine = self.engine.beside()
            with engine.on_own_stream():
                return one(number, engine, iter if number else bar(f"{model}, {count} seeds"))

        def bar(what: str) -> Epochs:
            return partial(self.progress.steps, what=what)

        if device.type in SIDE_BY_SIDE and count > 1:
            with ThreadPoolExecutor(min(count, MOST_BESIDE)) as pool:
                return list(pool.map(beside, range(count)))
        names = [f"{model}, seed {number + 1} of {count}" for number in range(count)]
        return [one(number, self.engine, bar(name)) for number, name in enumerate(names)]

    def _classical(self, model: str, train: TrainingSet) -> list[Tensor]:
        """Fit a classical model once per seed; return what each predicts."""
        scaled = _scaler("unit", self.facts, torch.device("cpu"))
        images, test = (np.asarray(scaled(part.images)) for part in (train, self.real))
        labels, found = np.asarray(train.labels), []
        for number in self.progress.steps(range(self.asked.seeds_of(model)), what=model):
            generator = public_generator(self.asked.seed, "evaluation", number)
            seed = int(torch.randint(2**31 - 1, (), generator=generator))
            found.append(torch.from_numpy(predictions(model, images, labels, test, seed=seed)))
        return found


def _scaler(scale: Scale, facts: PublicFacts, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return what turns images, floats or bytes, into what a classifier sees."""
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (facts.mean, facts.std))

    def scaled(images: Tensor) -> Tensor:
        images = images.to(device)
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        if scale == "normalised":
            return (pixels - mean) / std
        return 2 * pixels - 1 if scale == "symmetric" else pixels

    return scaled


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
