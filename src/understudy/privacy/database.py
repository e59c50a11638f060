"""The ledger's file: SQLite, kept so that what is missing or changed shows.

SQLite notices a torn page and undoes a transaction that was cut short. Three things are added:

- **Sums.** A flipped bit in a value is no torn page. The file holds sums of keyed digests of all
  rows, carried forward by every transaction: a row that changed, came or went otherwise shows.
- **History.** Every transaction has a number and a head, the authentication code of the head before
  it, its number and the sums. A state of the ledger is named by both.
- **High-water mark.** Number and head of the last transaction stand in a file beside it, written
  right after the commit. The ledger may be ahead of it, never behind: one that is has been put back
  to an older copy, and is refused.

All of it stands beside the file itself, as SQLite's log does, whatever links lead there.

The key is in the same file: all this is against accidents, not against the custodian.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from understudy.errors import LedgerDamaged, LedgerError, StorageError
from understudy.files import REMEDIES, make_directory, sync_directory, write_json
from understudy.privacy.mark import NOTHING, Mark, mark_beside, mark_file
from understudy.privacy.schema import ADDED, FORMAT, SCHEMA, SUMMED

LOCK_SECONDS = 60.0
"""How long to wait for another process that writes to the ledger."""
SUM_BYTES = 16
SUMS = 1 << 8 * SUM_BYTES
RESTORE = "put back the latest copy with `understudy ledger restore COPY`"


def place_of(path: Path) -> Path:
    """Return where a file of SQLite really is: its log is there, not beside a link to it."""
    try:
        with contextlib.suppress(FileNotFoundError):
            path.stat()  # links that lead in a circle do not pass
        return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LedgerError(f"cannot open {path}: {reason}; mend it, or name another file") from error


def copy_database(source: sqlite3.Connection, place: Path) -> None:
    """Copy a file with SQLite's own means, as of one moment; the caller makes it durable."""
    with contextlib.closing(sqlite3.connect(place)) as target:
        target.execute("PRAGMA journal_mode = OFF")
        source.backup(target)


DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
"""Errors that a file as we write it cannot cause; the last: a table or column is not there."""


class _Sums:
    """What the rows that changed in a transaction do to the sums."""

    def __init__(self, key: bytes) -> None:
        self._key = hashlib.blake2b(b"rows", key=key, digest_size=32).digest()
        self._names = {table: name for name, tables in SUMMED.items() for table in tables}
        self.change = dict.fromkeys(SUMMED, 0)
        self.is_changed = False

    def forget(self) -> None:
        """Begin a transaction."""
        self.change, self.is_changed = dict.fromkeys(SUMMED, 0), False

    def note(self, sign: int, table: str, *row: Any) -> None:
        """Take in a row that came (1) or went (-1); the triggers call it."""
        self.change[self._names[table]] += sign * self.digest(table, row)
        self.is_changed = True

    def digest(self, table: str, row: Iterable[Any]) -> int:
        """Return the digest of a row."""
        code = hashlib.blake2b(table.encode(), key=self._key, digest_size=SUM_BYTES)
        for value in row:
            content = _to_bytes(value)
            code.update(len(content).to_bytes(8, "big") + content)
        return int.from_bytes(code.digest(), "big")


def _to_bytes(value: Any) -> bytes:
    """Return a value that SQLite holds as bytes that no other value has."""
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, str):
        return b"s" + value.encode()
    return b"f" + struct.pack(">d", value) if isinstance(value, float) else repr(value).encode()


