"""The library's verbs: register, synthesize, evaluate, verify. The command line calls these."""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from understudy import __version__
from understudy.card import data_card
from understudy.data.images import LabelledImages
from understudy.data.sources import read_source
from understudy.errors import InvalidData, InvalidSettings, OutputExists
from understudy.evaluation.downstream import (
    DownstreamAccuracy,
    Protocol,
    downstream_accuracy,
)
from understudy.methods import load_method
from understudy.methods.method import Configured, configure
from understudy.privacy import certificate as certificates
from understudy.privacy import registration as registrations
from understudy.privacy.certificate import Certificate, Verification
from understudy.privacy.curator import Curator, Pace
from understudy.privacy.disclosure import RealImages, disclose_hold_out, disclose_test_set
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Accountant, Budget, PublicFacts
from understudy.privacy.registration import Registration, RegistrationTerms
from understudy.privacy.vault import Vault
from understudy.progress import Progress
from understudy.runs import (
    SET_FILE,
    RunDirectory,
    free_directory,
    partial,
    unfinished_directory,
)
from understudy.synthetic import SyntheticSet

Data = str | Path | LabelledImages


@dataclass(frozen=True)
class Result:
    """A finished run."""

    synthetic: SyntheticSet
    certificate: Certificate
    directory: Path

    @property
    def images(self) -> Tensor:
        """Return the synthetic images (n, c, h, w), in [0, 1]."""
        return self.synthetic.images

    @property
    def labels(self) -> Tensor:
        """Return their labels (n,)."""
        return self.synthetic.labels


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run is asked to do: everything that must be the same when it is resumed."""

    method: str = "psg"
    epsilon: float = 10.0
    delta: float = 1e-5
    accountant: Accountant = "pld"
    preset: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    allow_large_delta: bool = False

    def budget(self) -> Budget:
        """Return the guarantee asked for."""
        return Budget(epsilon=self.epsilon, delta=self.delta, accountant=self.accountant)


def load_data(
    source: str | Path, *, unit: str = "record", classes: int | Sequence[str] | None = None
) -> LabelledImages:
    """Read a data set: the name of a built-in set, or a path.

    >>> load_data("digits").shape
    (1, 8, 8)
    """
    return read_source(source, unit=unit, classes=classes)


def register(
    data: Data, *, ledger: Ledger, terms: RegistrationTerms | None = None
) -> Registration:
    """Enter a data set into the ledger, or find it there."""
    images = data if isinstance(data, LabelledImages) else load_data(data)
    return registrations.register(ledger, images, terms or RegistrationTerms())


def synthesize(
    data: Data,
    *,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    resume: bool = False,
    terms: RegistrationTerms | None = None,
    progress: Progress | None = None,
    **request: Any,
) -> Result:
    """Make a synthetic stand-in for a private data set, and its certificate.

    Args:
        data: name of a built-in set, path, or `LabelledImages`.
        out: directory of the run; by default `runs/<data>-<method>-eps<epsilon>`, numbered when taken.
        ledger: path of the ledger; by default the user's.
        resume: go on with an unfinished run, asked for with the same arguments.
        terms: how to register a data set that the ledger does not know yet.
        progress: where to report.
        **request: fields of `Request`: `method`, `epsilon`, `delta`, `accountant`, `preset`,
            `settings` (of the method), `seed`, `allow_large_delta`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = synthesize(
    ...         "digits", method="psg", epsilon=10, settings={"rounds": 1, "outer": 1},
    ...         out=f"{folder}/run", ledger=f"{folder}/ledger.sqlite",
    ...     )
    >>> result.images.shape, result.labels.shape
    (torch.Size([100, 1, 8, 8]), torch.Size([100]))
    >>> result.certificate.epsilon <= 10
    True
    """
    asked = Request(**request)
    asked.budget()  # refuses a bad epsilon or delta before anything else happens
    load_method(asked.method)
    report = progress or Progress()
    records = data if isinstance(data, LabelledImages) else load_data(data)
    directory = RunDirectory(_choose_directory(out, records.name, asked, resume=resume))
    if resume and directory.is_finished:
        report.say(f"{directory.path} is finished already")
        return load_result(directory.path)
    with _opened(ledger) as book:
        is_new = registrations.find(book, records, name=terms.name if terms else None) is None \
            if not (terms and (terms.new_version_of or terms.unrelated)) else True  # fmt: skip
        registered = registrations.register(book, records, terms or RegistrationTerms())
        if is_new:
            facts = registered.facts
            report.say(
                f"registered '{registered.name}' in {book.path}: {facts.units} units "
                f"(each a {facts.unit}), {facts.classes} classes"
            )
        vault = Vault(records, registered)
        return _run(vault, book, directory, asked, report, source=records.source, resume=resume)


def _choose_directory(
    out: str | Path | None, data: str, asked: Request, *, resume: bool
) -> Path:
    wanted = Path(out) if out else Path("runs") / f"{data}-{asked.method}-eps{asked.epsilon:g}"
    if resume:
        return wanted if out and RunDirectory(wanted).is_finished else unfinished_directory(wanted)
    if out is None:
        return free_directory(wanted)
    if wanted.exists():
        raise OutputExists(f"{wanted} exists already; choose another --out, or remove it")
    if partial(wanted).exists():
        raise OutputExists(
            f"{partial(wanted)} holds an unfinished run; pass --resume to go on with it, or choose "
            "another --out (what it released stays charged)"
        )
    return wanted


def _run(
    vault: Vault,
    ledger: Ledger,
    directory: RunDirectory,
    asked: Request,
    progress: Progress,
    *,
    source: str | None,
    resume: bool,
) -> Result:
    method_class, budget = load_method(asked.method), asked.budget()
    budget.check_delta(vault.facts.units, allow_large=asked.allow_large_delta)
    configured = configure(
        method_class, vault.facts, asked.epsilon, preset=asked.preset, settings=asked.settings
    )
    method = method_class(configured.config, vault.facts, seed=asked.seed)
    plan = method.plan()
    settings = _settings(vault, asked, configured, source)
    with directory.locked(), _stop_signals() as should_stop:
        run_id = secrets.token_hex(8)
        try:
            run_id = _begin(directory, settings, run_id, resume=resume)
            curator = vault.open(
                plan,
                budget,
                ledger,
                workspace=directory.blocks,
                run_id=run_id,
                method=asked.method,
                pace=Pace(should_stop=should_stop),
                allow_large_delta=asked.allow_large_delta,
            )
            progress.say(_describe(curator, configured))
            synthetic = method.run(curator, progress)
            return _finish(vault, ledger, directory, asked, configured, run_id, curator, synthetic)
        except BaseException:
            # Before the first block nothing was released: leave neither a charge nor a directory.
            if not resume and (ledger.run(run_id) is None or ledger.cancel(run_id)):
                directory.discard()
            raise


def _settings(
    vault: Vault, asked: Request, configured: Configured, source: str | None
) -> dict[str, Any]:
    return {
        "understudy": __version__,
        "data_set": vault.registration.name,
        "source": source,
        "unit": vault.facts.unit,
        "request": asdict(asked)
        | {"epsilon": asked.epsilon if math.isfinite(asked.epsilon) else "inf"},
        "config": asdict(configured.config),
    }


def _begin(
    directory: RunDirectory, settings: dict[str, Any], run_id: str, *, resume: bool
) -> str:
    """Write the run's settings, or check that those of an unfinished run are the same."""
    if not resume:
        directory.begin(settings | {"run": run_id})
        return run_id
    stored = directory.settings()
    for key, value in settings.items():
        if stored.get(key) != value and key not in ("understudy", "source"):
            raise InvalidSettings(
                f"the unfinished run has other settings: {key} is {stored.get(key)}, now {value}; "
                "repeat the command that started it"
            )
    return str(stored["run"])


