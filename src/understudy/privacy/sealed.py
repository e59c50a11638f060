"""The shape of private state: an object that gives nothing away by the usual ways of asking.

Records are sealed, and whatever is fitted on records without noise (the members of an ensemble)
will be. Only the functions in `releases/` reach inside, and a test holds them to it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from understudy.errors import PrivateAccess


class Sealed:
    """Refuse to be iterated, indexed, counted, compared, copied, converted, pickled or printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: sealed>"

    def __bool__(self) -> bool:
        return True  # without this, truth would ask for the length

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise PrivateAccess(
            f"{type(self).__name__} is private state: it cannot be iterated, indexed, measured, "
            "copied or pickled; ask a curator for a release"
        )

    __iter__ = _refuse
    __getitem__ = _refuse
    __len__ = _refuse
    __contains__ = _refuse
    __array__ = _refuse
    __copy__ = _refuse
    __deepcopy__ = _refuse
    __getstate__ = _refuse
    __reduce__ = _refuse
    __reduce_ex__ = _refuse
