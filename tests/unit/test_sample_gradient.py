"""Gradients by generated images: what a unit can change, and what that is charged as."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from door import LOOSE, a_vault, access_to, open_curator, records_of, some_images, without
from understudy.errors import InvalidSettings, PlanViolation
from understudy.privacy import accounting
from understudy.privacy.accounting import (
    composed_epsilon,
    epsilon_of,
    renyi_divergence,
    replaced_divergence,
)
from understudy.privacy.calibration import calibrate
from understudy.privacy.ensemble import Ensemble, shards
from understudy.privacy.plan import Budget, Plan, PlannedRelease, PublicFacts
from understudy.privacy.randomness import SAMPLER_REACH, tail_delta
from understudy.privacy.releases.sample_gradient import sample_gradient

MEMBERS, BATCH = 4, 3
IMAGES = torch.linspace(0, 1, BATCH * 64).view(BATCH, 1, 8, 8)
LABELS = torch.arange(BATCH)
FACTS = PublicFacts(
    units=12, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,), max_per_unit=1
)


def sum_up(state, images, labels, exist, public):
    return state + (images.flatten(1) * exist[:, None]).sum(0)


def shout(state, images, labels):
    """Each member wants something else, and far too much of it."""
    return 1e3 * ((images.flatten(1) @ (7 * state).sin()) * (labels + 1)).sum()


def an_ensemble(data) -> Ensemble:
    start = torch.zeros(MEMBERS, 64)
    made = Ensemble(records_of(data), FACTS, start, members=MEMBERS, at_once=2)
    made.learn(sum_up, torch.arange(3))
    return made


def the_sum(data, made, *, asked=tuple(range(MEMBERS)), bound=0.5, loss=shout, **options):
    """Return what is released without noise, times the number that it was divided by."""
    access = access_to(data, select=asked, sampling_rate=0.25, **options)
    mean = sample_gradient(access, made, loss, IMAGES, LABELS, bound=bound)
    assert mean.shape == IMAGES.shape
    return mean.double() * 0.25 * MEMBERS


def plan_of(count=1, rate=0.2, kind="sample_gradient", others=()) -> Plan:
    line = PlannedRelease(name=kind, kind=kind, count=count, dimension=100, sampling_rate=rate)
    return Plan((line, *others))


# What a unit can change


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    unit=st.integers(0, 10),
    asked=st.sets(st.integers(0, MEMBERS - 1)),
)
def test_emptying_a_unit_moves_the_sum_by_at_most_two_bounds(seed, unit, asked):
    data = some_images(12, seed=seed)
    gone = without(data, unit)
    before, after = an_ensemble(data), an_ensemble(gone)
    changed = (before._state != after._state).any(1)
    assert changed.sum() == 1
    asked = tuple(sorted(asked))
    moved = (the_sum(data, before, asked=asked) - the_sum(gone, after, asked=asked)).norm()
    assert moved <= 2 * 0.5 * (1 + 1e-6)
    if int(changed.nonzero()) not in asked:
        assert moved == 0


def test_two_bounds_are_reached():
    """A member that turns round when a record is missing: add/remove would charge too little."""
    data = some_images(12)
    gone = without(data, int(shards(12, MEMBERS)[1, 0]))
    sums = []
    for d in (data, gone):
        made = Ensemble(records_of(d), FACTS, torch.zeros(MEMBERS), members=MEMBERS, at_once=2)
        made.learn(lambda s, images, labels, exist, public: s + exist.sum(), torch.arange(3))
        turned = lambda s, images, labels: torch.where(s == 3, 9.0, -9.0) * images.sum()  # noqa: E731
        sums.append(the_sum(d, made, loss=turned))
    assert (sums[0] - sums[1]).norm() == pytest.approx(1.0, rel=1e-5)


def test_the_bound_is_on_all_images_together():
    data = some_images(12)
    made = an_ensemble(data)
    one = the_sum(data, made, asked=(2,))
    assert one.norm() == pytest.approx(0.5, rel=1e-5)
    each = one.flatten(1).norm(dim=1)
    assert torch.allclose(each / each[0], torch.tensor([1.0, 2.0, 3.0]).double())  # not cut apart


def test_only_those_asked_answer_and_the_mean_is_over_the_expected_number():
    data = some_images(12)
    made = an_ensemble(data)
    parts = [the_sum(data, made, asked=(member,)) for member in range(MEMBERS)]
    assert torch.allclose(the_sum(data, made, asked=(0, 3)), parts[0] + parts[3], atol=1e-6)
    assert the_sum(data, made, asked=()).norm() == 0


def test_noise_is_scaled_to_two_bounds_whoever_is_asked():
    data = some_images(12)
    for asked in ((), (1, 2)):
        silent = the_sum(
            data, an_ensemble(data), asked=asked, loss=lambda s, images, labels: 0 * images.sum(),
            noise_multiplier=3.0, noise=1.0,
        )  # fmt: skip
        assert torch.allclose(silent, torch.full_like(silent, 3.0))


def test_gradients_that_are_not_finite_count_zero():
    data = some_images(12)
    broken = the_sum(
        data, an_ensemble(data), loss=lambda s, images, labels: images.sum() * torch.inf
    )
    assert broken.norm() == 0


def test_members_are_asked_independently_at_the_planned_rate(ledger, tmp_path):
    """A hundred members that say 1, without noise: the sums are binomial."""
    vault = a_vault(ledger, some_images(100))
    curator = open_curator(
        ledger, tmp_path, vault=vault, kind="sample_gradient", count=400, sampling_rate=0.3,
        budget=Budget(epsilon=math.inf, delta=1e-5),
    )  # fmt: skip
    made = curator.ensemble(torch.zeros(100), members=100)
    image, label = torch.zeros(1, 1, 1, 1), torch.zeros(1)
    asked = [
        30 * curator.sample_gradient(made, lambda s, x, y: x.sum(), image, label, bound=1.0).item()
        for _ in range(400)
    ]
    assert np.mean(asked) == pytest.approx(30, abs=5 * math.sqrt(21 / 400))
    assert np.var(asked) == pytest.approx(21, rel=0.4)


# What is asked for in vain


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_senseless_bounds_are_refused(bound):
    data = some_images(12)
    with pytest.raises(PlanViolation, match="bound"):
        the_sum(data, an_ensemble(data), bound=bound)


def test_a_gradient_is_held_to_the_plan(ledger, tmp_path):
    vault = a_vault(ledger, some_images(12))
    curator = open_curator(ledger, tmp_path, vault=vault, kind="sample_gradient", dimension=64)
    made = curator.ensemble(torch.zeros(MEMBERS, 64), members=MEMBERS)
    with pytest.raises(PlanViolation, match="64 coordinates"):
        curator.sample_gradient(made, shout, IMAGES, LABELS, bound=1.0)
    with pytest.raises(PlanViolation, match="asked for as votes"):
        curator.votes(made, lambda s, p: s, dimension=64, bound=1.0, release="sample_gradient")
    other = open_curator(ledger, tmp_path, vault=a_vault(ledger, some_images(12, seed=1, name="b")))
    strange = other.ensemble(torch.zeros(MEMBERS, 64), members=MEMBERS)
    with pytest.raises(PlanViolation, match="other records"):
        curator.sample_gradient(strange, shout, IMAGES[:1], LABELS[:1], bound=1.0)
    assert curator.made() == {"sample_gradient": 0}


def test_a_run_that_was_cut_off_does_not_go_on_with_ignorant_critics(ledger, tmp_path):
    vault = a_vault(ledger, some_images(12))

    def opened():
        return open_curator(ledger, tmp_path, vault=vault, kind="sample_gradient", run_id="v")

    curator = opened()
    made = curator.ensemble(torch.zeros(MEMBERS, 64), members=MEMBERS)
    curator.sample_gradient(made, shout, IMAGES, LABELS, bound=1.0)
    curator.checkpoint(1, {})
    curator.made()
    with pytest.raises(InvalidSettings, match="start a new run"):
        opened().ensemble(torch.zeros(MEMBERS, 64), members=MEMBERS)


# What it is charged as


def mixtures(rate: float, multiplier: float, first: float = 0.5, second: float = -0.5):
    """Return a grid and the densities of the two neighbours' answers on it, in units of 2 C."""
    at = np.linspace(-30 * max(1, multiplier), 30 * max(1, multiplier), 1_000_001)
    none = (1 - rate) * norm.pdf(at, 0, multiplier)
    return at, *(none + rate * norm.pdf(at, mean, multiplier) for mean in (first, second))


