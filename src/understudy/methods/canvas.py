"""What PSG paints on: pixels of their own (Algorithm 1), or a generator's parameters (Algorithm 2).

Either is a dictionary of tensors that an optimiser moves, and from which images follow. All of it
is made of releases: post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.generators import DCGANGenerator
from understudy.nets.params import Params, moved, per_channel
from understudy.nets.released import Generator, codes_of
from understudy.privacy.plan import PublicFacts
from understudy.seeds import public_generator
from understudy.training.adam import Adam

ADAM = Adam()
State = tuple[Params, Any]
"""What is optimised, and what its optimiser remembers: tensors, nested."""


class Canvas(Protocol):
    """What images are painted on; a frozen value, so that equal steps are compiled once."""

    def start(self, known: Params, seed: int) -> State:
        """Return the state before the first step; `seed` is public."""

    def known(self, labels: Tensor, seed: int) -> Params:
        """Return what stays as it is: the images' labels, and all else that they are made of."""

    def images(self, painted: Params, known: Params) -> Tensor:
        """Return normalised images (n, c, h, w)."""

    def step(self, painted: Params, slopes: Params, memory: Any, lr: Tensor) -> State:
        """Take one step of the optimiser against the slopes."""

    def generator(self, painted: Params, shares: tuple[float, ...] | None) -> Generator | None:
        """Return what can draw more images, if anything can."""


@dataclass(frozen=True)
class Pixels:
    """Algorithm 1: each image by itself, by gradient descent with momentum."""

    facts: PublicFacts
    start_std: float
    """Of the noise that images start as."""
    momentum: float
    smooth: float
    """Standard deviation, in pixels, of the blur of every step; 0 for none."""
    project: bool
    """Whether to keep pixels between black and white."""

    def known(self, labels: Tensor, seed: int) -> Params:
        """Return the labels."""
        return {"labels": labels}

    def start(self, known: Params, seed: int) -> State:
        """Return noise, at rest."""
        shape, device = (len(known["labels"]), *self.facts.shape), known["labels"].device
        drawn = torch.randn(shape, generator=public_generator(seed, "images"))
        painted = {"images": (self.start_std * drawn).to(device)}
        return painted, {"images": torch.zeros_like(painted["images"])}

    def images(self, painted: Params, known: Params) -> Tensor:
        """Return the images as they are."""
        return painted["images"]

    def step(self, painted: Params, slopes: Params, memory: Any, lr: Tensor) -> State:
        """Move the pixels."""
        slope = slopes["images"]
        if self.smooth:
            slope = blurred(slope, self.smooth)
        velocity = self.momentum * memory["images"] + slope
        images = painted["images"] - lr * velocity
        if self.project:
            normalise = list(zip(self.facts.mean, self.facts.std, strict=True))
            black = per_channel([-mean / std for mean, std in normalise], images)
            white = per_channel([(1 - mean) / std for mean, std in normalise], images)
            images = torch.minimum(torch.maximum(images, black), white)
        return {"images": images}, {"images": velocity}

    def generator(self, painted: Params, shares: tuple[float, ...] | None) -> Generator | None:
        """Return None: there are these images and no others."""
        return None


@dataclass(frozen=True)
class Prior:
    """Algorithm 2: images of a generator at codes drawn once; Adam moves its parameters."""

    facts: PublicFacts
    network: DCGANGenerator
    adam: Adam = ADAM

    def known(self, labels: Tensor, seed: int) -> Params:
        """Return the labels, and the codes that a sample of the finished generator has at `seed`.

        So that it draws the set itself there. The paper found that codes drawn anew at every step
        let the optimisation fail early.
        """
        codes = torch.cat(list(codes_of(self.network, len(labels), seed)))
        return {"labels": labels, "codes": codes.to(labels.device)}

    def start(self, known: Params, seed: int) -> State:
        """Return a generator that has learned nothing."""
        drawn = self.network.init(public_generator(seed, "generator"))
        painted = moved(drawn, known["labels"].device)
        return painted, self.adam.start(painted)

    def images(self, painted: Params, known: Params) -> Tensor:
        """Return the generator's images at the fixed codes."""
        pixels = self.network(painted, known["codes"], known["labels"])
        return normalised(pixels, self.facts)

    def step(self, painted: Params, slopes: Params, memory: Any, lr: Tensor) -> State:
        """Move the generator's parameters."""
        return self.adam.step(painted, slopes, memory, lr)

    def generator(self, painted: Params, shares: tuple[float, ...] | None) -> Generator | None:
        """Return the generator."""
        return Generator(self.network, painted, {}, shares)


def normalised(pixels: Tensor, facts: PublicFacts) -> Tensor:
    """Bring pixels, 0 black to 1 white, to the data set's units."""
    return (pixels - per_channel(facts.mean, pixels)) / per_channel(facts.std, pixels)


def to_pixels(images: Tensor, facts: PublicFacts) -> Tensor:
    """Undo `normalised`."""
    return images * per_channel(facts.std, images) + per_channel(facts.mean, images)


def blurred(images: Tensor, std: float) -> Tensor:
    """Blur with a Gaussian of `std` pixels; nothing comes in from outside."""
    reach = math.ceil(3 * std)
    offsets = torch.arange(-reach, reach + 1, device=images.device)
    weights = torch.exp(-0.5 * (offsets / std).square())
    weights = (weights / weights.sum()).to(images.dtype)
    planes = images.flatten(0, 1)[:, None]
    planes = F.conv2d(planes, weights.view(1, 1, -1, 1), padding=(reach, 0))
    return F.conv2d(planes, weights.view(1, 1, 1, -1), padding=(0, reach)).view_as(images)
