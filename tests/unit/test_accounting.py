"""Accounting against independent oracles and published values."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from opacus.accountants.analysis import rdp as opacus_rdp
from scipy.optimize import brentq
from scipy.stats import norm

from understudy.errors import InvalidSettings
from understudy.privacy import calibration, randomness
from understudy.privacy.accounting import (
    RenyiFilter,
    composed_epsilon,
    epsilon_of,
    renyi_divergence,
)
from understudy.privacy.calibration import calibrate
from understudy.privacy.plan import Budget, Plan, PlannedRelease
from understudy.privacy.randomness import tail_delta


def plan_of(count=1, rate=1.0, dimension=1000, **more) -> Plan:
    line = PlannedRelease(
        name="gradient", kind="gradient", count=count, dimension=dimension, sampling_rate=rate
    )
    return Plan((line, *more.get("others", ())))


def gaussian_epsilon(sigma: float, delta: float) -> float:
    """Balle and Wang's exact formula, solved by hand."""

    def excess(epsilon: float) -> float:
        a, b = 1 / (2 * sigma) - epsilon * sigma, -1 / (2 * sigma) - epsilon * sigma
        return norm.cdf(a) - math.exp(epsilon + norm.logcdf(b)) - delta

    return brentq(excess, 0, 1 / (2 * sigma**2) + 10 / sigma)


@pytest.mark.parametrize(
    ("steps", "epsilon", "accountant", "expected", "tolerance"),
    [
        (100_000, 10, "pld", 0.932, 0.003),
        (100_000, 10, "renyi", 0.966, 0.003),
        (20_000, 1, "pld", 2.369, 0.01),
        (20_000, 1, "renyi", 2.553, 0.01),
    ],
)
def test_noise_of_the_paper(steps, epsilon, accountant, expected, tolerance):
    plan = plan_of(steps, 256 / 60_000, dimension=317_706)
    budget = Budget(epsilon=epsilon, delta=1e-5, accountant=accountant)
    found = calibrate(plan, budget)
    assert found.noise_multiplier == pytest.approx(expected, abs=tolerance)
    recomputed = epsilon_of(plan, found.noise_multiplier, found.delta_accounted, accountant)
    assert epsilon - 1e-3 <= recomputed <= epsilon
    assert found.delta_accounted + found.delta_tail <= 1e-5
    assert tail_delta(plan, found.noise_multiplier) <= found.delta_tail


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("count", [1, 7, 100])
def test_whole_set_gaussians_compose_exactly(sigma, count):
    exact = gaussian_epsilon(sigma / math.sqrt(count), 1e-5)
    assert epsilon_of(plan_of(count), sigma, 1e-5, "pld") == pytest.approx(exact, rel=1e-6)


def test_lines_with_noise_ratios_compose_exactly():
    other = PlannedRelease(name="b", kind="histogram", count=1, dimension=3, noise_ratio=2.0)
    exact = gaussian_epsilon(1 / math.sqrt(3 + 1 / 4), 1e-5)
    found = epsilon_of(plan_of(3, others=(other,)), 1.0, 1e-5, "pld")
    assert found == pytest.approx(exact, rel=1e-6)


def test_a_mixed_plan_costs_more_than_its_parts_and_less_than_their_sum():
    other = PlannedRelease(name="b", kind="histogram", count=1, dimension=3)
    sampled, whole = plan_of(100, 0.05), Plan((other,))
    mixed = plan_of(100, 0.05, others=(other,))
    parts = [epsilon_of(p, 1.5, 1e-5, "pld") for p in (sampled, whole)]
    assert max(parts) < epsilon_of(mixed, 1.5, 1e-5, "pld") < sum(parts)


@pytest.mark.parametrize("order", [2, 3, 8, 32])
def test_renyi_divergence_equals_opacus(order):
    expected = opacus_rdp.compute_rdp(q=0.01, noise_multiplier=1.1, steps=500, orders=[order])
    found = renyi_divergence(plan_of(500, 0.01), 1.1, order)
    assert found == pytest.approx(float(np.atleast_1d(expected)[0]), rel=1e-6)


def test_pld_agrees_with_published_value_and_stays_below_renyi():
    plan = plan_of(1000, 0.01)
    pld, renyi = (epsilon_of(plan, 1.0, 1e-5, a) for a in ("pld", "renyi"))
    assert pld == pytest.approx(1.828, abs=0.01)
    assert renyi == pytest.approx(2.101, abs=0.01)


def test_epsilon_inf_adds_no_noise():
    found = calibrate(plan_of(), Budget(epsilon=math.inf, delta=1e-5))
    assert found.noise_multiplier == 0
    assert math.isinf(found.epsilon)


def test_a_cached_calibration_is_used_only_if_it_still_holds(tmp_path, monkeypatch):
    plan, budget = plan_of(50), Budget(epsilon=3, delta=1e-5, accountant="renyi")
    honest = calibrate(plan, budget, cache=tmp_path)
    (entry,) = tmp_path.glob("*.json")
    searches = []
    search = calibration._search
    monkeypatch.setattr(calibration, "_search", lambda *a: searches.append(1) or search(*a))
    assert calibrate(plan, budget, cache=tmp_path) == honest
    assert not searches
    for lie in (honest.noise_multiplier * 0.9, honest.noise_multiplier * 1.1, "x", None):
        entry.write_text(json.dumps({"noise_multiplier": lie}))
        again = calibrate(plan, budget, cache=tmp_path)
        assert again.noise_multiplier == pytest.approx(honest.noise_multiplier, rel=1e-4)
    assert len(searches) == 4


