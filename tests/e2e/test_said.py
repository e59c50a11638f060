"""What the command line says to a person who is new to it, or takes a wrong turn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from understudy.cli.main import COMMANDS, main
from understudy.privacy.ledger import Ledger

TINY = ["--method", "dp-merf", "--features", "8", "--steps", "2"]
SHARDED = [
    "--method",
    "gs-wgan",
    "--critics",
    "4",
    "--asked",
    "2",
    "--steps",
    "1",
    "--delta",
    "1e-3",
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERSTUDY_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.fixture
def call(folder, capsys):
    def run(*arguments: object) -> tuple[int, str]:
        """Return the exit code and all that was said, on one line."""
        code = 0
        try:
            main([str(one) for one in arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, " ".join((said.out + said.err).split())

    return run


@pytest.fixture
def scans(folder) -> Path:
    rng = np.random.default_rng(0)
    np.savez(
        "scans.npz",
        images=rng.integers(0, 256, (60, 8, 8), dtype=np.uint8),
        labels=np.arange(60) % 3,
        patient=np.arange(60) // 3,
    )
    return folder / "scans.npz"


@pytest.fixture
def run(call, folder) -> Path:
    code, said = call("generate", "digits", *TINY, "--out", "runs/made")
    assert code == 0, said
    return folder / "runs" / "made"


def test_the_help_of_a_command_is_its_docstring(call):
    for command, told in (
        ("evaluate", "they go to the run's `private/`"),
        ("runs", "the list is for the custodian"),
        ("verify", "the custodian can also check"),
        ("generate", "what is said then is fixed for good"),
        ("train-classifier", "what is said then is fixed for good"),
        ("register", "fixed for good, and the first run fixes delta"),
    ):
        assert told.replace("`", "") in call(command, "--help")[1].replace("`", ""), command
    listed = call("--help")[1].replace("│ ", "")
    for line in COMMANDS.values():
        assert line in listed


def test_titles_of_settings_fit_a_terminal(call):
    assert "--method has more (by default the preset's) ─" in call("generate", "--help")[1]
    assert (
        "Settings of dp-sinkhorn (by default the preset's) ─"
        in (call("generate", "--method", "dp-sinkhorn", "--help")[1])
    )


def test_a_run_that_shards_cannot_take_is_refused_before_its_set_is_registered(call, scans):
    code, said = call("generate", scans, "--unit", "patient", *SHARDED)
    assert code == 2
    assert "pass --max-per-unit when the set is first named" in said
    assert not Ledger().data_sets()
    code, said = call("generate", scans, "--unit", "patient", "--max-per-unit", "2", *SHARDED)
    assert code == 0, said
    assert "20 units (each a patient, of at most 2 records)" in said
    # It is known now, and need not be said again.
    code, said = call("generate", scans, "--unit", "patient", *SHARDED)
    assert code == 0, said
    assert "scans-gs-wgan-eps10-2" in said


def test_a_limit_that_a_public_benchmark_cannot_have_is_said_to_have_none(call):
    code, said = call("register", "digits", "--lifetime-epsilon", "5")
    assert code == 0
    assert "no limit (a public benchmark is never refused, whatever --lifetime-epsilon" in said
    code, said = call("register", "digits", "--json")
    assert json.loads(said)["lifetime_epsilon"] is None


def test_verify_says_how_to_name_a_ledger(call, run):
    code, said = call("verify", run, "--ledger", "ledger.sqlite")
    assert code == 2
    assert "--ledger takes no path; name a ledger with --ledger-path" in said
    code, said = call("report", run, "--ledger", "ledger.sqlite")
    assert code == 2
    assert "ledger.sqlite is a file" in said
    assert "--ledger-path" in said
    assert call("verify", run, "--ledger-path", "ledger.sqlite")[0] == 0


@pytest.mark.parametrize("command", ["evaluate", "verify", "sample"])
def test_a_run_that_is_not_there_is_named(call, command):
    code, said = call(command, "runs/nope", *(["--count", "1"] if command == "sample" else []))
    assert code == 2
    assert "there is no run runs/nope; `understudy runs` lists those" in said


def test_a_ledger_that_is_not_there_is_explained(call):
    code, said = call("ledger")
    assert code == 2
    assert "it is made when a set is registered" in said
    assert "UNDERSTUDY_LEDGER" in said


def test_nothing_is_written_into_a_release(call, run):
    for command in (["sample", "--count", "2"], ["export", "--to", "png"]):
        out = run / "release" / "more"
        code, said = call(command[0], run, *command[1:], "--out", out)
        assert code == 2
        assert "lies in a released directory" in said
        assert not out.exists()
    assert call("verify", run)[0] == 0


def test_a_report_says_whether_it_is_private(call, run):
    assert "private/report.html (private: keep it)" in call("report", run)[1]
    assert "made from released files alone" in call("report", run, "--shareable")[1]


def test_names_of_runs_are_never_shortened(call, run):
    long = run.rename(run.with_name("a-run-with-a-name-that-takes-most-of-a-line-of-a-terminal"))
    said = call("runs")[1]
    assert f" {long.name} " in said
    assert "state finished, method dp-merf, data digits" in said


def test_the_settings_of_a_method_are_not_called_defaults(call):
    # The heading is wrapped, word by word.
    said = call("methods", "dp-merf")[1]
    assert "unless" in said
    assert "default" not in said.partition("Presets")[0].split("meaning")[0]


def test_a_value_after_a_switch_is_explained(call):
    code, said = call("generate", "digits", "--method", "datalens", "--stochastic", "false")
    assert code == 2
    assert "A switch takes no value: pass --NAME, or --no-NAME." in said
