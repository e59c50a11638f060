"""A client of a federation: its records, its critic, and the noise that it adds to each answer.

The server is not trusted. It sends generated images, the client lets its critic learn from them and
from its own records, and answers with the slope of the critic's scores by the images: clipped,
noisy, charged and written down before it leaves.

What is protected is the client's whole data, replaced by any other: the number of its records too.
The server knows whom it asked, so nothing is won by asking only some. A round is answered once. Who
asks again gets the same bytes, for a second answer with fresh noise would be a second release.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from understudy.errors import InvalidSettings, RoundDeclined
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.calibration import Calibration
from understudy.privacy.ensemble import Ensemble, Learn, State
from understudy.privacy.federation import RELATION
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.privacy.releases.votes import votes
from understudy.privacy.sampling import Access
from understudy.privacy.sealed import Sealed
from understudy.seeds import public_generator

KEPT_ANSWERS = 16
"""The latest answers, kept to be sent again."""
_NAME = re.compile(r"[0-9a-z][0-9a-z-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class Critic:
    """A critic as pure functions of its state."""

    state: State
    """What it starts as: tensors, nested."""
    learn: Learn
    """Gets generated images and labels (b, c, h, w), (b,) as what is public."""
    ask: Callable[[State, tuple[Tensor, Tensor]], Tensor]
    """Map a state, and images with labels, to the slope of the scores by the images."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a client lets itself be asked, fixed before a record is read."""

    rounds: int
    """Rounds that it answers, at most."""
    batch: int = 32
    """Images in each question."""
    clip_norm: float = 1.0
    """L2 norm that the slope of a whole question is scaled to, at most."""
    most_steps: int = 5
    """Learning steps in each round, at most."""

    def __post_init__(self) -> None:
        for what in ("rounds", "batch", "most_steps"):
            if getattr(self, what) < 1:
                raise InvalidSettings(
                    f"{what} is {getattr(self, what)}, expected at least 1; correct the offer"
                )
        if not (self.clip_norm > 0 and math.isfinite(self.clip_norm)):
            raise InvalidSettings(
                f"clip norm is {self.clip_norm:g}, expected a positive number; correct the offer"
            )

    @property
    def sensitivity(self) -> float:
        """Distance of an answer from what it would be with any other data, at most."""
        return 2 * self.clip_norm

    def plan(self, facts: PublicFacts) -> Plan:
        """Plan all rounds: each is the vote of an ensemble of one."""
        dimension = self.batch * math.prod(facts.shape)
        return Plan(
            (PlannedRelease(name="rounds", kind="votes", count=self.rounds, dimension=dimension),)
        )


@dataclass(frozen=True, kw_only=True)
class Round:
    """What the server sends: all of it public, none of it trusted."""

    name: str
    """Unique to the round, whatever else the server ever asks."""
    images: Tensor
    """(steps + 1, b, c, h, w), float32: to learn from, step by step; the last to be asked about."""
    labels: Tensor
    """(steps + 1, b), int64."""
    is_asked: bool = True
    """Whether an answer is wanted; if not, the critic learns all the same."""

    def check(self, offer: Offer, facts: PublicFacts) -> None:
        """Decline whatever was not offered, before a record is read."""
        if not _NAME.fullmatch(self.name):
            raise RoundDeclined(
                f"a round is called {self.name[:80]!r}, expected up to 64 of 0-9, a-z and -"
            )
        lead = (len(self.images) if self.images.ndim else 0, offer.batch)
        if not 1 <= lead[0] <= offer.most_steps + 1:
            raise RoundDeclined(
                f"{lead[0] - 1} learning steps were asked for, expected 0 to {offer.most_steps}"
            )
        for what, tensor, dtype, shape in (
            ("images", self.images, torch.float32, (*lead, *facts.shape)),
            ("labels", self.labels, torch.int64, lead),
        ):
            if tensor.dtype != dtype or tensor.shape != shape:
                raise RoundDeclined(
                    f"{what} are {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape} as "
                    "this client offers"
                )
        if not bool(self.images.isfinite().all()):
            raise RoundDeclined("images hold values that are not finite, expected numbers")
        if not bool(((self.labels >= 0) & (self.labels < facts.classes)).all()):
            raise RoundDeclined(
                f"labels go from {int(self.labels.min())} to {int(self.labels.max())}, expected 0 "
                f"to {facts.classes - 1}"
            )

    def digest(self) -> bytes:
        """Return a digest of what is asked."""
        content = hashlib.sha256(repr(tuple(self.images.shape)).encode())
        for tensor in (self.images, self.labels):
            content.update(tensor.contiguous().numpy().tobytes())
        return content.digest()


