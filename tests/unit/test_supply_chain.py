"""What the project is built from: versions that are written down, licences that allow its use."""

from __future__ import annotations

import re
import tomllib
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement

from licences import PERMISSIVE, WEAK, closure, not_allowed, stated

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-test.lock"


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_holds_versions_and_nothing_else():
    """No address, host or path of whoever made it; no build that only one index has."""
    for line in LOCK.read_text().splitlines():
        assert re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
        assert not re.search(r"://|file:|/(opt|home|root|work|tmp)/|@", line), line


def test_the_lock_fits_what_the_project_asks_for():
    locked = dict(
        line.split("==") for line in LOCK.read_text().splitlines() if not line.startswith("#")
    )
    locked = {plain(name): version for name, version in locked.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        asked = Requirement(text)
        assert locked[plain(asked.name)] in asked.specifier, text


def test_licences_of_what_users_install_are_permissive():
    found = closure(frozenset())
    assert {"torch", "numpy", "scipy", "markupsafe"} <= set(found)  # also what others need
    assert not_allowed(frozenset(), PERMISSIVE) == {}


def test_licences_of_what_tests_need_are_open():
    assert "hypothesis" in closure(frozenset({"dev"}))
    assert not_allowed(frozenset({"dev"}), WEAK) == {}


def test_a_licence_that_is_not_on_the_list_is_noticed():
    for text, allowed in (
        ("MIT OR Apache-2.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only", False),
        ("MIT AND LGPL-2.1", False),
        ("", False),
    ):
        about = Message()
        about["Name"] = "x"
        about["License-Expression"] = text
        package = type("Package", (), {"metadata": about})()
        assert bool(stated(package) and stated(package) <= PERMISSIVE) == allowed, text
