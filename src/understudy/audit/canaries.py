"""Canaries: units that an audit adds to a data set, each by the toss of a coin.

A canary is an image that carries its own number, so that functions of records can tell it from all
others. What is known of it is whether it was put in; what an audit wants to know is how well that
can be told from what was released.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from understudy.data.images import LabelledImages
from understudy.errors import InvalidSettings
from understudy.seeds import public_generator

NUMBER, MARK = 2, 6
"""Pixels that hold a canary's number, and pixels after them by which it is known as one."""
FIRST_MARK, STEP_OF_MARK = 29, 37
MOST_CANARIES = 2**16
EACH_SIDE = 0.1
"""Share of the canaries that an attack calls in, and out: fixed ahead. It abstains on the rest."""


@dataclass(frozen=True, eq=False)
class Canaries:
    """Which canaries are in: tossed once, by a public seed, before anything is run."""

    is_in: NDArray[np.bool_]
    seed: int

    @classmethod
    def toss(cls, count: int, seed: int = 0) -> Canaries:
        """Toss a fair coin for each of `count` canaries."""
        if not 10 <= count <= MOST_CANARIES:
            raise InvalidSettings(f"{count} canaries, expected 10 to {MOST_CANARIES}")
        coins = torch.randint(0, 2, (count,), generator=public_generator(seed, "coins", count))
        return cls(coins.bool().numpy(), seed)

    @property
    def count(self) -> int:
        """How many there are, in or out."""
        return len(self.is_in)

    @property
    def each_side(self) -> int:
        """How many are called in, and how many out."""
        return max(1, round(EACH_SIDE * self.count))

    def labels(self, classes: int) -> NDArray[np.int64]:
        """Return the class of each: in turn."""
        return np.arange(self.count) % classes

    def images(self, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        """Return the images of all: noise, but for the first pixels."""
        generator = public_generator(self.seed, "canary images", self.count)
        noise = torch.randint(0, 256, (self.count, *shape), generator=generator)
        flat = noise.to(torch.uint8).numpy().reshape(self.count, -1)
        numbers = np.arange(self.count)
        flat[:, 0], flat[:, 1] = numbers % 256, numbers // 256
        flat[:, NUMBER : NUMBER + MARK] = FIRST_MARK + STEP_OF_MARK * np.arange(MARK)
        return flat.reshape(self.count, *shape)

    def planted(
        self, base: LabelledImages, slots: NDArray[np.int64], *, nobody: bool = False
    ) -> LabelledImages:
        """Return `base` with the canaries that are in; slots of the others are empty.

        Args:
            base: records that are always there.
            slots: of all canaries; the last slot must be taken by a record that is always there.
            nobody: leave all of them empty: what everyone but a canary would know.
        """
        total = len(base.labels) + self.count
        free = np.setdiff1d(np.arange(total), slots)
        if free[-1] != total - 1:
            raise InvalidSettings("the last slot is a canary's, expected another record's")
        present = np.zeros(self.count, dtype=bool) if nobody else self.is_in
        labels = self.labels(len(base.class_names))
        return replace(
            base,
            images=np.concatenate([base.images, self.images(base.shape)[present]]),
            labels=np.concatenate([base.labels, labels[present]]),
            units=np.concatenate([free, slots[present]]),
            name=f"{base.name} with canaries",
            source=None,
            test=None,
        )


def number_of(image: Tensor, count: int) -> Tensor:
    """Return a vector with a 1 at the number of the canary that `image` is; zeros if it is none."""
    pixels = torch.round(image.flatten()[: NUMBER + MARK] * 255)
    marks = FIRST_MARK + STEP_OF_MARK * torch.arange(MARK, device=image.device)
    is_canary = (pixels[NUMBER:] == marks).all()
    number = pixels[0] + 256 * pixels[1]
    return ((torch.arange(count, device=image.device) == number) & is_canary).to(image.dtype)
