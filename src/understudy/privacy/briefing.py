"""What the leading process tells the others before a run: facts, noise, and where to go on from.

The others hold records and take part in every release, but write nothing: their blocks live in
memory, and follow the leader's.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from understudy.data.images import LabelledImages
from understudy.errors import DataChanged, InvalidSettings
from understudy.privacy.blocks import BlockResult, Blocks, Counts
from understudy.privacy.calibration import Calibration
from understudy.privacy.plan import Plan, PublicFacts

UNITS, MARK = "units", b"briefing"


@dataclass(frozen=True)
class Briefing:
    """Everything that a process needs of the leader's knowledge."""

    facts: PublicFacts
    plan: list[dict[str, Any]]
    calibration: Calibration
    records: str
    """Digest of the data set, so that all processes hold parts of the same one."""
    units: NDArray[np.int64]
    """Units to learn from, of all processes."""
    committed: Mapping[str, int]
    results: tuple[BlockResult, ...]
    """Answers of one-shot releases, and the last checkpoint."""
    secure_noise: bool = False
    """Whether all processes draw from a cipher."""

    def to_bytes(self) -> bytes:
        """Serialise."""
        tensors = {UNITS: torch.from_numpy(self.units)}
        for number, result in enumerate(self.results):
            tensors |= {f"{number}/{name}": t.cpu() for name, t in result.tensors.items()}
        header = {
            "facts": self.facts.to_json(),
            "plan": self.plan,
            "calibration": asdict(self.calibration),
            "records": self.records,
            "committed": dict(self.committed),
            "results": [
                {"kind": r.kind, "step": r.step, "notes": r.notes, "names": list(r.tensors)}
                for r in self.results
            ],
            "secure_noise": self.secure_noise,
        }
        payload = save_tensors(tensors)
        words = json.dumps(header).encode()
        return MARK + len(words).to_bytes(8, "little") + words + payload

    @staticmethod
    def is_one(content: bytes) -> bool:
        """Say whether `content` is a briefing."""
        return content.startswith(MARK)

    @classmethod
    def from_bytes(cls, content: bytes) -> Briefing:
        """Read what `to_bytes` wrote."""
        start = len(MARK) + 8
        length = int.from_bytes(content[len(MARK) : start], "little")
        header = json.loads(content[start : start + length])
        tensors = load_tensors(content[start + length :])
        results = tuple(
            BlockResult(
                r["kind"],
                r["step"],
                {name: tensors[f"{number}/{name}"] for name in r["names"]},
                r["notes"],
            )
            for number, r in enumerate(header["results"])
        )
        return cls(
            facts=PublicFacts.from_json(header["facts"]),
            plan=header["plan"],
            calibration=Calibration(**header["calibration"]),
            records=header["records"],
            units=tensors[UNITS].numpy(),
            committed=header["committed"],
            results=results,
            secure_noise=header["secure_noise"],
        )

    def check(self, data: LabelledImages, plan: Plan) -> None:
        """Refuse to take part with other records or another plan than the leader's."""
        if digest(data) != self.records:
            raise DataChanged(
                "this process reads other records than the leading one; give all the same data"
            )
        if plan.to_json() != self.plan:
            raise InvalidSettings(
                "this process plans other releases than the leading one; give all processes the "
                "same command and the same version of understudy"
            )


def digest(data: LabelledImages) -> str:
    """Digest the records; only processes that hold them ever see it."""
    total = hashlib.sha256()
    for array in (data.images, data.labels, data.units):
        total.update(memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
    return total.hexdigest()


class FollowingBlocks(Counts):
    """The blocks of a process that writes nothing: counts, and what the leader had committed."""

    extra_attempts = 0

    def __init__(self, briefing: Briefing) -> None:
        super().__init__(briefing.committed)
        self.answers = {(r.kind, r.step): r for r in briefing.results if r.kind != "checkpoint"}
        points = [r for r in briefing.results if r.kind == "checkpoint"]
        self.checkpoint = points[-1] if points else None
        self.latest: BlockResult | None = None  # bounds are for the leader's certificate

    def count(self, release: str) -> None:
        """Record that `release` is about to be made."""
        self._open = (self._open or Counter()) + Counter({release: 1})

    def commit(
        self, kind: str, step: int, tensors: Mapping[str, Tensor], notes: dict[str, Any]
    ) -> BlockResult:
        """Follow the leader's commit."""
        self.committed += self._open or Counter()
        self._open = None
        return BlockResult(kind, step, dict(tensors), notes)


def results_of(blocks: Blocks) -> tuple[BlockResult, ...]:
    """Return what a resumed run goes on from."""
    return (*blocks.answers.values(), *([blocks.checkpoint] if blocks.checkpoint else []))
