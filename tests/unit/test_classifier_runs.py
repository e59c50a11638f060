"""Runs that release a classifier: its file, and how every command takes a run without images."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_sample import Recorded, call

import understudy
from door import some_images
from trained import TINY
from understudy.errors import InvalidData, InvalidSettings
from understudy.job import assist, tell_others
from understudy.nets.released import Classifier
from understudy.report.listing import list_runs
from understudy.reproduce.executor import Place, reproduce
from understudy.reproduce.experiment import PlannedRun, load_experiment
from understudy.runs import CLASSIFIER_FILE


@pytest.fixture
def run(trained_runs, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(trained_runs["run"].directory, tmp_path / "copy")


def evaluate(directory, trained_runs, **asked):
    ledger = trained_runs["run"].directory.parent / "ledger"
    test = some_images(12, seed=1)
    return understudy.evaluate(directory, test=test, ledger=ledger, device="cpu", **asked)


# What is released


def test_the_network_is_released_described_and_certified(trained_runs):
    result = trained_runs["run"]
    release = result.directory / "release"
    content = json.loads((release / "certificate.json").read_text())
    assert set(content["files"]) == {CLASSIFIER_FILE, "README.md"}
    assert understudy.verify(release).files == 2
    card = (release / "README.md").read_text()
    assert f"`{CLASSIFIER_FILE}`" in card
    assert "A classifier trained on pets" in card
    assert "synthetic" not in card
    assert "costs those who were in its training data no more privacy" in " ".join(card.split())
    noiseless = (trained_runs["noiseless"].directory / "release" / "README.md").read_text()
    assert "without noise" in noiseless
    assert "no more privacy" not in noiseless


def test_it_can_be_used_from_wherever_it_lies(trained_runs):
    result = trained_runs["run"]
    images = torch.from_numpy(some_images(9, seed=3).images)
    expected = result.classifier.predict(images)
    release = result.directory / "release"
    for place in (result.directory, release, release / CLASSIFIER_FILE):
        loaded = understudy.load_classifier(place)
        assert torch.equal(loaded.predict(images), expected)
        assert torch.equal(loaded.predict(images.float() / 255), expected)
    assert expected.shape == (9,)
    assert len(result.classifier.predict(images[:0])) == 0
    with pytest.raises(InvalidData, match=r"expected \(n, 1, 8, 8\)"):
        result.classifier.predict(torch.zeros(2, 1, 9, 9))


def test_it_says_what_the_network_says(trained_runs):
    classifier = trained_runs["run"].classifier
    images = torch.rand(5, 1, 8, 8)
    seen = (images - classifier.mean[0]) / classifier.std[0]
    logits = classifier.network(classifier.params, seen)
    assert torch.allclose(classifier.probabilities(images), F.softmax(logits, 1), atol=1e-6)


@pytest.mark.parametrize("name", ["convnet", "lenet"])
def test_a_file_gives_back_what_was_saved(name):
    network_of = {"shape": (1, 28, 28), "width": 4, "class_names": ("a", "b")}
    blank = Classifier(name=name, **network_of, mean=(0.5,), std=(0.25,), params={})
    saved = replace(blank, params=blank.network.init(torch.Generator().manual_seed(0)))
    back = Classifier.from_bytes(saved.to_bytes())
    images = torch.rand(3, 1, 28, 28)
    assert torch.equal(back.probabilities(images), saved.probabilities(images))
    assert (back.class_names, back.mean, back.shape) == (("a", "b"), (0.5,), (1, 28, 28))


def changed(classifier, **about):
    """A file whose header says something else."""
    content = classifier.to_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    said = json.loads(header["__metadata__"]["classifier"]) | about
    header["__metadata__"]["classifier"] = json.dumps(said)
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + content[8 + length :]


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"format": 2}, "use a newer version"),
        ({"format": "x"}, "not the file of a classifier"),
        ({"name": "oracle"}, "use a newer version"),
        ({"width": 5}, "of another shape"),
        ({"width": 10**6}, "of another shape"),
        ({"width": -1}, "not the file"),
        ({"shape": [1, 8]}, "not the file"),
        ({"shape": "x"}, "not the file|expected one for each"),
        ({"class_names": ["a"]}, "of another shape"),
        ({"class_names": None}, "not the file"),
        ({"mean": [0.1, 0.2]}, "expected one for each"),
        ({"std": [0.0]}, "positive std"),
        ({"std": [None]}, "not the file"),
    ],
)
def test_garbled_descriptions_are_one_line(trained_runs, tmp_path, about, says):
    file = tmp_path / "file"
    file.write_bytes(changed(trained_runs["run"].classifier, **about))
    with pytest.raises(InvalidData, match=says) as found:
        understudy.load_classifier(file)
    assert "\n" not in str(found.value)
    assert str(file) in str(found.value)


@pytest.mark.parametrize("content", [b"", b"garbled", b"\xff" * 100])
def test_garbled_files_are_one_line(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidData, match="not the file of a classifier"):
        understudy.load_classifier(tmp_path / "file")
    with pytest.raises(InvalidData, match="there is no run"):
        understudy.load_classifier(tmp_path / "nothing")


def test_other_processes_are_told_of_it(trained_runs):
    messages, result = [], trained_runs["run"]
    tell_others(Recorded(True, messages), result)
    heard = assist(None, None, engine=None, group=Recorded(False, messages))
    assert messages == []
    assert heard.classifier.to_bytes() == result.classifier.to_bytes()


# Commands


def test_methods_are_refused_where_they_do_not_belong(tmp_path, capsys):
    for arguments, hint in (
        (("generate", "digits", "--method", "dp-sgd"), "use `understudy train-classifier`"),
        (("train-classifier", "digits", "--method", "psg"), "use `understudy generate`"),
    ):
        code, _, err = call(*arguments, "--out", tmp_path / "x", capsys=capsys)
        assert (code, err.count("\n")) == (2, 1)
        assert hint in err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidSettings, match="makes no images"):
        understudy.synthesize("digits", method="dp-sgd", out=tmp_path / "x")
    with pytest.raises(InvalidSettings, match="makes no images"):
        understudy.synthesize_all("digits", [{"method": "dp-sgd"}], out=[tmp_path / "x"])
    with pytest.raises(InvalidSettings, match="there is no method 'nope'"):
        understudy.train_classifier("digits", method="nope", out=tmp_path / "x")


@pytest.mark.parametrize(
    "arguments",
    [("sample", "--count", 3), ("export", "--to", "png"), ("evaluate", "--quality"),
     ("evaluate", "--memorisation")],
)  # fmt: skip
def test_commands_for_images_refuse_in_one_line(run, capsys, arguments):
    command, *rest = arguments
    code, _, err = call(command, run, *rest, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "holds a classifier and no images" in err
    with pytest.raises(InvalidSettings, match="holds a classifier and no images"):
        understudy.load(run)


def test_the_command(tmp_path, capsys):
    images, labels = some_images(60).images, some_images(60).labels
    np.savez(tmp_path / "pets.npz", images=images, labels=labels)
    flags = ["--delta", "1e-3", "--accountant", "renyi", "--device", "cpu", "--steps", 3]
    flags += ["--batch", 60, "--width", 3, "--json", "--ledger", tmp_path / "ledger"]
    code, out, err = call(
        "train-classifier", tmp_path / "pets.npz", "--out", tmp_path / "run", *flags, capsys=capsys
    )
    assert code == 0, err
    told = json.loads(out.splitlines()[-1])
    assert (told["event"], told["classes"]) == ("result", 3)
    assert told["epsilon"] <= 10
    code, out, _ = call("verify", tmp_path / "run", capsys=capsys)
    assert code == 0
    assert "2 files match" in out
    code, out, _ = call("runs", tmp_path, "--json", capsys=capsys)
    assert json.loads(out.splitlines()[0])["images"] == "classifier"


# Evaluation, report, reproduction


def test_it_is_tested_as_it_is(trained_runs, run):
    (found,) = evaluate(run, trained_runs)
    data = some_images(12, seed=1)
    right = run_predictions(run, data) == data.labels
    assert found.accuracies == [pytest.approx(right.mean())]
    assert found.test_images == 12
    assert np.sum(found.confusion) == 12
    assert np.trace(found.confusion) == right.sum()
    assert found.train_images == 60
    (entry,) = json.loads((run / "private" / "metrics.json").read_text())["utility"]
    assert entry["model"] == "released classifier"
    assert entry["mean"] == found.mean
    evaluate(run, trained_runs)
    assert len(json.loads((run / "private" / "metrics.json").read_text())["utility"]) == 1
    (line,) = list_runs(run.parent)
    assert "released classifier" in line.accuracy


def run_predictions(run, data):
    return understudy.load_classifier(run).predict(torch.from_numpy(data.images)).numpy()


def test_what_was_measured_before_is_not_measured_again(trained_runs, run, monkeypatch):
    (before,) = evaluate(run, trained_runs)
    monkeypatch.setattr(Classifier, "predict", lambda *_: pytest.fail("computed again"))
    (again,) = evaluate(run, trained_runs, missing=True)
    assert again == before


def test_nothing_is_trained_so_its_options_are_refused(trained_runs, run):
    with pytest.raises(InvalidSettings, match="leave out --models, --ceiling"):
        evaluate(run, trained_runs, models=["mlp"], ceiling=True)


def test_test_sets_of_another_kind_are_refused(trained_runs, run):
    with pytest.raises(InvalidData, match="images have shape"):
        understudy.evaluate(run, test=some_images(12, shape=(1, 9, 9)), device="cpu")
    assert not (run / "private" / "metrics.json").exists()


def test_whoever_received_it_can_test_it(run, tmp_path):
    received = shutil.copytree(run / "release", tmp_path / "received")
    (found,) = understudy.evaluate(
        received, test=some_images(12, seed=1), ledger=tmp_path / "own", device="cpu"
    )
    assert found.test_images == 12
    assert sorted(p.name for p in received.iterdir()) == [
        "README.md", "certificate.json", CLASSIFIER_FILE,
    ]  # fmt: skip


def test_snapshots_show_the_way(trained_runs, run):
    ledger = trained_runs["run"].directory.parent / "ledger"
    points = understudy.measure_convergence(
        run, test=some_images(12, seed=1), ledger=ledger, device="cpu"
    )
    assert [point["releases"] for point in points] == [2, 4]
    assert 0 < points[0]["epsilon"] < points[1]["epsilon"] <= 8
    assert points[1]["accuracies"] == evaluate(run, trained_runs)[0].accuracies


def test_the_page_shows_a_classifier_and_no_gallery(trained_runs, run, tmp_path):
    evaluate(run, trained_runs)
    page = understudy.write_report([run], out=tmp_path / "page.html").read_text()
    assert "<h1>A classifier trained on pets</h1>" in page
    assert "load_classifier" in page
    assert "Accuracy by class: released classifier" in page
    assert "data:image/png" not in page
    assert "ynthetic" not in page.split("<main")[1]
    shared = understudy.write_report([run], out=tmp_path / "shared.html", shareable=True)
    received = shutil.copytree(run / "release", tmp_path / "received")
    alone = understudy.write_report([received], out=tmp_path / "alone.html", shareable=True)
    assert shared.read_bytes() == alone.read_bytes()


def test_a_page_may_hold_sets_and_classifiers(trained_runs, tmp_path):
    quick = {"rounds": 1, "outer": 1, "batches": 1, "images_per_class": 1}
    made = understudy.synthesize(
        some_images(60, name="pets"), out=tmp_path / "set", ledger=tmp_path / "ledger", epsilon=8,
        delta=1e-3, accountant="renyi", method="psg", settings=quick, device="cpu",
    )  # fmt: skip
    runs = [made.directory, trained_runs["run"].directory]
    page = understudy.write_report(runs, out=tmp_path / "page.html").read_text()
    assert "2 synthetic sets and classifiers, side by side" in page
    assert "B was trained on pets" in page
    assert page.count("Contact sheet of") == 1
    with pytest.raises(InvalidSettings, match="holds images and no classifier"):
        understudy.load_classifier(made.directory)
    with pytest.raises(InvalidSettings, match="holds images and no classifier"):
        _ = made.classifier


def test_a_table_of_classifiers_is_made(tmp_path):
    settings = tuple(sorted({**TINY, "steps": 2}.items()))
    run = PlannedRun(
        method="dp-sgd", data="digits", epsilon=8.0, accountant="renyi", settings=settings
    )
    experiment = replace(load_experiment("dp-sgd", "smoke"), runs=(run,))
    place = Place(work=tmp_path / "work", results=tmp_path / "results", device="cpu")
    outcome = reproduce(experiment, place)
    assert outcome.missing == 0
    (cell,) = outcome.cells
    assert (cell["model"], len(cell["accuracies"])) == ("released classifier", 1)
    text = (tmp_path / "results" / "dp-sgd-smoke.md").read_text()
    assert "tested as it was released" in text
    assert "evaluation networks" not in text
