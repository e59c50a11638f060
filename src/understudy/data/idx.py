"""Read IDX files, plain or gzipped: the format of MNIST.

A folder with `train-images-idx3-ubyte` and `train-labels-idx1-ubyte` (and `t10k-...` as its test
split), or one file of images with its file of labels beside it.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from understudy.data.arrays import assemble
from understudy.data.images import LabelledImages, pack_images
from understudy.data.reading import Reading
from understudy.data.storage import allocate, claimed_bytes, read_exactly, regular
from understudy.errors import InvalidData

UNSIGNED_BYTE = 8
TEST_PREFIXES = ("t10k", "test")


def is_idx(path: Path) -> bool:
    """Whether `path` is a file or a folder of this format."""
    if path.is_dir():
        return any("-images-idx" in entry.name for entry in path.iterdir())
    return "-ubyte" in path.name or path.name.removesuffix(".gz").endswith(".idx")


def read_idx(path: Path, reading: Reading) -> LabelledImages:
    """Read and check IDX files."""
    if not path.is_dir():
        return _read_pair(path, path, reading)
    data = _read_pair(_images_file(path, ("train",)), path, reading)
    try:
        test = _images_file(path, TEST_PREFIXES)
    except InvalidData:
        return data
    return replace(data, test=_read_pair(test, path, reading.of_test_split(data.class_names)))


def _images_file(folder: Path, prefixes: Sequence[str]) -> Path:
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(tuple(prefixes)) and "-images-idx" in entry.name:
            return entry
    raise InvalidData(
        f"{folder} has no {prefixes[0]}-images-idx3-ubyte[.gz]; put it there, or name the file of "
        "images itself"
    )


def _read_pair(file: Path, source: Path, reading: Reading) -> LabelledImages:
    return assemble(
        pack_images(read_array(file, dimensions=(3, 4))),
        source,
        reading,
        labels=lambda: read_array(_labels_file(file), dimensions=(1,)),
    )


def _labels_file(images: Path) -> Path:
    stem = images.name.split("-images")[0]
    for entry in sorted(images.parent.iterdir()):
        if entry.name.startswith((f"{stem}-labels-idx1", f"{stem}-labels.idx")):
            return entry
    raise InvalidData(
        f"{images} has no labels beside it; expected {stem}-labels-idx1-ubyte[.gz], or pass "
        "--labels FILE.csv"
    )


def read_array(path: Path, *, dimensions: Sequence[int]) -> NDArray[np.uint8]:
    """Read one IDX file of bytes."""
    size = regular(path).stat().st_size
    is_compressed = path.suffix == ".gz"
    try:
        with gzip.open(path, "rb") if is_compressed else path.open("rb") as stream:
            shape = _header(path, stream, dimensions)
            claimed = claimed_bytes(str(path), shape, size, compressed=is_compressed)
            array = allocate(shape)
            read_exactly(str(path), stream, array)
            if stream.read(1):
                raise InvalidData(
                    f"{path} holds more than the {claimed} bytes that its header states; it is "
                    "damaged; copy it again"
                )
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidData(f"{path} cannot be read ({error}); copy it again") from None
    return array


def _header(path: Path, stream: IO[bytes] | Any, dimensions: Sequence[int]) -> tuple[int, ...]:
    start = stream.read(4)
    if len(start) < 4 or start[:2] != b"\0\0" or start[2] != UNSIGNED_BYTE:
        raise InvalidData(
            f"{path} is not an IDX file of bytes (it starts with {start.hex() or 'nothing'}, "
            "expected 000008..); name the right file"
        )
    if start[3] not in dimensions:
        raise InvalidData(
            f"{path} has {start[3]} dimensions, expected {' or '.join(map(str, dimensions))}; "
            "images and labels may be mixed up"
        )
    lengths = stream.read(4 * start[3])
    if len(lengths) < 4 * start[3]:
        raise InvalidData(f"{path} ends within its header; copy it again")
    return struct.unpack(f">{start[3]}I", lengths)