def hockey_stick(at, upper, lower, epsilon: float) -> float:
    return float(np.trapezoid(np.maximum(upper - math.exp(epsilon) * lower, 0), at))


PAIRS = [(0.05, 0.4), (0.2, 0.7), (0.3, 2.0), (0.9, 1.0)]


@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_losses_are_those_of_the_pair_that_the_release_names(rate, multiplier):
    found = accounting._losses(accounting._gaussians(plan_of(rate=rate), multiplier), 1e-4)
    at, upper, lower = mixtures(rate, multiplier)
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        by_hand = hockey_stick(at, upper, lower, epsilon)
        assert found.get_delta_for_epsilon(epsilon) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_no_other_two_answers_are_told_apart_more_easily(rate, multiplier):
    """Answers of any length on one line; add/remove is among them."""
    worst = mixtures(rate, multiplier)
    for first, second in ((0.5, 0.0), (0.0, -0.5), (0.5, -0.2), (-0.5, 0.3), (0.5, 0.4)):
        pair = mixtures(rate, multiplier, first, second)
        for epsilon in (0.0, 0.3, 1.0):
            assert hockey_stick(*pair, epsilon) <= hockey_stick(*worst, epsilon) + 1e-9


@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_no_two_answers_in_a_plane_are_either(rate, multiplier):
    side = np.linspace(-9, 9, 301) * max(0.5, multiplier)
    x, y = np.meshgrid(side, side)
    cell = (side[1] - side[0]) ** 2

    def density(mean):
        return norm.pdf(x, mean[0], multiplier) * norm.pdf(y, mean[1], multiplier)

    def told_apart(first, second, epsilon):
        upper, lower = ((1 - rate) * density((0, 0)) + rate * density(m) for m in (first, second))
        return float(np.maximum(upper - math.exp(epsilon) * lower, 0).sum() * cell)

    for epsilon in (0.0, 0.3, 1.0):
        worst = told_apart((0.5, 0), (-0.5, 0), epsilon)
        for turn in (0.1, 1.0, math.pi / 2, 2.5):
            second = (0.5 * math.cos(turn), 0.5 * math.sin(turn))
            assert told_apart((0.5, 0), second, epsilon) <= worst + 1e-9


