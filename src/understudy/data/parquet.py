"""Read parquet tables with a column of encoded images, as Hugging Face `datasets` writes them.

One file, or a folder of them: files whose names start with `test` are the test split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.data.decode import ImageFile, decode_images
from understudy.data.images import LabelledImages, labelled_images
from understudy.data.reading import Pointer, Reading
from understudy.data.storage import DEFLATE_RATIO, in_order, regular
from understudy.data.tables import units_at, values_at
from understudy.errors import InvalidData, installing
from understudy.files import parse_json
from understudy.progress import Progress
from understudy.text import one_line

ROWS_AT_ONCE = 64
IMAGE_COLUMNS = ("image", "img")


def is_parquet(path: Path) -> bool:
    """Whether `path` is a file or a folder of this format."""
    return bool(_tables(path)) if path.is_dir() else path.suffix == ".parquet"


def _tables(folder: Path) -> list[Path]:
    """Return the tables in a folder, but not those in hidden ones."""
    found = (path.relative_to(folder) for path in folder.rglob("*.parquet"))
    return in_order(
        folder / path for path in found if not any(p.startswith(".") for p in path.parts)
    )


def _is_of(split: tuple[str, ...], file: Path, root: Path) -> bool:
    """Whether a file, or a folder between it and `root`, is named after a split."""
    return file != root and any(p.startswith(split) for p in file.relative_to(root).parts)


def read_parquet(path: Path, reading: Reading, progress: Progress) -> LabelledImages:
    """Read and check a parquet table."""
    files = _tables(path) if path.is_dir() else [path]
    unused = [file for file in files if _is_of(("val", "dev"), file, path)]
    test = [file for file in files if _is_of(("test",), file, path) and file not in unused]
    train = [file for file in files if file not in test and file not in unused]
    if unused:
        progress.say(f"{path}: {len(unused)} files of a validation split are left unread")
    if not train:
        raise InvalidData(f"{path} holds no training table; expected names such as train-*.parquet")
    data = _read(train, path, reading, progress)
    if not test:
        return data
    how = reading.of_test_split(data.class_names)
    return replace(data, test=_read(test, path, how, progress))


def _read(
    files: Sequence[Path], source: Path, reading: Reading, progress: Progress
) -> LabelledImages:
    tables = [_Table.open(file) for file in files]
    names = [name for table in tables for name in table.image_names()]
    images = len(names) if None in names else [str(name) for name in names]
    label_at = reading.label_pointer() or Pointer("label", column="label")
    unit_at = reading.unit_pointer()
    columns = {
        str(at.column): [value for table in tables for value in table.values(str(at.column))]
        for at in (label_at, unit_at)
        if at and at.column and not at.file
    }
    labels = np.array(values_at(label_at, images, columns)[1])
    unit, units = units_at(unit_at, images, columns)
    for what, values in (("labels", labels), ("units", units)):
        if values is not None and len(values) != len(names):
            raise InvalidData(
                f"{source} holds {len(values)} {what} for {len(names)} images; it is damaged, get "
                "it again"
            )
    decoded = decode_images(
        (image for table in tables for image in table.images()), len(names), reading, progress
    )
    classes = reading.classes
    if classes is None and label_at.column:
        classes = tables[0].class_names(label_at.column)
    return labelled_images(
        decoded.images,
        labels[decoded.kept],
        units=np.array(units)[decoded.kept] if units is not None else None,
        unit=unit,
        classes=classes,
        name=source.resolve().stem,
        source=str(source.resolve()),
        reading=reading.from_anywhere(),
        skipped=decoded.skipped,
    )


@dataclass(frozen=True)
class _Table:
    """One parquet file, read a few rows at a time."""

    path: Path
    file: Any  # pyarrow.parquet.ParquetFile

    @classmethod
    def open(cls, path: Path) -> _Table:
        try:
            from pyarrow import parquet
        except ImportError:
            raise InvalidData(
                f"reading {path.name} needs pyarrow; {installing('parquet')}"
            ) from None
        size = regular(path).stat().st_size
        try:
            about = parquet.read_metadata(path)
            texts = [leaf.path for leaf in _leaves(about) if leaf.physical_type == "BYTE_ARRAY"]
            # As dictionaries: a text that a few bytes repeat a million times is kept once.
            file = parquet.ParquetFile(path, metadata=about, read_dictionary=texts)
        except Exception as error:  # pyarrow's errors have no common base of their own
            raise _damaged(path, error) from None
        groups = [about.row_group(n) for n in range(about.num_row_groups)]
        claimed = max(about.num_rows, sum(g.total_byte_size for g in groups) // DEFLATE_RATIO)
        # A row holds an encoded image, which no encoding brings below one byte.
        if claimed > size:
            raise InvalidData(
                f"{path} says that it holds {about.num_rows} images and unpacks to "
                f"{sum(g.total_byte_size for g in groups)} bytes, but is {size} bytes long; it is "
                "damaged; copy it again"
            )
        if about.num_rows == 0:
            raise InvalidData(f"{path} holds no rows; expected one per image")
        return cls(path, file)

    @property
    def rows(self) -> int:
        return int(self.file.metadata.num_rows)

    def values(self, name: str) -> list[Any]:
        """Return a column of numbers or text."""
        if name not in self.file.schema_arrow.names:
            raise InvalidData(
                f"{self.path} has no column '{name}' (found: "
                f"{', '.join(self.file.schema_arrow.names)}); name one with --labels or --unit"
            )
        return list(self._cells(name))

    def image_names(self) -> list[str | None]:
        """Return the path that each image came from, None where the table does not say."""
        column = self._image_column()
        if "path" not in self._fields(column):
            return [None] * self.rows
        return [str(path) if path else None for path in self._cells(column, "path")]

    def images(self) -> Iterator[ImageFile]:
        """Yield the encoded images."""
        column = self._image_column()
        field = "bytes" if "bytes" in self._fields(column) else None
        for row, content in enumerate(self._cells(column, field)):
            name = f"{self.path}, row {row}"
            yield ImageFile(name, content if isinstance(content, bytes) else b"")

    def class_names(self, column: str) -> list[str] | None:
        """Return the names that `datasets` keeps beside the schema, if there are any."""
        kept = (self.file.schema_arrow.metadata or {}).get(b"huggingface", b"")
        try:
            feature = parse_json(kept)["info"]["features"][column]
            return [str(name) for name in feature["names"]]
        except (TypeError, KeyError, ValueError, IndexError):
            return None

    def _image_column(self) -> str:
        names = self.file.schema_arrow.names
        found = [name for name in IMAGE_COLUMNS if name in names]
        if not found:
            raise InvalidData(
                f"{self.path} has no column '{IMAGE_COLUMNS[0]}' (found: {', '.join(names)}); "
                "rename the column of encoded images"
            )
        return found[0]

    def _fields(self, column: str) -> list[str]:
        """Return the names of the fields of a struct, none for other types."""
        kind = self.file.schema_arrow.field(column).type
        return [kind.field(n).name for n in range(kind.num_fields)]

    def _cells(self, column: str, field: str | None = None) -> Iterator[Any]:
        """Yield a column, or one field of a struct, cell by cell."""
        wanted = f"{column}.{field}" if field else column
        try:
            for batch in self.file.iter_batches(ROWS_AT_ONCE, columns=[wanted]):
                found = batch.column(0)
                yield from _listed(found.flatten()[0] if field else found)
        except InvalidData:
            raise
        except Exception as error:  # again anything at all
            raise _damaged(self.path, error) from None


def _listed(cells: Any) -> list[Any]:
    """Return an array as Python values; what a dictionary repeats is one object."""
    from pyarrow import types

    if types.is_dictionary(cells.type):
        values = cells.dictionary.to_pylist()
        return [None if place is None else values[place] for place in cells.indices.to_pylist()]
    if types.is_nested(cells.type):
        raise InvalidData(
            f"a column holds {cells.type}, expected one value in each cell; name another"
        )
    return list(cells.to_pylist())


def _leaves(about: Any) -> Iterator[Any]:
    return (about.schema.column(n) for n in range(about.num_columns))


def _damaged(path: Path, error: Exception) -> InvalidData:
    return InvalidData(f"{path} cannot be read as parquet ({one_line(error)}); copy it again")
