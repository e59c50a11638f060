"""Measures of a run: accuracy, also on the way, image quality, memorisation.

All are computed on real records: each reading enters the ledger first, and results go to the run's
`private/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from understudy.data.catalogue import CATALOGUE
from understudy.data.images import LabelledImages
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.data.weights import weights_file
from understudy.errors import InvalidData, InvalidSettings, MissingWeights
from understudy.evaluation import memorisation as copies
from understudy.evaluation import quality
from understudy.evaluation.downstream import (
    REAL,
    SAME,
    Evaluation,
    TrainingSet,
    Utility,
    check_fit,
    utility_of,
)
from understudy.evaluation.features import (
    FeatureNetwork,
    Inception,
    ReferenceNetwork,
    ReferenceTraining,
)
from understudy.evaluation.memorisation import Memorisation
from understudy.evaluation.protocols import Asked
from understudy.evaluation.quality import Quality
from understudy.finished import ledger_of, load_result, opened, require_images
from understudy.job import Result
from understudy.nets.released import Classifier
from understudy.pipeline import Data, register
from understudy.privacy import registration as registrations
from understudy.privacy.certificate import epsilon_after
from understudy.privacy.disclosure import (
    RealImages,
    disclose_hold_out,
    disclose_test_set,
    disclose_training_records,
)
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import PublicFacts
from understudy.privacy.registration import Registration
from understudy.privacy.vault import Vault
from understudy.progress import Progress
from understudy.runs import RunDirectory
from understudy.synthetic import SyntheticSet
from understudy.training.engine import Engine, choose_device

FeatureName = Literal["inception", "convnet"]
Reference = Literal["test", "training"]
SAME_POINT = (*SAME, "releases")


@dataclass(frozen=True)
class Subject:
    """A run that is being measured."""

    run: RunDirectory
    result: Result
    facts: PublicFacts
    ledger: Ledger
    engine: Engine
    progress: Progress

    @property
    def synthetic(self) -> SyntheticSet:
        """The set that the run has made."""
        return self.result.synthetic

    def test_set(self, test: Data | None) -> RealImages:
        """Disclose the given test set, or the one that belongs to the run's data."""
        purpose = f"evaluate {self.run.path.name}"
        if test is not None:
            given = test if isinstance(test, LabelledImages) else self._read_test_set(test)
            names = given.class_names
            if names != self.facts.class_names[: len(names)]:
                raise InvalidData(
                    f"the test set has the classes {', '.join(names[:5])}, the data set "
                    f"{', '.join(self.facts.class_names[:5])}; expected the same, in the same order"
                )
            known = registrations.find_exactly(self.ledger, given)
            number = known.id if known else None
            given = given.test or given
            return disclose_test_set(given, self.ledger, data_set=number, purpose=purpose)
        data = self._source(None, otherwise="pass a test set with --test")
        if data.test is not None:
            registered = registrations.find(self.ledger, data, name=self._data_set)
            number = registered.id if registered else None
            return disclose_test_set(data.test, self.ledger, data_set=number, purpose=purpose)
        vault = Vault(data, self._registered(data), self.ledger)
        return disclose_hold_out(vault, self.ledger, purpose=purpose)

    def training_records(self, data: Data | None = None, *, otherwise: str) -> RealImages:
        """Disclose the records that the run learnt from."""
        source = self._source(data, otherwise=otherwise)
        vault = Vault(source, self._registered(source), self.ledger)
        purpose = f"evaluate {self.run.path.name}"
        return disclose_training_records(vault, self.ledger, purpose=purpose)

    def record(self, section: str, entry: dict[str, Any], key: tuple[str, ...]) -> None:
        """Keep a measurement, unless the release travelled here alone."""
        if (self.run.path / "private").is_dir():
            self.run.record(section, entry, key=key)

    @property
    def _data_set(self) -> str:
        return str(self.run.settings()["data_set"])

    def _read_test_set(self, test: str | Path) -> LabelledImages:
        settings = self.run.settings() if self.run.has_private_part else {}
        reading = Reading(**settings.get("reading", {}))
        how = Reading(
            classes=None if str(test) in CATALOGUE else self.facts.class_names,
            size=reading.size,
            channels=reading.channels,
            skip_bad=reading.skip_bad,
        )
        return read_source(test, how, self.progress)

    def _source(self, data: Data | None, *, otherwise: str) -> LabelledImages:
        """Read the records that the run was made from again."""
        if not self.run.has_private_part:
            raise InvalidData(
                f"{self.run.path} does not say what it was made from, for it has no private part; "
                f"{otherwise}"
            )
        settings = self.run.settings()
        source = data or settings["source"]
        if not source:
            raise InvalidData(
                f"the run was made from arrays in memory, not here any more; {otherwise}"
            )
        if isinstance(source, LabelledImages):
            return source
        return read_source(source, Reading(**settings["reading"]), self.progress)

    def _registered(self, data: LabelledImages) -> Registration:
        registered = registrations.find(self.ledger, data, name=self._data_set)
        if registered is None:
            raise InvalidData(
                f"{data.name} is not registered in {self.ledger.path} as the run's data set "
                f"'{self._data_set}'; pass the records that the run was made from"
            )
        return registered


