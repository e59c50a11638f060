"""The moving average of parameters that is released in their place."""

from __future__ import annotations

from torch import Tensor

from understudy.nets.params import Params


def decay_at(step: int, *, most: float) -> float:
    """Return how much of the average is kept at `step`: less of its first, poor values.

    >>> [decay_at(step, most=0.9) for step in (0, 8, 1000)]
    [0.1, 0.5, 0.9]
    """
    return min(most, (1 + step) / (10 + step))


def averaged(average: Params, params: Params, decay: Tensor) -> Params:
    """Move the average towards the parameters, keeping `decay` (0-d) of it."""
    return {n: params[n] + decay * (mean - params[n]) for n, mean in average.items()}
