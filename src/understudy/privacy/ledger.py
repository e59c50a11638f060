"""The ledger: what was registered, reserved, released and disclosed, durably (SQLite).

One file per custodian, in a directory of mode 0700. It holds the key that authenticates
certificates and tells a changed data set, so it must not be shared. Everything that counts against
a budget is one transaction that takes the write lock first: of two processes that race for the last
of a budget, one is refused.

States of a run: `reserved` (its whole plan is charged) -> `finished`; or `cancelled`, only possible
while no block was ever started. States of a block: `started` -> `done`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.errors import AttemptsExhausted, BudgetRefused, LedgerError, RelationMixed
from understudy.files import home
from understudy.privacy.database import Database
from understudy.privacy.plan import Plan

MOST_ATTEMPTS = 100
"""Starts of one block, after which the run must be abandoned: it is no chance that kills it."""


@dataclass(frozen=True)
class Block:
    """One stretch of work between two commits."""

    number: int
    attempts: int
    state: str
    releases: dict[str, int]
    digest: str | None


@dataclass(frozen=True, kw_only=True)
class Charge:
    """What a run costs, as it is written down before anything is released."""

    method: str
    plan: Plan
    noise_multiplier: float
    epsilon: float | None
    """The run's guarantee; None for none."""
    delta: float
    accountant: str
    delta_tail: float
    """The part of delta that the noise sampler's tail takes."""
    divergence: float | None
    """Rényi divergence of the plan at the order of the data set's filter; None for unbounded."""


@dataclass(frozen=True)
class Limit:
    """What all runs on one budget may reach together."""

    divergence: float
    delta_tail: float

    def check(self, spent: sqlite3.Row, charge: Charge) -> None:
        """Refuse a charge that does not fit on top of what is spent."""
        remedy = "lower epsilon, or see what was spent with `understudy ledger`"
        if charge.divergence is None or spent["unbounded"]:
            raise BudgetRefused(
                "the data set has a lifetime budget, and a run without guarantee exceeds any; "
                "give a finite epsilon"
            )
        if spent["delta_tail"] + charge.delta_tail > self.delta_tail:
            raise BudgetRefused(
                "the noise samplers' tails of all runs on this data set would take over a tenth "
                "of delta; this data set can take no further run"
            )
        if spent["divergence"] + charge.divergence > self.divergence:
            used, asked = (
                100 * d / self.divergence for d in (spent["divergence"], charge.divergence)
            )
            raise BudgetRefused(
                f"{used:.0f} % of the data set's lifetime budget is spent and this run needs "
                f"{asked:.0f} % of it (Rényi filter); {remedy}"
            )


def _check_charged(execute: Callable[..., sqlite3.Cursor], run_id: str) -> None:
    """Refuse to go on with a run that is not charged, in the transaction that goes on with it.

    Another process may have given the charge back since the run began.
    """
    row = execute("SELECT state FROM runs WHERE id = ?", (run_id,)).fetchone()
    if row is None or row["state"] == "cancelled":
        raise LedgerError(
            f"run {run_id} is not charged (its charge was given back, or is in another ledger), so "
            "it may release nothing; start a new run"
        )


def default_ledger() -> Path:
    """Return where the user's own ledger is, if there is one (`UNDERSTUDY_LEDGER` moves it)."""
    return Path(os.environ.get("UNDERSTUDY_LEDGER") or home() / "ledger.sqlite")


