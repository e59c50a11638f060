"""Registration, budgets, reservations and their errors."""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from door import LOOSE, a_vault, access_to, linear_loss, linear_params, open_curator, some_images
from understudy.errors import (
    AttemptsExhausted,
    BudgetRefused,
    DataChanged,
    InvalidData,
    InvalidSettings,
    LedgerError,
    RelationMixed,
)
from understudy.privacy import ledger as ledgers
from understudy.privacy.disclosure import disclose_hold_out, disclose_training_records
from understudy.privacy.ledger import Charge, Ledger, Limit
from understudy.privacy.plan import Budget, Plan, PlannedRelease
from understudy.privacy.registration import RegistrationTerms, find, register
from understudy.privacy.vault import Vault

PLAN = Plan((PlannedRelease(name="h", kind="histogram", count=1, dimension=3),))


def a_charge(divergence=1.0) -> Charge:
    return Charge(
        method="test",
        plan=PLAN,
        noise_multiplier=1.0,
        epsilon=1.0,
        delta=1e-5,
        accountant="pld",
        delta_tail=1e-9,
        divergence=divergence,
    )


def race(path: str, name: str, barrier, results) -> None:
    """Race for the last of fifty budgets, one ledger after another."""
    for number in range(50):
        book = Ledger(Path(path) / f"{number}.sqlite")
        barrier.wait(timeout=60)
        try:
            book.reserve(name, 1, a_charge(0.6), Limit(divergence=1.0, delta_tail=1e-6))
            results.put((number, "admitted"))
        except BudgetRefused:
            results.put((number, "refused"))
        book.close()


def test_two_processes_race_for_the_last_of_a_budget_and_one_wins(tmp_path):
    for number in range(50):
        book = Ledger(tmp_path / f"{number}.sqlite")
        register(book, some_images(), RegistrationTerms(lifetime_epsilon=1.0))
        book.close()
    context = multiprocessing.get_context("fork")  # they only touch SQLite
    barrier, results = context.Barrier(2), context.Queue()
    racers = [
        context.Process(target=race, args=(str(tmp_path), name, barrier, results), daemon=True)
        for name in ("a", "b")
    ]
    for racer in racers:
        racer.start()
    outcomes: dict[int, list[str]] = {}
    for _ in range(100):
        number, outcome = results.get(timeout=60)
        outcomes.setdefault(number, []).append(outcome)
    for racer in racers:
        racer.join(timeout=30)
    assert [sorted(outcome) for outcome in outcomes.values()] == [["admitted", "refused"]] * 50
    for number in range(50):
        assert len(Ledger(tmp_path / f"{number}.sqlite").charged_runs(1)) == 1


def test_a_lifetime_budget_refuses_the_run_that_would_pass_it(ledger, tmp_path):
    vault = a_vault(ledger, lifetime_epsilon=14.0)
    open_curator(ledger, tmp_path, vault=vault)
    with pytest.raises(BudgetRefused, match="Rényi filter") as refusal:
        open_curator(ledger, tmp_path, vault=vault)
    assert refusal.value.exit_code == 3
    assert len(ledger.charged_runs(vault.registration.budget)) == 1
    open_curator(ledger, tmp_path, vault=vault, budget=Budget(epsilon=0.5, delta=1e-5))


def test_a_run_without_guarantee_exceeds_any_lifetime_budget(ledger, tmp_path):
    vault = a_vault(ledger, lifetime_epsilon=1000.0)
    with pytest.raises(BudgetRefused, match="without guarantee"):
        open_curator(ledger, tmp_path, vault=vault, budget=Budget(epsilon=np.inf, delta=1e-5))


def test_a_public_benchmark_is_never_refused(ledger, tmp_path):
    vault = a_vault(ledger, lifetime_epsilon=0.1, public_benchmark=True)
    for _ in range(3):
        open_curator(ledger, tmp_path, vault=vault)


def test_a_new_version_shares_the_budget_and_an_unrelated_set_does_not(ledger, tmp_path):
    old = some_images(seed=1, source="/scans.npz", name="scans")
    new = some_images(seed=2, source="/scans.npz", name="scans")
    third = some_images(seed=3, source="/scans.npz", name="scans")
    open_curator(ledger, tmp_path, vault=a_vault(ledger, old, lifetime_epsilon=14.0))
    for data in (new, third):
        with pytest.raises(DataChanged, match="--new-version-of scans"):
            register(ledger, data, RegistrationTerms())
    version = a_vault(ledger, new, new_version_of="scans")
    assert version.registration.name == "scans-2"
    assert version.registration.lifetime_epsilon == 14.0
    with pytest.raises(BudgetRefused):
        open_curator(ledger, tmp_path, vault=version)
    open_curator(ledger, tmp_path, vault=a_vault(ledger, third, unrelated=True))


