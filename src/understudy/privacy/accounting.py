"""From plans to epsilon and back. The only file that imports `dp_accounting`.

Every mechanism here is a Gaussian on a bounded sum, either over all units or over a Poisson sample
of them. Under the zero-out relation its dominating pair is that of add/remove: N(0, z^2) against (1
- q) N(0, z^2) + q N(1, z^2), in both orders, so dp_accounting's ADD_OR_REMOVE_ONE applies.

Within a run the plan is fixed ahead: privacy-loss distributions (PLD) compose it tightly. Across
runs the next plan may depend on earlier results, so admission against a lifetime budget uses a
Rényi filter of one fixed order (Feldman and Zrnic, 2021), which allows plans to be chosen
adaptively.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import dp_accounting
from dp_accounting import pld, rdp
from scipy.optimize import brentq

from understudy.errors import InvalidSettings, StorageError
from understudy.files import canonical_json, make_directory, write_file
from understudy.privacy.plan import Accountant, Budget, Plan
from understudy.privacy.randomness import tail_delta

# The library warns of each Rényi order that it leaves out; leaving one out is sound and expected.
logging.getLogger("absl").setLevel(logging.ERROR)

LIBRARY = f"dp-accounting {version('dp-accounting')}"
EPSILON_TOLERANCE = 1e-3
TAIL_SHARES = (1e-6, 1e-3, 1e-1)
"""Shares of delta tried for the sampler's tail, smallest first."""
FILTER_TAIL_SHARE = 0.1
"""Share of a data set's delta that the tails of all its runs together may take."""
INTERVAL, COARSE_INTERVAL = 1e-4, 1e-3
LARGEST_LOG_MULTIPLIER = 14.0
CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The noise that makes a plan meet its budget, and how delta is split."""

    noise_multiplier: float
    """Noise standard deviation / sensitivity, times each line's `noise_ratio`."""
    epsilon: float
    delta_accounted: float
    delta_tail: float
    accountant: Accountant


def _event(plan: Plan, noise_multiplier: float) -> dp_accounting.DpEvent:
    """Describe `plan` to dp_accounting; un-subsampled Gaussians become one, exactly."""
    events: list[dp_accounting.DpEvent] = []
    precision = 0.0
    for line in plan:
        multiplier = noise_multiplier * line.noise_ratio
        if line.sampling_rate == 1:
            precision += line.count / multiplier**2
            continue
        sampled = dp_accounting.PoissonSampledDpEvent(
            line.sampling_rate, dp_accounting.GaussianDpEvent(multiplier)
        )
        events.append(dp_accounting.SelfComposedDpEvent(sampled, line.count))
    if precision:
        events.append(dp_accounting.GaussianDpEvent(precision**-0.5))
    return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)


def epsilon_curve(
    plan: Plan,
    noise_multiplier: float,
    deltas: Sequence[float],
    accountant: Accountant,
    *,
    interval: float = INTERVAL,
) -> list[float]:
    """Return the epsilon of `plan` at each delta, the sampler's tail left out.

    Args:
        plan: the releases.
        noise_multiplier: the common one.
        deltas: where to evaluate.
        accountant: how to compose.
        interval: discretisation of privacy losses; the result is an upper bound with any.
    """
    if noise_multiplier == 0:
        return [math.inf] * len(deltas)
    event = _event(plan, noise_multiplier)
    if accountant == "pld" and isinstance(event, dp_accounting.GaussianDpEvent):
        sigma = event.noise_multiplier
        return [float(dp_accounting.get_epsilon_gaussian(sigma, delta)) for delta in deltas]
    composed = (
        pld.PLDAccountant(value_discretization_interval=interval)
        if accountant == "pld"
        else rdp.RdpAccountant()
    )
    composed.compose(event)
    return [float(composed.get_epsilon(delta)) for delta in deltas]


def epsilon_of(
    plan: Plan,
    noise_multiplier: float,
    delta: float,
    accountant: Accountant,
    *,
    interval: float = INTERVAL,
) -> float:
    """Return the epsilon of `plan` at `delta`, the sampler's tail left out."""
    return epsilon_curve(plan, noise_multiplier, [delta], accountant, interval=interval)[0]


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
    raise InvalidSettings(
        f"with noise multiplier {multiplier:.3g} the noise sampler's tail costs over a tenth of "
        f"delta = {budget.delta:g}; lower epsilon, raise delta or plan fewer releases"
    )


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
    for nudge in (
        0.0,
        1e-9,
        1e-6,
        1e-3,
        1e-2,
        1e-1,
    ):  # the root may lie a rounding on the wrong side
        epsilon = epsilon_of(plan, multiplier * (1 + nudge), delta, budget.accountant)
        if epsilon <= budget.epsilon:
            if entry:
                _write_cached(entry, multiplier * (1 + nudge))
            return multiplier * (1 + nudge), epsilon
    raise _cannot_calibrate(budget)


