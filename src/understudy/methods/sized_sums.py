"""Class sums under shares of one budget, and the sizes of classes to divide them by.

What a unit of several records adds is scaled as a whole, in each answer by another factor. So each
answer then says itself how many records it is of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from understudy.methods.class_gaussians import SMALLEST, class_sizes
from understudy.nets.params import Params
from understudy.privacy.curator import Curator
from understudy.privacy.plan import Block, PlannedRelease, PublicFacts, joint_bound
from understudy.privacy.releases.class_sums import Embedding

COUNTS = "counts"
"""Name of the block in which a record adds a one."""
RATIO = 3.0
"""Where units have several records: noise on the count beside each sum, relative to the sum's."""


@dataclass(frozen=True)
class Counting:
    """What a record adds, and a one."""

    function: Callable[..., list[Tensor]]

    def __call__(self, image: Tensor, *more: Any) -> list[Tensor]:
        """Return what is added, block by block."""
        return [*self.function(image, *more), image.new_ones(1)]


@dataclass(frozen=True)
class SizedSums:
    """How class sums of a data set are planned, and asked for."""

    facts: PublicFacts

    def planned(
        self, name: str, share: float, *blocks: Block, count: int = 1, counts: bool = False
    ) -> PlannedRelease:
        """Return a line of the plan; with `counts`, or where it is needed, it has counts, too.

        Args:
            name: of the line.
            share: of the budget, for all its releases together.
            blocks: what is summed.
            count: how many releases there are.
            counts: whether sizes are asked for as such, with no more noise than sums have.
        """
        if counts:
            blocks = (*blocks, Block(name=COUNTS, dimension=1))
        elif not self.facts.one_each:
            blocks = (*blocks, Block(name=COUNTS, dimension=1, ratio=RATIO))
        classes = self.facts.classes
        return PlannedRelease(
            name=name,
            kind="class_sums",
            count=count,
            dimension=sum(block.sums(classes) * block.dimension for block in blocks),
            noise_ratio=math.sqrt(count / share),
            blocks=blocks,
        )

    def asked(
        self,
        curator: Curator,
        name: str,
        function: Callable[..., list[Tensor]],
        sizes: Tensor,
        *,
        takes_label: bool = True,
        public: Params | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Ask for the sums of a line; return them, and the sizes of classes to divide them by.

        Args:
            curator: who is asked.
            name: of the line.
            function: what a record adds, block by block, but for a count.
            sizes: of classes, as far as they are known.
            takes_label: whether the function is given a record's label, too.
            public: what it is given after these, if it is asked for again with other tensors.
        """
        line = curator.plan[name]
        ratios = [block.ratio for block in line.blocks if block.name == COUNTS]
        embed = Counting(function) if ratios else function
        embedding = Embedding(embed, line.blocks, takes_label=takes_label, public=public)
        found = curator.class_sums(embedding, release=name)
        if not ratios:
            return found, sizes
        noisy, total = found[COUNTS].flatten(), float(sizes.sum())
        if not self.facts.one_each:  # nothing says how many there should be
            total = max(float(noisy.sum()), SMALLEST * total)
        return found, class_sizes(noisy, total, ratios[0] * noise_of(curator, name))


def noise_of(curator: Curator, name: str) -> float:
    """Return the standard deviation of the noise on a line's sums, in bounds."""
    line = curator.plan[name]
    return curator.calibration.noise_multiplier * line.noise_ratio * joint_bound(line.blocks)
