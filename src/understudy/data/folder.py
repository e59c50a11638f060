"""Read a folder of images: class folders, or any folders with a `labels.csv`.

scans/benign/a.png          scans/labels.csv (file,label,patient)     scans/train/benign/a.png
scans/malignant/b.jpg       scans/images/a.png                        scans/test/benign/c.png
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from understudy.data.decode import ENDINGS, ImageFile, decode_images
from understudy.data.images import LabelledImages, class_order, labelled_images
from understudy.data.reading import Pointer, Reading
from understudy.data.tables import Table, values_at
from understudy.errors import InvalidData
from understudy.progress import Progress

LABELS_FILE = "labels.csv"
LABEL_COLUMNS = ("label", "class")
SPLITS = {"train", "test", "val", "valid", "validation"}


def read_folder(root: Path, reading: Reading, progress: Progress) -> LabelledImages:
    """Read and check a folder of images."""
    folders = {path.name for path in root.iterdir() if path.is_dir()}
    if "train" not in folders or not folders <= SPLITS:
        return _read(root, root, reading, progress)
    data = _read(root, root / "train", reading, progress)
    if unused := sorted(folders - {"train", "test"}):
        progress.say(f"{root}: {', '.join(unused)} left unread; train and test are used")
    if "test" not in folders:
        return data
    names = reading.of_test_split(data.class_names)
    return replace(data, test=_read(root, root / "test", names, progress))


def _read(root: Path, part: Path, reading: Reading, progress: Progress) -> LabelledImages:
    """Read the images below `part`; names in CSV files are relative to `root`."""
    names = _image_names(part, progress)
    unit_at, label_at = reading.unit_pointer(), _label_pointer(root, reading)
    columns: Mapping[str, Sequence[str]] = {}
    if label_at.file is not None:
        names, label_at, columns = _listed(root, part, names, label_at, progress)
    elif label_at.level is not None:
        _refuse_empty_classes(part, names, label_at.level)
    labels = np.array(_values(label_at, root, part, names, columns)[1])
    units = _values(unit_at, root, part, names, columns) if unit_at else None
    decoded = decode_images(
        (ImageFile(str(part / name), part / name) for name in names), len(names), reading, progress
    )
    kept = decoded.kept
    return labelled_images(
        decoded.images,
        labels[kept],
        units=np.array(units[1])[kept] if units else None,
        unit=units[0] if units else None,
        # Classes are declared by all files, whether or not some could be read.
        classes=reading.classes if reading.classes is not None else class_order(labels.tolist()),
        name=root.name,
        source=str(root.resolve()),
        reading=reading.from_anywhere(),
        skipped=decoded.skipped,
    )


def _values(
    pointer: Pointer, root: Path, part: Path, names: Sequence[str], columns: Mapping[str, Any]
) -> tuple[str, Any]:
    if pointer.file is None:
        return values_at(pointer, names, columns)
    prefix = part.relative_to(root).as_posix()
    inside = names if prefix == "." else [f"{prefix}/{name}" for name in names]
    return values_at(replace(pointer, file=_found(pointer.file, root)), inside, columns)


def _found(path: Path, root: Path) -> Path:
    """Return a CSV file named from here, or else from the folder of the images."""
    return root / path if not path.exists() and (root / path).exists() else path


def _label_pointer(root: Path, reading: Reading) -> Pointer:
    if (given := reading.label_pointer()) is not None:
        return replace(given, file=_found(given.file, root)) if given.file else given
    if (root / LABELS_FILE).is_file():
        return Pointer(None, file=root / LABELS_FILE)
    return Pointer("class", level=1)


def _image_names(root: Path, progress: Progress) -> list[str]:
    """Return the images below `root`, relative to it, sorted."""
    names, others = [], Counter[str]()
    seen: set[str] = set()  # a link to a folder above would go on for ever
    for folder, subfolders, files in os.walk(root, followlinks=True):
        seen.add(os.path.realpath(folder))
        subfolders[:] = [
            sub for sub in subfolders
            if not sub.startswith(".") and os.path.realpath(os.path.join(folder, sub)) not in seen
        ]  # fmt: skip
        for file in files:
            ending = Path(file).suffix.lower()
            if file.startswith(".") or ending == ".csv":
                continue
            if ending in ENDINGS:
                names.append((Path(folder) / file).relative_to(root).as_posix())
            else:
                others[ending or "no ending"] += 1
    if others:
        listed = ", ".join(f"{count} {ending}" for ending, count in others.most_common(5))
        progress.say(f"{root}: files that are not PNG, JPEG or WebP are left out ({listed})")
    if not names:
        raise InvalidData(f"{root} holds no images; expected {', '.join(ENDINGS)} files below it")
    return sorted(names)


def _listed(
    root: Path, part: Path, names: list[str], label_at: Pointer, progress: Progress
) -> tuple[list[str], Pointer, Mapping[str, Sequence[str]]]:
    """Keep the images that the label file names; return also its columns.

    A label file lies beside the folder's parts, so it may name images of other parts too.
    """
    assert label_at.file is not None
    table = Table.read(label_at.file)
    inside = part.relative_to(root)
    rows = {}
    for row, name in enumerate(table.files()):
        if not (root / name).is_file() or ".." in PurePosixPath(name).parts:
            raise InvalidData(
                f"row {row + 2} of {table.path} names {name}, which is not in {root}; correct the "
                "row, or put the image there"
            )
        if PurePosixPath(name).is_relative_to(inside):
            rows[PurePosixPath(name).relative_to(inside).as_posix()] = row
    listed = [name for name in names if name in rows]
    if len(listed) < len(rows):
        other = next(name for name in rows if name not in set(names))
        raise InvalidData(
            f"{other} in {table.path} is not a PNG, JPEG or WebP file; remove its row"
        )
    if len(listed) < len(names):
        progress.say(
            f"{len(names) - len(listed)} images without a row in {table.path} are left out"
        )
    named = next((c for c in table.columns if c.lower() in LABEL_COLUMNS), None)
    column = table.value_column(label_at.column or named)
    columns = {
        name: [table.rows[rows[image]][position] for image in listed]
        for position, name in enumerate(table.columns)
    }
    return listed, Pointer("label", column=column), columns


def _refuse_empty_classes(part: Path, names: Sequence[str], level: int) -> None:
    if not any("/" in name for name in names):
        raise InvalidData(
            f"{part} holds images but no class folders; put each image into the folder of its "
            f"class, or add {LABELS_FILE} with the columns file,label"
        )
    filled = {PurePosixPath(name).parts[:level] for name in names}
    for folder, subfolders, _ in os.walk(part):
        depth = len(Path(folder).relative_to(part).parts)
        if depth == level and Path(folder).relative_to(part).parts not in filled:
            raise InvalidData(
                f"class folder {folder} holds no PNG, JPEG or WebP image; put some there, or "
                "remove it"
            )
        if depth == level:
            subfolders.clear()
        subfolders[:] = [sub for sub in subfolders if not sub.startswith(".")]
