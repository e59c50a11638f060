"""Find the decoder for what the user named: a known set or a path."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from understudy.data.catalogue import CATALOGUE, KnownSet, known_set, suggestion
from understudy.data.cifar import is_cifar, read_cifar
from understudy.data.decode import converted
from understudy.data.digits import read_digits
from understudy.data.fetch import fetch, stored
from understudy.data.folder import read_folder
from understudy.data.idx import is_idx, read_idx
from understudy.data.images import LabelledImages, part_of
from understudy.data.mosaic import is_mosaic, read_mosaic
from understudy.data.npz import read_npz
from understudy.data.parquet import is_parquet, read_parquet
from understudy.data.reading import RECORD, Reading
from understudy.errors import InvalidData
from understudy.progress import Progress
from understudy.text import one_line


def read_source(
    source: str | Path, reading: Reading | None = None, progress: Progress | None = None
) -> LabelledImages:
    """Read the data set called `source`: the name of a known set, or a path.

    >>> read_source("digits")
    <LabelledImages digits: 10 classes, shape (1, 8, 8)>
    """
    how, report = reading or Reading(), progress or Progress()
    whole = _read_whole(source, how, report)
    return part_of(whole, how.only) if how.only else whole


def _read_whole(source: str | Path, how: Reading, report: Progress) -> LabelledImages:
    if not str(source) or not str(source).isprintable():
        raise InvalidData(
            f"the source is called {str(source)!r}; expected a known set, or a path that can be "
            "printed; rename it"
        )
    if str(source) in CATALOGUE:
        return _read_known(known_set(str(source)), how, report)
    try:
        data = read_path(Path(source), how, report)
    except OSError as error:
        raise InvalidData(
            f"{error.filename or source} cannot be read ({error.strerror}); check it"
        ) from None
    except (ValueError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        # A damaged file that no reader foresaw: still one line for the user.
        raise InvalidData(
            f"{source} cannot be read ({one_line(error)}); it may be damaged"
        ) from error
    if data.skipped:
        report.say(
            f"{len(data.skipped)} images could not be read and are left out, the first "
            f"{data.skipped[0]}"
        )
    return _dressed(data, known_set(how.like)) if how.like else data


def read_path(path: Path, reading: Reading, progress: Progress) -> LabelledImages:
    """Read a file or a folder, whichever format it has."""
    if not path.exists():
        raise InvalidData(
            f"{path} does not exist{suggestion(str(path), CATALOGUE)}; expected the path of a "
            f"folder or file, or a known set ({', '.join(CATALOGUE)})"
        )
    if is_idx(path):
        return read_idx(path, reading)
    if is_cifar(path):
        return read_cifar(path, reading)
    if is_parquet(path):
        return read_parquet(path, reading, progress)
    if path.suffix == ".npz":
        return read_npz(path, reading)
    if not path.is_dir():
        raise InvalidData(
            f"{path} has the ending '{path.suffix}'; expected .npz, .parquet, IDX (-ubyte, .idx, "
            "each also .gz), CIFAR's .bin, or a folder of images"
        )
    if is_mosaic(path):
        return read_mosaic(path, reading, progress)
    return read_folder(path, reading, progress)


def _read_known(known: KnownSet, reading: Reading, progress: Progress) -> LabelledImages:
    """Read a known set. What was verified to be public is exempt from a lifetime budget."""
    for flag, given in (
        ("unit", None if reading.unit == RECORD else reading.unit),
        ("labels", reading.labels),
        ("classes", reading.classes),
        ("like", reading.like),
    ):
        if given is not None:
            raise InvalidData(
                f"--{flag} {given} cannot be given with the known set {known.name}, which has its "
                "own; leave it out"
            )
    how = replace(reading, classes=known.class_names)
    if known.name == "digits":
        data = read_digits()
        test = data.test
        assert test is not None
        data = replace(
            data,
            images=converted(data.images, how),
            test=replace(test, images=converted(test.images, how)),
        )
    elif known.can_be_fetched:
        folder = fetch(known, data_dir=reading.data_dir, progress=progress)
        data = read_path(folder, how, progress)
    else:
        data = read_path(_placed(known, reading), how, progress)
    is_verified = known.name == "digits" or known.can_be_fetched
    return replace(
        _dressed(replace(data, name=known.name), known),
        source=known.name,
        is_public_benchmark=is_verified,
        reading=replace(reading, data_dir=None),
    )


def _placed(known: KnownSet, reading: Reading) -> Path:
    """Return where the user put a known set that we cannot fetch."""
    given = reading.data_dir or os.environ.get("UNDERSTUDY_DATA")
    folders = [Path(given)] if given else []
    for folder in (*folders, stored(known).parent):
        for path in (folder / f"{known.name}.npz", folder / known.name):
            if path.exists():
                return path
    raise InvalidData(
        f"{known.name} ({known.title}) cannot be fetched; put {known.name}.npz with images, "
        f"labels, test_images and test_labels, or a folder {known.name}/ of images, into "
        f"{folders[0] if folders else stored(known).parent}"
    )


def _dressed(data: LabelledImages, known: KnownSet) -> LabelledImages:
    """Give a set the public constants of a known one."""
    if data.shape[0] != known.shape[0]:
        if len(set(known.normalisation.mean)) > 1:
            raise InvalidData(
                f"{data.name} has {data.shape[0]} channels, {known.name} {known.shape[0]}; its "
                "normalisation constants do not fit; leave out --like or --channels"
            )
        return data
    numbered = tuple(str(n) for n in range(len(known.class_names)))
    takes_names = data.class_names == numbered
    names = known.class_names if takes_names else data.class_names
    test = data.test and replace(
        data.test, class_names=names, name=data.name, normalisation=known.normalisation
    )
    return replace(data, class_names=names, normalisation=known.normalisation, test=test)
