"""A whole federation in one process."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import BATCH, a_client, digits, train
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from critics import a_round
from understudy.errors import InvalidSettings, ProcessLost, RoundDeclined
from understudy.federated.node import check_address, reply
from understudy.federated.server import FederatedCritics, Seat, _is_one_noise
from understudy.federated.simulation import LocalGrid
from understudy.federated.wire import Answer, pack_answer, pack_round, read_answer, read_round
from understudy.privacy.plan import Budget
from understudy.progress import Progress

FREE = Budget(epsilon=math.inf, delta=1e-5)


class Heard(Progress):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def a_grid(folder, clients, **options):
    return LocalGrid(
        {n + 1: a_client(folder, n, clients=clients, **options) for n in range(clients)}
    )


def a_message(asked):
    LocalGrid({})  # says who sends
    message = Message(pack_round(asked), 1, "train")
    message.metadata.__dict__["_message_id"] = "m"
    return message


def a_question():
    return torch.rand(BATCH, 1, 8, 8), torch.arange(BATCH) % 10


def test_twenty_clients_finish_300_rounds_in_five_minutes(tmp_path):
    grid = a_grid(tmp_path, 20)
    critics = FederatedCritics(grid, clients=20)
    started = time.monotonic()
    images = train(critics, tmp_path)
    took = time.monotonic() - started
    print(f"300 rounds of 20 clients took {took:.0f} s")
    assert took < 300
    assert bool(images.isfinite().all())
    assert all(client.rounds_left == 0 for client in grid.clients.values())
    said = critics.statement()
    assert said["rounds"] == said["rounds_with_all_clients"] == 300
    assert said["rounds_with_equal_noise"] == 300
    own = grid.clients[1].statement()["server_view"]
    assert 9.9 < own["epsilon"] <= 10


def test_without_noise_the_generator_learns_the_classes(tmp_path):
    grid = a_grid(tmp_path, 4, rounds=100, budget=FREE)
    images = train(FederatedCritics(grid, clients=4), tmp_path, rounds=100).flatten(1).numpy()
    every = digits(0, 1)
    means = np.stack([every.images[every.labels == k].mean(0).ravel() for k in range(10)])
    near = np.corrcoef(images, means)[:10, 10:]
    assert np.mean(np.diag(near)) > 0.5


def test_the_mean_is_over_those_asked_and_not_over_those_who_answer(tmp_path):
    images, labels = a_question()
    whole = a_grid(tmp_path / "a", 2, budget=FREE)
    half = a_grid(tmp_path / "b", 2, budget=FREE)
    both = FederatedCritics(whole, clients=2).gradient(images, labels)
    critics = FederatedCritics(half, clients=2, patience=0.2)
    critics._fill_seats()
    del half.clients[2]
    one = critics.gradient(images, labels)
    # Nothing was learned, so both have the same critic.
    assert torch.allclose(one, both / 2)
    assert (critics.rounds, critics.complete_rounds) == (1, 0)


def test_a_killed_client_is_missed_and_one_that_starts_again_takes_its_place(tmp_path):
    heard = Heard()
    grid = a_grid(tmp_path, 3)
    critics = FederatedCritics(grid, clients=3, patience=0.2, progress=heard)
    critics.gradient(*a_question())
    del grid.clients[2]
    critics.gradient(*a_question())
    assert any("client 2 did not answer in time" in line for line in heard.lines)
    grid.clients[9] = a_client(tmp_path, 1, clients=3)
    critics.gradient(*a_question())
    assert grid.clients[9].rounds_answered == 2
    assert critics.complete_rounds == 2


def test_a_spent_client_declines_with_a_reason_and_the_run_goes_on(tmp_path):
    heard = Heard()
    grid = a_grid(tmp_path, 3)
    grid.clients[1] = a_client(tmp_path / "poor", 0, rounds=1)
    critics = FederatedCritics(grid, clients=3, progress=heard)
    for _ in range(3):
        critics.gradient(*a_question())
    (line,) = heard.lines
    assert line.startswith("client 1 declines: this client offered 1 rounds and has answered them")
    assert critics.complete_rounds == 1
    with pytest.raises(ProcessLost, match="no client answered round 0: .* is spent"):
        poor = LocalGrid({1: grid.clients[1]})
        FederatedCritics(poor, clients=1, patience=0.2).gradient(*a_question())


def test_a_retry_of_a_round_is_byte_identical_and_charged_once(tmp_path):
    client = a_client(tmp_path, 0)
    asked = a_round("b-7", batch=BATCH, classes=10)

    def ask():
        return reply(client, a_message(asked)).content["arrays"]["slope"].data

    first = ask()
    assert ask() == first
    assert client.rounds_answered == 1


def test_a_round_that_nobody_answers_is_sent_again_under_its_name(tmp_path, monkeypatch):
    grid = a_grid(tmp_path, 2)
    critics, lost = FederatedCritics(grid, clients=2, patience=0.3), []
    deliver = grid.pull_messages

    def lose_the_first(identities):
        replies = deliver(identities)
        if len(lost) < 2:
            lost.extend(reply.content["arrays"]["slope"].data for reply in replies)
            return []
        return replies

    monkeypatch.setattr(grid, "pull_messages", lose_the_first)
    sum_of_both = 2 * critics.gradient(*a_question()).flatten().double()
    assert [client.rounds_answered for client in grid.clients.values()] == [1, 1]
    first = sum(torch.frombuffer(bytearray(data), dtype=torch.float32).double() for data in lost)
    assert torch.allclose(sum_of_both, first, rtol=1e-5)


def test_only_those_chosen_are_charged_but_all_learn(tmp_path):
    grid = a_grid(tmp_path, 4)
    before = {n: c._ensemble._state["first"].clone() for n, c in grid.clients.items()}
    critics = FederatedCritics(grid, clients=4, asked=1)
    critics.advance(*a_question())
    critics.gradient(*a_question())
    assert sorted(c.rounds_answered for c in grid.clients.values()) == [0, 0, 0, 1]
    for number, client in grid.clients.items():
        assert not torch.equal(client._ensemble._state["first"], before[number])


def test_the_server_states_both_views(tmp_path):
    def outside(asked):
        critics = FederatedCritics(a_grid(tmp_path / str(asked), 5), clients=5, asked=asked)
        for _ in range(20):
            critics.gradient(*a_question())
        said = critics.statement()
        assert sum(part["rounds_answered"] for part in said["answers"]) == 20 * asked
        assert said["answers"][0]["server"]["amplification"] is None
        assert 0 < said["answers"][0]["server"]["epsilon_at_most"] <= 10
        return said["answers"][0]["outside"]["epsilon"]

    assert outside(1) < outside(5)


def test_a_round_with_a_client_out_of_reach_is_not_counted_as_sampled(tmp_path):
    grid = a_grid(tmp_path, 2)
    critics = FederatedCritics(grid, clients=2, asked=1, patience=0.2)
    critics._fill_seats()
    del grid.clients[2]
    critics._choice = type("First", (), {"sample": lambda self, seats, count: seats[:count]})()
    critics.gradient(*a_question())
    assert (critics.rounds, critics.complete_rounds) == (1, 0)


def outside_with(other, folder):
    """What two clients and a third pay from outside, and against the server, and the rounds."""
    grid = a_grid(folder, 3)
    grid.clients[3] = a_client(folder / "other", 2, clients=3, **other)
    critics = FederatedCritics(grid, clients=3, asked=1)
    for _ in range(20):
        critics.gradient(*a_question())
    parts = [part for part in critics.statement()["answers"] if part["outside"]]
    pays = {p["outside"]["epsilon"] < p["server"]["epsilon_at_most"] - 1e-6 for p in parts}
    return pays, critics.complete_rounds, critics.equal_rounds


@pytest.mark.parametrize(
    "other", [{"budget": Budget(epsilon=8.0, delta=1e-5)}, {"rounds": 299}, {"clip_norm": 0.9}]
)
def test_a_round_in_which_noise_shows_who_was_asked_is_not_counted_as_sampled(tmp_path, other):
    """Whoever was asked: all could have been."""
    assert outside_with({}, tmp_path / "equal") == ({True}, 20, 20)
    assert outside_with(other, tmp_path / "different") == ({False}, 20, 0)


def test_a_client_that_has_answered_all_its_rounds_is_not_one_that_could_be_asked(tmp_path):
    grid = a_grid(tmp_path, 2, rounds=2)
    critics = FederatedCritics(grid, clients=2, asked=1)
    first = type("First", (), {"sample": lambda self, seats, count: seats[:count]})()
    last = type("Last", (), {"sample": lambda self, seats, count: seats[-count:]})()
    for critics._choice in (first, first, last):
        critics.gradient(*a_question())
    assert [client.rounds_left for client in grid.clients.values()] == [0, 1]
    assert (critics.rounds, critics.complete_rounds, critics.equal_rounds) == (3, 2, 2)


@pytest.mark.parametrize("asked", [0, 3])
def test_numbers_of_clients_that_cannot_be_are_refused(asked):
    with pytest.raises(InvalidSettings, match="expected 1 to 2"):
        FederatedCritics(LocalGrid({}), clients=2, asked=asked)


def test_a_client_that_sends_something_else_is_left_out(tmp_path, monkeypatch):
    grid = a_grid(tmp_path, 2)
    critics = FederatedCritics(grid, clients=2, patience=0.2)
    bad = torch.full((BATCH * 64,), math.nan)
    monkeypatch.setattr(type(grid.clients[1]), "answer", lambda self, asked: bad.numpy().tobytes())
    with pytest.raises(ProcessLost, match="something else than a slope"):
        critics.gradient(*a_question())


@pytest.mark.parametrize(
    "told",
    [
        (0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (math.inf, 1e-5), (2.0, 0.0), (2.0, 2.0),
        (2.0, 1e-5, -1.0), (2.0, 1e-5, math.nan), (2.0, 1e-5, math.inf),
    ],
)  # fmt: skip
def test_a_client_that_tells_nonsense_of_its_noise_counts_as_without(told):
    seat = Seat(answers=1)
    seat.hear(Answer(noise_multiplier=2.0, delta=1e-5))
    assert seat.part.is_private
    seat.hear(Answer(**dict(zip(("noise_multiplier", "delta", "noise_std"), told, strict=False))))
    assert not seat.part.is_private
    seat.hear(Answer(noise_multiplier=2.0, delta=1e-5))
    assert not seat.part.is_private


def test_the_least_noise_that_a_client_told_of_counts():
    seat = Seat()
    for noise, delta in ((2.0, 1e-5), (1.0, 1e-6), (3.0, 1e-7)):
        seat.hear(Answer(noise_multiplier=noise, delta=delta, noise_std=2 * noise))
    assert (seat.noise_multiplier, seat.delta, seat.noise_std) == (1.0, 1e-5, 2.0)


@pytest.mark.parametrize(
    ("told", "is_one"),
    [
        ([(2.0, 4.0), (2.0, 4.0)], True),
        ([(2.0, 4.0), (2.0, 4.0000001)], False),
        ([(2.0, 4.0), (1.0, 4.0)], False),
        ([(2.0, 4.0), (2.0, 0.0)], False),
        ([(2.0, 0.0), (2.0, 0.0)], False),
        ([(0.0, 0.0), (0.0, 0.0)], False),
        ([(2.0, math.nan)] * 2, False),
        ([(2.0, math.inf)] * 2, False),
    ],
)
def test_noise_is_equal_if_all_told_of_it_and_of_exactly_the_same(told, is_one):
    heard = [Answer(noise_multiplier=noise, delta=1e-5, noise_std=std) for noise, std in told]
    assert _is_one_noise(heard) == is_one


def test_a_client_that_does_not_tell_how_large_its_noise_is_keeps_its_guarantee():
    """One of an earlier version: it is worth nothing from outside, that is all."""
    message = pack_answer(Answer(noise_multiplier=2.0, delta=1e-5))
    del message["said"]["noise-std"]
    seat = Seat(answers=1)
    seat.hear(read_answer(message))
    assert seat.part.is_private
    assert seat.noise_std == 0


def test_an_error_at_a_client_tells_the_server_nothing(tmp_path, monkeypatch):
    client = a_client(tmp_path, 0)
    monkeypatch.setattr(type(client), "answer", lambda *_: 1 / 0)
    said = read_answer(reply(client, a_message(a_round())).content)
    assert said.declined == "this client met an error; its own log says which"
    assert said.slope is None


# The wire


def test_rounds_and_answers_arrive_as_they_were_sent():
    asked = replace(a_round("c-1"), is_asked=False)
    came = read_round(pack_round(asked))
    assert (came.name, came.is_asked) == ("c-1", False)
    assert torch.equal(came.images, asked.images)
    assert torch.equal(came.labels, asked.labels)
    answer = Answer(slope=torch.rand(5), noise_multiplier=2.0, delta=1e-5, noise_std=3.0)
    heard = read_answer(pack_answer(answer))
    assert torch.equal(heard.slope, answer.slope)
    assert replace(heard, slope=None) == replace(answer, slope=None)


@pytest.mark.parametrize("name", ["noise-multiplier", "delta", "noise-std"])
@pytest.mark.parametrize("told", ["4.0", 4, True, [4.0]])
def test_what_a_client_tells_of_its_noise_are_numbers_of_the_declared_type(name, told):
    message = pack_answer(Answer(noise_multiplier=2.0, delta=1e-5, noise_std=4.0))
    message["said"][name] = told
    with pytest.raises(RoundDeclined, match="that is none"):
        read_answer(message)


def test_a_client_tells_how_large_its_noise_is(tmp_path):
    client = a_client(tmp_path, 0, clip_norm=0.5)
    said = read_answer(reply(client, a_message(a_round())).content)
    assert said.noise_std == client.noise_std == said.noise_multiplier * 2 * 0.5


def broken(**arrays):
    labels = Array("int64", (1,), "understudy.raw", bytes(8))
    return RecordDict({
        "arrays": ArrayRecord({"labels": labels} | arrays),
        "said": ConfigRecord({"round": "a", "is-asked": True}),
    })  # fmt: skip


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (RecordDict({}), "without arrays"),
        (broken(), "without images"),
        (broken(images=Array(np.zeros(3, np.float32))), "by numpy.ndarray, expected"),
        (broken(images=Array("object", (1,), "understudy.raw", bytes(8))), "object by"),
        (broken(images=Array("float32", (3,), "understudy.raw", bytes(8))), "8 bytes, expected 12"),
        (broken(images=Array("float32", (-1,), "understudy.raw", b"")), "which is none"),
        (broken(images=Array("float32", (0, 2**62, 4), "understudy.raw", b"")), "which is none"),
        (broken(images=Array("float32", (2**40,), "understudy.raw", bytes(8))), "expected 4398"),
    ],
)
def test_what_is_not_numbers_of_the_declared_shape_is_not_read(content, told):
    with pytest.raises(RoundDeclined, match=told):
        read_round(content)


@pytest.mark.parametrize("address", ["10.0.0.7:9092", "server.example:9092", "[fd00::1]:9092"])
def test_another_machine_needs_a_certificate_and_a_key(address, tmp_path):
    there = tmp_path / "file"
    for certificate, key in ((None, None), (there, None), (None, there)):
        with pytest.raises(InvalidSettings, match="another machine"):
            check_address(address, certificate, key)
    check_address(address, there, there)


@pytest.mark.parametrize("address", ["127.0.0.1:9092", "localhost:9092", "[::1]:9092"])
def test_this_machine_needs_neither(address):
    check_address(address, None, None)


@pytest.mark.parametrize("address", ["localhost", "localhost:", ":9092", "127.0.0.1:x"])
def test_addresses_without_a_port_are_refused(address):
    with pytest.raises(InvalidSettings, match="expected HOST:PORT"):
        check_address(address, None, None)
