"""`understudy runs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.report.listing import list_runs


def command(
    directory: Path = Path("runs"),
    *,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """List the runs in a folder, finished and unfinished.

    Accuracies were computed on private data: the list is for the custodian.

    Parameters
    ----------
    directory
        The folder that holds the runs.
    """
    out = make_output(output)
    lines = list_runs(directory)
    if not lines:
        out.result(f"{directory} holds no runs; start one with `understudy generate`", runs=0)
        return
    columns = ("name", "state", "method", "data", "epsilon", "accuracy", "images", "when")
    rows = [
        (
            line.name, line.state, line.method, line.data, line.epsilon, line.accuracy, line.images,
            f"{line.when:%Y-%m-%d %H:%M}",
        )
        for line in lines
    ]  # fmt: skip
    out.table(f"{len(lines)} runs in {directory}", columns, rows, is_copied=True)
