"""What a federation's result costs its clients, by what they told the server.

The server adds no noise and keeps no ledger. What it can certify follows from what it saw: how many
rounds there were, and what noise each client said it adds. A client answers a round at most once
under its name in its own ledger, wherever it sits, so its part is no more than one answer to every
round with the least noise of all. One that takes another name counts as another client. Whether
clients said the truth, and what earlier federations cost them, they know alone.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from understudy.errors import InvalidSettings, VerificationFailed
from understudy.privacy.accounting import (
    LEAST_MULTIPLIER,
    epsilon_of,
    epsilon_of_sampled_clients,
)
from understudy.privacy.plan import Accountant, Plan, PlannedRelease
from understudy.privacy.randomness import tail_delta

RELATION = "one client's whole data replaced"
ACCOUNTANT: Accountant = "pld"
CONDITION = (
    "the server is trusted: it chose anew and secretly in each round whom to ask, told nobody, and "
    "lets out only what it made of the sums; who failed to answer did not do so because of its "
    "data; and clients add noise of exactly the size that they told, so that no sum shows by its "
    "noise whose it is"
)
TOLERANCE = 1e-6
SMALLEST_DELTA, NO_DELTA = 1e-30, 0.5
"""The least that a client can mean; and what stands where none meant any, without a guarantee."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A client's part, as the server saw it."""

    rounds_answered: int
    noise_multiplier: float
    """Noise / distance of any two answers, as the client told; 0 if what it told was none."""
    delta: float
    """As the client told."""

    @property
    def is_private(self) -> bool:
        """Whether the client said that it adds noise, of a size that makes sense."""
        is_noise = LEAST_MULTIPLIER <= self.noise_multiplier < math.inf
        return is_noise and SMALLEST_DELTA <= self.delta < 1


@dataclass(frozen=True, kw_only=True)
class Course:
    """How a federation went."""

    clients: int
    asked_per_round: int
    rounds: int
    rounds_with_all_clients: int
    """Rounds in which all could be chosen, and all who were chosen answered."""
    dimension: int
    """Numbers in an answer."""
    parts: tuple[Part, ...]
    """Of those who answered at all."""
    rounds_with_equal_noise: int = 0
    """Of the rounds with all clients, those in which all of them, asked or not, told of exactly the
    same noise: the same multiplier, and the same standard deviation."""

    def __post_init__(self) -> None:
        is_possible = 1 <= self.asked_per_round <= self.clients
        whole, equal = self.rounds_with_all_clients, self.rounds_with_equal_noise
        if not (is_possible and type(equal) is int and 0 <= equal <= whole <= self.rounds):
            raise InvalidSettings(
                f"{self.asked_per_round} of {self.clients} clients asked in {self.rounds} rounds, "
                f"all in reach in {whole}, with equal noise in {equal!r:.40}: no federation goes "
                "like that"
            )

    @classmethod
    def from_json(cls, content: Any) -> Course:
        """Read what `to_json` has written, after `check_form`.

        Earlier versions did not ask how large noise is: then it is known to be equal in no round.
        """
        parts = tuple(Part(**{f.name: p[f.name] for f in fields(Part)}) for p in content["parts"])
        known = [f.name for f in fields(cls) if f.name in content and f.name != "parts"]
        return cls(parts=parts, **{name: content[name] for name in known})

    def to_json(self) -> dict[str, Any]:
        """Return everything as a JSON object, with what it costs from outside."""
        said = asdict(self) | {"outside": None}
        if self.is_private:
            said["outside"] = {"epsilon": self.outside_epsilon, "condition": CONDITION}
        return said

    @property
    def data(self) -> str:
        """What the result is a stand-in for."""
        return f"the images of {self.clients} clients"

    @property
    def is_private(self) -> bool:
        """Whether all who answered said that they add noise, and enough for what they promise."""
        is_told = bool(self.parts) and all(part.is_private for part in self.parts)
        return is_told and self.tail < self.delta

    @property
    def noise_multiplier(self) -> float:
        """The least noise of all."""
        return min(part.noise_multiplier for part in self.parts)

    @property
    def delta(self) -> float:
        """The largest delta of all that make sense."""
        return max((part.delta for part in self.parts if part.is_private), default=NO_DELTA)

    @property
    def rounds_answered(self) -> int:
        """The most rounds that anyone is known to have answered."""
        return max(part.rounds_answered for part in self.parts)

    @property
    def plan(self) -> Plan:
        """An answer to every round."""
        line = PlannedRelease(
            name="rounds", kind="votes", count=self.rounds, dimension=self.dimension
        )
        return Plan((line,))

    @cached_property
    def tail(self) -> float:
        """The part of delta that the noise sampler's tail takes."""
        return tail_delta(self.plan, self.noise_multiplier)

    @property
    def accounted(self) -> float:
        """The rest of delta."""
        return self.delta - self.tail

    @cached_property
    def server_epsilon(self) -> float:
        """What a client's part costs at most against the server, who sees every answer."""
        return epsilon_of(self.plan, self.noise_multiplier, self.accounted, ACCOUNTANT)

    @property
    def hidden_rounds(self) -> int:
        """Rounds in which nothing that comes out shows who was asked.

        Any client's answer must be able to stand where another's is. An answer has thousands of
        coordinates, so noise that is a tenth smaller shows; and answers of a larger norm are
        further away. Where parts told of different noise, at whatever time, no round counts.
        """
        is_one_noise = len({part.noise_multiplier for part in self.parts}) == 1
        return self.rounds_with_equal_noise if is_one_noise else 0

    @cached_property
    def outside_epsilon(self) -> float:
        """What it costs against others, on `CONDITION`.

        Rounds that hide nobody count as if this client had answered them all.
        """
        sampled = epsilon_of_sampled_clients(
            clients=self.clients,
            asked=self.asked_per_round,
            rounds=self.hidden_rounds,
            other_rounds=self.rounds - self.hidden_rounds,
            noise_multiplier=self.noise_multiplier,
            delta=self.accounted,
        )
        return min(sampled, self.server_epsilon)

    def in_words(self) -> str:
        """Say what stands behind the guarantee."""
        said = (
            f"Each of {self.clients} clients added its own noise before anything left it, so this "
            "holds against the server, too. It rests on what clients told the server of their "
            "noise, each under one name, and counts this federation alone; what each of them did, "
            "before it too, stands in its own `federated.json`."
        )
        if self.outside_epsilon < self.server_epsilon - TOLERANCE:
            said += (
                f" Epsilon is {math.ceil(1000 * self.outside_epsilon) / 1000:g} against all others,"
                f" if {CONDITION}."
            )
        return said

    def check(self, stated: Any, lines: Plan, multiplier: float) -> None:
        """Compare with what a certificate states of the same federation.

        Raises:
            VerificationFailed: they differ.
        """
        is_same = lines == self.plan and math.isclose(multiplier, self.noise_multiplier)
        if not (self.is_private and is_same):
            raise VerificationFailed(
                "the certified plan is not what the clients of the federation told; do not rely "
                "on it, and ask whoever made it"
            )
        found = self.outside_epsilon
        if not found <= stated["epsilon"] + TOLERANCE:
            raise VerificationFailed(
                f"from outside the federation costs epsilon {found:.4f}, but "
                f"{stated['epsilon']:.4f} is certified (clients are known to have added equal "
                f"noise in {self.hidden_rounds} of {self.rounds} rounds, and only these hide who "
                "was asked; earlier versions did not look); do not rely on it, and ask whoever "
                "made it"
            )
