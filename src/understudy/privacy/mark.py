"""High-water marks: how far a ledger had come when someone looked, which no older copy can hide.

One stands beside the ledger, one in `private/` of every run. It tells nothing: a number, and an
authentication code under the ledger's key.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from understudy.errors import LedgerError


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come when someone looked."""

    number: int
    head: str

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any], where: Path) -> Mark:
        """Read what `to_json` wrote to `where`."""
        try:
            return cls(int(content["number"]), str(content["head"]))
        except (KeyError, TypeError, ValueError):
            raise LedgerError(
                f"{where} does not say how far a ledger had come; it was edited, put it back"
            ) from None


NOTHING = Mark(0, "")


def mark_file(ledger: Path) -> Path:
    """Return the file beside a ledger that says how far it has come."""
    return ledger.with_name(f"{ledger.name}.head")


def mark_beside(ledger: Path) -> Mark | None:
    """Read how far a ledger had come at least, None if nothing beside it says so."""
    path = mark_file(ledger)
    try:
        return Mark.from_json(json.loads(path.read_bytes()), path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise LedgerError(
            f"{path} cannot be read ({error}); it tells whether the ledger is complete: put it "
            "back, or remove it if you know that the ledger is"
        ) from error
