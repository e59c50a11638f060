"""Ensembles: disjoint shards, isolated members, and the votes that leave."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from door import LOOSE, a_vault, access_to, open_curator, records_of, some_images, without
from static import static_engine
from understudy.errors import Interrupted, InvalidSettings, PlanViolation, PrivateAccess
from understudy.privacy import ensemble as module
from understudy.privacy.curator import Pace
from understudy.privacy.ensemble import Ensemble, shards
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.privacy.releases.votes import Placed, votes
from understudy.training.engine import Engine

MEMBERS = 4
UNITS = [0, 0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 11]
CLASSES = tuple("abc")


def facts_of(data, max_per_unit=None):
    units = int(data.units.max()) + 1
    return PublicFacts(
        units=units, class_names=CLASSES, shape=(1, 8, 8), mean=(0.5,), std=(0.5,), unit=data.unit,
        max_per_unit=max_per_unit,
    )  # fmt: skip


def learn(state, images, labels, counts, public):
    """A linear network with momentum: enough state for something to leak, if it could."""
    weight, velocity = state["weight"], state["velocity"]
    pixels = images.flatten(1)
    wanted = torch.nn.functional.one_hot(labels, 3).float()
    slope = ((pixels @ weight - wanted) * counts[:, None]).T @ pixels / len(pixels)
    velocity = 0.9 * velocity + slope.T
    return {"weight": weight - public * velocity, "velocity": velocity}


def an_ensemble(data, *, members=MEMBERS, max_per_unit=None, steps=3, at_once=3, engine=None):
    per_unit = max_per_unit if data.unit != "record" else None
    records = records_of(data, max_per_unit=per_unit)
    start = {
        "weight": torch.linspace(-1, 1, 64 * 3).view(1, 64, 3).repeat(members, 1, 1),
        "velocity": torch.zeros(members, 64, 3),
    }
    made = Ensemble(
        records, facts_of(data, per_unit), start, members=members, at_once=at_once, engine=engine
    )
    for step in range(steps):
        made.learn(learn, torch.arange(made.shard).roll(step)[:2], torch.tensor(0.01))
    return made


def changed_members(one, other) -> int:
    differs = torch.zeros(one.members, dtype=torch.bool)
    for name in ("weight", "velocity"):
        differs |= (one._state[name] != other._state[name]).flatten(1).any(1)
    return int(differs.sum())


def ask(state, public):
    return (public @ state["weight"]).flatten()


@pytest.mark.parametrize(("units", "members"), [(12, 4), (13, 4), (60_000, 4000), (5, 5), (7, 1)])
def test_every_slot_is_in_at_most_one_shard(units, members):
    slots = shards(units, members)
    assert slots.shape == (members, units // members)
    assert len(slots.unique()) == slots.numel()
    assert torch.equal(slots, shards(units, members))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 10), groups=st.booleans())
def test_emptying_a_unit_changes_one_member_at_most(seed, unit, groups):
    data = some_images(17, units=UNITS if groups else None, seed=seed)
    options = {"max_per_unit": 2} if groups else {}
    before, after = (an_ensemble(d, **options) for d in (data, without(data, unit)))
    assert changed_members(before, after) <= 1


def test_what_members_learn_does_not_come_back_in_what_they_started_as():
    """Members learn in place: not in tensors that the method still holds."""
    data = some_images(12)
    start = {"weight": torch.ones(4, 64, 3), "velocity": torch.zeros(4, 64, 3)}
    made = Ensemble(records_of(data), facts_of(data), start, members=4, at_once=2)
    made.learn(learn, torch.arange(3), torch.tensor(0.01))
    assert not torch.equal(made._state["weight"], torch.ones(4, 64, 3))
    assert torch.equal(start["weight"], torch.ones(4, 64, 3))
    assert torch.equal(start["velocity"], torch.zeros(4, 64, 3))


def test_an_ensemble_of_other_records_is_not_asked(ledger, tmp_path):
    """Its answers would be charged to the wrong data set."""
    ours, theirs = (
        open_curator(
            ledger, tmp_path, vault=a_vault(ledger, some_images(12, seed=n, name=f"set{n}")),
            kind="votes", dimension=3,
        )
        for n in range(2)
    )  # fmt: skip
    made = theirs.ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)
    with pytest.raises(PlanViolation, match="other records"):
        ours.votes(made, lambda state, public: state, dimension=3, bound=1.0)
    assert ours.made() == {"votes": 0}


def test_an_ensemble_may_come_after_another_release(ledger, tmp_path):
    vault = a_vault(ledger, some_images(12))
    lines = [
        PlannedRelease(name=kind, kind=kind, count=1, dimension=3)
        for kind in ("histogram", "votes")
    ]
    curator = vault.open(
        Plan(tuple(lines)), LOOSE, ledger, workspace=tmp_path / "w", run_id="r",
        allow_large_delta=True,
    )  # fmt: skip
    curator.histogram()
    made = curator.ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)
    assert curator.votes(made, lambda state, public: state, dimension=3, bound=1.0).shape == (3,)


def test_a_place_without_a_record_shows_nothing_of_anybody_else():
    """Emptied slots point somewhere; a careless method that takes them for records learns zeros."""

    def careless(state, images, labels, exist, public):
        return {"seen": state["seen"] + images.sum() + labels.sum()}

    def seen(data):
        start = {"seen": torch.zeros(MEMBERS)}
        made = Ensemble(records_of(data), facts_of(some_images(12)), start, members=4, at_once=2)
        made.learn(careless, torch.arange(3))
        return made._state["seen"]

    data = some_images(12)
    slots = shards(12, MEMBERS)
    first, second = int(slots[0, 0]), int(slots[1, 0])
    gone = without(data, first)
    changed = seen(gone) != seen(without(gone, second))
    assert changed.tolist() == [False, True, False, False]
    assert seen(gone)[0] < seen(data)[0]


def test_emptying_a_unit_that_is_used_changes_its_member():
    data = some_images(12)
    before, after = (an_ensemble(d, steps=6) for d in (data, without(data, 5)))
    assert changed_members(before, after) == 1


def test_a_unit_in_two_shards_would_be_found(monkeypatch):
    """The brute force above can fail."""
    slots = shards(12, MEMBERS).clone()
    slots[1, 0] = slots[0, 0]
    monkeypatch.setattr(module, "shards", lambda units, members: slots)
    data, unit = some_images(12), int(slots[0, 0])
    before, after = (an_ensemble(d, steps=6) for d in (data, without(data, unit)))
    assert changed_members(before, after) == 2


def test_state_that_members_share_would_be_found():
    def shared(data):
        made = an_ensemble(data, steps=0)
        made._state["velocity"] = made._state["velocity"][:1].expand(MEMBERS, -1, -1)
        with pytest.raises(RuntimeError):  # one place for all members cannot be written to
            made.learn(learn, torch.arange(2), torch.tensor(0.01))

    shared(some_images(12))


def test_the_size_of_a_chunk_changes_nothing():
    one, other = (an_ensemble(some_images(24), at_once=n) for n in (1, 100))
    assert torch.allclose(one._state["weight"], other._state["weight"], atol=1e-6)


@pytest.mark.parametrize(("answer", "at_once"), [(0, 24), (2**22, 3), (2**30, 1)])
def test_there_is_room_for_what_members_are_asked_for(answer, at_once):
    facts = facts_of(some_images(24))
    made = Ensemble(records_of(some_images(24)), facts, torch.zeros(24), members=24, answer=answer)
    assert made._at_once == at_once


def test_compiled_members_learn_and_answer_the_same(monkeypatch):
    engine = static_engine(monkeypatch)
    engines = Engine(compile=False), engine
    one, other = (an_ensemble(some_images(24), at_once=2, engine=e) for e in engines)
    assert torch.allclose(one._state["weight"], other._state["weight"], atol=1e-6)
    public = torch.linspace(0, 1, 64)
    said, compiled = (torch.cat(list(made.answers(ask, public))) for made in (one, other))
    assert torch.allclose(said, compiled, atol=1e-5)
    assert engine.said == []
    assert len(engine._programs) == 2  # one for all chunks and steps, one for all answers


def test_members_learn_from_their_own_records_alone():
    data = some_images(12)
    made = an_ensemble(data, steps=1)
    by_hand = torch.linspace(-1, 1, 64 * 3).view(64, 3)
    slots = shards(12, MEMBERS)[2][:2]
    images = torch.from_numpy(data.images[slots]).float().flatten(1) / 255
    wanted = torch.nn.functional.one_hot(torch.from_numpy(data.labels[slots]), 3).float()
    slope = (images @ by_hand - wanted).T @ images / 2
    assert torch.allclose(made._state["weight"][2], by_hand - 0.01 * slope.T, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000), unit=st.integers(0, 10), positive=st.booleans(),
    placed=st.booleans(),
)  # fmt: skip
def test_votes_move_by_at_most_the_sensitivity(seed, unit, positive, placed):
    """Whatever members say: here they shout, each another thing."""
    data = some_images(12, seed=seed)
    public = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))

    def shout(state, public):
        said = 1e3 * ask(state, public).sin()
        return Placed(said[:3], said[3].long() % 5) if placed else said

    released = [
        votes(
            access_to(d, sampling_rate=1.0), an_ensemble(d, steps=6), shout, public, dimension=15,
            bound=0.5, is_non_negative=positive,
        )
        for d in (data, without(data, unit))
    ]  # fmt: skip
    limit = 0.5 * (2**0.5 if positive else 2)
    assert (released[0] - released[1]).norm() <= limit * (1 + 1e-6)


def test_the_sensitivity_is_reached():
    """A member that turns round when a record is missing: no smaller number would do."""
    data = some_images(12)
    slots = shards(12, MEMBERS)

    def turn(state, images, labels, counts, public):
        return {"sum": state["sum"] + counts.sum()}

    def say(state, public):
        return torch.where(state["sum"] == 3, 1.0, -1.0)[None] * torch.ones(4)

    released = []
    for d in (data, without(data, int(slots[1, 0]))):
        records, start = records_of(d), {"sum": torch.zeros(MEMBERS)}
        made = Ensemble(records, facts_of(data), start, members=MEMBERS, at_once=2)
        made.learn(turn, torch.arange(3))
        access = access_to(d, sampling_rate=1.0)
        released.append(votes(access, made, say, None, dimension=4, bound=2.0))
    assert (released[0] - released[1]).norm() == pytest.approx(4.0, rel=1e-5)


def test_noise_goes_by_the_sensitivity():
    data = some_images(12)
    access = access_to(data, sampling_rate=1.0, noise_multiplier=3.0, noise=1.0)
    for positive, sensitivity in ((False, 1.0), (True, 0.5 * 2**0.5)):
        said = votes(
            access, an_ensemble(data), lambda state, public: torch.zeros(7), None, dimension=7,
            bound=0.5, is_non_negative=positive,
        )  # fmt: skip
        assert torch.allclose(said, torch.full((7,), 3 * sensitivity, dtype=torch.float64))


def shouted(data, *, is_replaced=False, **changes):
    """Return what members say together that each have one unit: most, if they have no record."""

    def look(state, images, labels, counts, public):
        return state + counts.sum()

    def say(state, public):
        return torch.where(state > 0, -0.3, 1.0) * torch.ones(4)

    made = Ensemble(records_of(data), facts_of(data), torch.zeros(12), members=12, at_once=5)
    made.learn(look, torch.arange(1))
    access = access_to(data, sampling_rate=1.0, **changes)
    return votes(access, made, say, None, dimension=4, bound=0.5, is_replaced=is_replaced)


def test_without_its_only_unit_a_member_has_no_vote():
    """So a missing unit takes one vote away; it does not turn it round."""
    data = some_images(12)
    whole = shouted(data)
    assert torch.allclose(whole, torch.full((4,), 12 * -0.25, dtype=torch.float64), rtol=1e-5)
    for gone in range(11):
        rest = shouted(without(data, gone))
        assert (whole - rest).norm() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(("is_replaced", "sensitivity"), [(False, 0.5), (True, 2 * 0.5)])
def test_noise_on_votes_of_single_units_goes_by_what_one_may_change(is_replaced, sensitivity):
    noisy = shouted(some_images(12), is_replaced=is_replaced, noise_multiplier=2.0, noise=1.0)
    expected = torch.full((4,), 12 * -0.25 + 2 * sensitivity, dtype=torch.float64)
    assert torch.allclose(noisy, expected, rtol=1e-5)


def test_a_single_unit_that_may_be_replaced_has_a_vote_whatever_it_is():
    data = some_images(12)
    sums = [shouted(d, is_replaced=True) for d in (data, without(data, 3))]
    assert torch.dist(*sums) == pytest.approx(2 * 0.5, rel=1e-5)


def of_both_forms(data, *, block=3, scale=1.0, positive=False):
    """Return the sum of votes on one of five blocks each: as blocks, and written out."""
    public = torch.randn(block, 64, generator=torch.Generator().manual_seed(1))

    def say(state, public):
        said = scale * ask(state, public).flatten()[: public.shape[0]]
        return Placed(said, (said[0].abs() * 1e4).long() % 5)

    def write_out(state, public):
        said, place = say(state, public)
        return (torch.arange(5) == place)[:, None] * said

    return [
        votes(
            access_to(data, sampling_rate=1.0), an_ensemble(data, steps=6), way, public,
            dimension=5 * block, bound=0.5, is_non_negative=positive,
        )
        for way in (say, write_out)
    ]  # fmt: skip


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("scale", [1e-2, 1e3, math.nan])
def test_a_placed_vote_is_what_it_would_be_with_its_zeros(scale, positive):
    placed, whole = of_both_forms(some_images(12), scale=scale, positive=positive)
    assert torch.allclose(placed, whole, rtol=1e-12, atol=1e-12)
    assert bool(placed.any()) == (not math.isnan(scale))


@pytest.mark.parametrize(("place", "heard"), [(1, 11), (-1, 0), (3, 0), (10**9, 0)])
def test_blocks_count_where_they_are_and_members_with_a_record(place, heard):
    data = some_images(12)
    made = Ensemble(records_of(without(data, 3)), facts_of(data), torch.zeros(12), members=12)
    said = votes(
        access_to(data, sampling_rate=1.0), made,
        lambda state, public: Placed(torch.ones(2), torch.tensor(place)), None,
        dimension=6, bound=10.0,
    )  # fmt: skip
    assert said.tolist() == pytest.approx([0, 0, heard, heard, 0, 0], rel=1e-5)


@pytest.mark.parametrize(
    "said",
    [
        Placed(torch.ones(4), torch.tensor(0)),
        Placed(torch.ones(0), torch.tensor(0)),
        Placed(torch.ones(3), torch.zeros(2, dtype=torch.long)),
    ],
    ids=["a block that does not fit", "no block", "two places"],
)
def test_blocks_that_do_not_fit_are_refused(said):
    data = some_images(12)
    with pytest.raises(PlanViolation, match="expected one that fits into 15"):
        votes(
            access_to(data, sampling_rate=1.0), an_ensemble(data), lambda state, public: said, None,
            dimension=15, bound=0.5,
        )  # fmt: skip


def test_each_member_gets_its_own_part():
    own = torch.arange(MEMBERS * 2.0).view(MEMBERS, 2)
    access = access_to(some_images(12), sampling_rate=1.0)
    said = votes(
        access, an_ensemble(some_images(12)), lambda state, public, mine: mine, None, own,
        dimension=2, bound=100.0,
    )  # fmt: skip
    assert said.tolist() == pytest.approx(own.sum(0).tolist(), rel=1e-6)


def test_votes_that_are_not_finite_count_zero():
    access = access_to(some_images(12), sampling_rate=1.0)
    said = votes(
        access, an_ensemble(some_images(12)), lambda state, public: torch.full((2,), torch.nan),
        None, dimension=2, bound=1.0,
    )  # fmt: skip
    assert said.tolist() == [0, 0]


def test_random_numbers_of_a_member_are_refused():
    def random(state, images, labels, counts, public):
        return {name: leaf + torch.randn_like(leaf) for name, leaf in state.items()}

    with pytest.raises(PlanViolation):
        an_ensemble(some_images(12), steps=0).learn(random, torch.arange(2))


def test_an_ensemble_gives_nothing_away():
    made = an_ensemble(some_images(12))
    assert "sealed" in repr(made)
    for look in (pickle.dumps, len, list, lambda e: e[0], np.asarray):
        with pytest.raises(PrivateAccess):
            look(made)


@pytest.mark.parametrize("members", [0, 13])
def test_ensembles_of_a_senseless_size_are_refused(members):
    with pytest.raises(InvalidSettings, match="members"):
        an_ensemble(some_images(12), members=members)


def test_units_of_any_size_are_refused():
    with pytest.raises(InvalidSettings, match="--max-per-unit"):
        an_ensemble(some_images(17, units=UNITS))


def test_a_state_for_another_number_of_members_is_refused():
    data = some_images(12)
    with pytest.raises(InvalidSettings, match="in front"):
        Ensemble(records_of(data), facts_of(data), torch.zeros(3), members=4, at_once=1)


def test_a_vote_is_held_to_the_plan(ledger, tmp_path):
    vault = a_vault(ledger, some_images(12))
    curator = open_curator(ledger, tmp_path, vault=vault, kind="votes", count=2, dimension=3)
    made = curator.ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)
    with pytest.raises(PlanViolation, match="3 coordinates"):
        curator.votes(made, lambda state, public: state, dimension=4, bound=1.0)
    with pytest.raises(PlanViolation, match="vote with 3"):
        curator.votes(made, lambda state, public: state, dimension=2, bound=1.0)
    said = curator.votes(made, lambda state, public: state, dimension=3, bound=1.0)
    assert said.shape == (3,)
    assert said.abs().max() > 0  # noise


def test_members_are_never_sampled_without_saying_so(ledger, tmp_path):
    curator = open_curator(ledger, tmp_path, kind="votes", sampling_rate=0.5)
    made = curator.ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)
    with pytest.raises(PlanViolation, match="rate 1"):
        curator.votes(made, lambda state, public: state, dimension=3, bound=1.0)


def test_a_run_that_was_cut_off_does_not_go_on_with_an_ignorant_ensemble(ledger, tmp_path):
    vault = a_vault(ledger, some_images(12))

    def opened():
        return open_curator(ledger, tmp_path, vault=vault, kind="votes", run_id="v", dimension=3)

    curator = opened()
    made = curator.ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)
    curator.votes(made, lambda state, public: state, dimension=3, bound=1.0)
    curator.checkpoint(1, {})
    curator.made()
    with pytest.raises(InvalidSettings, match="start a new run"):
        opened().ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)


@pytest.mark.parametrize(
    ("keeps", "count", "advice"),
    [
        (True, 2, "with --resume to continue"),
        (False, 2, "start a new run .*, with --keep-private-state"),
        (False, 1, "with --resume to continue"),  # nobody will be asked any more
    ],
)
def test_a_stop_says_whether_the_run_can_go_on(ledger, tmp_path, keeps, count, advice):
    pace = Pace(keeps_members=keeps, should_stop=lambda: True)
    curator = open_curator(
        ledger, tmp_path, vault=a_vault(ledger, some_images(12)), kind="votes", dimension=3,
        pace=pace, count=count,
    )  # fmt: skip
    ours = curator.ensemble(torch.zeros(MEMBERS, 3), members=MEMBERS)
    curator.votes(ours, lambda state, _: state, dimension=3, bound=1.0)
    with pytest.raises(Interrupted, match=f"1 of {count} releases, all committed.*{advice}"):
        curator.checkpoint(1, {})


@pytest.mark.parametrize("keeps", [True, False])
def test_what_members_learned_goes_on_only_if_it_was_to_be_kept(ledger, tmp_path, keeps):
    vault = a_vault(ledger, some_images(12))
    options = {"vault": vault, "kind": "votes", "dimension": 3, "run_id": "r"}
    pace = Pace(seconds=0.0, keeps_members=keeps)

    def made(curator):
        start = {"weight": torch.zeros(MEMBERS, 64, 3), "velocity": torch.zeros(MEMBERS, 64, 3)}
        return curator.ensemble(start, members=MEMBERS)

    before = open_curator(ledger, tmp_path, pace=pace, **options)
    ours = made(before)
    ours.learn(learn, torch.arange(3), torch.tensor(0.01))
    before.votes(ours, lambda state, _: state["weight"].sum(0), dimension=3, bound=1.0)
    before.checkpoint(1, {"seen": torch.ones(2)})

    after = open_curator(ledger, tmp_path, pace=pace, **options)
    if not keeps:
        with pytest.raises(InvalidSettings, match="--keep-private-state"):
            made(after)
        return
    theirs = made(after)
    assert theirs._state["weight"].any()
    assert changed_members(ours, theirs) == 0
    step, state = after.restore()
    assert step == 1
    assert set(state) == {"seen"}, "what members learned is not for methods"
