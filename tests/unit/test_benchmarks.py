"""Programs that measure are run by hand; that they still can be is looked at here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_finds_what_it_imports():
    """In a process of its own, for some set what they measure with."""
    programs = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(programs) > 5
    places = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", f"import {', '.join(programs)}"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": places})
