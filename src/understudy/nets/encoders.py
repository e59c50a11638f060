"""Public encoders: networks trained on public images, as maps from an image to its activations.

A method may compare private with synthetic images by what such a network sees in them. For that the
map has to be record by record: what one image becomes must not depend on others. So batch norm is
applied with stored statistics alone, as an affine map; no code here computes statistics of a batch.

The networks are fully convolutional, so images of any size work, at their own size: nothing is
scaled. Grey images are repeated to three channels. Poolings that would leave no pixel are left out.

| name | layers: the outputs of | values at 28, 32, 64 px |
|---|---|---|
| vgg16 | each ReLU (13) | 203 520, 276 480, 1 105 920 |
| vgg19 | each ReLU (16) | 221 184, 303 104, 1 212 416 |
| mobilenetv2 | the stem and each inverted residual (18) | 16 272, 19 872, 79 488 |
| resnet18 | each ReLU but the last (16) | 425 984, 548 864, 2 195 456 |
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from understudy.errors import InvalidData, InvalidSettings
from understudy.nets.modules import Shape, skeleton
from understudy.nets.params import Params

COLOURS = 3
NORM_EPS = 1e-5
ALL_LAYERS = ":"
_LAYERS = re.compile(r"(-?\d+)?:(-?\d+)?")
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Conv(nn.Conv2d):
    """A convolution that computes in the type of its maps, whatever type its weights have."""

    def forward(self, maps: Tensor) -> Tensor:
        """Convolve."""
        bias = None if self.bias is None else self.bias.to(maps.dtype)
        return F.conv2d(
            maps, self.weight.to(maps.dtype), bias, self.stride, self.padding, groups=self.groups
        )


class StoredNorm(nn.Module):
    """Batch norm by stored statistics: a scale and a shift, the same for every record."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.running_mean: Tensor
        self.running_var: Tensor
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, maps: Tensor) -> Tensor:
        """Scale and shift each channel."""
        scale = self.weight * torch.rsqrt(self.running_var + NORM_EPS)
        shift = self.bias - self.running_mean * scale
        scale, shift = (part.to(maps.dtype)[:, None, None] for part in (scale, shift))
        return maps * scale + shift


Norm = Callable[[int], nn.Module]


class Trunk(nn.Module, ABC):
    """The convolutions of a network, from images in [0, 1] to the maps of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.std: Tensor
        self.register_buffer("mean", torch.empty(COLOURS))
        self.register_buffer("std", torch.empty(COLOURS))

    def forward(self, images: Tensor, stop: int, precision: torch.dtype | None) -> list[Tensor]:
        """Normalise images and return the first `stop` layers' maps, computed in `precision`."""
        colours = images.expand(-1, COLOURS, -1, -1)
        seen = (colours - self.mean[:, None, None]) / self.std[:, None, None]
        return self.maps(seen.to(precision or seen.dtype), stop)

    @abstractmethod
    def maps(self, maps: Tensor, stop: int) -> list[Tensor]:
        """Map normalised images to the first `stop` layers' maps."""


