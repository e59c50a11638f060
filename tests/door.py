"""Small worlds for tests: data, vaults, curators, and draws that a test decides."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from understudy.data.images import LabelledImages, labelled_images
from understudy.files import canonical_json
from understudy.privacy.curator import Curator
from understudy.privacy.group import Group
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Block, Budget, Plan, PlannedRelease
from understudy.privacy.randomness import InjectedRandomness
from understudy.privacy.records import Records
from understudy.privacy.registration import RegistrationTerms, register
from understudy.privacy.releases.class_sums import Embedding
from understudy.privacy.sampling import Access
from understudy.privacy.vault import Vault
from understudy.training.engine import Engine

CPU = torch.device("cpu")
LOOSE = Budget(epsilon=10.0, delta=1e-5, accountant="renyi")


def some_images(
    count: int = 40,
    *,
    classes: int = 3,
    shape: tuple[int, ...] = (1, 8, 8),
    units: Any = None,
    seed: int = 0,
    **described: Any,
) -> LabelledImages:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    labels = np.arange(count) % classes
    return labelled_images(images, labels, units=units, classes=classes, **described)


def records_of(data: LabelledImages, *, max_per_unit: int | None = None) -> Records:
    units = np.arange(int(data.units.max()) + 1)
    one_each = data.unit == "record"
    return Records.from_units(data, units, max_per_unit=max_per_unit, device=CPU, one_each=one_each)


def chosen(*units: int, of: int) -> Tensor:
    """Uniform draws that select exactly `units` at any rate below 1."""
    draws = torch.full((of,), 0.999999, dtype=torch.float64)
    draws[list(units)] = 0.0
    return draws


def access_to(
    data: LabelledImages,
    *,
    select: tuple[int, ...] | None = None,
    sampling_rate: float = 0.5,
    noise_multiplier: float = 0.0,
    noise: float = 0.0,
    max_per_unit: int | None = None,
) -> Access:
    """Open `data` for one release with a chosen batch (all units by default) and constant noise."""
    units = int(data.units.max()) + 1
    select = tuple(range(units)) if select is None else select
    randomness = InjectedRandomness(
        uniform=lambda count: chosen(*select, of=count),
        normal=lambda count: torch.full((count,), noise, dtype=torch.float64),
    )
    return Access(
        records=records_of(data, max_per_unit=max_per_unit),
        randomness=randomness,
        units=units,
        classes=len(data.class_names),
        sampling_rate=sampling_rate,
        noise_multiplier=noise_multiplier,
        engine=Engine(),
    )


def without(data: LabelledImages, unit: int) -> LabelledImages:
    """Empty one slot: its records are gone, every other unit keeps its slot."""
    keep = data.units != unit
    slots = data.units[keep]
    emptied = LabelledImages(
        data.images[keep], data.labels[keep], slots, data.class_names, unit=data.unit
    )
    if unit == data.units.max():  # a trailing empty slot needs a slot to exist
        raise ValueError("choose another unit")
    return emptied


def a_vault(ledger: Ledger, data: LabelledImages | None = None, **terms: Any) -> Vault:
    data = data or some_images()
    return Vault(data, register(ledger, data, RegistrationTerms(**terms)), ledger)


@dataclass(frozen=True)
class OneOfTwo(Group):
    """A process of two whose network is a list: what it sends is kept, and comes back to it."""

    size: int = 2
    sent: list[Any] = field(default_factory=list)

    def add_up(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor.clone())
        return tensor

    def from_leader(self, tensor: Tensor) -> Tensor:
        return tensor

    def bytes_from_leader(self, content: bytes) -> bytes:
        self.sent.append(content)
        return content

    def all_say(self, yes: bool) -> bool:
        return yes

    def agree_on(self, bound: float) -> None:
        pass

    def agrees(self, wish: bool) -> bool:
        return wish


counter = itertools.count()


def open_curator(
    ledger: Ledger,
    folder: Path,
    *,
    vault: Vault | None = None,
    count: int = 3,
    kind: Any = "gradient",
    dimension: int = 100_000,
    sampling_rate: float = 1.0,
    budget: Budget = LOOSE,
    run_id: str | None = None,
    blocks: tuple[Block, ...] = (),
    **options: Any,
) -> Curator:
    vault = vault or a_vault(ledger)
    line = PlannedRelease(
        name=kind,
        kind=kind,
        count=count,
        dimension=dimension,
        sampling_rate=sampling_rate,
        blocks=blocks,
    )
    run_id = run_id or secrets.token_hex(4)
    options.setdefault("allow_large_delta", True)
    return vault.open(
        Plan((line,)), budget, ledger, workspace=folder / run_id, run_id=run_id, **options
    )


def halved_noise() -> InjectedRandomness:
    """Return draws as they should be, but for noise of half the size."""
    return InjectedRandomness(
        uniform=lambda count: torch.rand(count, dtype=torch.float64),
        normal=lambda count: 0.5 * torch.randn(count, dtype=torch.float64),
    )


def features_of(
    function: Any, *, dimension: int = 64, bound: float = 1.0, **declared: Any
) -> Embedding:
    """An embedding of one block, called `features`."""
    block = Block(name="features", dimension=dimension, bound=bound, **declared)
    return Embedding(lambda image: [function(image)], (block,))


def linear_loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
    """A loss whose gradient depends on the record."""
    logits = params["weight"] @ image.flatten() + params["bias"]
    return torch.nn.functional.cross_entropy(logits[None], label[None])


def linear_params(classes: int = 3, pixels: int = 64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(classes, pixels, generator=generator) * 0.1,
        "bias": torch.zeros(classes),
    }


def seal(content: dict) -> bytes:
    """Close a certificate again, as a forger without the ledger's key could."""
    content = {key: value for key, value in content.items() if key != "seal"}
    return canonical_json(content | {"seal": hashlib.sha256(canonical_json(content)).hexdigest()})
