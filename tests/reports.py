"""Runs to report on: real ones, as small as they get, with every kind of measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import understudy
from understudy.job import Result
from understudy.runs import RunDirectory

CLASSES = ("<b>cat</b>", "dog & 'wolf'", "</script><script>alert(1)</script>")
QUANTILES = [0, 0.01, 0.05, 0.25, 0.5, 0.75, 1]


def make_run(
    folder: Path,
    name: str = "made",
    *,
    epsilon: float = 10,
    classes: tuple[str, ...] = CLASSES,
    data: str = 'pets "<i>"',
    images_per_class: int = 12,
) -> Result:
    """Make a run on noise; one ledger per folder."""
    rng = np.random.default_rng(0)
    count = 20 * len(classes)
    images = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
    records = understudy.labelled_images(
        images, np.arange(count) % len(classes), classes=classes, name=data
    )
    return understudy.synthesize(
        records,
        method="psg",
        out=folder / name,
        ledger=folder / "ledger.sqlite",
        epsilon=epsilon,
        accountant="renyi",
        settings={"rounds": 1, "outer": 1, "batches": 1, "images_per_class": images_per_class},
    )


def measure(path: Path, *, mean: float = 0.7, mark: str = "") -> None:
    """Record a measurement of each kind; `mark` goes into every text of it."""
    run = RunDirectory(path)
    classes = len(understudy.load(path).class_names)

    def record(section: str, **entry: Any) -> None:
        run.record(
            section,
            entry,
            key=("model", "trained_on", "features", "reference", "releases", "attack"),
        )

    for model, trained_on, value in (
        ("convnet", "synthetic", mean),
        ("mlp", "synthetic", mean - 0.1),
        ("convnet", "real", 0.97),
    ):
        confusion = np.full((classes, classes), 2) + np.eye(classes, dtype=int) * 20
        record(
            "utility", protocol="psg", model=f"{model}{mark}", trained_on=trained_on,
            tested_on=f"test set{mark}", test_images=60, train_images=36,
            accuracies=[value - 0.02, value + 0.02], mean=value, std=0.02,
            per_class=[value] * classes, confusion=confusion.tolist(), seconds=12.5,
            device=f"cpu{mark}", options={"epochs": 5, "note": mark},
        )  # fmt: skip
    record(
        "quality", features="inception", reference=f"test set{mark}", images=36,
        reference_images=60, fid=123.4, kid=0.05, kid_std=0.001, precision=0.5, recall=0.25,
        inception_score=None, inception_score_std=None,
    )  # fmt: skip
    record(
        "quality", features=f"convnet trained on pets{mark}", reference=f"test set{mark}",
        images=36, reference_images=60, frechet_distance=12.3, kid=0.05, kid_std=0.001,
        precision=0.5, recall=0.25, inception_score=2.5, inception_score_std=0.1,
    )  # fmt: skip
    record(
        "memorisation", reference=f"training records{mark}", quantiles=QUANTILES,
        synthetic=[1, 1.1, 1.2, 1.5, 2, 2.5, 3], held_out=[0.5, 0.6, 0.7, 1, 1.5, 2, 2.5],
        closer_than_held_out=0.0, nearest=[0, 5],
    )  # fmt: skip
    for releases in (1, 2, 3):
        record(
            "convergence", releases=releases, epsilon=2.0 * releases, protocol="psg",
            model=f"convnet{mark}", tested_on=f"test set{mark}", accuracies=[mean, mean],
            mean=mean * releases / 3, std=0.02,
        )  # fmt: skip
    for attack, bound in (("nearest released image", 0.4), ("loss of a classifier", 0.0)):
        record(
            "audit", subject=f"run{mark}", attack=f"{attack}{mark}", claimed=9.9, delta=1e-5,
            bound=bound, how=f"60 of 100 guesses right{mark}", repetitions=500, further={},
            tests={}, seconds=0.0, verdict=f"no violation found{mark}",
        )  # fmt: skip
    record("of_tomorrow", what=f"something new{mark}")
