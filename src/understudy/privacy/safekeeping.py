"""Keeping a ledger safe: check it, copy it, put a copy back.

A ledger that forgets is a budget that is spent twice. So a copy is taken whole or not at all, and
one that is older than what it replaces is put back only if the custodian says so; then the ledger
remembers for good that entries are missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy.errors import LedgerDamaged, LedgerError, OutputExists
from understudy.files import replacing, sync_directory, write_json
from understudy.privacy.accounting import RenyiFilter
from understudy.privacy.database import copy_database, place_of
from understudy.privacy.ledger import Ledger
from understudy.privacy.mark import Mark, mark_beside, mark_file
from understudy.privacy.plan import Plan
from understudy.privacy.schema import SUMMED
from understudy.runs import LEDGER_FILE, SETTINGS_FILE

BESIDE = ("-wal", "-shm", "-journal")
"""Endings of the files that SQLite may keep beside its own."""
ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Checked:
    """What a check found in order."""

    entries: int
    """Transactions until now."""
    data_sets: int
    runs: int
    lost: int
    """Transactions that are missing, because an older copy was put back."""
    confirmed: int
    """Run directories that were compared with it."""


def check(ledger: Ledger, runs: Sequence[Path] = ()) -> Checked:
    """Check every page, sum and rule of a ledger, and that it knows what runs have seen of it.

    Args:
        ledger: opening it has compared it with the mark beside it.
        runs: run directories, or folders of them; those of other ledgers are left out.

    Raises:
        LedgerError: something is wrong; the first that was found.
    """
    if damaged := [row[0] for row in ledger.rows("PRAGMA integrity_check(1)") if row[0] != "ok"]:
        raise ledger.damage(str(damaged[0]))
    if ledger.rows("PRAGMA foreign_key_check"):
        raise ledger.damage("an entry belongs to a run or data set that is not there")
    for name in SUMMED:
        ledger.check_sum(name)
    ledger.check_history()
    rows = ledger.rows("SELECT * FROM runs")
    for row in rows:
        _check_run(ledger, row)
    data_sets = ledger.data_sets()
    for data_set in data_sets:
        _check_budget(ledger, data_set)
    seen = [place for folder in runs for place in _seen_in(folder, ledger.path)]
    for where in seen:
        ledger.confirm(Mark.from_json(json.loads(where.read_bytes()), where), where)
    return Checked(ledger.latest().number, len(data_sets), len(rows), ledger.lost(), len(seen))


def _check_run(ledger: Ledger, run: sqlite3.Row) -> None:
    """Blocks follow one another, only the last may be open, and none released too much."""
    blocks, name = ledger.blocks(run["id"]), f"run {run['id']}"
    if [block.number for block in blocks] != list(range(len(blocks))):
        raise ledger.damage(f"a block of {name} is missing")
    if any(block.state != "done" for block in blocks[:-1]):
        raise ledger.damage(f"{name} went on from a block that was never committed")
    released: Counter[str] = Counter()
    for block in blocks:
        released.update(block.releases)
    planned = {line.name: line.count for line in Plan.from_json(json.loads(run["plan"]))}
    rounds = ledger.rounds_answered(run["id"])
    if any(count > planned.get(name, 0) for name, count in released.items()) or (
        rounds > sum(planned.values())
    ):
        raise ledger.damage(f"{name} released more than was planned")
    if run["state"] == "cancelled" and (blocks or rounds):
        raise ledger.damage(f"{name} released something, and its charge was given back")
    if run["state"] == "finished" and not (
        run["certificate"] and blocks[-1:] and all(block.state == "done" for block in blocks)
    ):
        raise ledger.damage(f"{name} is finished without a certificate or with an open block")


def _check_budget(ledger: Ledger, data_set: sqlite3.Row) -> None:
    limit = data_set["lifetime_epsilon"]
    charged = ledger.charged_runs(data_set["budget"])
    if limit is None or data_set["is_public_benchmark"] or not charged:
        return
    bound = RenyiFilter.for_budget(limit, charged[0]["delta"]).bound
    if any(run["divergence"] is None for run in charged) or (
        sum(run["divergence"] for run in charged) > bound * ROUNDING
    ):
        raise ledger.damage(f"more is charged to '{data_set['name']}' than its lifetime allows")


def _seen_in(folder: Path, ledger: Path) -> Iterator[Path]:
    """Find what runs have seen of a ledger, in one run or a folder of runs."""
    for seen in sorted(folder.rglob(f"private/{LEDGER_FILE}")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            settings = json.loads((seen.parent / SETTINGS_FILE).read_bytes())
            if Path(settings["ledger"]) == ledger:
                yield seen


def backup(ledger: Ledger, to: Path) -> Mark:
    """Copy a ledger to `to`, all or nothing, while others may write to it; an older copy goes.

    A link stays a link, and what it leads to is replaced.

    Returns:
        How far the copy goes.
    """
    to = place_of(to)
    if to == ledger.path:
        raise OutputExists(f"{to} is the ledger itself; choose another name")
    if to.exists() and not _is_copy_of(ledger, to):
        raise OutputExists(f"{to} is no earlier copy of {ledger.path}; choose another name")
    with replacing(to, mode=0o600) as file, _copied(ledger.path, Path(file.name)) as copy:
        return copy.latest()


@contextlib.contextmanager
def _copied(source: Path, place: Path) -> Iterator[Ledger]:
    """Copy a ledger to `place`, check the copy, and let it be one file in the end."""
    beside = [place.with_name(place.name + ending) for ending in BESIDE] + [mark_file(place)]
    try:
        _remove(beside)  # of an earlier attempt, not to be taken for parts of this copy
        with _reader(source) as connection:
            copy_database(connection, place)
        with contextlib.closing(Ledger(place)) as copy:
            check(copy)
            yield copy
    except (LedgerDamaged, sqlite3.Error) as error:
        found = error.found if isinstance(error, LedgerDamaged) else str(error)
        raise LedgerError(
            f"{source} is not a usable ledger ({found}); take another copy of it"
        ) from error
    finally:
        _remove(beside)


def _remove(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _is_copy_of(ledger: Ledger, path: Path) -> bool:
    latest = _latest(path)
    return latest is not None and ledger.has_passed(latest)


def _latest(path: Path) -> Mark | None:
    """Return how far a file goes, None if it cannot be read as a ledger."""
    with contextlib.suppress(sqlite3.Error, TypeError), _reader(path) as found:
        number, head = found.execute(
            "SELECT number, head FROM history ORDER BY number DESC LIMIT 1"
        ).fetchone()
        return Mark(number, head.hex())
    return None


@dataclass(frozen=True)
class Restored:
    """What a restoration did."""

    latest: Mark
    lost: int
    """Entries that the ledger had and the copy has not, as far as is known."""
    is_compared: bool
    """Whether anything was there to compare the copy with."""
    former: Path | None
    """Where the file is that was replaced."""


def restore(copy: Path, to: Path, *, accept_loss: bool = False) -> Restored:
    """Put a copy in the place of a ledger that is damaged, lost, or older.

    Args:
        copy: what `backup` wrote, or a copy of the file.
        to: the ledger, or a link to it, which stays one.
        accept_loss: put it back even if it lacks entries; what was spent in them is not counted any
            more, and the ledger says so from then on.

    Raises:
        LedgerError: the copy lacks entries, is damaged, or the ledger is in use.
    """
    if not copy.is_file():
        raise LedgerError(f"there is no copy {copy}; name a file that `ledger backup` wrote")
    to = place_of(to)
    if copy.resolve() == to:
        raise LedgerError(f"{copy} is the ledger itself; name a copy of it")
    seen = _known(to)
    with _held(to), replacing(to, mode=0o600) as file:
        with _copied(copy, Path(file.name)) as book:
            lost = _lost(book, seen, copy, accept_loss=accept_loss)
            latest = book.latest()
        former = _move_aside(to)
    write_json(mark_file(to), latest.to_json(), mode=0o600)
    return Restored(latest, lost, seen is not None, former)


def _lost(book: Ledger, seen: Mark | None, copy: Path, *, accept_loss: bool) -> int:
    """Return how many entries a copy lacks; refuses it unless that is accepted."""
    if seen is None or book.has_passed(seen):
        return 0
    last = book.latest().number
    if not accept_loss:
        raise LedgerError(
            f"{copy} ends at entry {last} and lacks what the ledger knew at entry {seen.number}; "
            "charges would be forgotten: find a newer copy, or pass --accept-loss, which the "
            "ledger will remember"
        )
    lost = max(1, seen.number - last)
    book.enter_loss(lost)
    return lost


def _known(path: Path) -> Mark | None:
    """Return how far the ledger at `path` had come, as far as it or its mark can tell."""
    seen = mark_beside(path)
    found = _latest(path) if path.exists() else None
    return max((one for one in (seen, found) if one), key=lambda one: one.number, default=None)


@contextlib.contextmanager
def _reader(path: Path) -> Iterator[sqlite3.Connection]:
    """Read a file of SQLite as it is, without a trace unless it is in use."""
    path = place_of(path)
    is_used = path.with_name(f"{path.name}-wal").exists()
    how = "mode=rw" if is_used else "mode=ro&immutable=1"
    connection = sqlite3.connect(f"{path.as_uri()}?{how}", uri=True)
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Keep every other process out of a ledger while its file is exchanged."""
    if not path.exists():
        yield
        return
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        # Without a log of its own the file can be moved alone.
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.DatabaseError as error:
        if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
            connection.close()
            raise LedgerError(
                f"another process uses the ledger {path}; wait for it, or stop it, then restore"
            ) from error
        # Too damaged for SQLite, so nobody can use it.
    try:
        yield
    finally:
        connection.close()


def _move_aside(ledger: Path) -> Path | None:
    """Give a ledger, and what SQLite keeps beside it, another name."""
    number, aside = 1, ledger.with_name(f"{ledger.name}.replaced")
    while aside.exists():
        number += 1
        aside = ledger.with_name(f"{ledger.name}.replaced-{number}")
    for ending in ("", *BESIDE):
        path = ledger.with_name(ledger.name + ending)
        if path.exists():
            os.rename(path, aside.with_name(aside.name + ending))
    sync_directory(ledger.parent)
    return aside if aside.exists() else None
