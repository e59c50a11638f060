"""What a network sees in an image: the features in which sets of images are compared.

`Inception` is the network of the Fréchet inception distance (FID), and the only one whose distance
may carry that name. `ReferenceNetwork` needs no weights of others: a ConvNet trained on the
reference set itself. Its numbers compare sets with each other, never with published FIDs.

All sets are compared at 8 bits a pixel and within [0, 1], as image files keep them. Otherwise a
network could tell synthetic from real images by what no picture shows.

What the weights file of `Inception` expects was found out as follows.
- Its TorchScript code neither resizes nor rescales: it goes straight into the first convolution,
  and ends in an 8x8 average pool, which fits maps of 299 px images.
- Its first layer has batch statistics. The mean that a 3x3 filter answers with is the sum of its
  weights times the mean of the input, so 32 stored means tell the three channel means of the images
  it was trained on: -0.037, -0.096, -0.195. ImageNet's (0.485, 0.456, 0.406) become -0.034, -0.092,
  -0.191 as (byte - 128) / 128: red first, and in that range.
- That is also how the original TensorFlow graph prepares bytes, after resizing them to 299 px
  bilinearly with the first pixel on the first (output i looks at i * size / 299), and the default
  of the package that ships the file. The same is done here.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from understudy.data.weights import WEIGHTS, KnownWeights, verified_content
from understudy.errors import InvalidData, InvalidSettings
from understudy.nets.convnet import ConvNet
from understudy.nets.params import Params, moved
from understudy.privacy.disclosure import RealImages
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.training.augmentation import CropScaleOrRotate
from understudy.training.engine import Engine
from understudy.training.sgd import SGD, fit

INCEPTION = "inception"
INCEPTION_SIDE = 299
BATCH = 256


class FeatureNetwork(Protocol):
    """Map images to features."""

    @property
    def name(self) -> str:
        """What the features are, as it is recorded beside every number that rests on them."""

    @property
    def at_once(self) -> int:
        """Images that fit into one call."""

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 images (n, c, h, w) to float32 features (n, d), on the network's device."""


def eight_bits(images: Tensor) -> Tensor:
    """Return images as an image file keeps them: uint8, what lies beyond [0, 1] cut off.

    >>> eight_bits(torch.tensor([-1.0, 0.5, 2.0])).tolist()
    [0, 128, 255]
    """
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point() or not bool(torch.isfinite(images).all()):
        raise InvalidData(
            f"images are {images.dtype} or not all finite; expected bytes or floats in [0, 1]"
        )
    return (images.clamp(0, 1) * 255).round().to(torch.uint8)


def features_of(
    network: FeatureNetwork, images: Tensor, *, progress: Progress | None = None, what: str = ""
) -> Iterator[Tensor]:
    """Yield the features of `images`, some at a time."""
    steps = range(-(-len(images) // network.at_once))
    for step in (progress or Progress()).steps(steps, what=what):
        some = images[step * network.at_once : (step + 1) * network.at_once]
        yield network(eight_bits(some))


class Inception:
    """The network of the Fréchet inception distance: 2048 features."""

    name = INCEPTION

    def __init__(self, file: Path, device: torch.device) -> None:
        self._module = _verified_module(file, WEIGHTS[INCEPTION], device)
        self._device = device
        self.at_once = BATCH if device.type == "cuda" else 16

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 images (n, 1 or 3, h, w) to features (n, 2048); grey becomes three channels."""
        pixels = images.to(self._device).float()
        pixels = pixels.expand(-1, 3, -1, -1)
        with torch.no_grad(), whole_float32():
            prepared = (resized(pixels, INCEPTION_SIDE) - 128) / 128
            return cast(Tensor, self._module(prepared))


def _verified_module(file: Path, known: KnownWeights, device: torch.device) -> torch.nn.Module:
    """Load a TorchScript file if it is the known one: a program of anyone else is not run."""
    content = verified_content(known, file)
    load: Callable[..., torch.nn.Module] = torch.jit.load
    return load(io.BytesIO(content), map_location=device).eval()


def resized(images: Tensor, side: int) -> Tensor:
    """Resize bilinearly with the first pixel on the first: output i looks at i * size / side."""
    rows, columns = (_interpolation(size, side, images) for size in images.shape[2:])
    return rows @ images @ columns.T


def _interpolation(size: int, to: int, like: Tensor) -> Tensor:
    """Return the matrix (to, size) that interpolates linearly along one side."""
    position = torch.arange(to, device=like.device, dtype=torch.float64) * size / to
    low = position.floor().long()
    high = (low + 1).clamp(max=size - 1)
    share = position - low
    matrix = torch.zeros(to, size, device=like.device, dtype=torch.float64)
    matrix.scatter_add_(1, low[:, None], 1 - share[:, None])
    matrix.scatter_add_(1, high[:, None], share[:, None])
    return matrix.to(like.dtype)


@contextlib.contextmanager
def whole_float32() -> Iterator[None]:
    """Keep all bits of float32 in products on a GPU, where a library may take ten of them."""
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


@dataclass(frozen=True, kw_only=True)
class ReferenceTraining:
    """How the network that knows the reference set is trained: the protocol of the PSG paper.

    SGD with momentum 0.9 and weight decay 5e-4, batches of 256, crop/scale/rotate, the learning
    rate a tenth in the second half. That paper counts a thousand epochs of at most 256 images; here
    as many steps, however large the reference set is.
    """

    steps: int = 1000
    width: int = 128
    lr: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "width"):
            if getattr(self, name) < 1:
                raise InvalidSettings(f"{name} is {getattr(self, name)}, expected at least 1")


class ReferenceNetwork:
    """A ConvNet trained on the reference set: its last hidden layer, and its class probabilities.

    It belongs to the reference set: what is computed with it is as private as that.
    """

    at_once = BATCH

    def __init__(
        self,
        real: RealImages,
        facts: PublicFacts,
        *,
        training: ReferenceTraining | None = None,
        engine: Engine | None = None,
    ) -> None:
        how, engine = training or ReferenceTraining(), engine or Engine()
        self.name = f"convnet trained on {real.what}"
        self._device = engine.device
        self._mean, self._std = (
            torch.tensor(value, device=engine.device).view(-1, 1, 1)
            for value in (facts.mean, facts.std)
        )
        self._network = ConvNet(facts.shape, facts.classes, how.width)
        batches = -(-len(real.labels) // BATCH)
        epochs = -(-how.steps // batches)
        self.steps = epochs * batches  # whole epochs: at least what was asked for
        sgd = SGD(
            lr=how.lr, epochs=epochs, batch=BATCH, momentum=0.9, weight_decay=5e-4,
            drop_at=(max(1, epochs // 2),),
        )  # fmt: skip
        generator = public_generator(how.seed, "reference network")
        self._params: Params = fit(
            self._network,
            moved(self._network.init(generator), engine.device),
            self._normalised(real.images),
            real.labels.to(engine.device),
            sgd=sgd,
            generator=generator,
            augment=CropScaleOrRotate(),
            engine=engine,
        )

    def _normalised(self, images: Tensor) -> Tensor:
        return (images.to(self._device).float() / 255 - self._mean) / self._std

    def __call__(self, images: Tensor) -> Tensor:
        """Map uint8 images to what the last layer sees."""
        with torch.no_grad():
            prepared = self._network.prepare(self._normalised(images))
            return self._network.features(self._params, prepared)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probability of each class (n, classes), in float64."""
        with torch.no_grad():
            parts = [
                self._network(self._params, self._normalised(eight_bits(part)))
                for part in torch.split(images, self.at_once)
            ]
            return torch.cat(parts).double().softmax(1)
