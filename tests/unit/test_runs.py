"""What a run directory keeps of measurements on real records."""

from __future__ import annotations

import json

import pytest

from understudy.errors import InvalidData
from understudy.runs import RunDirectory


@pytest.fixture
def run(tmp_path):
    (tmp_path / "private").mkdir()
    return RunDirectory(tmp_path)


def test_measurements_are_kept_by_section_and_repetitions_replaced(run):
    assert run.metrics() == {}
    run.record("utility", {"model": "convnet", "mean": 0.5}, key=("model",))
    run.record("utility", {"model": "mlp", "mean": 0.4}, key=("model",))
    run.record("utility", {"model": "convnet", "mean": 0.6}, key=("model",))
    run.record("quality", {"features": ("a", 1)}, key=("features",))
    run.record("quality", {"features": ("a", 1)}, key=("features",))
    assert run.metrics() == {
        "utility": [{"model": "mlp", "mean": 0.4}, {"model": "convnet", "mean": 0.6}],
        "quality": [{"features": ["a", 1]}],
    }
    assert (run.path / "private" / "metrics.json").stat().st_mode & 0o077 == 0


def test_metrics_of_another_version_are_refused(run):
    (run.path / "private" / "metrics.json").write_text(json.dumps({"format": 99, "utility": []}))
    with pytest.raises(InvalidData, match="another version"):
        run.metrics()
