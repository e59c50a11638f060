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
from understudy.errors import Interrupted, InvalidData, InvalidSettings, OutputExists
from understudy.evaluation.downstream import (
    DownstreamAccuracy,
    Protocol,
    downstream_accuracy,
)
from understudy.methods import load_method
from understudy.methods.method import Configured, Method, configure
from understudy.privacy import certificate as certificates
from understudy.privacy import registration as registrations
from understudy.privacy.certificate import Certificate, Verification
from understudy.privacy.curator import Curator, Pace
from understudy.privacy.disclosure import RealImages, disclose_hold_out, disclose_test_set
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Accountant, Budget, Plan, PublicFacts
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


def register(data: Data, *, ledger: Ledger, terms: RegistrationTerms | None = None) -> Registration:
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
        out: directory of the run; by default `runs/<data>-<method>-eps<epsilon>`, numbered.
        ledger: path of the ledger; by default the user's.
        resume: go on with an unfinished run, asked for with the same arguments.
        terms: how to register a data set that the ledger does not know yet.
        progress: where to report.
        **request: fields of `Request`: `method`, `epsilon`, `delta`, `accountant`, `preset`,
            `settings` (of the method), `seed`, `allow_large_delta`.

    A run so short that it teaches nothing, but shows every step:

    >>> import tempfile, understudy
    >>> folder = tempfile.mkdtemp()
    >>> result = understudy.synthesize(
    ...     "digits", method="psg", epsilon=10, accountant="renyi",
    ...     settings={"rounds": 1, "outer": 2}, out=f"{folder}/run", ledger=f"{folder}/ledger",
    ... )
    >>> result.images.shape, result.labels.shape
    (torch.Size([100, 1, 8, 8]), torch.Size([100]))
    >>> 9.999 <= result.certificate.epsilon <= 10
    True
    >>> understudy.verify(result.directory, ledger=True).files
    3
    >>> quick = Protocol(networks=2, epochs=2, width=4)
    >>> accuracy = understudy.evaluate(result.directory, protocol=quick)
    >>> accuracy.test_images, len(accuracy.accuracies)
    (359, 2)
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
        registered = _registered(book, records, terms or RegistrationTerms(), asked, report)
        job = _Job(
            vault=Vault(records, registered, book),
            ledger=book,
            directory=directory,
            asked=asked,
            source=records.source,
            resume=resume,
        )
        return job.run(report)


def _registered(
    ledger: Ledger,
    data: LabelledImages,
    terms: RegistrationTerms,
    asked: Request,
    progress: Progress,
) -> Registration:
    """Find the data set in the ledger, or register it, but only for a run that can be planned."""
    known = len(ledger.data_sets())
    _planned(asked, registrations.declared_facts(data, terms))
    registered = registrations.register(ledger, data, terms)
    if len(ledger.data_sets()) > known:
        facts = registered.facts
        progress.say(
            f"registered '{registered.name}' in {ledger.path}: {facts.units} units "
            f"(each a {facts.unit}), {facts.classes} classes"
        )
    return registered


def _planned(asked: Request, facts: PublicFacts) -> tuple[Configured, Method, Plan]:
    """Complete the settings and plan the releases; refuses whatever cannot work."""
    asked.budget().check_delta(facts.units, allow_large=asked.allow_large_delta)
    method_class = load_method(asked.method)
    configured = configure(
        method_class, facts, asked.epsilon, preset=asked.preset, settings=asked.settings
    )
    method = method_class(configured.config, facts, seed=asked.seed)
    return configured, method, method.plan()


def _choose_directory(out: str | Path | None, data: str, asked: Request, *, resume: bool) -> Path:
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


@dataclass(frozen=True, kw_only=True)
class _Job:
    """One run, from its settings to its finished directory."""

    vault: Vault
    ledger: Ledger
    directory: RunDirectory
    asked: Request
    source: str | None
    resume: bool

    def run(self, progress: Progress) -> Result:
        asked = self.asked
        configured, method, plan = _planned(asked, self.vault.facts)
        with self.directory.locked(), _stop_signals() as should_stop:
            run_id = secrets.token_hex(8)
            try:
                run_id = self._begin(configured, run_id)
                curator = self.vault.open(
                    plan,
                    asked.budget(),
                    self.ledger,
                    workspace=self.directory.blocks,
                    run_id=run_id,
                    method=asked.method,
                    pace=Pace(should_stop=should_stop),
                    allow_large_delta=asked.allow_large_delta,
                )
                progress.say(_describe(curator, configured))
                synthetic = method.run(curator, progress)
                return self._finish(run_id, configured, curator, synthetic)
            except BaseException as error:
                if isinstance(error, Interrupted):
                    error.exit_code = 128 + should_stop.signal
                # Before the first block nothing was released: leave no charge and no directory.
                if not self.resume and (
                    self.ledger.run(run_id) is None or self.ledger.cancel(run_id)
                ):
                    self.directory.discard()
                raise

    def _begin(self, configured: Configured, run_id: str) -> str:
        """Write the run's settings, or check that an unfinished run has the same."""
        epsilon = self.asked.epsilon
        settings = {
            "data_set": self.vault.registration.name,
            "unit": self.vault.facts.unit,
            "request": asdict(self.asked)
            | {"epsilon": epsilon if math.isfinite(epsilon) else "inf"},
            "config": asdict(configured.config),
        }
        if not (self.resume and self.directory.has_settings):  # killed before it began: begin
            where = {"source": self.source, "ledger": str(self.ledger.path.resolve())}
            self.directory.begin(settings | where | {"run": run_id, "understudy": __version__})
            return run_id
        stored = self.directory.settings()
        for key, value in settings.items():
            if stored.get(key) != value:
                raise InvalidSettings(
                    f"the unfinished run has other settings: {key} is {stored.get(key)}, now "
                    f"{value}; repeat the command that started it"
                )
        return str(stored["run"])

    def _finish(
        self, run_id: str, configured: Configured, curator: Curator, synthetic: SyntheticSet
    ) -> Result:
        asked, registration, budget = self.asked, self.vault.registration, self.asked.budget()
        card = data_card(curator, registration, budget, asked.method, synthetic)
        files = {
            SET_FILE: synthetic.to_bytes(),
            "contact_sheet.png": synthetic.contact_sheet(),
            "README.md": card.encode(),
        }
        certificate = certificates.issue(
            curator,
            registration=registration,
            budget=budget,
            ledger=self.ledger,
            run_id=run_id,
            method={
                "name": asked.method,
                "settings": asdict(configured.config),
                "preset": configured.preset,
                "preset_tuned_on": configured.tuned_on,
                "seed": asked.seed,
                "public_inputs": [],
                "understudy": __version__,
            },
            files=files,
            allow_large_delta=asked.allow_large_delta,
        )
        files[certificates.FILE_NAME] = certificate.to_bytes()
        self.ledger.finish(run_id, certificate.content["seal"])
        self.directory.finish(files)
        return Result(synthetic, certificate, self.directory.path)


