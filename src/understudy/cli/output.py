"""What a person or a machine sees: a live bar and tables, lines, nothing, or JSON lines."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from understudy.progress import Progress
from understudy.text import legible

JSON_SECONDS, LINE_SECONDS = 1.0, 60.0
"""How often progress is told to a machine, and to a file that a person reads."""
SPENT_SECONDS = 2.0
"""Epsilon spent so far is asked for at most this often: computing it takes a moment."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """How to report."""

    quiet: bool = False
    """Print only the result."""
    json: bool = False
    """Print JSON lines for machines."""


def _shown(text: str) -> str:
    """Return text whose lines hold nothing that a terminal would obey."""
    return "\n".join(legible(line) for line in text.split("\n"))


class Output(Progress):
    """Report to a person: lines on the console, and a bar with time left and epsilon spent."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line of narration."""
        self.console.print(_shown(text), style="dim", markup=False)

    def result(self, text: str, **_: Any) -> None:
        """Print one line of the result."""
        self.console.print(_shown(text), markup=False)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        is_copied: bool = False,
    ) -> None:
        """Print a table.

        Args:
            title: what it shows.
            columns: their names.
            rows: a cell for each column.
            is_copied: whether the first cells must stay whole, to be copied: where there is no room
                for the table, each gets a line of its own.
        """
        table = Table(*columns, title=Text(_shown(title)), title_justify="left")
        for row in rows:
            table.add_row(*(Text(_shown(cell)) for cell in row))  # a name may look like markup
        widest = self.console.measure(table, options=self.console.options.update(width=10**4))
        if not is_copied or widest.maximum <= self.console.width:
            self.console.print(table)
            return
        self.result(title)
        for name, *cells in rows:
            self.result(name)
            told = (f"{column} {cell}" for column, cell in zip(columns[1:], cells, strict=True))
            self.result(f"    {', '.join(told)}")

    def steps(
        self, steps: range, *, spent: Callable[[], float] | None = None, what: str = ""
    ) -> Iterator[int]:
        """Draw a bar over `steps`; into a file or a pipe, print a line a minute."""
        if not self.console.is_terminal:
            yield from self._lines(steps, spent, what)
            return
        columns = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=None), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[spent]}"),
        ]  # fmt: skip
        with Bar(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(what, total=steps.stop, completed=steps.start, spent="")
            asked = 0.0
            for step in steps:
                yield step
                if spent and (time.monotonic() - asked > SPENT_SECONDS or step == steps[-1]):
                    asked = time.monotonic()
                    bar.update(task, spent=f"epsilon spent {spent():.3g}")
                bar.update(task, completed=step + 1)

    def _lines(self, steps: range, spent: Callable[[], float] | None, what: str) -> Iterator[int]:
        def tell(done: int, seconds_left: float) -> None:
            left = timedelta(seconds=round(seconds_left))
            costs = f", epsilon spent {spent():.3g}" if spent else ""
            self.say(f"{what or 'step'} {done}/{steps.stop}, {left} left{costs}")

        yield from _telling(steps, tell, every=LINE_SECONDS)


def _telling(
    steps: range, tell: Callable[[int, float], None], *, every: float, at_end: bool = False
) -> Iterator[int]:
    """Iterate over steps; `tell` every so many seconds how many are done, and the seconds left."""
    started = told = time.monotonic()
    for step in steps:
        yield step
        now, done = time.monotonic(), step + 1 - steps.start
        if now - told >= every or (at_end and done == len(steps)):
            told = now
            tell(step + 1, (now - started) / done * (len(steps) - done))


class QuietOutput(Output):
    """Print results only."""

    def say(self, text: str) -> None:
        """Say nothing."""

    def steps(
        self, steps: range, *, spent: Callable[[], float] | None = None, what: str = ""
    ) -> Iterator[int]:
        """Draw nothing."""
        yield from steps


class JsonOutput(Output):
    """Print one JSON object per line."""

    def _print(self, event: str, **fields: Any) -> None:
        def clean(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        line = {"event": event} | {key: clean(value) for key, value in fields.items()}
        print(json.dumps(line), flush=True, file=sys.stdout)

    def say(self, text: str) -> None:
        """Print a line of narration."""
        self._print("message", text=text)

    def result(self, text: str, **fields: Any) -> None:
        """Print the fields of the result."""
        self._print("result", **(fields or {"text": text}))

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        is_copied: bool = False,
    ) -> None:
        """Print a row as an object."""
        for row in rows:
            self._print("row", table=title, **dict(zip(columns, row, strict=True)))

    def steps(
        self, steps: range, *, spent: Callable[[], float] | None = None, what: str = ""
    ) -> Iterator[int]:
        """Print progress about once a second."""

        def tell(done: int, seconds_left: float) -> None:
            fields = {"what": what, "done": done, "total": steps.stop}
            self._print(
                "progress",
                **fields,
                seconds_left=round(seconds_left, 1),
                epsilon_spent=spent() if spent else None,
            )

        yield from _telling(steps, tell, every=JSON_SECONDS, at_end=True)


class SilentOutput(QuietOutput):
    """Report nothing: another process of the same run does."""

    def result(self, text: str, **_: Any) -> None:
        """Leave the result to the leading process."""


def make_output(options: OutputOptions | None) -> Output:
    """Choose how to report; of several processes that share a run, the leading one does."""
    if os.environ.get("RANK", "0") != "0":
        return SilentOutput()
    if options and options.json:
        return JsonOutput()
    return QuietOutput() if options and options.quiet else Output()
