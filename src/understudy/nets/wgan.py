"""The critic of GS-WGAN: it scores images of a class, with a slope of a few at most.

Written for one critic, as pure functions without a convolution: patches and matrix products, which
`vmap` turns into batched matrix products, where a convolution of its own for each of a thousand
critics would be slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.critics import KERNEL, halved, patches
from understudy.nets.modules import Shape
from understudy.nets.params import Params, uniform_fan_in

FIRST_ITERATIONS = 10
"""Power iterations that a fresh critic's directions come from; later one for each step."""
SMALLEST_NORM = 1e-12


@dataclass(frozen=True)
class Critic:
    """Convolutions of stride 2, then a score that has a part for the class (a projection)."""

    shape: Shape
    classes: int
    width: int = 64
    """Channels of the first maps; doubled by each further convolution."""
    depth: int = 3

    def init(self, generator: torch.Generator) -> Params:
        """Draw fresh parameters: matrices, and a bias for each convolution."""
        params: Params = {}
        for layer, (inputs, outputs) in enumerate(pairwise(self._channels)):
            fan_in = inputs * KERNEL**2
            shape = (outputs, fan_in)
            params[f"conv{layer}"] = uniform_fan_in(shape, fan_in=fan_in, generator=generator)
            params[f"bias{layer}"] = torch.zeros(outputs, device=generator.device)
        features = self._features
        for name, rows in (("score", 1), ("classes", max(1, self.classes))):
            shape = (rows, features)
            params[name] = uniform_fan_in(shape, fan_in=features, generator=generator)
        return params

    def directions(self, params: Params) -> Params:
        """Return for each matrix the direction that it stretches most."""
        found = {n: torch.ones_like(w[:, 0]) for n, w in params.items() if w.ndim == 2}
        for _ in range(FIRST_ITERATIONS):
            _, found = self.normalised(params, found)
        return found

    def normalised(self, params: Params, directions: Params) -> tuple[Params, Params]:
        """Divide matrices by their spectral norm, found by one power iteration.

        Args:
            params: as `init` draws them.
            directions: what the last call returned, or `directions` did.

        Returns:
            Parameters to score with, and the next directions, which are constants to derivatives.
        """
        weights, turned = dict(params), {}
        for name, left in directions.items():
            matrix = params[name]
            with torch.no_grad():
                right = _unit(left @ matrix)
                turned[name] = _unit(matrix @ right)
            weights[name] = matrix / (turned[name] @ matrix @ right).clamp(min=SMALLEST_NORM)
        return weights, turned

    def __call__(self, weights: Params, images: Tensor, labels: Tensor) -> Tensor:
        """Score images (n, c, h, w) of classes (n,): the higher the more real; (n,)."""
        maps = images
        for layer in range(self.depth):
            height, width = (halved(side) for side in maps.shape[2:])
            maps = weights[f"conv{layer}"] @ patches(maps) + weights[f"bias{layer}"][:, None]
            maps = F.relu(maps).view(len(images), -1, height, width)
        features = maps.flatten(1)
        # A product instead of an index: it has all the derivatives under vmap.
        is_class = labels[:, None] == torch.arange(len(weights["classes"]), device=labels.device)
        rows = weights["score"] + is_class.to(features.dtype) @ weights["classes"]
        return (features * rows).sum(1)

    @property
    def _channels(self) -> list[int]:
        return [self.shape[0], *(self.width * 2**layer for layer in range(self.depth))]

    @property
    def _features(self) -> int:
        height, width = self.shape[1:]
        for _ in range(self.depth):
            height, width = halved(height), halved(width)
        return self._channels[-1] * height * width


def _unit(vector: Tensor) -> Tensor:
    return F.normalize(vector, dim=0, eps=SMALLEST_NORM)
