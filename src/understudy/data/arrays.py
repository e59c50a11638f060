"""Complete a source that holds its images as an array: convert them, add labels and units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.data.decode import converted
from understudy.data.images import LabelledImages, labelled_images
from understudy.data.reading import Reading
from understudy.data.tables import units_at, values_at


def assemble(
    images: NDArray[np.uint8],
    source: Path,
    reading: Reading,
    *,
    labels: Callable[[], Any],
    columns: Mapping[str, Any] | None = None,
    classes: Sequence[str] | None = None,
) -> LabelledImages:
    """Pack images of `source` with their labels and units.

    Args:
        images: (n, c, h, w).
        source: the file or folder they come from.
        reading: what the user said about it.
        labels: gets the source's own labels; not called if the user named others.
        columns: arrays of the source that a unit or label may be taken from.
        classes: names of the classes, if the source has them.
    """
    arrays, count = columns if columns is not None else {}, len(images)
    label_at = reading.label_pointer()
    given = values_at(label_at, count, arrays)[1] if label_at else labels()
    unit, units = units_at(reading.unit_pointer(), count, arrays)
    return labelled_images(
        converted(images, reading),
        given,
        units=units,
        unit=unit,
        classes=classes if reading.classes is None else reading.classes,
        name=source.resolve().stem,
        source=str(source.resolve()),
        reading=reading.from_anywhere(),
    )