def _describe(curator: Curator, configured: Configured) -> str:
    calibration, plan = curator.calibration, curator.plan
    noise = f"noise multiplier {calibration.noise_multiplier:.4g}"
    resuming = f"; resuming after {curator.released}" if curator.released else ""
    return (
        f"preset {configured.preset}; {plan.total} releases planned, {noise}, "
        f"epsilon {calibration.epsilon:.4g} reserved{resuming}"
    )


def load_result(directory: str | Path) -> Result:
    """Read a finished run; only its `release/` is needed."""
    release = _release(directory)
    synthetic = SyntheticSet.load(release / SET_FILE)
    return Result(synthetic, certificates.read(release / certificates.FILE_NAME), Path(directory))


def verify(directory: str | Path, *, ledger: Ledger | str | Path | bool = False) -> Verification:
    """Check a run, or its `release/` alone, against its certificate.

    Args:
        directory: the run.
        ledger: the custodian's ledger, to check the certificate's origin too; True for the one that
            the run was made with.
    """
    release = _release(directory)
    if ledger is False:
        return certificates.verify(release)
    with _opened(_ledger_of(directory) if ledger is True else ledger, create=False) as book:
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
        ledger: where the reading of real records is recorded; by default the run's.
        protocol: how to train.
        progress: where to report.
    """
    run = RunDirectory(Path(directory))
    result = load_result(directory)
    facts = PublicFacts.from_json(result.certificate.content["data_set"]["public_facts"])
    with _opened(ledger or _ledger_of(directory), create=False) as book:
        real = _real_images(run, test, facts, book)
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


def _real_images(
    run: RunDirectory, test: Data | None, facts: PublicFacts, ledger: Ledger
) -> RealImages:
    purpose = f"evaluate {run.path.name}"
    if test is not None:
        given = test if isinstance(test, LabelledImages) else load_data(test)
        known = registrations.find_exactly(ledger, given)
        number = known.id if known else None
        return disclose_test_set(given.test or given, ledger, data_set=number, purpose=purpose)
    settings = run.settings()
    if not settings["source"]:
        raise InvalidData("the run was made from arrays in memory; pass a test set with --test")
    data = load_data(settings["source"], unit=settings["unit"], classes=facts.class_names)
    registered = registrations.find(ledger, data, name=settings["data_set"])
    if data.test is not None:
        data_set = registered.id if registered else None
        return disclose_test_set(data.test, ledger, data_set=data_set, purpose=purpose)
    if registered is None:
        raise InvalidData(f"{settings['source']} is not registered in {ledger.path}")
    return disclose_hold_out(Vault(data, registered, ledger), ledger, purpose=purpose)


def _release(directory: str | Path) -> Path:
    path = Path(directory)
    return path / "release" if (path / "release").is_dir() else path


def _ledger_of(directory: str | Path) -> Path | None:
    """Return the ledger that a run was made with, None (the user's own) if it does not say."""
    try:
        return Path(RunDirectory(Path(directory)).settings()["ledger"])
    except InvalidData:
        return None


@contextlib.contextmanager
def _opened(ledger: Ledger | str | Path | None, *, create: bool = True) -> Iterator[Ledger]:
    if isinstance(ledger, Ledger):
        yield ledger
        return
    book = Ledger(Path(ledger) if ledger is not None else None, create=create)
    try:
        yield book
    finally:
        book.close()


class _StopRequest:
    """Whether a signal asked to stop. A second one stops at once, without a commit."""

    signal = 0

    def handle(self, number: int, _: Any) -> None:
        if self.signal:
            raise KeyboardInterrupt
        self.signal = number

    def __call__(self) -> bool:
        return bool(self.signal)


@contextlib.contextmanager
def _stop_signals() -> Iterator[_StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request to stop at the next committed block."""
    stop = _StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {n: signal.signal(n, stop.handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
