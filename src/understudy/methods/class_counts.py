"""How many images of each class a set has: as many of each, as the user says, or as noise says."""

from __future__ import annotations

from torch import Tensor

from understudy.errors import InvalidSettings
from understudy.methods.fitting import shares_of
from understudy.nets.released import divided

EQUAL, HISTOGRAM = "equal", "histogram"


def given_counts(text: str) -> tuple[int, ...]:
    """Read a setting: a number for each class; none if it is one of the two words.

    >>> given_counts("20, 10,5"), given_counts("equal")
    ((20, 10, 5), ())
    """
    if text in (EQUAL, HISTOGRAM):
        return ()
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise InvalidSettings(
            f"counts is '{text}', expected {EQUAL}, {HISTOGRAM}, or a number of 1 or more for each "
            "class, such as 20,10,5"
        )
    return tuple(map(int, numbers))


def noisy_counts(records: Tensor, total: int) -> tuple[int, ...]:
    """Divide `total` images by noisy numbers of records (classes,); no class goes without.

    >>> import torch
    >>> noisy_counts(torch.tensor([900.0, 101.0, -3.0]), 30)
    (26, 3, 1)
    """
    found = divided(total, shares_of(records))
    for place, number in enumerate(found):
        if number == 0:
            found[found.index(max(found))] -= 1
            found[place] = 1
    return tuple(found)
