"""The generator of Rehearsal: a Gaussian image of a class, refined, warped, and labelled softly.

    code --> class mean + waves --> refiner --> warp --> image --> teacher --> soft label

The first part is what was released of the records' moments; the refiner is a small network that
gives its samples the features of real images; the teacher is linear in the scattering transform.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from understudy.nets.generators import GeneratorNetwork
from understudy.nets.modules import Shape, draw, skeleton
from understudy.nets.params import Params
from understudy.nets.scattering import Scattering

SMALL_START = 0.05
"""What the refiner's last layer is multiplied by: it starts as nearly the identity."""
LEAK = 0.02
"""Slope beyond black and white, so that pixels find back."""
TURN, SHIFT, STRETCH = math.radians(10), 1 / 14, 0.1
"""A warp: at most 10 degrees, a fourteenth of the side, and a tenth of length or slant."""
OF_WARP = 6
"""Numbers that a warp is made of."""
CONSTANT = 0.02
"""The part of a seen image's squared norm, 1, that is the same for all: a bias."""


@dataclass(frozen=True)
class RehearsedGenerator(GeneratorNetwork):
    """Describe the generator; its code is the Gaussian's, then the warp's, then a noise map."""

    code: int = 40
    """Components of the Gaussians."""
    hidden: int = 48
    """Channels of the refiner; 0 for none."""
    warps: bool = False
    """Whether images are warped."""
    taught: int = 0
    """Components of scattering that the teacher sees; 0 for no teacher."""

    def init(self, generator: torch.Generator) -> Params:
        """Draw the refiner; all else comes from releases."""
        if not self.hidden:
            return {}
        drawn = draw(skeleton(self).get_submodule("refiner"), generator, bound=_kaiming_bound)
        for name, weight in drawn.items():
            if name.startswith("last"):
                drawn[name] = SMALL_START * weight
            elif not name.startswith("conv") or name.endswith("bias"):
                drawn[name] = torch.zeros_like(weight)
        return {f"refiner.{name}": weight for name, weight in drawn.items()}

    def codes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw codes, standard normal: components, six numbers of the warp, a map of noise."""
        length = self.code + OF_WARP + math.prod(self.shape[1:])
        return torch.randn((count, length), generator=generator, device=generator.device)

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and code to image."""
        return Rehearsed(self)

    @property
    def teacher(self) -> Teacher | None:
        """What labels images, if anything does."""
        return Teacher(self.shape, self.classes, self.taught) if self.taught else None

    def opinions(self, params: Params, images: Tensor) -> Tensor | None:
        """Return the teacher's probabilities of classes (n, classes)."""
        if (teacher := self.teacher) is None:
            return None
        own = {name: params[f"teacher.{name}"] for name in ("project", "offset", "weight")}
        return teacher.logits(own["weight"], teacher.sees(own, images)).softmax(1)


@dataclass(frozen=True)
class Teacher:
    """A linear classifier of whitened scattering coefficients."""

    shape: Shape
    classes: int
    dimension: int

    @property
    def scattering(self) -> Scattering:
        """The transform."""
        return Scattering(self.shape)

    def sees(self, params: Params, images: Tensor) -> Tensor:
        """Map images (n, c, h, w) in [0, 1] to what it sees (n, dimension + 1), of norm 1."""
        whitened = F.linear(self.scattering(images), params["project"], -params["offset"])
        varied = F.normalize(whitened, dim=1) * math.sqrt(1 - CONSTANT)
        return F.pad(varied, (0, 1), value=math.sqrt(CONSTANT))

    def logits(self, weight: Tensor, seen: Tensor) -> Tensor:
        """Map what it sees (..., dimension + 1) to logits (..., classes)."""
        return F.linear(seen, weight)


