"""Sets that are kept on the way, and the epsilon that they cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import understudy
from understudy.data.images import labelled_images
from understudy.errors import InvalidData, InvalidSettings
from understudy.privacy.certificate import epsilon_after
from understudy.runs import RunDirectory
from understudy.synthetic import SyntheticSet

SETTINGS = {
    "rounds": 4, "outer": 2, "batches": 1, "inner": 1, "batch": 20, "width": 2,
    "images_per_class": 1,
}  # fmt: skip


def some_data():
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    return labelled_images(images, np.arange(60) % 3)


def a_run(tmp_path, **more):
    return understudy.synthesize(
        some_data(), method="psg", epsilon=8, delta=1e-3, accountant="renyi", settings=SETTINGS,
        out=tmp_path / "run", ledger=tmp_path / "ledger", **more,
    )  # fmt: skip


def test_snapshots_are_kept_evenly_and_cost_less_than_the_whole(tmp_path):
    result = a_run(tmp_path, snapshots=4)
    kept = RunDirectory(result.directory).snapshots()
    assert [made for made, _ in kept] == [{"gradient": n} for n in (2, 4, 6, 8)]
    assert (result.directory / "private" / "snapshots").stat().st_mode & 0o077 == 0
    epsilons = [epsilon_after(result.certificate, made) for made, _ in kept]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] > 1
    assert epsilons[-1] == pytest.approx(result.certificate.epsilon, abs=1e-3)
    sets = [SyntheticSet.load(file) for _, file in kept]
    assert torch.equal(sets[-1].images, result.images)
    assert not torch.equal(sets[0].images, sets[1].images)
    assert epsilon_after(result.certificate, {}) == 0


def test_without_asking_nothing_is_kept(tmp_path):
    run = RunDirectory(a_run(tmp_path).directory)
    assert run.snapshots() == []
    (call,) = run.cost()
    assert call["seconds"] > 0
    assert call["device"]


def test_convergence_is_accuracy_against_the_epsilon_spent(tmp_path):
    data = some_data()
    result = a_run(tmp_path, snapshots=2)
    quick = {
        "test": data,
        "ledger": tmp_path / "ledger",
        "models": ["convnet"],
        "epochs": 1,
        "width": 2,
        "seeds": 2,
    }
    points = understudy.measure_convergence(result.directory, **quick)
    assert [point["releases"] for point in points] == [4, 8]
    assert points[0]["epsilon"] < points[1]["epsilon"] <= 8
    assert [len(point["accuracies"]) for point in points] == [2, 2]
    understudy.measure_convergence(result.directory, **quick)
    kept = RunDirectory(result.directory).metrics()["convergence"]
    assert [point["releases"] for point in kept] == [4, 8]


def test_a_run_without_snapshots_has_no_way_to_show(tmp_path):
    result = a_run(tmp_path)
    with pytest.raises(InvalidData, match="make a run with --snapshots"):
        understudy.measure_convergence(result.directory, test=some_data())


def test_less_than_no_snapshots_are_refused(tmp_path):
    with pytest.raises(InvalidSettings, match="snapshots is -1"):
        a_run(tmp_path, snapshots=-1)
