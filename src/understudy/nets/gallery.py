"""A generator without layers: pictures, and mixtures of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from understudy.nets.generators import GeneratorNetwork
from understudy.nets.modules import skeleton
from understudy.nets.params import Params

DARK, UNLIKE = -1.1, 0.2
"""Mean and standard deviation of pictures before training, as logits of pixels."""


@dataclass(frozen=True)
class GalleryGenerator(GeneratorNetwork):
    """Some pictures of each class, as many as the code is long: an image is a mixture of two.

    Nothing but their pixels is learned, which takes few steps. Judged are the pictures themselves.
    """

    code: int = 10

    def build(self, keeps: bool = False) -> nn.Module:
        """Build the module from one-hot class and shares of pictures to image."""
        return Gallery(self)

    def init(self, generator: torch.Generator) -> Params:
        """Draw pictures that are dark, and hardly differ."""
        (name, like), *_ = skeleton(self).named_parameters()
        drawn = torch.randn(like.shape, generator=generator, device=generator.device)
        return {name: DARK + UNLIKE * drawn}

    def codes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the shares of pictures in images: of two each, mostly much of one."""
        device = generator.device
        places = torch.randint(self.code, (2, count), generator=generator, device=device)
        share = torch.rand((count, 1), generator=generator, device=device).square() / 2
        first, second = (self._alone(place) for place in places)
        return torch.lerp(first, second, share)

    def codes_to_show(self, count: int, generator: torch.Generator) -> Tensor:
        """Return codes of one picture each, the same for all classes, then of the next."""
        numbers = torch.arange(count, device=generator.device)
        return self._alone(numbers // max(1, self.classes) % self.code)

    def _alone(self, places: Tensor) -> Tensor:
        return (places[:, None] == torch.arange(self.code, device=places.device)).float()


class Gallery(nn.Module):
    """Pictures of a `GalleryGenerator`."""

    def __init__(self, like: GalleryGenerator) -> None:
        super().__init__()
        self.shape, self.classes = like.shape, like.classes
        count = max(1, like.classes) * like.code
        self.pictures = nn.Parameter(torch.empty(count, math.prod(like.shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map one-hot class, if there is one, and shares of pictures (n, classes + code)."""
        chosen, shares = inputs.tensor_split([self.classes], 1)
        if self.classes:
            shares = (chosen[:, :, None] * shares[:, None]).flatten(1)
        return (shares @ self.pictures.sigmoid()).view(-1, *self.shape)
