"""Commit, roll forward, or delete unread: what a crash leaves, and what resume does."""

from __future__ import annotations

import pytest
import torch

from door import (
    LOOSE,
    a_vault,
    features_of,
    linear_loss,
    linear_params,
    open_curator,
    some_images,
)
from understudy.errors import Interrupted, LedgerError, PlanExhausted, PlanViolation
from understudy.privacy import blocks as blocks_module
from understudy.privacy.curator import Pace
from understudy.privacy.plan import Plan, PlannedRelease

ALWAYS = Pace(seconds=0.0)
NEVER = Pace(seconds=1e9)


class Killed(BaseException):
    pass


@pytest.fixture
def resume(ledger, tmp_path):
    """Open the same run again, as a new process would."""
    vault = a_vault(ledger)

    def open_again(pace=ALWAYS, **options):
        return open_curator(ledger, tmp_path, vault=vault, run_id="run", pace=pace, **options)

    return open_again


def work(curator, steps=1):
    done, _ = curator.restore()
    for step in range(done, done + steps):
        released = curator.gradient(linear_loss, linear_params(), clip_norm=0.5)
        curator.checkpoint(step + 1, {"image": torch.tensor([float(step)]), "theta": released})
    return released


def test_a_checkpoint_comes_back_with_its_groups(resume):
    released = work(resume(), 2)
    step, state = resume().restore()
    assert step == 2
    assert state["image"].tolist() == [1.0]
    assert torch.equal(state["theta"]["weight"], released["weight"])


def test_a_fresh_run_has_nothing_to_restore(resume):
    assert resume().restore() == (0, {})


def test_uncommitted_work_is_done_again_and_counted_once(resume, ledger):
    work(resume(), 1)
    work(resume(NEVER), 1)  # the process ends here without a commit
    curator = resume()
    assert curator.restore()[0] == 1
    assert curator.released == 1
    assert curator.extra_attempts == 1
    work(curator, 2)
    assert sum(b.releases["gradient"] for b in ledger.blocks("run")) == 3
    with pytest.raises(PlanExhausted):
        work(resume(), 1)


def test_the_last_planned_release_is_committed_at_once(resume):
    work(resume(NEVER), 3)
    assert resume().released == 3


def crash_in(monkeypatch, owner, name, *, after: bool):
    original = getattr(owner, name)

    def crashing(*args, **kwargs):
        if after:
            original(*args, **kwargs)
        raise Killed

    monkeypatch.setattr(owner, name, crashing)


