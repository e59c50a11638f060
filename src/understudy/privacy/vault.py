"""The vault: where registered records live. It answers nothing itself; `open` gives a curator."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from understudy.data.images import LabelledImages
from understudy.errors import DataChanged, InvalidSettings, UnderstudyError
from understudy.files import home
from understudy.privacy.accounting import FILTER_TAIL_SHARE, RenyiFilter, renyi_divergence
from understudy.privacy.blocks import Blocks
from understudy.privacy.briefing import Briefing, FollowingBlocks, digest, results_of
from understudy.privacy.calibration import Calibration, calibrate
from understudy.privacy.client import Client, Critic, Offer
from understudy.privacy.curator import Curator, Pace
from understudy.privacy.group import ALONE, Group
from understudy.privacy.ledger import Charge, Ledger, Limit
from understudy.privacy.plan import IN_ONE_PROCESS, Budget, Plan, PublicFacts
from understudy.privacy.randomness import Randomness
from understudy.privacy.records import Records
from understudy.privacy.registration import Registration, is_registered_as
from understudy.privacy.sampling import Access
from understudy.privacy.sealed import Sealed
from understudy.privacy.secure import is_secure, secret_randomness
from understudy.training.engine import Engine


class Vault(Sealed):
    """Hold the records of a registered data set, laid out by unit, the held-out units apart."""

    __slots__ = ("_digest", "_engine", "_group", "_held_out", "_learn", "_records", "registration")

    def __init__(
        self,
        data: LabelledImages,
        registration: Registration,
        ledger: Ledger,
        *,
        engine: Engine | None = None,
        group: Group | None = None,
    ) -> None:
        if not is_registered_as(ledger, data, registration):
            raise DataChanged(
                f"these are not the records that were registered as '{registration.name}'; "
                "register them first"
            )
        facts = registration.facts
        self.registration = registration
        self._engine, self._group = engine or Engine(), group or ALONE
        total = int(data.units.max()) + 1
        self._learn, held_out = registration.split_units(total)
        self._records = _part(data, self._learn, facts, self._engine, self._group)
        self._held_out = Records.from_units(
            data, held_out, max_per_unit=None, device=self._engine.device
        )
        self._digest = digest(data) if self._group.size > 1 else ""

    def __repr__(self) -> str:
        facts = self.facts
        return f"<Vault {self.registration.name}: {facts.units} units of one {facts.unit} each>"

    @property
    def facts(self) -> PublicFacts:
        """What was declared public."""
        return self.registration.facts

    @property
    def device(self) -> torch.device:
        """Where the records are, and noise is wanted."""
        return self._engine.device

    def beside(self, engine: Engine) -> Vault:
        """Return a vault of the same records that computes with `engine`, on the same device."""
        other = object.__new__(Vault)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other._engine = engine
        return other

    def open(
        self,
        plan: Plan,
        budget: Budget,
        ledger: Ledger,
        *,
        workspace: Path,
        run_id: str,
        method: str = "",
        pace: Pace | None = None,
        allow_large_delta: bool = False,
        randomness: Randomness | None = None,
    ) -> Curator:
        """Calibrate the noise, reserve the whole plan in the ledger, and hand out the curator.

        A run that the ledger knows already goes on from its last committed block.

        Args:
            plan: all releases that will be made.
            budget: the guarantee to meet.
            ledger: where the data set is registered.
            workspace: directory for committed blocks, private.
            run_id: name of the run.
            method: for the record.
            pace: when to commit and whether to stop.
            allow_large_delta: accept delta >= 1/N0; the certificate will say so.
            randomness: new secret generators by default; draws that a test decides void the
                guarantee.

        Raises:
            BudgetRefused: the lifetime budget does not allow the plan.
        """
        budget.check_delta(self.facts.units, allow_large=allow_large_delta)
        kinds = {line.kind for line in plan} & IN_ONE_PROCESS
        if self._group.size > 1 and kinds:  # before anything is charged
            raise InvalidSettings(
                f"{min(kinds)} needs all units in one process, and there are {self._group.size}; "
                "run it without torchrun"
            )
        source = randomness or secret_randomness(self.device)
        is_private = budget.is_private and source.is_secret
        calibration = self._admit(
            run_id, plan, budget, ledger, method=method, is_private=is_private
        )
        blocks = Blocks(ledger, run_id, workspace)
        if self._group.size > 1:
            self._brief(plan, calibration, blocks, is_secure(source))
        return Curator(
            self._records,
            source,
            facts=self.facts,
            plan=plan,
            calibration=calibration,
            blocks=blocks,
            pace=pace or Pace(),
            engine=self._engine,
            group=self._group,
        )

    def open_rounds(
        self,
        offer: Offer,
        critic: Critic,
        budget: Budget,
        ledger: Ledger,
        *,
        run_id: str,
        randomness: Randomness | None = None,
    ) -> Client:
        """Reserve all rounds that are offered, and hand out the client that answers them.

        A run that the ledger knows already goes on with the rounds that are left, and a new critic.

        Args:
            offer: what a federation may ask for.
            critic: what to fit to the records.
            budget: the guarantee for all rounds together, against the server.
            ledger: where the data set is registered.
            run_id: name of this client's part in the federation.
            randomness: new secret generators by default; draws that a test decides void the
                guarantee.

        Raises:
            BudgetRefused: the lifetime budget does not allow the rounds.
        """
        budget.check_delta(self.facts.units, allow_large=False)
        plan = offer.plan(self.facts)
        source = randomness or secret_randomness(self.device)
        is_private = budget.is_private and source.is_secret
        calibration = self._admit(
            run_id, plan, budget, ledger, method="federated", is_private=is_private
        )
        source.take()
        access = Access(
            records=self._records,
            randomness=source,
            units=self.facts.units,
            classes=self.facts.classes,
            sampling_rate=1.0,
            noise_multiplier=calibration.noise_multiplier,
            engine=self._engine,
        )
        return Client(
            access, ledger, critic,
            facts=self.facts, offer=offer, calibration=calibration, run_id=run_id,
        )  # fmt: skip

    def _admit(
        self,
        run_id: str,
        plan: Plan,
        budget: Budget,
        ledger: Ledger,
        *,
        method: str,
        is_private: bool,
    ) -> Calibration:
        """Return the noise of a plan that is reserved now, or was when the run began."""
        calibration = self._resume(run_id, plan, budget, ledger, is_private=is_private)
        if calibration is None:
            calibration = calibrate(plan, budget, cache=home() / "calibrations")
            charge = Charge(
                method=method,
                plan=plan,
                noise_multiplier=calibration.noise_multiplier,
                epsilon=calibration.epsilon if is_private else None,
                delta=budget.delta,
                accountant=budget.accountant,
                delta_tail=calibration.delta_tail,
                divergence=None,
            )
            self._reserve(run_id, ledger, charge)
        return calibration

    def _brief(
        self, plan: Plan, calibration: Calibration, blocks: Blocks, secure_noise: bool
    ) -> None:
        """Tell the other processes what they need to take part."""
        briefing = Briefing(
            facts=self.facts,
            plan=plan.to_json(),
            calibration=calibration,
            records=self._digest,
            units=self._learn,
            committed=blocks.committed,
            results=results_of(blocks),
            secure_noise=secure_noise,
        )
        self._group.bytes_from_leader(briefing.to_bytes())
        if not self._group.all_say(True):
            raise InvalidSettings(
                "another process of this run reads other records or plans other releases; give all "
                "of them the same command, data and version of understudy"
            )

    def _reserve(self, run_id: str, ledger: Ledger, charge: Charge) -> None:
        lifetime = self.registration.lifetime_epsilon
        if lifetime is None or not self.registration.has_limit:
            ledger.reserve(run_id, self.registration.id, charge, limit=None)
            return
        filter_ = RenyiFilter.for_budget(lifetime, charge.delta)
        limit = Limit(filter_.bound, FILTER_TAIL_SHARE * charge.delta)
        if charge.epsilon is not None:
            divergence = renyi_divergence(charge.plan, charge.noise_multiplier, filter_.order)
            charge = replace(charge, divergence=divergence)
        ledger.reserve(run_id, self.registration.id, charge, limit)

    def _resume(
        self, run_id: str, plan: Plan, budget: Budget, ledger: Ledger, *, is_private: bool
    ) -> Calibration | None:
        if (row := ledger.run(run_id)) is None:
            return None
        is_same = (
            row["data_set"] == self.registration.id
            and json.loads(row["plan"]) == plan.to_json()
            and (row["epsilon"] is not None) == is_private
            and (not is_private or row["epsilon"] <= budget.epsilon)
            and (row["delta"], row["accountant"]) == (budget.delta, budget.accountant)
            and row["state"] != "cancelled"
        )
        if not is_same:
            raise InvalidSettings(
                "the ledger knows this run with another plan, budget or data set; repeat the "
                "command that started it, with --resume"
            )
        return Calibration(
            noise_multiplier=row["noise_multiplier"],
            epsilon=math.inf if row["epsilon"] is None else row["epsilon"],
            delta_accounted=budget.delta - row["delta_tail"],
            delta_tail=row["delta_tail"],
            accountant=budget.accountant,
        )


def follow(
    briefing: Briefing,
    data: LabelledImages,
    plan: Plan,
    *,
    engine: Engine,
    group: Group,
    randomness: Randomness | None = None,
) -> Curator:
    """Open a part of the records for a run that another process leads."""
    try:
        briefing.check(data, plan)
    except UnderstudyError:
        group.all_say(False)
        raise
    group.all_say(True)
    return Curator(
        _part(data, briefing.units, briefing.facts, engine, group),
        randomness or secret_randomness(engine.device, secure=briefing.secure_noise),
        facts=briefing.facts,
        plan=plan,
        calibration=briefing.calibration,
        blocks=FollowingBlocks(briefing),
        pace=Pace(),
        engine=engine,
        group=group,
    )


def _part(
    data: LabelledImages,
    units: NDArray[np.int64],
    facts: PublicFacts,
    engine: Engine,
    group: Group,
) -> Records:
    """Hold this process's share of the units."""
    return Records.from_units(
        data,
        units[group.rank :: group.size],
        max_per_unit=facts.max_per_unit,
        device=engine.device,
        one_each=facts.one_each,
    )