def test_identical_records_never_get_a_second_budget(ledger, tmp_path):
    """Whatever is declared: the digest is looked up first."""
    data = some_images(name="scans", source="/scans.npz")
    first = register(ledger, data, RegistrationTerms(lifetime_epsilon=14.0, hold_out=0.2))
    for terms in (
        {"unrelated": True},
        {"new_version_of": "scans"},
        {"unrelated": True, "public_benchmark": True},
    ):
        assert register(ledger, data, RegistrationTerms(**terms)) == first
    assert len(ledger.data_sets()) == 1
    relabelled = some_images(name="other", classes=5)
    with pytest.raises(DataChanged, match="--new-version-of scans"):
        register(ledger, relabelled, RegistrationTerms())


def test_a_new_version_cannot_loosen_terms(ledger, tmp_path):
    old, new = (some_images(seed=n, name="scans") for n in (1, 2))
    register(ledger, old, RegistrationTerms(lifetime_epsilon=5.0))
    version = {"new_version_of": "scans"}
    with pytest.raises(BudgetRefused, match="share"):
        register(ledger, new, RegistrationTerms(lifetime_epsilon=50.0, **version))
    with pytest.raises(RelationMixed, match="one budget has one unit"):
        register(ledger, new, RegistrationTerms(max_per_unit=2, **version))
    patients = some_images(seed=3, name="scans", units=np.arange(40) // 2, unit="patient")
    with pytest.raises(RelationMixed, match="one budget has one unit"):
        register(ledger, patients, RegistrationTerms(**version))
    found = register(ledger, new, RegistrationTerms(public_benchmark=True, **version))
    assert found.has_limit
    assert found.lineage == "version of scans"


def test_a_vault_takes_only_the_registered_records(ledger):
    registered = register(ledger, some_images(seed=1), RegistrationTerms())
    with pytest.raises(DataChanged, match="not the records"):
        Vault(some_images(seed=2), registered, ledger)


def test_a_refused_or_cancelled_run_fixes_no_delta(ledger, tmp_path):
    vault = a_vault(ledger, lifetime_epsilon=1.0)
    with pytest.raises(BudgetRefused):
        open_curator(ledger, tmp_path, vault=vault, budget=Budget(epsilon=9, delta=1e-3))
    small = Budget(epsilon=0.2, delta=1e-4)
    open_curator(ledger, tmp_path, vault=vault, budget=small, run_id="cancelled")
    ledger.cancel("cancelled")
    open_curator(ledger, tmp_path, vault=vault, budget=Budget(epsilon=0.2, delta=1e-5))


def test_injected_randomness_is_charged_as_no_guarantee(ledger, tmp_path):
    data = some_images()
    vault, fake = a_vault(ledger, data), access_to(data).randomness
    curator = open_curator(ledger, tmp_path, vault=vault, run_id="r", randomness=fake)
    assert ledger.run("r")["epsilon"] is None
    assert not curator.has_guarantee
    with pytest.raises(InvalidSettings):
        open_curator(ledger, tmp_path, vault=vault, run_id="r")
    limited = a_vault(ledger, some_images(seed=9, name="l"), lifetime_epsilon=100.0)
    with pytest.raises(BudgetRefused):
        open_curator(ledger, tmp_path, vault=limited, randomness=fake)


def create(path: str, barrier) -> None:
    barrier.wait()
    Ledger(Path(path)).close()


def test_processes_may_race_to_create_the_ledger(tmp_path):
    context = multiprocessing.get_context("fork")  # they only touch SQLite
    barrier = context.Barrier(3)
    paths = [str(tmp_path / "ledger.sqlite")] * 3
    racers = [context.Process(target=create, args=(path, barrier)) for path in paths]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
        assert racer.exitcode == 0


def test_one_delta_per_data_set(ledger, tmp_path):
    vault = a_vault(ledger)
    open_curator(ledger, tmp_path, vault=vault)
    with pytest.raises(RelationMixed, match="one data set has one delta"):
        open_curator(ledger, tmp_path, vault=vault, budget=Budget(epsilon=1, delta=1e-6))


def test_terms_are_fixed_for_good(ledger):
    register(ledger, some_images(), RegistrationTerms(lifetime_epsilon=3.0, hold_out=0.1))
    for terms, error in (
        (RegistrationTerms(lifetime_epsilon=30.0), BudgetRefused),
        (RegistrationTerms(hold_out=0.2), RelationMixed),
        (RegistrationTerms(max_per_unit=2), RelationMixed),
        (RegistrationTerms(name="other"), DataChanged),
    ):
        with pytest.raises(error):
            register(ledger, some_images(), terms)
    assert register(ledger, some_images(), RegistrationTerms()).lifetime_epsilon == 3.0


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"lifetime_epsilon": 3.0}, "no limit, which cannot be changed to 3; leave out"),
        ({"hold_out": 0.2}, "registered without --hold-out, not with 0.2"),
        ({"max_per_unit": 2}, "registered without --max-per-unit, not with 2"),
    ],
)
def test_terms_that_were_left_out_are_named_as_such(ledger, terms, said):
    register(ledger, some_images(), RegistrationTerms(name="scans"))
    with pytest.raises((BudgetRefused, RelationMixed), match=said):
        register(ledger, some_images(), RegistrationTerms(**terms))


