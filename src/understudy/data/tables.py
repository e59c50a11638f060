"""Values of images from elsewhere: a CSV file, or the names of the folders they lie in."""

from __future__ import annotations

import csv
import datetime
import io
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from understudy.data.reading import Pointer, printable
from understudy.data.storage import regular
from understudy.errors import InvalidData
from understudy.text import LONGEST_NAME, is_name

FILE_COLUMNS = ("file", "filename", "file_name", "image", "path")


@dataclass(frozen=True)
class Table:
    """A CSV file with a header; one row per image."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a CSV file (UTF-8, comma or semicolon)."""
        try:
            text = regular(path).read_text(encoding="utf-8-sig")
        except OSError as error:
            raise InvalidData(f"{path} cannot be read ({error.strerror}); check the path") from None
        except UnicodeDecodeError:
            raise InvalidData(
                f"{path} is not a text file in UTF-8; save it as CSV (UTF-8)"
            ) from None
        first = text.partition("\n")[0]
        try:
            delimiter = ";" if ";" in first and "," not in first else ","
            rows = [
                [cell.strip() for cell in row]
                for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
                if any(row)
            ]
        except csv.Error as error:
            raise InvalidData(f"{path} is not a CSV file ({error}); save it again") from None
        if rows and len(set(rows[0])) < len(rows[0]):
            raise InvalidData(f"the header of {path} names a column twice; rename one")
        if len(rows) < 2:
            raise InvalidData(f"{path} holds no rows below its header; expected one per image")
        for number, row in enumerate(rows, start=1):
            if len(row) != len(rows[0]):
                raise InvalidData(
                    f"row {number} of {path} has {len(row)} cells, the header {len(rows[0])}; "
                    "expected the same; correct that row"
                )
        return cls(path, tuple(rows[0]), rows[1:])

    @property
    def file_column(self) -> str | None:
        """Return the column that names the images."""
        return next((c for c in self.columns if c.lower() in FILE_COLUMNS), None)

    def column(self, name: str) -> list[str]:
        """Return the cells of a column."""
        if name not in self.columns:
            raise InvalidData(
                f"{self.path} has no column '{name}' (found: {', '.join(self.columns)}); name one"
            )
        position = self.columns.index(name)
        return [row[position] for row in self.rows]

    def files(self) -> list[str]:
        """Return the names of the images, each of which may occur once."""
        column = self.file_column
        if column is None:
            raise InvalidData(
                f"{self.path} has no column for the images (found: {', '.join(self.columns)}); "
                f"call it one of {', '.join(FILE_COLUMNS)}"
            )
        names = [str(PurePosixPath(cell.replace("\\", "/"))) for cell in self.column(column)]
        seen: dict[str, int] = {}
        for row, name in enumerate(names, start=2):
            if name in seen:
                raise InvalidData(
                    f"{self.path} names {name} twice, in rows {seen[name]} and {row}; an image "
                    "belongs to one unit and has one label; remove one row"
                )
            seen[name] = row
        return names

    def value_column(self, wanted: str | None) -> str:
        """Return `wanted`, or the only column that does not name the images."""
        if wanted is not None:
            return wanted
        others = [c for c in self.columns if c != self.file_column]
        if len(others) != 1:
            raise InvalidData(
                f"{self.path} has the columns {', '.join(self.columns)}; say which one to use: "
                f"{self.path.name}:COLUMN"
            )
        return others[0]


def values_at(
    pointer: Pointer, images: Sequence[str] | int, columns: Mapping[str, Any]
) -> tuple[str, Any]:
    """Look up a value (label or unit) of each image.

    Args:
        pointer: where the values are written.
        images: names of the images, relative to their folder; or their number, for sources whose
            images have no names.
        columns: columns or arrays that the source itself has.

    Returns:
        What the values are called, and one value per image.
    """
    name, values = _look_up(pointer, images, columns)
    cells = _cells(name, values)
    plain = [_plain(cell) for cell in cells]
    for position, value in enumerate(plain):
        if value is None:
            image = f"image {position}" if isinstance(images, int) else printable(images[position])
            raise InvalidData(
                f"{image} has no usable '{name}' (found {cells[position]!r:.60}), expected up "
                f"to {LONGEST_NAME} characters or a whole number; fill it in, or remove the image"
            )
    numbers_only = all(isinstance(value, int) for value in plain)
    return name, plain if numbers_only else [str(value) for value in plain]


def units_at(
    pointer: Pointer | None, images: Sequence[str] | int, columns: Mapping[str, Any]
) -> tuple[str | None, list[str] | None]:
    """Look up what a unit is called, and the unit of each image; (None, None) for no pointer."""
    if pointer is None:
        return None, None
    name, values = values_at(pointer, images, columns)
    return name, [str(value) for value in values]


def _cells(name: str, values: Any) -> list[object]:
    if isinstance(values, list):
        return values
    if values.ndim != 1:
        raise InvalidData(f"'{name}' has {values.ndim} dimensions, expected one value per image")
    dates = values.dtype.kind == "M"
    cells: list[object] = values.astype("U").tolist() if dates else values.tolist()
    return [None if dates and cell == "NaT" else cell for cell in cells]


def _plain(value: object) -> int | str | None:
    """Return a value as text or a whole number, None if it is missing or something else.

    What means the same must be the same, or one unit would count as two: `p1` and `p1 `, 7 and 7.0.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        text = value.strip()
        return text if is_name(text) else None
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, datetime.date | uuid.UUID):
        return str(value)
    return None


def _look_up(
    pointer: Pointer, images: Sequence[str] | int, columns: Mapping[str, Any]
) -> tuple[str, Any]:
    if pointer.file is not None:
        return _csv_values(pointer, pointer.file, images)
    if pointer.level is not None:
        return str(pointer.name), _folder_values(pointer.level, images)
    column = str(pointer.column)
    if column not in columns:
        found = ", ".join(sorted(columns)) or "none"
        raise InvalidData(
            f"there is no column or array '{column}' to take values from (found: {found}); "
            "name one of them, a CSV file or folder:1"
        )
    return str(pointer.name), columns[column]


def _csv_values(pointer: Pointer, path: Path, images: Sequence[str] | int) -> tuple[str, list[str]]:
    table = Table.read(path)
    column = table.value_column(pointer.column)
    values, name = table.column(column), pointer.name or column
    if isinstance(images, int):  # no names: rows are in the order of the images
        if table.file_column is not None:
            raise InvalidData(
                f"{path} names images in its column '{table.file_column}', but the images of this "
                "source have no names; give one row per image, in their order, without that column"
            )
        if len(values) != images:
            raise InvalidData(
                f"{path} has {len(values)} rows, the set {images} images; expected one row per "
                "image, in the same order"
            )
        return name, values
    by_file = dict(zip(table.files(), values, strict=True))
    if missing := [image for image in images if image not in by_file]:
        raise InvalidData(
            f"{path} has no row for {len(missing)} of {len(images)} images, the first "
            f"{missing[0]}; expected one row per image"
        )
    return name, [by_file[image] for image in images]


def _folder_values(level: int, images: Sequence[str] | int) -> list[str]:
    """Return the name of the folder at `level` (1 is the outermost) of each image."""
    if isinstance(images, int):
        raise InvalidData(
            f"folder:{level} needs images in folders; name a column, an array or a CSV file"
        )
    values = []
    for image in images:
        folders = PurePosixPath(image).parts[:-1]
        if len(folders) < level:
            raise InvalidData(
                f"{image} lies {len(folders)} folders deep, so it has no folder:{level}; expected "
                "that level above every image"
            )
        values.append(folders[level - 1])
    return values
