"""Runs that train a classifier, as small as they get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import understudy
from door import some_images
from understudy.job import Result

TINY = {"steps": 4, "batch": 60, "width": 4, "momentum": 0.9, "average": 0.8}


def train(
    folder: Path, name: str = "run", *, data: Any = None, settings: Any = (), **how: Any
) -> Result:
    """Train on noise; one ledger per folder."""
    how = {"epsilon": 8, "accountant": "renyi", "delta": 1e-3} | how
    return understudy.train_classifier(
        data or some_images(60, name="pets"), out=folder / name, ledger=folder / "ledger",
        device="cpu", settings=TINY | dict(settings), **how,
    )  # fmt: skip