class Database:
    """Open the file, whole and up to date, or refuse it.

    Args:
        path: the file, or a link to it.
        create: whether to make it when it is missing.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self.path = place_of(path)
        seen = mark_beside(self.path)  # before the ledger is read: it may only be ahead
        if not self.path.exists():
            self._refuse_anew(path, seen, create=create)
        self._connection = self._open()
        try:
            with self._errors():
                self._prepare(seen)
        except (LookupError, ValueError, TypeError) as error:
            self._connection.close()
            raise self.damage(f"its first table has {error!r}") from error
        except BaseException:
            self._connection.close()
            raise

    def _refuse_anew(self, given: Path, seen: Mark | None, *, create: bool) -> None:
        """Refuse to make a ledger that was here, may be out of reach, or should not be made."""
        if seen:
            raise LedgerError(
                f"the ledger {self.path} is gone, but {mark_file(self.path)} has seen it; {RESTORE}"
            )
        for link in (given, *given.parents):
            if link.is_symlink() and not link.exists():
                raise LedgerError(
                    f"the link {link} leads to no ledger, for {self.path} is not there; a new one "
                    "would not know what was spent: mount its disk or mend the link, or name "
                    "another with --ledger"
                )
        if not create:
            raise LedgerError(
                f"there is no ledger {self.path}; it is made when a set is registered; if yours is "
                "elsewhere, name it with --ledger or UNDERSTUDY_LEDGER"
            )

    def _open(self) -> sqlite3.Connection:
        remedy = "make it writable, or name another with --ledger"
        try:
            if not self.path.parent.exists():
                make_directory(self.path.parent, mode=0o700)
            if self.path.exists() and not self.path.stat().st_mode & 0o200:
                raise LedgerError(f"the ledger {self.path} is read-only; {remedy}")
            self._create_file()
            connection = sqlite3.connect(self.path, timeout=LOCK_SECONDS, isolation_level=None)
        except (OSError, StorageError, sqlite3.OperationalError) as error:
            reason = getattr(error, "strerror", None) or error
            if getattr(error, "errno", None) == errno.ENOSPC:
                remedy = REMEDIES[errno.ENOSPC]
            raise LedgerError(f"cannot open the ledger {self.path}: {reason}; {remedy}") from error
        connection.row_factory = sqlite3.Row
        return connection

    def _create_file(self) -> None:
        """Create the file for its owner alone.

        An existing one is not touched: to close it would drop the locks that SQLite has on it for
        other connections of this process, and a second process could discard what they wrote.
        """
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            sync_directory(self.path.parent)
        if not self.path.is_file():
            raise OSError(None, "it is no file")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn an error of SQLite into one line that says what to do."""
        try:
            yield
        except sqlite3.Error as error:
            number = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if number in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LedgerError(
                    f"another process has held the ledger {self.path} for {LOCK_SECONDS:.0f} "
                    "seconds; wait for it, or stop it, then run the same command again"
                ) from error
            if number in DAMAGE:
                raise self.damage(str(error)) from error
            raise LedgerError(
                f"the ledger {self.path} cannot be written ({error}); check its permissions and "
                "the disk, then run the same command again"
            ) from error

    def damage(self, found: str) -> LedgerDamaged:
        """Return the error that says what is wrong with the file, and what to do."""
        return LedgerDamaged(
            f"{self.path} is not a usable ledger ({found}); {RESTORE}, or name another ledger "
            "with --ledger",
            found,
        )

    # Opening

    def _prepare(self, seen: Mark | None) -> None:
        run = self._connection.execute
        self._use_wal()
        run("PRAGMA synchronous = FULL")
        run("PRAGMA foreign_keys = ON")
        if (found := run("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise self.damage(str(found))
        meta = self._meta()
        if meta.get("format") != str(FORMAT).encode():
            meta = self._bring_up_to_date(seen)
            self._testify()
        self._key = bytes(meta["key"])
        self._sums = _Sums(self._key)
        self._watch_rows()
        self.check_sum("entries")
        if seen:
            self.confirm(seen, mark_file(self.path), accepts_lost=True)

    def _use_wal(self) -> None:
        """Switch to write-ahead logging; a race for a new file answers «locked» without waiting."""
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def _meta(self) -> dict[str, bytes]:
        run = self._connection.execute
        if not run("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            return {}
        return {row["key"]: bytes(row["value"]) for row in run("SELECT * FROM meta")}

    def _bring_up_to_date(self, seen: Mark | None) -> dict[str, bytes]:
        """Make the tables of a new ledger, or those that one of an earlier format lacks."""
        with self._locked() as run:
            if not self._meta():
                if seen:
                    raise self.damage(f"it is empty, but {mark_file(self.path)} has seen more")
                for statement in SCHEMA.split(";"):
                    run(statement)
                run(
                    "INSERT INTO meta VALUES ('format', x'31'), ('key', ?)",
                    (secrets.token_bytes(32),),
                )
            known = int(self._meta()["format"])
            if known > FORMAT:
                raise LedgerError(
                    f"the ledger {self.path} has format {known}, expected {FORMAT}; use the "
                    "version of understudy that wrote it"
                )
            for number, added in ADDED.items():
                if known < number:
                    run(added)
            self._key = self._meta()["key"]
            self._sums = _Sums(self._key)
            meta = {name: self._sum_of_rows(name) for name in SUMMED}
            meta["format"] = str(FORMAT).encode()
            for name, value in meta.items():
                run("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))
            self._enter()
            return self._meta()

    def _watch_rows(self) -> None:
        """Let the sums know of every row that changes; for this connection, not in the file."""
        run = self._connection.execute
        self._connection.create_function("note", -1, self._sums.note)
        for table in (table for tables in SUMMED.values() for table in tables):
            columns = [row["name"] for row in run(f"PRAGMA table_info({table})")]
            old, new = (
                f"SELECT note({sign}, '{table}', {', '.join(f'{which}.{c}' for c in columns)});"
                for sign, which in ((-1, "OLD"), (1, "NEW"))
            )
            for event, noted in (("INSERT", new), ("DELETE", old), ("UPDATE", old + new)):
                run(
                    f"CREATE TEMP TRIGGER {table}_{event} AFTER {event} ON main.{table} "
                    f"BEGIN {noted} END"
                )

    # Writing

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Yield `execute` in one durable transaction that holds the write lock from its start."""
        with self._errors():
            self._sums.forget()
            with self._locked() as execute:
                yield execute
                if self._sums.is_changed:
                    self._carry_sums()
                    self._enter()
            if self._sums.is_changed:
                self._testify()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        try:
            yield run
            run("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                run("ROLLBACK")
            raise

    def _carry_sums(self) -> None:
        for name, change in self._sums.change.items():
            stored = int.from_bytes(self._meta()[name], "big")
            carried = ((stored + change) % SUMS).to_bytes(SUM_BYTES, "big")
            self._connection.execute("UPDATE meta SET value = ? WHERE key = ?", (carried, name))

    def _enter(self, *, lost: int = 0) -> None:
        """Give the state that is about to be committed its number and head."""
        before = self.latest()
        number = before.number + 1 + lost
        self._connection.execute(
            "INSERT INTO history VALUES (?, ?, ?)", (number, self._head(before, number), lost)
        )

    def enter_loss(self, count: int) -> None:
        """Note for good that `count` entries are missing."""
        with self._errors(), self._locked():
            self._enter(lost=count)

    def _head(self, before: Mark, number: int) -> bytes:
        sums = [self._meta()[name] for name in SUMMED]
        return self.mac(b"head", before.head.encode(), str(number).encode(), *sums)[:SUM_BYTES]

    def _testify(self) -> None:
        """Say beside the ledger how far it has come, after the commit.

        The lock is taken once more, so that of two processes none writes an older state.
        """
        with self._locked():
            write_json(mark_file(self.path), self.latest().to_json(), mode=0o600)

    # Reading

    def rows(self, statement: str, values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """Return what a query finds."""
        with self._errors():
            return self._connection.execute(statement, values).fetchall()

    def row(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Row | None:
        """Return the first row that a query finds."""
        return next(iter(self.rows(statement, values)), None)

    def latest(self) -> Mark:
        """Return how far the ledger has come."""
        row = self.row("SELECT * FROM history ORDER BY number DESC LIMIT 1")
        return Mark(row["number"], row["head"].hex()) if row else NOTHING

    def lost(self) -> int:
        """Return how many transactions are missing, because an older copy was put back."""
        row = self.row("SELECT coalesce(sum(lost), 0) AS lost FROM history")
        return int(row["lost"]) if row else 0

    def has_passed(self, seen: Mark) -> bool:
        """Say whether the ledger was once in this state."""
        row = self.row("SELECT head FROM history WHERE number = ?", (seen.number,))
        return row is not None and row["head"].hex() == seen.head

    def confirm(self, seen: Mark, where: Path, *, accepts_lost: bool = False) -> None:
        """Refuse to go on if the ledger was never in the state that `where` has seen."""
        if self.has_passed(seen):
            return
        if self.row(
            "SELECT 1 FROM history WHERE ? BETWEEN number - lost AND number - 1", (seen.number,)
        ):
            if accepts_lost:
                return
            raise LedgerError(
                f"{where} has seen entry {seen.number} of the ledger {self.path}, which was lost "
                "when an older copy was put back; what was spent then is not counted: start a new "
                "run"
            )
        last = self.latest().number
        found = (
            f"was put back to an older state: it ends at entry {last}, and {where} has seen "
            f"entry {seen.number}"
            if seen.number > last
            else f"is not the one that {where} has seen: they differ at entry {seen.number}"
        )
        raise LedgerError(
            f"the ledger {self.path} {found}; what was spent would be lost; {RESTORE}"
        )

    def check_sum(self, name: str) -> None:
        """Refuse the ledger if the rows of a sum are not those that transactions have left."""
        with self._errors(), self._reading():
            if not hmac.compare_digest(self._sum_of_rows(name), self._meta()[name]):
                raise self.damage(f"its {name} are not what was written")

    def check_history(self) -> None:
        """Refuse the ledger if a number is missing, or its last head is not that of its sums."""
        with self._errors(), self._reading():
            gaps = self.rows(
                "SELECT number FROM (SELECT number, lost, coalesce(lag(number) OVER"
                " (ORDER BY number), 0) AS before FROM history) WHERE number != before + 1 + lost"
            )
            if gaps:
                raise self.damage(f"entries before {gaps[0]['number']} are missing")
            *before, last = self.rows(
                "SELECT * FROM (SELECT * FROM history ORDER BY number DESC LIMIT 2) ORDER BY number"
            )
            first = Mark(before[0]["number"], before[0]["head"].hex()) if before else NOTHING
            if last["head"] != self._head(first, last["number"]):
                raise self.damage(f"entry {last['number']} does not follow from the one before")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Let several reads see one state."""
        self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.execute("ROLLBACK")

    def _sum_of_rows(self, name: str) -> bytes:
        total: int = sum(
            self._sums.digest(table, row)
            for table in SUMMED[name]
            for row in self._connection.execute(f"SELECT * FROM {table}")
        )
        return (total % SUMS).to_bytes(SUM_BYTES, "big")

    def mac(self, *parts: bytes | memoryview) -> bytes:
        """Return the authentication code of `parts` under the ledger's key."""
        code = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            code.update(len(part).to_bytes(8, "big"))
            code.update(part)
        return code.digest()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()
