"""Lower bounds on epsilon from how well an attack did. Pure functions of counts.

Two kinds of experiment. Many repetitions: a test of "was the unit there?" errs so often with it and
so often without it. One run with many canaries: each was put in by a fair coin, and an attack
guesses some of the coins. All bounds hold with confidence 1 - `significance`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from understudy.privacy.accounting import epsilon_curve, epsilon_of
from understudy.privacy.plan import Plan
from understudy.privacy.trade_off import FURTHER_DELTAS, most_true_positives

SIGNIFICANCE = 0.05
LARGEST_EPSILON = 100.0
LARGEST_MU = 30.0
PRECISION = 1e-4
COARSE_INTERVAL = 1e-3
CURVE_DELTAS = (1e-5, 1e-4, *FURTHER_DELTAS)
"""Where a plan's trade-off curve is computed."""
LOG_NOISE_REACH, LOG_NOISE_PRECISION = 1.5, 0.01
"""How far from the claimed noise, on a logarithmic scale, the real one is looked for."""

Refuted = Callable[[float], bool]


@dataclass(frozen=True)
class Errors:
    """How often a test erred: false alarms without the unit, misses with it."""

    false_alarms: int
    without_unit: int
    misses: int
    with_unit: int

    @classmethod
    def of(cls, alarms: NDArray[np.bool_], has_unit: NDArray[np.bool_]) -> Errors:
        """Count the errors of a test that raised these alarms, by a rule that was fixed ahead."""
        return cls(
            int(alarms[~has_unit].sum()), int((~has_unit).sum()),
            int((~alarms)[has_unit].sum()), int(has_unit.sum()),
        )  # fmt: skip

    def at_most(self, significance: float = SIGNIFICANCE) -> tuple[float, float]:
        """Return upper bounds (Clopper-Pearson) on both rates, which hold together."""
        return (
            _upper_rate(self.false_alarms, self.without_unit, significance / 2),
            _upper_rate(self.misses, self.with_unit, significance / 2),
        )


def _upper_rate(count: int, total: int, significance: float) -> float:
    if count >= total:
        return 1.0
    return float(stats.beta.ppf(1 - significance, count + 1, total - count))


def from_errors(errors: Errors, delta: float, significance: float = SIGNIFICANCE) -> float:
    """Bound epsilon by both error rates alone: for any mechanism whatsoever.

    1 - misses <= e^epsilon * false alarms + delta, and the other way round.
    """
    alarm, miss = errors.at_most(significance)
    ratios = ((1 - delta - miss) / alarm, (1 - delta - alarm) / miss)
    return max(0.0, *(math.log(ratio) for ratio in ratios if ratio > 0))


def from_errors_if_gaussian(
    errors: Errors, delta: float, significance: float = SIGNIFICANCE
) -> float:
    """Bound epsilon by the Gaussian mechanism that errs as little (Nasr et al., 2023).

    Much tighter than `from_errors`, and valid only for a Gaussian mechanism: one whose two
    outcomes differ by mu standard deviations, for which 1 - misses = Phi(mu + Phi^-1(alarms)).
    """
    alarm, miss = errors.at_most(significance)
    return gaussian_epsilon(float(stats.norm.ppf(1 - alarm) - stats.norm.ppf(miss)), delta)


