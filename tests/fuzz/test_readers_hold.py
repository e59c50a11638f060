"""No reader crashes, hangs, fills memory or runs what a file says: see docs/fuzzing.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .readers import CORPUS, READERS

# The same inputs every time: a build must not fail by chance. `make fuzz` finds more.
FEW = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SLOW = {"certificate": 5, "archive": 10, "config": 6, "images": 12, "parquet": 12}
"""Readers that take long over each input, and how many they get."""
WANTS_A_CHECKSUM = ("archive",)
"""Nobody can make an input that is accepted."""


@pytest.mark.parametrize("name", READERS)
def test_what_once_broke_a_reader_does_not_any_more(name):
    """And what is intact is read, so that damage starts from something."""
    for path in sorted((CORPUS / name).iterdir()):
        accepted = READERS[name].check(path.read_bytes())
        if path.name.startswith("intact") and name not in WANTS_A_CHECKSUM:
            assert accepted, path


@pytest.mark.parametrize("name", READERS)
def test_damaged_input_is_read_or_refused_in_one_line(name):
    reader = READERS[name]
    intact = [path.read_bytes() for path in sorted((CORPUS / name).glob("intact*"))]

    @settings(FEW, max_examples=SLOW.get(name, FEW.max_examples))
    @given(st.sampled_from(intact), st.integers(0, 2**32), st.integers(1, 2))
    def try_some(content, seed, times):
        random = Random(seed)
        for _ in range(times):
            content = reader.mutate(content, random)
        reader.check(content)

    try_some()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted by Linux")
def test_bombs_are_refused_in_little_memory():
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.bombs"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_reader_that_breaks_is_noticed(monkeypatch):
    """The targets can fail: an error that is none of ours is not swallowed."""
    monkeypatch.setattr("understudy.data.idx.claimed_bytes", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        READERS["idx"].check((CORPUS / "idx" / "intact").read_bytes())
