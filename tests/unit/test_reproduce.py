"""Experiments: what their files say, and an executor that never computes a number twice."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from door import some_images
from understudy.errors import InvalidData, InvalidSettings
from understudy.methods import METHODS, load_method
from understudy.methods.method import configure
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.reproduce import executor, tables
from understudy.reproduce.executor import Place, reproduce
from understudy.reproduce.experiment import (
    REAL,
    Layout,
    Measure,
    PlannedRun,
    load_experiment,
    names,
)
from understudy.runs import held

FACTS = PublicFacts(
    units=60_000, class_names=tuple("0123456789"), shape=(1, 28, 28), mean=(0.1,), std=(0.3,)
)
TINY = (
    ("batch", 40), ("batches", 1), ("images_per_class", 1), ("inner", 1), ("outer", 2),
    ("rounds", 1), ("width", 2),
)  # fmt: skip


def tiny_experiment(**changes):
    run = PlannedRun(
        method="psg", data="digits", epsilon=8.0, preset="small", accountant="renyi", settings=TINY
    )
    experiment = replace(
        load_experiment("psg-headline", "smoke"),
        runs=(run, replace(run, seed=1)),
        measure=Measure(seeds=2, options={"epochs": 1, "width": 2}),
        published=({"data": "digits", "epsilon": 8, "accuracy": 81.5},),
    )
    return replace(experiment, **changes)


@pytest.mark.parametrize("scale", ["full", "smoke"])
@pytest.mark.parametrize("name", names())
def test_every_experiment_can_be_run(name, scale):
    experiment = load_experiment(name, scale)
    assert experiment.runs
    assert len({run.name for run in experiment.runs}) == len(experiment.runs)
    for run in experiment.runs:
        assert set(experiment.table.rows) <= set(run.fields())
        assert experiment.table.columns in {*run.fields(), "model"}
        if run.method == REAL:
            continue
        configured = configure(
            load_method(run.method), FACTS, run.epsilon, preset=run.preset,
            settings=dict(run.settings),
        )  # fmt: skip
        assert configured.config


@pytest.mark.parametrize("name", [n for n in names() if load_experiment(n).published])
def test_every_published_number_of_a_method_of_ours_belongs_to_a_run(name):
    experiment = load_experiment(name)
    cells = [
        run.fields() | {"model": m} for run in experiment.runs for m in experiment.measure.models
    ]
    for entry in experiment.published:
        if entry.get("method", "psg") in {*METHODS, REAL}:
            assert any(experiment.published_for(cell) == entry["accuracy"] for cell in cells), entry


def test_a_mean_over_columns_needs_all_of_them():
    experiment = load_experiment("dp-hp")
    run = {"method": "dp-hp", "data": "mnist", "preset": "paper"}
    models = experiment.measure.models
    cells = [run | {"model": model, "accuracies": [0.5, 0.7]} for model in models]
    whole, missing = (
        next(r for r in tables.accuracies(experiment, c).rows if r[:2] == ["MNIST", "dp-hp"])[-1]
        for c in (cells, cells[1:])
    )
    assert whole == "**60.0** (published 73.1)"
    assert missing == ""


def test_a_list_stands_for_one_run_with_each_of_its_elements():
    runs = load_experiment("psg-table-2").runs
    assert {(r.data, r.preset, dict(r.settings)["images_per_class"]) for r in runs} == {
        (data, "best", count) for data in ("mnist", "fashion-mnist") for count in (10, 20)
    }


def test_unknown_experiments_are_refused():
    with pytest.raises(InvalidSettings, match="did you mean psg-table-1"):
        load_experiment("psg-table1")


def test_only_missing_numbers_are_computed(tmp_path, monkeypatch):
    experiment = tiny_experiment()
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    made = []
    original = executor.make_run

    def counted(*args, **kwargs):
        made.append(kwargs["out"].name)
        return original(*args, **kwargs)

    monkeypatch.setattr(executor, "make_run", counted)
    first, second = (run.name for run in experiment.runs)
    assert reproduce(experiment, place, only=["nobody*", "other"]).missing == 2
    outcome = reproduce(experiment, place, only=["*seed1"])
    assert made == [second]
    assert outcome.missing == 1
    outcome = reproduce(experiment, place)
    assert made == [second, first]
    assert outcome.missing == 0
    assert [cell["seed"] for cell in outcome.cells] == [0, 1]
    reproduce(experiment, place)
    assert made == [second, first]

    # A table that needs the same run finds it; only the number is computed.
    other = reproduce(replace(experiment, name="other"), place)
    assert made == [second, first]
    assert len(other.cells) == 2

    content = json.loads((tmp_path / "results" / "psg-headline-smoke.json").read_text())
    assert [cell["run"] for cell in content["cells"]] == [first, second]
    for cell in content["cells"]:
        assert cell["device"]
        assert cell["commit"]
        assert len(cell["accuracies"]) == 2
        assert cell["certified_epsilon"] <= 8
    page = (tmp_path / "results" / "psg-headline-smoke.md").read_text()
    for name in (first, second):
        assert f"(psg-headline-smoke-{name}.png)" in page
        sheet = (tmp_path / "results" / f"psg-headline-smoke-{name}.png").read_bytes()
        assert sheet == (tmp_path / "work" / name / "release" / "contact_sheet.png").read_bytes()


def test_real_records_stand_beside_synthetic_ones(tmp_path):
    (run, *_) = tiny_experiment().runs
    real = replace(run, method=REAL, epsilon=float("inf"), settings=(("images_per_class", 3),))
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    (found,) = reproduce(tiny_experiment(runs=(real,)), place).cells
    assert len(found["accuracies"]) == 2
    assert found["certified_epsilon"] is None
    assert "| none | 0 |" in (tmp_path / "results" / "psg-headline-smoke.md").read_text()


def test_a_run_without_noise_has_no_epsilon(tmp_path):
    (run, *_) = tiny_experiment().runs
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    experiment = tiny_experiment(runs=(replace(run, epsilon=float("inf")),))
    (found,) = reproduce(experiment, place).cells
    assert found["certified_epsilon"] is None
    assert found["epsilon"] == "inf"
    assert reproduce(experiment, place).missing == 0


def test_a_signal_while_measuring_stops_at_once(tmp_path, monkeypatch):
    def long(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")

    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(executor, "evaluate", long)
        reproduce(tiny_experiment(), place, only=["seed1"])
    assert reproduce(tiny_experiment(), place, only=["seed1"]).missing == 1


def test_time_that_is_up_stops_at_a_committed_block(tmp_path):
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    outcome = reproduce(tiny_experiment(), place, minutes=0)
    assert (outcome.missing, outcome.cells) == (2, [])
    assert reproduce(tiny_experiment(), place).missing == 0


def test_results_of_another_version_are_refused(tmp_path):
    (tmp_path / "psg-headline-smoke.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(InvalidData, match="another version"):
        reproduce(tiny_experiment(), Place(work=tmp_path, results=tmp_path))


def cell(**fields):
    known = {
        "run": "r", "model": "convnet", "certified_epsilon": 1.0, "releases": 1, "seconds": [1.0],
        "peak_gib": None, "device": "d", "torch": "t", "commit": "c",
    }  # fmt: skip
    return known | fields


def test_measured_numbers_stand_beside_published_ones():
    experiment = tiny_experiment(
        table=Layout(rows=("data", "preset"), columns="epsilon"),
        published=(
            {"data": "mnist", "epsilon": 1, "accuracy": 78.6},
            {"data": "mnist", "epsilon": 10, "accuracy": 94.9},
        ),
        scale="full",
    )
    cells = [
        cell(data="mnist", preset="best", epsilon=1.0, accuracies=[0.8, 0.81], seed=0),
        cell(data="mnist", preset="best", epsilon=1.0, accuracies=[0.82, 0.83], seed=1),
    ]
    grid = tables.accuracies(experiment, cells)
    assert grid.columns == ["data", "preset", "epsilon 1", "epsilon 10"]
    assert ["MNIST", "best", "**81.5** ± 1.0 (published 78.6)", ""] in grid.rows
    assert ["MNIST", "", "", "published 94.9"] in grid.rows
    assert "**81.5** ± 1.0 (published 78.6)" in tables.markdown(experiment, cells)
    page = tables.html(replace(experiment, title="<b>"), cells)
    assert "<strong>81.5</strong> ± 1.0" in page
    assert "&lt;b&gt;" in page
    assert "<b>" not in page


def test_two_processes_may_add_to_one_table(tmp_path):
    one, other = (executor.Kept(tiny_experiment(), tmp_path) for _ in range(2))
    for kept, run in zip((one, other), tiny_experiment().runs, strict=True):
        found = cell(**run.fields() | {"run": run.name}, accuracies=[0.9], remark="shared")
        kept.add(found)
    last = executor.Kept(tiny_experiment(), tmp_path)
    assert [c["run"] for c in last.cells] == [run.name for run in tiny_experiment().runs]
    assert "| shared |" in next(tmp_path.glob("*.md")).read_text()
    one.add(found | {"accuracies": [0.1]})  # what the other has measured meanwhile
    again = executor.Kept(tiny_experiment(), tmp_path)
    assert [c["accuracies"] for c in again.cells] == [[0.9], [0.9]]


def test_a_run_that_another_process_works_on_is_left_to_it(tmp_path):
    experiment, said = tiny_experiment(), []
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    first, second = (run.name for run in experiment.runs)
    (tmp_path / "work").mkdir()

    class Told(Progress):
        def say(self, text):
            said.append(text)

    with held(tmp_path / "work" / f".{first}.lock"):
        outcome = reproduce(experiment, place, progress=Told())
    assert [cell["run"] for cell in outcome.cells] == [second]
    assert outcome.missing == 1
    assert not (tmp_path / "work" / first).exists()
    assert f"{first} is left to another process, which is working on it" in said
    assert reproduce(experiment, place).missing == 0


def test_what_another_process_has_measured_meanwhile_is_not_measured_again(tmp_path, monkeypatch):
    experiment = tiny_experiment()
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    (first, second), held_before = experiment.runs, executor.held

    def slower(lock, **options):
        if second.name in lock.name:  # while we were at the first
            found = cell(**second.fields() | {"run": second.name}, accuracies=[0.9], remark="")
            executor.Kept(experiment, place.results).add(found)
        return held_before(lock, **options)

    monkeypatch.setattr(executor, "held", slower)
    outcome = reproduce(experiment, place)
    assert outcome.missing == 0
    assert (tmp_path / "work" / first.name).exists()
    assert not (tmp_path / "work" / second.name).exists()


def test_curves_are_drawn_one_picture_for_each_data_set(tmp_path):
    def curve(*means):
        return [
            {"epsilon": 5.0 * n + 5, "mean": mean, "std": 0.01, "releases": 10 * n}
            for n, mean in enumerate(means)
        ]

    cells = [
        cell(**run.fields() | {"data": data, "run": run.name}, curve=means, accuracies=[0.9])
        for run, data, means in zip(
            tiny_experiment().runs, ("mnist", "digits"), (curve(0.5, 0.8), curve(0.6, 0.9)),
            strict=True,
        )
    ]  # fmt: skip
    kept = executor.Kept(tiny_experiment(scale="full"), tmp_path)
    names = {file.name for file in kept.write(*cells)}
    assert {"psg-headline-mnist.svg", "psg-headline-digits.svg"} < names
    drawn = ElementTree.fromstring((tmp_path / "psg-headline-mnist.svg").read_text())
    lines = drawn.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 1
    assert "](psg-headline-mnist.svg)" in (tmp_path / "psg-headline.md").read_text()
    assert "<polyline" in (tmp_path / "psg-headline.html").read_text()


def test_lines_of_a_picture_are_told_apart_by_their_variant(tmp_path):
    experiment = load_experiment("psg-figure-5", "smoke")
    curve = [{"epsilon": n, "mean": 0.9, "std": 0.01, "releases": n} for n in (1, 2)]
    cells = [
        cell(**run.fields() | {"run": run.name}, curve=curve, accuracies=[0.9])
        for run in experiment.runs
    ]
    executor.Kept(experiment, tmp_path).write(*cells)
    text = (tmp_path / "psg-figure-5-smoke-digits.svg").read_text()
    assert "psg small, pixels, seed 0" in text
    assert "psg small, prior, seed 0" in text


def test_stages_are_drawn_one_picture_for_each_epsilon(tmp_path):
    experiment = load_experiment("psg-figure-3", "smoke")
    curve = [{"stage": n, "mean": 0.9, "std": 0.01, "accuracies": [0.9]} for n in (1, 2)]
    cells = [
        cell(**run.fields() | {"run": run.name}, curve=curve, accuracies=[0.9])
        for run in experiment.runs
    ]
    files = {file.name for file in executor.Kept(experiment, tmp_path).write(*cells)}
    drawn = {f"psg-figure-3-smoke-digits-eps{epsilon}.svg" for epsilon in (1, 10)}
    assert drawn < files
    text = (tmp_path / "psg-figure-3-smoke.md").read_text()
    assert "| convnet | stage 2 | 90.0 ± 1.0 |" in text
    picture = ElementTree.fromstring((tmp_path / drawn.pop()).read_text())
    assert (
        len(picture.findall(".//{http://www.w3.org/2000/svg}polyline")) == 3
    )  # psg, dp-merf, dp-sgd


def test_an_experiment_in_stages_measures_after_each(tmp_path):
    run = replace(tiny_experiment().runs[0], stages="5,6 1,2")
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    outcome = reproduce(tiny_experiment(runs=(run,)), place)
    (found,) = outcome.cells
    assert [point["stage"] for point in found["curve"]] == [1, 2]
    assert found["accuracies"] == found["curve"][-1]["accuracies"]
    assert found["certified_epsilon"] <= 8  # the largest, for the ledger proves them disjoint
    assert found["releases"] == 2 * 2
    assert len(found["seconds"]) == 2


def test_distances_stand_as_they_are():
    experiment = load_experiment("dp-mepf-cifar10")
    run = experiment.runs[0].fields()
    cells = [
        cell(**run | {"model": "resnet9"}, accuracies=[0.3]),
        cell(**run | {"model": "fid"}, distances=[41.25]),
    ]
    (line,) = [row for row in tables.accuracies(experiment, cells).rows if "**30.0**" in row[-1]]
    assert line[-2:] == ["**41.2**", "**30.0** (published 29.4)"]
    assert "Fréchet inception distance" in tables.markdown(experiment, cells)


def test_a_set_that_is_not_there_is_asked_for(tmp_path):
    place = Place(work=tmp_path / "w", results=tmp_path / "r", data_dir=str(tmp_path))
    with pytest.raises(InvalidData, match="utkface-32.*--data-dir"):
        reproduce(load_experiment("dp-mepf-faces"), place)


def test_a_small_scale_says_that_it_is_not_comparable():
    experiment = tiny_experiment()
    assert "not comparable" in tables.markdown(experiment, [])
    assert "not comparable" not in tables.markdown(replace(experiment, scale="full"), [])


def test_a_set_without_a_test_split_is_tested_on_what_was_held_out(tmp_path):
    """A tenth of the units are set aside at registration, and no run learns from them."""
    np.savez(tmp_path / "scans.npz", images=some_images(80).images, labels=np.arange(80) % 3)
    (run, _) = tiny_experiment().runs
    held = replace(
        run, data="scans.npz", reading=(("classes", ("a", "b", "c")),), hold_out=0.1,
        delta=1e-3,
    )  # fmt: skip
    place = Place(work=tmp_path / "w", results=tmp_path / "r", data_dir=str(tmp_path))
    reproduce(tiny_experiment(runs=(held,), published=()), place)
    (metrics,) = (tmp_path / "w" / "hold-out-0.1").glob("*/private/metrics.json")
    (measured,) = json.loads(metrics.read_text())["utility"]
    assert measured["test_images"] == 8


def test_runs_with_and_without_a_hold_out_do_not_meet(tmp_path):
    """Not in one folder, under one name; nor in one ledger, which fixes what is held out."""
    (run, _) = tiny_experiment().runs
    place = Place(work=tmp_path / "work", results=tmp_path / "results")
    held = replace(run, hold_out=0.25)
    kept, whole = (
        reproduce(tiny_experiment(runs=(one,)), replace(place, results=tmp_path / name)).cells[0]
        for name, one in (("held", held), ("whole", run))
    )
    assert kept["commit"] == whole["commit"]
    folders = {path.parent for path in (tmp_path / "work").glob("**/ledger.sqlite")}
    assert folders == {tmp_path / "work", tmp_path / "work" / "hold-out-0.25"}
