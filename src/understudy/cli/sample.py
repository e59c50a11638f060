"""`understudy sample`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from understudy.cli.output import OutputOptions, make_output
from understudy.finished import sample


def command(
    run: Path,
    *,
    count: int | None = None,
    per_class: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    without_guarantee: bool = False,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Draw more images from the generator of a finished run, at no cost in privacy.

    Parameters
    ----------
    run
        Directory of the run, or its `release/` alone.
    count
        How many images in all; labels follow the generator's shares of classes.
    per_class
        How many images of each class instead.
    seed
        Another seed gives other images.
    out
        File to write; by default RUN-samples.safetensors.
    device
        Where to compute; auto takes a GPU if there is one.
    without_guarantee
        Draw from a generator made with epsilon inf, which shows private data.
    """
    whole = run.resolve()
    whole = whole.parent if whole.name == "release" else whole
    file = out or whole.with_name(f"{whole.name}-samples.safetensors")
    drawn = sample(
        run, count=count, per_class=per_class, seed=seed, out=file, device=device,
        without_guarantee=without_guarantee,
    )  # fmt: skip
    make_output(output).result(f"{len(drawn)} images: {file}", file=str(file), images=len(drawn))
