"""`understudy.evaluate`: what is recorded, when, and what the ledger hears of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import understudy
from test_cli import call
from understudy.data.images import labelled_images
from understudy.errors import InvalidData, InvalidSettings
from understudy.evaluation.downstream import Evaluation
from understudy.privacy.ledger import Ledger
from understudy.runs import SET_FILE
from understudy.synthetic import SyntheticSet


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    understudy.synthesize(
        "digits", method="psg", epsilon=10, accountant="renyi",
        settings={"rounds": 1, "outer": 2}, out=folder / "run", ledger=folder / "ledger.sqlite",
    )  # fmt: skip
    return folder


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made / "run", tmp_path / "run")


def utility(run: Path) -> list[dict]:
    file = run / "private" / "metrics.json"
    return json.loads(file.read_bytes())["utility"] if file.exists() else []


def disclosed(made: Path) -> list[tuple[str, str]]:
    return [(d["what"], d["purpose"]) for d in Ledger(made / "ledger.sqlite").disclosures(1)]


def test_the_contract_of_an_entry(run):
    understudy.evaluate(run, models=["mlp"], epochs=1, seeds=2)
    (entry,) = utility(run)
    assert set(entry) == {
        "protocol", "model", "trained_on", "tested_on", "test_images", "train_images", "accuracies",
        "mean", "std", "per_class", "confusion", "seconds", "device", "options",
    }  # fmt: skip
    assert entry["mean"] == pytest.approx(np.mean(entry["accuracies"]))
    assert entry["std"] == pytest.approx(np.std(entry["accuracies"]))
    assert (entry["test_images"], entry["train_images"]) == (359, 100)
    assert (entry["protocol"], entry["tested_on"]) == ("psg", "test set digits")
    assert np.shape(entry["confusion"]) == (10, 10)


def test_a_stopped_evaluation_keeps_what_it_has(run, monkeypatch):
    measure = Evaluation._measured
    stop_at, computed = "lenet", []

    def stopped(self, same, train):
        if same["model"] == stop_at:
            raise KeyboardInterrupt
        computed.append(same["model"])
        return measure(self, same, train)

    monkeypatch.setattr(Evaluation, "_measured", stopped)
    quick = {"models": "gaussian-nb,lenet,mlp", "epochs": 1, "seeds": 1}
    with pytest.raises(KeyboardInterrupt):
        understudy.evaluate(run, **quick)
    (kept,) = utility(run)
    assert kept["model"] == "gaussian-nb"
    stop_at = ""
    understudy.evaluate(run, **quick, missing=True)
    assert {entry["model"] for entry in utility(run)} == {"lenet", "mlp", "gaussian-nb"}
    assert kept in utility(run)
    assert computed == ["gaussian-nb", "lenet", "mlp"]
    understudy.evaluate(run, **quick)
    assert computed[3:] == ["gaussian-nb", "lenet", "mlp"]
    assert len(utility(run)) == 3
    again = next(e for e in utility(run) if e["model"] == "gaussian-nb")
    assert again["accuracies"] == kept["accuracies"]


def test_the_ceiling_reads_training_records_and_says_so(made, run):
    before = len(disclosed(made))
    synthetic, ceiling = understudy.evaluate(run, models=["lda"], ceiling=True)
    assert disclosed(made)[before:] == [
        ("test set digits", "evaluate run"),
        ("training records", "evaluate run"),
    ]
    assert (synthetic.trained_on, ceiling.trained_on) == ("synthetic", "real")
    assert ceiling.train_images == 1438
    assert ceiling.mean > 0.9 > synthetic.mean
    assert [entry["trained_on"] for entry in utility(run)] == ["synthetic", "real"]


def test_without_a_private_part_there_is_no_ceiling_and_no_record(made, run):
    shutil.rmtree(run / "private")
    ledger = made / "ledger.sqlite"
    with pytest.raises(InvalidData, match="has no private part; pass a test set with --test"):
        understudy.evaluate(run, ledger=ledger)
    with pytest.raises(InvalidData, match="has no private part; leave out --ceiling"):
        understudy.evaluate(run, test="digits", ledger=ledger, ceiling=True)
    (found,) = understudy.evaluate(run, test="digits", ledger=ledger, models=["gaussian-nb"])
    assert found.test_images == 359
    assert not (run / "private").exists()


@pytest.mark.parametrize(
    ("shape", "classes", "says"),
    [
        ((9, 9), 10, "shape (1, 9, 9), the synthetic ones (1, 8, 8)"),
        ((8, 8), ["one", "two"], "the test set has the classes one, two, the data set 0, 1, 2"),
        ((8, 8), 12, "expected the same, in the same order"),
    ],
)
def test_test_sets_that_do_not_fit(run, shape, classes, says):
    images = np.zeros((4, *shape), np.uint8)
    other = labelled_images(images, np.array([0, 1, 0, 1]), classes=classes)
    with pytest.raises(InvalidData) as refused:
        understudy.evaluate(run, test=other)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert utility(run) == []


def test_a_set_without_labels_is_refused(run):
    path = run / "release" / SET_FILE
    made = SyntheticSet.load(path)
    bare = SyntheticSet(made.images, torch.full_like(made.labels, -1), made.class_names)
    path.write_bytes(bare.to_bytes())
    with pytest.raises(InvalidData, match="the synthetic set has no labels"):
        understudy.evaluate(run)


def test_a_run_from_memory_needs_its_test_set(tmp_path):
    data = labelled_images(np.random.rand(40, 8, 8), np.arange(40) % 2)
    understudy.synthesize(
        data, method="psg", epsilon=10, accountant="renyi",
        settings={"rounds": 1, "outer": 1, "batch": 8}, out=tmp_path / "run",
        ledger=tmp_path / "ledger.sqlite",
    )  # fmt: skip
    with pytest.raises(InvalidData, match="not here any more; pass a test set with --test"):
        understudy.evaluate(tmp_path / "run")
    with pytest.raises(InvalidData, match="not here any more; leave out --ceiling"):
        understudy.evaluate(tmp_path / "run", test=data, ceiling=True)
    with pytest.raises(InvalidSettings, match="subsample is 11"):
        understudy.evaluate(tmp_path / "run", test=data, subsample=11)


def test_the_command_prints_a_table_or_lines(run, capsys):
    quick = ["evaluate", run, "--models", "mlp, gaussian-nb", "--epochs", "1", "--seeds", "2"]
    code, out, _ = call(*quick, "--quiet", capsys=capsys)
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["mlp", "gaussian-nb"]
    assert rows[0].count(",") == 1
    assert "on 359 images, test set digits" in out
    _, out, _ = call(*quick, "--missing", "--json", capsys=capsys)
    events = [json.loads(line) for line in out.splitlines()]
    results = [event for event in events if event["event"] == "result"]
    assert [result["model"] for result in results] == ["mlp", "gaussian-nb"]
    assert not [event for event in events if event["event"] == "progress"]
    code, _, err = call("evaluate", run, "--models", "convnett", capsys=capsys)
    assert code == 2
    assert err == "understudy: there is no model 'convnett'; did you mean 'convnet'?\n"


def test_an_unfinished_run_is_named_so(tmp_path):
    (tmp_path / "run.partial").mkdir()
    with pytest.raises(InvalidData, match="run is not finished; repeat the command"):
        understudy.evaluate(tmp_path / "run")
