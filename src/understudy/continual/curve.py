"""The curve: what classifiers know after each stage, and what all stages cost together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from understudy.card import never_less
from understudy.charts import Chart, Series, counted, line_chart, shares, standalone
from understudy.data.images import LabelledImages
from understudy.errors import InvalidData, InvalidSettings
from understudy.evaluation.downstream import RELEASED, Evaluation, TrainingSet, check_fit
from understudy.evaluation.protocols import Asked
from understudy.files import make_directory, write_file, write_json
from understudy.finished import finished_release, load, opened, verify
from understudy.nets.released import Classifier
from understudy.pipeline import Data, load_data
from understudy.privacy import registration as registrations
from understudy.privacy.certificate import Certificate
from understudy.privacy.composition import Statement, compose
from understudy.privacy.disclosure import RealImages, disclose_test_set
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.runs import CLASSIFIER_FILE
from understudy.synthetic import join
from understudy.training.engine import Engine, choose_device


@dataclass(frozen=True)
class Received:
    """The released folder of a stage, verified."""

    folder: Path
    certificate: Certificate
    facts: PublicFacts


def receive(folders: Sequence[str | Path]) -> list[Received]:
    """Verify what parties have handed on; only released folders are read.

    Raises:
        VerificationFailed: a folder does not match its certificate.
    """
    if not folders:
        raise InvalidSettings("no released folders were named; name those of all stages, in order")
    received = []
    for folder in map(finished_release, folders):
        certificate = verify(folder).certificate
        facts = PublicFacts.from_json(certificate.content["data_set"]["public_facts"])
        received.append(Received(folder, certificate, facts))
    first = received[0]
    for one in received[1:]:
        for what in ("shape", "mean", "std"):
            ours, theirs = getattr(first.facts, what), getattr(one.facts, what)
            if ours != theirs:
                raise InvalidData(
                    f"{first.folder} has {what} {ours}, {one.folder} {theirs}; expected the same; "
                    "make the stages from images that were read alike"
                )
    return received


@dataclass(frozen=True, kw_only=True)
class Point:
    """What classifiers of one model know after a stage."""

    stage: int
    model: str
    classes: tuple[str, ...]
    """All seen so far."""
    accuracies: list[float]
    """Mean over these classes of the share of test images that were recognised, one per seed."""
    per_class: list[float]
    """That share for each class, over all seeds."""
    train_images: int
    test_images: int
    seconds: float

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Standard deviation over the seeds."""
        return pstdev(self.accuracies)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"mean": self.mean, "std": self.std}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy after each stage, and what all stages cost together."""

    points: list[Point]
    statement: Statement
    protocol: str
    tested_on: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "format": 1,
            "points": [point.to_json() for point in self.points],
            "statement": self.statement.to_json(),
            "protocol": self.protocol,
            "tested_on": self.tested_on,
        }

    def chart(self) -> Chart:
        """Draw it."""
        lines = {
            model: [point for point in self.points if point.model == model]
            for model in dict.fromkeys(point.model for point in self.points)
        }
        return line_chart(
            "Accuracy after each stage",
            "Mean over the classes seen so far; bars are standard deviations over seeds.",
            [
                Series(
                    model,
                    [(point.stage, point.mean) for point in points],
                    [point.std for point in points],
                    style=number,
                )
                for number, (model, points) in enumerate(lines.items())
            ],
            x=counted("stage", len(self.statement.parts)),
            y=shares("test accuracy"),
        )


def sentence(statement: Statement) -> str:
    """Say in words what sets cost together, and why."""
    count, unit = len(statement.parts), " or ".join(statement.units)
    if statement.epsilon is None:
        return f"No guarantee: a set of these {count} stages was made without noise."
    how = "the sum over" if statement.kind == "sum" else "the largest of"
    guarantee = f"epsilon {never_less(statement.epsilon):g} at delta {statement.delta:g}"
    return (
        f"All stages together: {guarantee} for each {unit}, {how} {count} stages, because "
        f"{statement.why}."
    )


def evaluate_stages(
    folders: Sequence[str | Path],
    *,
    test: Data,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    declare_disjoint: bool = False,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **asked: Any,
) -> Curve:
    """Train classifiers on what was released until each stage, and test them on real images.

    Args:
        folders: released folders, or whole runs, in the order of the stages; of a run only
            `release/` is read.
        test: test set with all classes of the stages, by name.
        out: where to write `statement.json` and `statement.txt`, and below `private/` the curve;
            by default nowhere.
        ledger: where the reading of the test set is recorded; if all stages were made with it, it
            can also prove that they are disjoint. By default the user's.
        declare_disjoint: declare, for the parties, that no unit is in two of the data sets.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **asked: fields of `Asked`, as for `evaluate`.
    """
    wanted, report = Asked(**asked), progress or Progress()
    received = receive(folders)
    with opened(ledger) as book:
        statement = compose(
            [one.certificate for one in received], ledger=book, declared=declare_disjoint
        )
        if out:
            _write_statement(Path(out), statement)
        real, names = _test_set(test, book, received, report)
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    judge = _Judge(real=real, names=names, asked=wanted, engine=engine, progress=report)
    curve = Curve(points=[], statement=statement, protocol=wanted.name, tested_on=real.what)
    for stage in range(1, len(received) + 1):
        for point in judge.after(received[:stage]):
            report.say(f"after stage {stage}, {point.model}: {100 * point.mean:.1f} %")
            curve.points.append(point)
            if out:
                _write_curve(Path(out), curve)
    return curve


def _test_set(
    test: Data, ledger: Ledger, received: Sequence[Received], progress: Progress
) -> tuple[RealImages, tuple[str, ...]]:
    """Disclose the test set; return it with the names of its classes."""
    given = test if isinstance(test, LabelledImages) else load_data(test, progress=progress)
    for one in received:
        if lacking := [n for n in one.facts.class_names if n not in given.class_names]:
            raise InvalidData(
                f"the test set has no class '{lacking[0]}', which {one.folder} has; expected a "
                "test set with the classes of all stages, by the same names"
            )
    known = registrations.find_exactly(ledger, given)
    real = disclose_test_set(
        given.test or given,
        ledger,
        data_set=known.id if known else None,
        purpose=f"evaluate {len(received)} stages",
    )
    return real, given.class_names


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """Trains classifiers on what was released, and tests them."""

    real: RealImages
    names: Sequence[str]
    """Of the test set's classes."""
    asked: Asked
    engine: Engine
    progress: Progress

    def after(self, received: Sequence[Received]) -> Iterator[Point]:
        """Yield what classifiers know after the last of these stages."""
        seen = tuple(dict.fromkeys(name for one in received for name in one.facts.class_names))
        tested = _of_classes(self.real, self.names, seen)
        started = time.perf_counter()
        for model, predicted, images in self._answers(received, seen, tested):
            found = torch.stack([_recognised(one, tested.labels, len(seen)) for one in predicted])
            yield Point(
                stage=len(received),
                model=model,
                classes=seen,
                accuracies=found.mean(1).tolist(),
                per_class=found.mean(0).tolist(),
                train_images=images,
                test_images=len(tested.labels),
                seconds=round(time.perf_counter() - started, 3),
            )
            started = time.perf_counter()

    def _answers(
        self, received: Sequence[Received], seen: tuple[str, ...], tested: RealImages
    ) -> Iterator[tuple[str, list[Tensor], int]]:
        """Yield each model, what it finds in the test images by seed, and how many it learnt from.

        It is the classifier that the last stage released, if it did; else models are trained on all
        sets together.
        """
        asked, last = self.asked, received[-1]
        if (last.folder / CLASSIFIER_FILE).exists():
            handed_on = Classifier.load(last.folder / CLASSIFIER_FILE).to(self.engine.device)
            units = sum(one.facts.units for one in received)
            yield RELEASED, [handed_on.predict(tested.images, among=seen)], units
            return
        union = join([load(one.folder) for one in received])
        facts = replace(last.facts, class_names=seen)
        check_fit(union, tested, facts)
        soft = union.soft_labels if asked.soft_labels else None
        train = TrainingSet(images=union.images, labels=union.labels, soft_labels=soft)
        if asked.subsample is not None:
            train = train.subsample(asked.subsample, seen, asked.seed)
        evaluation = Evaluation(
            real=tested, facts=facts, asked=asked, engine=self.engine, progress=self.progress
        )
        for model in asked.chosen_models(facts.shape[0]):
            yield model, evaluation.predicted(model, train), len(train.labels)


