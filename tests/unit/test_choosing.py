"""Which method is taken when nobody says."""

import dataclasses
import json
import math

import pytest

from understudy.cli.main import main
from understudy.methods import METHODS, OF_CLASSIFIERS, load_method
from understudy.methods.choosing import AUTO, Common, choose
from understudy.methods.method import Preset, configure
from understudy.methods.rehearsal import Rehearsal
from understudy.privacy.plan import PublicFacts

IMAGE_METHODS = sorted(set(METHODS) - OF_CLASSIFIERS)


def facts_of(units=60_000, classes=10, shape=(1, 28, 28)) -> PublicFacts:
    channels = shape[0]
    return PublicFacts(
        units=units, class_names=tuple(map(str, range(classes))), shape=shape,
        mean=(0.5,) * channels, std=(0.5,) * channels,
    )  # fmt: skip


@pytest.mark.parametrize("method", IMAGE_METHODS)
def test_settings_that_need_no_method_are_those_of_every_method(method):
    known = {field.name for field in dataclasses.fields(load_method(method).config_class)}
    assert {field.name for field in dataclasses.fields(Common)} <= known


@pytest.mark.parametrize(
    ("units", "epsilon", "wanted", "why"),
    [
        (60_000, 1.0, 10, "enough for a small set"),
        (60_000, 1.0, 6000, "enough for a large set, with soft labels"),
        (60_000, math.inf, 10, "enough for a small set"),
        (1438, 10.0, 500, "enough for a large set, with hard labels"),
        (1438, 0.1, 10, "too few for any method"),
    ],
)
def test_the_reason_follows_records_budget_and_size(units, epsilon, wanted, why):
    choice = choose(facts_of(units), epsilon, {"images_per_class": wanted})
    assert choice.method == "rehearsal"
    assert f"{units / 10:g} units per class at epsilon {epsilon:g} are {why}" in choice.why


def test_labels_are_as_soft_as_the_reason_says():
    """The choice and the method know one threshold."""
    for units in (1438, 60_000):
        facts, wanted = facts_of(units), {"images_per_class": 500}
        config = configure(load_method("rehearsal"), facts, 1.0, settings=wanted).config
        assert ("soft" in choose(facts, 1.0, wanted).why) == (config.teacher_steps > 0)


def call(*arguments, capsys):
    code = 0
    try:
        main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_run_without_a_method_says_which_and_why(tmp_path, monkeypatch, capsys):
    """The same command resumes it: the choice does not depend on what was spent meanwhile."""
    monkeypatch.chdir(tmp_path)
    asked = ["--epsilon", "0.1", "--images-per-class", "1", "--ledger", "ledger", "--device", "cpu"]
    few = {"networks": 1, "refine_steps": 1, "match_steps": 1, "samples": 20}
    monkeypatch.setitem(Rehearsal.presets, "small", Preset(lambda *_: few, "nothing"))
    code, out, err = call("generate", "digits", *asked, capsys=capsys)
    assert code == 0, err
    assert "method rehearsal: 143.8 units per class at epsilon 0.1 are too few" in out + err
    release = tmp_path / "runs" / "digits-rehearsal-eps0.1" / "release"
    certificate = json.loads((release / "certificate.json").read_text())
    assert certificate["method"]["name"] == "rehearsal"
    assert certificate["method"]["settings"]["images_per_class"] == 1
    out = "runs/digits-rehearsal-eps0.1"
    code, said, err = call("generate", "digits", *asked, "--out", out, "--resume", capsys=capsys)
    assert code == 0, err
    assert "is finished already" in said + err


def test_a_plan_without_a_method_says_which_and_why(capsys):
    code, out, err = call("plan", "--records", "60000", "--epsilon", "1", capsys=capsys)
    assert code == 0, err
    assert "method rehearsal: 6000 units per class at epsilon 1 are enough" in out + err
    assert "features" in out


def test_settings_of_a_method_need_its_name(capsys):
    code, _, err = call("generate", "digits", "--rounds", "3", capsys=capsys)
    assert code == 2
    assert "Settings of a method need --method." in err
    assert AUTO not in METHODS