def _search(plan: Plan, budget: Budget, delta: float) -> float:
    """Return a noise multiplier at or just above the one that spends epsilon exactly."""
    event = _event(plan, 1.0)
    if budget.accountant == "pld" and isinstance(event, dp_accounting.GaussianDpEvent):
        sigma = dp_accounting.get_sigma_gaussian(budget.epsilon, delta)
        return float(sigma / event.noise_multiplier)
    aim = budget.epsilon - min(EPSILON_TOLERANCE, budget.epsilon / 100) / 2

    def excess(log: float, accountant: Accountant, interval: float = COARSE_INTERVAL) -> float:
        return epsilon_of(plan, math.exp(log), delta, accountant, interval=interval) - aim

    def root(low: float, high: float, accountant: Accountant) -> float:
        while excess(low, accountant) < 0:
            low, high = low - 0.5, low
        while excess(high, accountant) > 0:
            low, high = high, high + 0.5
            if high > LARGEST_LOG_MULTIPLIER:
                raise _cannot_calibrate(budget)
        return float(brentq(excess, low, high, args=(accountant,), xtol=1e-6, rtol=1e-9))

    log = root(-1.0, 1.0, "renyi")
    if budget.accountant == "renyi":
        return math.exp(log)
    # A fine evaluation takes seconds, a coarse one a tenth of it: search coarsely (PLD needs less
    # noise than Rényi, rarely by more than a fifth), then correct by a few Newton steps.
    log = root(log - 0.2, log, "pld")
    slope = (excess(log + 0.01, "pld") - excess(log - 0.01, "pld")) / 0.02
    for _ in range(10):
        gap = excess(log, "pld", INTERVAL)
        if abs(gap) < (budget.epsilon - aim) / 2:
            break
        log -= gap / slope
    return math.exp(log)


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


def renyi_divergence(plan: Plan, noise_multiplier: float, order: int) -> float:
    """Return the Rényi divergence bound of `plan` at one order."""
    if noise_multiplier == 0:
        return math.inf
    accountant = rdp.RdpAccountant(orders=[order])
    accountant.compose(_event(plan, noise_multiplier))
    return float(accountant.rdp[0])


def composed_epsilon(runs: Iterable[tuple[Plan, float]], delta: float) -> float:
    """Return the Rényi total of several runs at `delta`, as if their plans had been fixed ahead."""
    accountant = rdp.RdpAccountant()
    for plan, noise_multiplier in runs:
        if noise_multiplier == 0:
            return math.inf
        accountant.compose(_event(plan, noise_multiplier))
    return float(accountant.get_epsilon(delta))


def epsilon_of_sampled_clients(
    *,
    clients: int,
    asked: int,
    rounds: int,
    other_rounds: int,
    noise_multiplier: float,
    delta: float,
) -> float:
    """Return the epsilon of one client's data being replaced, for who cannot see who was asked.

    A client that is not asked sends no noise either, so the number of answers shows. It must be
    fixed: with exactly `asked` of `clients` chosen, another client's answer, with noise of its own,
    stands where this one's would. That is sampling without replacement.

    Args:
        clients: how many there are.
        asked: how many of them are chosen, anew and secretly, in each round.
        rounds: rounds in which all could be chosen, and all that were answered.
        other_rounds: the other rounds, counted as if this client had answered them all.
        noise_multiplier: each answer's noise / the distance of any two answers.
        delta: where to evaluate.
    """
    accountant = rdp.RdpAccountant(
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE
    )
    answer = dp_accounting.GaussianDpEvent(noise_multiplier)
    if asked == clients:
        rounds, other_rounds = 0, rounds + other_rounds
    if rounds:
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(clients, asked, answer)
        accountant.compose(dp_accounting.SelfComposedDpEvent(sampled, rounds))
    if other_rounds:
        accountant.compose(dp_accounting.SelfComposedDpEvent(answer, other_rounds))
    return float(accountant.get_epsilon(delta))


@dataclass(frozen=True)
class RenyiFilter:
    """Admit runs while the sum of their Rényi divergences at one fixed order stays within a bound.

    The order is the best one for a single Gaussian that would use the whole budget; it is a
    function of the budget alone, fixed when the data set is registered.
    """

    order: int
    bound: float

    @classmethod
    def for_budget(cls, epsilon: float, delta: float) -> RenyiFilter:
        """Build the filter whose admitted runs together are (epsilon, delta)-DP."""
        converted = delta * (1 - FILTER_TAIL_SHARE)
        root = math.sqrt(epsilon + math.log(1 / converted)) - math.sqrt(math.log(1 / converted))
        # Whole orders have an exact finite sum; fractional ones a series that may not converge.
        order = max(2, round(1 + math.sqrt(math.log(1 / converted)) / root))

        def excess(divergence: float) -> float:
            total, _ = rdp.compute_epsilon([order], [divergence], converted)
            return float(total) - epsilon

        low, high = 0.0, epsilon + 1.0
        bound = brentq(excess, low, high, xtol=1e-9) if excess(low) < 0 < excess(high) else low
        while bound > 0 and excess(bound) > 0:
            bound -= 1e-9
        return cls(order=order, bound=max(0.0, bound))

    def spent(self, divergence: float, delta: float) -> float:
        """Convert a sum of divergences to epsilon."""
        if math.isinf(divergence):
            return math.inf
        total, _ = rdp.compute_epsilon([self.order], [divergence], delta * (1 - FILTER_TAIL_SHARE))
        return float(total)
