"""Durable files: a name holds the whole new content or the whole old one, never a part.

This is the only place that writes outputs. A write goes to a temporary name in the same directory,
is synced, renamed, and the directory is synced, so that it survives a crash at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from understudy.errors import StorageError

TEMPORARY_PREFIX = ".tmp-"


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn an operating system error on `path` into one line that says what to do."""
    try:
        yield
    except OSError as error:
        remedies = {
            errno.ENOSPC: "free some space on that disk, then run the same command again",
            errno.EDQUOT: "free some of your quota, then run the same command again",
            errno.EACCES: "choose a directory that you may write to",
            errno.EPERM: "choose a directory that you may write to",
            errno.EROFS: "choose a directory on a file system that can be written",
            errno.ENOTDIR: "choose another path: a parent of it is a file",
        }
        remedy = remedies.get(error.errno or 0, "check the path and the disk")
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise StorageError(f"cannot write {path}: {reason.lower()}; {remedy}") from error


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
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{path.name}")
    with storage_errors(path):
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def write_json(path: Path, content: Any, *, mode: int = 0o644) -> None:
    """Write `content` as canonical JSON."""
    write_file(path, canonical_json(content), mode=mode)


def canonical_json(content: Any) -> bytes:
    """Serialise to the one byte string that stands for `content`: sorted keys, no NaN."""
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False)
    return (text + "\n").encode()


def remove_temporaries(directory: Path) -> None:
    """Delete, unread, what writes cut short have left in `directory`."""
    for leftover in directory.glob(f"{TEMPORARY_PREFIX}*"):
        leftover.unlink()


def make_directory(path: Path, *, mode: int = 0o755) -> None:
    """Create `path`, and the parents it lacks, with `mode`."""
    with storage_errors(path):
        for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
            missing.mkdir(mode=mode, exist_ok=True)
            missing.chmod(mode)
        path.chmod(mode)
        sync_directory(path.parent)


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
