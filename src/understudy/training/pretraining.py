"""Pre-training: the small ResNet18 learns to classify a public set, to be an encoder afterwards.

While it learns, batch norm uses the statistics of each batch, as a pure function. At the end, with
the weights fixed, the statistics are computed once over the training set, and from then on they
are constants (`StoredNorm`). Accuracy is measured with those, so it is the encoder's own.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from understudy.data.images import LabelledImages
from understudy.errors import InvalidSettings
from understudy.nets.encoders import COLOURS, NORM_EPS, Norm, ResNet18, StoredNorm
from understudy.nets.params import Params, moved, uniform_fan_in
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.training.augmentation import Augment, Shift
from understudy.training.engine import Engine
from understudy.training.pretrained import EncoderHeader
from understudy.training.sgd import SGD, fit

ALL_RELUS = 17
BATCH = 128
TRUNK = "trunk."
AUGMENTATIONS: dict[str, Augment | None] = {
    "none": None,
    "shift": Shift(),
    "mirror": Shift(mirror=True),
}


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """How the encoder is trained: SGD with momentum 0.9, the learning rate up and then down."""

    epochs: int = 30
    """Epochs of training."""
    lr: float = 0.1
    """Learning rate at its peak, after a fifth of the epochs."""
    width: int = 64
    """Channels of the first of four stages, each twice as wide; 64 is ResNet18."""
    weight_decay: float = 5e-4
    """Pull of weights towards zero."""
    augment: Literal["none", "shift", "mirror"] = "shift"
    """Shift images, or shift and mirror them (not for digits or text), or neither."""
    seed: int = 0
    """Seed of initialisation, order of batches and augmentation."""

    def __post_init__(self) -> None:
        for name in ("epochs", "width"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected at least 1")
        if not 0 < self.lr < float("inf") or not 0 <= self.weight_decay < float("inf"):
            raise InvalidSettings(
                f"lr is {self.lr:g} and weight-decay {self.weight_decay:g}, expected a positive "
                "number and one that is not negative"
            )
        if self.augment not in AUGMENTATIONS:
            raise InvalidSettings(
                f"augment is '{self.augment}', expected one of {', '.join(AUGMENTATIONS)}"
            )


class BatchNorm(nn.Module):
    """Batch norm by the statistics of the batch: for training on public images only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, maps: Tensor) -> Tensor:
        """Normalise each channel over the batch."""
        variance, mean = torch.var_mean(maps, (0, 2, 3), correction=0)
        scale = self.weight * torch.rsqrt(variance + NORM_EPS)
        shift = self.bias - mean * scale
        return maps * scale[:, None, None] + shift[:, None, None]


class Classifier(nn.Module):
    """A ResNet18 with a linear layer on the means of its last maps."""

    def __init__(self, width: int, classes: int, norm: Norm) -> None:
        super().__init__()
        self.trunk = ResNet18(width, norm)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, normalised: Tensor) -> Tensor:
        """Map normalised images (n, 3, h, w) to logits."""
        return cast(Tensor, self.head(self.trunk.maps(normalised, ALL_RELUS)[-1].mean((2, 3))))


@dataclass(frozen=True)
class Learner:
    """The classifier as a pure function of its parameters; images are bytes (n, c, h, w)."""

    width: int
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    is_stored: bool = False
    """Whether norms use stored statistics, which are then among the parameters."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default; each block begins as nothing."""
        params: Params = {}
        for name, like in self.module.named_parameters():
            if like.ndim > 1:
                fan_in = like[0].numel()
                params[name] = uniform_fan_in(like.shape, fan_in=fan_in, generator=generator)
            else:
                params[name] = torch.full(like.shape, float(name.endswith("weight")))
                if name.endswith("norm2.weight"):
                    params[name].zero_()
        return params

    def __call__(self, params: Params, images: Tensor) -> Tensor:
        """Map images to logits (n, classes)."""
        return self.logits(params, self.prepare(images))

    def prepare(self, images: Tensor) -> Tensor:
        """Normalise bytes; grey becomes three channels."""
        mean, std = (
            torch.tensor(value, device=images.device).view(-1, 1, 1)
            for value in (self.mean, self.std)
        )
        return (images.float().expand(-1, COLOURS, -1, -1) / 255 - mean) / std

    def logits(self, params: Params, prepared: Any) -> Tensor:
        """Map normalised images to logits (n, classes)."""
        return cast(Tensor, torch.func.functional_call(self.module, params, (prepared,)))

    @property
    def module(self) -> Classifier:
        """The classifier without values."""
        return _skeleton(self, threading.get_ident())


