"""Lower bounds on epsilon: check values, that faults are found, and that sound code is not one."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

import understudy
from door import halved_noise, some_images
from reports import make_run
from understudy.audit import released, table
from understudy.audit.bounds import (
    Errors,
    Guesses,
    from_errors,
    from_errors_if_as_planned,
    from_errors_if_gaussian,
    from_one_run,
    from_one_run_if_gaussian,
    gaussian_epsilon,
    one_run_p_value,
)
from understudy.audit.canaries import Canaries, number_of
from understudy.audit.finding import Finding
from understudy.audit.methods import Setup, audit_images, audit_method, noise_tests
from understudy.audit.released import audit_run
from understudy.audit.stage import Stage
from understudy.audit.witness import Observation
from understudy.cli.main import main
from understudy.errors import InvalidData, InvalidSettings, VerificationFailed
from understudy.methods import load_method
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.plan import Plan, PlannedRelease
from understudy.progress import Progress
from understudy.runs import RunDirectory
from understudy.synthetic import SyntheticSet

DELTA = 1e-5


def test_check_values_of_the_one_run_bound():
    """Computed apart from this code, from the paper's formulas."""
    p_value = one_run_p_value(Guesses(100, 100, 75), math.log(3), 0.0)
    assert p_value == pytest.approx(0.5535, abs=1e-4)
    assert from_one_run(Guesses(1000, 100, 75), 1e-4) == pytest.approx(0.673, abs=1e-3)
    assert from_one_run(Guesses(1000, 100, 100), DELTA) == pytest.approx(3.47, abs=0.01)
    assert from_one_run(Guesses(1000, 200, 200), DELTA) == pytest.approx(4.17, abs=0.01)


def test_guesses_no_better_than_coins_show_nothing():
    assert from_one_run(Guesses(1000, 100, 50), DELTA) == 0
    assert from_one_run(Guesses(1000, 100, 0), DELTA) == 0
    assert from_one_run_if_gaussian(Guesses(1000, 100, 50), DELTA) == 0


def test_the_bound_from_errors_by_hand():
    errors = Errors(false_alarms=10, without_unit=1000, misses=500, with_unit=1000)
    alarm, miss = errors.at_most()
    assert 0.01 < alarm < 0.02
    assert 0.5 < miss < 0.54
    assert from_errors(errors, 0.01) == pytest.approx(math.log((0.99 - miss) / alarm))
    assert Errors(1, 1, 1, 1).at_most() == (1.0, 1.0)
    assert from_errors(Errors(900, 1000, 900, 1000), DELTA) == 0  # worse than a coin


@pytest.mark.parametrize("mu", [0.5, 2.0])
def test_bounds_for_gaussians_are_below_the_truth_and_near_it(mu):
    """Ideal canaries. Of each bound at most one in twenty may exceed the truth."""
    rng, truth = np.random.default_rng(0), gaussian_epsilon(mu, DELTA)
    found = []
    for _ in range(8):
        is_in = rng.random(1000) < 0.5
        scores = rng.normal(size=1000) + mu * is_in
        guesses, errors = Guesses.of(scores, is_in, 100), Errors.of(scores > mu / 2, is_in)
        found.append(
            (
                from_errors(errors, DELTA),
                from_one_run(guesses, DELTA),
                from_one_run_if_gaussian(guesses, DELTA),
                from_errors_if_gaussian(errors, DELTA),
            )
        )
    exceeded = (np.array(found) > truth).sum(0)
    assert (exceeded <= 2).all()
    means = np.mean(found, axis=0)
    assert means[2] > means[1]  # to know more of the mechanism helps
    assert means[3] > 0.4 * truth


def test_the_bound_by_a_plan_finds_its_noise():
    line = PlannedRelease(name="gradient", kind="gradient", count=1, dimension=1, sampling_rate=0.5)
    rng, noise = np.random.default_rng(0), 1.0
    is_in = rng.random(20_000) < 0.5
    values = noise * rng.normal(size=20_000) + (is_in & (rng.random(20_000) < 0.5))
    errors = Errors.of(values > 1, is_in)
    said = from_errors_if_as_planned(errors, Plan((line,)), 1.5 * noise, DELTA)  # a wrong claim
    truth = epsilon_of(Plan((line,)), noise, DELTA, "pld", interval=1e-3)
    assert 0.6 * truth < said <= truth


def test_canaries_are_known_by_number_and_nobody_else_is():
    canaries = Canaries.toss(300)
    assert 0.4 < canaries.is_in.mean() < 0.6
    images = torch.from_numpy(canaries.images((1, 8, 8))).float() / 255
    numbers = torch.stack([number_of(image, 300) for image in images])
    assert torch.equal(numbers, torch.eye(300))
    digits = torch.from_numpy(understudy.load_data("digits").images).float() / 255
    assert sum(number_of(image, 300).sum() for image in digits) == 0
    with pytest.raises(InvalidSettings, match="5 canaries"):
        Canaries.toss(5)


def test_who_is_in_does_not_change_what_is_public():
    digits = understudy.load_data("digits")
    canaries, slots = Canaries.toss(20), np.arange(20)
    with_some, with_none = (canaries.planted(digits, slots, nobody=b) for b in (False, True))
    assert with_some.units.max() == with_none.units.max() == len(digits.labels) + 19
    assert len(with_some.labels) - len(with_none.labels) == canaries.is_in.sum()
    with pytest.raises(InvalidSettings, match="last slot"):
        canaries.planted(digits, len(digits.labels) + slots)


def test_canaries_are_for_public_sets_alone():
    with pytest.raises(InvalidSettings, match="not a known public set"):
        Stage(some_images(), Canaries.toss(20))


