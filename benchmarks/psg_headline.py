"""PSG's headline table: accuracy by data set, epsilon and images per class, with time and memory;
and the ablations of preset `best`, one setting at a time.

Writes docs/results/psg.{json,md}. Computes missing cells only, and a cell that was cut off goes on
from its last committed block, so the table can grow over many calls on a borrowed GPU.

    python benchmarks/psg_headline.py --data .data --work runs/psg --minutes 9 --only mnist-eps10
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

import understudy
from common import RESULTS, commit, device_name
from understudy.errors import Interrupted
from understudy.runs import partial

CELLS = RESULTS / "psg.json"
PAPER = {  # (data, epsilon): accuracy by images per class, %
    ("mnist", 1.0): {10: 78.6, 20: 80.9},
    ("mnist", 10.0): {1: 81.4, 10: 94.9, 20: 95.6, 50: 94.0},
    ("fashion-mnist", 1.0): {10: 68.5, 20: 70.2},
    ("fashion-mnist", 10.0): {1: 66.7, 10: 75.6, 20: 77.7, 50: 71.3},
}


ABLATIONS = {  # name: settings that undo a part of `best`
    "small-start": {"start": 1.0},
    "projection": {"project": False},
    "smoothing": {"smooth": 0.0},
    "averaging": {"average": 0.0},
    "large-batches": {"batches": 10, "batch": 250, "image_steps": 1},
    "short-training": {"rounds": 80, "outer": 10, "inner": 50},
    "a-constant-rate": {"image_lr_end": 0.0},
    "unweighted-rows": {"shrink": True},
}


@dataclass(frozen=True)
class Cell:
    data: str
    epsilon: float
    images_per_class: int
    preset: str
    seed: int
    without: str = ""
    """The part of `best` that is left out."""

    @property
    def name(self) -> str:
        kind = f"{self.preset}-{self.seed}{self.without and '-without-'}{self.without}"
        return f"{self.data}-eps{self.epsilon:g}-spc{self.images_per_class}-{kind}"


def planned() -> list[Cell]:
    """All cells, the shortest first: spc 10 with both presets and two seeds, then the others."""
    cells = [
        Cell(data, epsilon, 10, preset, seed)
        for epsilon in (1.0, 10.0)
        for seed in (0, 1)
        for preset in ("best", "paper")
        for data in ("mnist", "fashion-mnist")
    ]
    for per_class in (1, 20, 50):
        for (data, epsilon), accuracies in PAPER.items():
            if per_class in accuracies:
                cells.append(Cell(data, epsilon, per_class, "best", 0))
    cells += [
        Cell(data, 1.0, 10, "best", 0, without)
        for without in ABLATIONS
        for data in ("mnist", "fashion-mnist")
    ]
    return cells


def measure(cell: Cell, data_dir: Path, work: Path) -> dict[str, object]:
    out, clock = work / cell.name, work / f"{cell.name}.seconds"
    spent = json.loads(clock.read_text()) if clock.exists() else []
    records = understudy.load_data(cell.data, data_dir=str(data_dir))
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    try:
        result = understudy.synthesize(
            records,
            epsilon=cell.epsilon,
            preset=cell.preset,
            settings={"images_per_class": cell.images_per_class} | ABLATIONS.get(cell.without, {}),
            seed=cell.seed,
            out=out,
            ledger=work / "ledger.sqlite",
            resume=partial(out).exists(),
        )
    finally:
        clock.write_text(json.dumps([*spent, round(time.perf_counter() - started, 1)]))
    memory = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    started = time.perf_counter()
    (accuracy,) = understudy.evaluate(out, test=records, ledger=work / "ledger.sqlite")
    content = result.certificate.content
    return asdict(cell) | {
        "accuracies": list(accuracy.accuracies),
        "certified_epsilon": result.certificate.epsilon,
        "releases": content["releases"][0]["made"],
        "settings": content["method"]["settings"],
        "seconds": json.loads(clock.read_text()),
        "evaluation_seconds": round(time.perf_counter() - started, 1),
        "peak_gib": round(memory, 2),
        "device": device_name(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def table(cells: list[dict]) -> str:
    lines = [
        "# PSG: the paper's headline table",
        "",
        "Written by `benchmarks/psg_headline.py`. Test accuracy in % of a ConvNet (width 128, 1000 "
        "epochs, last epoch) trained on the synthetic set alone; mean over three evaluation "
        "networks per set. delta 1e-5, N0 = 60 000, privacy-loss-distribution accounting. Seconds "
        "are wall-clock, with compilation, summed over resumed calls, without evaluation.",
        "",
        *rows([c for c in cells if not c["without"]], "preset", lambda c: c["preset"]),
        "",
        "## Preset `best` without one of its parts",
        "",
        *rows([c for c in cells if c["without"]], "without", lambda c: c["without"]),
    ]
    return "\n".join(lines) + "\n"


def rows(cells: list[dict], what: str, of: Callable[[dict], str]) -> list[str]:
    """Write a line for each kind of cell; cells that differ in their seed alone share one."""
    kinds: dict[tuple, list[dict]] = {}
    for cell in cells:
        kind = (cell["data"], cell["epsilon"], cell["images_per_class"], of(cell))
        kinds.setdefault(kind, []).append(cell)
    lines = [
        f"| data | epsilon | images per class | {what} | paper | accuracy | by set | seconds "
        "| peak GiB | seeds | device | commit |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (data, epsilon, per_class, name), row in sorted(kinds.items()):
        by_set = [100 * fmean(c["accuracies"]) for c in row]
        each = " / ".join(f"{value:.1f}" for value in by_set)
        seconds = " / ".join(f"{sum(c['seconds']):.0f}" for c in row)
        commits = ", ".join(dict.fromkeys(c["commit"] for c in row))
        lines.append(
            f"| {data} | {epsilon:g} | {per_class} | {name} "
            f"| {PAPER[data, epsilon].get(per_class, '-')} | {fmean(by_set):.1f} | {each} "
            f"| {seconds} | {max(c['peak_gib'] for c in row)} "
            f"| {', '.join(str(c['seed']) for c in row)} | {row[0]['device']} | {commits} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and their ledger")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop, to be resumed, after")
    parser.add_argument("--only", nargs="+", default=[""], help="cells whose name begins so")
    given = parser.parse_args()
    only = tuple(given.only)
    given.work.mkdir(parents=True, exist_ok=True)
    # A run takes the signal as a request to stop at a committed block; nothing else heeds it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline = time.monotonic() + 60 * given.minutes
    timer = threading.Timer(60 * given.minutes, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    cells = json.loads(CELLS.read_text()) if CELLS.exists() else []
    done = {Cell(*(c[key] for key in Cell.__dataclass_fields__)).name for c in cells}
    try:
        for cell in planned():
            if cell.name in done or not cell.name.startswith(only) or time.monotonic() > deadline:
                continue
            cells.append(measure(cell, given.data, given.work))
            CELLS.write_text(json.dumps(cells, indent=1) + "\n")
            CELLS.with_suffix(".md").write_text(table(cells))
            print(cells[-1], flush=True)
    except Interrupted as error:
        print(f"{cell.name}: {error}")


if __name__ == "__main__":
    main()