@lru_cache(maxsize=8)
def _skeleton(learner: Learner, thread: int) -> Classifier:
    norm = StoredNorm if learner.is_stored else BatchNorm
    with torch.device("meta"):
        return Classifier(learner.width, learner.classes, norm)


def train_encoder(
    data: LabelledImages,
    training: Pretraining | None = None,
    *,
    engine: Engine | None = None,
    progress: Progress | None = None,
) -> tuple[Params, EncoderHeader]:
    """Train an encoder on a public set; return its parameters and the header of its file."""
    how, engine, report = training or Pretraining(), engine or Engine(), progress or Progress()
    images, labels = (
        torch.from_numpy(part).to(engine.device) for part in (data.images, data.labels)
    )
    mean, std = _constants(data)
    learner = Learner(how.width, len(data.class_names), mean, std)
    generator = public_generator(how.seed, "pretraining")
    sgd = SGD(
        lr=how.lr, epochs=how.epochs, batch=BATCH, momentum=0.9, weight_decay=how.weight_decay,
        peak_at=max(1, how.epochs // 5) if how.epochs > 1 else None,
    )  # fmt: skip
    params = fit(
        learner,
        moved(learner.init(generator), engine.device),
        images,
        labels,
        sgd=sgd,
        generator=generator,
        augment=AUGMENTATIONS[how.augment],
        engine=engine,
        epochs=lambda epochs: report.steps(epochs, what="pre-training"),
    )
    params |= statistics(learner, params, images, generator)
    trained = Learner(how.width, len(data.class_names), mean, std, is_stored=True)
    accuracy = _accuracy(trained, params, data.test) if data.test else None
    header = EncoderHeader(
        name="resnet18",
        width=how.width,
        shape=data.shape,
        class_names=data.class_names,
        mean=mean,
        std=std,
        trained_on=data.name,
        images=len(data.images),
        images_sha256=hashlib.sha256(np.ascontiguousarray(data.images).data).hexdigest(),
        epochs=how.epochs,
        test_accuracy=accuracy,
    )
    return {name.removeprefix(TRUNK): weight.cpu() for name, weight in params.items()}, header


def statistics(
    learner: Learner, params: Params, images: Tensor, generator: torch.Generator
) -> Params:
    """Return the mean and variance of what each norm sees, over all images.

    A norm's input follows from the norms before it, which use their batches' statistics here;
    the batches are random ones of the size of training.
    """
    norms = {n: m for n, m in learner.module.named_modules() if isinstance(m, BatchNorm)}
    moments: dict[str, Tensor] = {}
    with ExitStack() as hooks, torch.no_grad():
        for name, norm in norms.items():

            def note(_: nn.Module, inputs: tuple[Tensor, ...], *, name: str = name) -> None:
                maps = inputs[0].double()
                seen = torch.stack([maps.mean((0, 2, 3)), maps.square().mean((0, 2, 3))])
                moments[name] = moments.get(name, 0) + seen * len(maps) / len(images)

            hooks.enter_context(norm.register_forward_pre_hook(note))
        for batch in _batches(images, generator):
            learner(params, batch)
    found: Params = {}
    for name, (mean, square) in moments.items():
        found[f"{name}.running_mean"] = mean.float()
        found[f"{name}.running_var"] = (square - mean.square()).clamp(min=0).float()
    return found


def _batches(images: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    for chosen in torch.split(torch.randperm(len(images), generator=generator), BATCH):
        yield images[chosen.to(images.device)]


def _accuracy(learner: Learner, params: Params, test: LabelledImages) -> float:
    device = params["head.bias"].device
    right = 0
    with torch.no_grad():
        for start in range(0, len(test.images), BATCH):
            images, labels = (
                torch.from_numpy(part[start : start + BATCH]).to(device)
                for part in (test.images, test.labels)
            )
            right += int((learner(params, images).argmax(1) == labels).sum())
    return right / len(test.images)


def _constants(data: LabelledImages) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of three channels: known ones, or those of the public images."""
    if data.normalisation:
        mean, std = data.normalisation.mean, data.normalisation.std
    else:
        channels = range(data.shape[0])
        mean = tuple(float(data.images[:, c].mean()) / 255 for c in channels)
        std = tuple(max(1 / 255, float(data.images[:, c].std()) / 255) for c in channels)
    return (mean * COLOURS)[:COLOURS], (std * COLOURS)[:COLOURS]