def _of_classes(real: RealImages, names: Sequence[str], seen: Sequence[str]) -> RealImages:
    """Return the test images of the classes seen, labelled by their place among these."""
    place = torch.tensor([seen.index(name) if name in seen else -1 for name in names])
    labels = place[real.labels]
    kept = labels >= 0
    counts = torch.bincount(labels[kept], minlength=len(seen))
    if lacking := [name for name, count in zip(seen, counts, strict=True) if not count]:
        raise InvalidData(
            f"the test set has no image of class '{lacking[0]}'; expected some of each class"
        )
    return RealImages(real.images[kept], labels[kept], real.what)


def _recognised(predicted: Tensor, true: Tensor, classes: int) -> Tensor:
    """Return the share of each class's images that were recognised (classes,)."""
    right = torch.bincount(true[predicted == true], minlength=classes)
    return right.double() / torch.bincount(true, minlength=classes)


def _write_statement(out: Path, statement: Statement) -> None:
    make_directory(out)
    write_json(out / "statement.json", statement.to_json())
    write_file(out / "statement.txt", (sentence(statement) + "\n").encode())


def _write_curve(out: Path, curve: Curve) -> None:
    """Write what was computed on real images, which is private like all such."""
    make_directory(out / "private", mode=0o700)
    write_json(out / "private" / "curve.json", curve.to_json(), mode=0o600)
    write_file(out / "private" / "curve.svg", standalone(curve.chart()).encode(), mode=0o600)
