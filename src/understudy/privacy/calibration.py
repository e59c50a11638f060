"""The least noise with which a plan meets a budget, and how delta is split."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

from scipy.optimize import brentq

from understudy.errors import InvalidSettings, StorageError
from understudy.files import canonical_json, make_directory, write_file
from understudy.privacy.accounting import LIBRARY, epsilon_of, exact_multiplier, fine_interval
from understudy.privacy.plan import Accountant, Budget, Plan
from understudy.privacy.randomness import tail_delta

EPSILON_TOLERANCE = 1e-3
TAIL_SHARES = (1e-6, 1e-3, 1e-1)
"""Shares of delta tried for the sampler's tail, smallest first."""
NUDGES = (0.0, 1e-9, 1e-6, 1e-3, 1e-2, 1e-1)
"""What is added to a noise multiplier that a rounding left on the wrong side."""
COARSER = 10
"""How much coarser privacy losses are discretised for a first look."""
LARGEST_LOG_MULTIPLIER = 14.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The noise that makes a plan meet its budget, and how delta is split."""

    noise_multiplier: float
    """Noise standard deviation / sensitivity, times each line's `noise_ratio`."""
    epsilon: float
    delta_accounted: float
    delta_tail: float
    accountant: Accountant


def calibrate(plan: Plan, budget: Budget, *, cache: Path | None = None) -> Calibration:
    """Find the least noise with which `plan` meets `budget`, its delta including the tail.

    Args:
        plan: the releases.
        budget: the target.
        cache: directory of earlier answers; a hit is used only if one forward evaluation confirms
        it.
    """
    if not budget.is_private:
        return Calibration(
            noise_multiplier=0.0,
            epsilon=math.inf,
            delta_accounted=budget.delta,
            delta_tail=0.0,
            accountant=budget.accountant,
        )
    for share in TAIL_SHARES:
        accounted = budget.delta * (1 - share)
        multiplier, epsilon = _calibrated_multiplier(plan, budget, accounted, cache)
        if tail_delta(plan, multiplier) <= budget.delta * share:
            return Calibration(
                noise_multiplier=multiplier,
                epsilon=epsilon,
                delta_accounted=accounted,
                delta_tail=budget.delta * share,
                accountant=budget.accountant,
            )
    _check_tail(plan, budget, multiplier)
    raise _cannot_calibrate(budget)


def _calibrated_multiplier(
    plan: Plan, budget: Budget, delta: float, cache: Path | None
) -> tuple[float, float]:
    """Return (noise multiplier, epsilon), epsilon at most the target and within 1e-3 of it."""
    question = [plan.to_json(), budget.epsilon, delta, budget.accountant, LIBRARY]
    entry = (
        cache / f"{hashlib.sha256(canonical_json(question)).hexdigest()}.json" if cache else None
    )
    if entry and (cached := _read_cached(entry)):
        epsilon = epsilon_of(plan, cached, delta, budget.accountant)
        if budget.epsilon - EPSILON_TOLERANCE <= epsilon <= budget.epsilon:
            return cached, epsilon
    multiplier = _search(plan, budget, delta)
    for nudge in NUDGES:
        epsilon = epsilon_of(plan, multiplier * (1 + nudge), delta, budget.accountant)
        if epsilon <= budget.epsilon:
            if entry:
                _write_cached(entry, multiplier * (1 + nudge))
            return multiplier * (1 + nudge), epsilon
    raise _cannot_calibrate(budget)


def _search(plan: Plan, budget: Budget, delta: float) -> float:
    """Return a noise multiplier at or just above the one that spends epsilon exactly."""
    exact = exact_multiplier(plan, budget.epsilon, delta)
    if budget.accountant == "pld" and exact is not None:
        return exact
    excess = _Excess(plan, budget, delta)
    log = excess.root(-1.0, 1.0, "renyi")
    if budget.accountant == "renyi":
        return math.exp(log)
    _check_tail(plan, budget, math.exp(log))  # with less noise it is larger
    # A fine evaluation takes seconds, a coarse one a tenth of it: search coarsely (PLD needs less
    # noise than Rényi, rarely by more than a fifth), then correct by a few Newton steps.
    coarse = COARSER * fine_interval(plan, math.exp(log), delta)
    log = excess.root(log - 0.2, log, "pld", coarse)
    slope = (excess(log + 0.01, "pld", coarse) - excess(log - 0.01, "pld", coarse)) / 0.02
    return math.exp(excess.corrected(log, slope))


@dataclass(frozen=True)
class _Excess:
    """How far epsilon is above what is aimed at, by the logarithm of the noise multiplier."""

    plan: Plan
    budget: Budget
    delta: float

    @property
    def room(self) -> float:
        """How far below the target to aim: rounding must not lead above it."""
        return min(EPSILON_TOLERANCE, self.budget.epsilon / 100) / 2

    def __call__(self, log: float, accountant: Accountant, interval: float | None = None) -> float:
        found = epsilon_of(self.plan, math.exp(log), self.delta, accountant, interval=interval)
        return found - (self.budget.epsilon - self.room)

    def root(
        self, low: float, high: float, accountant: Accountant, interval: float | None = None
    ) -> float:
        """Return where there is none, looking between two places first."""
        while self(low, accountant, interval) < 0:
            low, high = low - 0.5, low
        while self(high, accountant, interval) > 0:
            low, high = high, high + 0.5
            if high > LARGEST_LOG_MULTIPLIER:
                raise _cannot_calibrate(self.budget)
        return float(brentq(self, low, high, args=(accountant, interval), xtol=1e-6, rtol=1e-9))

    def corrected(self, log: float, slope: float) -> float:
        """Return where there is nearly none by fine privacy losses, from a place near it."""
        too_little, too_much = -math.inf, math.inf
        for _ in range(20):
            gap = self(log, "pld")
            if abs(gap) < self.room / 2:
                break
            too_little, too_much = (log, too_much) if gap > 0 else (too_little, log)
            log -= max(-0.5, min(0.5, gap / slope))
            if not too_little < log < too_much:
                log = (too_little + too_much) / 2
        return log


def _check_tail(plan: Plan, budget: Budget, multiplier: float) -> None:
    """Refuse noise so small that the tail of its sampler costs too much of delta."""
    if tail_delta(plan, multiplier) > budget.delta * TAIL_SHARES[-1]:
        raise InvalidSettings(
            f"with noise multiplier {multiplier:.3g} the noise sampler's tail costs over a tenth "
            f"of delta = {budget.delta:g}; lower epsilon, raise delta or plan fewer releases"
        )


def _cannot_calibrate(budget: Budget) -> InvalidSettings:
    return InvalidSettings(
        f"no noise level was found for epsilon {budget.epsilon:g} with the {budget.accountant} "
        "accountant; raise epsilon or plan fewer releases"
    )


def _read_cached(entry: Path) -> float | None:
    try:
        value = json.loads(entry.read_bytes())["noise_multiplier"]
        return float(value) if float(value) > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cached(entry: Path, multiplier: float) -> None:
    try:
        make_directory(entry.parent, mode=0o700)
        write_file(entry, canonical_json({"noise_multiplier": multiplier}))
    except StorageError:
        return  # a cache that cannot be kept costs seconds, not correctness