@pytest.mark.parametrize("accountant", ["pld", "renyi"])
@pytest.mark.parametrize("count", [1, 50])
def test_replacement_costs_more_than_removal_and_less_than_no_sampling(accountant, count):
    """Against add/remove of C under the same noise, whose multiplier is then twice as large."""
    plan = plan_of(count)
    removal = epsilon_of(plan_of(count, kind="gradient"), 2.0, 1e-5, accountant)
    replacement = epsilon_of(plan, 1.0, 1e-5, accountant)
    everyone = epsilon_of(plan_of(count, rate=1.0), 1.0, 1e-5, accountant)
    assert removal * 1.1 < replacement < everyone


def test_at_rate_one_it_costs_what_votes_do():
    plans = [plan_of(7, rate=1.0, kind=kind) for kind in ("votes", "sample_gradient")]
    for accountant in ("pld", "renyi"):
        assert len({epsilon_of(plan, 3.0, 1e-5, accountant) for plan in plans}) == 1


@pytest.mark.parametrize("order", [1.5, 2, 8, 64])
@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_renyi_divergence_equals_the_integral(rate, multiplier, order):
    found = replaced_divergence(rate, multiplier, order)
    assert found == pytest.approx(divergence(rate, multiplier, order), rel=1e-5, abs=1e-9)
    assert found == renyi_divergence(plan_of(rate=rate), multiplier, order)


