"""Generators that papers train on a private statistic: a random code and a class in, an image out.

They are ordinary modules called as pure functions. In training their batch norms use the batch's
own mean and variance and keep nothing, so that a step is a function of its arguments. To draw
images, `statistics` computes means and variances once, from public random codes; with these an
image depends on its own code and class alone.

Sides that a network does not reach by doubling are made a little larger and cropped.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from understudy.nets.class_norm import ClassNormBlocks
from understudy.nets.modules import Doubling, Shape, Sum, beside, draw, skeleton, xavier_bound
from understudy.nets.params import Params, per_channel

FIRST_MAP = 4
"""Sides of the first maps, where a generator doubles them as often as it takes, are at most this.
"""
DECONV_BOUND = 0.05 * math.sqrt(3)
"""Of weights before training: a standard deviation of 0.05."""
SMALL_START = 0.1
"""What the last layer of a generator that starts grey is multiplied by."""


@dataclass(frozen=True)
class GeneratorNetwork(ABC):
    """Describe a generator of images of `shape`, conditioned on a class unless there are none."""

    shape: Shape
    classes: int
    code: int = 5
    """Length of the random code."""

    @abstractmethod
    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image.

        Args:
            keeps: whether norms keep means and variances, to gather or to use them.
        """

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default (Kaiming uniform)."""
        return draw(skeleton(self), generator)

    def codes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes (count, code)."""
        return torch.randn((count, self.code), generator=generator, device=generator.device)

    def codes_to_show(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes of images that are to be judged; their labels go round the classes."""
        return self.codes(count, generator)

    def __call__(
        self,
        params: Params,
        codes: Tensor,
        labels: Tensor | None,
        *,
        statistics: Params | None = None,
    ) -> Tensor:
        """Map codes (n, code) and labels (n,) to images (n, c, h, w), 0 black to 1 white.

        Pixels are within, unless the network says otherwise.

        Args:
            params: the parameters.
            codes: standard normal.
            labels: integers; ignored without classes.
            statistics: fixed means and variances; None, in training, for the batch's own.
        """
        inputs = self._inputs(codes, labels)
        if statistics is None:
            return cast(Tensor, torch.func.functional_call(skeleton(self), params, (inputs,)))
        module = skeleton(self, True).eval()
        return cast(Tensor, torch.func.functional_call(module, (params, statistics), (inputs,)))

    @torch.no_grad()
    def statistics(
        self, params: Params, generator: torch.Generator, *, batches: int = 20, batch: int = 250
    ) -> Params:
        """Return the mean and variance of what each norm sees, averaged over batches.

        Args:
            params: the trained parameters.
            generator: of codes and labels; public.
            batches: how many.
            batch: images in each; labels are uniform.
        """
        device = next(iter(params.values())).device
        module = skeleton(self, True).train()
        kept = {  # a call changes these in place
            name: torch.zeros(like.shape, dtype=like.dtype, device=device)
            for name, like in module.named_buffers()
        }
        for _ in range(batches):
            codes = self.codes(batch, generator).to(device)
            labels = torch.randint(
                max(1, self.classes), (batch,), generator=generator, device=generator.device
            )
            inputs = self._inputs(codes, labels.to(device))
            torch.func.functional_call(module, (params, kept), (inputs,))
        return {name: values for name, values in kept.items() if values.ndim}  # without the counts

    def opinions(self, params: Params, images: Tensor) -> Tensor | None:
        """Return what it thinks of images: probabilities of classes, if it can tell."""
        return None

    def _inputs(self, codes: Tensor, labels: Tensor | None) -> Tensor:
        if not self.classes or labels is None:
            return codes
        # F.one_hot looks at the values of labels, which tracing cannot.
        classes = torch.arange(self.classes, device=labels.device)
        return torch.cat([(labels[:, None] == classes).to(codes.dtype), codes], 1)

    @property
    def _features(self) -> int:
        return self.classes + self.code

    def _first(self, channels: int, sides: tuple[int, int]) -> list[nn.Module]:
        """Return the layers from one-hot class and code to the first maps."""
        linear = nn.Linear(self._features, channels * sides[0] * sides[1])
        return [linear, nn.Unflatten(1, (channels, *sides)), nn.ReLU(), PixelNorm()]

    def _cropped(self, layers: Iterable[nn.Module], sides: tuple[int, int]) -> nn.Sequential:
        """Chain layers whose images have `sides`; cut the middle out if these are too large."""
        _, height, width = self.shape
        crop = [CentreCrop(height, width)] if sides != (height, width) else []
        return nn.Sequential(*layers, *crop)


@dataclass(frozen=True)
class ConvGenerator(GeneratorNetwork):
    """The generator of DP-MERF: two linear layers, then bilinear doublings and convolutions."""

    hidden: int = 200
    channels: tuple[int, ...] = (16, 8)
    """Of the maps before each doubling."""

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        height, width = (-(-side // 2 ** len(self.channels)) for side in self.shape[1:])
        features = self.channels[0] * height * width
        layers = [
            nn.Linear(self._features, self.hidden), batch_norm(self.hidden, keeps), nn.ReLU(),
            nn.Linear(self.hidden, features), batch_norm(features, keeps),
            nn.Unflatten(1, (self.channels[0], height, width)),
        ]  # fmt: skip
        for inputs, outputs in pairwise((*self.channels, self.shape[0])):
            height, width = 2 * height, 2 * width
            doubled = nn.UpsamplingBilinear2d(scale_factor=2)
            layers += [doubled, nn.Conv2d(inputs, outputs, 5, padding=2), nn.ReLU()]
        return self._cropped([*layers[:-1], nn.Sigmoid()], (height, width))


@dataclass(frozen=True)
class DenseGenerator(GeneratorNetwork):
    """The generator of DP-HP: linear layers alone."""

    hidden: tuple[int, ...] = (500, 500)
    norm: bool = True
    """Whether hidden layers are normalised over the batch."""

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise((self._features, *self.hidden)):
            norm = [batch_norm(outputs, keeps)] if self.norm else []
            layers += [nn.Linear(inputs, outputs), *norm, nn.ReLU()]
        last = nn.Linear((self._features, *self.hidden)[-1], math.prod(self.shape))
        return nn.Sequential(*layers, last, nn.Unflatten(1, self.shape), nn.Sigmoid())


@dataclass(frozen=True)
class ResnetGenerator(GeneratorNetwork):
    """The generator of DP-MEPF: residual blocks, each doubling the sides and halving the channels.

    32 px have three blocks (512 channels to 64), 64 px four (1024 to 64), from maps of 4 x 4.
    """

    code: int = 90
    width: int = 64
    """Channels of the last maps."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters: Xavier's uniform weights, PyTorch's default biases."""
        return draw(skeleton(self), generator, bound=xavier_bound)

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        blocks = max(1, math.ceil(math.log2(max(self.shape[1:]) / FIRST_MAP)))
        height, width = (-(-side // 2**blocks) for side in self.shape[1:])
        channels = [self.width * 2**number for number in range(blocks, -1, -1)]
        return self._cropped(
            [
                # A transposed convolution of one pixel is this; its gradient does not compile.
                nn.Linear(self._features, channels[0] * height * width, bias=False),
                nn.Unflatten(1, (channels[0], height, width)),
                *(doubling_block(inputs, outputs, keeps) for inputs, outputs in pairwise(channels)),
                maps_norm(self.width, keeps), nn.ReLU(),
                nn.Conv2d(self.width, self.shape[0], 3, padding=1), nn.Tanh(), BlackToWhite(),
            ],
            (height * 2**blocks, width * 2**blocks),
        )  # fmt: skip


@dataclass(frozen=True)
class DeconvGenerator(GeneratorNetwork):
    """The generator of DataLens and G-PATE: linear layers, then two transposed convolutions.

    The class stands beside the input of every layer.
    """

    code: int = 50
    hidden: int = 1024
    channels: int = 128

    def init(self, generator: torch.Generator) -> Params:
        """Draw small parameters: all images start grey and alike."""
        return draw(skeleton(self), generator, bound=lambda _: DECONV_BOUND)

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        sides = (-(-self.shape[1] // 4), -(-self.shape[2] // 4))
        return self._cropped([Deconv(self, sides, keeps)], (4 * sides[0], 4 * sides[1]))


class Deconv(nn.Module):
    """Layers of a `DeconvGenerator`."""

    def __init__(self, like: DeconvGenerator, sides: tuple[int, int], keeps: bool) -> None:
        super().__init__()
        classes, channels = like.classes, like.channels
        self.classes, self.sides = classes, (channels, *sides)
        features = channels * sides[0] * sides[1]
        self.linear0 = nn.Linear(classes + like.code, like.hidden)
        self.norm0 = batch_norm(like.hidden, keeps)
        self.linear1 = nn.Linear(like.hidden + classes, features)
        self.norm1 = batch_norm(features, keeps)
        self.conv0 = Doubling(channels + classes, channels, 5, padding=2, more=1)
        self.norm2 = maps_norm(channels, keeps)
        self.conv1 = Doubling(channels + classes, like.shape[0], 5, padding=2, more=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map one-hot class and code (n, features) to images."""
        one_hot = inputs[:, : self.classes]
        hidden = torch.relu(self.norm0(self.linear0(inputs)))
        hidden = torch.relu(self.norm1(self.linear1(torch.cat([hidden, one_hot], 1))))
        maps = hidden.view(-1, *self.sides)
        maps = torch.relu(self.norm2(self.conv0(beside(maps, one_hot))))
        return torch.sigmoid(self.conv1(beside(maps, one_hot)))


@dataclass(frozen=True)
class TransposedGenerator(GeneratorNetwork):
    """The generator of DP-Sinkhorn for 28 px: transposed convolutions, the last two doubling."""

    code: int = 16
    width: int = 64
    """Channels of the last maps; the first have four times as many."""

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        sides = (-(-self.shape[1] // 4), -(-self.shape[2] // 4))
        wide, middle, narrow = 4 * self.width, 2 * self.width, self.width
        convolutions = [
            nn.ConvTranspose2d(self._features, wide, sides, bias=False),
            nn.ConvTranspose2d(wide, middle, 4, 2, 1, bias=False),
            nn.ConvTranspose2d(middle, narrow, 4, 2, 1, bias=False),
        ]
        layers: list[nn.Module] = [nn.Unflatten(1, (self._features, 1, 1))]
        for layer in convolutions:
            layers += [layer, maps_norm(layer.out_channels, keeps), nn.LeakyReLU(0.2)]
        layers += [nn.Conv2d(narrow, self.shape[0], 3, padding=1), nn.Tanh(), BlackToWhite()]
        return self._cropped(layers, (4 * sides[0], 4 * sides[1]))


@dataclass(frozen=True)
class PixelNormGenerator(GeneratorNetwork):
    """A generator like the small one of GS-WGAN: a linear layer, then doublings and convolutions.

    Its norms are of one pixel's channels, so an image never depends on its batch.
    """

    code: int = 10
    width: int = 64
    """Channels of the last maps; the first have two or four times as many."""
    doublings: int = 2

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters; a small last layer, so that first images are grey."""
        params = draw(skeleton(self), generator, bound=xavier_bound)
        last = list(params)[-2]
        return params | {last: SMALL_START * params[last]}

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        height, width = (-(-side // 2**self.doublings) for side in self.shape[1:])
        channels = [self.width * 2**number for number in range(self.doublings, -1, -1)]
        layers = self._first(channels[0], (height, width))
        for inputs, outputs in pairwise(channels):
            height, width = 2 * height, 2 * width
            doubled = nn.Upsample(scale_factor=2)
            layers += [doubled, nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), PixelNorm()]
        layers += [nn.Conv2d(channels[-1], self.shape[0], 3, padding=1), nn.Sigmoid()]
        return self._cropped(layers, (height, width))


@dataclass(frozen=True)
class DCGANGenerator(GeneratorNetwork):
    """The prior of PSG, which took it from GS-WGAN: a linear layer, then transposed convolutions.

    Norms are of one pixel's channels, so an image never depends on its batch. The authors' layers
    are made for 28 px; for other sizes each doubles the sides, and there are two or more.
    """

    code: int = 10
    width: int = 64
    """Channels of the maps before the last layer; the first have twice or four times as many."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    """Of each channel's pixels, which the last layer gives in these units, without bounds. If there
    are none, a sigmoid keeps pixels within [0, 1]."""

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        last = InUnits(self.mean, self.std) if self.mean else nn.Sigmoid()
        if self.shape[1:] == (28, 28):
            wide, middle, narrow = 4 * self.width, 2 * self.width, self.width
            return nn.Sequential(
                *self._first(wide, (4, 4)),
                nn.ConvTranspose2d(wide, middle, 5), CentreCrop(7, 7), nn.ReLU(), PixelNorm(),
                nn.ConvTranspose2d(middle, narrow, 5), nn.ReLU(), PixelNorm(),
                Doubling(narrow, self.shape[0], 8), last,
            )  # fmt: skip
        doublings = max(2, math.ceil(math.log2(max(self.shape[1:]) / FIRST_MAP)))
        height, width = (-(-side // 2**doublings) for side in self.shape[1:])
        channels = [self.width * 2**number for number in range(doublings - 1, -1, -1)]
        layers = self._first(channels[0], (height, width))
        for inputs, outputs in pairwise((*channels, self.shape[0])):
            layers += [Doubling(inputs, outputs, 4, padding=1), nn.ReLU(), PixelNorm()]
        return self._cropped([*layers[:-2], last], (height * 2**doublings, width * 2**doublings))


@dataclass(frozen=True)
class ClassNormGenerator(GeneratorNetwork):
    """Residual blocks whose norms have a scale and a shift for each class, as BigGAN's do.

    The code alone makes the first maps. Norms are of groups of one image's channels, so an image
    never depends on its batch.
    """

    code: int = 60
    width: int = 32
    """Channels of the last maps; each block has half the channels of the one before."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters: Xavier's uniform weights, PyTorch's default biases."""
        return draw(skeleton(self), generator, bound=xavier_bound)

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        blocks = max(1, math.ceil(math.log2(max(self.shape[1:]) / FIRST_MAP)))
        height, width = (-(-side // 2**blocks) for side in self.shape[1:])
        channels = [self.width * 2**number for number in range(blocks, -1, -1)]
        layers = ClassNormBlocks(self.classes, self.code, channels, (height, width), self.shape[0])
        return self._cropped([layers], (height * 2**blocks, width * 2**blocks))


def batch_norm(features: int, keeps: bool) -> nn.Module:
    """Normalise features over a batch; statistics that are kept are averages over all batches."""
    return nn.BatchNorm1d(features, momentum=None, track_running_stats=keeps)


def maps_norm(channels: int, keeps: bool) -> nn.Module:
    """Normalise channels over a batch and all pixels."""
    return nn.BatchNorm2d(channels, momentum=None, track_running_stats=keeps)


def doubling_block(inputs: int, outputs: int, keeps: bool) -> nn.Module:
    """Double the sides of maps: two convolutions, beside a projection."""
    body = nn.Sequential(
        maps_norm(inputs, keeps), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, padding=1),
        maps_norm(outputs, keeps), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
    )  # fmt: skip
    return Sum(body, nn.Sequential(nn.Conv2d(inputs, outputs, 1), nn.Upsample(scale_factor=2)))


class PixelNorm(nn.Module):
    """Divide each pixel's channels by their root mean square."""

    def forward(self, maps: Tensor) -> Tensor:
        """Keep the shape (n, c, h, w)."""
        return maps / (maps.square().mean(1, keepdim=True) + 1e-8).sqrt()


class CentreCrop(nn.Module):
    """Cut the middle out of images."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    def forward(self, images: Tensor) -> Tensor:
        """Map (n, c, h, w) to (n, c, height, width)."""
        top, left = (images.shape[2] - self.height) // 2, (images.shape[3] - self.width) // 2
        return images[..., top : top + self.height, left : left + self.width]


class InUnits(nn.Module):
    """Bring images in units of each channel's standard deviation, from its mean, to pixels."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, images: Tensor) -> Tensor:
        """Rescale; pixels may be below 0 or above 1."""
        return images * per_channel(self.std, images) + per_channel(self.mean, images)


class BlackToWhite(nn.Module):
    """Bring [-1, 1] to [0, 1]."""

    def forward(self, images: Tensor) -> Tensor:
        """Rescale."""
        return images / 2 + 0.5


GENERATORS: dict[str, type[GeneratorNetwork]] = {
    "class-norm": ClassNormGenerator,
    "conv": ConvGenerator,
    "dcgan": DCGANGenerator,
    "deconv": DeconvGenerator,
    "dense": DenseGenerator,
    "pixel-norm": PixelNormGenerator,
    "resnet": ResnetGenerator,
    "transposed": TransposedGenerator,
}
"""Name -> network; the names stand in files."""
