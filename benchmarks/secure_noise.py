"""What noise from a cipher costs: a PSG step with Philox and with AES-256-CTR, taking turns.

Prints milliseconds for drawing the noise of a release alone, for a whole release, and for an outer
step (release and image step), and the ratios; writes docs/results/secure_noise_<device>.{json,md}.
On a CPU, the processor's time of one thread: what else the machine does counts for little.

    python benchmarks/secure_noise.py [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import cryptography
import torch

from common import RESULTS, commit, device_name
from psg_speed import CLIP, CONFIG, FACTS, UNITS, Work, measured
from understudy.methods.psg import PSG
from understudy.nets.params import parameter_count
from understudy.privacy.randomness import InjectedRandomness, SecretSource
from understudy.privacy.records import Records
from understudy.privacy.releases.gradient import gradient
from understudy.privacy.sampling import Access
from understudy.privacy.secure import secret_randomness
from understudy.training.engine import Engine, choose_device
from understudy.training.sgd import RecordLoss

ROUNDS = 3
PARTS = ("draw", "release", "step")
NAMES = {"draw": "noise of a release", "release": "release", "step": "outer step"}


def same_batches(source: SecretSource) -> InjectedRandomness:
    """Let all batches be of 256 records, for on a CPU the time goes by their number."""
    return InjectedRandomness(
        uniform=lambda count: (torch.arange(count) >= CONFIG.batch).double(), normal=source.normal
    )


def work(device: torch.device, *, secure: bool) -> dict[str, Work]:
    """Return what is measured, with generators of one kind."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (UNITS, *FACTS.shape), dtype=torch.uint8, generator=generator)
    labels = (torch.arange(UNITS) % 10).to(device)
    places, starts = torch.arange(UNITS), torch.arange(UNITS + 1)
    source, engine = secret_randomness(device, secure=secure), Engine(device)
    access = Access(
        records=Records(pixels.to(device), labels, places, starts, one_each=True),
        randomness=source if device.type == "cuda" else same_batches(source),
        units=UNITS, classes=10, sampling_rate=CONFIG.batch / UNITS, noise_multiplier=1.0,
        engine=engine,
    )  # fmt: skip
    psg = PSG(CONFIG, FACTS, seed=0)
    network, theta = psg.network.on(device), psg._draw(0, device)
    loss, image_step = RecordLoss(network, FACTS.mean, FACTS.std), psg._image_step(network, 1.0)
    own = torch.arange(10, device=device).repeat_interleave(CONFIG.images_per_class)
    images = torch.randn((len(own), *FACTS.shape), device=device)
    state = {"images": images}, {"images": torch.zeros_like(images)}
    rate, count = torch.full((), 0.1, device=device), parameter_count(theta)

    def release() -> Any:
        return gradient(access, loss, theta, clip_norm=CLIP)

    def step() -> Any:
        return engine.run(image_step, state, {"labels": own}, theta, release(), rate)

    return {"draw": (lambda: source.normal(count), 1), "release": (release, 1), "step": (step, 1)}


def table(found: dict[str, Any]) -> str:
    lines = [
        f"# Noise from a cipher on {found['device']}",
        "",
        "Written by `benchmarks/secure_noise.py`. PSG at width 128, 28 px, batches of 256, 10 "
        f"images per class: {found['coordinates']} coordinates per release. Commit "
        f"{found['commit']}, torch {found['torch']}, cryptography {found['cryptography']}. Time by "
        f"{found['clock']}.",
        "",
        "| | Philox, ms | AES-256-CTR, ms | ratio |",
        "|---|---|---|---|",
    ]
    for part in PARTS:
        usual, secure = found["Philox"][part], found["AES-256-CTR"][part]
        lines.append(f"| {NAMES[part]} | {usual:.3f} | {secure:.3f} | {secure / usual:.2f} |")
    more = found["AES-256-CTR"]["draw"] - found["Philox"]["draw"]
    lines += [
        "",
        f"The cipher's draw alone takes {more:.3f} ms more, which is "
        f"{more / found['Philox']['step']:.2%} of an outer step with Philox.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    device = choose_device(parser.parse_args().device)
    found: dict[str, Any] = {
        "device": device_name(),
        "torch": torch.__version__,
        "cryptography": cryptography.__version__,
        "commit": commit(),
        "clock": "the wall" if device.type == "cuda" else "the processor, one thread",
        "coordinates": parameter_count(PSG(CONFIG, FACTS, seed=0)._draw(0, device)),
        "Philox": {},
        "AES-256-CTR": {},
    }
    if device.type == "cpu":
        torch.set_num_threads(1)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    usual, secure = (work(device, secure=choice) for choice in (False, True))
    for part in PARTS:
        found["Philox"][part], found["AES-256-CTR"][part] = measured(
            device, usual[part], secure[part], rounds=ROUNDS, clock=clock
        )
    path = RESULTS / f"secure_noise_{device.type}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
