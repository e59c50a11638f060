"""Measures of a run beyond accuracy: image quality, and distance to the training records.

Like accuracy they are computed on real records: each reading enters the ledger first, and results
go to the run's `private/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from understudy.data.images import LabelledImages
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.data.weights import weights_file
from understudy.errors import InvalidData, InvalidSettings, MissingWeights
from understudy.evaluation import memorisation as copies
from understudy.evaluation import quality
from understudy.evaluation.features import (
    FeatureNetwork,
    Inception,
    ReferenceNetwork,
    ReferenceTraining,
)
from understudy.evaluation.memorisation import Memorisation
from understudy.evaluation.quality import Quality
from understudy.pipeline import Data, _ledger_of, _opened, _real_images, load_result
from understudy.privacy import registration as registrations
from understudy.privacy.disclosure import RealImages, disclose_training_records
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import PublicFacts
from understudy.privacy.vault import Vault
from understudy.progress import Progress
from understudy.runs import RunDirectory
from understudy.synthetic import SyntheticSet
from understudy.training.engine import Engine, choose_device

FeatureName = Literal["inception", "convnet"]
Reference = Literal["test", "training"]


def _require_private_part(directory: str | Path) -> None:
    if not RunDirectory(Path(directory)).has_private_part:
        raise InvalidData(
            f"{directory} has no private part, so its training records are not known here; only "
            "who made the run can compare with them"
        )


@dataclass(frozen=True)
class _Subject:
    """A run that is being measured."""

    run: RunDirectory
    synthetic: SyntheticSet
    facts: PublicFacts
    ledger: Ledger
    engine: Engine
    progress: Progress

    def test_set(self, test: Data | None) -> RealImages:
        return _real_images(self.run, test, self.facts, self.ledger, self.progress)

    def training_records(self, data: Data | None) -> RealImages:
        """Disclose the records that the run learnt from."""
        settings = self.run.settings()
        source = data or settings["source"]
        if not source:
            raise InvalidData(
                "the run was made from arrays in memory, which are not here any more; pass them to "
                "`measure_memorisation` as `data`, or take a test set as the reference"
            )
        if not isinstance(source, LabelledImages):
            source = read_source(source, Reading(**settings["reading"]), self.progress)
        registered = registrations.find(self.ledger, source, name=settings["data_set"])
        if registered is None:
            raise InvalidData(
                f"{source.name} is not registered in {self.ledger.path} as the run's data set "
                f"'{settings['data_set']}'; pass the records that the run was made from"
            )
        vault = Vault(source, registered, self.ledger)
        purpose = f"evaluate {self.run.path.name}"
        return disclose_training_records(vault, self.ledger, purpose=purpose)


@contextlib.contextmanager
def _measured(
    directory: str | Path,
    ledger: Ledger | str | Path | None,
    engine: Engine,
    progress: Progress,
) -> Iterator[_Subject]:
    run, result = RunDirectory(Path(directory)), load_result(directory)
    facts = PublicFacts.from_json(result.certificate.content["data_set"]["public_facts"])
    # Whoever received a release has no ledger of it: the reading goes into a ledger of their own.
    received = not run.has_private_part
    with _opened(ledger or _ledger_of(directory), create=received) as book:
        yield _Subject(run, result.synthetic, facts, book, engine, progress)


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
        _require_private_part(directory)
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    weights = _inception_file(report) if features == "inception" else None
    with _measured(directory, ledger, engine, report) as subject:
        real = subject.training_records(None) if reference == "training" else subject.test_set(test)
        quality.check_comparable(subject.synthetic, real, subject.facts)
        report.say("training a network on the reference set")
        classifier = ReferenceNetwork(real, subject.facts, training=training, engine=engine)
        network: FeatureNetwork = Inception(weights, engine.device) if weights else classifier
        found = quality.image_quality(
            subject.synthetic, real, network=network, classifier=classifier, progress=report
        )
    if (subject.run.path / "private").is_dir():
        subject.run.record("quality", found.to_json(), key=quality.SAME)
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
    _require_private_part(directory)
    report = progress or Progress()
    engine = Engine(choose_device(device), say=report.say)
    with _measured(directory, ledger, engine, report) as subject:
        held_out = subject.test_set(test)
        records = subject.training_records(data)
        found = copies.memorisation(
            subject.synthetic, records, held_out, device=engine.device, progress=report
        )
    subject.run.record("memorisation", found.to_json(), key=copies.SAME)
    return found
