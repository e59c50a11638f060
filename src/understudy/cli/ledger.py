"""`understudy ledger`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.privacy.certificate import composed_total
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Plan
from understudy.privacy.registration import all_registered


def command(
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
    book = Ledger(ledger, create=False)
    registered = all_registered(book)
    if not registered:
        out.result(f"{book.path} knows no data set yet; see `understudy register --help`")
    for data_set in registered:
        rows = []
        for run in book.charged_runs(data_set.budget):
            made = sum(sum(b.releases.values()) for b in book.blocks(run["id"]))
            planned = Plan.from_json(json.loads(run["plan"])).total
            epsilon = "none" if run["epsilon"] is None else f"{run['epsilon']:.4f}"
            rows.append(
                (
                    run["id"],
                    run["method"],
                    run["state"],
                    epsilon,
                    f"{run['delta']:g}",
                    f"{made}/{planned}",
                )
            )
        limit = f"limit {data_set.lifetime_epsilon:g}" if data_set.has_limit else "no limit"
        title = f"{data_set.name}: {data_set.facts.units} units, {limit}"
        if data_set.is_public_benchmark:
            title += ", public benchmark"
        out.table(title, ("run", "method", "state", "epsilon", "delta", "releases"), rows)
        if rows:
            total = composed_total(book, data_set)
            spent = total["epsilon"] if total["epsilon"] is not None else math.inf
            filtered = total.get("lifetime_spent")
            limited = f"; {filtered:.4f} of the limit by the filter" if filtered else ""
            disclosed = len(book.disclosures(data_set.id))
            out.result(
                f"composed total of {total['runs']} runs: epsilon {spent:.4f} at delta "
                f"{total['delta']:g} ({total['accountant']}){limited}; "
                f"real records read for evaluation {disclosed} times",
                data_set=data_set.name,
                **total,
                disclosures=disclosed,
            )
