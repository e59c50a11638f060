"""What every benchmark records beside its numbers, and where it writes them."""

from __future__ import annotations

from pathlib import Path

from understudy.provenance import commit, device_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"

__all__ = ["RESULTS", "ROOT", "commit", "device_name"]
