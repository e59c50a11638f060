"""How progress is told: to a file that a person reads, and to a machine."""

from __future__ import annotations

import itertools
import json

import pytest

from understudy.cli import output
from understudy.cli.output import JsonOutput, Output, QuietOutput


@pytest.fixture(autouse=True)
def steps_of_twenty_seconds(monkeypatch):
    ticks = itertools.count(step=20.0)
    monkeypatch.setattr(output.time, "monotonic", lambda: next(ticks))


def test_a_file_gets_a_line_a_minute_with_what_is_left_and_spent(capsys):
    taken = list(Output().steps(range(2, 10), spent=lambda: 0.25, what="teacher"))
    assert taken == list(range(2, 10))
    assert capsys.readouterr().out.splitlines() == [
        "teacher 5/10, 0:01:40 left, epsilon spent 0.25",
        "teacher 8/10, 0:00:40 left, epsilon spent 0.25",
    ]


def test_work_of_less_than_a_minute_is_not_worth_a_line(capsys):
    assert list(Output().steps(range(2))) == [0, 1]
    assert list(QuietOutput().steps(range(20))) == list(range(20))
    assert capsys.readouterr().out == ""


def test_a_machine_gets_every_step_that_takes_long_and_the_last(capsys):
    assert list(JsonOutput().steps(range(3), what="pixels")) == [0, 1, 2]
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["done"] for line in told] == [1, 2, 3]
    assert [line["seconds_left"] for line in told] == [40, 20, 0]
    assert {(line["event"], line["what"], line["total"]) for line in told} == {
        ("progress", "pixels", 3)
    }
    assert all(line["epsilon_spent"] is None for line in told)
