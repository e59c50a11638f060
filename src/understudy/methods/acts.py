"""A run in several acts, each many small steps, that goes on in the act where it was cut off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from understudy.methods.fitting import filled, leaves_of
from understudy.nets.params import Params
from understudy.privacy.curator import Curator
from understudy.progress import Progress


class Acts:
    """Count the steps of acts played one after another; every checkpoint holds all that was."""

    def __init__(self, curator: Curator, progress: Progress) -> None:
        self._curator, self._progress = curator, progress
        self._done, saved = curator.restore()
        self._saved = cast(Mapping[str, Params], saved)
        self._before = 0
        self._kept: dict[str, Params] = {}

    def play(self, name: str, steps: int, state: Any, advance: Callable[[int, Any], Any]) -> Any:
        """Return the state after an act; what was done before the run was cut off is not redone.

        Args:
            name: of the act, unlike the others'.
            steps: how many it has.
            state: before the first: tensors, nested.
            advance: maps a step's number and the state before it to the state after it.
        """
        first, self._before = self._before, self._before + steps
        if self._done > first:
            state = filled(state, self._saved.get(name, {}))  # an act without tensors left none
        left = range(max(0, self._done - first), steps)
        for step in self._progress.steps(left, spent=self._curator.epsilon_spent, what=name):
            state = advance(step, state)
            self._kept[name] = leaves_of(state)
            self._curator.checkpoint(first + step + 1, dict(self._kept))
        self._kept[name] = leaves_of(state)
        return state
