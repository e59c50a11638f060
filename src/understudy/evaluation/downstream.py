"""Downstream accuracy: fresh networks trained on the synthetic set, tested on real images.

The protocol is that of the PSG paper: SGD with momentum 0.9 and weight decay 5e-4, learning rate
0.01 and a tenth of it in the second half, batches of 256, crop/scale/rotate augmentation, accuracy
of the last epoch. Nothing is selected on test data.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

from understudy.errors import InvalidData, InvalidSettings
from understudy.nets.convnet import ConvNet
from understudy.nets.params import moved
from understudy.privacy.disclosure import RealImages
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.augmentation import crop_scale_rotate
from understudy.training.engine import Engine
from understudy.training.sgd import SGD, fit

TEST_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How to train and how often."""

    networks: int = 3
    epochs: int = 1000
    width: int = 128
    lr: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("networks", "epochs", "width"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected at least 1")


SAME = ("protocol", "model", "trained_on", "tested_on", "options")
"""Measurements that agree in these are repetitions of one another."""


@dataclass(frozen=True)
class DownstreamAccuracy:
    """Test accuracy (a share) of each network."""

    accuracies: tuple[float, ...]
    tested_on: str
    test_images: int
    protocol: Protocol

    @property
    def mean(self) -> float:
        """Mean accuracy."""
        return fmean(self.accuracies)

    @property
    def std(self) -> float:
        """Standard deviation over the networks."""
        return pstdev(self.accuracies)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "protocol": "psg",
            "model": "convnet",
            "trained_on": "synthetic",
            "tested_on": self.tested_on,
            "test_images": self.test_images,
            "accuracies": list(self.accuracies),
            "mean": self.mean,
            "std": self.std,
            "options": vars(self.protocol),
        }


def downstream_accuracy(
    synthetic: SyntheticSet,
    real: RealImages,
    facts: PublicFacts,
    *,
    protocol: Protocol,
    engine: Engine | None = None,
    progress: Progress,
) -> DownstreamAccuracy:
    """Train ConvNets on `synthetic` and test them on `real`."""
    if real.images.shape[1:] != synthetic.images.shape[1:]:
        raise InvalidData(
            f"test images have shape {tuple(real.images.shape[1:])}, the synthetic ones "
            f"{tuple(synthetic.images.shape[1:])}; expected the same"
        )
    if int(real.labels.max()) >= facts.classes:
        raise InvalidData(
            f"the test set has label {int(real.labels.max())}, the synthetic set {facts.classes} "
            "classes; expected the same classes"
        )
    engine = engine or Engine()
    device = engine.device
    mean, std = (torch.tensor(v, device=device).view(-1, 1, 1) for v in (facts.mean, facts.std))
    train, labels = (synthetic.images.to(device) - mean) / std, synthetic.labels.to(device)
    network = ConvNet(facts.shape, facts.classes, protocol.width)
    sgd = SGD(
        lr=protocol.lr,
        epochs=protocol.epochs,
        momentum=0.9,
        weight_decay=5e-4,
        drop_at=protocol.epochs // 2,
    )
    accuracies = []
    for number in progress.steps(range(protocol.networks)):
        generator = public_generator(protocol.seed, "evaluation", number)
        params = moved(network.init(generator), device)
        params = fit(
            network,
            params,
            train,
            labels,
            sgd=sgd,
            generator=generator,
            augment=crop_scale_rotate,
            engine=engine,
        )
        predicted = torch.cat(
            [
                network(params, (part.to(device).float() / 255 - mean) / std).argmax(1).cpu()
                for part in torch.split(real.images, TEST_BATCH)
            ]
        )
        accuracies.append(_share_equal(predicted, real.labels))
    return DownstreamAccuracy(tuple(accuracies), real.what, len(real.labels), protocol)


def _share_equal(a: Tensor, b: Tensor) -> float:
    return float((a == b).double().mean())
