"""Processes that share one run: each holds some of the units, and sums are added up over them.

`torchrun` starts the processes and tells each its rank. All of them run the same method on the same
answers. Rank 0 leads: it alone draws noise, writes the ledger and the run's directory, and decides
when to stop. What the others send are bare sums: processes, and the network between them, belong
to the custodian's side of the door.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from understudy.errors import PlanViolation, ProcessLost

PATIENCE = timedelta(minutes=20)
"""A process may have to wait this long for another that compiles or calibrates."""


@dataclass(frozen=True)
class Group:
    """One process among `size`. Alone by default."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process draws the noise and writes what is written."""
        return self.rank == 0

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place."""
        if self.size > 1:
            _surely(lambda: dist.all_reduce(tensor))
        return tensor

    def from_leader(self, tensor: Tensor) -> Tensor:
        """Replace the content by the leader's."""
        if self.size > 1:
            _surely(lambda: dist.broadcast(tensor, 0))
        return tensor

    def bytes_from_leader(self, content: bytes) -> bytes:
        """Return the leader's `content`."""
        if self.size == 1:
            return content
        length = self.from_leader(self._message(torch.tensor([len(content)])))
        payload = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
        if not self.leads:
            payload = torch.empty(int(length), dtype=torch.uint8)
        return self.from_leader(self._message(payload))[: int(length)].cpu().numpy().tobytes()

    def all_say(self, yes: bool) -> bool:
        """Return whether every process says yes."""
        if self.size == 1:
            return yes
        return int(self.add_up(self._message(torch.tensor([int(yes)])))) == self.size

    def agree_on(self, bound: float) -> None:
        """Refuse to go on with a bound other than the leader's: the noise is scaled to that."""
        if self.size == 1:
            return
        leaders = self.from_leader(self._message(torch.tensor([bound], dtype=torch.float64)))
        if float(leaders) != bound:
            raise PlanViolation(
                f"this process bounds contributions by {bound:g}, the leading one by "
                f"{float(leaders):g}; give all processes the same command"
            )

    def agrees(self, wish: bool) -> bool:
        """Return the leader's wish."""
        if self.size == 1:
            return wish
        return bool(self.from_leader(self._message(torch.tensor([int(wish)]))))

    @staticmethod
    def _message(tensor: Tensor) -> Tensor:
        return tensor.cuda() if dist.get_backend() == "nccl" else tensor


ALONE = Group()


def _surely(exchange: Callable[[], object]) -> None:
    try:
        exchange()
    except RuntimeError as error:
        raise ProcessLost(
            "another process of this run has ended, so this one cannot go on; what was committed "
            "is safe and the budget stays reserved: run the same command with --resume"
        ) from error


def is_in_group() -> bool:
    """Say whether `torchrun` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


@contextmanager
def joined(device: torch.device) -> Iterator[Group]:
    """Join the processes that `torchrun` started, for as long as the context lasts."""
    if not is_in_group():
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    try:
        yield Group(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
