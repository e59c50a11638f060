"""The server's side: critics that are elsewhere. Whoever trains a generator sees only their slopes.

The server divides by the number of clients that it asks, a constant, not by the number that answer.
A client that is gone, or declines, is missed in the sum and does not stop the run.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor

from understudy.errors import InvalidSettings, ProcessLost, RoundDeclined
from understudy.federated.wire import Answer, pack_round, read_answer
from understudy.privacy.client import Round
from understudy.privacy.federation import CONDITION, RELATION, Course, Part
from understudy.progress import Progress

LEFT_OUT = 10
"""Rounds for which a client that did not answer in time is not asked."""
ATTEMPTS = 3
"""Times that a round is sent if nobody answers; whoever did gets the same name, so answers once."""
SECONDS_TO_COME = 60
"""For all clients to come at first, or `patience` if that is longer."""
SECONDS_BETWEEN, MOST_SECONDS_BETWEEN = 0.05, 0.5


@dataclass
class Seat:
    """A client's place in the federation."""

    node: int | None = None
    back_in: int = 0
    """Round from which it is asked again."""
    answers: int = 0
    declined: str = ""
    noise_multiplier: float = math.inf
    """The least that it told of; 0 for what is no noise."""
    delta: float = 0.0
    """The largest that it told of."""
    noise_std: float = math.inf
    """The least that it told of; 0 if it did not tell."""

    def hear(self, answer: Answer) -> None:
        """Note what a client tells of its noise. It may be anybody: what makes no sense is none."""
        noise, delta, std = answer.noise_multiplier, answer.delta, answer.noise_std
        makes_sense = 0 < noise < math.inf and 0 < delta < 1 and 0 <= std < math.inf
        self.noise_multiplier = min(self.noise_multiplier, noise if makes_sense else 0.0)
        self.delta = max(self.delta, delta if makes_sense else 0.0)
        self.noise_std = min(self.noise_std, std if makes_sense else 0.0)

    @property
    def part(self) -> Part:
        """What it has answered, and what it told."""
        return Part(
            rounds_answered=self.answers, noise_multiplier=self.noise_multiplier, delta=self.delta
        )


