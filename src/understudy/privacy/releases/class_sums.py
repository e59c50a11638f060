"""Release noisy sums of an embedding of records, by class or over all, as one Gaussian."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor

from understudy.errors import PlanViolation
from understudy.nets.params import Params
from understudy.privacy.bounded import CLIP_MARGIN, noisy_bounded_sum
from understudy.privacy.gradients import OneByOne
from understudy.privacy.plan import Block, joint_bound
from understudy.privacy.records import Rows
from understudy.privacy.sampling import Access


@dataclass(frozen=True)
class Embedding:
    """A function of one record, and what it declares of its parts."""

    function: Callable[..., Sequence[Tensor]]
    """Map an image (c, h, w) in [0, 1] to the features (dimension,) of each block."""
    blocks: tuple[Block, ...]
    takes_label: bool = False
    """Whether the function gets the record's label () beside its image."""
    public: Params | None = field(default=None, compare=False)
    """What it gets after these, the same for all records and known to everyone. Functions that are
    asked for again and again, and differ in this alone, are compiled once."""

    def dimension(self, classes: int) -> int:
        """Return the number of coordinates that are released."""
        return sum(block.sums(classes) * block.dimension for block in self.blocks)

    def split(self, flat: Tensor, classes: int) -> dict[str, Tensor]:
        """Cut what `class_sums` returns into (classes, dimension), or (dimension,), by name."""
        sizes = [block.sums(classes) * block.dimension for block in self.blocks]
        return {
            block.name: part.view(classes, -1) if block.by_class else part
            for block, part in zip(self.blocks, torch.split(flat, sizes), strict=True)
        }


def class_sums(access: Access, embedding: Embedding) -> Tensor:
    """Return the noisy sums of all records' features, block after block, flat.

    Privacy:
        Reads: the records of a Poisson sample of units, or of all units at rate 1. Features are of
            one record alone: of its image, of its label if the embedding says so, and of public
            tensors.
        Bound: each block of a record is clipped to its declared bound (negatives clamped to zero
            where non-negativity is declared), divided by its bound and its ratio, and put into the
            part of the record's class, or into the one part of a block over all. The blocks are one
            vector, whose norm is then at most B = sqrt(sum of ratio^-2). A unit's records are
            summed, and the sum is scaled to a norm of at most B.
        Sensitivity: B, when one unit is replaced by an empty one.
        Dominating pair: as for `gradient`; at rate 1, N(0, z^2) against N(1, z^2).
        Charges: one (Poisson-sampled) Gaussian.
        Blocks are multiplied by bound and ratio again after the noise, so the noise on a block is
        z * B * ratio * bound. Sums are not divided: class counts are private.
    Edge cases:
        Empty batch or class: noise. Features that are not finite: the unit contributes zero. Zero
        features: zero.
    """
    blocks, classes = embedding.blocks, access.classes
    takes_public = embedding.public is not None
    total = noisy_bounded_sum(
        access,
        _Features(embedding.function, blocks, embedding.takes_label, takes_public),
        embedding.public,
        dimension=embedding.dimension(classes),
        bound=joint_bound(blocks),
        by_class=[block.by_class for block in blocks],
        many_times=takes_public,
    )
    sizes = [block.sums(classes) * block.dimension for block in blocks]
    parts = zip(torch.split(total, sizes), blocks, strict=True)
    return torch.cat([(part * (block.bound * block.ratio)).float() for part, block in parts])


@dataclass(frozen=True)
class _Features:
    """The features of records, block by block, each within its bound."""

    function: Callable[..., Sequence[Tensor]]
    blocks: tuple[Block, ...]
    takes_label: bool
    takes_public: bool

    def __call__(self, public: Params, images: Tensor, labels: Tensor) -> Rows:
        records = (images, labels) if self.takes_label else (images,)
        with torch.no_grad():
            return cast(Rows, OneByOne(partial(self._of_record, public))(*records))

    def _of_record(self, public: Params, *record: Tensor) -> list[Tensor]:
        known = (public,) if self.takes_public else ()
        found = self.function(*record, *known)
        if len(found) != len(self.blocks):
            raise PlanViolation(
                f"an embedding has {len(found)} blocks, expected the {len(self.blocks)} declared"
            )
        return [_bounded(part, block) for part, block in zip(found, self.blocks, strict=True)]


def _bounded(features: Tensor, block: Block) -> Tensor:
    """Return features scaled to a norm of at most 1 / ratio, if they keep their declared bound."""
    if features.shape != (block.dimension,):
        raise PlanViolation(
            f"block '{block.name}' has features {tuple(features.shape)}, expected "
            f"({block.dimension},) as declared"
        )
    if block.is_non_negative:
        features = features.clamp(min=0)
    norm = torch.linalg.vector_norm(features, dtype=torch.float64) * (1 + CLIP_MARGIN)
    scale: Tensor = 1 / (block.ratio * norm.clamp(min=block.bound))
    return features * scale.to(features.dtype)
