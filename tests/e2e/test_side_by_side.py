"""Several runs side by side: the same sets as one by one, each with its own draws and guarantee."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

import understudy
from door import a_vault, open_curator
from understudy.errors import Interrupted, InvalidSettings, OutputExists, PlanViolation
from understudy.privacy.ledger import Ledger
from understudy.privacy.randomness import SecretRandomness
from understudy.training.engine import Engine

SMALL = {"rounds": 1, "outer": 2, "batches": 2, "inner": 2, "width": 4, "images_per_class": 1}


def test_each_run_is_what_it_would_be_alone(tmp_path):
    """Without noise, and with all units in every batch, nothing is left to chance."""
    everyone = SMALL | {"batch": 1438}
    free = {"method": "psg", "epsilon": float("inf")}
    asked = [
        {**free, "seed": 0, "settings": everyone},
        {**free, "seed": 1, "settings": everyone},
        {**free, "seed": 1, "settings": everyone | {"images_per_class": 2}},
    ]
    together = understudy.synthesize_all(
        "digits", asked, out=[tmp_path / str(n) for n in range(3)], ledger=tmp_path / "ledger"
    )
    for number, (request, result) in enumerate(zip(asked, together, strict=True)):
        alone = understudy.synthesize(
            "digits", out=tmp_path / f"alone{number}", ledger=tmp_path / "ledger", **request
        )
        assert torch.allclose(result.images, alone.images, atol=1e-5)
        assert result.labels.tolist() == alone.labels.tolist()
    assert not torch.allclose(together[0].images, together[1].images, atol=1e-2)


def test_each_run_has_its_own_plan_certificate_and_ledger_entry(tmp_path):
    asked = [
        {"method": "psg", "epsilon": epsilon, "seed": 0, "accountant": "renyi", "settings": SMALL}
        for epsilon in (1.0, 1.0, 2.0)
    ]
    places = [tmp_path / name for name in "abc"]
    results = understudy.synthesize_all("digits", asked, out=places, ledger=tmp_path / "ledger")
    assert [round(result.certificate.epsilon) for result in results] == [1, 1, 2]
    assert not torch.equal(results[0].images, results[1].images)  # same seed, other noise
    for place in places:
        assert understudy.verify(place, ledger=True).files == 3
    book = Ledger(tmp_path / "ledger")
    runs = book.charged_runs(1)
    assert len({run["id"] for run in runs}) == 3
    assert {run["state"] for run in runs} == {"finished"}
    assert sorted(round(run["epsilon"]) for run in runs) == [1, 1, 2]
    book.close()
    again = understudy.synthesize_all(
        "digits", asked, out=places, ledger=tmp_path / "ledger", resume=True
    )
    assert all(torch.equal(a.images, b.images) for a, b in zip(again, results, strict=True))


def test_sharing_batches_or_noise_is_refused(ledger, tmp_path):
    vault, shared = a_vault(ledger), SecretRandomness(torch.device("cpu"))
    open_curator(ledger, tmp_path / "one", vault=vault, randomness=shared)
    with pytest.raises(PlanViolation, match="let each have its own"):
        open_curator(ledger, tmp_path / "two", vault=vault, randomness=shared)


def test_a_directory_that_is_taken_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "b").mkdir()
    with pytest.raises(OutputExists):
        understudy.synthesize_all(
            "digits", [{}, {}], out=[tmp_path / "a", tmp_path / "b"], ledger=tmp_path / "ledger"
        )
    assert not (tmp_path / "ledger").exists()


def test_one_directory_for_each(tmp_path):
    with pytest.raises(InvalidSettings, match="expected one directory for each"):
        understudy.synthesize_all("digits", [{}, {}], out=[tmp_path / "a", tmp_path / "a"])


def test_a_run_that_fails_stops_the_others_at_a_committed_block(tmp_path, monkeypatch):
    fail = threading.Event()
    from understudy.methods.psg import PSG

    original = PSG._draw

    def failing(self, number, device):
        if self.seed == 1 and number == 3:
            fail.set()
            raise OSError("disk on fire")
        return original(self, number, device)

    monkeypatch.setattr(PSG, "_draw", failing)
    endless = SMALL | {"rounds": 50_000}
    asked = [
        {"method": "psg", "accountant": "renyi", "seed": seed, "settings": endless}
        for seed in (0, 1)
    ]
    started = time.monotonic()
    with pytest.raises(OSError, match="disk on fire"):
        understudy.synthesize_all(
            "digits", asked, out=[tmp_path / "a", tmp_path / "b"], ledger=tmp_path / "ledger"
        )
    assert fail.is_set()
    assert time.monotonic() - started < 60
    book = Ledger(tmp_path / "ledger")
    runs = book.charged_runs(1)
    assert [run["state"] for run in runs] == ["reserved", "reserved"]
    other = [b for run in runs for b in book.blocks(run["id"]) if b.state == "done"]
    assert sum(sum(block.releases.values()) for block in other) > 0  # of the run that was well
    book.close()


def test_a_signal_stops_them_all_at_a_committed_block(tmp_path):
    endless = SMALL | {"rounds": 50_000}
    asked = [
        {"method": "psg", "accountant": "renyi", "seed": seed, "settings": endless}
        for seed in (0, 1)
    ]
    timer = threading.Timer(8, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    with pytest.raises(Interrupted, match="--resume"):
        understudy.synthesize_all(
            "digits", asked, out=[tmp_path / "a", tmp_path / "b"], ledger=tmp_path / "ledger"
        )
    timer.cancel()
    book = Ledger(tmp_path / "ledger")
    blocks = [book.blocks(run["id"]) for run in book.charged_runs(1)]
    assert len(blocks) == 2
    assert all(block.state == "done" for some in blocks for block in some)
    assert all(some for some in blocks)
    book.close()


def test_engines_side_by_side_share_what_is_compiled_and_nothing_else():
    engine = Engine()
    other = engine.beside()
    assert other._compiled is engine._compiled
    assert other._lock is engine._lock
    assert other._programs is not engine._programs
