"""The classifiers that papers judge synthetic sets with, for images of 8 to 64 pixels.

They are written as ordinary modules, and `ModuleNetwork` turns each into a `Network`: a pure
function of explicit parameters. Nothing in them has state: where a paper's network has batch norm,
ours has group norm with 16 channels in a group, and there is no dropout.

Papers give them for 28 and 32 pixels. For other sizes:

- AlexNet and VGG11 pad the image to the next multiple of 8 (28 become 32, as in the paper).
- A pooling or stride that would leave maps of less than 2 x 2 pixels is left out; only the last
  pooling may leave one pixel. (Instance norm of a single pixel is a constant: the network would be
  deaf.)
- A convolution that is larger than its maps is padded to keep their size.
- What comes after the convolutions takes as many features as there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from understudy.nets.convnet import ConvNet
from understudy.nets.modules import Shape, Sum, draw, skeleton
from understudy.nets.params import Network, Params
from understudy.nets.scatternet import ScatterNet

Norm = Callable[[int], nn.Module]
SMALLEST_MAP = 2
CHANNELS_PER_GROUP = 16


def instance_norm(channels: int) -> nn.Module:
    """Normalise each map by itself."""
    return nn.GroupNorm(channels, channels)


def group_norm(channels: int) -> nn.Module:
    """Normalise groups of 16 maps: what stands in for batch norm, without its state."""
    return nn.GroupNorm(max(1, channels // CHANNELS_PER_GROUP), channels)


class Layers:
    """Append layers one by one, aware of the size of their maps."""

    def __init__(self, shape: Shape, *, multiple: int = 1) -> None:
        self.channels, sides = shape[0], shape[1:]
        more = [-side % multiple for side in sides]
        self.sides = (sides[0] + more[0], sides[1] + more[1])
        self.modules: list[nn.Module] = []
        if any(more):
            (top, left), (rows, columns) = (extra // 2 for extra in more), more
            self.modules.append(nn.ZeroPad2d((left, columns - left, top, rows - top)))

    @property
    def features(self) -> int:
        """Number of values in all maps."""
        return self.channels * self.sides[0] * self.sides[1]

    def conv(
        self, filters: int, kernel: int, *, padding: int, stride: int = 1, norm: Norm | None = None
    ) -> Layers:
        """Append a convolution, a norm if there is one, and ReLU."""
        if min(self.sides) + 2 * padding < kernel:
            padding = kernel // 2
        bias = norm is not group_norm
        conv = nn.Conv2d(self.channels, filters, kernel, stride, padding, bias=bias)
        self.modules += [conv, *([norm(filters)] if norm else []), nn.ReLU()]
        self.channels = filters
        self._resize(lambda side: (side + 2 * padding - kernel) // stride + 1)
        return self

    def pool(self, *, last: bool = False) -> Layers:
        """Append a 2 x 2 maximum, unless it would leave too little."""
        if min(self.sides) // 2 >= (1 if last else SMALLEST_MAP):
            self.modules.append(nn.MaxPool2d(2))
            self._resize(lambda side: side // 2)
        return self

    def stride(self, wanted: int) -> int:
        """Return the stride of a padded convolution, 1 if the wanted one would leave too little."""
        stride = wanted if -(-min(self.sides) // wanted) >= SMALLEST_MAP else 1
        self._resize(lambda side: -(-side // stride))
        return stride

    def add(self, module: nn.Module, *, channels: int) -> Layers:
        """Append a module that keeps the size of the maps, or whose stride came from `stride`."""
        self.modules.append(module)
        self.channels = channels
        return self

    def _resize(self, change: Callable[[int], int]) -> None:
        self.sides = change(self.sides[0]), change(self.sides[1])


class PreActivation(nn.Module):
    """The block of a wide residual network: norm and ReLU come before each convolution."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm = group_norm(inputs)
        self.body = nn.Sequential(
            _conv3(inputs, outputs, stride),
            group_norm(outputs),
            nn.ReLU(),
            _conv3(outputs, outputs),
        )
        self.shortcut = (
            nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None
        )

    def forward(self, maps: Tensor) -> Tensor:
        """Add the block's change to its input, or to a projection of the activated input."""
        active = F.relu(self.norm(maps))
        kept = maps if self.shortcut is None else self.shortcut(active)
        return cast(Tensor, kept + self.body(active))


class GlobalAverage(nn.Module):
    """Average each map."""

    def forward(self, maps: Tensor) -> Tensor:
        """Map (n, c, h, w) to (n, c)."""
        return maps.mean((2, 3))


