"""Acceptance of our FID: CIFAR-10's training images against its test images.

This number does not depend on anybody's generator. With the original weights and resizing it is
known to be about 3.15; anything else would mean that weights, value range, resizing or the distance
itself are not the ones that published FIDs rest on.

Writes docs/results/fid_cifar10.{json,md} when all images were used, and fails if the distance is
not the expected one. Meant for a GPU; --images 20 tries it out on a CPU and writes nothing.

    python benchmarks/fid_cifar10.py [--data FOLDER] [--weights FILE] [--device cpu] [--images 20]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import RESULTS, commit, device_name
from understudy.cli.output import Output
from understudy.data.weights import WEIGHTS, weights_file
from understudy.evaluation.features import Inception, features_of
from understudy.evaluation.quality import Moments, frechet_distance
from understudy.pipeline import load_data
from understudy.progress import Progress
from understudy.training.engine import choose_device

EXPECTED, TOLERANCE = 3.15, 0.1


def moments(network: Inception, images: Tensor, what: str, progress: Progress) -> Moments:
    found = Moments()
    for part in features_of(network, images, progress=progress, what=what):
        found.update(part)
    return found


def table(found: dict[str, Any]) -> str:
    verdict = "as expected" if found["accepted"] else "NOT as expected"
    lines = [
        "# FID between CIFAR-10's training and test images",
        "",
        "Written by `benchmarks/fid_cifar10.py`: the acceptance test of our FID (weights, value "
        f"range, resizing, distance). {found['device']}, commit {found['commit']}, torch "
        f"{found['torch']}.",
        "",
        "| training images | test images | FID | expected | |",
        "|---|---|---|---|---|",
        f"| {found['training_images']} | {found['test_images']} | {found['fid']:.4f} "
        f"| {EXPECTED} ± {TOLERANCE} | {verdict} |",
        "",
        f"Weights: SHA-256 `{found['weights']}`. Took {found['seconds']:.0f} s.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10's files; else fetched")
    parser.add_argument("--weights", type=Path, help="the weights file; else fetched")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--images", type=int, help="images of each set; all if not given")
    options = parser.parse_args()
    progress = Output()
    device = choose_device(options.device)
    data = load_data("cifar10", data_dir=options.data, progress=progress)
    assert data.test is not None
    file = options.weights or weights_file("inception", progress=progress)
    network = Inception(file, device)
    train, test = (torch.from_numpy(part.images)[: options.images] for part in (data, data.test))
    started = time.perf_counter()
    fid = frechet_distance(
        moments(network, train, "training images", progress),
        moments(network, test, "test images", progress),
    )
    (digest,) = WEIGHTS["inception"].files.values()
    found = {
        "device": device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "commit": commit(),
        "weights": digest,
        "training_images": len(train),
        "test_images": len(test),
        "fid": fid,
        "expected": EXPECTED,
        "tolerance": TOLERANCE,
        "accepted": abs(fid - EXPECTED) <= TOLERANCE,
        "seconds": time.perf_counter() - started,
    }
    if options.images is not None:
        print(f"FID {fid:.2f} of {len(train)} and {len(test)} images: a trial, nothing written")
        return
    path = RESULTS / "fid_cifar10.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found))
    print(table(found))
    if not found["accepted"]:
        sys.exit(f"FID {fid:.4f}, expected {EXPECTED} within {TOLERANCE}")


if __name__ == "__main__":
    main()
