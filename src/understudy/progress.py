"""How long work reports itself. A method wraps its loop in a `Progress`, and that is all."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class Progress:
    """Report nothing. The command line has subclasses that draw a bar or print JSON lines."""

    def steps(
        self, steps: range, *, spent: Callable[[], float] | None = None, what: str = ""
    ) -> Iterator[int]:
        """Iterate over `steps`.

        Args:
            steps: the steps; a resumed loop starts above 0.
            spent: tells the epsilon of what is committed so far.
            what: what is being done, in a word or two.
        """
        yield from steps

    def say(self, text: str) -> None:
        """Tell the user one line."""
