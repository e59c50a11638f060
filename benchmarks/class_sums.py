"""Memory and time of one large `class_sums`: 300 000 features, 10 classes.

Memory does not depend on the number of records, so a CPU is given fewer of them. The features are
cheap (products of pixels and constants), so what is measured is the release, not an encoder.

Writes docs/results/class_sums_{cpu,cuda}.{json,md}.

    python benchmarks/class_sums.py [--records 200000]
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from common import RESULTS, commit, device_name
from understudy.data.images import labelled_images
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Block, Budget, one_embedding
from understudy.privacy.registration import RegistrationTerms, register
from understudy.privacy.releases.class_sums import Embedding
from understudy.privacy.vault import Vault
from understudy.provenance import forget_peak_memory
from understudy.training.engine import Engine, choose_device

CLASSES, SIDE, FEATURES = 10, 16, 300_032
LIMIT_GIB = 2.0


def memory(device: torch.device) -> float:
    """Return the most memory used so far, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(records: int) -> dict[str, object]:
    device = choose_device("auto")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (records, 1, SIDE, SIDE), dtype=np.uint8)
    data = labelled_images(images, np.arange(records) % CLASSES)
    constants = torch.randn(FEATURES // SIDE**2, device=device)
    blocks = (Block(name="features", dimension=FEATURES),)

    def embed(image: torch.Tensor) -> list[torch.Tensor]:
        features = (image.flatten()[:, None] * constants).flatten()
        return [features / features.norm()]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ledger = Ledger(folder / "ledger")
        registration = register(ledger, data, RegistrationTerms())
        vault = Vault(data, registration, ledger, engine=Engine(device))
        plan = one_embedding(blocks, registration.facts)
        budget = Budget(epsilon=1.0, delta=1e-6)
        curator = vault.open(plan, budget, ledger, workspace=folder / "run", run_id="run")
        before, started = memory(device), time.perf_counter()
        forget_peak_memory()
        sums = curator.class_sums(Embedding(embed, blocks))["features"]
        found = {"records": records, "features": FEATURES, "classes": CLASSES}
        found |= {"seconds": time.perf_counter() - started, "gib": memory(device) - before}
        ledger.close()
    assert sums.shape == (CLASSES, FEATURES)
    return found | {"device": device_name(), "kind": device.type, "commit": commit()}


def table(found: dict) -> str:
    return "\n".join(
        [
            "# One large class_sums",
            "",
            "Written by `benchmarks/class_sums.py`: one release of all records, sums in float64, "
            "noise included, memory beyond what held the records before it (limit "
            f"{LIMIT_GIB:g} GiB). {found['device']}, seed 0, commit {found['commit']}.",
            "",
            "| records | features | classes | seconds | GiB |",
            "|---|---|---|---|---|",
            f"| {found['records']} | {found['features']} | {found['classes']} "
            f"| {found['seconds']:.1f} | {found['gib']:.2f} |",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    fewer = 4000 if not torch.cuda.is_available() else 200_000
    parser.add_argument("--records", type=int, default=fewer)
    found = measure(parser.parse_args().records)
    name = f"class_sums_{found['kind']}"
    (RESULTS / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(table(found))
    print(table(found))
    if found["gib"] > LIMIT_GIB:
        raise SystemExit(f"{found['gib']:.2f} GiB, expected at most {LIMIT_GIB:g}")


if __name__ == "__main__":
    main()
