"""Measures of a whole run: what is read, recorded in the ledger, written, and refused."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import understudy
from door import some_images
from understudy.cli.main import main
from understudy.errors import DataChanged, InvalidData, InvalidSettings, MissingWeights
from understudy.evaluation.features import ReferenceTraining
from understudy.measures import measure_memorisation, measure_quality
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import RegistrationTerms
from understudy.runs import RunDirectory
from weights_of_corners import make_weights

QUICK = ReferenceTraining(steps=3, width=4)
TINY = {"rounds": 1, "outer": 2, "batches": 2, "inner": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    understudy.synthesize(
        "digits", method="psg", epsilon=10, accountant="renyi", settings=TINY,
        out=folder / "run", ledger=folder / "ledger.sqlite",
    )  # fmt: skip
    return folder / "run"


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A copy of the run, still with its ledger."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def read_for_evaluation(run: Path) -> list[str]:
    book = Ledger(Path(RunDirectory(run).settings()["ledger"]), create=False)
    try:
        return [row["what"] for row in book.disclosures(1) if row["purpose"] == "evaluate run"]
    finally:
        book.close()


def test_quality_with_a_network_of_our_own(run):
    before = read_for_evaluation(run)
    found = measure_quality(run, features="convnet", training=QUICK)
    assert (found.images, found.reference_images) == (100, 359)
    assert found.reference == "test set digits"
    assert found.frechet_distance > 0
    assert read_for_evaluation(run) == [*before, "test set digits"]
    measure_quality(run, features="convnet", training=QUICK)
    (entry,) = RunDirectory(run).metrics()["quality"]  # the second replaces the first
    assert entry == json.loads(json.dumps(found.to_json()))
    assert entry["features"] == "convnet trained on test set digits"
    assert "fid" not in entry
    assert entry["reference_steps"] == 4  # two whole epochs of two batches
    trained = measure_quality(run, features="convnet", reference="training", training=QUICK)
    assert trained.reference_images == 1438
    assert len(RunDirectory(run).metrics()["quality"]) == 2
    assert read_for_evaluation(run)[-1] == "training records"


def test_quality_in_the_features_of_inception(run, tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("UNDERSTUDY_DATA", str(tmp_path / "data"))
    file = make_weights(tmp_path / "data" / "inception", monkeypatch)
    found = measure_quality(run, training=QUICK)
    assert found.features == "inception"
    (entry,) = RunDirectory(run).metrics()["quality"]
    assert entry["fid"] == found.frechet_distance
    assert "frechet_distance" not in entry
    # Damaged weights: one line, the way out, and no real record was read for it.
    before = read_for_evaluation(run)
    for place in (file, tmp_path / "home" / "weights" / "inception" / file.name):
        place.write_bytes(b"bit rot")
    with pytest.raises(MissingWeights) as refusal:
        measure_quality(run, training=QUICK)
    assert "wrong checksum" in str(refusal.value)
    assert "--features convnet" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert read_for_evaluation(run) == before


def test_memorisation_reads_test_and_training_records(run):
    before = read_for_evaluation(run)
    found = measure_memorisation(run)
    assert read_for_evaluation(run) == [*before, "test set digits", "training records"]
    assert found.training_records == 1438
    (entry,) = RunDirectory(run).metrics()["memorisation"]
    assert entry["reference"] == "training records of digits"
    assert len(entry["synthetic"]) == len(entry["held_out"]) == len(entry["quantiles"]) == 7


def test_memorisation_of_arrays_with_a_hold_out(tmp_path):
    """Arrays must be given again; held-out units are not among the training records."""
    data = some_images(90, name="scans", units=np.arange(90) // 3)
    book = tmp_path / "ledger.sqlite"
    understudy.synthesize(
        data, method="psg", epsilon=10, accountant="renyi", out=tmp_path / "run", ledger=book,
        settings=TINY | {"images_per_class": 2, "width": 4}, allow_large_delta=True,
        terms=RegistrationTerms(hold_out=0.2),
    )  # fmt: skip
    with pytest.raises(InvalidData, match="arrays in memory"):
        measure_memorisation(tmp_path / "run", test=data)
    found = measure_memorisation(tmp_path / "run", data=data, test=data)
    assert found.training_records == 72
    assert found.held_out[0] == 0  # most of these "unseen" images are the training records
    assert found.held_out[-1] > 0
    with pytest.raises(DataChanged, match="does not hold what was registered as 'scans'"):
        measure_memorisation(tmp_path / "run", data=some_images(30, seed=5), test=data)


def test_a_release_alone_has_no_training_records(run, tmp_path):
    own, test = tmp_path / "own.sqlite", understudy.load_data("digits")
    with pytest.raises(InvalidData, match="no private part"):
        measure_memorisation(run / "release", test=test, ledger=own)
    assert not own.exists()
    found = measure_quality(
        run / "release", features="convnet", test=test, training=QUICK, ledger=own
    )
    assert found.reference_images == 359
    assert "quality" not in RunDirectory(run).metrics()


def test_settings_that_contradict_each_other_are_refused(run):
    with pytest.raises(InvalidSettings, match="expected inception or convnet"):
        measure_quality(run, features="vgg")
    with pytest.raises(InvalidSettings, match="leave one of them out"):
        measure_quality(run, features="convnet", reference="training", test="digits")
    wrong = understudy.load_data("digits", size=16)
    with pytest.raises(InvalidData, match="reference images have shape"):
        measure_quality(run, features="convnet", test=wrong)


def test_the_command_line_prints_a_table(run, capsys, monkeypatch):
    narrow = functools.partial(ReferenceTraining, width=4)
    monkeypatch.setattr("understudy.cli.measures.ReferenceTraining", narrow)
    arguments = ["evaluate", str(run), "--quality", "--features", "convnet", "--memorisation"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--reference-steps", "1"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    for part in ("Fréchet distance", "precision", "inception score", "Distance to the nearest",
                 "100 synthetic images against 359 images", "private"):  # fmt: skip
        assert part in out
    assert "FID" not in out
    assert set(RunDirectory(run).metrics()) == {"quality", "memorisation"}
