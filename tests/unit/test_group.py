"""Several processes: the same sums as one, a briefing that says it all, and no hanging."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from group_process import PLAN

from door import OneOfTwo, access_to, some_images
from understudy.errors import DataChanged, InvalidSettings, ProcessLost
from understudy.privacy import group as module
from understudy.privacy.blocks import BlockResult
from understudy.privacy.briefing import Briefing, FollowingBlocks, digest
from understudy.privacy.calibration import Calibration
from understudy.privacy.group import ALONE
from understudy.privacy.plan import Plan, PlannedRelease, PublicFacts
from understudy.privacy.releases.histogram import histogram

SCRIPT = Path(__file__).parent / "group_process.py"


def start(folder: Path, size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(folder), *arguments],
            env={**os.environ, **where, "RANK": str(rank), "WORLD_SIZE": str(size)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def run_processes(folder: Path, size: int, epsilon: str) -> list[dict[str, torch.Tensor]]:
    for process in start(folder, size, epsilon):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


@pytest.mark.thorough
def test_two_processes_release_the_same_sums_as_one(tmp_path):
    (alone,) = run_processes(tmp_path / "one", 1, "inf")
    for found in run_processes(tmp_path / "two", 2, "inf"):
        for name, expected in alone.items():
            assert torch.allclose(found[name], expected, atol=1e-6, rtol=0), name
    assert all(value.abs().max() > 0 for name, value in alone.items() if name != "noise_multiplier")


@pytest.mark.thorough
def test_noise_is_the_leaders_and_added_once(tmp_path):
    (bare,) = run_processes(tmp_path / "bare", 1, "inf")
    for found in run_processes(tmp_path / "two", 2, "5"):
        multiplier = found["noise_multiplier"].item()
        assert multiplier > 0.5
        expected_batch = 0.5 * 41
        for name in ("conv0.weight", "linear.bias"):  # clipped to 0.1
            noise = (found[name] - bare[name]) * expected_batch
            assert torch.allclose(noise, torch.tensor(0.1 * multiplier), rtol=1e-3), name
        noise = (found["again"] - bare["again"]) * expected_batch  # clipped to 5
        assert torch.allclose(noise, torch.tensor(5 * multiplier), rtol=1e-3)
        noise = found["class_sums"] - bare["class_sums"]
        assert torch.allclose(noise, torch.tensor(1.0 * multiplier), rtol=1e-3)


def test_of_two_processes_one_adds_the_noise():
    """What they send adds up to the sum and one noise: never two of them, never none."""
    sent = []
    for rank in range(2):
        group = OneOfTwo(rank)
        access = access_to(some_images(12), select=(), noise_multiplier=3.0, noise=1.0)
        histogram(replace(access, group=group))
        sent += group.sent
    assert torch.equal(sum(sent), torch.full((3,), 3.0, dtype=torch.float64))


@pytest.mark.thorough
def test_a_process_with_another_bound_is_refused(tmp_path):
    """The noise is scaled to the leader's bound: a follower's own would break the guarantee."""
    processes = start(tmp_path / "two", 2, "5", "1000")
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert all(process.returncode for process in processes)
    assert "bounds contributions by 1000, the leading one by 0.1" in errors[1]
    assert "another process of this run has ended" in errors[0]
    assert not list((tmp_path / "two").glob("*.pt"))


def a_briefing(**changed) -> Briefing:
    facts = PublicFacts(units=41, class_names=("a", "b"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
    calibration = Calibration(
        noise_multiplier=1.5, epsilon=3.0, delta_accounted=9e-6, delta_tail=1e-6, accountant="pld"
    )
    results = (
        BlockResult("histogram", 0, {"answer": torch.arange(3.0)}, {"answered": {}}),
        BlockResult("checkpoint", 7, {"theta/w": torch.ones(2, 2)}, {"answered": {"histogram": 1}}),
    )
    values = {
        "facts": facts,
        "plan": PLAN.to_json(),
        "calibration": calibration,
        "records": digest(some_images(41)),
        "units": np.arange(41),
        "committed": {"gradient": 7},
        "results": results,
    }
    return Briefing(**(values | changed))


def test_a_briefing_arrives_as_it_was_sent():
    sent = a_briefing()
    got = Briefing.from_bytes(sent.to_bytes())
    assert Briefing.is_one(sent.to_bytes())
    assert not Briefing.is_one(b'{"directory": "runs/x"}')
    assert (got.facts, got.plan, got.calibration) == (sent.facts, sent.plan, sent.calibration)
    assert got.units.tolist() == list(range(41))
    blocks = FollowingBlocks(got)
    assert blocks.released == {"gradient": 7}
    assert blocks.checkpoint.step == 7
    assert blocks.checkpoint.tensors["theta/w"].tolist() == [[1, 1], [1, 1]]
    assert blocks.answers["histogram", 0].tensors["answer"].tolist() == [0, 1, 2]


def test_a_process_with_other_records_or_another_plan_is_refused():
    briefing = a_briefing()
    briefing.check(some_images(41), PLAN)
    with pytest.raises(DataChanged, match="other records"):
        briefing.check(some_images(41, seed=1), PLAN)
    other = Plan(
        (PlannedRelease(name="g", kind="gradient", count=1, dimension=5, sampling_rate=0.5),)
    )
    with pytest.raises(InvalidSettings, match="other releases"):
        briefing.check(some_images(41), other)


def test_following_blocks_count_as_the_leaders_do():
    blocks = FollowingBlocks(a_briefing())
    blocks.count("gradient")
    blocks.count("gradient")
    assert blocks.is_open
    assert blocks.released == {"gradient": 9}
    assert blocks.committed == {"gradient": 7}
    blocks.commit("checkpoint", 9, {}, {})
    assert not blocks.is_open
    assert blocks.committed == {"gradient": 9}


def test_alone_nothing_is_exchanged():
    total = torch.ones(3)
    assert ALONE.leads
    assert ALONE.add_up(total) is total
    assert ALONE.bytes_from_leader(b"x") == b"x"
    assert ALONE.agrees(True)
    assert not ALONE.agrees(False)


def test_a_lost_process_is_told_in_one_line():
    def broken() -> None:
        raise RuntimeError("[gloo] Connection closed by peer\nstack")

    with pytest.raises(ProcessLost, match="run the same command with --resume") as lost:
        module._surely(broken)
    assert "\n" not in str(lost.value)