@pytest.mark.parametrize(
    ("rate", "multiplier", "order"), [(0.99999, 5, 512), (0.999, 20, 1024), (0.9999, 5, 400)]
)
def test_renyi_divergence_reaches_the_last_peak_of_hardly_sampled_releases(rate, multiplier, order):
    found = replaced_divergence(rate, multiplier, order)
    assert found == pytest.approx(divergence(rate, multiplier, order), rel=1e-5)


def divergence(rate, multiplier, order):
    """The same on a grid of millions of points."""
    at = np.linspace(-60, 60 + 60 * order, 2_000_001) * max(1, multiplier)
    logs = [
        np.logaddexp(
            math.log(1 - rate) + norm.logpdf(at, 0, multiplier),
            math.log(rate) + norm.logpdf(at, mean, multiplier),
        )
        for mean in (0.5, -0.5)
    ]
    exponent = order * logs[0] + (1 - order) * logs[1]
    peak = exponent.max()
    integral = peak + math.log(np.trapezoid(np.exp(exponent - peak), at))
    return integral / (order - 1)


def test_with_hardly_any_noise_the_divergence_is_that_without_sampling():
    assert replaced_divergence(0.1, 1e-5, 512) == pytest.approx(512 / 2e-10)


@pytest.mark.parametrize("accountant", ["pld", "renyi"])
def test_a_plan_is_calibrated(accountant):
    plan = plan_of(200, 0.25)
    found = calibrate(plan, Budget(epsilon=4, delta=1e-5, accountant=accountant))
    assert 4 - 1e-3 <= found.epsilon <= 4
    assert tail_delta(plan, found.noise_multiplier) <= found.delta_tail
    less = epsilon_of(plan, 0.98 * found.noise_multiplier, found.delta_accounted, accountant)
    assert less > 4


def test_it_composes_with_other_releases():
    other = PlannedRelease(name="histogram", kind="histogram", count=1, dimension=3)
    sampled = PlannedRelease(
        name="gradient", kind="gradient", count=20, dimension=3, sampling_rate=0.1
    )
    alone, mixed = plan_of(50), plan_of(50, others=(other, sampled))
    for accountant in ("pld", "renyi"):
        parts = [
            epsilon_of(plan, 1.5, 1e-5, accountant, interval=1e-3)
            for plan in (alone, Plan((other,)), Plan((sampled,)))
        ]
        whole = epsilon_of(mixed, 1.5, 1e-5, accountant, interval=1e-3)
        assert max(parts) < whole < sum(parts)
    together = composed_epsilon([(alone, 1.5), (Plan((other, sampled)), 1.5)], 1e-5)
    assert together == pytest.approx(epsilon_of(mixed, 1.5, 1e-5, "renyi"))


@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_the_tail_covers_outcomes_that_only_one_neighbour_has(rate, multiplier):
    """Along one axis, where shifts are whole: outside the box of none, or of the other answer."""
    reach, shift = SAMPLER_REACH, 0.5 / multiplier

    def beyond(by):
        return norm.sf(reach - by) - norm.sf(reach)

    exact = (1 - rate) * beyond(shift) + rate * max(beyond(shift), beyond(2 * shift))
    assert exact <= tail_delta(plan_of(rate=rate), multiplier)
    everyone = plan_of(rate=1.0)
    assert tail_delta(everyone, 1.0) == tail_delta(plan_of(rate=1.0, kind="votes"), 1.0)


def test_a_lifetime_budget_counts_it(ledger, tmp_path):
    vault = a_vault(ledger, some_images(30), lifetime_epsilon=20.0)
    open_curator(
        ledger, tmp_path, vault=vault, kind="sample_gradient", sampling_rate=0.2, budget=LOOSE,
        run_id="first",
    )  # fmt: skip
    assert ledger.run("first")["divergence"] > 0