def test_killed_before_the_result_is_written(resume, ledger, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        crash_in(patch, blocks_module, "write_file", after=False)
        work(resume(), 1)
    curator = resume()
    assert curator.released == 0
    assert curator.restore() == (0, {})
    assert ledger.blocks("run")[0].state == "started"


def test_killed_between_result_and_transaction_rolls_forward(resume, ledger, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        crash_in(patch, ledger, "commit_block", after=False)
        work(resume(), 1)
    assert ledger.blocks("run")[0].state == "started"
    curator = resume()
    assert curator.released == 1
    assert curator.restore()[0] == 1
    assert curator.extra_attempts == 0
    assert ledger.blocks("run")[0].state == "done"
    work(curator, 2)
    assert curator.made() == {"gradient": 3}


def test_killed_after_the_transaction(resume, ledger, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        crash_in(patch, ledger, "commit_block", after=True)
        work(resume(), 1)
    assert resume().restore()[0] == 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign"])
def test_a_pending_result_that_is_not_authentic_is_deleted(
    resume, ledger, tmp_path, monkeypatch, damage
):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        crash_in(patch, ledger, "commit_block", after=False)
        work(resume(), 1)
    path = tmp_path / "run" / "000000.block"
    content = bytearray(path.read_bytes())
    if damage == "truncate":
        content = content[:-5]
    elif damage == "flip":
        content[100] ^= 1
    else:
        content = bytearray(b"x" * 64)
    path.write_bytes(bytes(content))
    curator = resume()
    assert curator.released == 0
    assert not path.exists()
    work(curator, 1)


def test_leftover_temporaries_are_removed(resume, tmp_path):
    work(resume(), 1)
    leftover = tmp_path / "run" / ".tmp-1-000001.block"
    leftover.write_bytes(b"half of an uncommitted block")
    resume()
    assert not leftover.exists()


def test_a_damaged_or_missing_committed_block_is_refused(resume, tmp_path):
    work(resume(), 1)
    path = tmp_path / "run" / "000000.block"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    with pytest.raises(LedgerError, match="not the file that was committed"):
        resume()
    path.unlink()
    with pytest.raises(LedgerError, match="missing"):
        resume()
    path.write_bytes(content)
    assert resume().released == 1


def test_a_block_of_another_run_is_refused(ledger, tmp_path, monkeypatch):
    vault = a_vault(ledger)
    for run_id in ("one", "two"):
        curator = open_curator(ledger, tmp_path, vault=vault, run_id=run_id, pace=ALWAYS)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            crash_in(patch, ledger, "commit_block", after=False)
            work(curator, 1)
    stolen = (tmp_path / "one" / "000000.block").read_bytes()
    (tmp_path / "two" / "000000.block").write_bytes(stolen)
    with pytest.raises(LedgerError, match="another run"):
        open_curator(ledger, tmp_path, vault=vault, run_id="two")


def test_superseded_checkpoints_are_removed_and_files_are_private(resume, tmp_path):
    work(resume(), 3)
    (only,) = (tmp_path / "run").iterdir()
    assert only.name == "000002.block"
    assert only.stat().st_mode & 0o077 == 0
    assert only.parent.stat().st_mode & 0o077 == 0


def test_a_one_shot_answer_is_committed_before_it_is_seen_and_replayed(ledger, tmp_path):
    vault = a_vault(ledger)

    def opened():
        return open_curator(ledger, tmp_path, vault=vault, run_id="h", kind="histogram", count=2)

    curator = opened()
    first, second = curator.histogram(), curator.histogram()
    assert not torch.equal(first, second)
    assert [b.state for b in ledger.blocks("h")] == ["done", "done"]
    curator = opened()
    assert torch.equal(curator.histogram(), first)
    assert torch.equal(curator.histogram(), second)
    with pytest.raises(PlanExhausted):
        curator.histogram()
    assert curator.made() == {"histogram": 2}
    assert curator.bounds == {"histogram": [1.0]}


def test_a_killed_one_shot_release_never_shows_its_answer(ledger, tmp_path, monkeypatch):
    vault, features = a_vault(ledger), features_of(lambda image: image.flatten())

    def opened():
        return open_curator(
            ledger, tmp_path, vault=vault, run_id="c", kind="class_sums", count=1,
            blocks=features.blocks,
        )  # fmt: skip

    with monkeypatch.context() as patch, pytest.raises(Killed):
        crash_in(patch, ledger, "commit_block", after=False)
        opened().class_sums(features)
    curator = opened()
    assert curator.made() == {"class_sums": 1}  # rolled forward: paid once
    curator.class_sums(features)
    assert len(ledger.blocks("c")) == 1


def test_work_after_the_last_release_is_kept_without_a_charge(ledger, tmp_path):
    def opened(**pace):
        return open_curator(
            ledger, tmp_path, run_id="w", kind="histogram", count=1, pace=Pace(**pace)
        )

    curator = opened(seconds_between=0.0)
    answer = curator.histogram()
    curator.checkpoint(7, {"weights": torch.ones(3)})
    assert curator.made() == {"histogram": 1}
    patient = opened(seconds_between=1e9)
    assert torch.equal(patient.histogram(), answer)  # asked for first, as in the first life
    assert patient.restore()[0] == 7
    patient.checkpoint(8, {"weights": torch.zeros(3)})  # not yet due
    step, state = opened().restore()
    assert step == 7
    assert torch.equal(state["weights"], torch.ones(3))


def test_a_stop_commits_and_says_how_to_go_on(resume):
    stopping = Pace(seconds=1e9, should_stop=lambda: True)
    with pytest.raises(Interrupted, match="--resume"):
        work(resume(stopping), 1)
    assert resume().restore()[0] == 1


def test_a_method_cannot_end_on_uncommitted_releases(resume):
    curator = resume(NEVER)
    curator.gradient(linear_loss, linear_params(), clip_norm=0.5)
    with pytest.raises(PlanViolation, match="uncommitted"):
        curator.made()
    curator.checkpoint(1, {"x": torch.zeros(1)})
    assert curator.made() == {"gradient": 1}


def test_a_one_shot_release_commits_what_was_offered_before_it(ledger, tmp_path):
    vault = a_vault(ledger)
    lines = (
        PlannedRelease(name="gradient", kind="gradient", count=2, dimension=195),
        PlannedRelease(name="histogram", kind="histogram", count=1, dimension=3),
    )

    def opened():
        return vault.open(
            Plan(lines), LOOSE, ledger, workspace=tmp_path / "m", run_id="m", pace=NEVER,
            allow_large_delta=True,
        )  # fmt: skip

    curator = opened()
    work(curator, 1)
    counts = curator.histogram()
    assert curator.released == 2
    resumed = opened()
    assert resumed.restore()[0] == 1
    assert torch.equal(resumed.histogram(), counts)
    resumed.gradient(linear_loss, linear_params(), clip_norm=0.5)
    with pytest.raises(PlanViolation, match="call checkpoint"):
        resumed.made()


def test_epsilon_spent_counts_committed_releases_only(ledger, tmp_path):
    vault = a_vault(ledger, some_images(200))
    curator = open_curator(ledger, tmp_path, vault=vault, count=20, sampling_rate=0.2, pace=NEVER)
    assert curator.epsilon_spent() == 0
    params = linear_params()
    curator.gradient(linear_loss, params, clip_norm=0.5)
    assert curator.epsilon_spent() == 0
    spent = []
    curator._pace = ALWAYS
    for step in range(1, 20):
        curator.gradient(linear_loss, params, clip_norm=0.5)
        curator.checkpoint(step, {"x": torch.zeros(1)})
        spent.append(curator.epsilon_spent())
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(curator.calibration.epsilon)
    assert 0 < spent[0] < spent[-1]