def _describe(curator: Curator, configured: Configured) -> str:
    calibration, plan = curator.calibration, curator.plan
    noise = f"noise multiplier {calibration.noise_multiplier:.4g}"
    return (
        f"preset {configured.preset}; {plan.total} releases planned, {noise}, "
        f"epsilon {calibration.epsilon:.4g} reserved"
        + (f"; resuming after {curator.released}" if curator.released else "")
    )


def _finish(
    vault: Vault,
    ledger: Ledger,
    directory: RunDirectory,
    asked: Request,
    configured: Configured,
    run_id: str,
    curator: Curator,
    synthetic: SyntheticSet,
) -> Result:
    files = {SET_FILE: synthetic.to_bytes(), "contact_sheet.png": synthetic.contact_sheet()}
    described = {
        "name": asked.method,
        "settings": asdict(configured.config),
        "preset": configured.preset,
        "preset_tuned_on": configured.tuned_on,
        "seed": asked.seed,
        "public_inputs": [],
        "understudy": __version__,
    }
    files["README.md"] = data_card(
        curator, vault.registration, asked.budget(), asked.method, synthetic
    ).encode()
    certificate = certificates.issue(
        curator,
        registration=vault.registration,
        budget=asked.budget(),
        ledger=ledger,
        run_id=run_id,
        method=described,
        files=files,
        allow_large_delta=asked.allow_large_delta,
    )
    files[certificates.FILE_NAME] = certificate.to_bytes()
    ledger.finish(run_id, certificate.content["seal"])
    directory.finish(files)
    return Result(synthetic, certificate, directory.path)