def test_a_version_that_counts_otherwise_is_told_how(ledger):
    register(ledger, some_images(), RegistrationTerms(name="scans"))
    other = some_images(seed=1)
    said = r"record \(all records each\), this version as record \(at most 2 records each\)"
    with pytest.raises(RelationMixed, match=said):
        register(ledger, other, RegistrationTerms(new_version_of="scans", max_per_unit=2))
    with pytest.raises(BudgetRefused, match="has no limit, which its versions share"):
        register(ledger, other, RegistrationTerms(new_version_of="scans", lifetime_epsilon=2.0))


@pytest.mark.parametrize(
    "terms",
    [
        {"lifetime_epsilon": 0.0},
        {"lifetime_epsilon": np.inf},
        {"hold_out": 1.0},
        {"hold_out": -0.1},
        {"max_per_unit": 0},
        {"new_version_of": "nobody"},
        {"new_version_of": "a", "unrelated": True},
    ],
)
def test_senseless_terms_are_refused(ledger, terms):
    with pytest.raises(InvalidSettings):
        register(ledger, some_images(), RegistrationTerms(**terms))
    assert not ledger.data_sets()


def test_a_hold_out_of_everything_is_refused(ledger):
    with pytest.raises(InvalidData):
        register(ledger, some_images(1, classes=2), RegistrationTerms(hold_out=0.9))


def test_hold_out_is_secret_by_unit_and_for_good(ledger, tmp_path):
    units = np.arange(60) // 3
    data = some_images(60, units=units, name="p")
    registered = register(ledger, data, RegistrationTerms(hold_out=0.25))
    learn, held = registered.split_units(20)
    assert (len(learn), len(held)) == (15, 5)
    assert registered.facts.units == 15
    assert sorted([*learn, *held]) == list(range(20))
    again = register(Ledger(ledger.path), data, RegistrationTerms())
    assert np.array_equal(again.split_units(20)[1], held)
    elsewhere = Ledger(tmp_path / "elsewhere.sqlite")
    others = [
        register(
            elsewhere,
            some_images(60, units=units, name=f"{n}", seed=n),
            RegistrationTerms(hold_out=0.25),
        )
        for n in range(3)
    ]
    assert any(not np.array_equal(other.split_units(20)[1], held) for other in others)
    real = disclose_hold_out(Vault(data, registered, ledger), ledger, purpose="look")
    expected = data.images[np.isin(data.units, held)]
    assert np.allclose(np.sort(real.images.sum((1, 2, 3))), np.sort(expected.sum((1, 2, 3))))
    assert [d["purpose"] for d in ledger.disclosures(registered.id)] == ["look"]
    rest = disclose_training_records(Vault(data, registered, ledger), ledger, purpose="compare")
    expected = data.images[~np.isin(data.units, held)]
    assert np.allclose(np.sort(rest.images.sum((1, 2, 3))), np.sort(expected.sum((1, 2, 3))))
    told = ledger.disclosures(registered.id)[-1]
    assert (told["what"], told["purpose"]) == ("training records", "compare")


def test_without_hold_out_there_is_nothing_to_disclose(ledger):
    with pytest.raises(InvalidData, match="without a hold-out"):
        disclose_hold_out(a_vault(ledger), ledger, purpose="look")


def test_a_reservation_can_be_cancelled_only_before_the_first_block(ledger, tmp_path):
    vault = a_vault(ledger)
    open_curator(ledger, tmp_path, vault=vault, run_id="unused")
    assert ledger.cancel("unused")
    used = open_curator(ledger, tmp_path, vault=vault, run_id="used")
    used.gradient(linear_loss, linear_params(), clip_norm=1.0)
    assert not ledger.cancel("used")
    assert [r["id"] for r in ledger.charged_runs(vault.registration.budget)] == ["used"]