def test_tail_bound_covers_the_worst_shift_found_by_search():
    """Spread, concentrated and random shifts of full length never exceed the bound."""
    reach, dimension, multiplier = randomness.SAMPLER_REACH, 50, 0.7
    plan = plan_of(1, dimension=dimension)
    bound = tail_delta(plan, multiplier)

    def probability(shifts):
        return float((norm.sf(reach - shifts) - norm.sf(reach)).sum())

    rng = np.random.default_rng(0)
    shifts = [np.eye(1, dimension)[0], np.ones(dimension)]
    shifts += [np.abs(rng.standard_normal(dimension)) ** power for power in (1, 2, 4) * 20]
    found = [probability(s / np.linalg.norm(s) / multiplier) for s in shifts]
    assert max(found) <= bound
    assert max(found) >= bound / 30  # a bound, not a fantasy


def test_float32_noise_would_break_delta(monkeypatch):
    plan = plan_of(100_000, 256 / 60_000, dimension=317_706)
    assert tail_delta(plan, 0.932) < 1e-12
    monkeypatch.setattr(randomness, "SAMPLER_REACH", 5.77)
    assert tail_delta(plan, 0.932) > 1e-5


def test_a_tail_that_takes_too_much_of_delta_is_refused():
    with pytest.raises(InvalidSettings, match="tail"):
        calibrate(plan_of(1, dimension=10**6), Budget(epsilon=400, delta=1e-12))


@pytest.mark.parametrize(
    ("epsilon", "accountant"),
    [(1e-4, "pld"), (1e-4, "renyi"), (0.002, "renyi"), (0.05, "pld"), (50, "renyi")],
)
def test_extreme_budgets_are_met_or_refused(epsilon, accountant):
    plan, budget = plan_of(10, 0.1), Budget(epsilon=epsilon, delta=1e-5, accountant=accountant)
    try:
        found = calibrate(plan, budget)
    except InvalidSettings:
        assert epsilon < 0.01
    else:
        assert 0 <= found.epsilon <= epsilon


@pytest.mark.parametrize(("count", "rate"), [(2000, 50 / 1438), (1000, 0.01), (60, 0.1)])
@pytest.mark.parametrize("epsilon", [0.02, 0.3])
def test_small_budgets_are_spent_whole_and_need_less_noise_than_renyi(count, rate, epsilon):
    """Discretised too coarsely, losses of single releases look many times larger than they are."""
    plan, budget = plan_of(count, rate), Budget(epsilon=epsilon, delta=1e-5)
    found = calibrate(plan, budget)
    assert 0.99 * epsilon <= found.epsilon <= epsilon
    by_renyi = calibrate(plan, Budget(epsilon=epsilon, delta=1e-5, accountant="renyi"))
    assert 0.8 * by_renyi.noise_multiplier < found.noise_multiplier < by_renyi.noise_multiplier


def test_too_large_an_epsilon_is_refused_before_it_is_computed_for_long():
    with pytest.raises(InvalidSettings, match="lower epsilon"):
        calibrate(plan_of(1000, 0.01, dimension=10_000), Budget(epsilon=3000, delta=1e-5))


def test_filter_admits_exactly_what_converts_to_its_budget():
    for epsilon, delta in ((1, 1e-5), (20, 1e-5), (3, 1e-7)):
        found = RenyiFilter.for_budget(epsilon, delta)
        assert epsilon - 1e-3 <= found.spent(found.bound, delta) <= epsilon + 1e-9


def test_filter_never_promises_more_than_exact_composition():
    """A Gaussian that just fits the filter must cost less than the budget, exactly computed."""
    found = RenyiFilter.for_budget(5.0, 1e-5)
    sigma = math.sqrt(found.order / (2 * found.bound))
    assert renyi_divergence(plan_of(1), sigma, found.order) == pytest.approx(found.bound)
    assert 3.0 < gaussian_epsilon(sigma, 1e-5) < 5.0


def test_totals_grow_and_a_run_without_noise_costs_everything():
    one = (plan_of(100, 0.05), 2.0)
    assert composed_epsilon([one], 1e-5) < composed_epsilon([one, one], 1e-5)
    assert math.isinf(composed_epsilon([one, (plan_of(), 0.0)], 1e-5))


def test_epsilon_falls_with_noise_and_grows_with_steps():
    plan = plan_of(100, 0.05)
    epsilons = [epsilon_of(plan, z, 1e-5, "pld") for z in (0.8, 1.0, 2.0)]
    assert epsilons == sorted(epsilons, reverse=True)
    more = Plan((replace(plan.releases[0], count=200),))
    assert epsilon_of(more, 1.0, 1e-5, "pld") > epsilons[1]
