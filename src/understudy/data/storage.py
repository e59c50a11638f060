"""Where decoded pixels live: in memory, or in an unnamed file mapped into it when they are many.

A header is a claim. Nothing is allocated for a claim that the file could not keep, and disk space
is taken before it is written to, so that neither a lying file nor a full disk ends in a crash.
"""

from __future__ import annotations

import io
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidData
from understudy.files import home, make_directory, storage_errors

IN_MEMORY = 256 * 2**20
"""Pixels beyond this many bytes are kept in a file that only this process can see."""
DEFLATE_RATIO = 1032
"""A deflate stream holds at most this many bytes per byte of its own."""
CHUNK = 2**22


def allocate(shape: Sequence[int]) -> NDArray[np.uint8]:
    """Return room for pixels, its content undefined."""
    size = math.prod(shape)
    if size <= IN_MEMORY:
        return np.empty(tuple(shape), np.uint8)
    directory = home() / "scratch"
    make_directory(directory, mode=0o700)
    # The file has no name: nobody else can open it, and it is gone when the process is.
    with storage_errors(directory), tempfile.TemporaryFile(dir=directory) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return np.asarray(np.memmap(file, np.uint8, "r+", shape=tuple(shape)))


def claimed_bytes(name: str, shape: Sequence[int], file_bytes: int, *, compressed: bool) -> int:
    """Return the bytes that a header claims, refusing more than a file of `file_bytes` can hold."""
    if 0 in shape:
        raise InvalidData(f"{name} is empty (shape {tuple(shape)}): the set holds no images")
    claimed = math.prod(shape)
    most = file_bytes * DEFLATE_RATIO if compressed else file_bytes
    if claimed > most:
        raise InvalidData(
            f"{name} says that it holds {claimed} bytes of data, but is {file_bytes} bytes long; "
            "it is damaged or was cut short; copy it again"
        )
    return claimed


def read_exactly(
    name: str, stream: IO[bytes] | io.BufferedIOBase, array: NDArray[np.uint8]
) -> None:
    """Fill `array`, a piece at a time; refuse a stream that ends early."""
    room = memoryview(array.reshape(-1))  # type: ignore[arg-type]
    done = 0
    while done < len(room):
        piece = stream.read(min(CHUNK, len(room) - done))
        if not piece:
            raise InvalidData(
                f"{name} ends after {done} of {len(room)} bytes of data; it is damaged or was cut "
                "short; copy it again"
            )
        room[done : done + len(piece)] = piece
        done += len(piece)


def regular(path: Path) -> Path:
    """Return `path`, refusing what is not a file: a pipe would be waited on for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InvalidData(f"{path} cannot be opened ({error.strerror}); check the path") from None
    if not stat.S_ISREG(mode):
        raise InvalidData(f"{path} is not a file; check the path")
    return path


def in_order(paths: Iterable[Path]) -> list[Path]:
    """Sort files by name, numbers in them as numbers: part_9 comes before part_10."""

    def key(path: Path) -> list[tuple[int, int | str]]:
        parts = re.split(r"([0-9]+)", path.as_posix())
        return [(1, int(part)) if part[0] in "0123456789" else (0, part) for part in parts if part]

    return sorted(paths, key=key)