def test_a_run_whose_charge_was_given_back_releases_nothing(ledger, tmp_path):
    """Another process may have cancelled it since it was opened."""
    vault = a_vault(ledger, lifetime_epsilon=14.0)
    curator = open_curator(ledger, tmp_path, vault=vault, run_id="one")
    assert ledger.cancel("one")
    answer = {"question": b"q", "answer": b"a", "most": 1, "kept": 1}
    for attempt in (
        lambda: curator.gradient(linear_loss, linear_params(), clip_norm=1.0),
        lambda: ledger.start_block("one", 0),
        lambda: ledger.keep_answer("one", "round", **answer),
        lambda: ledger.finish("one", "certificate"),
        lambda: ledger.start_block("never reserved", 0),
    ):
        with pytest.raises(LedgerError, match="is not charged .* start a new run"):
            attempt()
    assert not ledger.blocks("one")
    assert not ledger.rounds_answered("one")
    assert ledger.run("one")["state"] == "cancelled"
    open_curator(ledger, tmp_path, vault=vault)  # what was given back is there to be spent


def test_a_run_whose_finish_was_cut_off_is_finished_again(ledger, tmp_path):
    open_curator(ledger, tmp_path, run_id="r")
    for certificate in ("never shown", "shown"):
        ledger.finish("r", certificate)
    assert ledger.run("r")["certificate"] == "shown"


def test_attempts_are_capped(ledger, tmp_path, monkeypatch):
    monkeypatch.setattr(ledgers, "MOST_ATTEMPTS", 3)
    open_curator(ledger, tmp_path, run_id="r")
    for _ in range(3):
        ledger.start_block("r", 0)
    with pytest.raises(AttemptsExhausted):
        ledger.start_block("r", 0)
    assert ledger.blocks("r")[0].attempts == 3


def test_a_committed_block_cannot_be_started_or_committed_again(ledger, tmp_path):
    open_curator(ledger, tmp_path, run_id="r")
    ledger.start_block("r", 0)
    ledger.commit_block("r", 0, releases={"gradient": 2}, digest="d")
    with pytest.raises(LedgerError):
        ledger.start_block("r", 0)
    with pytest.raises(LedgerError):
        ledger.commit_block("r", 0, releases={"gradient": 9}, digest="e")
    assert ledger.blocks("r")[0].releases == {"gradient": 2}


def test_the_ledger_is_the_custodians_alone(ledger):
    assert ledger.path.stat().st_mode & 0o077 == 0
    fresh = Ledger(ledger.path.parent / "new" / "ledger.sqlite")
    assert fresh.path.parent.stat().st_mode & 0o077 == 0
    pragma = fresh._connection.execute
    assert pragma("PRAGMA synchronous").fetchone()[0] == 2
    assert pragma("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_ledger_that_cannot_be_used_says_so(tmp_path):
    readonly = tmp_path / "readonly.sqlite"
    Ledger(readonly).close()
    readonly.chmod(0o400)
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_bytes(b"not a database" * 100)
    newer = tmp_path / "newer.sqlite"
    Ledger(newer).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("UPDATE meta SET value = ? WHERE key = 'format'", (b"99",))
    for path, word in (
        (readonly, "read-only"),
        (garbage, "not a usable ledger"),
        (newer, "format 99"),
        (Path("/proc/ledger.sqlite"), "cannot open"),
        (tmp_path, "cannot open"),
    ):
        with pytest.raises(LedgerError, match=word):
            Ledger(path)


def test_facts_survive_the_ledger(ledger):
    data = some_images(12, shape=(3, 8, 10), units=[0, 0, 1] * 4, unit="patient")
    registered = register(ledger, data, RegistrationTerms(max_per_unit=2))
    found = find(ledger, data)
    assert found == registered
    assert found.facts.unit == "patient"
    assert found.facts.shape == (3, 8, 10)
    json.dumps(found.facts.to_json())


def test_resuming_with_another_plan_is_refused(ledger, tmp_path):
    vault = a_vault(ledger)
    open_curator(ledger, tmp_path, vault=vault, run_id="r", count=3)
    open_curator(ledger, tmp_path, vault=vault, run_id="r", count=3)
    budgets = [replace(LOOSE, epsilon=epsilon) for epsilon in (np.inf, 9.0)]
    for change in ({"count": 4}, *({"budget": budget} for budget in budgets)):
        with pytest.raises(InvalidSettings, match="another plan"):
            open_curator(ledger, tmp_path, vault=vault, run_id="r", **{"count": 3} | change)
