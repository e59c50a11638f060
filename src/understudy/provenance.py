"""What results carry beside them: device and commit of a figure, public inputs of a set."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

SOURCES = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class PublicInput:
    """Something public that a run used, as its certificate lists it."""

    kind: Literal["weights", "images", "released"]
    """What another run has released is public to all later ones."""
    name: str
    trained_on: str
    """The data set that the weights were trained on, or that the images are of."""
    sha256: str

    def to_json(self) -> dict[str, str]:
        """Return it as JSON values.

        >>> PublicInput(kind="weights", name="vgg16", trained_on="ImageNet", sha256="2e").to_json()
        {'kind': 'weights', 'name': 'vgg16', 'trained_on': 'ImageNet', 'sha256': '2e'}
        """
        return asdict(self)


def device_name() -> str:
    """Name what computes: the GPU if there is one, else the processor and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def commit() -> str:
    """Name the commit that is measured; where there is no git, `UNDERSTUDY_COMMIT` may say it."""
    if told := os.environ.get("UNDERSTUDY_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=SOURCES, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--", ".")
        return git("rev-parse", "--short", "HEAD") + ("+changes" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def peak_memory() -> float | None:
    """Return the most GPU memory that was reserved since `forget_peak_memory`, in GiB."""
    if not torch.cuda.is_available():
        return None
    return round(torch.cuda.max_memory_reserved() / 2**30, 2)


def forget_peak_memory() -> None:
    """Start a new measurement of GPU memory."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
