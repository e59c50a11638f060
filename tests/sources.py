"""Write small data sets in every format that we read."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from understudy.data.mosaic import PER_ROW


def pictures(count: int, *, side: int = 8, channels: int = 1, seed: int = 0) -> np.ndarray:
    """Return random images (n, h, w) or (n, h, w, 3)."""
    shape = (count, side, side) if channels == 1 else (count, side, side, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: np.ndarray, form: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format=form, **options)
    return buffer.getvalue()


def idx_bytes(array: np.ndarray) -> bytes:
    head = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray, *, packed=False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"images-idx{images.ndim}", images), ("labels-idx1", labels)):
        content = idx_bytes(array)
        path = folder / f"train-{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def write_packed_idx(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    return write_idx(folder, images, labels, packed=True)


def write_npz(folder: Path, images: np.ndarray, labels: np.ndarray, **more) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "set.npz", images=images, labels=labels, **more)
    return folder / "set.npz"


def write_folder(folder: Path, images: np.ndarray, labels: np.ndarray, form: str = "png") -> Path:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / str(label) / f"{number:04}.{form}"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(image, form.upper(), lossless=True))
    return folder


def write_listed(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = ["file,label"]
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        (folder / f"{number:04}.png").write_bytes(encoded(image))
        rows.append(f"{number:04}.png,{label}")
    (folder / "labels.csv").write_text("\n".join(rows))
    return folder


def write_parquet(folder: Path, images: np.ndarray, labels: np.ndarray, **more) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    folder.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": encoded(image), "path": None} for image in images]
    table = pa.table({"image": cells, "label": np.asarray(labels), **more})
    parquet.write_table(table, folder / "set.parquet")
    return folder / "set.parquet"


def write_cifar(folder: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    rows = np.concatenate([labels.astype(np.uint8)[:, None], pixels], axis=1)
    (folder / "data_batch_1.bin").write_bytes(rows.tobytes())
    return folder


def write_mosaic(folder: Path, images: np.ndarray, labels: np.ndarray, **more) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = -(-len(images) // PER_ROW)
    side = images.shape[1]
    tiles = np.zeros((rows * PER_ROW, *images.shape[1:]), np.uint8)
    tiles[: len(images)] = images
    grid = tiles.reshape(rows, PER_ROW, side, side, -1).transpose(0, 2, 1, 3, 4)
    sheet = grid.reshape(rows * side, PER_ROW * side, -1)
    sheet = sheet[..., 0] if sheet.shape[-1] == 1 else sheet
    (folder / "part_00.webp").write_bytes(
        encoded(np.repeat(sheet[..., None], 3, 2) if sheet.ndim == 2 else sheet, "WEBP",
                lossless=True)
    )  # fmt: skip
    np.savez(folder / "labels.npz", label=labels, **more)
    return folder


WRITERS: dict[str, tuple[Callable[[Path, np.ndarray, np.ndarray], Path], tuple[int, ...]]] = {
    "idx": (write_idx, (1, 3)),
    "idx.gz": (write_packed_idx, (1, 3)),
    "npz": (write_npz, (1, 3)),
    "class folders": (write_folder, (1, 3)),
    "labels.csv": (write_listed, (1, 3)),
    "parquet": (write_parquet, (1, 3)),
    "cifar": (write_cifar, (3,)),
    "mosaic": (write_mosaic, (3,)),
}
"""Each format with the channels it can hold."""


def png_claiming(width: int, height: int) -> bytes:
    """Return a tiny PNG file whose header claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


def parquet_claiming(folder: Path, rows: int) -> Path:
    """Write a parquet table of 300 rows whose footer claims another number."""

    def varint(number: int) -> bytes:
        number, result = number * 2, b""  # zigzag of a positive number
        while number > 127:
            result += bytes([number & 127 | 128])
            number >>= 7
        return result + bytes([number])

    path = write_parquet(folder, pictures(300, side=4), np.arange(300) % 2)
    content = path.read_bytes()
    (length,) = struct.unpack("<I", content[-8:-4])
    footer = content[-8 - length : -8]
    claim = footer.replace(b"\x16" + varint(300), b"\x16" + varint(rows), 1)
    assert claim != footer
    path.write_bytes(content[: -8 - length] + claim + struct.pack("<I", len(claim)) + b"PAR1")
    return path


def huggingface_names(path: Path, names: list[str]) -> None:
    """Add the names of classes to a parquet table as `datasets` does."""
    from pyarrow import parquet

    features = {"label": {"names": names, "_type": "ClassLabel"}}
    table = parquet.read_table(path)
    kept = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(table.replace_schema_metadata(kept), path)
