"""Per-record gradients: a block of rows for each parameter.

The loss is applied to one record at a time under `vmap`, so no record can influence another's row,
whatever the method's function does. Parameters used in layers that `layers.py` has a rule for get
their rows by layer; the others, or all if the loss cannot be followed, record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import grad, vmap

from understudy.errors import PlanViolation
from understudy.nets.params import Params
from understudy.privacy.layers import Layer, Tape
from understudy.privacy.records import Rows

Loss = Callable[[Params, Tensor, Tensor], Tensor]
"""Map (params, image (c, h, w) in [0, 1], label ()) of one record to its loss.

Among `params` are the public tensors that a release was given beside the parameters.
"""


class GradientRows:
    """Map (inputs, images, labels) to the records' gradients, one block of rows per parameter.

    Args:
        loss: the loss of one record.
        public: names of inputs that are no parameters: the same for all records, no gradient.
        by_layer: whether to go layer by layer where possible; False to let `vmap` do it all.
    """

    def __init__(self, loss: Loss, *, public: Collection[str] = (), by_layer: bool = True) -> None:
        self.loss, self.public, self.by_layer = loss, frozenset(public), by_layer
        self._found: Found | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientRows) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Loss, frozenset[str], bool]:
        return self.loss, self.public, self.by_layer

    def __call__(self, inputs: Params, images: Tensor, labels: Tensor) -> Rows:
        """Return a block (n, *shape) for each parameter, in the inputs' order."""
        params = {name: tensor for name, tensor in inputs.items() if name not in self.public}
        known = {name: inputs[name].detach() for name in sorted(self.public)}

        def loss(params: Params, image: Tensor, label: Tensor) -> Tensor:
            return self.loss(params | known, image, label)

        if self._found is None:
            self._found = (
                find_layers(loss, params, images[0], labels[0]) if self.by_layer else ([], [])
            )
        layers, copied = self._found
        if not layers:
            per_record = OneByOne(lambda x, y: grad(loss)(params, x, y))
            found = cast(Params, per_record(images, labels))
        else:
            found = _rows_by_layer(loss, params, (layers, copied), (images, labels))
        return [found[name] for name in params]


Found = tuple[list[Layer], list[str]]
"""The layers through which a loss uses parameters, and the parameters that it uses otherwise."""


def find_layers(loss: Loss, params: Params, image: Tensor, label: Tensor) -> Found:
    """Find out how the loss uses `params`; no layers if it cannot be followed.

    Only the shapes and types of `image` and `label` matter: zeros go through the loss.
    """
    tape = Tape(params)
    try:
        with torch.no_grad():
            loss(tape.taps(), torch.zeros_like(image), torch.zeros_like(label))
    except Exception:  # a use that no tap can stand for; a true error will show itself again
        return [], []
    return tape.layers, sorted(tape.copied)


def _rows_by_layer(
    loss: Loss, params: Params, found: Found, records: tuple[Tensor, Tensor]
) -> Params:
    layers, copied = found
    count, device = len(records[0]), records[0].device
    with torch.enable_grad():
        zeros = [
            torch.zeros((), dtype=layer.dtype, device=device)
            .expand(count, *layer.output)
            .requires_grad_()
            for layer in layers
        ]
        copies = {
            name: params[name].detach().expand(count, *params[name].shape).requires_grad_()
            for name in copied
        }

        def of_record(
            image: Tensor, label: Tensor, zeros: list[Tensor], copies: Params
        ) -> tuple[Tensor, list[Tensor]]:
            tape = Tape(params, zeros, copies)
            return loss(tape.taps(), image, label), tape.seen

        losses, seen = cast(Any, OneByOne(of_record)(*records, zeros, copies))
        leaves = [*zeros, *copies.values()]
        slopes = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)

    rows: Params = dict(zip(copied, slopes[len(layers) :], strict=True))
    for layer, slope, noted in zip(layers, slopes, seen, strict=False):
        for name, found_rows in layer.rows(slope, noted.detach(), params):
            rows[name] = rows[name] + found_rows if name in rows else found_rows
    for name, tensor in params.items():
        if name not in rows:  # a parameter that the loss does not use
            rows[name] = torch.zeros((count, *tensor.shape), device=device)
    return rows


@dataclass(frozen=True)
class OneByOne:
    """Apply `function` to each record by itself, so that no record can influence another's row.

    A function that needs the batch (batch norm in training mode), or random numbers that would have
    to be secret, is refused. Equal functions are equal one by one: an engine compiles them once.
    """

    function: Callable[..., Any]
    in_dims: Any = 0

    def __call__(self, *records: Any) -> Any:
        """Return what the function gives for each, stacked."""
        try:
            return vmap(self.function, in_dims=self.in_dims, randomness="error")(*records)
        except (RuntimeError, ValueError) as error:
            text = str(error)
            mixes = ("vmap", "captured Tensor", "more than 1 value per channel")
            if not any(sign in text for sign in mixes):
                raise
            raise PlanViolation(
                "the function given to a release cannot be applied record by record "
                f"({text.splitlines()[0]}); use layers that do not mix records, such as group norm"
            ) from error


def split_like(flat: Tensor, params: Params) -> Params:
    """Cut a flat vector into tensors shaped like `params`, rounding once to their type."""
    rounded = {dtype: flat.to(dtype) for dtype in {tensor.dtype for tensor in params.values()}}
    start, pieces = 0, {}
    for name, tensor in params.items():
        piece = rounded[tensor.dtype][start : start + tensor.numel()]
        pieces[name] = piece.view(tensor.shape)
        start += tensor.numel()
    return pieces