class Client(Sealed):
    """Answer rounds, each once. Nothing but answers leaves, and each is paid for before."""

    __slots__ = (
        "_access", "_ask", "_ensemble", "_learn", "_ledger", "_run_id", "calibration", "facts",
        "offer",
    )  # fmt: skip

    def __init__(
        self,
        access: Access,
        ledger: Ledger,
        critic: Critic,
        *,
        facts: PublicFacts,
        offer: Offer,
        calibration: Calibration,
        run_id: str,
    ) -> None:
        self.facts, self.offer, self.calibration = facts, offer, calibration
        self._access, self._ledger, self._run_id = access, ledger, run_id
        self._learn, self._ask = critic.learn, critic.ask
        state = pytree.tree_map(lambda leaf: leaf[None], critic.state)
        self._ensemble = Ensemble(
            access.records, facts, state, members=1, at_once=1, engine=access.engine
        )

    def answer(self, asked: Round) -> bytes | None:
        """Return the noisy slope as float32 bytes, like the images; None if none was asked for.

        Privacy:
            Reads: the client's records, through its critic.
            Bound: the slope by all images of the question, as one vector, is scaled to an L2 norm
                of at most `offer.clip_norm`.
            Sensitivity: with other data, of any number of units, the slope may become any other:
                2 * clip_norm.
            Charges: one Gaussian per round; all rounds offered were reserved when this was opened.
            The answer is in the ledger, durably, before it is returned.
        Edge cases:
            The same round again: the same bytes, nothing learned, nothing charged. The same name
            with other images, or an answer no longer kept: declined. No round left: declined,
            also where no answer is wanted; who could not answer must not seem to.

        Raises:
            RoundDeclined: with a reason that the server may be told.
        """
        asked.check(self.offer, self.facts)
        question = asked.digest()
        if (known := self._ledger.answered_round(self._run_id, asked.name)) is not None:
            return _again(asked.name, known, question)
        if self.rounds_left == 0:
            raise self._is_spent()
        self._advance(asked)
        if not asked.is_asked:
            return None
        images, labels = asked.images[-1], asked.labels[-1]
        slope = votes(
            self._access,
            self._ensemble,
            self._ask,
            self._here((images, labels)),
            dimension=images.numel(),
            bound=self.offer.clip_norm,
            is_replaced=True,
        )
        answer = slope.float().cpu().numpy().tobytes()
        is_ours = self._ledger.keep_answer(
            self._run_id, asked.name, question=question, answer=answer,
            most=self.offer.rounds, kept=KEPT_ANSWERS,
        )  # fmt: skip
        if is_ours:
            return answer
        known = self._ledger.answered_round(self._run_id, asked.name)
        if known is None:  # another process took the last round
            raise self._is_spent()
        return _again(asked.name, known, question)

    def _advance(self, asked: Round) -> None:
        """Let the critic learn once from each batch but the last."""
        for step in range(len(asked.images) - 1):
            draws = public_generator(0, "records", asked.name, step)
            size = (min(self.offer.batch, self._ensemble.shard),)
            positions = torch.randint(self._ensemble.shard, size, generator=draws)
            public = self._here((asked.images[step], asked.labels[step]))
            self._ensemble.learn(self._learn, positions, public)

    def _here(self, public: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        device = self._access.records.device
        return public[0].to(device), public[1].to(device)

    def _is_spent(self) -> RoundDeclined:
        return RoundDeclined(
            f"this client offered {self.offer.rounds} rounds and has answered them all: its budget "
            f"of epsilon {self.calibration.epsilon:.4g} is spent; go on without it"
        )

    @property
    def rounds_answered(self) -> int:
        """Number of rounds answered, by this process and those before it."""
        return self._ledger.rounds_answered(self._run_id)

    @property
    def rounds_left(self) -> int:
        """Number of rounds that can still be answered."""
        return max(0, self.offer.rounds - self.rounds_answered)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in each answer: public."""
        return self.calibration.noise_multiplier * self.offer.sensitivity

    @property
    def has_guarantee(self) -> bool:
        """Whether answers are private: noise was added, from a secret source."""
        return self.calibration.noise_multiplier > 0 and self._access.randomness.is_secret

    def statement(self) -> dict[str, Any]:
        """Return what taking part has cost so far, and may cost at most, as a JSON object."""
        calibration, answered = self.calibration, self.rounds_answered
        delta = calibration.delta_accounted + calibration.delta_tail

        def epsilon(rounds: int) -> float | None:
            if not self.has_guarantee:
                return None
            line = replace(self.offer.plan(self.facts)["rounds"], count=max(1, rounds))
            found = epsilon_of(
                Plan((line,)), calibration.noise_multiplier, calibration.delta_accounted,
                calibration.accountant,
            )  # fmt: skip
            return found if rounds else 0.0

        return {
            "format": 1,
            "relation": RELATION,
            "clip_norm": self.offer.clip_norm,
            "sensitivity": self.offer.sensitivity,
            "noise_multiplier": calibration.noise_multiplier,
            "noise_std": self.noise_std,
            "delta": delta,
            "accountant": calibration.accountant,
            "randomness": self._access.randomness.generator,
            "rounds_offered": self.offer.rounds,
            "rounds_answered": answered,
            "server_view": {
                "sees": "every answer of this client, and which rounds it answered",
                "amplification": None,
                "epsilon": epsilon(answered),
                "epsilon_at_most": epsilon(self.offer.rounds),
            },
            "outside_view": {
                "sees": "only what the server makes of all answers",
                "epsilon": epsilon(answered),
                "epsilon_at_most": epsilon(self.offer.rounds),
                "condition": "less if the server chose clients secretly and can be trusted to keep "
                "that secret: its own statement says how much",
            },
        }


def _again(name: str, known: Any, question: bytes) -> bytes:
    """Return the answer that a round got before."""
    if known["question"] != question:
        raise RoundDeclined(
            f"round {name} was answered before, and now other images are asked about; a round has "
            "one question, so give the next one another name"
        )
    if known["answer"] is None:
        raise RoundDeclined(
            f"round {name} was answered long ago and its answer is not kept; no round is answered "
            "anew, so go on with the next one"
        )
    return bytes(known["answer"])
