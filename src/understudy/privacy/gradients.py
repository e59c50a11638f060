"""Per-record gradients as rows of one matrix.

The loss is applied to one record at a time under `vmap`, so no record can influence another's row,
whatever the method's function does. Rows come layer by layer where every parameter is used in a
layer that `layers.py` has a rule for; else `vmap` differentiates the whole loss for each record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from understudy.errors import PlanViolation
from understudy.nets.params import Params
from understudy.privacy.layers import Layer, Tape, UnknownUse
from understudy.privacy.records import Contribution

Loss = Callable[[Params, Tensor, Tensor], Tensor]
"""Map (params, image (c, h, w) in [0, 1], label ()) of one record to its loss."""


def gradient_rows(loss: Loss, params: Params, *, by_layer: bool | None = None) -> Contribution:
    """Return the function from records to their gradients, flattened in `params`' order.

    Args:
        loss: the loss of one record.
        params: where to differentiate.
        by_layer: whether to go layer by layer; by default on a GPU, where it is faster.
    """
    device = next(iter(params.values())).device
    wanted = device.type == "cuda" if by_layer is None else by_layer
    layers: list[Layer] | None = None

    def rows(images: Tensor, labels: Tensor) -> Tensor:
        nonlocal layers
        if layers is None:
            layers = find_layers(loss, params, images[0], labels[0]) if wanted else []
        if not layers:
            return _rows_by_record(loss, params, images, labels)
        return _rows_by_layer(loss, params, layers, images, labels)

    return rows


def find_layers(loss: Loss, params: Params, image: Tensor, label: Tensor) -> list[Layer]:
    """Return the layers through which the loss uses `params`; none if it uses them otherwise.

    Only the shapes and types of `image` and `label` matter: zeros go through the loss.
    """
    tape = Tape(params, None)
    try:
        with torch.no_grad():
            loss(tape.taps(), torch.zeros_like(image), torch.zeros_like(label))
    except (UnknownUse, TypeError):  # TypeError: an operator, or a function without our hook
        return []
    return tape.layers


def _rows_by_record(loss: Loss, params: Params, images: Tensor, labels: Tensor) -> Tensor:
    per_record = one_by_one(lambda image, label: grad(loss)(params, image, label))
    gradients = cast(Params, per_record(images, labels))
    return torch.cat([gradients[name].reshape(len(images), -1) for name in params], dim=1)


def _rows_by_layer(
    loss: Loss, params: Params, layers: list[Layer], images: Tensor, labels: Tensor
) -> Tensor:
    count = len(images)
    zeros = [images.new_zeros((count, *layer.output)) for layer in layers]

    def of_record(image: Tensor, label: Tensor, *zeros: Tensor) -> tuple[Tensor, list[Tensor]]:
        tape = Tape(params, zeros)
        return loss(tape.taps(), image, label), tape.seen

    def total(zeros: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        losses, seen = cast(Any, one_by_one(of_record)(images, labels, *zeros))
        return losses.sum(), seen

    slopes, seen = grad(total, has_aux=True)(zeros)
    rows: Params = {}
    for layer, slope, noted in zip(layers, slopes, seen, strict=True):
        for name, found in layer.rows(slope, noted, params):
            flat = found.reshape(count, -1)
            rows[name] = rows[name] + flat if name in rows else flat
    for name, tensor in params.items():
        if name not in rows:  # a parameter that the loss does not use
            rows[name] = images.new_zeros((count, tensor.numel()))
    return torch.cat([rows[name] for name in params], dim=1)


def one_by_one(function: Callable[..., object]) -> Callable[..., object]:
    """Apply `function` to each record by itself, so that no record can influence another's row.

    A function that needs the batch (batch norm in training mode), or random numbers that would have
    to be secret, is refused.
    """
    mapped = vmap(function, randomness="error")

    def apply(*records: Tensor) -> object:
        try:
            return mapped(*records)
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