class Ledger(Database):
    """Open the ledger at `path`, by default the user's own.

    Args:
        path: the file.
        create: whether to make it when it is missing.
    """

    def __init__(self, path: Path | None = None, *, create: bool = True) -> None:
        super().__init__(path or default_ledger(), create=create)

    def tags(self, images: Iterable[memoryview]) -> set[bytes]:
        """Return a keyed digest of each image."""
        key = self.mac(b"images")
        return {hashlib.blake2b(image, digest_size=16, key=key).digest() for image in images}

    # Runs

    def reserve(self, run_id: str, data_set: int, charge: Charge, limit: Limit | None) -> None:
        """Charge a whole plan to the budget of `data_set`, or refuse if that passes `limit`."""
        with self.transaction() as execute:
            spent = execute(
                "SELECT total(divergence) AS divergence, total(delta_tail) AS delta_tail,"
                " coalesce(sum(divergence IS NULL), 0) AS unbounded, min(runs.delta) AS delta"
                " FROM runs JOIN data_sets ON data_sets.id = runs.data_set"
                " WHERE state != 'cancelled'"
                " AND budget = (SELECT budget FROM data_sets WHERE id = ?)",
                (data_set,),
            ).fetchone()
            if spent["delta"] not in (None, charge.delta):
                raise RelationMixed(
                    f"this data set is accounted at delta {spent['delta']:g}, but this run asks "
                    f"for {charge.delta:g}; one data set has one delta, so pass that one"
                )
            if limit is not None:
                limit.check(spent, charge)
            execute(
                "INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'reserved', NULL, ?)",
                (
                    run_id,
                    data_set,
                    charge.method,
                    json.dumps(charge.plan.to_json()),
                    charge.noise_multiplier,
                    charge.epsilon,
                    charge.delta,
                    charge.accountant,
                    charge.delta_tail,
                    charge.divergence,
                    time.time(),
                ),
            )

    def run(self, run_id: str) -> sqlite3.Row | None:
        """Return the row of a run, or None."""
        return self.row("SELECT * FROM runs WHERE id = ?", (run_id,))

    def charged_runs(self, budget: int) -> list[sqlite3.Row]:
        """Return the runs that count against a budget, oldest first."""
        return self.rows(
            "SELECT runs.* FROM runs JOIN data_sets ON data_sets.id = runs.data_set"
            " WHERE budget = ? AND state != 'cancelled' ORDER BY reserved",
            (budget,),
        )

    def cancel(self, run_id: str) -> bool:
        """Give a reservation back if nothing was ever released; say whether it was given back."""
        with self.transaction() as execute:
            changed = execute(
                "UPDATE runs SET state = 'cancelled' WHERE id = ? AND state = 'reserved'"
                " AND NOT EXISTS (SELECT 1 FROM blocks WHERE run = id)"
                " AND NOT EXISTS (SELECT 1 FROM rounds WHERE run = id)",
                (run_id,),
            )
            return bool(changed.rowcount)

    def finish(self, run_id: str, certificate: str) -> None:
        """Mark a run finished, with the digest of its certificate.

        After a finish that was cut off, another takes the place of the one that was never shown.
        """
        with self.transaction() as execute:
            _check_charged(execute, run_id)
            execute(
                "UPDATE runs SET state = 'finished', certificate = ? WHERE id = ?",
                (certificate, run_id),
            )

    # Blocks

    def start_block(self, run_id: str, number: int) -> int:
        """Record that work on a block begins; return which attempt this is."""
        with self.transaction() as execute:
            _check_charged(execute, run_id)
            row = execute(
                "INSERT INTO blocks VALUES (?, ?, 1, 'started', NULL, NULL)"
                " ON CONFLICT (run, number) DO UPDATE SET attempts = attempts + 1"
                " WHERE state = 'started' RETURNING attempts",
                (run_id, number),
            ).fetchone()
            if row is None:
                raise LedgerError(f"block {number} of this run is committed already")
            attempts: int = row["attempts"]
            if attempts > MOST_ATTEMPTS:
                raise AttemptsExhausted(
                    f"block {number} was started {MOST_ATTEMPTS} times and never committed; find "
                    "out what ends the process, then start a new run: this one stays charged"
                )
            return attempts

    def commit_block(
        self, run_id: str, number: int, *, releases: dict[str, int], digest: str
    ) -> None:
        """Mark a block done with the releases made in it and the digest of its result file."""
        with self.transaction() as execute:
            changed = execute(
                "UPDATE blocks SET state = 'done', releases = ?, digest = ?"
                " WHERE run = ? AND number = ? AND state = 'started'",
                (json.dumps(releases, sort_keys=True), digest, run_id, number),
            )
            if changed.rowcount != 1:
                raise LedgerError(f"block {number} of this run is not open, so not committed")

    def blocks(self, run_id: str) -> list[Block]:
        """Return the blocks of a run in order."""
        rows = self.rows("SELECT * FROM blocks WHERE run = ? ORDER BY number", (run_id,))
        return [
            Block(
                r["number"],
                r["attempts"],
                r["state"],
                json.loads(r["releases"] or "{}"),
                r["digest"],
            )
            for r in rows
        ]

    # Rounds of a federation

    def rounds_answered(self, run_id: str) -> int:
        """Return how many rounds a client has answered."""
        ((count,),) = self.rows("SELECT count(*) FROM rounds WHERE run = ?", (run_id,))
        return int(count)

    def answered_round(self, run_id: str, name: str) -> sqlite3.Row | None:
        """Return what a client was asked in a round and what it answered, or None."""
        return self.row(
            "SELECT question, answer FROM rounds WHERE run = ? AND name = ?", (run_id, name)
        )

    def keep_answer(
        self, run_id: str, name: str, *, question: bytes, answer: bytes, most: int, kept: int
    ) -> bool:
        """Record an answer before it is sent; say whether it may be.

        Not if the round is answered already, or `most` are: another process was faster.

        Args:
            run_id: the client's run.
            name: of the round.
            question: digest of what was asked.
            answer: what will be sent, and sent again if asked again.
            most: rounds that the run may answer.
            kept: how many of the latest answers to keep.
        """
        with self.transaction() as execute:
            _check_charged(execute, run_id)
            changed = execute(
                "INSERT INTO rounds SELECT ?, ?, ?, ?, ?"
                " WHERE (SELECT count(*) FROM rounds WHERE run = ?) < ?"
                " ON CONFLICT (run, name) DO NOTHING",
                (run_id, name, question, answer, time.time(), run_id, most),
            )
            execute(
                "UPDATE rounds SET answer = NULL WHERE run = ? AND answer IS NOT NULL AND name NOT"
                " IN (SELECT name FROM rounds WHERE run = ? ORDER BY rowid DESC LIMIT ?)",
                (run_id, run_id, kept),
            )
            return bool(changed.rowcount)

    # Data sets and disclosures

    def data_sets(self, where: str = "1", values: tuple[Any, ...] = ()) -> list[sqlite3.Row]:
        """Return the rows of registered data sets."""
        return self.rows(f"SELECT * FROM data_sets WHERE {where} ORDER BY id", values)

    def shared_images(self, tags: set[bytes]) -> list[sqlite3.Row]:
        """Return the data sets that hold images with these tags, with their number (`shared`)."""
        self._connection.execute("CREATE TEMP TABLE IF NOT EXISTS asked (tag BLOB PRIMARY KEY)")
        self._connection.execute("DELETE FROM asked")
        self._connection.executemany("INSERT INTO asked VALUES (?)", ((tag,) for tag in tags))
        return self.rows(
            "SELECT data_sets.*, count(*) AS shared FROM asked JOIN images USING (tag)"
            " JOIN data_sets ON data_sets.id = images.data_set GROUP BY data_sets.id"
        )

    def common_images(self, one: int, other: int) -> int:
        """Return how many different images two data sets share, as far as images are kept."""
        ((count,),) = self.rows(
            "SELECT count(*) FROM images AS a JOIN images AS b USING (tag)"
            " WHERE a.data_set = ? AND b.data_set = ?",
            (one, other),
        )
        return int(count)

    def disclose(self, data_set: int | None, *, what: str, purpose: str) -> None:
        """Record that real records are about to be read without noise."""
        with self.transaction() as execute:
            execute(
                "INSERT INTO disclosures (data_set, what, purpose, disclosed) VALUES (?, ?, ?, ?)",
                (data_set, what, purpose, time.time()),
            )

    def disclosures(self, data_set: int) -> list[sqlite3.Row]:
        """Return the disclosures of a data set."""
        return self.rows("SELECT * FROM disclosures WHERE data_set = ? ORDER BY id", (data_set,))
