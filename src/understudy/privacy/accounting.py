"""The epsilon of plans. The only file that imports `dp_accounting`.

Every mechanism here is a Gaussian on a bounded sum, either over all units or over a Poisson sample
of them. Under the zero-out relation its dominating pair is that of add/remove: N(0, z^2) against (1
- q) N(0, z^2) + q N(1, z^2), in both orders, so dp_accounting's ADD_OR_REMOVE_ONE applies. So it
does to a bounded function of the whole sample, which is no sum, with a sensitivity of twice the
bound: `releases/batch_gradient.py` says why.

In a Poisson sample of members of an ensemble nobody's part vanishes: one member's answer becomes
another. There the pair is that of replacement, (1 - q) N(0, z^2) + q N(1/2, z^2) against (1 - q)
N(0, z^2) + q N(-1/2, z^2), which is its own reverse; `releases/sample_gradient.py` has the proof.
A pair that dominates all hockey-stick divergences dominates Rényi's, so both accountants apply.

Within a run the plan is fixed ahead: privacy-loss distributions (PLD) compose it tightly. Across
runs the next plan may depend on earlier results, so admission against a lifetime budget uses a
Rényi filter of one fixed order (Feldman and Zrnic, 2021), which allows plans to be chosen
adaptively.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation as Relation
from dp_accounting import rdp
from dp_accounting.pld import privacy_loss_distribution as pld
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp

from understudy.errors import InvalidSettings
from understudy.privacy.plan import REPLACING, Accountant, Plan

# The library warns of each Rényi order that it leaves out; leaving one out is sound and expected.
logging.getLogger("absl").setLevel(logging.ERROR)

LIBRARY = f"dp-accounting {version('dp-accounting')}"
FILTER_TAIL_SHARE = 0.1
"""Share of a data set's delta that the tails of all its runs together may take."""
FINEST_INTERVAL, WIDEST_INTERVAL = 1e-4, 1e-3
"""Discretisations of privacy losses: the least and the largest that many releases need."""
FINER_THAN_EPSILON = 2000
"""Steps of the discretisation that epsilon has at least: small budgets need finer ones."""
QUADRATURE_REACH, MOST_POINTS, ROUNDED_UP = 12.0, 10**7, 1e-12
"""Standard deviations beyond the outermost peaks, points, and what is added to a divergence."""
LARGEST_EPSILON, LEAST_DELTA, LEAST_MULTIPLIER = 1000.0, 1e-10, 0.05
"""Beyond these an epsilon is not computed for a plan that came from elsewhere."""
CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8)


@dataclass(frozen=True)
class _Gaussians:
    """Equal Gaussian releases, in a row."""

    multiplier: float
    rate: float = 1.0
    count: int = 1
    replaces: bool = False
    """Whether what a unit changes in a sample becomes something else instead of nothing."""


def _gaussians(plan: Plan, noise_multiplier: float) -> list[_Gaussians]:
    """Return what `plan` releases; un-subsampled Gaussians become one, exactly."""
    found: list[_Gaussians] = []
    precision = 0.0
    for line in plan:
        multiplier = noise_multiplier * line.noise_ratio
        if line.sampling_rate == 1:
            precision += line.count / multiplier**2
            continue
        replaces = line.kind in REPLACING
        found.append(_Gaussians(multiplier, line.sampling_rate, line.count, replaces))
    if precision:
        found.append(_Gaussians(precision**-0.5))
    return found


def _the_only_whole(gaussians: list[_Gaussians]) -> float | None:
    """Return the multiplier of a single un-subsampled Gaussian: there is a formula for that."""
    return gaussians[0].multiplier if len(gaussians) == 1 and gaussians[0].rate == 1 else None


def _losses(gaussians: Iterable[_Gaussians], interval: float) -> pld.PrivacyLossDistribution:
    """Compose privacy-loss distributions."""
    total = pld.identity(value_discretization_interval=interval)
    for part in gaussians:
        one = pld.from_gaussian_mechanism(
            part.multiplier,
            sensitivity=0.5 if part.replaces else 1.0,
            sampling_prob=part.rate,
            value_discretization_interval=interval,
            neighboring_relation=Relation.REPLACE_ONE
            if part.replaces
            else Relation.ADD_OR_REMOVE_ONE,
        )
        total = total.compose(one.self_compose(part.count) if part.count > 1 else one)
    return total


def _renyi(gaussians: Iterable[_Gaussians], orders: Sequence[float] | None = None) -> _Curve:
    """Add up Rényi divergences by order; the library's default orders if none are given."""
    accountant = rdp.RdpAccountant(orders=orders)
    replaced = np.zeros(len(accountant.orders))
    for part in gaussians:
        if part.replaces:
            replaced += part.count * np.array(
                [replaced_divergence(part.rate, part.multiplier, a) for a in accountant.orders]
            )
            continue
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(part.multiplier)
        if part.rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(part.rate, event)
        accountant.compose(dp_accounting.SelfComposedDpEvent(event, part.count))
    return _Curve(accountant.orders, accountant.rdp + replaced)


@dataclass(frozen=True, eq=False)
class _Curve:
    """Rényi divergences by order."""

    orders: NDArray[np.float64]
    divergences: NDArray[np.float64]

    def epsilon(self, delta: float) -> float:
        return float(rdp.compute_epsilon(self.orders, self.divergences, delta)[0])


