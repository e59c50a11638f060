"""Planted errors fit the code and the docs; that each is caught, `make planted` shows."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from planted_errors import ERRORS
from planting import ROOT, DoesNotFit, Found, planted

from understudy.privacy import bounded
from understudy.privacy.bounded import clipped_sum

HALVED = ERRORS[0]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.name)
def test_still_fits_the_code_and_names_a_test(error):
    with planted(error):
        pass
    file, _, name = error.caught_by.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


def test_each_is_another_error_that_hardly_ever_alarms_for_nothing():
    assert Counter(error.name for error in ERRORS).most_common(1)[0][1] == 1
    assert len({(error.at, error.new) for error in ERRORS}) == len(ERRORS)
    assert max(error.false_alarm for error in ERRORS) <= 1e-6


def test_the_docs_list_what_is_planted():
    text = (ROOT / "docs" / "privacy.md").read_text()
    section = text.partition("## Planted errors")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| (.+?) \| `(.+?)` \| `(.+?)` \|$", section, flags=re.MULTILINE)
    planted_here = [
        (error.name, error.at.replace(":", "."), error.caught_by.removeprefix("tests/"))
        for error in ERRORS
    ]
    assert listed == planted_here


def test_an_error_reaches_whoever_imported_the_function_and_goes_again():
    rows = [torch.full((1, 4), torch.nan)]
    let_through = next(error for error in ERRORS if "NaN" in error.name)
    with planted(let_through):
        assert clipped_sum(rows, 1.0).isnan().any()
    assert not clipped_sum(rows, 1.0).isnan().any()
    before = bounded.clipped_sum.__code__
    with pytest.raises(ZeroDivisionError), planted(let_through):
        _ = 1 / 0
    assert bounded.clipped_sum.__code__ is before


@pytest.mark.parametrize(
    "changes",
    [{"old": "noise_std = 17"}, {"old": "total"}, {"at": "privacy.bounded:snapped"}],
    ids=["text that is not there", "text that is there often", "in another function"],
)
def test_an_edit_that_does_not_fit_is_no_error_caught(changes):
    with pytest.raises(DoesNotFit), planted(replace(HALVED, **changes)):
        pass


@pytest.mark.parametrize(
    "found",
    [
        Found(),
        Found("skipped"),
        Found("setup", "AssertionError", HALVED.shows),
        Found("call", "AttributeError", HALVED.shows),
        Found("call", "AssertionError", "assert 1 == 2"),
    ],
    ids=["passed", "skipped", "in a fixture", "by accident", "elsewhere"],
)
def test_a_failure_for_another_reason_does_not_count(found):
    assert not HALVED.is_caught(found)
    assert HALVED.is_caught(Found("call", "AssertionError", f"assert {HALVED.shows}"))
    exhausted = replace(HALVED, raises="PlanExhausted")
    assert exhausted.is_caught(Found("call", "PlanExhausted", HALVED.shows))
    assert not exhausted.is_caught(Found("call", "AssertionError", HALVED.shows))
