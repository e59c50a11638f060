"""One run: from what was asked for to a finished directory with its certificate."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from understudy import __version__
from understudy.card import About, card_of
from understudy.data.images import LabelledImages
from understudy.errors import Interrupted, InvalidSettings, LedgerError, StorageError
from understudy.files import canonical_json
from understudy.methods import load_method
from understudy.methods.choosing import AUTO, choose
from understudy.methods.method import Configured, Method, certified_settings, configure
from understudy.nets.released import Artefact, Classifier, Generator
from understudy.privacy import certificate as certificates
from understudy.privacy.briefing import Briefing
from understudy.privacy.certificate import Certificate
from understudy.privacy.curator import Curator, Pace
from understudy.privacy.ensemble import check_shards
from understudy.privacy.group import ALONE, Group
from understudy.privacy.ledger import Ledger
from understudy.privacy.mark import Mark
from understudy.privacy.plan import OF_ENSEMBLES, Accountant, Budget, Plan, PublicFacts
from understudy.privacy.secure import ciphers, secret_randomness
from understudy.privacy.vault import Vault, follow
from understudy.progress import Progress
from understudy.provenance import PublicInput, device_name, forget_peak_memory, peak_memory
from understudy.runs import CLASSIFIER_FILE, GENERATOR_FILE, SET_FILE, SHEET_FILE, RunDirectory
from understudy.synthetic import SyntheticSet
from understudy.training.engine import Engine

WITH_MEMBERS: dict[str, Any] = {"keeps_members": True, "seconds": 60.0}
"""The pace of a run whose checkpoints hold what an ensemble learned: these are large."""
GENERATOR_IS = "what drew the images; `understudy sample` draws more and reads no private data"
HOLDS_NO_IMAGES = (
    "{} holds a classifier and no images; `understudy evaluate` tests it, "
    "`understudy.load_classifier` reads it"
)
HOLDS_NO_CLASSIFIER = "{} holds images and no classifier; `understudy.load` reads them"
CERTIFICATE_IS = {
    certificates.FILE_NAME: "what is guaranteed, and how; `understudy verify` checks it"
}


class ReleasedFile(NamedTuple):
    """A file that a run releases."""

    content: bytes
    what: str
    """What it is, in words for the card."""


def released_files(made: Artefact) -> dict[str, ReleasedFile]:
    """Return the files that hold what a run has made."""
    if isinstance(made, Classifier):
        return {CLASSIFIER_FILE: ReleasedFile(made.to_bytes(), made.described)}
    files = {SET_FILE: ReleasedFile(made.to_bytes(), made.described)}
    if made.generator:
        files[GENERATOR_FILE] = ReleasedFile(made.generator.to_bytes(), GENERATOR_IS)
    sheet = ReleasedFile(made.contact_sheet(), "some of the images, one row per class")
    return files | {SHEET_FILE: sheet}


def files_and_card(about: About, made: Artefact) -> dict[str, bytes]:
    """Return all that is certified: the files that hold what was made, and their card."""
    released = released_files(made)
    said = {name: file.what for name, file in released.items()}
    card = card_of(about, made, said | CERTIFICATE_IS).encode()
    return {name: file.content for name, file in released.items()} | {"README.md": card}


@dataclass(frozen=True)
class Result:
    """A finished run."""

    released: Artefact
    certificate: Certificate
    directory: Path

    @property
    def synthetic(self) -> SyntheticSet:
        """Return the synthetic set, of a run that made one."""
        if isinstance(self.released, Classifier):
            raise InvalidSettings(HOLDS_NO_IMAGES.format(self.directory))
        return self.released

    @property
    def classifier(self) -> Classifier:
        """Return the classifier, of a run that trained one."""
        if not isinstance(self.released, Classifier):
            raise InvalidSettings(HOLDS_NO_CLASSIFIER.format(self.directory))
        return self.released

    @property
    def images(self) -> Tensor:
        """Return the synthetic images (n, c, h, w), 0 black to 1 white."""
        return self.synthetic.images

    @property
    def labels(self) -> Tensor:
        """Return their labels (n,)."""
        return self.synthetic.labels


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a run is asked to do: everything that must be the same when it is resumed."""

    method: str = AUTO
    epsilon: float = 10.0
    delta: float = 1e-5
    accountant: Accountant = "pld"
    preset: str = "auto"
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    snapshots: int = 0
    """How many states to keep on the way, for a curve of accuracy against epsilon."""
    keep_private_state: bool = False
    """Whether a run with an ensemble writes what it learned, so that it can be resumed."""
    secure_noise: bool = False
    """Whether batches and noise are drawn from a cipher."""
    allow_large_delta: bool = False

    def budget(self) -> Budget:
        """Return the guarantee asked for."""
        return Budget(epsilon=self.epsilon, delta=self.delta, accountant=self.accountant)

    def settled(self, facts: PublicFacts, progress: Progress) -> Request:
        """Return the same with a method, chosen by public facts if that was left open."""
        if self.method != AUTO:
            return self
        choice = choose(facts, self.epsilon, self.settings)
        progress.say(choice.why)
        return replace(self, method=choice.method)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self) | {"epsilon": self.epsilon if math.isfinite(self.epsilon) else "inf"}