def from_errors_if_as_planned(
    errors: Errors,
    plan: Plan,
    noise_multiplier: float,
    delta: float,
    significance: float = SIGNIFICANCE,
) -> float:
    """Bound epsilon by the releases of `plan` with as much noise as the errors allow.

    For releases that sample units, which are not Gaussian as a whole. Valid if they are what the
    plan says, but for the amount of noise. The errors refute an amount if no test of such releases
    errs as little: their trade-off curve follows from privacy-loss distributions.

    Args:
        errors: of a test.
        plan: what was released.
        noise_multiplier: what the noise should be; the real one is looked for around it.
        delta: where to state epsilon.
        significance: of the bound.
    """
    alarm, miss = errors.at_most(significance)

    def is_refuted(log: float) -> bool:
        multiplier = noise_multiplier * math.exp(log)
        curve = epsilon_curve(plan, multiplier, CURVE_DELTAS, "pld", interval=COARSE_INTERVAL)
        pairs = zip(curve, CURVE_DELTAS, strict=True)
        return 1 - miss > most_true_positives(alarm, pairs)

    low, high = -LOG_NOISE_REACH, LOG_NOISE_REACH
    if not is_refuted(high):
        return 0.0
    while high - low > LOG_NOISE_PRECISION:
        middle = (low + high) / 2
        low, high = (low, middle) if is_refuted(middle) else (middle, high)
    return epsilon_of(
        plan, noise_multiplier * math.exp(high), delta, "pld", interval=COARSE_INTERVAL
    )


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon at `delta` of mu-Gaussian differential privacy.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    >>> gaussian_epsilon(-1.0, 1e-5)
    0.0
    """
    if mu <= 0:
        return 0.0

    def excess(epsilon: float) -> float:
        a, b = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
        return float(stats.norm.cdf(a) - math.exp(epsilon + stats.norm.logcdf(b)) - delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(optimize.brentq(excess, 0.0, high, xtol=1e-9))


def largest_refuted(refuted: Refuted, high: float) -> float:
    """Return the largest claim from 0 to `high` that is refuted: all smaller ones are as well."""
    if not refuted(0.0):
        return 0.0
    low = 0.0
    while high - low > PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Guesses:
    """How an attack did that guessed some of many fair coins, one for each canary."""

    canaries: int
    made: int
    right: int

    @classmethod
    def of(cls, scores: NDArray[np.float64], is_in: NDArray[np.bool_], each_side: int) -> Guesses:
        """Guess "in" for the highest scores and "out" for the lowest, `each_side` of them.

        How many must be fixed before the scores are seen.
        """
        order = np.argsort(scores, kind="stable")
        right = int(is_in[order[-each_side:]].sum() + (~is_in[order[:each_side]]).sum())
        return cls(len(scores), 2 * each_side, right)


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Bound how probable so many right guesses are under (epsilon, delta)-DP.

    Steinke, Nasr and Jagielski (2023): but for delta, the right guesses are at most as many as
    coins that fall right with probability q = 1 / (1 + e^-epsilon). delta adds the chance that up
    to i guesses come free, for the worst i.

    >>> round(one_run_p_value(Guesses(100, 100, 75), math.log(3), 0.0), 4)
    0.5535
    """
    if guesses.right <= 0:
        return 1.0
    chance = 1 / (1 + math.exp(-epsilon))
    free = np.arange(guesses.right + 1)
    tails = stats.binom.sf(guesses.right - free - 1, guesses.made, chance)
    worst = float(((tails[1:] - tails[0]) / free[1:]).max())
    return min(1.0, float(tails[0]) + 2 * guesses.canaries * delta * worst)


def from_one_run(guesses: Guesses, delta: float, significance: float = SIGNIFICANCE) -> float:
    """Bound epsilon by the guesses of one run: the largest epsilon that they refute."""
    return largest_refuted(
        lambda epsilon: one_run_p_value(guesses, epsilon, delta) < significance, LARGEST_EPSILON
    )


def from_one_run_if_gaussian(
    guesses: Guesses, delta: float, significance: float = SIGNIFICANCE
) -> float:
    """Bound epsilon by the guesses of one run, of a mechanism that is Gaussian as a whole.

    Tighter than `from_one_run`, which must allow for any mechanism of the same epsilon.
    """
    mu = largest_refuted(lambda mu: refutes_gaussian(guesses, mu, significance), LARGEST_MU)
    return gaussian_epsilon(mu, delta)


def refutes_gaussian(guesses: Guesses, mu: float, significance: float = SIGNIFICANCE) -> bool:
    """Say whether so many right guesses are too improbable under mu-Gaussian DP.

    Mahloujifar, Melis and Chaudhuri (2024). Were `right` guesses or more as probable as
    `significance`, the trade-off curve would force a least probability on each smaller number of
    right guesses, one after the other; the claim is refuted if these add up to more than there is.
    """
    m, made, right = guesses.canaries, guesses.made, guesses.right
    hit, miss = significance * right / m, significance * (made - right) / m
    for i in range(right - 1, -1, -1):
        forced = max(miss, float(special.ndtr(special.ndtri(hit) - mu)))
        hit = min(1.0, hit + i / (made - i) * (forced - miss))
        miss = forced
    return hit + miss > made / m
