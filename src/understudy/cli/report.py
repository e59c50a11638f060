"""`understudy report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.report.page import written_report


def command(
    *runs: Path,
    out: Path | None = None,
    shareable: bool = False,
    ledger: bool = False,
    ledger_path: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Write one HTML page about a run, or about several side by side.

    The page holds everything it shows and loads nothing. Every run is verified first.

    Parameters
    ----------
    runs
        Directories of runs, or their `release/` alone.
    out
        File to write; by default RUN/private/report.html, or RUN-report.html if it is shareable. Of
        several runs: report.html, or report-shareable.html, beside the first.
    shareable
        Leave out everything that was computed on private data.
    ledger
        Check the certificates' origin with the ledger that each run was made with; takes no path.
    ledger_path
        Check it with this ledger.
    """
    page = written_report(runs, out=out, shareable=shareable, ledger=ledger_path or ledger)
    whose = "private: keep it" if page.is_private else "made from released files alone"
    make_output(output).result(
        f"report of {len(runs)} run{'s'[: len(runs) > 1]}: {page.path} ({whose})",
        file=str(page.path),
        runs=len(runs),
        shareable=shareable,
        is_private=page.is_private,
    )