class Scaled(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: Tensor) -> Tensor:
        """Multiply."""
        return values * self.factor


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def mlp(shape: Shape, classes: int) -> nn.Module:
    """Two hidden layers of 128."""
    channels, height, width = shape
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(channels * height * width, 128), nn.ReLU(),
        nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, classes),
    )  # fmt: skip


def lenet(shape: Shape, classes: int) -> nn.Module:
    """LeNet-5 with ReLU; below 32 pixels its first convolution keeps the size."""
    layers = Layers(shape)
    layers.conv(6, 5, padding=2 if min(shape[1:]) < 32 else 0).pool(last=True)
    layers.conv(16, 5, padding=0).pool(last=True)
    return nn.Sequential(
        *layers.modules, nn.Flatten(),
        nn.Linear(layers.features, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, classes),
    )  # fmt: skip


def alexnet(shape: Shape, classes: int) -> nn.Module:
    """Build the small AlexNet of dataset condensation: five convolutions, one linear layer."""
    layers = Layers(shape, multiple=8)
    layers.conv(128, 5, padding=2).pool(last=True)
    layers.conv(192, 5, padding=2).pool(last=True)
    layers.conv(256, 3, padding=1).conv(192, 3, padding=1).conv(192, 3, padding=1).pool(last=True)
    return nn.Sequential(*layers.modules, nn.Flatten(), nn.Linear(layers.features, classes))


def vgg11(shape: Shape, classes: int) -> nn.Module:
    """VGG11 with instance norm and one linear layer."""
    layers = Layers(shape, multiple=8)
    for stage in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for number, filters in enumerate(stage):
            if number == 0 and layers.channels != shape[0]:
                layers.pool()
            layers.conv(filters, 3, padding=1, norm=instance_norm)
    layers.pool(last=True)
    return nn.Sequential(*layers.modules, nn.Flatten(), nn.Linear(layers.features, classes))


def _residual(layers: Layers, filters: int, *, norm: Norm, stride: int) -> None:
    """Append {conv, norm, ReLU, conv, norm} plus a shortcut, and ReLU."""
    inputs, stride = layers.channels, layers.stride(stride)
    body = nn.Sequential(
        _conv3(inputs, filters, stride), norm(filters), nn.ReLU(),
        _conv3(filters, filters), norm(filters),
    )  # fmt: skip
    shortcut: nn.Module = nn.Identity()
    if inputs != filters:
        shortcut = nn.Sequential(nn.Conv2d(inputs, filters, 1, stride, bias=False), norm(filters))
    layers.add(nn.Sequential(Sum(body, shortcut), nn.ReLU()), channels=filters)


def _resnet(
    shape: Shape, classes: int, *, stages: tuple[int, ...], blocks: int, norm: Norm
) -> nn.Module:
    layers = Layers(shape)
    layers.add(_conv3(shape[0], stages[0]), channels=stages[0])
    layers.add(nn.Sequential(norm(stages[0]), nn.ReLU()), channels=stages[0])
    for number, filters in enumerate(stages):
        for block in range(blocks):
            _residual(layers, filters, norm=norm, stride=2 if number and not block else 1)
    return nn.Sequential(*layers.modules, GlobalAverage(), nn.Linear(stages[-1], classes))


def resnet18(shape: Shape, classes: int) -> nn.Module:
    """ResNet18 for small images (3 x 3 stem, no pooling after it) with instance norm."""
    return _resnet(shape, classes, stages=(64, 128, 256, 512), blocks=2, norm=instance_norm)


def resnet110(shape: Shape, classes: int) -> nn.Module:
    """Build the 110 layers of the first CIFAR ResNets."""
    return _resnet(shape, classes, stages=(16, 32, 64), blocks=18, norm=group_norm)


def wideresnet(shape: Shape, classes: int) -> nn.Module:
    """WRN-40-4."""
    layers = Layers(shape)
    layers.add(_conv3(shape[0], 16), channels=16)
    for number, filters in enumerate((64, 128, 256)):
        for block in range(6):
            stride = layers.stride(2 if number and not block else 1)
            layers.add(PreActivation(layers.channels, filters, stride), channels=filters)
    end = (group_norm(256), nn.ReLU(), GlobalAverage(), nn.Linear(256, classes))
    return nn.Sequential(*layers.modules, *end)