@contextlib.contextmanager
def measured_run(
    directory: str | Path,
    ledger: Ledger | str | Path | None,
    engine: Engine,
    progress: Progress,
) -> Iterator[Subject]:
    """Open a finished run for measuring, and the ledger that notes each reading."""
    run, result = RunDirectory(Path(directory)), load_result(directory)
    facts = PublicFacts.from_json(result.certificate.content["data_set"]["public_facts"])
    # Whoever received a release has no ledger of it: the reading goes into a ledger of their own.
    received = not run.has_private_part
    with opened(ledger or ledger_of(directory), create=received) as book:
        yield Subject(run, result, facts, book, engine, progress)


def require_private_part(directory: str | Path) -> None:
    """Refuse a released part that travelled alone."""
    if not RunDirectory(Path(directory)).has_private_part:
        raise InvalidData(
            f"{directory} has no private part, so its training records are not known here; only "
            "who made the run can compare with them"
        )


def evaluate(
    directory: str | Path,
    *,
    test: Data | None = None,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **asked: Any,
) -> list[Utility]:
    """Train classifiers on a run's set and test them on real records; or test a run's classifier.

    Each result goes to the run's `private/metrics.json` as soon as it is there.

    Args:
        directory: the run.
        test: test set; by default the registered hold-out, or a built-in set's own test split.
        ledger: where the reading of real records is recorded; by default the run's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **asked: fields of `Asked`: `protocol`, `models`, `seeds`, `epochs`, `width`, `seed`,
            `subsample`, `soft_labels`, `augment`, `ceiling`, `missing`; of these, `missing` alone
            for a run that trained a classifier.
    """
    wanted, report = Asked(**asked), progress or Progress()
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    found = []
    with measured_run(directory, ledger, engine, report) as subject:
        facts, made = subject.facts, subject.result.released
        known = subject.run.metrics().get("utility", []) if wanted.missing else []
        if isinstance(made, Classifier):
            _check_nothing_to_train(subject.run.path, wanted)
            real = subject.test_set(test)
            one = utility_of(made, real, units=facts.units, device=engine.device, known=known)
            subject.record("utility", one.to_json(), SAME)
            return [one]
        synthetic, real = made, subject.test_set(test)
        check_fit(synthetic, real, facts)
        sets = [_training_set(synthetic, wanted)]
        if wanted.ceiling:
            seen = subject.training_records(otherwise="leave out --ceiling")
            sets.append(TrainingSet(images=seen.images, labels=seen.labels, what=REAL))
        evaluation = Evaluation(
            real=real, facts=facts, asked=wanted, engine=engine, progress=report
        )
        for train in sets:
            for utility in evaluation.run(train, known=known):
                subject.record("utility", utility.to_json(), SAME)
                found.append(utility)
    return found


def measure_real(
    data: LabelledImages,
    *,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **asked: Any,
) -> list[Utility]:
    """Train on real records: what a synthetic set of these can be compared with.

    Nothing is released; that the records were read is entered into the ledger.

    Args:
        data: training records, with a test set of their own.
        ledger: path of the ledger; by default the user's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **asked: fields of `Asked`, as for `evaluate`; `subsample` takes so many of each class.
    """
    if data.test is None:
        raise InvalidData(f"{data.name} has no test set of its own; expected one to test with")
    report, purpose = progress or Progress(), f"train on real records of {data.name}"
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    with opened(ledger) as book:
        registered = register(data, ledger=book)
        seen = disclose_training_records(Vault(data, registered, book), book, purpose=purpose)
        tested = disclose_test_set(data.test, book, data_set=registered.id, purpose=purpose)
    evaluation = Evaluation(
        real=tested, facts=registered.facts, asked=Asked(**asked), engine=engine, progress=report
    )
    train = TrainingSet(images=seen.images, labels=seen.labels, what=REAL)
    return list(evaluation.run(train))


def _check_nothing_to_train(run: Path, asked: Asked) -> None:
    """Refuse options of training for a run whose classifier is trained already."""
    given = [
        f"--{field.name.replace('_', '-')}"
        for field in fields(Asked)
        if field.name != "missing" and getattr(asked, field.name) != field.default
    ]
    if given:
        raise InvalidSettings(
            f"{run} holds a classifier, which is tested as it is: nothing is trained; leave out "
            f"{', '.join(given)}"
        )


def _training_set(synthetic: SyntheticSet, asked: Asked) -> TrainingSet:
    soft = synthetic.soft_labels if asked.soft_labels else None
    return TrainingSet(images=synthetic.images, labels=synthetic.labels, soft_labels=soft)


