"""What a guarantee leaves an attacker who asks whether one unit's data was used.

Such an attack is a test: it raises false alarms at some rate, and finds the truth at some rate.
Under (epsilon, delta)-DP the second is bounded by the first (Kairouz, Oh and Viswanath, 2015), and
a guarantee that holds at several deltas bounds it by the least of their bounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

SHOWN_RATES = (0.001, 0.01, 0.1)
FURTHER_DELTAS = (
    *(10 ** -(step / 2) for step in range(4, 8)),
    0.02, 0.04, 0.06, 0.08, *(step / 20 for step in range(2, 20)), 0.98,
)  # fmt: skip
"""Where a plan's guarantee is computed beyond its certificate: large deltas bound attacks best."""


def most_true_positives(false_positives: float, curve: Iterable[tuple[float, float]]) -> float:
    """Bound the true-positive rate of any attack with a given false-positive rate.

    Args:
        false_positives: its rate.
        curve: (epsilon, delta) pairs that all hold.

    >>> most_true_positives(0.1, [(0.0, 0.0)])
    0.1
    >>> round(most_true_positives(0.1, [(1.0, 1e-5)]), 3)
    0.272
    >>> most_true_positives(0.1, [])
    1.0
    """
    most = 1.0
    for epsilon, delta in curve:
        if epsilon < 700:  # beyond, the exponential overflows and bounds nothing
            gain = math.exp(epsilon)
            most = min(
                most,
                gain * false_positives + delta,
                1 - (1 - delta - false_positives) / gain,
            )
    return max(most, false_positives)  # no bound forbids guessing; rounding must not either


def attack_curve(curve: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (false positives, most true positives), denser where the rates are small."""
    rates = [*(0.0005 * 1.25**step for step in range(25)), *(0.15 + 0.05 * k for k in range(18))]
    grid = [0.0, *sorted(rate for rate in rates if rate < 1), 1.0]
    return [(rate, most_true_positives(rate, curve)) for rate in grid]
