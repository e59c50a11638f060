"""The result: a labelled synthetic set, and a picture of it."""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import safetensors
import torch
from PIL import Image
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.utils.data import Dataset

from understudy.errors import InvalidData

IMAGES_ARE = "`images` (float32, n x c x h x w, 0 black to 1 white)"
SHEET_TILE = 56
"""Side that small images are enlarged to on a contact sheet, in pixels."""


@dataclass(frozen=True, eq=False)
class SyntheticSet(Dataset[tuple[Tensor, int]]):
    """Hold synthetic images (n, c, h, w), float32, and their labels (n,), int64.

    Pixels are 0 for black and 1 for white. Methods that optimise pixels freely may go beyond;
    pictures show those as black or white.

    It is a `torch.utils.data.Dataset` of (image, label), so a `DataLoader` takes it as it is.
    """

    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.labels.shape != self.images.shape[:1]:
            raise InvalidData(
                f"a synthetic set has images {tuple(self.images.shape)} and labels "
                f"{tuple(self.labels.shape)}, expected (n, c, h, w) and (n,)"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def to_bytes(self) -> bytes:
        """Serialise as safetensors."""
        names = json.dumps(self.class_names)
        return save_tensors(
            {"images": self.images.contiguous(), "labels": self.labels.contiguous()},
            metadata={"class_names": names},
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> SyntheticSet:
        """Read what `to_bytes` wrote."""
        tensors = load_tensors(content)
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])["__metadata__"]
        return cls(
            tensors["images"], tensors["labels"], tuple(map(str, json.loads(header["class_names"])))
        )

    @classmethod
    def load(cls, path: Path) -> SyntheticSet:
        """Read a file of what `to_bytes` wrote."""
        try:
            return cls.from_bytes(path.read_bytes())
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            raise InvalidData(
                f"{path} cannot be read as a synthetic set ({error}); expected a file written by "
                "understudy; verify the directory"
            ) from error

    @staticmethod
    def count(path: Path) -> int:
        """Return how many images a file holds, without reading them."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return int(file.get_slice("labels").get_shape()[0])
        except (OSError, safetensors.SafetensorError) as error:
            raise InvalidData(f"{path} cannot be read as a synthetic set ({error})") from error

    def contact_sheet(self, *, per_class: int = 10) -> bytes:
        """Draw up to `per_class` images of each class, one row per class, as PNG."""
        side = max(self.images.shape[2:])
        zoom = max(1, math.ceil(SHEET_TILE / side))
        rows = []
        for label in range(len(self.class_names)):
            of_class = self.images[self.labels == label][:per_class]
            blank = torch.ones(per_class - len(of_class), *self.images.shape[1:])
            rows.append(torch.cat([of_class.cpu(), blank]))
        tiles = torch.stack(rows)  # (classes, per_class, c, h, w)
        tiles = tiles.repeat_interleave(zoom, 3).repeat_interleave(zoom, 4)
        tiles = torch.nn.functional.pad(tiles, (2, 2, 2, 2), value=1.0)
        classes, columns, channels, height, width = tiles.shape
        sheet = tiles.permute(2, 0, 3, 1, 4).reshape(channels, classes * height, columns * width)
        return png(sheet)

    def picture(self, index: int) -> bytes:
        """Draw one image as PNG, a pixel for a pixel."""
        return png(self.images[index])


def png(image: Tensor) -> bytes:
    """Encode an image (c, h, w), 0 black to 1 white."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
