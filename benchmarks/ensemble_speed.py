"""Many teachers at once, against a loop over modules: milliseconds for a step of one teacher.

(a) A loop: each teacher is a module with convolutions and an optimiser of PyTorch's, as one would
    write it, one after the other. Its cost does not depend on how many there are, so a part of them
    is measured.
(b) Ours: all teachers of an `Ensemble` in chunks, parameters and moments stacked.

Both make the same step: an equal number of records and generated images, cross-entropy, Adam. Two
sizes: teachers for 28 x 28 pixels, and small ones for 8 x 8.

Writes docs/results/ensemble_speed_{cpu,cuda}.{json,md}.

    python benchmarks/ensemble_speed.py [--members 1000]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import RESULTS, commit, device_name
from understudy.data.images import labelled_images
from understudy.methods.teachers import ADAM, NetworkCritic, Shown, stacked
from understudy.nets.critics import Teacher, halved, leaky
from understudy.nets.modules import beside
from understudy.nets.params import moved
from understudy.privacy.ensemble import Ensemble
from understudy.privacy.plan import PublicFacts
from understudy.privacy.records import Records
from understudy.training import engine as running
from understudy.training.engine import Engine, choose_device

CLASSES, LR = 10, 1e-3
running.TO_COMPILE = 0  # on a CPU, too: what a long run gets


@dataclass(frozen=True)
class Size:
    """What is measured: sides of images, size of a teacher, records of each."""

    side: int
    channels: int
    hidden: int
    records: int
    looped: int
    """Members in the loop."""
    repeats: int


SIZES = (
    Size(side=28, channels=32, hidden=256, records=15, looped=20, repeats=3),
    Size(side=8, channels=8, hidden=32, records=10, looped=100, repeats=3),
)


class Module(nn.Module):
    """The teacher as one would write it: maps of the class beside every layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        first, second = 1 + CLASSES, size.channels + CLASSES
        self.conv0 = nn.Conv2d(1 + CLASSES, first, 5, stride=2, padding=2)
        self.conv1 = nn.Conv2d(first + CLASSES, second, 5, stride=2, padding=2)
        features = second * halved(halved(size.side)) ** 2
        self.linear0 = nn.Linear(features + CLASSES, size.hidden)
        self.linear1 = nn.Linear(size.hidden + CLASSES, 1)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        one_hot = F.one_hot(labels, CLASSES).float()
        maps = leaky(self.conv0(beside(images, one_hot)))
        maps = leaky(self.conv1(beside(maps, one_hot)))
        hidden = leaky(self.linear0(torch.cat([maps.flatten(1), one_hot], 1)))
        return self.linear1(torch.cat([hidden, one_hot], 1))[:, 0]


def some(size: Size, members: int, device: torch.device) -> tuple[Tensor, Tensor, Shown]:
    """Draw records of all members, and generated images."""
    draw = torch.Generator().manual_seed(0)
    images = torch.rand(members, size.records, 1, size.side, size.side, generator=draw).to(device)
    labels = torch.randint(CLASSES, (members, size.records), generator=draw).to(device)
    generated = torch.rand(size.records, 1, size.side, size.side, generator=draw).to(device)
    return images, labels, Shown(generated, labels[0], torch.empty(0, device=device))


def looped(size: Size, device: torch.device) -> Callable[[], None]:
    """Return (a): one step of every module."""
    images, labels, shown = some(size, size.looped, device)
    modules = [Module(size).to(device) for _ in range(size.looped)]
    optimisers = [torch.optim.Adam(m.parameters(), LR, betas=ADAM.betas) for m in modules]

    def step() -> None:
        for module, optimiser, own, theirs in zip(modules, optimisers, images, labels, strict=True):
            optimiser.zero_grad()
            real, fake = module(own, theirs), module(shown.images, shown.labels)
            (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
            optimiser.step()

    return step


def at_once(size: Size, members: int, device: torch.device) -> Callable[[], None]:
    """Return (b): one step of every member of an ensemble, shards and all."""
    count = members * size.records
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, 1, size.side, size.side), dtype=np.uint8)
    data = labelled_images(pixels, np.arange(count) % CLASSES)
    shape = (1, size.side, size.side)
    facts = PublicFacts(
        units=count, class_names=tuple(map(str, range(CLASSES))), shape=shape, mean=(0.5,),
        std=(0.5,),
    )  # fmt: skip
    teacher = Teacher(shape, CLASSES, size.channels, size.hidden)
    alike = moved(teacher.init(torch.Generator().manual_seed(0)), device)
    start = stacked((alike, ADAM.start(alike)), members)
    records = Records.from_units(
        data, np.arange(count), max_per_unit=None, device=device, one_each=True
    )
    ensemble = Ensemble(records, facts, start, members=members, engine=Engine(device))
    shown, lesson = some(size, 1, device)[2], NetworkCritic(teacher, LR)
    positions = torch.arange(size.records)
    return lambda: ensemble.learn(lesson, positions, shown)


def milliseconds(step: Callable[[], None], size: Size, members: int, device: torch.device) -> float:
    """Return what one step of one member takes."""
    for _ in range(2):  # on a CPU the first call is counted, and the second compiled
        step()
    best = float("inf")
    for _ in range(size.repeats):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 1000 * best / members


def measure(members: int) -> dict[str, Any]:
    device = choose_device("auto")
    rows = []
    for size in SIZES:
        loop = milliseconds(looped(size, device), size, size.looped, device)
        ours = milliseconds(at_once(size, members, device), size, members, device)
        rows.append(asdict(size) | {"loop_ms": loop, "ours_ms": ours, "ratio": loop / ours})
    return {
        "members": members, "rows": rows, "device": device_name(), "kind": device.type,
        "torch": torch.__version__, "commit": commit(),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    lines = [
        "# Many teachers at once",
        "",
        f"Written by `benchmarks/ensemble_speed.py`: milliseconds for one step of one teacher, "
        f"{found['members']} of them stacked, against a loop over modules with an optimiser each; "
        f"best of several, in one process. {found['device']}, torch {found['torch']}, commit "
        f"{found['commit']}.",
        "",
        "| image | teacher | records | loop | stacked | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['side']} x {r['side']} | {r['channels']} channels, {r['hidden']} hidden "
        f"| {r['records']} | {r['loop_ms']:.3f} ms | {r['ours_ms']:.3f} ms | {r['ratio']:.1f} |"
        for r in found["rows"]
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=1000)
    found = measure(parser.parse_args().members)
    name = f"ensemble_speed_{found['kind']}"
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(table(found))
    print(table(found))
