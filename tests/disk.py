"""A disk that loses what was not synced, and one that is full: fakes for tests of faults."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from understudy.privacy.database import Database

Entries = dict[str, int]
"""Names in a directory, with the inodes that they stand for."""


@dataclass(frozen=True)
class Moment:
    """What a loss of power would leave."""

    contents: dict[int, bytes]
    """Of files, as they were synced."""
    synced: dict[int, Entries]
    """Of directories, as they were synced."""
    all: dict[int, Entries]
    """Of directories, as they were: a file system may keep names longer than contents."""

    def lay_out(self, root: int, place: Path, *, names: str) -> None:
        """Write it to `place`."""
        entries: dict[int, Entries] = getattr(self, names)
        place.mkdir()
        for name, inode in entries.get(root, {}).items():
            if inode in self.all:
                self.lay_out(inode, place / name, names=names)
            elif not name.endswith("-shm"):
                (place / name).write_bytes(self.contents.get(inode, b""))


@dataclass
class ForgetfulDisk:
    """Watch a directory, and note at every sync what would be left of it."""

    root: Path
    moments: list[Moment] = field(default_factory=list)
    _contents: dict[int, bytes] = field(default_factory=dict)
    _synced: dict[int, Entries] = field(default_factory=dict)
    _open: list[int] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        fsync, testify = os.fsync, Database._testify

        def noted_sync(descriptor: int) -> None:
            fsync(descriptor)
            self._open.append(os.dup(descriptor))  # no other file gets its inode meanwhile
            self._sync(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

        def noted_commit(ledger: Database) -> None:
            """SQLite has synced its files and their directory when a commit returns."""
            for path in (ledger.path, ledger.path.with_name(f"{ledger.path.name}-wal")):
                self._contents[path.stat().st_ino] = path.read_bytes()
                entries = self._synced.get(path.parent.stat().st_ino, {})
                self._synced[path.parent.stat().st_ino] = entries | {path.name: path.stat().st_ino}
            self._note()
            testify(ledger)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", noted_sync)
            patch.setattr(Database, "_testify", noted_commit)
            yield
        for descriptor in self._open:
            os.close(descriptor)

    def lay_out(self, moment: Moment, place: Path, *, names: str) -> None:
        moment.lay_out(self.root.stat().st_ino, place, names=names)

    def _sync(self, path: Path) -> None:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            self._synced[found.st_ino] = _entries(path)
        else:
            self._contents[found.st_ino] = path.read_bytes()
        self._note()

    def _note(self) -> None:
        folders = [self.root, *(path for path in self.root.rglob("*") if path.is_dir())]
        everything = {path.stat().st_ino: _entries(path) for path in folders}
        self.moments.append(Moment(dict(self._contents), dict(self._synced), everything))


def _entries(folder: Path) -> Entries:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}


@contextmanager
def failing(after: int, number: int = errno.ENOSPC) -> Iterator[Callable[[], int]]:
    """Let every sync and every new directory fail after the first few; yield their count so far."""
    count = 0

    def or_fail(call):
        def counted(*args, **kwargs):
            nonlocal count
            count += 1
            if count > after:
                raise OSError(number, os.strerror(number))
            return call(*args, **kwargs)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", or_fail(os.fsync))
        patch.setattr(os, "mkdir", or_fail(os.mkdir))
        yield lambda: count
