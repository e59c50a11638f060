"""Read a folder of images: class folders, or any folders with a `labels.csv`.

scans/benign/a.png          scans/labels.csv (file,label,patient)     scans/train/benign/a.png
scans/malignant/b.jpg       scans/images/a.png                        scans/test/benign/c.png
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np

from understudy.data.decode import ENDINGS, ImageFile, decode_images
from understudy.data.images import LabelledImages, class_order, labelled_images
from understudy.data.reading import Pointer, Reading, found_file, printable
from understudy.data.tables import Table, units_at, values_at
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
    how = reading.of_test_split(data.class_names, by_name=True)
    return replace(data, test=_read(root, root / "test", how, progress))


def _read(root: Path, part: Path, reading: Reading, progress: Progress) -> LabelledImages:
    """Read the images below `part`; names in CSV files are relative to `root`."""
    names = _image_names(part, progress)
    depth = len(part.relative_to(root).parts)
    unit_at = _placed(reading.unit_pointer(), root, depth)
    label_at = _placed(_label_pointer(root, reading), root, depth)
    assert label_at is not None
    columns: Mapping[str, Sequence[str]] = {}
    if label_at.file is not None:
        names, label_at, columns = _listed(root, part, names, label_at, progress)
    elif label_at.level is not None:
        _refuse_empty_classes(part, names, label_at.level - depth)
    inside = _below(root, part, names)
    labels = np.array([str(v) for v in values_at(label_at, inside, columns)[1]])
    unit, units = units_at(unit_at, inside, columns)
    decoded = decode_images(
        (ImageFile(str(part / name), part / name) for name in names), len(names), reading, progress
    )
    kept = decoded.kept
    return labelled_images(
        decoded.images,
        labels[kept],
        units=np.array(units)[kept] if units is not None else None,
        unit=unit,
        # Classes are declared by all files, whether or not some could be read.
        classes=reading.classes if reading.classes is not None else class_order(labels.tolist()),
        name=root.resolve().name,
        source=str(root.resolve()),
        reading=reading.from_anywhere(root),
        skipped=decoded.skipped,
    )


def _below(root: Path, part: Path, names: Sequence[str]) -> list[str]:
    """Return names relative to `root`, as CSV files have them."""
    prefix = part.relative_to(root).as_posix()
    return list(names) if prefix == "." else [f"{prefix}/{name}" for name in names]


def _label_pointer(root: Path, reading: Reading) -> Pointer:
    if (given := reading.label_pointer()) is not None:
        return given
    if (root / LABELS_FILE).is_file():
        return Pointer(None, file=root / LABELS_FILE)
    return Pointer("class", level=1)


def _placed(pointer: Pointer | None, root: Path, depth: int) -> Pointer | None:
    """Find the pointer's file, and count its level from `root`: splits are no level of the user."""
    if pointer and pointer.file:
        return replace(pointer, file=found_file(pointer.file, root))
    return replace(pointer, level=pointer.level + depth) if pointer and pointer.level else pointer


def _image_names(root: Path, progress: Progress) -> list[str]:
    """Return the images below `root`, relative to it, sorted."""
    names, others = [], Counter[str]()
    same: dict[tuple[int, int], Path] = {}
    for file in _files(root):
        ending = file.suffix.lower()
        if ending == ".csv":
            continue
        if ending not in ENDINGS:
            others[printable(ending) or "no ending"] += 1
            continue
        known = file.stat()
        other = same.setdefault((known.st_dev, known.st_ino), file)
        if other != file:  # one record under two names could count as two units
            raise InvalidData(f"{file} and {other} are the same file; remove one of the links")
        names.append(file.relative_to(root).as_posix())
    if others:
        listed = ", ".join(f"{count} {ending}" for ending, count in others.most_common(5))
        progress.say(f"{root}: files that are not PNG, JPEG or WebP are left out ({listed})")
    if not names:
        raise InvalidData(f"{root} holds no images; expected {', '.join(ENDINGS)} files below it")
    return sorted(names)


def _files(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield all files below `folder` but hidden ones; links are followed, but not in circles."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files(entry, above | {real})
        else:
            yield entry


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
    for row, given in enumerate(table.files()):
        name = given.removeprefix(f"{root.resolve().as_posix()}/")
        if {"..", "/"} & set(PurePosixPath(name).parts) or not _is_file(root / name):
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


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


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
