"""Image files become arrays of one shape: decoded in parallel, one at a time per worker."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from understudy.data.images import check_side
from understudy.data.reading import Reading, printable
from understudy.data.storage import allocate, regular
from understudy.errors import InvalidData
from understudy.progress import Progress

FORMATS = ("PNG", "JPEG", "WEBP")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp")
MAX_PIXELS = 2**26
"""An image that claims more than 64 million pixels is not decoded: it may be a bomb."""
WORKERS = min(16, os.cpu_count() or 1)
LARGE = 2**14
"""Files of more bytes are decoded in parallel."""
PER_TASK = 16
"""Images that a worker decodes before it reports: small ones take less time than a report."""


@dataclass(frozen=True)
class ImageFile:
    """An image yet to be decoded: a path, or the bytes of a file."""

    name: str
    content: Path | bytes

    @property
    def is_large(self) -> bool:
        """Whether decoding takes longer than starting to decode."""
        if isinstance(self.content, bytes):
            return len(self.content) > LARGE
        return self.content.is_file() and self.content.stat().st_size > LARGE


@dataclass(frozen=True)
class Decoded:
    """What was decoded: images (n, c, h, w), the positions they came from, and what was skipped."""

    images: NDArray[np.uint8]
    kept: NDArray[np.int64]
    skipped: tuple[str, ...]


def decode_images(
    files: Iterable[ImageFile], count: int, reading: Reading, progress: Progress
) -> Decoded:
    """Decode `count` files to one array, in order.

    All must have the size and the channels of the first, unless `reading` sets them.
    """
    kept: list[int] = []
    skipped: list[str] = []
    pixels = np.empty((0, 1, 1, 1), np.uint8)
    model = ""  # the image that the others must be like
    for position, file, found in _in_order(files, count, reading, progress):
        if isinstance(found, str):
            if not reading.skip_bad:
                raise InvalidData(
                    f"{printable(file.name)} cannot be read as PNG, JPEG or WebP ({found}); repair "
                    "or remove it, or pass --skip-bad to leave out such files"
                )
            skipped.append(printable(file.name))
            continue
        if not model:
            check_side(*found.shape[1:])
            pixels, model = allocate((count, *found.shape)), file.name
        elif found.shape != pixels.shape[1:]:
            raise _mixed(file.name, found.shape, model, pixels.shape[1:])
        pixels[len(kept)] = found
        kept.append(position)
    if not kept:
        raise InvalidData(f"none of the {count} images can be read; expected PNG, JPEG or WebP")
    return Decoded(pixels[: len(kept)], np.array(kept), tuple(skipped))


def _in_order(
    files: Iterable[ImageFile], count: int, reading: Reading, progress: Progress
) -> Iterator[tuple[int, ImageFile, NDArray[np.uint8] | str]]:
    remaining, done = islice(files, count), 0
    size, channels = reading.target_size(), reading.channels

    def decoded(task: Sequence[ImageFile]) -> list[NDArray[np.uint8] | str]:
        return [decode_or_explain(file, size, channels) for file in task]

    at_once = PER_TASK * WORKERS
    with ThreadPoolExecutor(WORKERS) as pool:
        for _ in progress.steps(range(-(-count // at_once)), what="reading images"):
            some = list(islice(remaining, at_once))
            tasks = [some[start : start + PER_TASK] for start in range(0, len(some), PER_TASK)]
            # Decoding a small file is mostly Python: threads would only wait for one another.
            each = pool.map if any(file.is_large for file in some[:PER_TASK]) else map
            for file, found in zip(some, chain(*each(decoded, tasks)), strict=True):
                yield done, file, found
                done += 1


def _mixed(name: str, shape: tuple[int, ...], model: str, expected: tuple[int, ...]) -> InvalidData:
    if shape[0] != expected[0]:
        colours = {1: "grey", 3: "in colour"}
        return InvalidData(
            f"{name} is {colours[shape[0]]}, but {model} is {colours[expected[0]]}; expected one "
            "kind; pass --channels 1 for grey or --channels 3 for colour"
        )
    return InvalidData(
        f"{name} is {shape[1]} x {shape[2]} pixels, but {model} is {expected[1]} x {expected[2]}; "
        "expected one size; pass --size, such as --size 32, to bring all images to one"
    )


def decode_or_explain(
    file: ImageFile, size: tuple[int, int] | None, channels: int | None
) -> NDArray[np.uint8] | str:
    """Return the decoded image, or why it cannot be decoded."""
    try:
        return decode_image(file.content, size, channels)
    except InvalidData as error:
        return str(error)
    except Exception as error:  # what a decoder raises on a damaged file is anything at all
        text = str(error) or type(error).__name__
        return text.splitlines()[0] if "BytesIO" not in text else "not an image"


def decode_image(
    content: Path | bytes, size: tuple[int, int] | None, channels: int | None
) -> NDArray[np.uint8]:
    """Decode one image to (c, h, w): upright, converted and resized if asked for."""
    source: Any = io.BytesIO(content) if isinstance(content, bytes) else regular(content)
    with Image.open(source, formats=FORMATS) as image:
        if image.width * image.height > MAX_PIXELS:
            raise InvalidData(
                f"it claims {image.width} x {image.height} pixels, more than {MAX_PIXELS}"
            )
        if size:
            image.draft(None, (max(size), max(size)))  # JPEG: decode no larger than needed
        return as_array(ImageOps.exif_transpose(image), size, channels)


def as_array(
    image: Image.Image, size: tuple[int, int] | None, channels: int | None
) -> NDArray[np.uint8]:
    """Convert a loaded image to (c, h, w)."""
    if image.mode.startswith("I"):  # 16 bits: keep the upper 8
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype("u1"))
    is_grey = image.mode in ("1", "L", "LA") if channels is None else channels == 1
    mode = "L" if is_grey else "RGB"
    if image.mode != mode:
        image = image.convert(mode)
    if size and size != (image.height, image.width):
        image = ImageOps.fit(image, (size[1], size[0]), Image.Resampling.BICUBIC)
    pixels = np.asarray(image)
    return cast(NDArray[np.uint8], pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def converted(images: NDArray[np.uint8], reading: Reading) -> NDArray[np.uint8]:
    """Bring images (n, c, h, w) that were arrays already to the size and channels asked for."""
    size = reading.target_size() or images.shape[2:]
    channels = reading.channels or images.shape[1]
    wanted = (channels, *size)
    if images.shape[1:] == wanted:
        return images
    check_side(*size)
    result = allocate((len(images), *wanted))
    for position, image in enumerate(images):
        picture = Image.fromarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0).copy())
        result[position] = as_array(picture, (size[0], size[1]), channels)
    return result
