"""`understudy export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.exports import Format
from understudy.finished import export


def command(
    run: Path,
    *,
    to: Format,
    out: Path | None = None,
    without_guarantee: bool = False,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Write a released set in the form that other tools read, with its data card.

    Parameters
    ----------
    run
        Directory of the run, or its `release/` alone.
    to
        png: class folders. parquet: opens in Hugging Face `datasets`. npz, safetensors: arrays.
        idx: as MNIST.
    out
        Directory to write; by default RUN-FORMAT.
    without_guarantee
        Export a set made with epsilon inf, which shows private data.
    """
    found = export(run, to=to, out=out, without_guarantee=without_guarantee)
    make_output(output).result(
        f"{found.images} images as {to}: {found.directory}",
        directory=str(found.directory),
        images=found.images,
        format=to,
    )
