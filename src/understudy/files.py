"""Durable files: a name holds the whole new content or the whole old one, never a part.

This is the only place that writes outputs. A write goes to a temporary name in the same directory,
is synced, renamed, and the directory is synced, so that it survives a crash at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from understudy.errors import StorageError

TEMPORARY_PREFIX = ".tmp-"
REMEDIES = {
    errno.ENOSPC: "free some space on that disk, then run the same command again",
    errno.EDQUOT: "free some of your quota, then run the same command again",
    errno.EFBIG: "raise the limit on the size of files, then run the same command again",
    errno.EACCES: "choose a directory that you may write to",
    errno.EPERM: "choose a directory that you may write to",
    errno.EROFS: "choose a directory on a file system that can be written",
    errno.ENOTDIR: "choose another path: a parent of it is a file",
    errno.EIO: "check the disk, then run the same command again",
}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an operating system error on `path` into one line that says what to do."""
    try:
        yield
    except OSError as error:
        raise error_on(path, error) from error


def error_on(path: str | Path, error: OSError) -> StorageError:
    """Say what failed on `path`, and what to do."""
    remedy = REMEDIES.get(error.errno or 0, "check the path and the disk")
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(f"cannot write {path}: {reason.lower()}; {remedy}")


def sync_directory(directory: Path) -> None:
    """Make the entries of `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write `content` to `path`, all or nothing, durably."""
    write_chunks(path, [content], mode=mode)


def write_chunks(path: Path, chunks: Iterable[bytes], *, mode: int = 0o644) -> None:
    """Write what `chunks` yields to `path`, all or nothing, durably."""
    with replacing(path, mode=mode) as file:
        file.writelines(chunks)


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` at the end, durably, or vanishes on an error."""
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{path.name}")
    with storage_errors(path), _claim(temporary, mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            if _is_called(file, temporary):
                temporary.unlink()
            raise


def _claim(temporary: Path, mode: int) -> BinaryIO:
    """Open `temporary`, new and locked; one that a killed process has left is removed, unread."""
    while True:
        try:
            file = open(  # noqa: SIM115 - the caller closes it
                temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode)
            )
        except FileExistsError:
            if temporary.is_symlink():  # which would lead the content elsewhere
                temporary.unlink()
                continue
            with contextlib.suppress(FileNotFoundError), temporary.open("r+b") as leftover:
                fcntl.flock(leftover, fcntl.LOCK_EX)  # waits for whoever is still writing it
                if _is_called(leftover, temporary):
                    temporary.unlink()
            continue
        fcntl.flock(file, fcntl.LOCK_EX)
        if _is_called(file, temporary):
            return file
        file.close()  # taken for a leftover before it was locked


def _is_called(file: BinaryIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    return False


def write_json(path: Path, content: Any, *, mode: int = 0o644) -> None:
    """Write `content` as canonical JSON."""
    write_file(path, canonical_json(content), mode=mode)


def canonical_json(content: Any) -> bytes:
    """Serialise to the one byte string that stands for `content`: sorted keys, no NaN."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode()


def parse_json(content: bytes | str) -> Any:
    """Read JSON; ValueError for whatever is none, or is nested too deeply to be read."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_whole(path: Path, *, most: int | None = None) -> bytes:
    """Read a file; OSError for one of more bytes, or a pipe, which would be waited on for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return path.read_bytes()


def remove_temporaries(directory: Path) -> None:
    """Delete, unread, what writes cut short have left in `directory`."""
    with storage_errors(directory):
        for leftover in directory.glob(f"{TEMPORARY_PREFIX}*"):
            leftover.unlink()


def make_directory(path: Path, *, mode: int = 0o755) -> None:
    """Create `path`, and the parents it lacks, with `mode`."""
    with storage_errors(path):
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            missing.mkdir(mode=mode, exist_ok=True)
            missing.chmod(mode)
            sync_directory(missing.parent)
        path.chmod(mode)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def home() -> Path:
    """Return the user's data directory of Understudy (`UNDERSTUDY_HOME` moves it)."""
    if explicit := os.environ.get("UNDERSTUDY_HOME"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "understudy"
