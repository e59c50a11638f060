"""Where an audit takes place: a public data set with canaries, a ledger of its own, a real curator.

Everything between a plan and its answers is the code that runs on private data: registration,
calibration, reservation, release. Only the ledger is a scratch one, for nobody's data is spent.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from understudy.audit.canaries import Canaries
from understudy.audit.witness import Witness, with_room
from understudy.data.images import LabelledImages
from understudy.errors import InvalidSettings
from understudy.privacy.curator import Curator
from understudy.privacy.ensemble import shards
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget, Plan, PublicFacts
from understudy.privacy.randomness import Randomness
from understudy.privacy.registration import RegistrationTerms, declared_facts, register
from understudy.privacy.vault import Vault
from understudy.training.engine import Engine

DELTA = 1e-5
PUBLIC = RegistrationTerms(public_benchmark=True)
MakeRandomness = Callable[[], Randomness | None]


def secret_draws() -> None:
    """Let the vault draw batches and noise, as it always does."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A data set with canaries. Public sets alone: answers of `others` have no noise."""

    base: LabelledImages
    canaries: Canaries
    members: int = 0
    """Of an ensemble, if the plan asks one; each holds the slot of one canary at most."""
    engine: Engine = field(default_factory=Engine)
    randomness: MakeRandomness = secret_draws
    """For tests; anything but the default voids the guarantee, and the ledger says so."""

    def __post_init__(self) -> None:
        if not self.base.is_public_benchmark:
            raise InvalidSettings(
                f"{self.base.name} is not a known public set; canaries are tried on public sets "
                "alone, `understudy audit RUN` audits what was made of a private one"
            )

    @cached_property
    def facts(self) -> PublicFacts:
        """What is public about the set; the same whoever is in."""
        return declared_facts(self.canaries.planted(self.base, self.slots), PUBLIC)

    @cached_property
    def slots(self) -> NDArray[np.int64]:
        """The canaries' slots: of an ensemble's members one each, otherwise the first ones."""
        return np.arange(self.canaries.count) if not self.members else self._held[1]

    @cached_property
    def _held(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The members that hold a canary each, and the slot they hold it in: never the last."""
        total, count = len(self.base.labels) + self.canaries.count, self.canaries.count
        slots = shards(total, self.members).numpy()
        free = np.sort(np.where(slots == total - 1, total, slots), axis=1)[:, 0]
        members = np.flatnonzero(free < total)[:count]
        if len(members) < count:
            raise InvalidSettings(
                f"{count} canaries for {self.members} members of {slots.shape[1]} units each, "
                "expected one member for each canary, and a unit that is always there"
            )
        return members, free[members]

    @contextlib.contextmanager
    def opened(
        self, plan: Plan, budget: Budget, *, knows_others: bool = False
    ) -> Iterator[Witness]:
        """Open the set for a plan, and put a witness before the curator.

        Args:
            plan: a method's, without the canaries' coordinates.
            budget: the guarantee to claim.
            knows_others: whether the witness may subtract what the other records contribute.
        """
        roomy = with_room(plan, self.canaries.count, int(np.prod(self.facts.shape)))
        holders = self._held[0] if self.members else None
        without_noise = Budget(epsilon=math.inf, delta=budget.delta)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="audit-")))
            others = None
            if knows_others:
                opened = self._curator(folder / "others", plan, without_noise, nobody=True)
                others = stack.enter_context(opened)
            curator = stack.enter_context(self._curator(folder / "run", roomy, budget))
            yield Witness(curator, self.canaries.count, others=others, holders=holders)

    @contextlib.contextmanager
    def _curator(
        self, folder: Path, plan: Plan, budget: Budget, *, nobody: bool = False
    ) -> Iterator[Curator]:
        folder.mkdir()
        ledger = Ledger(folder / "ledger.sqlite")
        try:
            data = self.canaries.planted(self.base, self.slots, nobody=nobody)
            registration = register(ledger, data, PUBLIC)
            vault = Vault(data, registration, ledger, engine=self.engine)
            yield vault.open(
                plan, budget, ledger, workspace=folder / "blocks", run_id="audit",
                allow_large_delta=True, randomness=None if nobody else self.randomness(),
            )  # fmt: skip
        finally:
            ledger.close()
