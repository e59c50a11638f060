"""Read `.npz` files: arrays `images`, `labels`, and optionally one that names each image's unit.

Arrays `test_images` and `test_labels` are the test split, `classes` the names of the classes.
"""

from __future__ import annotations

import contextlib
import math
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from understudy.data.arrays import assemble
from understudy.data.images import LabelledImages, pack_chunks
from understudy.data.reading import Reading
from understudy.data.storage import CHUNK, claimed_bytes, read_exactly, regular
from understudy.errors import InvalidData
from understudy.text import one_line

DAMAGE = (OSError, EOFError, zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError,
          RuntimeError, KeyError, OverflowError, TypeError, SyntaxError, MemoryError)  # fmt: skip
"""What zipfile and numpy raise on damaged files."""


PLAIN_KINDS = "biufcSUMm"
"""Types of arrays that are read: numbers, text, dates."""


def read_npz(path: Path, reading: Reading) -> LabelledImages:
    """Read and check an `.npz` file."""
    with Archive(path) as archive:
        return _read(archive, path, reading)


def _read(archive: Archive, path: Path, reading: Reading) -> LabelledImages:
    for key in ("images",) if reading.labels else ("images", "labels"):
        if key not in archive:
            raise InvalidData(
                f"{path} has no array '{key}' (found: {', '.join(sorted(archive)) or 'nothing'}); "
                "expected 'images' and 'labels'"
            )
    names = [str(name) for name in archive["classes"].ravel()] if "classes" in archive else None
    data = assemble(
        archive.images("images"),
        path,
        reading,
        labels=lambda: archive["labels"],
        columns=archive,
        classes=names,
    )
    if "test_images" not in archive or "test_labels" not in archive:
        return data
    test = assemble(
        archive.images("test_images"),
        path,
        replace(reading.of_test_split(data.class_names), labels=None),
        labels=lambda: archive["test_labels"],
    )
    return replace(data, test=test)


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool


class Archive(Mapping[str, NDArray[Any]]):
    """The arrays of an `.npz` file, each read when asked for, none beyond what the file holds."""

    def __init__(self, path: Path) -> None:
        self._path = regular(path)
        try:
            self._file = zipfile.ZipFile(path)
        except DAMAGE as error:
            raise self._damaged(error) from None
        self._members = {
            info.filename.removesuffix(".npy"): info
            for info in self._file.infolist()
            if info.filename.endswith(".npy")
        }

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __contains__(self, key: object) -> bool:
        return key in self._members  # without reading it

    def __getitem__(self, key: str) -> NDArray[Any]:
        with self._opened(key) as (stream, header):
            flat = np.empty(math.prod(header.shape) * header.dtype.itemsize, np.uint8)
            read_exactly(f"{self._path}: {key}", stream, flat)
            values: NDArray[Any] = flat.view(header.dtype)
            if header.dtype.kind == "U":
                codes = flat.view(np.dtype("u4").newbyteorder(header.dtype.byteorder))
                if (codes > sys.maxunicode).any():  # what would read them ends in a crash
                    raise InvalidData(
                        f"{self._path}: {key} holds text that is none; write it again"
                    )
            if header.is_fortran:
                return values.reshape(header.shape[::-1]).T
            return values.reshape(header.shape)

    def images(self, key: str) -> NDArray[np.uint8]:
        """Read an array of images piece by piece, converting each to bytes."""
        with self._opened(key) as (stream, header):
            if header.is_fortran or len(header.shape) < 3:  # not laid out image by image
                whole = self[key]
                return pack_chunks(whole.shape, [whole])
            return pack_chunks(header.shape, self._pieces(key, stream, header))

    def _pieces(self, key: str, stream: IO[bytes], header: _Header) -> Iterator[NDArray[Any]]:
        one = math.prod(header.shape[1:]) * header.dtype.itemsize
        rows = max(1, CHUNK // max(1, one))
        for start in range(0, header.shape[0], rows):
            shape = (min(rows, header.shape[0] - start), *header.shape[1:])
            piece = np.empty(shape[0] * one, np.uint8)
            read_exactly(f"{self._path}: {key}", stream, piece)
            yield piece.view(header.dtype).reshape(shape)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[IO[bytes], _Header]]:
        """Open a member and read its header; refuse one that claims what it cannot hold."""
        member, name = self._members[key], f"{self._path}: {key}"
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InvalidData(f"{name} is compressed in an unusual way; write it with numpy.savez")
        try:
            with self._file.open(member) as stream:
                header = _header(stream)
                if header.dtype.kind not in PLAIN_KINDS:
                    raise InvalidData(
                        f"{name} holds Python objects or records, expected numbers or text"
                    )
                compressed = member.compress_type == zipfile.ZIP_DEFLATED
                shape = (*header.shape, header.dtype.itemsize)
                # The archive's table may lie about a member, but not about the whole file.
                packed = min(member.compress_size, self._path.stat().st_size)
                claimed_bytes(name, shape, packed, compressed=compressed)
                yield stream, header
        except DAMAGE as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> InvalidData:
        return InvalidData(
            f"{self._path} cannot be read as .npz ({one_line(error)}); expected a file written by "
            "numpy.savez without objects; write it again"
        )


def _header(stream: IO[bytes]) -> _Header:
    is_old = npy.read_magic(stream) == (1, 0)
    read = npy.read_array_header_1_0 if is_old else npy.read_array_header_2_0
    try:
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # it is parsed as Python, which fails in many ways
        raise ValueError(one_line(error)) from None
    return _Header(shape, dtype, is_fortran)
