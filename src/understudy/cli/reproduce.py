"""`understudy reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.cli.settings import MachineOptions
from understudy.reproduce.executor import Place, reproduce
from understudy.reproduce.experiment import load_experiment, names
from understudy.reproduce.tables import accuracies


def command(
    experiment: str | None = None,
    *,
    scale: Literal["full", "smoke"] = "full",
    out: Path = Path("runs/reproduce"),
    results: Path | None = None,
    only: Annotated[tuple[str, ...], Parameter(negative_iterable=())] = (),
    minutes: float | None = None,
    data_dir: Path | None = None,
    remark: str = "",
    machine: Annotated[MachineOptions | None, Parameter(name="*")] = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Make a paper's table again: measured numbers beside published ones.

    Only what is missing is computed: stop it at any time, and the same command goes on.

    Parameters
    ----------
    experiment
        Name of the table; without one, list them.
    scale
        smoke: tiny settings on built-in data, in minutes on a CPU; not comparable.
    out
        Where runs and their ledger go; tables that need the same run share it.
    results
        Where the table goes, as NAME.json, NAME.md and NAME.html; by default beside the runs.
    only
        Compute only runs whose name contains this, or fits it as a pattern (mnist-*);
        may be repeated.
    minutes
        Stop, to be continued, after about so many minutes.
    data_dir
        Folder in which to look for public data sets before fetching them.
    remark
        What readers of the times should know, such as that others used the machine.
    """
    report = make_output(output)
    if experiment is None:
        known = [load_experiment(name) for name in names()]
        rows = [(e.name, e.title, str(len(e.runs)), ", ".join(e.measure.models)) for e in known]
        report.table("Experiments", ("name", "what", "runs", "models"), rows)
        return
    what = load_experiment(experiment, scale)
    place = Place(
        work=out,
        results=results or out,
        data_dir=str(data_dir) if data_dir else None,
        remark=remark,
        **vars(machine or MachineOptions()),
    )
    found = reproduce(what, place, only=only, minutes=minutes, progress=report)
    grid = accuracies(what, found.cells).plain()
    report.table(f"{what.title} ({scale})", grid.columns, grid.rows)
    report.result(
        f"{len(found.cells)} numbers, {found.missing} runs still missing: "
        + ", ".join(map(str, found.files)),
        numbers=len(found.cells),
        missing=found.missing,
        files=[str(file) for file in found.files],
    )