def replaced_divergence(rate: float, noise_multiplier: float, order: float) -> float:
    """Bound the Rényi divergence of one Poisson-sampled Gaussian whose sampled part is replaced.

    That of (1 - q) N(0, z^2) + q N(1/2, z^2) from (1 - q) N(0, z^2) + q N(-1/2, z^2), by the
    trapezoidal rule, whose error for so smooth an integrand is far below double precision; the
    rounding is rounded up. Never more than without sampling, where the pair is N(0, z^2) against
    N(1, z^2).
    """
    unsampled = order / (2 * noise_multiplier**2)
    shift = 0.5 / noise_multiplier
    # Its narrowest peak has this width or more; the last is where P / Q pays most: where both are
    # nearly their sampled parts, P^order / Q^(order - 1) peaks (2 order - 1) shifts from 0.
    step = 0.5 / math.sqrt(1 + order * shift**2 / 4)
    low, high = -shift - QUADRATURE_REACH, (2 * order - 1) * shift + QUADRATURE_REACH
    if (high - low) / step > MOST_POINTS:
        return unsampled
    at = np.arange(low, high, step)
    stay = np.log1p(-rate) - at**2 / 2
    upper, lower = (
        np.logaddexp(stay, math.log(rate) - (at - side * shift) ** 2 / 2) for side in (1, -1)
    )
    log_integral = logsumexp(upper + (order - 1) * (upper - lower)) + math.log(
        step / math.sqrt(2 * math.pi)
    )
    return float(min(unsampled, max(0.0, log_integral) / (order - 1) + ROUNDED_UP))


def wide_interval(plan: Plan, noise_multiplier: float, delta: float) -> float:
    """Return a discretisation of privacy losses that is good enough for a picture.

    A small epsilon is made of small losses: it must not vanish between two steps.
    """
    by_epsilon = _renyi(_gaussians(plan, noise_multiplier)).epsilon(delta) / FINER_THAN_EPSILON
    return min(WIDEST_INTERVAL, by_epsilon) or WIDEST_INTERVAL


def fine_interval(plan: Plan, noise_multiplier: float, delta: float) -> float:
    """Return a discretisation of privacy losses that costs about 1e-4 of epsilon, or less.

    What it costs grows with the number of releases and the square of the interval; what it takes
    to compute is inverse to the interval.
    """
    by_count = max(FINEST_INTERVAL, math.sqrt(1e-3 / plan.total))
    return min(by_count, wide_interval(plan, noise_multiplier, delta))


def check_cost(plan: Plan, noise_multiplier: float) -> None:
    """Refuse a plan from elsewhere whose privacy losses would take hours, or all memory.

    They are laid out on a grid that is longer the less noise there is, and the larger epsilon. A
    Rényi bound, which is above epsilon, takes a moment. Plans worth certifying are far from either
    limit.
    """
    gaussians = _gaussians(plan, noise_multiplier)
    if _the_only_whole(gaussians) is not None:
        return
    least = min(part.multiplier for part in gaussians)
    if least < LEAST_MULTIPLIER or not _renyi(gaussians).epsilon(LEAST_DELTA) <= LARGEST_EPSILON:
        raise InvalidSettings(
            f"with noise multiplier {least:.3g} the plan's epsilon would be above "
            f"{LARGEST_EPSILON:g}, or next to it; expected a plan with noise"
        )


def epsilon_curve(
    plan: Plan,
    noise_multiplier: float,
    deltas: Sequence[float],
    accountant: Accountant,
    *,
    interval: float | None = None,
) -> list[float]:
    """Return the epsilon of `plan` at each delta, the sampler's tail left out.

    Args:
        plan: the releases.
        noise_multiplier: the common one.
        deltas: where to evaluate.
        accountant: how to compose.
        interval: discretisation of privacy losses; the result is an upper bound with any. By
            default one that is fine enough at the smallest delta.
    """
    if noise_multiplier == 0:
        return [math.inf] * len(deltas)
    gaussians = _gaussians(plan, noise_multiplier)
    if accountant == "renyi":
        curve = _renyi(gaussians)
        return [curve.epsilon(delta) for delta in deltas]
    if (sigma := _the_only_whole(gaussians)) is not None:
        return [float(dp_accounting.get_epsilon_gaussian(sigma, delta)) for delta in deltas]
    fine = interval or fine_interval(plan, noise_multiplier, min(deltas))
    losses = _losses(gaussians, fine)
    return [float(losses.get_epsilon_for_delta(delta)) for delta in deltas]


def epsilon_of(
    plan: Plan,
    noise_multiplier: float,
    delta: float,
    accountant: Accountant,
    *,
    interval: float | None = None,
) -> float:
    """Return the epsilon of `plan` at `delta`, the sampler's tail left out."""
    return epsilon_curve(plan, noise_multiplier, [delta], accountant, interval=interval)[0]


def exact_multiplier(plan: Plan, epsilon: float, delta: float) -> float | None:
    """Return the noise multiplier of a plan without samples, for which there is a formula."""
    whole = _the_only_whole(_gaussians(plan, 1.0))
    if whole is None:
        return None
    return float(dp_accounting.get_sigma_gaussian(epsilon, delta) / whole)


def renyi_divergence(plan: Plan, noise_multiplier: float, order: int) -> float:
    """Return the Rényi divergence bound of `plan` at one order."""
    if noise_multiplier == 0:
        return math.inf
    return float(_renyi(_gaussians(plan, noise_multiplier), [order]).divergences[0])


def composed_epsilon(runs: Iterable[tuple[Plan, float]], delta: float) -> float:
    """Return the Rényi total of several runs at `delta`, as if their plans had been fixed ahead."""
    gaussians: list[_Gaussians] = []
    for plan, noise_multiplier in runs:
        if noise_multiplier == 0:
            return math.inf
        gaussians += _gaussians(plan, noise_multiplier)
    return _renyi(gaussians).epsilon(delta)


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
