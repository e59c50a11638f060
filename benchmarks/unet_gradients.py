"""Gradients of single records through the U-Net of DPDM: by layer, and record by record (`vmap`).

Both give the same rows; on a GPU each is tried plainly, and as a run does it: compiled and captured
(`training/engine.py`). One batch of records, several noisy copies of each, computed at once. Peak
memory is that of a process of its own for each way, beyond what it had before.

Writes docs/results/unet_gradients_{cpu,cuda}.{json,md}.

    python benchmarks/unet_gradients.py [--batch 256] [--side 28] [--width 32] [--copies 8]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch

from common import RESULTS, commit, device_name
from understudy.nets.diffusion import Denoiser
from understudy.nets.params import moved, parameter_count
from understudy.nets.unet import UNet
from understudy.privacy.gradients import GradientRows
from understudy.training.diffusion import DenoisingLoss, draws_of
from understudy.training.engine import Engine, choose_device

WAYS = ("by layer", "vmap")
COMPILED = ", compiled"
REPEATS = 3


def ways() -> list[str]:
    """Name what is compared here."""
    return [way + how for how in ("", COMPILED)[: 1 + torch.cuda.is_available()] for way in WAYS]


def memory(device: torch.device) -> float:
    """Return the most memory used so far, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(asked: argparse.Namespace) -> dict[str, float]:
    """Return seconds and memory of one way."""
    device = choose_device("auto")
    network = UNet((1, asked.side, asked.side), 10, width=asked.width).on(device)
    params = moved(network.init(torch.Generator().manual_seed(0)), device)
    known = draws_of(0, seed=0, device=device)
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (asked.batch, *network.shape), generator=generator) / 255
    labels = torch.arange(asked.batch) % 10
    rows = GradientRows(
        DenoisingLoss(Denoiser(network), asked.copies),
        public=known,
        by_layer=asked.way.startswith("by layer"),
    )
    images, labels = images.to(device), labels.to(device)
    rows(params | known, images[:2], labels[:2])  # finds the layers
    engine = Engine(device, compile=asked.way.endswith(COMPILED))
    # On a CPU, what the process itself took: other work on the machine does not count.
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    before, seconds = memory(device), []
    for _ in range(REPEATS + 1):  # the first compiles, if anything does
        started = clock()
        blocks = engine.run(rows, params | known, images, labels)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(clock() - started)
        del blocks
    return {
        "seconds": min(seconds),
        "gib": memory(device) - before,
        "parameters": parameter_count(params),
    }


def table(found: dict) -> str:
    """Return what was found as a page."""
    plain = found["vmap"]
    lines = [
        f"| {way} | {found[way]['seconds']:.3f} | {found[way]['gib']:.2f} | "
        f"{found[way]['seconds'] / plain['seconds']:.2f} | {found[way]['gib'] / plain['gib']:.2f} |"
        for way in ways()
    ]
    return "\n".join(
        [
            "# Gradients of single records through a U-Net",
            "",
            f"Written by `benchmarks/unet_gradients.py`: {found['batch']} records of "
            f"{found['side']} x {found['side']} pixels, {found['copies']} noisy copies of each, "
            f"width {found['width']} ({plain['parameters']:,} parameters), the best of {REPEATS}. "
            f"{found['device']}, seed 0, commit {found['commit']}.",
            "",
            "| how | seconds | GiB | time, of vmap's | memory, of vmap's |",
            "|---|---|---|---|---|",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Measure each way in a process of its own, and write both down."""
    parser = argparse.ArgumentParser(description=__doc__)
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--side", type=int, default=28 if has_gpu else 14)
    parser.add_argument("--width", type=int, default=32 if has_gpu else 16)
    parser.add_argument("--copies", type=int, default=8 if has_gpu else 2)
    parser.add_argument("--way", choices=ways())
    asked = parser.parse_args()
    if asked.way:
        print(json.dumps(measure(asked)))
        return
    found = {name: getattr(asked, name) for name in ("batch", "side", "width", "copies")}
    found |= {"device": device_name(), "commit": commit()}
    for way in ways():
        call = [sys.executable, *sys.argv, "--way", way]
        done = subprocess.run(call, check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    name = f"unet_gradients_{'cuda' if has_gpu else 'cpu'}"
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
