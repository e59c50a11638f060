"""What can be done with a finished run: load, use its classifier, sample, export, verify."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from understudy.errors import InvalidData, InvalidSettings, OutputExists
from understudy.exports import Format, export_release, verified
from understudy.files import write_file
from understudy.job import HOLDS_NO_CLASSIFIER, HOLDS_NO_IMAGES, Result
from understudy.nets.released import Artefact, Classifier, Generator
from understudy.privacy import certificate as certificates
from understudy.privacy.certificate import Verification
from understudy.privacy.ledger import Ledger
from understudy.privacy.mark import Mark
from understudy.privacy.plan import PublicFacts
from understudy.runs import (
    CLASSIFIER_FILE,
    GENERATOR_FILE,
    SET_FILE,
    RunDirectory,
    classifier_file,
    partial,
    released_part,
)
from understudy.synthetic import SyntheticSet
from understudy.training.engine import choose_device


def load_result(directory: str | Path) -> Result:
    """Read a finished run; only its `release/` is needed."""
    release = finished_release(directory)
    return Result(
        load_released(release),
        certificates.read(release / certificates.FILE_NAME),
        Path(directory),
    )


def load_released(release: Path) -> Artefact:
    """Read what a run has released."""
    if (release / CLASSIFIER_FILE).exists():
        return Classifier.load(release / CLASSIFIER_FILE)
    synthetic = SyntheticSet.load(release / SET_FILE)
    if (release / GENERATOR_FILE).exists():
        synthetic = replace(synthetic, generator=Generator.load(release / GENERATOR_FILE))
    return synthetic


def load(directory: str | Path) -> SyntheticSet:
    """Read the set of a finished run, or of its `release/` alone, as a torch `Dataset`."""
    require_images(directory)
    return load_result(directory).synthetic


def load_classifier(place: str | Path) -> Classifier:
    """Read the classifier of a finished run, of its `release/` alone, or a file of one.

    Its `predict` names images; `understudy verify` checks whether it is the one that was certified.
    """
    file = classifier_file(finished_release(place))
    if not file.exists() and (file.parent / SET_FILE).exists():
        raise InvalidSettings(HOLDS_NO_CLASSIFIER.format(place))
    return Classifier.load(file)


def require_images(directory: str | Path) -> None:
    """Refuse a run that trained a classifier."""
    if (finished_release(directory) / CLASSIFIER_FILE).exists():
        raise InvalidSettings(HOLDS_NO_IMAGES.format(directory))


def sample(
    directory: str | Path,
    *,
    count: int | None = None,
    per_class: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
    without_guarantee: bool = False,
) -> SyntheticSet:
    """Draw images from the generator of a finished run, at no cost in privacy.

    Args:
        directory: the run, or its `release/` alone; nothing else of it is read.
        count: how many images in all, or
        per_class: how many of each class.
        seed: another one gives other images.
        out: file to write the set to, in the form of the released one; by default none.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        without_guarantee: draw from a generator that has no guarantee.
    """
    require_images(directory)
    release, file = finished_release(directory), Path(out) if out else None
    if file and file.exists():
        raise OutputExists(f"{file} exists already; choose another --out, or remove it")
    if file:
        check_outside(file, release)
    certificate = verified(release, without_guarantee=without_guarantee)
    if GENERATOR_FILE not in certificate.content["files"]:
        raise InvalidSettings(
            f"{directory} has no generator: {certificate.content['method']['name']} makes images "
            "alone; use its set as it is, or a run of a method that trains a generator"
        )
    generator = Generator.load(release / GENERATOR_FILE).to(choose_device(device))
    facts = PublicFacts.from_json(certificate.content["data_set"]["public_facts"])
    drawn = generator.drawn(facts.class_names, count, seed=seed, per_class=per_class)
    if file:
        write_file(file, drawn.to_bytes())
    return drawn


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    directory: Path
    images: int


def export(
    directory: str | Path,
    *,
    to: Format,
    out: str | Path | None = None,
    without_guarantee: bool = False,
) -> Exported:
    """Write a released set in the form that other tools read, with its data card and certificate.

    Args:
        directory: the run, or its `release/` alone; nothing else of it is read.
        to: `png`, `npz`, `safetensors`, `parquet` or `idx`.
        out: directory to write; by default named after the run and the format.
        without_guarantee: export a set that has no guarantee.
    """
    require_images(directory)
    run = Path(directory).resolve()
    run = run.parent if run.name == "release" else run
    wanted = Path(out) if out else run.with_name(f"{run.name}-{to}")
    check_outside(wanted, finished_release(directory))
    count = export_release(
        finished_release(directory), to, wanted, without_guarantee=without_guarantee
    )
    return Exported(wanted, count)


def verify(directory: str | Path, *, ledger: Ledger | str | Path | bool = False) -> Verification:
    """Check a run, or its `release/` alone, against its certificate.

    Args:
        directory: the run.
        ledger: the custodian's ledger, to check the certificate's origin too; True for the one that
            the run was made with.
    """
    release = finished_release(directory)
    if ledger is False:
        return certificates.verify(release)
    with opened(ledger_of(directory) if ledger is True else ledger, create=False) as book:
        found = certificates.verify(release, ledger=book)
        if seen := RunDirectory(Path(directory)).ledger_seen():
            book.confirm(Mark.from_json(*seen), seen[1])
    return found


def finished_release(directory: str | Path) -> Path:
    """Return the folder that may be shared: of a run its `release/`, or what is given itself."""
    path = Path(directory)
    if not path.exists() and partial(path).exists():
        raise InvalidData(
            f"{path} is not finished; repeat the command that started it, with --resume"
        )
    if not path.exists():
        folder = "" if path.parent == Path("runs") else f" {path.parent}"
        raise InvalidData(
            f"there is no run {path}; `understudy runs{folder}` lists those that there are"
        )
    return released_part(path)


def check_outside(target: Path, release: Path) -> None:
    """Refuse to write into a released directory: one file more, and it is not what was certified.

    Raises:
        InvalidSettings: the target lies there.
    """
    if target.resolve().is_relative_to(release.resolve()):
        raise InvalidSettings(
            f"{target} lies in a released directory, whose certificate lists every file; choose "
            "another --out"
        )


def ledger_of(directory: str | Path) -> Path | None:
    """Return the ledger that a run was made with, None (the user's own) if it does not say."""
    try:
        return Path(RunDirectory(Path(directory)).settings()["ledger"])
    except InvalidData:
        return None


@contextlib.contextmanager
def opened(ledger: Ledger | str | Path | None, *, create: bool = True) -> Iterator[Ledger]:
    """Open a ledger by its path, the user's own if there is none; one that is open stays so."""
    if isinstance(ledger, Ledger):
        yield ledger
        return
    book = Ledger(Path(ledger) if ledger is not None else None, create=create)
    try:
        yield book
    finally:
        book.close()
