"""Optimal transport between two small sets of images with classes, smoothed by entropy.

Sinkhorn's algorithm in the log domain, while the temperature falls from a public bound of the costs
to the one asked for: so the number of iterations is known ahead, and says nothing about the images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

COOLING = 0.7
"""What the temperature is multiplied by after each iteration."""


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What it costs to turn one image into another, and how freely a plan may spread.

    Pixels lie in [-1, 1].
    """

    absolute: float
    """Weight of absolute differences of pixels, beside squared ones."""
    label_cost: float
    """What it costs to change the class."""
    temperature: float
    """Of the entropy: at zero a plan would be the cheapest one."""

    def costs(self, images: Tensor, labels: Tensor, others: Tensor, their: Tensor) -> Tensor:
        """Return what it costs to turn each of `images` into each of `others` (n, m)."""
        first, second = images.flatten(1), others.flatten(1)
        # Differences first: a product of matrices would lose the digits that tell images apart.
        mode = "donot_use_mm_for_euclid_dist"
        apart = torch.cdist(first, second, compute_mode=mode).square()
        if self.absolute:
            apart = apart + self.absolute * torch.cdist(first, second, p=1)
        return apart + self.label_cost * (labels[:, None] != their)

    def temperatures(self, pixels: int) -> list[float]:
        """Return a temperature for each iteration: from the largest possible cost on.

        >>> transport = Transport(absolute=0, label_cost=0, temperature=1)
        >>> [round(heat, 1) for heat in transport.temperatures(pixels=1)]
        [4.2, 2.9, 2.0, 1.4, 1.0]
        """
        largest = 4 * pixels + 2 * pixels * self.absolute + self.label_cost
        falls = max(0, math.ceil(math.log(self.temperature / largest, COOLING)))
        return [self.temperature / COOLING**n for n in range(falls, -1, -1)]

    def cost(
        self,
        images: Tensor,
        labels: Tensor,
        others: Tensor,
        their_labels: Tensor,
        weights: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return what the plan costs that takes all images to `others`.

        Its gradient is that of the entropic transport cost: a small change of the best plan changes
        its cost, with the entropy, by nothing, so the plan is held fixed.

        Args:
            images: (n, c, h, w).
            labels: (n,).
            others: (m, c, h, w).
            their_labels: (m,).
            weights: of the images (n,) and of the others (m,), not all zero; equal by default.
        """
        costs = self.costs(images, labels, others, their_labels)
        rows, columns = weights or (torch.ones_like(costs[:, 0]), torch.ones_like(costs[0]))
        plan = transport_plan(
            costs.detach(),
            rows / rows.sum(),
            columns / columns.sum(),
            self.temperatures(images[0].numel()),
        )
        return (plan * costs).sum()


@torch.no_grad()
def transport_plan(
    costs: Tensor, rows: Tensor, columns: Tensor, temperatures: list[float]
) -> Tensor:
    """Return how much of each row goes to each column (n, m); rows have their weight exactly.

    Args:
        costs: (n, m).
        rows: their weights (n,), which add up to 1; some may be 0.
        columns: likewise (m,).
        temperatures: one for each iteration, falling.
    """
    log_rows, log_columns = rows.log()[:, None], columns.log()
    prices = torch.zeros_like(costs[0])  # what columns ask for: the dual variables
    for heat in temperatures:
        gains = -heat * torch.logsumexp(log_columns + (prices - costs) / heat, 1)
        prices = -heat * torch.logsumexp(log_rows + (gains[:, None] - costs) / heat, 0)
    logits = log_columns + (prices - costs) / temperatures[-1]
    return rows[:, None] * torch.softmax(logits, 1)
