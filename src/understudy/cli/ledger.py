"""`understudy ledger`: what was spent, and keeping the file that says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from understudy.cli.output import Output, OutputOptions, make_output
from understudy.errors import InvalidData
from understudy.finished import opened
from understudy.privacy import safekeeping
from understudy.privacy.certificate import composed_total
from understudy.privacy.ledger import Ledger, default_ledger
from understudy.privacy.plan import Plan
from understudy.privacy.registration import Registration, all_registered

command = App(name="ledger", help="Show what was spent on each data set; check, back up, restore.")


@command.default
def show(
    *,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Show what was spent on each data set.

    Parameters
    ----------
    ledger
        The ledger, if not the user's own.
    """
    out = make_output(output)
    with opened(ledger, create=False) as book:
        registered = all_registered(book)
        if not registered:
            out.result(f"{book.path} knows no data set yet; see `understudy register --help`")
        for data_set in registered:
            _show(out, book, data_set)
        if lost := book.lost():
            out.result(_missing(lost), lost=lost)


def _show(out: Output, book: Ledger, data_set: Registration) -> None:
    rows = []
    for run in book.charged_runs(data_set.budget):
        made = sum(sum(b.releases.values()) for b in book.blocks(run["id"]))
        planned = Plan.from_json(json.loads(run["plan"])).total
        epsilon = "none" if run["epsilon"] is None else f"{run['epsilon']:.4f}"
        delta = f"{run['delta']:g}"
        rows.append((run["id"], run["method"], run["state"], epsilon, delta, f"{made}/{planned}"))
    limit = f"limit {data_set.lifetime_epsilon:g}" if data_set.has_limit else "no limit"
    title = f"{data_set.name}: {data_set.facts.units} units, {limit}"
    if data_set.is_public_benchmark:
        title += ", public benchmark"
    if not rows:
        out.result(
            f"{title}; nothing was spent",
            data_set=data_set.name,
            runs=0,
            units=data_set.facts.units,
            lifetime_epsilon=data_set.lifetime_epsilon,
        )
        return
    out.table(title, ("run", "method", "state", "epsilon", "delta", "releases"), rows)
    total = composed_total(book, data_set)
    spent = total["epsilon"] if total["epsilon"] is not None else math.inf
    filtered = total.get("lifetime_spent")
    limited = ""
    if filtered:
        most = f"{data_set.lifetime_epsilon:g}"
        limited = f"; {filtered:.4f} of the limit of {most} is used up (Rényi filter)"
    disclosed = len(book.disclosures(data_set.id))
    out.result(
        f"composed total of {total['runs']} runs: epsilon {spent:.4f} at delta "
        f"{total['delta']:g} ({total['accountant']}){limited}; "
        f"real records read for evaluation {disclosed} times",
        data_set=data_set.name,
        **total,
        disclosures=disclosed,
    )


def _missing(lost: int) -> str:
    return (
        f"{lost} entries are missing since an older copy was put back: what was spent in them is "
        "not counted"
    )


@command.command
def check(
    *runs: Path,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Check every page, sum and rule of the ledger, and that it was not put back to an older state.

    Parameters
    ----------
    runs
        Runs, or folders of runs, whose `private/` says how far the ledger had come.
    ledger
        The ledger, if not the user's own.
    """
    with opened(ledger, create=False) as book:
        if gone := [run for run in runs if not run.is_dir()]:
            raise InvalidData(f"there is no folder {gone[0]}; name runs, or folders of runs")
        found = safekeeping.check(book, runs)
        missing = f"; {_missing(found.lost)}" if found.lost else ""
        make_output(output).result(
            f"{book.path} is in order: {found.entries} entries, {found.data_sets} data sets, "
            f"{found.runs} runs, {found.confirmed} run directories compared{missing}",
            ledger=str(book.path),
            **vars(found),
        )


@command.command
def backup(
    copy: Path,
    *,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Copy the ledger, checked and complete, also while runs write to it.

    Parameters
    ----------
    copy
        File to write; an earlier copy of the same ledger is replaced.
    ledger
        The ledger, if not the user's own.
    """
    with opened(ledger, create=False) as book:
        until = safekeeping.backup(book, copy)
    make_output(output).result(
        f"{copy} holds the ledger until entry {until.number}; keep it as private as the ledger",
        copy=str(copy),
        entries=until.number,
    )


@command.command
def restore(
    copy: Path,
    *,
    accept_loss: bool = False,
    ledger: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Put a copy in the place of a ledger that is damaged or lost.

    What is replaced is kept beside it.

    Parameters
    ----------
    copy
        File that `understudy ledger backup` wrote.
    accept_loss
        Put it back even if it lacks entries that the ledger had: what was spent in them is not
        counted any more, and the ledger says so from then on.
    ledger
        The ledger, if not the user's own.
    """
    place = ledger or default_ledger()
    done = safekeeping.restore(copy, place, accept_loss=accept_loss)
    said = [f"{place} is restored until entry {done.latest.number}"]
    if not done.is_compared:
        said.append("nothing was there to tell whether the copy is the latest")
    if done.lost:
        said.append(_missing(done.lost))
    if done.former:
        said.append(f"the former file is {done.former}")
    make_output(output).result(
        "; ".join(said), ledger=str(place), entries=done.latest.number, lost=done.lost
    )
