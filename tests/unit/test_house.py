"""Rules of the house that no linter knows."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import understudy
from understudy.methods import METHODS
from understudy.privacy import releases

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "understudy"


def test_files_stay_readable():
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert path.read_text().count("\n") <= 500, path


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(releases.__path__)])
def test_every_release_states_its_privacy(name):
    """One file per release, its function named like the file."""
    module = importlib.import_module(f"understudy.privacy.releases.{name}")
    text = inspect.getdoc(getattr(module, name)) or ""
    for part in ("Privacy:", "Reads:", "Bound:", "Sensitivity:", "Edge cases:"):
        assert part in text, f"{name} lacks {part}"


def test_every_method_has_its_page_with_the_fixed_headings():
    for name in METHODS:
        text = (ROOT / "docs" / "methods" / f"{name}.md").read_text()
        headings = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
        assert headings == [
            "Idea", "Private access", "Deviations from the paper", "How to run", "Cost", "Results",
        ]  # fmt: skip


def test_nobody_outside_privacy_reads_what_members_know():
    """`Ensemble` is sealed against accidents; methods hold it, so their text is checked as well."""
    reads = re.compile(r"\.(answers|kept|take)\(|\._state\b")
    for path in SOURCE.rglob("*.py"):
        if "privacy" not in path.parts:
            assert not reads.search(path.read_text()), path.name


def test_the_accounting_library_has_one_user():
    users = [p.name for p in SOURCE.rglob("*.py") if "import dp_accounting" in p.read_text()]
    assert users == ["accounting.py"]


def test_only_files_py_writes_and_nothing_is_unpickled():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\bpickle\b(?!d|s)|torch\.load|allow_pickle=True", text) or (
            path.name in ("sealed.py", "checkpoints.py")  # each refuses what pickles can do
        ), path
        if path.name != "files.py":
            assert ".write_bytes(" not in text, path
            assert ".write_text(" not in text, path


def test_checkpoints_of_others_are_read_as_data():
    text = (SOURCE / "data" / "checkpoints.py").read_text()
    assert text.count("torch.load(") == text.count("weights_only=True") == 1
    assert "pickle.load" not in text


def test_torchvision_is_not_needed():
    script = "import sys, understudy.pipeline; sys.exit('torchvision' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_names_exist_and_are_documented():
    for name in understudy.__all__:
        assert inspect.getdoc(getattr(understudy, name))
    with pytest.raises(AttributeError):
        _ = understudy.nothing


def test_links_in_the_docs_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"