def test_what_is_not_there_to_audit_is_refused_by_name():
    with pytest.raises(InvalidSettings, match="'nothing' to audit, expected all.*histogram.*psg"):
        next(table.audits_of("nothing"))


def test_a_run_with_half_the_noise_is_found():
    setup = Setup(canaries=300, settings={"features": 400, "steps": 1, "hidden": 4})
    assert not audit_method("dp-merf", setup).is_violation
    faulty = audit_method(
        "dp-merf", Setup(canaries=300, settings=setup.settings, randomness=halved_noise)
    )
    assert faulty.is_violation
    assert faulty.tests["noise has its size"] < 1e-6


def test_noise_that_repeats_is_found():
    rng, is_out = np.random.default_rng(0), np.ones(200, dtype=bool)
    fresh = [Observation(rng.normal(size=200), 1.0, 1.0) for _ in range(10)]
    assert min(noise_tests(fresh, is_out).values()) > 1e-3
    assert noise_tests(fresh[:1] * 10, is_out)["noise is new each time"] < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    ["psg", "dp-merf", "dp-mepf", "datalens", "pate-gan", "gs-wgan", "dp-sinkhorn", "rehearsal"],
)
def test_methods_run_with_canaries(name):
    """As small as it gets: what counts is that their releases show them, at such an epsilon.

    Methods that ask otherwise; `make audit` has all of them.
    """
    few = {"rounds": 1, "outer": 6, "steps": 2, "looks": 1}  # a canary is in some batch
    few |= {"teachers": 40, "critics": 40, "asked": 40.0}
    known = {field.name for field in dataclasses.fields(load_method(name).config_class)}
    settings = {key: value for key, value in few.items() if key in known}
    members = 40
    if "generated" in known:  # whole batches answer, for one canary after another
        members, settings = 10, settings | {"steps": 20, "batch": 1440}
    in_turn = members if "generated" in known else 1
    epsilon = 300.0 if "generated" in known else 30.0  # the noise of others would have no room
    setup = Setup(canaries=members, settings=settings, accountant="renyi", epsilon=epsilon)
    stage, method = setup.prepared(name)
    has_sums = any(line.kind == "class_sums" for line in method.plan())
    with stage.opened(method.plan(), setup.budget, knows_others=has_sums) as witness:
        method.run(witness, Progress())
        assert len(witness.seen) == method.plan().total / in_turn
        guesses = Guesses.of(witness.evidence(), stage.canaries.is_in, members // 10)
        assert guesses.right > guesses.made / 2


def test_the_table_calls_a_violation_what_was_one_twice(monkeypatch):
    def finding(bound):
        return Finding(
            subject="x", attack="y", claimed=1.0, delta=DELTA, bound=bound, how="z", repetitions=1
        )

    for bounds, is_fault in (([2.0, 0.5], False), ([2.0, 1.5], True)):
        left = iter(bounds)
        monkeypatch.setattr(table, "audit_release", lambda name, left=left: finding(next(left)))
        (found,) = table.audits_of("histogram")
        assert found.is_violation == is_fault
        assert ("no violation found" in table.markdown([found])[-1]) != is_fault


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    understudy.synthesize(
        "digits", out=folder / "run", ledger=folder / "ledger", accountant="renyi", epsilon=10,
        method="psg", settings={"rounds": 1, "outer": 1, "batches": 1, "images_per_class": 2},
    )  # fmt: skip
    return folder / "run"


def test_what_was_released_of_a_run_is_audited_in_private(run):
    found = audit_run(run)
    assert {one.verdict for one in found} == {"no violation found"}
    assert all(one.repetitions == 359 for one in found)
    entries = RunDirectory(run).metrics()["audit"]
    assert [entry["attack"] for entry in entries] == [one.attack for one in found]
    page = understudy.write_report([run]).read_text()
    assert "Lower bounds on epsilon against the claim" in page
    assert "no violation found" in page
    shared = understudy.write_report([run], shareable=True).read_text()
    assert "Lower bounds on epsilon against the claim" not in shared
    understudy.verify(run)  # nothing was added to the release


def test_the_attack_on_images_finds_copies_of_records(run, monkeypatch):
    """Of a set that is its training records every guess is right; of an honest one, half."""
    digits = understudy.load_data("digits")
    copied = SyntheticSet(
        torch.from_numpy(digits.images).float() / 255, torch.from_numpy(digits.labels),
        digits.class_names,
    )  # fmt: skip
    scores_of = released.scores_of
    monkeypatch.setattr(released, "EPOCHS", 1)
    monkeypatch.setattr(
        released, "scores_of", lambda _, *args, **more: scores_of(copied, *args, **more)
    )
    assert audit_run(run)[0].bound > 2.5


def test_what_cannot_be_audited_is_refused(tmp_path):
    made = make_run(tmp_path)
    with pytest.raises(InvalidData, match="in memory"):
        audit_run(made.directory)
    noiseless = make_run(tmp_path, "noiseless", epsilon=math.inf)
    with pytest.raises(InvalidSettings, match="no claim"):
        audit_run(noiseless.directory)


def test_a_fault_on_the_command_line_has_an_exit_code_of_its_own(monkeypatch, capsys):
    fault = Finding(
        subject="votes", attack="y", claimed=1.0, delta=DELTA, bound=2.0, how="z", repetitions=1
    )
    monkeypatch.setattr(table, "audit_release", lambda name: fault)
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "histogram", "--quiet"])
    assert stopped.value.code == VerificationFailed.exit_code
    assert "VIOLATION" in capsys.readouterr().out


def test_images_are_audited_too():
    setup = Setup(canaries=50, settings={"rounds": 1, "outer": 1, "batch": 50}, accountant="renyi")
    found = audit_images("psg", setup)
    assert len(found) == 3
    assert not any(one.is_violation for one in found)
