"""The result: a labelled synthetic set, and a picture of it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from PIL import Image
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from understudy.errors import InvalidData
from understudy.files import parse_json, read_whole
from understudy.text import is_name, one_line

IMAGES_ARE = "`images` (float32, n x c x h x w, 0 black to 1 white)"
BYTES_ARE = "`images` (uint8, n x c x h x w, 0 black to 255 white)"
SOFT_LABELS_ARE = "`soft_labels` (float32, n x classes, probabilities)"
CHECKED_AT_ONCE = 4096
"""Images that are compared with whole bytes at a time."""
SHEET_TILE = 56
"""Side that small images are enlarged to on a contact sheet, in pixels."""
UNREADABLE = (
    AttributeError, KeyError, TypeError, ValueError, RuntimeError, IndexError, OverflowError,
    safetensors.SafetensorError,
)  # fmt: skip
"""What reading a garbled file may raise."""
SUM_TOLERANCE = 1e-3
"""How far the probabilities of an image's classes may be from adding up to 1."""


class Sampler(Protocol):
    """What can draw more images like those of a set."""

    def sample(
        self, count: int | None = None, *, seed: int, per_class: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw images and their labels."""

    def to_bytes(self) -> bytes:
        """Serialise."""


@dataclass(frozen=True, eq=False)
class SyntheticSet(Dataset[tuple[Tensor, int]]):
    """Hold synthetic images (n, c, h, w), float32, and their labels (n,), int64.

    Pixels are 0 for black and 1 for white. Methods that optimise pixels freely may go beyond;
    pictures show those as black or white. Labels are -1 where a method makes none.

    It is a `torch.utils.data.Dataset` of (image, label), so a `DataLoader` takes it as it is.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    soft_labels: Tensor | None = None
    """Probabilities of the classes (n, classes), float32, where a method makes them."""
    generator: Sampler | None = None
    """What drew the images, where a method trains such; it is saved beside the set, not in it."""

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1]:
            raise InvalidData(
                f"a synthetic set has images {tuple(self.images.shape)} and labels "
                f"{tuple(self.labels.shape)}, expected (n, c, h, w) and (n,)"
            )
        if self.soft_labels is not None:
            _check_probabilities(self.soft_labels, (len(self.labels), len(self.class_names)))

    @property
    def is_labelled(self) -> bool:
        """Whether every image has a label."""
        return bool((self.labels >= 0).all())

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def to_bytes(self) -> bytes:
        """Serialise as safetensors: pixels that are whole bytes as such, others as they are."""
        names = json.dumps(self.class_names)
        compact = whole_bytes(self.images)
        tensors = {"images": self.images if compact is None else compact, "labels": self.labels}
        if self.soft_labels is not None:
            tensors["soft_labels"] = self.soft_labels
        plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return save_tensors(plain, metadata={"class_names": names})

    @property
    def described(self) -> str:
        """Say what the set's file holds."""
        images = IMAGES_ARE if whole_bytes(self.images) is None else BYTES_ARE
        soft = f", {SOFT_LABELS_ARE}" if self.soft_labels is not None else ""
        return f"{images} and `labels` (int64){soft}"

    @classmethod
    def from_bytes(cls, content: bytes) -> SyntheticSet:
        """Read what `to_bytes` wrote, the same to the bit; not the generator."""
        tensors = load_tensors(content)
        names = parse_json(metadata(content)["class_names"])
        images, labels = tensors["images"], tensors["labels"]
        _check_content(images, labels, names)
        if images.dtype == torch.uint8:
            images = from_whole_bytes(images)
        return cls(images, labels, tuple(names), tensors.get("soft_labels"))

    @classmethod
    def load(cls, path: Path) -> SyntheticSet:
        """Read a file of what `to_bytes` wrote."""
        try:
            return cls.from_bytes(read_whole(path))
        except (OSError, *UNREADABLE) as error:
            raise InvalidData(
                f"{path} cannot be read as a synthetic set ({one_line(error)}); expected a file "
                "written by understudy; verify the directory"
            ) from error

    @staticmethod
    def count(path: Path) -> int:
        """Return how many images a file holds, without reading them."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return int(file.get_slice("labels").get_shape()[0])
        except (OSError, *UNREADABLE) as error:
            raise InvalidData(
                f"{path} cannot be read as a synthetic set ({one_line(error)})"
            ) from error

    def contact_sheet(self, *, per_class: int = 10) -> bytes:
        """Draw up to `per_class` images of each class, one row per class, as PNG.

        They are taken from all over the set: its first images may be of one kind. Of a set without
        labels, some rows of images.
        """
        side = max(self.images.shape[2:])
        zoom = max(1, math.ceil(SHEET_TILE / side))
        groups = [self.images[self.labels == n] for n in range(len(self.class_names))]
        if not self.is_labelled:  # as many rows as there are columns
            groups = list(torch.split(self.images[: per_class**2], per_class))
        rows = []
        for group in groups:
            count = min(per_class, len(group))
            of_class = group[torch.arange(count) * len(group) // max(1, count)]
            blank = torch.ones(per_class - len(of_class), *self.images.shape[1:])
            rows.append(torch.cat([of_class.cpu(), blank]))
        tiles = torch.stack(rows)  # (classes, per_class, c, h, w)
        tiles = tiles.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
        tiles = functional.pad(tiles, (2, 2, 2, 2), value=1.0)
        classes, columns, channels, height, width = tiles.shape
        sheet = tiles.permute(2, 0, 3, 1, 4).reshape(channels, classes * height, columns * width)
        return png(sheet)

    def picture(self, index: int) -> bytes:
        """Draw one image as PNG, a pixel for a pixel."""
        return png(self.images[index])


def join(sets: Sequence[SyntheticSet]) -> SyntheticSet:
    """Put sets together by the names of their classes, which come in order of appearance.

    >>> blank = torch.zeros(2, 1, 4, 4)
    >>> both = join([SyntheticSet(blank, torch.arange(2), names) for names in ("ab", "cb")])
    >>> both.class_names, both.labels.tolist()
    (('a', 'b', 'c'), [0, 1, 2, 1])
    """
    names = tuple(dict.fromkeys(name for one in sets for name in one.class_names))
    labels, soft = [], []
    for one in sets:
        places = torch.tensor([names.index(name) for name in one.class_names])
        known = one.labels >= 0
        labels.append(torch.where(known, places[one.labels.clamp(min=0)], one.labels))
        shares = torch.zeros(len(one), len(names))
        if one.soft_labels is not None:
            shares[:, places] = one.soft_labels
        else:
            shares[known] = functional.one_hot(labels[-1][known], len(names)).float()
        soft.append(shares)
    has_soft = any(one.soft_labels is not None for one in sets)
    images = torch.cat([one.images for one in sets])
    return SyntheticSet(images, torch.cat(labels), names, torch.cat(soft) if has_soft else None)


def whole_bytes(images: Tensor) -> Tensor | None:
    """Return images as bytes, None if that would lose a bit of any pixel."""
    if images.dtype != torch.float32:
        return None
    parts = []
    # On the CPU: a GPU multiplies by 1/255, which is not the same as a division.
    for part in torch.split(images.cpu().contiguous(), CHECKED_AT_ONCE):
        compact = (part * 255).round().clamp(0, 255).nan_to_num().byte()
        # As integers: a negative zero equals zero, but is not the same.
        if not torch.equal(from_whole_bytes(compact).view(torch.int32), part.view(torch.int32)):
            return None
        parts.append(compact)
    return torch.cat(parts)


def from_whole_bytes(pixels: Tensor) -> Tensor:
    """Bring bytes to [0, 1], float32.

    >>> whole_bytes(from_whole_bytes(torch.tensor([0, 1, 254, 255], dtype=torch.uint8))).tolist()
    [0, 1, 254, 255]
    """
    return pixels.float() / 255


def metadata(content: bytes) -> dict[str, Any]:
    """Return the text that stands in the header of safetensors."""
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = parse_json(content[8 : 8 + length])["__metadata__"]
    return header


def png(image: Tensor) -> bytes:
    """Encode an image (c, h, w), 0 black to 1 white."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _check_content(images: Tensor, labels: Tensor, names: Any) -> None:
    """Refuse what no set of ours holds: pictures, folders and pages are made of it."""
    if images.dtype not in (torch.uint8, torch.float32) or labels.dtype != torch.int64:
        raise ValueError(f"images of type {images.dtype}, labels of type {labels.dtype}")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[1:]:
        raise ValueError(f"images of shape {tuple(images.shape)}")
    if not isinstance(names, list) or not names or len(set(map(str, names))) < len(names):
        raise ValueError("no names of classes, or one of them twice")
    if not all(map(is_name, names)):
        raise ValueError("a class whose name cannot be printed")
    if not bool(((labels >= -1) & (labels < len(names))).all()):
        raise ValueError(f"labels beyond the {len(names)} classes")


def _check_probabilities(given: Tensor, expected: tuple[int, int]) -> None:
    if given.shape != expected or not given.is_floating_point():
        raise InvalidData(
            f"soft labels have shape {tuple(given.shape)} and type {given.dtype}, expected "
            f"{expected} and a float type, one probability for each image and class"
        )
    if not bool(((given >= 0) & ((given.sum(1, keepdim=True) - 1).abs() < SUM_TOLERANCE)).all()):
        raise InvalidData(
            "soft labels are negative, not numbers, or do not add up to 1 for each image; expected "
            "probabilities, such as the output of a softmax"
        )
