"""How a source is to be read: what the user says about it beside its path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from understudy.errors import InvalidSettings

RECORD = "record"
MIN_SIDE, MAX_SIDE = 4, 1024
_CSV = re.compile(r"(?P<file>.+\.csv)(?::(?P<column>.+))?", re.IGNORECASE)
_LEVEL = re.compile(r"folder:(?P<level>[1-9])")
_SIZE = re.compile(r"([0-9]{1,5})(?:x([0-9]{1,5}))?")


def printable(name: str) -> str:
    """Return a file's name as text that can be printed and stored: names need not be UTF-8."""
    return name.encode("utf-8", "backslashreplace").decode()


def found_file(path: Path, root: Path | None) -> Path:
    """Return a file named from here, or else from the folder of the images."""
    return root / path if root and not path.is_file() and (root / path).is_file() else path


@dataclass(frozen=True)
class Pointer:
    """Where a value of each image is written: a column or array, a CSV file, a folder's name.

    >>> Pointer.parse("patient")
    Pointer(name='patient', column='patient', file=None, level=None)
    >>> Pointer.parse("patients.csv:person").column
    'person'
    >>> Pointer.parse("patient=folder:2")
    Pointer(name='patient', column=None, file=None, level=2)
    """

    name: str | None
    """What a unit is called in the certificate; None for the column of a CSV file not read yet."""
    column: str | None = None
    file: Path | None = None
    level: int | None = None

    @classmethod
    def parse(cls, text: str) -> Pointer:
        """Read `NAME`, `FILE.csv`, `FILE.csv:COLUMN` or `folder:LEVEL`, each also as `NAME=...`."""
        name, equals, where = text.partition("=")
        if not equals or "/" in name:  # a path may hold that sign too
            name, where = "", text
        if match := _LEVEL.fullmatch(where):
            return cls(name or "folder", level=int(match["level"]))
        if match := _CSV.fullmatch(where):
            return cls(name or match["column"], column=match["column"], file=Path(match["file"]))
        if not where:
            raise InvalidSettings(
                f"'{text}' names nothing; expected a column, FILE.csv, FILE.csv:COLUMN or folder:1"
            )
        return cls(name or where, column=where)

    def __str__(self) -> str:
        if self.level:
            return f"{self.name}=folder:{self.level}"
        if self.file:
            prefix = f"{self.name}=" if self.name not in (None, self.column) else ""
            return f"{prefix}{self.file}" + (f":{self.column}" if self.column else "")
        return str(self.column) if self.name == self.column else f"{self.name}={self.column}"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How to read a source."""

    unit: str = RECORD
    """Unit of privacy: `record`; or where each image's unit is written: a column (of a table, of
    labels.csv) or array, `FILE.csv`, `FILE.csv:COLUMN`, `folder:2`; `patient=folder:2` names it."""
    labels: str | None = None
    """Where labels are written, likewise; by default class folders, labels.csv or `label`."""
    classes: int | Sequence[str] | None = None
    """Number of classes, or their names in order, also as one text with commas; by default what the
    labels show."""
    only: Sequence[str] | None = None
    """Records of these classes alone, also as one text with commas: what one of several parties has
    (docs/continual.md); by default all."""
    size: str | int | None = None
    """Scale and crop each image to this size: 32, or HEIGHTxWIDTH."""
    channels: Literal[1, 3] | None = None
    """Convert each image to grey (1) or colour (3); by default as the images are."""
    skip_bad: bool = False
    """Leave out images that cannot be read, and record which."""
    like: str | None = None
    """Known set, such as mnist, whose normalisation constants and class names to use."""
    data_dir: Path | None = None
    """Folder in which to look for known sets before fetching them (also: UNDERSTUDY_DATA)."""

    def __post_init__(self) -> None:
        self.target_size()
        if isinstance(self.classes, Sequence) and len(self.classes) == 1:  # never a list of one
            names = tuple(name.strip() for name in self.classes[0].split(","))
            object.__setattr__(self, "classes", names)
        if self.channels not in (None, 1, 3):
            raise InvalidSettings(f"channels is {self.channels}, expected 1 (grey) or 3 (colour)")

    def target_size(self) -> tuple[int, int] | None:
        """Return (height, width), or None to keep images as they are.

        >>> Reading(size="48x64").target_size()
        (48, 64)
        """
        if self.size is None:
            return None
        match = _SIZE.fullmatch(str(self.size))
        if match is None:
            raise InvalidSettings(
                f"size is '{self.size}', expected one number (32) or HEIGHTxWIDTH (48x64)"
            )
        height, width = int(match[1]), int(match[2] or match[1])
        if min(height, width) < MIN_SIDE or max(height, width) > MAX_SIDE:
            raise InvalidSettings(
                f"size is {self.size}, expected sides of {MIN_SIDE} to {MAX_SIDE} pixels"
            )
        return height, width

    def unit_pointer(self) -> Pointer | None:
        """Return where units are written, or None if each record is its own."""
        return None if self.unit == RECORD else Pointer.parse(self.unit)

    def label_pointer(self) -> Pointer | None:
        """Return where labels are written, if the user said so."""
        return None if self.labels is None else Pointer.parse(self.labels)

    def of_test_split(self, classes: Sequence[str], *, by_name: bool = False) -> Reading:
        """Return how to read the test split of the same source: its units do not matter.

        A CSV file of labels goes with it only if it names images; else its rows are of the others.
        """
        pointer = self.label_pointer()
        own = pointer is not None and pointer.file is not None and not by_name
        return replace(
            self, unit=RECORD, classes=tuple(classes), labels=None if own else self.labels
        )

    def from_anywhere(self, root: Path | None = None) -> Reading:
        """Return the same with absolute paths, to be written down."""

        def absolute(text: str | None) -> str | None:
            pointer = Pointer.parse(text) if text else None
            if pointer is None or pointer.file is None:
                return text
            return str(replace(pointer, file=found_file(pointer.file, root).resolve()))

        return replace(
            self, unit=absolute(self.unit) or RECORD, labels=absolute(self.labels), data_dir=None
        )
