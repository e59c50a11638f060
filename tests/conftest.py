from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "e2e")]
# One scratch home per test process: calibrations are cached there, the user's own stays untouched.
os.environ["UNDERSTUDY_HOME"] = tempfile.mkdtemp(prefix="understudy-tests-")
os.environ.pop("UNDERSTUDY_LEDGER", None)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start
torch.set_num_threads(1)

from understudy.privacy.ledger import Ledger  # noqa: E402


@pytest.fixture(autouse=True)
def _the_same_draws() -> None:
    """Public draws of a test repeat; secret randomness does not follow this seed."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _wide_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round alike on every processor; `narrow_on` has a test of its own."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    book = Ledger(tmp_path / "ledger.sqlite")
    yield book
    book.close()


@pytest.fixture(scope="session")
def trained_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run that trained a classifier, with snapshots, and one without a guarantee."""
    from trained import train

    folder = tmp_path_factory.mktemp("trained")
    return {
        "run": train(folder, snapshots=2),
        "noiseless": train(folder, "noiseless", epsilon=float("inf")),
    }
