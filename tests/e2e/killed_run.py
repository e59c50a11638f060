"""What a killed process does: a run that writes its draws and states to the test's log."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch._dynamo  # torch.func imports it at first use, which takes seconds

import understudy
from understudy import job
from understudy.privacy import secure
from understudy.privacy.curator import Curator, Pace
from understudy.privacy.randomness import SecretRandomness

torch.set_num_threads(1)
SETTINGS = {"rounds": 60, "outer": 4, "batches": 3, "inner": 2, "images_per_class": 2, "width": 8}
STEPS = 60 * 4 * 3


def run(folder: str, attempt: int) -> None:
    """Run, or resume, logging (attempt, what, bytes) of every noise draw and every state."""
    base = Path(folder)
    log = os.open(base / "log.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(what: str, content: bytes, step: int = -1) -> None:
        line = {"attempt": attempt, "what": what, "step": step, "bytes": content.hex()}
        os.write(log, (json.dumps(line) + "\n").encode())

    class Logged(SecretRandomness):
        __slots__ = ()

        def normal(self, count):
            draws = super().normal(count)
            note("noise", draws[:4].numpy().tobytes())
            return draws

    checkpoint, restore = Curator.checkpoint, Curator.restore

    def logged_checkpoint(self, step, state, so_far=None):
        (velocity,) = state["memory"].values()
        note("state", velocity.flatten()[:16].numpy().tobytes(), step)
        checkpoint(self, step, state, so_far)

    def logged_restore(self):
        step, state = restore(self)
        note("restored", b"", step)
        return step, state

    Curator.checkpoint, Curator.restore = logged_checkpoint, logged_restore
    secure.SecretRandomness = Logged
    job.Pace = lambda **options: Pace(seconds=0.1, **options)
    understudy.synthesize(
        "digits",
        method="psg",
        settings=SETTINGS,
        accountant="renyi",
        out=base / "run",
        ledger=base / "ledger.sqlite",
        resume=(base / "run.partial").exists() or (base / "run").exists(),
    )