class FederatedCritics:
    """Ask clients for the slope of their critics' scores.

    Args:
        grid: Flower's way to the clients.
        clients: how many take part.
        asked: how many of them are asked in each round, chosen secretly; by default all. The others
            learn as well: what a critic knows must not show when it was asked.
        patience: seconds to wait for answers.
        most_steps: learning steps that clients take in one message, as they offer.
        progress: where to say who is missing.
    """

    def __init__(
        self,
        grid: Any,
        *,
        clients: int,
        asked: int | None = None,
        patience: float = 60.0,
        most_steps: int = 5,
        progress: Progress | None = None,
    ) -> None:
        self.asked = clients if asked is None else asked
        if not 1 <= self.asked <= clients:
            raise InvalidSettings(
                f"{self.asked} of {clients} clients are to be asked in a round, expected 1 to "
                f"{clients}; correct the settings"
            )
        self._grid, self._patience, self._most_steps = grid, patience, most_steps
        self._progress = progress or Progress()
        self._seats = [Seat() for _ in range(clients)]
        self._session = secrets.token_hex(8)
        self._choice = secrets.SystemRandom()
        self._to_learn: list[tuple[Tensor, Tensor]] = []
        self.rounds = self.complete_rounds = self.equal_rounds = 0
        self._lessons = self._dimension = 0

    @property
    def clients(self) -> int:
        """How many take part."""
        return len(self._seats)

    def advance(self, images: Tensor, labels: Tensor, turn: int = 0) -> None:
        """Let critics learn from these images: sent with the next question, in one message.

        What is too much for that message goes ahead of it, to all, and nobody is asked.
        """
        if len(self._to_learn) == self._most_steps:
            self._fill_seats()
            name = f"{self._session}-lesson-{self._lessons}"
            # The last batch of a message is not learned from: it is what a question is about.
            self._send(name, *_stacked([*self._to_learn, self._to_learn[-1]]), chosen=[])
            self._lessons += 1
            self._to_learn.clear()
        self._to_learn.append((images, labels))

    def gradient(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the clients' noisy slopes by `images`, over the number asked.

        Raises:
            ProcessLost: no client answers.
        """
        every, their_labels = _stacked([*self._to_learn, (images, labels)])
        name = f"{self._session}-{self.rounds}"
        chosen = self._choice.sample(self._seats, self.asked)
        total, answered = torch.zeros(images.numel(), dtype=torch.float64), 0
        for _ in range(ATTEMPTS):
            self._fill_seats()
            heard = self._send(name, every, their_labels, chosen)
            for seat, answer in heard:
                if answer.slope is None or not any(seat is one for one in chosen):
                    continue
                if answer.slope.shape != total.shape or not bool(answer.slope.isfinite().all()):
                    seat.declined = "it sent something else than a slope"
                    continue
                total += answer.slope.double()
                answered += 1
                seat.answers += 1
            if answered:
                break
            for seat in self._seats:  # with nobody else to go on with, all are tried again
                seat.back_in = 0
        else:
            raise ProcessLost(
                f"no client answered round {self.rounds}: {self._reasons()}; see to the clients, "
                "then start again"
            )
        self._to_learn.clear()
        self._dimension = max(self._dimension, images.numel())
        self.rounds += 1
        # Had one of those not asked been out of reach, the others would have been asked more often.
        is_complete = answered == self.asked and len(heard) == len(self._seats)
        self.complete_rounds += is_complete
        self.equal_rounds += is_complete and _is_one_noise([answer for _, answer in heard])
        return (total / self.asked).to(images.dtype).view(images.shape).to(images.device)

    def _send(
        self, name: str, images: Tensor, labels: Tensor, chosen: list[Seat]
    ) -> list[tuple[Seat, Answer]]:
        """Send a round to all clients there are; return what they say in time, asked or not."""
        seats = [s for s in self._seats if s.node and not s.declined and s.back_in <= self.rounds]
        messages = []
        for seat in seats:
            is_asked = any(seat is one for one in chosen)
            asked = Round(name=name, images=images, labels=labels, is_asked=is_asked)
            message = Message(
                pack_round(asked), seat.node, "train", ttl=2 * self._patience + 60, group_id=name
            )
            messages.append(message)
        waiting = {
            identity: seat
            for identity, seat in zip(self._grid.push_messages(messages), seats, strict=True)
            if identity
        }
        answers = []
        for identity, reply in self._replies(list(waiting)):
            seat = waiting.pop(identity)
            if (answer := self._read(seat, reply)) is not None:
                answers.append((seat, answer))
        for seat in waiting.values():
            self._miss(seat, "did not answer in time")
        return answers

    def _replies(self, identities: list[str]) -> Iterator[tuple[str, Any]]:
        """Yield the replies that come in time, by the message that they reply to.

        Each is awaited by a thread of its own: for a client that was killed while it sent, Flower
        waits minutes for what is missing.
        """
        end, came = time.monotonic() + self._patience, queue.SimpleQueue[tuple[str, Any]]()

        def wait(identity: str) -> None:
            pause = SECONDS_BETWEEN
            while time.monotonic() < end:
                for reply in self._grid.pull_messages([identity]):
                    came.put((identity, reply))
                    return
                time.sleep(pause)
                pause = min(1.5 * pause, MOST_SECONDS_BETWEEN)

        for identity in identities:
            threading.Thread(target=wait, args=(identity,), daemon=True).start()
        for _ in identities:
            try:
                yield came.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return

    def _read(self, seat: Seat, reply: Any) -> Answer | None:
        if reply.has_error():
            self._miss(seat, "cannot be reached")
            return None
        try:
            answer = read_answer(reply.content)
        except RoundDeclined as error:
            answer = Answer(declined=str(error))
        if answer.declined:
            seat.declined = answer.declined
            self._progress.say(f"{self._name(seat)} declines: {answer.declined}")
            return None
        seat.hear(answer)
        return answer

    def _miss(self, seat: Seat, why: str) -> None:
        seat.back_in = self.rounds + LEFT_OUT
        self._progress.say(
            f"{self._name(seat)} {why} in round {self.rounds}; the next {LEFT_OUT} go without it"
        )

    def _fill_seats(self) -> None:
        """Give free seats, and those whose client is gone, to clients that have none."""
        end = time.monotonic() + max(self._patience, SECONDS_TO_COME)
        while True:
            here = set(self._grid.get_node_ids())
            new = sorted(here - {seat.node for seat in self._seats})
            for seat in self._seats:
                if new and (seat.node is None or (seat.node not in here and not seat.declined)):
                    seat.node, seat.back_in = new.pop(0), 0
            missing = sum(seat.node is None for seat in self._seats)
            if not missing or self.rounds or time.monotonic() > end:
                return
            time.sleep(SECONDS_BETWEEN)

    def _name(self, seat: Seat) -> str:
        return f"client {next(n for n, one in enumerate(self._seats) if one is seat) + 1}"

    def _reasons(self) -> str:
        reasons = {seat.declined for seat in self._seats if seat.declined}
        return "; ".join(sorted(reasons)) or "none can be reached"

    def course(self, *seats: Seat) -> Course:
        """Return how the federation went for these seats; by default for all who answered."""
        heard = seats or tuple(seat for seat in self._seats if seat.answers)
        return Course(
            clients=self.clients,
            asked_per_round=self.asked,
            rounds=self.rounds,
            rounds_with_all_clients=self.complete_rounds,
            dimension=self._dimension,
            parts=tuple(seat.part for seat in heard),
            rounds_with_equal_noise=self.equal_rounds,
        )

    def statement(self) -> dict[str, Any]:
        """Return how the federation went and what each client's part costs it, in two views."""
        return {
            "format": 1,
            "relation": RELATION,
            "clients": self.clients,
            "asked_per_round": self.asked,
            "rounds": self.rounds,
            "rounds_with_all_clients": self.complete_rounds,
            "rounds_with_equal_noise": self.equal_rounds,
            "answers": [self._views(seat) for seat in self._seats],
        }

    def _views(self, seat: Seat) -> dict[str, Any]:
        if not (seat.answers and seat.part.is_private):
            return {"rounds_answered": seat.answers, "outside": None}
        course = self.course(seat)
        return {
            "rounds_answered": seat.answers,
            "as_told_by_client": {
                "noise_multiplier": seat.noise_multiplier, "delta": seat.delta,
                "noise_std": seat.noise_std,
            },
            "server": {
                "amplification": None,
                "epsilon_at_most": course.server_epsilon,
                "condition": "the client told the truth of its noise; its own statement has the "
                "last word",
            },
            "outside": {"epsilon": course.outside_epsilon, "condition": CONDITION},
        }  # fmt: skip


def _is_one_noise(answers: list[Answer]) -> bool:
    """Say whether all told of exactly the same noise, so that no sum shows whose it is."""
    told = {(answer.noise_multiplier, answer.noise_std) for answer in answers}
    return len(told) == 1 and all(0 < number < math.inf for number in told.pop())


def _stacked(batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return images and labels as a message takes them."""
    images, labels = (torch.stack(part).cpu() for part in zip(*batches, strict=True))
    return images.float(), labels.long()
