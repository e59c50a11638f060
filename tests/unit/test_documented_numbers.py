"""Numbers that the pages state about guarantees and costs, computed again."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
from scipy.stats import norm

from understudy.methods import load_method
from understudy.methods.method import configure
from understudy.privacy.accounting import CURVE_DELTAS, RenyiFilter, epsilon_curve, renyi_divergence
from understudy.privacy.calibration import calibrate
from understudy.privacy.plan import Budget, Plan, PlannedRelease, PublicFacts
from understudy.privacy.trade_off import FURTHER_DELTAS, most_true_positives

DOCS = Path(__file__).parents[2] / "docs"
DELTA = 1e-5


def gaussian(count: int = 1, rate: float = 1.0) -> Plan:
    line = PlannedRelease(name="sum", kind="gradient", count=count, dimension=1, sampling_rate=rate)
    return Plan((line,))


def rounded_up(share: float) -> str:
    return f"{math.ceil(1000 * share) / 10:g} %"


@pytest.mark.parametrize("epsilon", [1, 5, 10])
def test_what_an_attacker_finds_at_each_epsilon(epsilon):
    """The table of "Choosing epsilon": the whole plan, and one pair alone."""
    plan = gaussian()
    noise = calibrate(plan, Budget(epsilon=epsilon, delta=DELTA)).noise_multiplier
    deltas = (*CURVE_DELTAS, *FURTHER_DELTAS)
    curve = list(zip(epsilon_curve(plan, noise, deltas, "pld"), deltas, strict=True))
    found = most_true_positives(0.01, curve)
    assert found == pytest.approx(norm.cdf(norm.ppf(0.01) + 1 / noise), rel=0.02)
    alone = most_true_positives(0.01, [(epsilon, DELTA)])
    page = (DOCS / "privacy.md").read_text()
    stated = re.findall(rf"^\| {epsilon} \| (.+ %) \| (.+ %) \|$", page, flags=re.MULTILINE)
    assert stated == [(rounded_up(found), rounded_up(alone))]


def least_limit(plan: Plan, epsilon: float) -> float:
    """Return the least lifetime limit, in tenths, that admits one run of this epsilon."""
    noise = calibrate(plan, Budget(epsilon=epsilon, delta=DELTA)).noise_multiplier
    for tenths in range(int(10 * epsilon), int(100 * epsilon)):
        limit = RenyiFilter.for_budget(tenths / 10, DELTA)
        if renyi_divergence(plan, noise, limit.order) <= limit.bound:
            return tenths / 10
    return math.inf


def test_a_single_run_needs_a_limit_above_its_epsilon():
    one, many = least_limit(gaussian(), 5), least_limit(gaussian(1000, 0.01), 5)
    assert 5 < one < many
    page = " ".join((DOCS / "privacy.md").read_text().split())
    assert f"a run of epsilon 5 needs a limit of {one:g} if it is one Gaussian" in page
    assert f"and of {many:g} if it takes 1000 steps that each sample a hundredth" in page


def passes(preset: str, epsilon: float, side: int = 28) -> int:
    facts = PublicFacts(
        units=60_000,
        class_names=tuple("0123456789"),
        shape=(1, side, side),
        mean=(0.5,),
        std=(0.5,),
    )
    config = configure(load_method("dpdm"), facts, epsilon, preset=preset).config
    return config.steps * config.batch * config.copies


def test_what_the_best_preset_of_dpdm_takes():
    assert passes("paper", 10) == 131_072 * 4500
    assert Fraction(passes("best", 10), passes("paper", 10)) == Fraction(1, 6)
    assert Fraction(passes("best", 1), passes("paper", 1)) == Fraction(1, 9)
    assert passes("best", 10, side=32) < passes("best", 10)
    page = (DOCS / "methods" / "dpdm.md").read_text()
    assert "131 072 of them for `paper` on MNIST, 4500 times" in page
    assert "a sixth of these passes, a ninth below epsilon 5" in page
