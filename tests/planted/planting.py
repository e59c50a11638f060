"""Plant an error into the code, run the test that should catch it, and see why it failed.

An error is an edit of one function's text. The whole file is compiled with the edit, and the
function that is running takes over the code: whoever imported it before meets the error as well.
A test is collected once and run many times, clean and with errors, so that all of them cost little
more than importing torch once.

    python tests/planted/planting.py FILE [CLEAN]   writes what was found as JSON
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).parents[2]
CHECKED = ("AssertionError", "Failed")
"""What a failing test raises: an assertion, or pytest because an expected error did not come."""


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A privacy error, where it goes, and what catches it."""

    name: str
    at: str
    """Module and function, `privacy.bounded:clipped_sum`."""
    old: str
    new: str
    caught_by: str
    """A test, by its node id."""
    shows: str
    """Part of the statement of the test that fails: it must be this one."""
    raises: str = ""
    """The error that the code itself raises then, if it is not an assertion of the test."""
    false_alarm: float = 0.0
    """Probability that the test fails without the error, at most."""

    def is_caught(self, found: Found) -> bool:
        """Say whether the test failed for the right reason."""
        is_expected = found.raised == self.raises if self.raises else found.raised in CHECKED
        return found.phase == "call" and is_expected and self.shows in found.statement


@dataclass(frozen=True)
class Found:
    """How a test ended."""

    phase: str = ""
    """In which it failed: setup, call or teardown; `skipped`; empty if it passed."""
    raised: str = ""
    statement: str = ""
    """Of the test, at which it failed."""
    message: str = ""


class DoesNotFit(Exception):
    """The code is not what the edit was written for."""


@contextlib.contextmanager
def planted(error: Planted) -> Iterator[None]:
    """Let the code have the error for as long as the context lasts."""
    module_name, _, function_name = error.at.partition(":")
    module = importlib.import_module(f"understudy.{module_name}")
    path = Path(str(module.__file__))
    text = path.read_text()
    if text.count(error.old) != 1:
        raise DoesNotFit(
            f"{error.name}: {path.name} has the old text {text.count(error.old)} times"
        )
    function = _function(module, function_name)
    edited = compile(text.replace(error.old, error.new), str(path), "exec")
    codes = {code.co_qualname: code for code in _codes(edited)}
    if _is_same(function.__code__, codes[function_name]):
        raise DoesNotFit(f"{error.name}: the edit is not in {function_name}")
    before, function.__code__ = function.__code__, codes[function_name]
    try:
        yield
    finally:
        function.__code__ = before


def _function(module: Any, name: str) -> FunctionType:
    """Find a function or method, whatever it is wrapped as."""
    found = module
    for part in name.split("."):
        found = vars(found)[part]
    for kind, inside in (
        (property, "fget"), (functools.cached_property, "func"),
        (staticmethod, "__func__"), (classmethod, "__func__"),
    ):  # fmt: skip
        if isinstance(found, kind):
            found = getattr(found, inside)
    assert isinstance(found, FunctionType), name
    return found


def _is_same(one: CodeType, other: CodeType) -> bool:
    return (one.co_code, one.co_consts, one.co_names) == (
        other.co_code, other.co_consts, other.co_names
    )  # fmt: skip


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


class Planting:
    """Run each test some times as it is, and once with each error that it should catch."""

    def __init__(self, errors: list[Planted], clean: int) -> None:
        self._errors, self._clean = errors, clean
        self._found = Found()
        self.clean: dict[str, list[Found]] = {}
        self.planted: dict[str, Found] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        by_test = defaultdict(list)
        for error in self._errors:
            by_test[error.caught_by].append(error)
        for item in session.items:
            self.clean[item.nodeid] = [self._run(item) for _ in range(self._clean)]
            for error in by_test[item.nodeid]:
                with planted(error):
                    self.planted[error.name] = self._run(item)
        return True

    def _run(self, item: pytest.Item) -> Found:
        self._found = Found()
        if hasattr(item, "_initrequest"):
            item._initrequest()  # fixtures anew
        runtestprotocol(item, log=False)
        return self._found

    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        error = call.excinfo
        if error is None or self._found.phase:
            return
        if error.errisinstance(pytest.skip.Exception):
            self._found = Found("skipped", message=str(error.value))
            return
        inside = [entry for entry in error.traceback if Path(entry.path) == item.path]
        statement = str(inside[-1].statement).strip() if inside else ""
        message = str(error.value).partition("\n")[0]
        self._found = Found(call.when, type(error.value).__name__, statement, message)


def run(errors: list[Planted], *, clean: int = 1) -> dict[str, Any]:
    """Return how each test ended, clean and with each of its errors."""
    plugin = Planting(errors, clean)
    tests = list(dict.fromkeys(error.caught_by for error in errors))
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[plugin])
    return {
        "clean": {test: [asdict(found) for found in runs] for test, runs in plugin.clean.items()},
        "planted": {name: asdict(found) for name, found in plugin.planted.items()},
    }


def run_apart(file: Path, *, clean: int = 1) -> tuple[dict[str, list[Found]], dict[str, Found]]:
    """Do the same in a process of its own, which no error survives."""
    command = [sys.executable, __file__, str(file), str(clean)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert file.exists(), done.stdout + done.stderr
    content = json.loads(file.read_text())
    by_test = {test: [Found(**one) for one in runs] for test, runs in content["clean"].items()}
    return by_test, {name: Found(**one) for name, one in content["planted"].items()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from planted_errors import ERRORS

    Path(sys.argv[1]).write_text(json.dumps(run(ERRORS, clean=int((*sys.argv, "1")[2]))))
