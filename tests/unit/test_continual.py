"""Stages of different parties: made one after another, joined by what each released."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import understudy
from door import seal, some_images
from understudy.continual import curve as curves
from understudy.continual.curve import evaluate_stages, receive, sentence
from understudy.continual.stages import gather, learn_stages, split
from understudy.errors import Interrupted, InvalidData, InvalidSettings, VerificationFailed
from understudy.job import StopRequest
from understudy.privacy.ledger import Ledger
from understudy.privacy.registration import find_exactly
from understudy.progress import Progress
from understudy.synthetic import SyntheticSet, join

TINY = {"rounds": 1, "outer": 2, "batches": 1, "inner": 1, "batch": 40, "width": 2}
REQUEST = {"method": "psg", "accountant": "renyi", "settings": TINY | {"images_per_class": 2}}
QUICK = {"epochs": 1, "width": 2, "seeds": 2}
GROUPS = ("5,6", "2,1")


@pytest.fixture(scope="module")
def digits():
    return understudy.load_data("digits")


@pytest.fixture(scope="module")
def made(tmp_path_factory, digits):
    """Two finished stages and their ledger, made once."""
    folder = tmp_path_factory.mktemp("stages")
    learn_stages(split(digits, GROUPS), out=folder, ledger=folder / "ledger.sqlite", **REQUEST)
    return folder


@pytest.fixture
def places(made):
    return [made / "stage-1", made / "stage-2"]


def test_each_stage_has_its_own_certificate_and_classes(places, digits):
    for place, names in zip(places, (("5", "6"), ("1", "2")), strict=True):
        result = understudy.load_result(place)
        assert result.synthetic.class_names == names
        assert result.labels.tolist() == [0, 0, 1, 1]
        facts = result.certificate.content["data_set"]["public_facts"]
        assert facts["units"] == int(np.isin(digits.labels, [int(n) for n in names]).sum())
        assert tuple(facts["among"]) == digits.class_names
        assert understudy.verify(place, ledger=True).is_authenticated


def test_the_curve_is_over_the_classes_seen_so_far(places, made, digits, tmp_path):
    found = evaluate_stages(
        places, test=digits, ledger=made / "ledger.sqlite", out=tmp_path / "curve", **QUICK
    )
    first, second = found.points
    assert (first.classes, second.classes) == (("5", "6"), ("5", "6", "1", "2"))
    assert (first.train_images, second.train_images) == (4, 8)
    assert first.test_images == int(np.isin(digits.test.labels, (5, 6)).sum())
    assert [len(point.accuracies) for point in found.points] == [2, 2]
    assert second.mean == pytest.approx(sum(second.per_class) / 4)
    assert found.statement.kind == "proved"

    out = tmp_path / "curve"
    assert {path.name for path in out.iterdir()} == {"statement.json", "statement.txt", "private"}
    assert (out / "statement.txt").read_text().strip() == sentence(found.statement)
    assert (out / "private").stat().st_mode & 0o777 == 0o700
    written = json.loads((out / "private" / "curve.json").read_text())
    assert [point["stage"] for point in written["points"]] == [1, 2]
    assert written["statement"]["kind"] == "proved"
    assert "<polyline" in (out / "private" / "curve.svg").read_text()
    book = Ledger(made / "ledger.sqlite")
    rows = book._connection.execute("SELECT what, purpose FROM disclosures").fetchall()
    book.close()
    assert ("test set digits", "evaluate 2 stages") in [tuple(row) for row in rows]


def test_accuracy_is_the_mean_over_classes():
    true = torch.tensor([0, 0, 0, 0, 0, 0, 1, 1])
    shares = curves._recognised(torch.zeros(8, dtype=torch.int64), true, 2)
    assert shares.tolist() == [1.0, 0.0]


def test_sets_of_others_are_joined_by_name_with_their_probabilities():
    images = torch.zeros(2, 1, 4, 4)
    soft = SyntheticSet(images, torch.tensor([1, 0]), ("b", "a"), torch.tensor([[0.2, 0.8]] * 2))
    both = join([SyntheticSet(images, torch.tensor([0, 1]), ("a", "c")), soft])
    assert both.class_names == ("a", "c", "b")
    assert both.labels.tolist() == [0, 1, 0, 2]
    rows = both.soft_labels.tolist()
    assert rows[:2] == [[1, 0, 0], [0, 1, 0]]
    assert rows[2] == pytest.approx([0.8, 0, 0.2])


def test_a_stage_is_evaluated_by_itself_on_its_own_classes(places, digits):
    (found,) = understudy.evaluate(places[1], **QUICK)
    assert found.test_images == int(np.isin(digits.test.labels, (1, 2)).sum())


def test_a_classifier_is_handed_on_and_tested_as_it_is(digits, tmp_path):
    book, settings = tmp_path / "ledger.sqlite", {"steps": 20, "width": 8}
    first, second = learn_stages(
        split(digits, GROUPS), out=tmp_path, ledger=book,
        **REQUEST | {"method": "dp-sgd", "settings": settings},
    )  # fmt: skip
    before, after = (understudy.load_classifier(place) for place in (first, second))
    assert before.class_names[:2] == ("5", "6")
    assert after.class_names[:2] == ("1", "2")
    assert set(after.class_names) == set(before.class_names) == set(digits.class_names)

    found = evaluate_stages([first, second], test=digits, ledger=book, **QUICK)
    seen = ("5", "6", "1", "2")
    real = digits.test
    named = after.predict(torch.from_numpy(real.images), among=seen)
    recognised = [
        float((named[real.labels == digits.class_names.index(name)] == place).double().mean())
        for place, name in enumerate(seen)
    ]
    assert found.points[-1].accuracies == [pytest.approx(np.mean(recognised))]
    assert found.points[0].mean > 0.8
    (input_,) = understudy.load_result(second).certificate.content["method"]["public_inputs"]
    assert input_["kind"] == "released"


# What is refused


def test_a_folder_that_was_changed_is_refused(places, digits, tmp_path):
    for number, place in enumerate(places):
        shutil.copytree(place / "release", tmp_path / str(number))
    folders = [tmp_path / "0", tmp_path / "1"]
    assert len(receive(folders)) == 2

    certificate = folders[1] / "certificate.json"
    genuine = certificate.read_bytes()
    content = json.loads(genuine)
    content["guarantee"]["epsilon"] = content["guarantee"]["target_epsilon"] = 1.0
    certificate.write_bytes(seal(content))
    with pytest.raises(VerificationFailed, match="the plan costs epsilon"):
        evaluate_stages(folders, test=digits, ledger=tmp_path / "ledger.sqlite", **QUICK)

    certificate.write_bytes(genuine)
    shutil.copy(folders[0] / "synthetic.safetensors", folders[1])
    with pytest.raises(VerificationFailed, match="synthetic.safetensors"):
        evaluate_stages(folders, test=digits, ledger=tmp_path / "ledger.sqlite", **QUICK)


def test_a_test_set_must_have_the_classes_of_all_stages(places, digits, tmp_path):
    few = replace(digits, test=None, class_names=("0", "1", "2", "3", "4", "5", "x", "7", "8", "9"))
    with pytest.raises(InvalidData, match="no class '6'"):
        evaluate_stages(places, test=few, ledger=tmp_path / "ledger.sqlite", **QUICK)
    blind = replace(digits.test, labels=np.where(digits.test.labels == 1, 0, digits.test.labels))
    with pytest.raises(InvalidData, match="no image of class '1'"):
        evaluate_stages(places, test=blind, ledger=tmp_path / "ledger.sqlite", **QUICK)


def test_stages_that_were_read_otherwise_do_not_fit(places, digits, tmp_path):
    other = split(understudy.load_data("digits", size=9), ["1,2"])
    learn_stages(other, out=tmp_path, ledger=tmp_path / "ledger.sqlite", **REQUEST)
    with pytest.raises(InvalidData, match=r"\(1, 8, 8\).*\(1, 9, 9\)"):
        receive([places[0], tmp_path / "stage-1"])


def test_a_class_is_in_one_stage(digits):
    with pytest.raises(InvalidSettings, match="'6' is in two stages"):
        split(digits, ["5,6", "6,7"])


def test_finished_stages_are_kept_and_others_refused(made, digits):
    before = (made / "stage-1" / "release" / "certificate.json").stat().st_mtime_ns
    ledger = made / "ledger.sqlite"
    learn_stages(split(digits, GROUPS), out=made, ledger=ledger, **REQUEST)
    assert (made / "stage-1" / "release" / "certificate.json").stat().st_mtime_ns == before
    for groups, request in ((GROUPS, REQUEST | {"epsilon": 9.0}), (("3,4", "1,2"), REQUEST)):
        with pytest.raises(InvalidSettings, match="other records or settings"):
            learn_stages(split(digits, groups), out=made, ledger=ledger, **request)


# Several data sets, patients, interruption


def test_sets_of_several_parties_know_the_classes_before(digits):
    folders = [
        replace(part, among=(), source=f"/party/{n}")
        for n, part in enumerate(split(digits, GROUPS))
    ]
    first, second = gather(folders)
    assert first.among == ()
    assert second.among == ("5", "6", "1", "2")
    declared = replace(digits, labels=np.where(digits.labels < 5, 5, 6))  # ten names, two present
    (only,) = gather([declared])
    assert (only.class_names, only.among) == (("5", "6"), digits.class_names)


def patients(tmp_path, **options):
    whole = some_images(
        48, classes=4, units=np.arange(48) // 4, unit="patient", source="/data/scans"
    )
    parts = split(whole, ["0,1", "2,3"])
    request = REQUEST | {"settings": TINY | {"batch": 4, "images_per_class": 1}}
    ledger = tmp_path / "ledger.sqlite"
    places = learn_stages(parts, out=tmp_path, ledger=ledger, **request, **options)
    book = Ledger(ledger)
    budgets = {find_exactly(book, part).budget for part in parts}
    book.close()
    found = evaluate_stages(
        places, test=whole, ledger=ledger, models=["gaussian-nb"], protocol="dp-merf", **options
    )
    return len(budgets), found.statement


def test_patients_of_several_stages_share_a_budget(tmp_path):
    budgets, statement = patients(tmp_path)
    assert (budgets, statement.kind) == (1, "sum")
    assert statement.epsilon == pytest.approx(sum(p.epsilon for p in statement.parts))


def test_patients_that_are_declared_disjoint_do_not(tmp_path):
    budgets, statement = patients(tmp_path, declare_disjoint=True)
    assert (budgets, statement.kind) == (2, "declared")
    assert statement.epsilon == max(part.epsilon for part in statement.parts)


def test_time_that_is_up_stops_between_commits(digits, tmp_path):
    stop = StopRequest()
    stop.deadline = 0
    asked = {"out": tmp_path, "ledger": tmp_path / "ledger.sqlite", **REQUEST}
    with pytest.raises(Interrupted, match="stage 1 of 2.*the same command goes on"):
        learn_stages(split(digits, GROUPS), stop=stop, **asked)
    assert not (tmp_path / "stage-1").exists()


class Killer(Progress):
    """Kills its own process in the middle of the second stage."""

    runs = 0

    def steps(self, steps, *, spent=None, what=""):
        self.runs += 1
        for step in steps:
            if (self.runs, step) == (2, 3):
                os.kill(os.getpid(), signal.SIGKILL)
            yield step


def longer(folder: Path, progress=None):
    settings = TINY | {"rounds": 3, "images_per_class": 1}
    return learn_stages(
        split(understudy.load_data("digits"), GROUPS), out=folder,
        ledger=folder / "ledger.sqlite", progress=progress, **REQUEST | {"settings": settings},
    )  # fmt: skip


def test_a_stage_that_was_killed_goes_on(tmp_path):
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=longer, args=(tmp_path, Killer()))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / "stage-1" / "release").is_dir()
    assert (tmp_path / "stage-2.partial").is_dir()
    for place in longer(tmp_path):
        (release,) = understudy.verify(place, ledger=True).certificate.content["releases"]
        assert release["made"] == release["count"] == 6
    assert not list(tmp_path.glob("*.partial"))
