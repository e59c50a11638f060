"""Per-record gradients by `torch.func`, as rows of one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from understudy.errors import PlanViolation
from understudy.privacy.records import Contribution

Params = dict[str, Tensor]
Loss = Callable[[Params, Tensor, Tensor], Tensor]
"""Map (params, image (c, h, w) in [0, 1], label ()) of one record to its loss."""


def gradient_rows(loss: Loss, params: Params) -> Contribution:
    """Return the function from records to their gradients, flattened in `params`' order."""
    per_record = one_by_one(lambda image, label: grad(loss)(params, image, label))

    def rows(images: Tensor, labels: Tensor) -> Tensor:
        gradients = cast(Params, per_record(images, labels))
        return torch.cat([gradients[name].reshape(len(images), -1) for name in params], dim=1)

    return rows


def one_by_one(function: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], object]:
    """Apply `function` to each record by itself, so that no record can influence another's row.

    A function that needs the batch (batch norm in training mode), or random numbers that would have
    to be secret, is refused.
    """
    mapped = vmap(function, in_dims=(0, 0), randomness="error")

    def apply(images: Tensor, labels: Tensor) -> object:
        try:
            return mapped(images, labels)
        except (RuntimeError, ValueError) as error:
            text = str(error)
            mixes = ("vmap", "captured Tensor", "more than 1 value per channel")
            if not any(sign in text for sign in mixes):
                raise
            raise PlanViolation(
                "the function given to a release cannot be applied record by record "
                f"({text.splitlines()[0]}); use layers that do not mix records, such as group norm"
            ) from error

    return apply


def split_like(flat: Tensor, params: Params) -> Params:
    """Cut a flat vector into tensors shaped like `params`, rounding once to their type."""
    sizes = [tensor.numel() for tensor in params.values()]
    pieces = torch.split(flat, sizes)
    return {
        name: piece.view(tensor.shape).to(tensor.dtype)
        for (name, tensor), piece in zip(params.items(), pieces, strict=True)
    }
