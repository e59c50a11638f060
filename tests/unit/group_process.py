"""One of several processes: makes releases of injected samples, without noise, and saves them.

python group_process.py FOLDER (under RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; or alone)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F

from door import chosen, features_of, some_images
from understudy.nets.convnet import ConvNet
from understudy.privacy.briefing import Briefing
from understudy.privacy.group import joined
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget, Plan, PlannedRelease
from understudy.privacy.randomness import InjectedRandomness
from understudy.privacy.registration import RegistrationTerms, register
from understudy.privacy.vault import Vault, follow
from understudy.training.engine import Engine

SELECTED = (0, 3, 4, 7, 10, 11, 12, 20, 29, 30, 31)
NETWORK = ConvNet((1, 8, 8), 3, width=4)
FEATURES = features_of(lambda image: image.flatten() / 8)
PLAN = Plan(
    (
        PlannedRelease(
            name="gradient", kind="gradient", count=2, dimension=1000, sampling_rate=0.5
        ),
        PlannedRelease(
            name="class_sums",
            kind="class_sums",
            count=1,
            dimension=192,
            blocks=FEATURES.blocks,
        ),
    )
)


def loss(params, image, label):
    return F.cross_entropy(NETWORK(params, image[None]), label[None])


def main(folder: Path, epsilon: float, others: float) -> None:
    data = some_images(41)
    with joined(torch.device("cpu")) as group:
        mine = [unit // group.size for unit in SELECTED if unit % group.size == group.rank]
        randomness = InjectedRandomness(
            uniform=lambda count: chosen(*mine, of=count),
            normal=lambda count: torch.full((count,), group.rank + 1.0, dtype=torch.float64),
        )
        if group.leads:
            ledger = Ledger(folder / "ledger")
            vault = Vault(data, register(ledger, data, RegistrationTerms()), ledger, group=group)
            curator = vault.open(
                PLAN,
                Budget(epsilon=epsilon, delta=1e-5, accountant="renyi"),
                ledger,
                workspace=folder / "w",
                run_id="r",
                allow_large_delta=True,
                randomness=randomness,
            )
        else:
            briefing = Briefing.from_bytes(group.bytes_from_leader(b""))
            curator = follow(
                briefing, data, PLAN, engine=Engine(), group=group, randomness=randomness
            )
        # The others' parameters are off: what counts is the leader's.
        params = NETWORK.init(torch.Generator().manual_seed(group.rank))
        found = {"class_sums": curator.class_sums(FEATURES)["features"]}
        clip_norm = 0.1 if group.leads else others
        found |= curator.gradient(loss, params, clip_norm=clip_norm)
        curator.checkpoint(1, {})
        found["again"] = torch.cat(
            [part.flatten() for part in curator.gradient(loss, params, clip_norm=5.0).values()]
        )
        curator.checkpoint(2, {})
        found["noise_multiplier"] = torch.tensor(curator.calibration.noise_multiplier)
        torch.save(found, folder / f"rank{group.rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), float((*sys.argv, "0.1")[3]))