class Rehearsed(nn.Module):
    """Layers of a `RehearsedGenerator`."""

    def __init__(self, like: RehearsedGenerator) -> None:
        super().__init__()
        pixels = math.prod(like.shape)
        self.shape, self.classes, self.code, self.warps = (
            like.shape, like.classes, like.code, like.warps,
        )  # fmt: skip
        self.mean = nn.Parameter(torch.empty(like.classes, pixels))
        self.factor = nn.Parameter(torch.empty(like.classes, like.code, like.code))
        self.basis = nn.Parameter(torch.empty(like.code, pixels))
        self.refiner = Refiner(like) if like.hidden else None
        if teacher := like.teacher:
            self.teacher = nn.ParameterDict(
                {
                    "project": torch.empty(like.taught, teacher.scattering.dimension),
                    "offset": torch.empty(like.taught),
                    "weight": torch.empty(like.classes, like.taught + 1),
                }
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Map one-hot class and code (n, features) to images; pixels are nearly within [0, 1]."""
        _, height, width = self.shape
        sizes = [self.classes, self.code, OF_WARP, height * width]
        one_hot, code, warp, noise = torch.split(inputs, sizes, 1)
        factor = (one_hot @ self.factor.flatten(1)).view(-1, self.code, self.code)
        along = (factor @ code[..., None])[..., 0]
        images = (one_hot @ self.mean + along @ self.basis).view(-1, *self.shape)
        if self.refiner is not None:
            images = self.refiner(images, noise.view(-1, 1, height, width), one_hot)
        return warped(images, warp) if self.warps else images


class Refiner(nn.Module):
    """Four convolutions that add to an image what its class lacks, knowing where they are."""

    def __init__(self, like: RehearsedGenerator) -> None:
        super().__init__()
        channels, hidden = like.shape[0], like.hidden
        self.conv0 = nn.Conv2d(channels + 3, hidden, 5, padding=2)
        self.conv1 = nn.Conv2d(hidden, hidden, 5, padding=2)
        self.conv2 = nn.Conv2d(hidden, hidden, 5, padding=2)
        self.last = nn.Conv2d(hidden, channels, 5, padding=2)
        self.class0, self.class1, self.class2 = (
            nn.Linear(like.classes, hidden, bias=False) for _ in range(3)
        )

    def forward(self, images: Tensor, noise: Tensor, one_hot: Tensor) -> Tensor:
        """Refine images (n, c, h, w) with a map of noise (n, 1, h, w)."""
        count, _, height, width = images.shape
        down = torch.linspace(-1, 1, height, device=images.device)[:, None].expand(height, width)
        right = torch.linspace(-1, 1, width, device=images.device).expand(height, width)
        where = torch.stack([down, right]).expand(count, 2, height, width)
        hidden = torch.cat([images, noise, where], 1)
        for conv, of_class in (
            (self.conv0, self.class0), (self.conv1, self.class1), (self.conv2, self.class2),
        ):  # fmt: skip
            hidden = F.relu(conv(hidden) + of_class(one_hot)[..., None, None])
        free: Tensor = images + self.last(hidden)
        within = free.clamp(0, 1)
        return within + LEAK * (free - within)


def warped(images: Tensor, codes: Tensor) -> Tensor:
    """Turn, shift, stretch and slant each image a little, by standard normal codes (n, 6)."""
    turn, right, down, wide, high, slant = torch.erf(codes / math.sqrt(2)).unbind(1)  # uniform
    cos, sin = (TURN * turn).cos(), (TURN * turn).sin()
    wide, high = 1 + STRETCH * wide, 1 + STRETCH * high
    reach = 2 * SHIFT  # a side is 2 long
    matrix = torch.stack(
        [
            torch.stack([cos * wide, STRETCH * slant - sin * wide, reach * right], 1),
            torch.stack([sin * high, cos * high, reach * down], 1),
        ],
        1,
    )
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _kaiming_bound(weight: Tensor) -> float:
    """Return the bound of uniform weights that keep the variance of what a ReLU follows."""
    return math.sqrt(6 / weight[0].numel())
