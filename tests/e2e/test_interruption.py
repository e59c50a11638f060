"""Killed at any moment: nothing lost, nothing counted twice, nothing uncommitted on disk."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

import killed_run
import understudy
from understudy.cli.main import main
from understudy.errors import UnderstudyError
from understudy.privacy.ledger import Ledger

KILLS = 10


def log_of(folder: Path) -> list[dict]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def files_of(folder: Path) -> dict[Path, bytes]:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "log.jsonl":
            found[path] = path.read_bytes()
    return found


def committed(folder: Path) -> tuple[int, int | None]:
    """Return (releases committed, number of the block that is started but not done)."""
    if not (folder / "ledger.sqlite").exists():
        return 0, None
    ledger = Ledger(folder / "ledger.sqlite")
    runs = ledger.charged_runs(1)
    assert len(runs) <= 1
    blocks = ledger.blocks(runs[0]["id"]) if runs else []
    ledger.close()
    pending = [b.number for b in blocks if b.state == "started"]
    assert len(pending) <= 1
    return sum(sum(b.releases.values()) for b in blocks), (pending or [None])[0]


def assert_nothing_uncommitted(folder: Path, attempt: int) -> None:
    """After a kill, states beyond the last commit are in no file but the pending result itself."""
    done, pending = committed(folder)
    states = [e for e in log_of(folder) if e["what"] == "state" and e["attempt"] == attempt]
    beyond = [bytes.fromhex(e["bytes"]) for e in states if e["step"] > done]
    result = f"{pending:06d}.block" if pending is not None else None
    for path, content in files_of(folder).items():
        if path.name != result and not path.name.startswith(".tmp-"):
            assert not any(state in content for state in beyond), path


@pytest.mark.thorough
def test_kills_and_resumes(tmp_path, monkeypatch):
    """Where a run ends before its last kill, another run takes the rest."""
    # The fork server imports the package once, so that kills fall into work, not into imports.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_run"])
    kills = abandoned = 0
    for number in range(KILLS):
        folder = tmp_path / str(number)
        folder.mkdir()
        kills += run_through_kills(context, folder, most=KILLS - kills)
        abandoned += check_noise_and_states(log_of(folder), files_of(folder))
        assert committed(folder) == (killed_run.STEPS, None)
        found = understudy.verify(folder / "run", ledger=True)
        (release,) = found.certificate.content["releases"]
        assert release["made"] == release["count"] == killed_run.STEPS
        assert not list(folder.rglob(".tmp-*"))
        assert not (folder / "run.partial").exists()
        if kills == KILLS:
            break
    assert kills == KILLS
    assert abandoned, "no kill fell inside a block"


def run_through_kills(context, folder: Path, *, most: int) -> int:
    """Run to the end, killed at up to `most` random moments on the way; return how often."""
    generator = random.Random(time.time_ns())
    kills = 0
    while True:
        process = context.Process(target=killed_run.run, args=(str(folder), kills))
        process.start()
        moment = generator.uniform(0.05, 0.8)
        if kills % 4 < 2:  # a kill inside a block, however slow the machine is
            wait_for_a_state(folder, kills, process)
            moment = generator.uniform(0, 0.1)
        process.join(moment if kills < most else 200)
        if process.exitcode is not None:
            assert process.exitcode == 0
            return kills
        process.kill()
        process.join()
        if (folder / "log.jsonl").exists():
            assert_nothing_uncommitted(folder, kills)
        assert not (folder / "run").exists() or (folder / "run" / "release").is_dir()
        kills += 1


def wait_for_a_state(folder: Path, attempt: int, process) -> None:
    """Wait until an attempt has taken a step, or is over."""
    while process.exitcode is None:
        time.sleep(0.02)
        if not (folder / "log.jsonl").exists():
            continue
        lines = (folder / "log.jsonl").read_bytes().split(b"\n")[:-1]
        found = (json.loads(line) for line in reversed(lines))
        if any(e["what"] == "state" and e["attempt"] == attempt for e in found):
            return


def check_noise_and_states(log: list[dict], files: dict[Path, bytes]) -> int:
    """Committed noise never repeats; states of abandoned attempts are in no file.

    Returns the number of such states.
    """
    all_noise = [e["bytes"] for e in log if e["what"] == "noise"]
    assert len(set(all_noise)) == len(all_noise)
    starts = {e["attempt"]: e["step"] for e in log if e["what"] == "restored"}
    attempts = sorted(starts)
    ends = {a: starts[b] for a, b in pairwise(attempts)}
    ends[attempts[-1]] = killed_run.STEPS
    committed_noise, abandoned = [], []
    for attempt in attempts:
        count = ends[attempt] - starts[attempt]
        assert count >= 0
        noise = [e["bytes"] for e in log if e["what"] == "noise" and e["attempt"] == attempt]
        committed_noise += noise[:count]
        states = [e for e in log if e["what"] == "state" and e["attempt"] == attempt]
        abandoned += [bytes.fromhex(e["bytes"]) for e in states if e["step"] > ends[attempt]]
    assert len(committed_noise) == len(set(committed_noise)) == killed_run.STEPS
    for path, content in files.items():
        assert not any(state in content for state in abandoned), path
    return len(abandoned)


SETTINGS = {"rounds": 200, "outer": 2, "batches": 2, "width": 4, "inner": 2, "batch": 40}
STEPS = 200 * 2 * 2
"""Several times as many as are done until a run first says how far it is, after a second."""


def command(folder: Path, **settings: int) -> list[str]:
    given = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    return [
        sys.executable, "-m", "understudy", "generate", "digits", "--method", "psg",
        "--accountant", "renyi", "--out", str(folder / "run"),
        "--ledger", str(folder / "ledger.sqlite"), "--json", *given,
    ]  # fmt: skip


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """Start a process; return when it reports progress."""
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "progress":
            return process
    raise AssertionError(process.communicate()[1])


def test_signals_stop_at_a_committed_block_and_the_same_command_goes_on(tmp_path, capsys):
    arguments, before = command(tmp_path, **SETTINGS), 0
    for number, more in ((signal.SIGTERM, []), (signal.SIGINT, ["--resume"])):
        process = started([*arguments, *more])
        process.send_signal(signal.SIGSTOP)  # it must not be over before it is looked at
        if more:
            with pytest.raises(UnderstudyError, match="another process"):
                understudy.synthesize(
                    "digits", method="psg", accountant="renyi", settings=SETTINGS,
                    out=tmp_path / "run", ledger=tmp_path / "ledger.sqlite", resume=True,
                )  # fmt: skip
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "--resume" in errors
        done, pending = committed(tmp_path)
        assert before < done < STEPS
        assert pending is None
        assert not (tmp_path / "run").exists()
        before = done

    def said(code: int, arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*arguments[3:], "--resume"])
        assert ended.value.code == code
        return "".join(capsys.readouterr())

    assert "other settings" in said(2, command(tmp_path, **SETTINGS | {"rounds": 201}))
    assert f"resuming after {before}" in said(0, arguments)
    assert committed(tmp_path)[0] == STEPS
    assert "finished already" in said(0, arguments)
