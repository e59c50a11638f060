"""A labelled image set as it comes out of a decoder, checked once and kept as bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.data.reading import MAX_SIDE, MIN_SIDE, RECORD, Reading
from understudy.data.storage import CHUNK, allocate
from understudy.errors import InvalidData
from understudy.text import LONGEST_NAME, is_name

MAX_CLASSES = 1000
NAMED_CLASSES = 4
"""So many classes stand in the name of a part of a set, at most."""


@dataclass(frozen=True, eq=False)
class Normalisation:
    """Public constants per channel: a network sees (pixel - mean) / std of pixels in [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, eq=False, repr=False)
class LabelledImages:
    """Hold records: uint8 images (n, c, h, w), labels (n,), and the unit of each record.

    Build it with `labelled_images`, which checks everything.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    units: NDArray[np.int64]
    class_names: tuple[str, ...]
    among: tuple[str, ...] = ()
    """All classes of the task, if these records are of some of them and others have the rest."""
    name: str = "array"
    source: str | None = None
    reading: Reading = field(default_factory=Reading)
    unit: str = RECORD
    normalisation: Normalisation | None = None
    is_public_benchmark: bool = False
    skipped: tuple[str, ...] = ()
    """Images that could not be read and were left out, because the user said so."""
    test: LabelledImages | None = field(default=None)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (channels, height, width)."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def __repr__(self) -> str:
        return f"<LabelledImages {self.name}: {len(self.class_names)} classes, shape {self.shape}>"


def labelled_images(
    images: Any,
    labels: Any,
    *,
    units: Any = None,
    unit: str | None = None,
    classes: int | Sequence[str] | None = None,
    **described: Any,
) -> LabelledImages:
    """Check arrays and pack them as `LabelledImages`.

    Args:
        images: uint8, or floats in [0, 1] (kept with 8 bits, as image files do); (n, h, w) for
            grey, (n, c, h, w), or (n, h, w, c) with 1 or 3 channels.
        labels: one per image: whole numbers from 0 to classes - 1, or names of classes.
        units: the unit of privacy (a patient, a user) of each image: any values, equal for the same
            unit. By default each record is its own unit.
        unit: what such a unit is called in the certificate.
        classes: the number of classes or their names; by default the largest label plus one, or the
            names that occur, sorted.
        **described: further fields of `LabelledImages`.
    """
    pixels = pack_images(np.asarray(images))
    count = len(pixels)
    if count == 0:
        raise InvalidData("the set holds no images; give at least one image per class")
    given = np.asarray(labels)
    if given.shape != (count,):
        raise InvalidData(
            f"labels have shape {given.shape}, expected ({count},), one label per image; "
            "check that images and labels belong together"
        )
    if given.dtype.kind == "U":
        given, classes = _numbered(given, classes)
    names = _class_names(given, classes)
    numbers = _check_labels(given, len(names))
    slots = np.arange(count) if units is None else _unit_slots(np.asarray(units), count)
    name_of_unit = unit or (RECORD if units is None else "group")
    for what, name in (
        *(("class", name) for name in names),
        ("unit", name_of_unit),
        ("data set", described.get("name", "array")),
    ):
        _check_name(what, name)
    return LabelledImages(pixels, numbers, slots, names, unit=name_of_unit, **described)


def part_of(data: LabelledImages, only: str | Sequence[str]) -> LabelledImages:
    """Return the records of some classes, and of its test split; the others stay known by name.

    Args:
        data: the whole.
        only: names of classes, also as one text with commas; a number stands for the class at that
            place, from 0, if no class is called so.
    """
    chosen = chosen_classes(data.class_names, only)
    place = np.full(len(data.class_names), -1)
    place[[data.class_names.index(name) for name in chosen]] = np.arange(len(chosen))

    def part(whole: LabelledImages) -> LabelledImages:
        kept = np.flatnonzero(place[whole.labels] >= 0)
        if not len(kept):
            raise InvalidData(
                f"{whole.name} has no images of {', '.join(chosen[:NAMED_CLASSES])}; correct --only"
            )
        pixels = allocate((len(kept), *whole.shape))
        rows = max(1, CHUNK // max(1, whole.images[:1].nbytes))
        for start in range(0, len(kept), rows):
            pixels[start : start + rows] = whole.images[kept[start : start + rows]]
        return replace(
            whole,
            images=pixels,
            labels=place[whole.labels[kept]],
            units=_unit_slots(whole.units[kept], len(kept)),
            class_names=chosen,
            among=data.class_names,
            name=_name_of_part(whole.name, chosen),
            reading=replace(whole.reading, only=chosen),
            test=None,
        )

    return replace(part(data), test=data.test and part(data.test))


def chosen_classes(names: Sequence[str], only: str | Sequence[str]) -> tuple[str, ...]:
    """Return the classes that were asked for, in the order of `names`.

    >>> chosen_classes(("ant", "bee", "cat"), "cat, 0")
    ('ant', 'cat')
    """
    chosen = set()
    for text in [only] if isinstance(only, str) else only:
        for asked in [text] if text in names else [word.strip() for word in text.split(",")]:
            if asked in names:
                chosen.add(asked)
            elif re.fullmatch("[0-9]{1,9}", asked) and int(asked) < len(names):
                chosen.add(names[int(asked)])
            else:
                raise InvalidData(
                    f"there is no class '{asked}', expected some of {', '.join(names[:10])}; "
                    "correct it"
                )
    if len(chosen) < 2:
        raise InvalidData(
            f"{len(chosen)} of the classes is asked for, expected 2 or more: a set of one class "
            "teaches nothing; name more"
        )
    return tuple(name for name in names if name in chosen)


def _name_of_part(whole: str, chosen: Sequence[str]) -> str:
    if len(chosen) > NAMED_CLASSES:
        return f"{whole}-{len(chosen)}-classes"
    return "-".join([whole, *(re.sub(r"[^\w.]+", "_", name) for name in chosen)])


def _check_name(what: str, name: str) -> None:
    """Refuse a name that a certificate, a table or a picture could not show."""
    if not is_name(name):
        raise InvalidData(
            f"a {what} is called {name[:LONGEST_NAME]!r}; expected up to {LONGEST_NAME} characters "
            "that can be printed; rename it"
        )


def pack_images(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Check images and return them as uint8 (n, c, h, w); without a copy if they are that."""
    ready = _as_nchw(images)
    if ready.dtype == np.uint8 and ready.flags.c_contiguous and ready.flags.writeable:
        return ready
    rows = max(1, CHUNK // max(1, ready[:1].nbytes))
    return pack_chunks(images.shape, (images[i : i + rows] for i in range(0, len(images), rows)))


def pack_chunks(shape: Sequence[int], chunks: Iterable[NDArray[Any]]) -> NDArray[np.uint8]:
    """Pack images of the given overall shape, in any accepted layout, that come piece by piece."""
    like = _as_nchw(np.empty((0, *shape[1:]), np.uint8))
    pixels = allocate((shape[0], *like.shape[1:]))
    done = 0
    for chunk in chunks:
        pixels[done : done + len(chunk)] = _as_bytes(_as_nchw(chunk), first=done)
        done += len(chunk)
    return pixels


def check_side(height: int, width: int) -> None:
    """Refuse images too small or too large to learn from."""
    if not (MIN_SIDE <= height <= MAX_SIDE and MIN_SIDE <= width <= MAX_SIDE):
        raise InvalidData(
            f"images are {height} x {width} pixels, expected sides of {MIN_SIDE} to {MAX_SIDE}; "
            "resize them, or pass --size"
        )


def class_order(names: Iterable[str]) -> list[str]:
    """Sort the names of classes: as numbers if they all are, else as text.

    >>> class_order(["10", "9"]), class_order(["cat", "9"])
    (['9', '10'], ['9', 'cat'])
    """
    distinct = set(names)
    if all(name.isascii() and name.isdigit() for name in distinct):
        # As numbers, but without making any: a name may have thousands of digits.
        return sorted(distinct, key=lambda n: (len(n.lstrip("0")), n.lstrip("0"), n))
    return sorted(distinct)


def _as_nchw(images: NDArray[Any]) -> NDArray[Any]:
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim == 4 and images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.transpose(0, 3, 1, 2)
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise InvalidData(
            f"images have shape {images.shape}, expected (n, h, w), (n, c, h, w) or (n, h, w, c) "
            "with 1 or 3 channels; reshape them"
        )
    check_side(images.shape[2], images.shape[3])
    return images


def _as_bytes(images: NDArray[Any], *, first: int) -> NDArray[np.uint8]:
    """Convert to bytes; `first` is the number of the first image, for messages."""
    if images.dtype == np.uint8:
        return images
    if not np.issubdtype(images.dtype, np.floating):
        raise InvalidData(
            f"pixels are of type {images.dtype}, expected uint8 or floats in [0, 1]; convert them"
        )
    bad = ~np.isfinite(images)
    if bad.any():
        record = first + int(np.argwhere(bad)[0][0])
        raise InvalidData(
            f"image {record} holds pixels that are NaN or infinite, expected values in [0, 1]; "
            "repair or remove such images"
        )
    low, high = float(images.min(initial=0)), float(images.max(initial=0))
    if low < 0 or high > 1:
        raise InvalidData(
            f"float pixels range from {low:g} to {high:g}, expected [0, 1]; rescale them"
        )
    pixels: NDArray[np.uint8] = np.rint(images * 255).astype(np.uint8)
    return pixels


def _numbered(
    labels: NDArray[Any], classes: int | Sequence[str] | None
) -> tuple[NDArray[np.int64], Sequence[str]]:
    """Turn names of classes into numbers."""
    found = class_order(labels.tolist())
    names = list(classes) if isinstance(classes, Sequence) else found
    if isinstance(classes, int) and classes != len(found):
        raise InvalidData(
            f"the labels name {len(found)} classes ({', '.join(found[:5])}, ...), not {classes}; "
            "leave out --classes or correct the labels"
        )
    if unknown := [name for name in found if name not in names]:
        raise InvalidData(
            f"label '{unknown[0]}' is not one of the classes ({', '.join(names[:10])}); "
            "correct it or declare the class"
        )
    number = {name: position for position, name in enumerate(names)}
    return np.array([number[name] for name in labels.tolist()], np.int64), names


def _class_names(labels: NDArray[Any], classes: int | Sequence[str] | None) -> tuple[str, ...]:
    if classes is None:
        whole = np.issubdtype(labels.dtype, np.integer)
        classes = int(labels.max(initial=0)) + 1 if whole else 2
    count = classes if isinstance(classes, int) else len(classes)
    if not 2 <= count <= MAX_CLASSES:
        raise InvalidData(
            f"the set has {count} classes, expected 2 to {MAX_CLASSES}; "
            "merge classes or name them with --classes"
        )
    names = tuple(str(n) for n in (range(classes) if isinstance(classes, int) else classes))
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidData(f"two classes are called '{twice}'; give each its own name")
    return names


def _check_labels(labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
    if not np.issubdtype(labels.dtype, np.integer):
        raise InvalidData(
            f"labels are of type {labels.dtype}, expected whole numbers 0 to {classes - 1}; "
            "number the classes from 0"
        )
    outside = (labels < 0) | (labels >= classes)
    if outside.any():
        record = int(np.argmax(outside))
        raise InvalidData(
            f"label {int(labels[record])} of image {record} is outside 0 to {classes - 1}; "
            "correct it or declare the classes with --classes"
        )
    return labels.astype(np.int64)


def _unit_slots(units: NDArray[Any], count: int) -> NDArray[np.int64]:
    """Number units by first appearance."""
    if units.shape != (count,):
        raise InvalidData(
            f"units have shape {units.shape}, expected ({count},), one per image; check the column"
        )
    _, first, inverse = np.unique(units, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    slots: NDArray[np.int64] = rank[inverse]
    return slots
