"""What a federation has made is certified by what its clients told, and can be checked again."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import understudy
from critics import a_critic, a_round
from door import a_vault, seal
from understudy.cli.main import main
from understudy.errors import InvalidSettings, VerificationFailed
from understudy.federated.release import facts_of, release
from understudy.nets.generators import ConvGenerator
from understudy.nets.released import Generator
from understudy.privacy.client import Offer
from understudy.privacy.federation import CONDITION, Course, Part
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget
from understudy.report.listing import list_runs
from understudy.seeds import public_generator

FACTS = facts_of(3, [1, 8, 8], ["a", "b"])
TOLD = Part(rounds_answered=5, noise_multiplier=2.0, delta=1e-5)


def a_course(*parts, asked=3, **how):
    how = {"rounds": 5, "rounds_with_all_clients": 5, "dimension": 256} | how
    how = {"rounds_with_equal_noise": how["rounds_with_all_clients"]} | how
    return Course(clients=3, asked_per_round=asked, parts=parts or (TOLD,), **how)


def a_set():
    network = ConvGenerator(FACTS.shape, FACTS.classes, hidden=20)
    params = network.init(public_generator(0, "params"))
    statistics = network.statistics(params, public_generator(0, "statistics"), batches=1)
    return Generator(network, params, statistics, (0.5, 0.5)).drawn(FACTS.class_names, 20, seed=0)


def made(folder, *parts, **how):
    course = a_course(*parts, **how)
    settings = {"steps": course.rounds}
    release(a_set(), course, folder, facts=FACTS, name="gs-wgan", settings=settings)
    return folder


def edited(folder, change):
    file = folder / "release" / "certificate.json"
    content = json.loads(file.read_bytes())
    change(content)
    file.write_bytes(seal(content))
    return folder


def call(*words, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    said = capsys.readouterr()
    return stop.value.code, said.out, said.err


# What it costs


def test_it_costs_against_the_server_what_the_clients_own_statement_says(tmp_path):
    ledger = Ledger(tmp_path / "ledger.sqlite")
    offer, budget = Offer(rounds=5, batch=4, most_steps=3), Budget(epsilon=10.0, delta=1e-5)
    client = a_vault(ledger).open_rounds(offer, a_critic(), budget, ledger, run_id="trial")
    for number in range(5):
        client.answer(a_round(f"r-{number}"))
    said = client.statement()
    course = a_course(
        Part(rounds_answered=5, noise_multiplier=said["noise_multiplier"], delta=said["delta"])
    )
    assert course.server_epsilon == pytest.approx(said["server_view"]["epsilon"], abs=1e-6)
    assert 9.9 < course.server_epsilon <= 10


def test_the_least_noise_and_the_largest_delta_count():
    quiet = replace(TOLD, noise_multiplier=1.0, rounds_answered=1)
    loose = replace(TOLD, delta=1e-4)
    together = a_course(TOLD, quiet, loose)
    assert together.server_epsilon == a_course(replace(quiet, delta=1e-4)).server_epsilon
    assert together.server_epsilon > a_course(TOLD).server_epsilon


def test_a_client_counts_as_if_it_had_answered_every_round():
    """Nobody knows how many seats it had, one after another."""
    once = a_course(replace(TOLD, rounds_answered=1))
    assert once.server_epsilon == a_course(TOLD).server_epsilon


def test_from_outside_it_costs_less_if_few_were_chosen_and_never_more():
    all_asked = a_course(asked=3)
    assert all_asked.outside_epsilon == all_asked.server_epsilon
    few = a_course(asked=1)
    assert few.outside_epsilon < few.server_epsilon
    assert "the server is trusted" in few.in_words()
    assert "the server is trusted" not in all_asked.in_words()


def test_only_rounds_in_which_all_told_of_equal_noise_cost_less_from_outside():
    """Else the size of the noise in a sum shows who was asked."""
    some, none = (a_course(asked=1, rounds_with_equal_noise=n) for n in (3, 0))
    assert a_course(asked=1).outside_epsilon < some.outside_epsilon < some.server_epsilon
    assert none.outside_epsilon == none.server_epsilon
    assert "the server is trusted" not in none.in_words()
    assert "noise of exactly the size that they told" in CONDITION


def test_parts_that_told_of_different_noise_hide_nobody():
    apart = a_course(TOLD, replace(TOLD, noise_multiplier=2.2), asked=1)
    assert apart.outside_epsilon == apart.server_epsilon


def test_whoever_does_not_say_that_noise_was_equal_gains_nothing():
    course = Course(
        clients=20, asked_per_round=1, rounds=5, rounds_with_all_clients=5, dimension=256,
        parts=(TOLD,),
    )  # fmt: skip
    assert course.outside_epsilon == course.server_epsilon


# What is left


def test_what_is_left_verifies_and_is_a_run_like_any_other(tmp_path, capsys):
    folder = made(tmp_path / "federation", asked=1)
    assert sorted(file.name for file in (folder / "release").iterdir()) == [
        "README.md", "certificate.json", "contact_sheet.png", "generator.safetensors",
        "synthetic.safetensors",
    ]  # fmt: skip
    found = understudy.verify(folder)
    assert found.recomputed_epsilon == pytest.approx(a_course().server_epsilon)
    assert found.files == 4
    assert len(understudy.load(folder)) == 20
    assert len(understudy.sample(folder, count=6)) == 6
    understudy.export(folder, to="npz", out=tmp_path / "npz")
    for card in (folder / "release" / "README.md", tmp_path / "npz" / "README.md"):
        text = card.read_text()
        assert "for each client" in text
        assert "rests on what clients told the server" in text
    (line,) = list_runs(tmp_path)
    assert (line.method, line.data) == ("gs-wgan", "the images of 3 clients")
    code, out, _ = call("verify", folder, capsys=capsys)
    assert code == 0
    assert "holds against the server, too" in out


def test_its_report_says_what_the_guarantee_rests_on(tmp_path, capsys):
    folder = made(tmp_path / "federation")
    code, _, err = call(
        "report", folder, "--shareable", "--out", tmp_path / "r.html", capsys=capsys
    )
    assert code == 0, err
    page = (tmp_path / "r.html").read_text()
    assert "one client&#39;s whole data replaced" in page
    assert "rests on what clients told the server" in page


@pytest.mark.parametrize(
    "told", [{"noise_multiplier": 0.0}, {"noise_multiplier": 1e-300}, {"delta": 0.0}]
)
@pytest.mark.parametrize("others", [(), (TOLD,)])
def test_without_noise_there_is_no_guarantee(tmp_path, told, others):
    folder = made(tmp_path / "federation", *others, replace(TOLD, **told))
    assert math.isinf(understudy.verify(folder).recomputed_epsilon)
    assert "Do not share it" in (folder / "release" / "README.md").read_text()
    with pytest.raises(InvalidSettings, match="no guarantee"):
        understudy.export(folder, to="npz", out=tmp_path / "npz")


@pytest.mark.parametrize(("delta", "is_large"), [(1e-5, False), (0.3, False), (0.6, True)])
def test_a_delta_of_one_in_the_number_of_clients_is_called_large(tmp_path, delta, is_large):
    folder = made(tmp_path / "federation", TOLD, replace(TOLD, delta=delta))
    guarantee = understudy.verify(folder).certificate.content["guarantee"]
    assert (guarantee["delta"], guarantee["is_delta_large"]) == (delta, is_large)


def of_an_earlier_version(content):
    """Which did not ask clients how large their noise is."""
    del content["federation"]["rounds_with_equal_noise"]


def test_a_certificate_of_an_earlier_version_holds_if_it_gained_nothing_by_asking_few(tmp_path):
    understudy.verify(edited(made(tmp_path / "all", asked=3), of_an_earlier_version))
    few = edited(made(tmp_path / "few", asked=1), of_an_earlier_version)
    with pytest.raises(VerificationFailed, match="equal noise in 0 of 5.*earlier versions did not"):
        understudy.verify(few)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("understudy.federated.release.os.rename", fails)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "federation")
    assert not (tmp_path / "federation" / "release").exists()
    monkeypatch.undo()
    understudy.verify(made(tmp_path / "federation"))


# What is not believed


def less_noise(content):
    content["federation"]["parts"][0]["noise_multiplier"] = 1.0


def fewer_rounds(content):
    for name in ("rounds", "rounds_with_all_clients", "rounds_with_equal_noise"):
        content["federation"][name] = 1


def less_from_outside(content):
    content["federation"]["outside"]["epsilon"] *= 0.9


def nobody(content):
    content["federation"]["parts"] = []


def nothing_outside(content):
    content["federation"]["outside"] = None


def more_asked_than_there_are(content):
    content["federation"]["asked_per_round"] = 4


def more_complete_rounds_than_rounds(content):
    content["federation"]["rounds_with_all_clients"] = 6


def equal_noise_in(rounds):
    def change(content):
        content["federation"]["rounds_with_equal_noise"] = rounds

    return change


def a_part_with_other_noise(content):
    (part,) = content["federation"]["parts"]
    content["federation"]["parts"].append(part | {"noise_multiplier": 2.5})


def less_epsilon(content):
    for name in ("epsilon", "target_epsilon"):
        content["guarantee"][name] *= 0.9


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (less_noise, "not what the clients"),
        (fewer_rounds, "not what the clients"),
        (less_from_outside, "from outside the federation costs"),
        (nobody, "cannot be computed"),
        (nothing_outside, "cannot be computed"),
        (more_asked_than_there_are, "no federation goes like that"),
        (more_complete_rounds_than_rounds, "no federation goes like that"),
        (equal_noise_in(4), "equal noise in 4 of 5 rounds"),
        (a_part_with_other_noise, "equal noise in 0 of 5 rounds"),
        (equal_noise_in(6), "with equal noise in 6: no federation"),
        (equal_noise_in(-1), "no federation goes like that"),
        (equal_noise_in("5"), "no federation goes like that"),
        (equal_noise_in(2.5), "no federation goes like that"),
        (equal_noise_in(None), "no federation goes like that"),
        (less_epsilon, "the plan costs epsilon"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_refused(tmp_path, change, complaint):
    folder = edited(made(tmp_path / "federation", asked=1), change)
    with pytest.raises(VerificationFailed, match=complaint):
        understudy.verify(folder)


@pytest.mark.parametrize("missing", ["clients", "rounds", "parts", "outside"])
def test_a_certificate_without_a_field_is_refused(tmp_path, missing):
    folder = edited(made(tmp_path / "f"), lambda content: content["federation"].pop(missing))
    with pytest.raises(VerificationFailed, match=rf"federation\.{missing}"):
        understudy.verify(folder)


def test_a_ledger_is_not_asked_for_it(tmp_path):
    folder = made(tmp_path / "federation")
    with pytest.raises(VerificationFailed, match="each client's own"):
        understudy.verify(folder, ledger=Ledger(tmp_path / "ledger.sqlite"))