def measure_convergence(
    directory: str | Path,
    *,
    test: Data | None = None,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    **asked: Any,
) -> list[dict[str, Any]]:
    """Evaluate the sets that a run kept on the way: accuracy against the epsilon spent.

    Args:
        directory: the run, made with `snapshots`.
        test: test set; by default the registered hold-out, or a built-in set's own test split.
        ledger: where the reading of real records is recorded; by default the run's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        **asked: fields of `Asked`, as for `evaluate`.
    """
    wanted, report = Asked(**asked), progress or Progress()
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    kept = RunDirectory(Path(directory)).snapshots()
    if not kept:
        raise InvalidData(
            f"{directory} has no snapshots, so nothing is known of its way; make a run with "
            "--snapshots 10"
        )
    points = []
    with measured_run(directory, ledger, engine, report) as subject:
        measured = _way_to_measure(subject, wanted, test)
        for made, file in kept:
            spent = epsilon_after(subject.result.certificate, made)
            report.say(f"after {sum(made.values())} releases, epsilon {spent:.3g}")
            for utility in measured(file):
                point = {"releases": sum(made.values()), "epsilon": spent} | utility.to_json()
                subject.record("convergence", point, SAME_POINT)
                points.append(point)
    return points


def _way_to_measure(
    subject: Subject, asked: Asked, test: Data | None
) -> Callable[[Path], Iterable[Utility]]:
    """Return what measures a snapshot, given its file."""
    facts, engine = subject.facts, subject.engine
    if isinstance(subject.result.released, Classifier):
        _check_nothing_to_train(subject.run.path, asked)
        real = subject.test_set(test)
        return lambda file: [
            utility_of(Classifier.load(file), real, units=facts.units, device=engine.device)
        ]
    real = subject.test_set(test)
    check_fit(subject.synthetic, real, facts)
    evaluation = Evaluation(
        real=real, facts=facts, asked=asked, engine=engine, progress=subject.progress
    )
    return lambda file: evaluation.run(_training_set(SyntheticSet.load(file), asked))


def measure_quality(
    directory: str | Path,
    *,
    features: FeatureName = "inception",
    reference: Reference = "test",
    test: Data | None = None,
    training: ReferenceTraining | None = None,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
) -> Quality:
    """Compare a run's images with real ones: Fréchet and kernel distance, precision, recall, score.

    Args:
        directory: the run.
        features: `inception` for numbers called FID and KID, whose weights are fetched if need be,
            or `convnet` for those of a network trained on the reference set.
        reference: compare with the `test` set, or with the `training` records.
        test: test set; by default the registered hold-out, or a built-in set's own test split.
        training: how to train the network that knows the reference set; it gives the class
            probabilities of the inception score, and the features called `convnet`.
        ledger: where the reading of real records is recorded; by default the run's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.

    Raises:
        MissingWeights: the weights are not here and cannot be fetched.
    """
    report = progress or Progress()
    require_images(directory)
    if features not in ("inception", "convnet") or reference not in ("test", "training"):
        raise InvalidSettings(
            f"features are '{features}', the reference '{reference}'; expected inception or "
            "convnet, and test or training"
        )
    if reference == "training" and test is not None:
        raise InvalidSettings(
            "a test set was given, but the reference is the training records; leave one of them out"
        )
    if reference == "training":
        require_private_part(directory)
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    weights = _inception_file(report) if features == "inception" else None
    with measured_run(directory, ledger, engine, report) as subject:
        if reference == "training":
            real = subject.training_records(otherwise="compare with a test set")
        else:
            real = subject.test_set(test)
        quality.check_comparable(subject.synthetic, real, subject.facts)
        report.say("training a network on the reference set")
        classifier = ReferenceNetwork(real, subject.facts, training=training, engine=engine)
        network: FeatureNetwork = Inception(weights, engine.device) if weights else classifier
        found = quality.image_quality(
            subject.synthetic, real, network=network, classifier=classifier, progress=report
        )
        subject.record("quality", found.to_json(), quality.SAME)
    return found


def _inception_file(progress: Progress) -> Path:
    try:
        return weights_file("inception", progress=progress)
    except MissingWeights as error:
        raise MissingWeights(f"{error}; or do without it: --features convnet") from None


def measure_memorisation(
    directory: str | Path,
    *,
    data: Data | None = None,
    test: Data | None = None,
    ledger: Ledger | str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> Memorisation:
    """Measure how near a run's images lie to its training records, against unseen real images.

    Args:
        directory: the run, with its private part.
        data: the records that the run was made from; by default read again from where they were.
        test: unseen images; by default the registered hold-out, or a built-in set's test split.
        ledger: where the readings of real records are recorded; by default the run's.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        progress: where to report.
    """
    require_images(directory)
    require_private_part(directory)
    report = progress or Progress()
    engine = Engine(choose_device(device), say=report.say)
    with measured_run(directory, ledger, engine, report) as subject:
        held_out = subject.test_set(test)
        records = subject.training_records(
            data, otherwise="pass its records to `measure_memorisation` as `data`"
        )
        found = copies.memorisation(
            subject.synthetic, records, held_out, device=engine.device, progress=report
        )
        subject.record("memorisation", found.to_json(), copies.SAME)
    return found
