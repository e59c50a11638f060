r"""Text from elsewhere, made fit to be shown: a name in a file may command a terminal.

>>> print(legible("naïve \x1b[2J"))
naïve \x1b[2J
>>> [is_name(text) for text in ("T-shirt/top", "", "a\nb", "x" * 1000)]
[True, False, False, False]
"""

from __future__ import annotations

MOST_CHARACTERS = 2000
"""Of a line."""
LONGEST_NAME = 200
"""Characters in the name of a class, a unit or a data set."""


def legible(text: str) -> str:
    """Write out whatever cannot be printed."""
    if text.isprintable():
        return text
    written = ("unicode_escape", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode(*written).decode() for c in text)


def one_line(said: object) -> str:
    """Return what an error says, in one line of bounded length; its kind if it says nothing."""
    text = legible(" ".join(str(said)[: 2 * MOST_CHARACTERS].split()))
    text = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
    return text or type(said).__name__


def is_name(text: object) -> bool:
    """Say whether a certificate, a table, a page and a folder can show a name."""
    if not isinstance(text, str) or len(text) > LONGEST_NAME:
        return False
    return bool(text.strip()) and text.isprintable()