class Vgg(Trunk):
    """The convolutions of VGG without batch norm; its layers are the outputs of the ReLUs."""

    def __init__(self, convolutions: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = COLOURS
        for filters, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
            layers += [nn.MaxPool2d(2)] if layers else []
            for _ in range(count):
                layers += [Conv(inputs, filters, 3, padding=1), nn.ReLU()]
                inputs = filters
        self.features = nn.Sequential(*layers)  # with the places, so the names, of torchvision

    def maps(self, maps: Tensor, stop: int) -> list[Tensor]:
        """Map normalised images to the first `stop` layers' maps."""
        found: list[Tensor] = []
        for layer in self.features:
            if len(found) == stop:
                break
            if isinstance(layer, nn.MaxPool2d) and min(maps.shape[2:]) < 2:
                continue
            maps = layer(maps)
            if isinstance(layer, nn.ReLU):
                found.append(maps)
        return found


class InvertedResidual(nn.Module):
    """The block of MobileNetV2: widen, filter each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, widen: int) -> None:
        super().__init__()
        hidden = inputs * widen
        widening = [_conv_norm(inputs, hidden, 1)] if widen > 1 else []
        self.conv = nn.Sequential(
            *widening,
            _conv_norm(hidden, hidden, 3, stride=stride, groups=hidden),
            Conv(hidden, outputs, 1, bias=False),
            StoredNorm(outputs),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, maps: Tensor) -> Tensor:
        """Apply the block, and add its input where the sizes allow it."""
        change = cast(Tensor, self.conv(maps))
        return maps + change if self.is_residual else change


def _conv_norm(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Module:
    padding = kernel // 2
    conv = Conv(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(conv, StoredNorm(outputs), nn.ReLU6())


class MobileNetV2(Trunk):
    """MobileNetV2; its layers are the outputs of the stem and of each block."""

    STAGES = (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    )  # fmt: skip
    """Factor of widening, channels, blocks, stride of the first block."""

    def __init__(self) -> None:
        super().__init__()
        blocks, inputs = [_conv_norm(COLOURS, 32, 3, stride=2)], 32
        for widen, outputs, count, stride in self.STAGES:
            for number in range(count):
                step = 1 if number else stride
                blocks.append(InvertedResidual(inputs, outputs, stride=step, widen=widen))
                inputs = outputs
        self.features = nn.ModuleList(blocks)

    def maps(self, maps: Tensor, stop: int) -> list[Tensor]:
        """Map normalised images to the first `stop` layers' maps."""
        found: list[Tensor] = []
        for block in self.features[:stop]:
            maps = block(maps)
            found.append(maps)
        return found


class BasicBlock(nn.Module):
    """The block of ResNet18."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv3(inputs, outputs, stride), norm(outputs)
        self.conv2, self.norm2 = _conv3(outputs, outputs), norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            projection = Conv(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, norm(outputs))

    def forward(self, maps: Tensor) -> tuple[Tensor, Tensor]:
        """Return what both ReLUs of the block put out."""
        inner = F.relu(self.norm1(self.conv1(maps)))
        return inner, F.relu(self.norm2(self.conv2(inner)) + self.shortcut(maps))


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return Conv(inputs, outputs, 3, stride, 1, bias=False)


class ResNet18(Trunk):
    """ResNet18 for small images: 3 x 3 stem, no pooling; its layers are the outputs of the ReLUs.

    Args:
        width: channels of the first stage; 64 in the paper.
        norm: what stands for batch norm; for training something else.
    """

    def __init__(self, width: int, norm: Norm = StoredNorm) -> None:
        super().__init__()
        self.conv, self.norm = _conv3(COLOURS, width), norm(width)
        blocks, inputs = [], width
        for stage in range(4):
            for number in range(2):
                stride, outputs = (2 if stage and not number else 1), width * 2**stage
                blocks.append(BasicBlock(inputs, outputs, stride=stride, norm=norm))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)

    def maps(self, maps: Tensor, stop: int) -> list[Tensor]:
        """Map normalised images to the first `stop` layers' maps."""
        maps = F.relu(self.norm(self.conv(maps)))
        found = [maps]
        for block in self.blocks:
            if len(found) >= stop:
                break
            inner, maps = block(maps)
            found += [inner, maps]
        return found[:stop]


@dataclass(frozen=True)
class Architecture:
    """A network that can be an encoder."""

    layers: int
    build: Callable[[int], Trunk]
    """From the width, which all but ResNet18 ignore."""


ARCHITECTURES: dict[str, Architecture] = {
    "vgg16": Architecture(13, lambda _: Vgg((2, 2, 3, 3, 3))),
    "vgg19": Architecture(16, lambda _: Vgg((2, 2, 4, 4, 4))),
    "mobilenetv2": Architecture(18, lambda _: MobileNetV2()),
    "resnet18": Architecture(16, ResNet18),
}


@dataclass(frozen=True)
class Encoder:
    """Describe an encoder of images of `shape` (channels, height, width).

    >>> Encoder("vgg19", (3, 32, 32)).dimension
    303104
    >>> Encoder("vgg19", (3, 32, 32), layers="-4:").dimension  # the last four
    8192
    """

    name: str
    shape: Shape
    layers: str = ALL_LAYERS
    """Which layers, written as a slice: `:` all, `:8` the first eight, `-4:` the last four."""
    precision: torch.dtype | None = None
    """Type of the maps between layers, such as bfloat16; None for that of the images."""
    width: int = 64
    """Channels of ResNet18's first stage; the others have theirs."""

    def __post_init__(self) -> None:
        if self.name not in ARCHITECTURES:
            raise InvalidSettings(
                f"there is no encoder '{self.name}', expected one of {', '.join(ARCHITECTURES)}"
            )
        if self.width < 1:
            raise InvalidSettings(f"width is {self.width}, expected at least 1")
        if self.shape[0] not in (1, COLOURS) or min(self.shape[1:]) < 1:
            raise InvalidSettings(
                f"an encoder was asked for images of shape {self.shape}, expected (1 or 3, height, "
                "width)"
            )
        if not self.chosen:
            raise InvalidSettings(
                f"layers '{self.layers}' chooses none of the {ARCHITECTURES[self.name].layers} "
                f"layers of {self.name}; expected such as ':8' or '-4:'"
            )

    @property
    def chosen(self) -> range:
        """The places of the chosen layers."""
        match = _LAYERS.fullmatch(self.layers)
        if match is None:
            raise InvalidSettings(
                f"layers is '{self.layers}', expected a slice: ':' for all, ':8', '2:6' or '-4:'"
            )
        start, stop = (None if end is None else int(end) for end in match.groups())
        return range(ARCHITECTURES[self.name].layers)[start:stop]

    @property
    def maps(self) -> tuple[Shape, ...]:
        """Channels, height and width of each chosen layer, in order."""
        return _maps(self)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of values of each chosen layer, in order."""
        return tuple(math.prod(shape) for shape in self.maps)

    @property
    def dimension(self) -> int:
        """Number of values in all chosen layers."""
        return sum(self.sizes)

    @property
    def parameter_shapes(self) -> dict[str, torch.Size]:
        """Names and shapes of the parameters, `mean` and `std` of normalisation among them."""
        return {name: like.shape for name, like in self._module.state_dict().items()}

    def init(self, generator: torch.Generator) -> Params:
        """Draw random parameters: an encoder that needs no public data, and for tests."""
        params: Params = {}
        for name, shape in self.parameter_shapes.items():
            if len(shape) == 4:
                values = torch.randn(shape, generator=generator, device=generator.device)
                params[name] = values * math.sqrt(2 / math.prod(shape[1:]))
                continue
            value = 0.5 if name in ("mean", "std") else float(name.endswith(("weight", "var")))
            params[name] = torch.full(shape, value, device=generator.device)
        return params

    def activations(self, params: Params, images: Tensor) -> Tensor:
        """Map images (n, c, h, w) in [0, 1] to the values of all chosen layers (n, dimension)."""
        if tuple(images.shape[1:]) != self.shape:
            raise InvalidData(
                f"images have shape {tuple(images.shape[1:])}, but the encoder was described for "
                f"{self.shape}; make one for this shape"
            )
        places = self.chosen
        inputs = (images, places.stop, self.precision)
        layers = torch.func.functional_call(self._module, params, inputs, strict=True)
        kind = torch.promote_types(images.dtype, torch.float32)
        return torch.cat([layers[place].flatten(1).to(kind) for place in places], dim=1)

    def build(self) -> nn.Module:
        """Build the network."""
        return ARCHITECTURES[self.name].build(self.width)

    @property
    def _module(self) -> nn.Module:
        return skeleton(self)


@lru_cache(maxsize=32)
def _maps(encoder: Encoder) -> tuple[Shape, ...]:
    """Infer the shapes of layers by a call that computes nothing."""
    places, image = encoder.chosen, torch.empty((1, *encoder.shape), device="meta")
    with torch.no_grad():
        layers = encoder._module(image, places.stop, None)
    return tuple(cast(Shape, tuple(layers[place].shape[1:])) for place in places)
