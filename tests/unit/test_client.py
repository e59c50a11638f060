"""A client of a federation: what leaves it is clipped, noisy, paid for, and sent once."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm

from critics import a_critic, a_round
from door import a_vault, some_images
from understudy.errors import (
    BudgetRefused,
    InvalidSettings,
    LedgerError,
    PrivateAccess,
    RoundDeclined,
)
from understudy.privacy.accounting import epsilon_of_sampled_clients
from understudy.privacy.client import KEPT_ANSWERS, Offer
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget
from understudy.privacy.randomness import InjectedRandomness

BUDGET = Budget(epsilon=10.0, delta=1e-5)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite")


def a_client(ledger, *, data=None, rounds=5, budget=BUDGET, critic=None, noise=None, **terms):
    offer = Offer(rounds=rounds, batch=4, clip_norm=0.5, most_steps=3)
    randomness = noise is not None and InjectedRandomness(
        uniform=torch.zeros, normal=lambda count: torch.full((count,), noise, dtype=torch.float64)
    )
    vault = a_vault(ledger, data, **terms)
    return vault.open_rounds(
        offer, critic or a_critic(), budget, ledger, run_id="trial", randomness=randomness or None
    )


def values(answer):
    return np.frombuffer(answer, np.float32).astype(np.float64)


def test_an_answer_is_the_clipped_slope_plus_noise_of_the_charged_size(ledger):
    client = a_client(ledger, noise=1.0, critic=a_critic(scale=1e3))
    answer = values(client.answer(a_round()))
    std = client.calibration.noise_multiplier * 2 * 0.5
    assert answer.shape == (4 * 64,)
    assert np.linalg.norm(answer - std) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("units", [1, 2, 8])
def test_noise_is_of_one_size_however_few_units_a_client_has(ledger, units):
    """Its whole data may be any other: two critics of one unit may pull in opposite directions."""
    data = some_images(8, units=np.arange(8) * units // 8, unit="patient")
    silent = a_critic(scale=0.0)
    client = a_client(ledger, data=data, noise=1.0, critic=silent, max_per_unit=8)
    answer = values(client.answer(a_round()))
    assert client.noise_std == client.calibration.noise_multiplier * 2 * 0.5
    assert answer == pytest.approx(client.noise_std, rel=1e-5)


@pytest.mark.parametrize("units", [1, 8])
def test_other_data_moves_an_answer_by_twice_the_clip_norm_at_most(tmp_path, units):
    """And can: critics that pull in opposite directions."""
    sides = []
    for number, sign in enumerate((1.0, -1.0)):
        critic = a_critic()
        critic = replace(
            critic,
            learn=lambda state, images, labels, exist, public: {
                **state, "last": images.mean().expand(8)
            },
            ask=lambda state, public: (state["last"].mean() - 0.5) * torch.ones(4, 1, 8, 8) * 1e6,
        )  # fmt: skip
        data = some_images(8, units=np.arange(8) * units // 8, unit="patient")
        data.images[:] = 255 if sign > 0 else 0
        ledger = Ledger(tmp_path / str(number))
        most = 8 // units
        client = a_client(ledger, data=data, critic=critic, noise=0.0, max_per_unit=most)
        sides.append(values(client.answer(a_round(steps=1))))
    assert np.linalg.norm(sides[0] - sides[1]) == pytest.approx(2 * 0.5, rel=1e-6)
    assert np.linalg.norm(sides[0] - sides[1]) <= 2 * 0.5


def test_noise_has_the_calibrated_size_and_is_fresh_in_every_round(ledger):
    client = a_client(ledger, critic=a_critic(scale=0.0))
    std = client.calibration.noise_multiplier * 2 * 0.5
    one, two = (values(client.answer(a_round(f"a-{n}"))) for n in (1, 2))
    draws = np.concatenate([one, two]) / std
    assert kstest(draws, norm.cdf).pvalue > 1e-4
    for wrong in (2 / 3, 3 / 2):
        assert kstest(draws * wrong, norm.cdf).pvalue < 1e-3
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.4


def test_the_noise_meets_the_budget_over_all_rounds(ledger):
    client = a_client(ledger, rounds=50)
    mu = math.sqrt(50) / client.calibration.noise_multiplier  # exact for Gaussians

    def delta(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )

    assert delta(10.0) <= 1e-5
    assert delta(9.98) > 1e-5


def test_a_round_asked_again_gets_the_same_bytes_and_is_charged_once(ledger):
    client = a_client(ledger)
    first = client.answer(a_round())
    learned = {name: leaf.clone() for name, leaf in client._ensemble._state.items()}
    assert client.answer(a_round()) == first
    assert client.rounds_answered == 1
    assert all(torch.equal(learned[n], leaf) for n, leaf in client._ensemble._state.items())


def test_a_client_that_starts_again_remembers_what_it_sent(ledger, tmp_path):
    first = a_client(ledger, rounds=2).answer(a_round())
    ledger.close()
    client = a_client(Ledger(tmp_path / "ledger.sqlite"), rounds=2)
    assert client.answer(a_round()) == first
    assert client.rounds_left == 1


def test_a_round_with_other_images_under_the_same_name_is_declined(ledger):
    client = a_client(ledger)
    client.answer(a_round(seed=0))
    with pytest.raises(RoundDeclined, match="other images"):
        client.answer(a_round(seed=1))


def test_old_answers_are_neither_kept_nor_made_again(ledger):
    client = a_client(ledger, rounds=KEPT_ANSWERS + 2)
    for number in range(KEPT_ANSWERS + 1):
        client.answer(a_round(f"a-{number}"))
    with pytest.raises(RoundDeclined, match="not kept"):
        client.answer(a_round("a-0"))
    assert client.answer(a_round("a-1"))
    assert client.rounds_answered == KEPT_ANSWERS + 1


def test_a_spent_client_declines_before_a_record_is_read(ledger):
    client = a_client(ledger, rounds=2)
    kept = [client.answer(a_round(f"a-{n}")) for n in range(2)]
    learned = client._ensemble._state["first"].clone()
    with pytest.raises(RoundDeclined, match="offered 2 rounds .* epsilon 10 is spent; go on"):
        client.answer(a_round("a-2"))
    with pytest.raises(RoundDeclined, match="is spent"):  # nor does it seem to be in reach
        client.answer(a_round("a-2", is_asked=False))
    assert torch.equal(client._ensemble._state["first"], learned)
    assert client.answer(a_round("a-1")) == kept[1]


def test_two_processes_of_one_client_share_its_rounds(ledger, tmp_path):
    one = a_client(ledger, rounds=2)
    other = a_client(Ledger(tmp_path / "ledger.sqlite"), rounds=2)
    first = one.answer(a_round("a-0"))
    assert other.answer(a_round("a-0")) == first
    other.answer(a_round("a-1"))
    with pytest.raises(RoundDeclined, match="spent"):
        one.answer(a_round("a-2"))


def test_of_two_that_answer_one_round_at_once_the_first_answer_stands(ledger, monkeypatch):
    client, real = a_client(ledger, rounds=1), ledger.keep_answer

    def overtaken(run_id, name, *, answer, **rest):
        real(run_id, name, answer=bytes(len(answer)), **rest)
        return real(run_id, name, answer=answer, **rest)

    monkeypatch.setattr(ledger, "keep_answer", overtaken)
    assert not any(client.answer(a_round()))


def test_what_cannot_be_written_down_is_not_sent(ledger, monkeypatch):
    client = a_client(ledger)

    def full(*_, **__):
        raise LedgerError("disk full")

    monkeypatch.setattr(ledger, "keep_answer", full)
    with pytest.raises(LedgerError):
        client.answer(a_round())
    assert client.rounds_answered == 0


def test_learning_alone_is_free_and_answers_nothing(ledger):
    client = a_client(ledger)
    before = client._ensemble._state["first"].clone()
    assert client.answer(a_round(is_asked=False)) is None
    assert client.rounds_answered == 0
    assert not torch.equal(client._ensemble._state["first"], before)


def test_all_rounds_are_reserved_before_the_first(ledger):
    a_client(ledger)
    row = ledger.run("trial")
    assert row["epsilon"] == pytest.approx(10, abs=1e-3)
    assert json.loads(row["plan"])[0]["count"] == 5


def test_a_reservation_is_not_given_back_after_an_answer(ledger):
    a_client(ledger).answer(a_round())
    assert not ledger.cancel("trial")


def test_the_lifetime_budget_of_the_records_counts(ledger):
    with pytest.raises(BudgetRefused):
        a_client(ledger, lifetime_epsilon=1.0)


def test_an_offer_is_not_enlarged_afterwards(ledger):
    a_client(ledger, rounds=2)
    with pytest.raises(InvalidSettings, match="another plan"):
        a_client(ledger, rounds=3)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"images": torch.zeros(2, 4, 1, 8, 9)}, "expected torch.float32 \\(2, 4, 1, 8, 8\\)"),
        ({"images": torch.zeros(2, 5, 1, 8, 8)}, "expected torch.float32"),
        ({"images": torch.zeros(2, 4, 1, 8, 8, dtype=torch.float64)}, "torch.float64"),
        ({"images": torch.full((2, 4, 1, 8, 8), math.nan)}, "not finite"),
        ({"images": torch.full((2, 4, 1, 8, 8), -math.inf)}, "not finite"),
        ({"images": torch.tensor(1.0)}, "learning steps"),
        ({"images": torch.zeros(0, 4, 1, 8, 8)}, "learning steps"),
        ({"images": torch.zeros(5, 4, 1, 8, 8)}, "4 learning steps .* expected 0 to 3"),
        ({"labels": torch.full((2, 4), 3)}, "expected 0 to 2"),
        ({"labels": torch.full((2, 4), -1)}, "expected 0 to 2"),
        ({"labels": torch.zeros(2, 4)}, "expected torch.int64"),
        ({"labels": torch.zeros(2, 3, dtype=torch.int64)}, "labels are"),
        ({"name": "../etc"}, "a round is called"),
        ({"name": "a" * 65}, "a round is called"),
        ({"name": ""}, "a round is called"),
    ],
)  # fmt: skip
def test_what_was_not_offered_is_declined(ledger, changed, told):
    client = a_client(ledger)
    with pytest.raises(RoundDeclined, match=told):
        client.answer(a_round(**changed))
    assert client.rounds_answered == 0


@pytest.mark.parametrize(
    "changed", [{"rounds": 0}, {"batch": 0}, {"most_steps": 0}, {"clip_norm": math.inf}]
)
def test_offers_that_bound_nothing_are_refused(changed):
    with pytest.raises(InvalidSettings, match="expected"):
        Offer(**{"rounds": 1} | changed)


def test_the_critic_cannot_be_taken_out(ledger):
    client = a_client(ledger)
    with pytest.raises(PrivateAccess):
        list(client)
    assert "first" not in repr(client)


def test_a_statement_separates_what_was_spent_from_what_may_be(ledger):
    client = a_client(ledger, rounds=4)
    assert client.statement()["server_view"]["epsilon"] == 0
    client.answer(a_round())
    said = client.statement()
    assert 0 < said["server_view"]["epsilon"] < 5.5 < said["server_view"]["epsilon_at_most"] <= 10
    assert said["outside_view"]["epsilon"] == said["server_view"]["epsilon"]
    assert (said["rounds_answered"], said["rounds_offered"]) == (1, 4)
    assert said["relation"] == "one client's whole data replaced"
    assert said["noise_std"] == said["noise_multiplier"] * said["sensitivity"]


def test_a_statement_without_noise_or_secrecy_claims_nothing(ledger):
    said = a_client(ledger, noise=0.0).statement()
    assert said["server_view"]["epsilon_at_most"] is None


def test_secretly_chosen_clients_cost_less_and_incomplete_rounds_do_not():
    def epsilon(asked, rounds, other=0):
        return epsilon_of_sampled_clients(
            clients=20, asked=asked, rounds=rounds, other_rounds=other, noise_multiplier=10.0,
            delta=1e-5,
        )  # fmt: skip

    everyone = epsilon(20, 100)
    assert everyone == epsilon(2, 0, 100)
    assert epsilon(2, 100) < epsilon(2, 50, 50) < everyone
    # Rényi order a of 100 Gaussians: 100 a / (2 * 10^2); converted by the plain formula, a bound.
    plain = min(a / 2 + math.log(1e5) / (a - 1) for a in np.linspace(1.5, 20, 200))
    assert 0.8 * plain < everyone <= plain * 1.01


def test_a_ledger_of_an_earlier_format_learns_to_keep_rounds(tmp_path):
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE rounds")
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (b"2",))
    assert a_client(Ledger(path)).answer(a_round())