def resnext(shape: Shape, classes: int) -> nn.Module:
    """ResNeXt-29, 8 x 64d."""
    layers = Layers(shape).conv(64, 3, padding=1, norm=group_norm)
    for number, filters in enumerate((256, 512, 1024)):
        for block in range(3):
            inputs, middle = layers.channels, 2 * filters  # 8 groups of 64, 128, 256
            stride = layers.stride(2 if number and not block else 1)
            body = nn.Sequential(
                nn.Conv2d(inputs, middle, 1, bias=False), group_norm(middle), nn.ReLU(),
                nn.Conv2d(middle, middle, 3, stride, 1, groups=8, bias=False), group_norm(middle),
                nn.ReLU(),
                nn.Conv2d(middle, filters, 1, bias=False), group_norm(filters),
            )  # fmt: skip
            shortcut: nn.Module = nn.Identity()
            if inputs != filters:
                shortcut = nn.Sequential(
                    nn.Conv2d(inputs, filters, 1, stride, bias=False), group_norm(filters)
                )
            layers.add(nn.Sequential(Sum(body, shortcut), nn.ReLU()), channels=filters)
    return nn.Sequential(*layers.modules, GlobalAverage(), nn.Linear(1024, classes))


def resnet9(shape: Shape, classes: int) -> nn.Module:
    """Build the ResNet9 of quick CIFAR training; its logits are a fifth of the last layer's."""

    def residual(layers: Layers) -> Layers:
        channels = layers.channels
        inner = Layers((channels, *layers.sides))
        for _ in range(2):
            inner.conv(channels, 3, padding=1, norm=group_norm)
        return layers.add(Sum(nn.Sequential(*inner.modules), nn.Identity()), channels=channels)

    layers = Layers(shape).conv(64, 3, padding=1, norm=group_norm)
    residual(layers.conv(128, 5, padding=2, stride=2, norm=group_norm))
    residual(layers.conv(256, 3, padding=1, norm=group_norm).pool())
    layers.conv(128, 3, padding=0, norm=group_norm)
    head = nn.Linear(128, classes, bias=False)
    return nn.Sequential(*layers.modules, nn.AdaptiveMaxPool2d(1), nn.Flatten(), head, Scaled(0.2))


def datalens_cnn(shape: Shape, classes: int) -> nn.Module:
    """Build the CNN of DataLens: two convolutions without padding, a hidden layer of 64."""
    layers = Layers(shape).conv(32, 3, padding=0).pool(last=True).conv(64, 3, padding=0)
    hidden = nn.Linear(layers.features, 64)
    return nn.Sequential(*layers.modules, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(64, classes))


MODULES: dict[str, Callable[[Shape, int], nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "alexnet": alexnet,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "resnet9": resnet9,
    "datalens-cnn": datalens_cnn,
    "resnet110": resnet110,
    "wideresnet": wideresnet,
    "resnext": resnext,
}


@dataclass(frozen=True)
class ModuleNetwork:
    """One of `MODULES` as a pure function of its parameters."""

    name: str
    shape: Shape
    classes: int

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters as PyTorch's layers do by default (Kaiming uniform)."""
        return draw(skeleton(self), generator)

    def __call__(self, params: Params, images: Tensor) -> Tensor:
        """Map normalised images (n, c, h, w) to logits (n, classes)."""
        return self.logits(params, images)

    def prepare(self, images: Tensor) -> Tensor:
        """Return the images: nothing can be done without parameters."""
        return images

    def logits(self, params: Params, prepared: Tensor) -> Tensor:
        """Map images to logits (n, classes)."""
        return cast(Tensor, torch.func.functional_call(skeleton(self), params, (prepared,)))

    def build(self) -> nn.Module:
        """Build the module."""
        return MODULES[self.name](self.shape, self.classes)


def classifier(name: str, shape: Shape, classes: int, *, width: int = 128) -> Network:
    """Return the network called `name`; `width` is that of the ConvNet, the others have theirs.

    >>> classifier("lenet", (1, 28, 28), 10)
    ModuleNetwork(name='lenet', shape=(1, 28, 28), classes=10)
    """
    return NETWORKS[name](shape, classes, width)


def _named(name: str) -> Callable[[Shape, int, int], Network]:
    return lambda shape, classes, _: ModuleNetwork(name, shape, classes)


NETWORKS: dict[str, Callable[[Shape, int, int], Network]] = {
    "convnet": ConvNet,
    **{name: _named(name) for name in MODULES},
    "scatternet": lambda shape, classes, _: ScatterNet(shape, classes),
}
"""Name -> constructor from shape, classes and the ConvNet's width."""