def planned(asked: Request, facts: PublicFacts) -> tuple[Configured, Method, Plan]:
    """Complete the settings and plan the releases; refuses whatever cannot work.

    The method is settled: see `Request.settled`.
    """
    if asked.snapshots < 0:
        raise InvalidSettings(f"snapshots is {asked.snapshots}, expected 0 or more")
    if asked.secure_noise:
        ciphers()  # or says what to install
    asked.budget().check_delta(facts.units, allow_large=asked.allow_large_delta)
    method_class = load_method(asked.method)
    configured = configure(
        method_class, facts, asked.epsilon, preset=asked.preset, settings=asked.settings
    )
    method = method_class(configured.config, facts, seed=asked.seed)
    plan = method.plan()
    if any(line.kind in OF_ENSEMBLES for line in plan):
        check_shards(facts)
    return configured, method, plan


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run, from its settings to its finished directory."""

    vault: Vault
    ledger: Ledger
    directory: RunDirectory
    asked: Request
    origin: Mapping[str, Any]
    """Where the records came from and how they were read, for evaluation to read them again."""
    resume: bool
    group: Group = ALONE

    def run(self, progress: Progress, stop: StopRequest | None = None) -> Result:
        """Do it, whole or resumable; signals ask it to stop, or whoever holds `stop`."""
        asked = self.asked
        configured, method, plan = planned(asked, self.vault.facts)
        listening = contextlib.nullcontext(stop) if stop else stop_signals()
        with self.directory.locked(), self._cost_noted(), listening as should_stop:
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
                    pace=Pace(
                        should_stop=should_stop,
                        snapshots=asked.snapshots,
                        **(WITH_MEMBERS if asked.keep_private_state else {}),
                        keep=lambda made, so_far: self.directory.keep_snapshot(
                            made, so_far.to_bytes()
                        ),
                    ),
                    allow_large_delta=asked.allow_large_delta,
                    randomness=secret_randomness(self.vault.device, secure=asked.secure_noise),
                )
                self.directory.note_ledger(self.ledger.latest().to_json())
                progress.say(_describe(curator, configured))
                made = method.run(curator, progress)
                public = method.public_inputs
                return self._finish(run_id, configured, curator, made, public=public)
            except BaseException as error:
                if isinstance(error, Interrupted):
                    error.exit_code = should_stop.exit_code
                # Before the first block nothing was released: leave no charge and no directory.
                if not self.resume and self._is_given_back(run_id):
                    self.directory.discard()
                raise

    def _is_given_back(self, run_id: str) -> bool:
        with contextlib.suppress(LedgerError, StorageError):  # the first error is the one to show
            return self.ledger.run(run_id) is None or self.ledger.cancel(run_id)
        return False

    @contextlib.contextmanager
    def _cost_noted(self) -> Iterator[None]:
        started = time.perf_counter()
        forget_peak_memory()
        try:
            yield
        finally:
            seconds = round(time.perf_counter() - started, 1)
            cost = {"seconds": seconds, "peak_gib": peak_memory(), "device": device_name()}
            with contextlib.suppress(StorageError):  # a finished run must not fail over it
                self.directory.add_cost(cost)

    def _begin(self, configured: Configured, run_id: str) -> str:
        """Write the run's settings, or check that an unfinished run has the same."""
        settings = {
            "data_set": self.vault.registration.name,
            "unit": self.vault.facts.unit,
            "request": self.asked.to_json(),
            "config": asdict(configured.config),
        }
        where = {"ledger": str(self.ledger.path.resolve())} | dict(self.origin)
        fresh = settings | where | {"run": run_id, "understudy": __version__}
        if not (self.resume and self.directory.has_settings):  # killed before it began: begin
            self.directory.begin(fresh)
            return run_id
        stored = self.directory.settings()
        if stored.get("understudy") != __version__:
            raise InvalidSettings(
                f"the unfinished run was begun with understudy {stored.get('understudy')}, this is "
                f"{__version__}; finish it with that version, or start a new run"
            )
        if seen := self.directory.ledger_seen():
            self.ledger.confirm(Mark.from_json(*seen), seen[1])
        for key, value in settings.items():
            if stored.get(key) != value:
                raise InvalidSettings(
                    f"the unfinished run has other settings: {key} is {stored.get(key)}, now "
                    f"{value}; repeat the command that started it"
                )
        known = self.ledger.run(stored["run"])
        if known is not None and known["state"] == "cancelled":
            self.directory.begin(fresh)  # nothing was released, and the charge given back
            return run_id
        return str(stored["run"])

    def _finish(
        self,
        run_id: str,
        configured: Configured,
        curator: Curator,
        made: Artefact,
        *,
        public: Sequence[PublicInput],
    ) -> Result:
        asked, registration, budget = self.asked, self.vault.registration, self.asked.budget()
        about = About(
            name=registration.name,
            method=asked.method,
            facts=curator.facts,
            epsilon=curator.calibration.epsilon if curator.has_guarantee else None,
            delta=budget.delta,
        )
        files = files_and_card(about, made)
        certificate = certificates.issue(
            curator,
            registration=registration,
            budget=budget,
            ledger=self.ledger,
            run_id=run_id,
            method={
                "name": asked.method,
                "settings": certified_settings(configured.config),
                "preset": configured.preset,
                "preset_tuned_on": configured.tuned_on,
                "seed": asked.seed,
                "public_inputs": [one.to_json() for one in public],
                "understudy": __version__,
            },
            files=files,
            allow_large_delta=asked.allow_large_delta,
        )
        files[certificates.FILE_NAME] = certificate.to_bytes()
        self.ledger.finish(run_id, certificate.content["seal"])
        self.directory.note_ledger(self.ledger.latest().to_json())
        self.directory.finish(files)
        result = Result(made, certificate, self.directory.path)
        tell_others(self.group, result)
        return result


