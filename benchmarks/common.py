"""What every benchmark records beside its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"


def commit() -> str:
    """Name the commit that is measured; where there is no git, `UNDERSTUDY_COMMIT` says it."""
    if told := os.environ.get("UNDERSTUDY_COMMIT"):
        return told

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    dirty = git("status", "--porcelain", "--", "src")
    return git("rev-parse", "--short", "HEAD") + ("+changes" if dirty else "")


def device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
