"""Blocks: work between two commits. Nothing of a block leaves the process before its commit.

A commit writes the block's result (a checkpoint, or the answer of a one-shot release) to a file,
syncs it, and then marks the block done in the ledger, in one transaction, with the file's digest.
After a crash a started block whose complete, authentic result is there is rolled forward; otherwise
its file is deleted unread and the block is done again, with fresh sampling and noise.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from understudy.errors import LedgerError
from understudy.files import make_directory, parse_json, remove_temporaries, write_file
from understudy.privacy.ledger import Block, Ledger
from understudy.text import one_line

MAC_BYTES = 32
UNREADABLE = (
    AttributeError, KeyError, TypeError, ValueError, OverflowError, safetensors.SafetensorError,
)  # fmt: skip
"""What reading a garbled block may raise."""


@dataclass(frozen=True)
class BlockResult:
    """The content of a committed block."""

    kind: str
    """`checkpoint`, or the name of a one-shot release."""
    step: int
    """Steps done, or which call of the one-shot release this answers."""
    tensors: dict[str, Tensor]
    notes: dict[str, Any]
    """What the curator must remember with it."""


class Counts:
    """How many releases were made: in committed blocks, and in the open one."""

    def __init__(self, committed: Mapping[str, int]) -> None:
        self.committed: Counter[str] = Counter(committed)
        self._open: Counter[str] | None = None

    @property
    def released(self) -> Counter[str]:
        """Releases made so far, committed or not."""
        return self.committed + (self._open or Counter())

    @property
    def is_open(self) -> bool:
        """Whether releases were made since the last commit."""
        return self._open is not None


class Blocks(Counts):
    """The blocks of one run: counts what was released, commits, and recovers after a crash."""

    def __init__(self, ledger: Ledger, run_id: str, directory: Path) -> None:
        super().__init__({})
        self._ledger, self._run_id, self._directory = ledger, run_id, directory
        self._attempt = 0
        self.extra_attempts = 0
        self.latest: BlockResult | None = None
        self.checkpoint: BlockResult | None = None
        self.answers: dict[tuple[str, int], BlockResult] = {}
        self._number = 0
        self._checkpoint_file: Path | None = None
        make_directory(directory, mode=0o700)
        remove_temporaries(directory)
        known = ledger.blocks(run_id)
        self._refuse_unknown({self._file(block.number) for block in known})
        for block in known:
            self._recover(block)
        if self._number and not self._file(self._number - 1).exists():
            raise LedgerError(
                f"the last committed block is missing from {directory}; put it back, or start a "
                "new run: this one stays charged"
            )

    def _refuse_unknown(self, known: set[Path]) -> None:
        """Refuse results that the ledger does not know of: their releases would be made again."""
        if unknown := sorted(set(self._directory.glob("*.block")) - known):
            raise LedgerError(
                f"the ledger does not know of {unknown[0]}: it is not the ledger of this run, or "
                "was put back to an older state; name the right one, or start a new run"
            )

    def count(self, release: str) -> None:
        """Record that `release` is about to be made; start a block if none is open."""
        self._start()[release] += 1

    def _start(self) -> Counter[str]:
        if self._open is None:
            self._attempt = self._ledger.start_block(self._run_id, self._number)
            self._open = Counter()
        return self._open

    def commit(
        self, kind: str, step: int, tensors: Mapping[str, Tensor], notes: dict[str, Any]
    ) -> BlockResult:
        """Make the open block durable with its result; without one, a block of no releases."""
        releases = dict(self._start())
        header = {
            "run": self._run_id,
            "block": self._number,
            "attempt": self._attempt,
            "kind": kind,
            "step": step,
            "releases": releases,
            "notes": notes,
            "names": list(tensors),
        }
        metadata = {"understudy": json.dumps(header, sort_keys=True)}
        contents = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        payload = save_tensors(contents, metadata=metadata)
        content = payload + self._ledger.mac(payload)
        write_file(self._file(self._number), content, mode=0o600)
        digest = hashlib.sha256(content).hexdigest()
        self._ledger.commit_block(self._run_id, self._number, releases=releases, digest=digest)
        self.committed += Counter(releases)
        self._open = None
        result = BlockResult(kind, step, contents, notes)
        self._keep(self._number, result)
        return result

    def _keep(self, number: int, result: BlockResult) -> None:
        self._number, self.latest = number + 1, result
        if result.kind != "checkpoint":
            self.answers[result.kind, result.step] = result
            return
        if self._checkpoint_file is not None:  # superseded
            self._checkpoint_file.unlink(missing_ok=True)
        self.checkpoint, self._checkpoint_file = result, self._file(number)

    def _recover(self, block: Block) -> None:
        path = self._file(block.number)
        if block.state == "done":
            self.committed += Counter(block.releases)
            self.extra_attempts += block.attempts - 1
            self._number = block.number + 1
            if path.exists():  # superseded checkpoints are gone
                content = path.read_bytes()
                if hashlib.sha256(content).hexdigest() != block.digest:
                    raise LedgerError(
                        f"{path} is not the file that was committed; restore it from a backup, or "
                        "start a new run: this one stays charged"
                    )
                self._keep(block.number, self._parse(content, block)[0])
            return
        self.extra_attempts += block.attempts
        content = path.read_bytes() if path.exists() else b""
        if not self._is_authentic(content):
            path.unlink(missing_ok=True)
            return
        result, header = self._parse(content, block)
        self._ledger.commit_block(
            self._run_id,
            block.number,
            releases=header["releases"],
            digest=hashlib.sha256(content).hexdigest(),
        )
        self.committed += Counter(header["releases"])
        self.extra_attempts -= 1
        self._keep(block.number, result)

    def _is_authentic(self, content: bytes) -> bool:
        payload, code = content[:-MAC_BYTES], content[-MAC_BYTES:]
        return hmac.compare_digest(self._ledger.mac(payload), code)

    def _parse(self, content: bytes, block: Block) -> tuple[BlockResult, dict[str, Any]]:
        payload = content[:-MAC_BYTES]
        length = int.from_bytes(payload[:8], "little")
        try:
            loaded = load_tensors(payload)
            words = parse_json(payload[8 : 8 + length])["__metadata__"]["understudy"]
            header: dict[str, Any] = parse_json(words)
            tensors = {name: loaded[name] for name in header["names"]}  # in the order committed
            found = (header["run"], header["block"], header["attempt"])
            result = BlockResult(
                str(header["kind"]), int(header["step"]), tensors, dict(header["notes"])
            )
            header["releases"] = {str(n): int(c) for n, c in header["releases"].items()}
        except UNREADABLE as error:
            raise LedgerError(f"block {block.number} cannot be read ({one_line(error)})") from error
        if found != (self._run_id, block.number, block.attempts):
            raise LedgerError(
                f"{self._file(block.number)} belongs to another run or attempt; put back the right "
                "directory, or start a new run: this one stays charged"
            )
        return result, header

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:06d}.block"