def tell_others(group: Group, result: Result) -> None:
    """Tell the other processes how the run came out."""
    files = {name: file.content for name, file in released_files(result.released).items()}
    told = {
        "directory": str(result.directory),
        "certificate": result.certificate.content,
        "files": list(files),
    }
    group.bytes_from_leader(canonical_json(told))
    for content in files.values():
        group.bytes_from_leader(content)


def assist(asked: Request, data: LabelledImages, *, engine: Engine, group: Group) -> Result:
    """Take part in a run that another process leads, with this process's share of the units."""
    first = group.bytes_from_leader(b"")
    if not Briefing.is_one(first):  # the run was finished already
        return _told(first, group)
    briefing = Briefing.from_bytes(first)
    asked = asked.settled(briefing.facts, Progress())
    _, method, plan = planned(asked, briefing.facts)
    with stop_signals():  # whether to stop is up to the leader
        method.run(follow(briefing, data, plan, engine=engine, group=group), Progress())
        # Rounding may have led this process elsewhere: the result is the leader's.
        return _told(group.bytes_from_leader(b""), group)


def _told(message: bytes, group: Group) -> Result:
    told = json.loads(message)
    files = {name: group.bytes_from_leader(b"") for name in told["files"]}
    return Result(_read(files), Certificate(told["certificate"]), Path(told["directory"]))


def _read(files: Mapping[str, bytes]) -> Artefact:
    """Read what `released_files` returned."""
    if CLASSIFIER_FILE in files:
        return Classifier.from_bytes(files[CLASSIFIER_FILE])
    synthetic = SyntheticSet.from_bytes(files[SET_FILE])
    if GENERATOR_FILE in files:
        synthetic = replace(synthetic, generator=Generator.from_bytes(files[GENERATOR_FILE]))
    return synthetic


def _describe(curator: Curator, configured: Configured) -> str:
    calibration, plan = curator.calibration, curator.plan
    noise = f"noise multiplier {calibration.noise_multiplier:.4g}"
    resuming = f"; resuming after {curator.released}" if curator.released else ""
    return (
        f"preset {configured.preset}; {plan.total} releases planned, {noise}, "
        f"epsilon {calibration.epsilon:.4g} reserved{resuming}"
    )


class StopRequest:
    """Whether to stop: a signal asked to, or time is up. A second signal stops at once."""

    signal = 0
    deadline = math.inf
    """By `time.monotonic`."""
    _at_once = False

    def handle(self, number: int, _: Any) -> None:
        """Take a signal."""
        if self.signal or self._at_once:
            raise KeyboardInterrupt
        self.signal = number

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Meanwhile let the first signal stop at once, too: there is nothing to lose."""
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    @property
    def exit_code(self) -> int:
        """The exit code of a process that was stopped like this."""
        return 128 + self.signal if self.signal else Interrupted.exit_code

    def interrupted(self, message: str) -> Interrupted:
        """Return the error that says so."""
        error = Interrupted(message)
        error.exit_code = self.exit_code
        return error

    def __call__(self) -> bool:
        """Say whether to stop."""
        return bool(self.signal) or time.monotonic() > self.deadline


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT or SIGTERM into a request to stop at the next committed block."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {n: signal.signal(n, stop.handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
