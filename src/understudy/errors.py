"""Every error a user can meet, each with the exit code that the command line returns for it.

A message says what was found, what was expected and what to do, on one line.
"""

from __future__ import annotations

from understudy.text import one_line


def installing(extra: str) -> str:
    """Say how to install what only some need; the package is on no index.

    >>> installing("parquet")
    "install it, in the folder of understudy's source, with: pip install '.[parquet]'"
    """
    return f"install it, in the folder of understudy's source, with: pip install '.[{extra}]'"


class UnderstudyError(Exception):
    """Base of all errors that are the user's to mend."""

    exit_code = 2

    def __str__(self) -> str:
        return one_line(super().__str__())  # it may quote a file, which may hold anything


class InvalidData(UnderstudyError):
    """The data set cannot be read, or does not hold what it must."""


class MissingWeights(UnderstudyError):
    """Weights of a public network are not here and cannot be fetched, or are not what they were."""

    exit_code = 4


class InvalidSettings(UnderstudyError):
    """A setting is out of range, or two settings contradict each other."""


class OutputExists(UnderstudyError):
    """The output directory is taken."""


class StorageError(UnderstudyError):
    """A file could not be written: full disk, missing permission."""


class LedgerError(UnderstudyError):
    """The ledger cannot be opened, written, or does not know what was asked for."""


class LedgerDamaged(LedgerError):
    """The ledger's file does not hold what was written to it."""

    def __init__(self, message: str, found: str) -> None:
        super().__init__(message)
        self.found = found


class DataChanged(UnderstudyError):
    """A registered data set is not the one that was registered."""


class RelationMixed(UnderstudyError):
    """A data set was asked for under two neighbouring relations, units or deltas."""


class BudgetRefused(UnderstudyError):
    """The lifetime budget of the data set does not allow the plan."""

    exit_code = 3


class PlanViolation(UnderstudyError):
    """A release was asked for that the plan does not contain, or not like this."""


class PlanExhausted(PlanViolation):
    """A release was asked for more often than planned."""


class RoundDeclined(UnderstudyError):
    """A client does not answer a round. The message tells nothing private: the server gets it."""

    exit_code = 3


class AttemptsExhausted(UnderstudyError):
    """A block was started too often without ever being committed."""


class PrivateAccess(UnderstudyError, TypeError):
    """Something asked private state for more than a release gives."""


class VerificationFailed(UnderstudyError):
    """A released directory does not match its certificate."""

    exit_code = 5


class ProcessLost(UnderstudyError):
    """One of several processes that share a run has ended."""

    exit_code = 6


class Interrupted(UnderstudyError):
    """The run stopped at a committed block because a signal asked for it."""

    exit_code = 130
