"""`torchrun`: two processes make one run; when one is killed, the other ends and says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import understudy
from understudy.privacy.ledger import Ledger

pytestmark = pytest.mark.thorough

SETTINGS = {"rounds": 2, "outer": 2, "batches": 2, "inner": 2, "width": 4}


def start(folder: Path, *more: str, rounds: int = 2) -> subprocess.Popen[str]:
    settings = SETTINGS | {"rounds": rounds}
    flags = [part for key, value in settings.items() for part in (f"--{key}", str(value))]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone",
        "-m", "understudy", "generate", "digits", "--method", "psg",
        "--accountant", "renyi", "--device", "cpu", "--out", str(folder / "run"),
        "--ledger", str(folder / "ledger"), *flags, *more,
    ]  # fmt: skip
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rank_one(launcher: int) -> int | None:
    """Find the process of rank 1 among the launcher's children."""
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            environ = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        if parent == launcher and b"RANK=1" in environ:
            return int(entry.name)
    return None


def releases(ledger: Ledger) -> int:
    (run,) = ledger.charged_runs(1)
    return sum(sum(block.releases.values()) for block in ledger.blocks(run["id"]))


def test_two_processes_make_one_run(tmp_path):
    said, _ = start(tmp_path).communicate(timeout=120)
    assert said.count("synthetic images, epsilon 9.99") == 1  # the leader alone reports
    alone = understudy.synthesize(
        "digits", method="psg", accountant="renyi", device="cpu", settings=SETTINGS,
        out=tmp_path / "alone", ledger=tmp_path / "ledger",
    )  # fmt: skip
    together = understudy.load_result(tmp_path / "run")
    assert understudy.verify(tmp_path / "run", ledger=True).files == 3
    assert together.certificate.epsilon == alone.certificate.epsilon
    made = [r.certificate.content["releases"][0]["made"] for r in (alone, together)]
    assert made == [8, 8]


def test_a_killed_process_ends_the_run(tmp_path):
    process = start(tmp_path, rounds=100_000)
    deadline = time.monotonic() + 60
    book = None
    while time.monotonic() < deadline:  # until something was committed
        time.sleep(0.2)
        if (tmp_path / "ledger").exists():
            book = book or Ledger(tmp_path / "ledger")
            if book.data_sets() and book.charged_runs(1) and releases(book):
                break
    victim = rank_one(process.pid)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode != 0
    assert "another process of this run has ended" in said
    assert "synthetic images" not in said
    (run,) = book.charged_runs(1)
    assert run["state"] == "reserved"
    assert json.loads(run["plan"])[0]["count"] == 400_000
    assert 0 < releases(book) < 400_000
    book.close()
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "run.partial").exists()