def load_result(directory: str | Path) -> Result:
    """Read a finished run; only its `release/` is needed."""
    release = _release(directory)
    synthetic = SyntheticSet.load(release / SET_FILE)
    return Result(synthetic, certificates._read(release / certificates.FILE_NAME), Path(directory))


def verify(
    directory: str | Path, *, ledger: Ledger | str | Path | bool = False
) -> Verification:
    """Check a run, or its `release/` alone, against its certificate.

    Args:
        directory: the run.
        ledger: the custodian's ledger (True for the default one) to check the certificate's origin too.
    """
    release = _release(directory)
    if ledger is False:
        return certificates.verify(release)
    with _opened(None if ledger is True else ledger) as book:
        return certificates.verify(release, ledger=book)


def evaluate(
    directory: str | Path,
    *,
    test: Data | None = None,
    ledger: Ledger | str | Path | None = None,
    protocol: Protocol | None = None,
    progress: Progress | None = None,
) -> DownstreamAccuracy:
    """Train networks on a run's set and test them on real records; the result goes to `private/`.

    Args:
        directory: the run.
        test: test set; by default the registered hold-out, or a built-in set's own test split.
        ledger: where the reading of real records is recorded.
        protocol: how to train.
        progress: where to report.
    """
    run = RunDirectory(Path(directory))
    result = load_result(directory)
    facts = PublicFacts.from_json(result.certificate.content["data_set"]["public_facts"])
    with _opened(ledger) as book:
        real = _real_images(run, test, book)
        accuracy = downstream_accuracy(
            result.synthetic,
            real,
            facts,
            protocol=protocol or Protocol(),
            progress=progress or Progress(),
        )
    if (run.path / "private").is_dir():
        run.write_metrics(accuracy.to_json())
    return accuracy


def _real_images(run: RunDirectory, test: Data | None, ledger: Ledger) -> RealImages:
    purpose = f"evaluate {run.path.name}"
    if test is not None:
        data = test if isinstance(test, LabelledImages) else load_data(test)
        return disclose_test_set(data.test or data, ledger, data_set=None, purpose=purpose)
    settings = run.settings()
    if not settings["source"]:
        raise InvalidData("the run was made from arrays in memory; pass a test set with --test")
    data = load_data(settings["source"], unit=settings["unit"])
    registered = registrations.find(ledger, data)
    if data.test is not None:
        data_set = registered.id if registered else None
        return disclose_test_set(data.test, ledger, data_set=data_set, purpose=purpose)
    if registered is None:
        raise InvalidData(f"{settings['source']} is not registered in {ledger.path}")
    return disclose_hold_out(Vault(data, registered), ledger, purpose=purpose)


def _release(directory: str | Path) -> Path:
    path = Path(directory)
    return path / "release" if (path / "release").is_dir() else path


@contextlib.contextmanager
def _opened(ledger: Ledger | str | Path | None) -> Iterator[Ledger]:
    if isinstance(ledger, Ledger):
        yield ledger
        return
    book = Ledger(Path(ledger) if ledger is not None else None)
    try:
        yield book
    finally:
        book.close()


@contextlib.contextmanager
def _stop_signals() -> Iterator[Any]:
    """Turn the first SIGINT or SIGTERM into a request to stop at the next committed block."""
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return

    def handle(number: int, _: Any) -> None:
        if requested.is_set():
            raise KeyboardInterrupt
        requested.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requested.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
