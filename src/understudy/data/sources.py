"""Find the decoder for what the user named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from understudy.data.digits import read_digits
from understudy.data.images import LabelledImages
from understudy.data.npz import read_npz
from understudy.errors import InvalidData

BUILT_IN = {"digits": read_digits}


def read_source(
    source: str | Path,
    *,
    unit: str = "record",
    classes: int | Sequence[str] | None = None,
) -> LabelledImages:
    """Read the data set called `source`: the name of a built-in set or a path.

    >>> read_source("digits")
    <LabelledImages digits: 10 classes, shape (1, 8, 8)>
    """
    if str(source) in BUILT_IN:
        if unit != "record":
            raise InvalidData(f"the built-in set {source} has no unit '{unit}'; leave out --unit")
        return BUILT_IN[str(source)]()
    path = Path(source)
    if path.suffix == ".npz":
        return read_npz(path, unit=unit, classes=classes)
    found = "does not exist" if not path.exists() else f"has the ending '{path.suffix}'"
    raise InvalidData(
        f"{source} {found}; expected a built-in set ({', '.join(BUILT_IN)}) or the path of an .npz"
    )
