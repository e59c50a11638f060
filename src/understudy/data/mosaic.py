"""Read lossless mosaics: large images that hold many small square ones, 50 to a row.

A folder with mosaics (WebP or PNG, in the order of their names; the last may be padded) and
`labels.npz`, one value per image in each of its arrays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from understudy.data.arrays import assemble
from understudy.data.decode import ImageFile, decode_or_explain
from understudy.data.images import LabelledImages, check_side
from understudy.data.npz import Archive
from understudy.data.reading import Pointer, Reading
from understudy.data.storage import allocate, in_order
from understudy.errors import InvalidData
from understudy.progress import Progress

LABELS_FILE = "labels.npz"
PER_ROW = 50


def is_mosaic(path: Path) -> bool:
    """Whether `path` is a folder of this format."""
    return (path / LABELS_FILE).is_file() and bool(_mosaics(path))


def read_mosaic(path: Path, reading: Reading, progress: Progress) -> LabelledImages:
    """Read and check a folder of mosaics."""
    with Archive(path / LABELS_FILE) as archive:
        pointer = reading.label_pointer() or Pointer("label", column="label")
        if pointer.column not in archive or pointer.file:
            raise InvalidData(
                f"{path / LABELS_FILE} has no array '{pointer.column or pointer.file}' (found: "
                f"{', '.join(sorted(archive))}); name one with --labels"
            )
        labels = archive[str(pointer.column)]
        if labels.ndim != 1:
            raise InvalidData(
                f"'{pointer.column}' in {path / LABELS_FILE} has {labels.ndim} dimensions, "
                "expected one label per image"
            )
        tiles = _tiles(path, len(labels), progress)
        return assemble(tiles, path, reading, labels=lambda: labels, columns=archive)


def _mosaics(path: Path) -> list[Path]:
    return in_order(p for p in path.iterdir() if p.suffix.lower() in (".webp", ".png"))


def _tiles(path: Path, count: int, progress: Progress) -> NDArray[np.uint8]:
    """Cut the mosaics into their tiles, row by row."""
    files, done = _mosaics(path), 0
    tiles = np.empty((0, 1, 1, 1), np.uint8)
    for number in progress.steps(range(len(files)), what="reading mosaics"):
        mosaic = _mosaic(files[number])
        side = mosaic.shape[2] // PER_ROW
        check_side(side, side)
        if mosaic.shape[2] % PER_ROW or mosaic.shape[1] % side:
            raise InvalidData(
                f"{files[number]} is {mosaic.shape[1]} x {mosaic.shape[2]} pixels, expected "
                f"square tiles, {PER_ROW} to a row"
            )
        if done == count and number:
            raise InvalidData(
                f"{path / LABELS_FILE} labels {count} images, so none of {files[number].name}; "
                "expected labels for all mosaics"
            )
        channels, rows = mosaic.shape[0], mosaic.shape[1] // side
        if number == 0:
            if count > len(files) * rows * PER_ROW:
                raise InvalidData(
                    f"{path / LABELS_FILE} labels {count} images, the {len(files)} mosaics hold "
                    f"at most {len(files) * rows * PER_ROW}; a mosaic is missing"
                )
            tiles = allocate((count, channels, side, side))
        cut = mosaic.reshape(channels, rows, side, PER_ROW, side).transpose(1, 3, 0, 2, 4)
        cut = cut.reshape(-1, channels, side, side)[: count - done]
        if cut.shape[1:] != tiles.shape[1:]:
            raise InvalidData(
                f"{files[number]} has tiles of shape {cut.shape[1:]}, {files[0].name} "
                f"{tiles.shape[1:]}; expected the same"
            )
        tiles[done : done + len(cut)] = cut
        done += len(cut)
    if done < count:
        raise InvalidData(
            f"{path / LABELS_FILE} labels {count} images, the mosaics hold {done}; one is missing "
            "or cut short"
        )
    return tiles


def _mosaic(file: Path) -> NDArray[np.uint8]:
    found = decode_or_explain(ImageFile(str(file), file), None, None)
    if isinstance(found, str):
        raise InvalidData(f"{file} cannot be read ({found}); copy it again")
    return found
