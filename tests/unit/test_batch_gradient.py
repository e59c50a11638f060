"""Gradients of a whole batch's loss: what a unit can change, and what that is charged as."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from door import LOOSE, a_vault, access_to, open_curator, some_images, without
from static import static_engine
from understudy.errors import InvalidSettings, PlanViolation
from understudy.methods.dp_sinkhorn import Remoteness
from understudy.methods.transport import Transport
from understudy.privacy import accounting
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.group import Group
from understudy.privacy.plan import Budget, Plan, PlannedRelease
from understudy.privacy.releases.batch_gradient import batch_gradient
from understudy.training import engine

GROUPS = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 5]
POINT = {"point": torch.linspace(-1, 1, 64)}
BATCH = 5
GENERATED = {"images": torch.linspace(-1, 1, BATCH * 64).sin().view(BATCH, 1, 8, 8)}
KNOWN = {"labels": torch.arange(BATCH) % 3, "own_slope": 0.01 * GENERATED["images"]}


def entangled(inputs, images, labels, counts):
    """Each record changes what all others do, far beyond any bound."""
    rows = images.flatten(1) * counts[:, None]
    return 1e3 * (inputs["point"] @ (7 * rows.sum(0)).sin())


def transported(*, by_class, temperature=0.1):
    return Remoteness(Transport(absolute=1.0, label_cost=30.0, temperature=temperature), by_class)


def the_answer(
    data, loss=entangled, params=None, public=None, *, bound=0.5, access=None, **options
):
    """Return what is released, in float64; without noise unless asked for."""
    access = access or access_to(data, **options)
    found = batch_gradient(access, loss, params or POINT, public, bound=bound)
    return torch.cat([part.double().flatten() for part in found.values()])


# What a unit can change


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    unit=st.integers(0, 4),
    others=st.sets(st.integers(0, 5)),
    loss=st.sampled_from(["entangled", "transport", "transport by class"]),
)
def test_emptying_a_unit_moves_the_answer_by_at_most_two_bounds(seed, unit, others, loss):
    data = some_images(12, units=GROUPS, seed=seed)
    asked = {"entangled": (entangled, POINT, None)}.get(
        loss, (transported(by_class="class" in loss), GENERATED, KNOWN)
    )
    others = tuple(sorted(others - {unit}))
    with_it = tuple(sorted((*others, unit)))
    full = the_answer(data, *asked, select=with_it)
    gone = the_answer(without(data, unit), *asked, select=with_it)
    assert full.norm() <= 0.5 * (1 + 1e-6)
    assert (full - gone).norm() <= 2 * 0.5 * (1 + 1e-6)
    # An empty slot that is sampled answers as if it had not been: the pair rests on it.
    assert torch.equal(gone, the_answer(data, *asked, select=others))


def test_two_bounds_are_reached():
    """A loss that turns round when a record is missing: a sensitivity of C would be too little."""
    data = some_images(12)

    def turning(inputs, images, labels, counts):
        return torch.where(counts.sum() == 12, 9.0, -9.0) * inputs["point"].sum()

    moved = (the_answer(data, turning) - the_answer(without(data, 4), turning)).norm()
    assert moved == pytest.approx(1.0, rel=1e-5)


def test_a_plan_that_one_record_turns_round_is_covered_too():
    """Transport itself: images follow the one white record, or the black ones without it."""
    data = some_images(12)
    data.images[:] = 0
    data.images[4] = 255
    loss = transported(by_class=False)
    known = KNOWN | {"own_slope": torch.zeros_like(GENERATED["images"])}
    grey = {"images": torch.zeros_like(GENERATED["images"])}
    alone = {"select": (4,)}
    towards = the_answer(data, loss, grey, known, **alone)
    away = the_answer(data, loss, grey, known, select=(3,))
    assert (towards - away).norm() == pytest.approx(1.0, rel=1e-5)
    assert the_answer(without(data, 4), loss, grey, known, **alone).norm() == 0


def test_the_bound_is_on_all_parameters_together():
    data = some_images(12)
    two = {"a": torch.zeros(3), "b": torch.zeros(2, 2)}

    def loss(inputs, images, labels, counts):
        return 30 * inputs["a"].sum() + 40 * inputs["b"].sum()

    found = batch_gradient(access_to(data), loss, two, bound=0.5)
    assert found["b"].shape == (2, 2)
    flat = torch.cat([part.flatten() for part in found.values()])
    assert flat.norm() == pytest.approx(0.5, rel=1e-5)
    assert found["b"][0, 0] / found["a"][0] == pytest.approx(4 / 3)
    small = batch_gradient(access_to(data), loss, two, bound=1e3)
    assert small["a"].tolist() == [30.0] * 3  # within the bound, nothing is scaled


def test_all_records_of_the_sampled_units_are_seen_together():
    seen = []

    def loss(inputs, images, labels, counts):
        seen.append((images, labels, counts))
        return inputs["point"].sum()

    data = some_images(12, units=GROUPS)
    the_answer(data, loss, select=(0, 3, 4))
    images, labels, counts = seen[0]
    expected = [0, 1, 2, 6, 7, 8, 9, 10]
    assert torch.equal(images, torch.from_numpy(data.images[expected]).float() / 255)
    assert labels.tolist() == data.labels[expected].tolist()
    assert counts.all()


def test_public_tensors_have_no_gradient():
    def loss(inputs, images, labels, counts):
        return (inputs["point"] * inputs["weight"]).sum()

    weight = torch.arange(64.0) / 1e3
    answer = the_answer(some_images(12), loss, public={"weight": weight})
    assert torch.allclose(answer, weight.double())


# Static shapes


@pytest.mark.parametrize("select", [(1, 4), tuple(range(40)), ()], ids=len)
def test_static_batches_give_the_same_answer(monkeypatch, select):
    """Filled up, or twice as large as expected: the loss sees the same records."""
    monkeypatch.setattr("understudy.privacy.sampling.BATCH_MULTIPLE", 4)
    data = some_images(41)
    engine = static_engine(monkeypatch)
    spread = transported(by_class=True, temperature=20.0)
    for asked in ((entangled,), (spread, GENERATED, KNOWN)):
        options = {"select": select, "sampling_rate": 0.1}
        plainly = the_answer(data, *asked, **options)
        access = replace(access_to(data, **options), engine=engine)
        assert torch.allclose(the_answer(data, *asked, access=access), plainly, atol=1e-5)
    assert not engine.said


def test_few_shapes_are_compiled(monkeypatch):
    data = some_images(41)
    engine = static_engine(monkeypatch)
    for count in range(40):
        access = access_to(data, select=tuple(range(count)), sampling_rate=0.1)
        the_answer(data, access=replace(access, engine=engine))
    assert len(engine.compiled) == 2


def test_what_fills_a_batch_up_is_nobodys_record(monkeypatch):
    """Even a loss that forgets to leave it out learns nothing of the unsampled."""

    def forgetful(inputs, images, labels, counts):
        return inputs["point"] @ (images.flatten(1).sum(0) + labels.sum())

    data, other = some_images(12), some_images(12)
    other.images[0], other.labels[0] = 99, 1
    answers = []
    for world in (data, other):
        access = replace(access_to(world, select=(3, 5)), engine=static_engine(monkeypatch))
        answers.append(the_answer(world, forgetful, access=access))
    assert torch.equal(*answers)


# Edges


@pytest.mark.parametrize("select", [(), (1, 2)])
def test_noise_is_scaled_to_two_bounds_whoever_is_sampled(select):
    silent = the_answer(
        some_images(12), lambda inputs, *_: 0 * inputs["point"].sum(), select=select,
        noise_multiplier=3.0, noise=1.0,
    )  # fmt: skip
    assert torch.allclose(silent, torch.full_like(silent, 3.0))


def test_on_a_cpu_no_size_of_a_batch_is_counted_or_compiled(monkeypatch):
    monkeypatch.setattr(engine, "TO_COMPILE", 0)
    access = access_to(some_images(12))
    for select in ((1, 2), (1, 2, 3), (1, 2)):
        asked = replace(access, randomness=access_to(some_images(12), select=select).randomness)
        batch_gradient(asked, entangled, POINT, bound=0.5)
    assert access.engine.compile
    assert access.engine._work == access.engine._programs == {}


def test_an_empty_batch_asks_no_loss():
    def never(*_):
        raise AssertionError

    assert the_answer(some_images(12), never, select=()).norm() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_counts_zero(poison):
    broken = the_answer(some_images(12), lambda inputs, *_: inputs["point"].sum() * poison)
    assert broken.norm() == 0


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_senseless_bounds_are_refused(bound):
    with pytest.raises(PlanViolation, match="bound"):
        the_answer(some_images(12), bound=bound)


def test_several_processes_are_refused():
    data = some_images(12)
    with pytest.raises(InvalidSettings, match="without torchrun"):
        the_answer(data, access=replace(access_to(data), group=Group(rank=0, size=2)))


def test_it_is_held_to_the_plan(ledger, tmp_path):
    vault = a_vault(ledger, some_images(12))
    curator = open_curator(ledger, tmp_path, vault=vault, kind="batch_gradient", dimension=60)
    with pytest.raises(PlanViolation, match="60 coordinates"):
        curator.batch_gradient(entangled, POINT, bound=1.0)
    with pytest.raises(PlanViolation, match="asked for as gradient"):
        curator.gradient(
            lambda p, x, y: p["w"].sum(), {"w": torch.zeros(2)}, clip_norm=1.0,
            release="batch_gradient",
        )  # fmt: skip
    assert curator.made() == {"batch_gradient": 0}


def test_units_are_sampled_at_the_planned_rate(ledger, tmp_path):
    """The number of records, without noise: binomial."""
    vault = a_vault(ledger, some_images(100))
    curator = open_curator(
        ledger, tmp_path, vault=vault, kind="batch_gradient", count=400, sampling_rate=0.3,
        budget=Budget(epsilon=math.inf, delta=1e-5),
    )  # fmt: skip

    def count(inputs, images, labels, counts):
        return inputs["point"].sum() * counts.sum()

    one = {"point": torch.zeros(1)}
    found = [curator.batch_gradient(count, one, bound=1e3)["point"].item() for _ in range(400)]
    assert np.mean(found) == pytest.approx(30, abs=5 * math.sqrt(21 / 400))
    assert np.var(found) == pytest.approx(21, rel=0.4)


# What it is charged as


def plan_of(count=1, rate=0.2, kind="batch_gradient") -> Plan:
    line = PlannedRelease(name=kind, kind=kind, count=count, dimension=100, sampling_rate=rate)
    return Plan((line,))


def hockey_stick(upper, lower, epsilon, cell) -> float:
    return float(np.maximum(upper - math.exp(epsilon) * lower, 0).sum() * cell)


PAIRS = [(0.05, 0.4), (0.2, 0.7), (0.3, 2.0), (0.9, 1.0)]


@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_losses_are_those_of_the_pair_that_the_release_names(rate, multiplier):
    found = accounting._losses(accounting._gaussians(plan_of(rate=rate), multiplier), 1e-4)
    at = np.linspace(-30, 31, 1_000_001) * max(1, multiplier)
    without_it, with_it = norm.pdf(at, 0, multiplier), norm.pdf(at, 1, multiplier)
    mixed = (1 - rate) * without_it + rate * with_it
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        by_hand = max(
            hockey_stick(*pair, epsilon, at[1] - at[0])
            for pair in ((mixed, without_it), (without_it, mixed))
        )
        assert found.get_delta_for_epsilon(epsilon) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(("rate", "multiplier"), PAIRS)
def test_no_two_answers_in_the_ball_are_told_apart_more_easily(rate, multiplier):
    """In a plane, in units of 2 C: the ball has radius 1/2, and v need not be its centre.

    Also where the other units' coins decide which two answers there are.
    """
    side = np.linspace(-9, 9, 301) * max(0.5, multiplier)
    x, y = np.meshgrid(side, side)
    cell = (side[1] - side[0]) ** 2

    def density(mean):
        return norm.pdf(x, mean[0], multiplier) * norm.pdf(y, mean[1], multiplier)

    def worlds(*answers):
        """Return densities with and without the unit; the others' coins choose (v, w)."""
        without_it = sum(density(v) for v, _ in answers) / len(answers)
        sampled = sum(density(w) for _, w in answers) / len(answers)
        return (1 - rate) * without_it + rate * sampled, without_it

    def told_apart(pair, epsilon):
        return max(hockey_stick(*p, epsilon, cell) for p in (pair, pair[::-1]))

    def at(turn, length=0.5):
        return length * math.cos(turn), length * math.sin(turn)

    worst = worlds((at(math.pi), at(0)))
    others = [
        worlds((at(turn), at(other, length)))
        for turn, other, length in ((0.3, 2.0, 0.5), (1.0, 4.0, 0.3), (0.0, 0.5, 0.5))
    ]
    others.append(worlds((at(math.pi), at(0)), (at(1.0), at(4.0, 0.2))))
    for epsilon in (0.0, 0.3, 1.0):
        for pair in others:
            assert told_apart(pair, epsilon) <= told_apart(worst, epsilon) + 1e-9


@pytest.mark.parametrize("accountant", ["pld", "renyi"])
def test_it_costs_what_a_gradient_of_twice_the_bound_does(accountant):
    plans = [plan_of(50, kind=kind) for kind in ("batch_gradient", "gradient")]
    found = {epsilon_of(plan, 1.5, 1e-5, accountant, interval=1e-3) for plan in plans}
    assert len(found) == 1
    replaced = plan_of(50, kind="sample_gradient")
    assert found.pop() > epsilon_of(replaced, 1.5, 1e-5, accountant, interval=1e-3)


def test_a_lifetime_budget_counts_it(ledger, tmp_path):
    vault = a_vault(ledger, some_images(30), lifetime_epsilon=20.0)
    open_curator(
        ledger, tmp_path, vault=vault, kind="batch_gradient", sampling_rate=0.2, budget=LOOSE,
        run_id="first",
    )  # fmt: skip
    assert ledger.run("first")["divergence"] > 0
