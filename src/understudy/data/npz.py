"""Read `.npz` files: arrays `images`, `labels`, and optionally one that names each image's unit."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from understudy.data.images import LabelledImages, labelled_images
from understudy.errors import InvalidData


def read_npz(
    path: Path,
    *,
    unit: str = "record",
    classes: int | Sequence[str] | None = None,
) -> LabelledImages:
    """Read and check an `.npz` file.

    Args:
        path: the file.
        unit: `record`, or the name of the array that holds each image's unit (`patient`, say).
        classes: number or names of the classes, when the file has no array `classes`.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays: dict[str, Any] = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InvalidData(f"{path} does not exist; check the path") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, KeyError) as error:
        raise InvalidData(
            f"{path} cannot be read as .npz ({error}); expected a file written by numpy.savez "
            "without objects; write it again"
        ) from error
    for key in ("images", "labels"):
        if key not in arrays:
            raise InvalidData(
                f"{path} has no array '{key}' (found: {', '.join(sorted(arrays)) or 'nothing'}); "
                "expected 'images' and 'labels'"
            )
    units = None
    if unit != "record":
        if unit not in arrays:
            raise InvalidData(
                f"{path} has no array '{unit}' to take units from (found: "
                f"{', '.join(sorted(arrays))}); name one of them with --unit"
            )
        units = arrays[unit]
    if classes is None and "classes" in arrays:
        classes = [str(name) for name in arrays["classes"].ravel()]
    return labelled_images(
        arrays["images"],
        arrays["labels"],
        units=units,
        unit=unit,
        classes=classes,
        name=path.stem,
        source=str(path.resolve()),
    )
