"""Per-record gradients layer by layer: what each kind of layer notes, and how rows come about.

`vmap` of a gradient gives every record its own copy of the weights, and with it small products that
no machine likes. But a layer's weight gradient is a product of two things that are cheap for a
whole batch: the layer's input, and the gradient of its output. So each parameter is replaced by a
`Tap`. A layer that takes a tap as its weight adds a zero to its output, one per record, and notes
its input. The gradient with respect to the zeros, times what was noted, record by record, is the
gradient with respect to the weight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from understudy.nets.params import Params

PLAIN = ("shape", "ndim", "dtype", "device")
"""What a network may ask of a parameter beside using it in a layer."""


class UnknownUse(Exception):
    """A parameter is used in a way for which there is no rule."""


class Rule(ABC):
    """One kind of layer. Outputs have the form (m, features, ...) or (..., features) per record."""

    @abstractmethod
    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Name the arguments of the layer's function: input, weight, bias and options."""

    @abstractmethod
    def forward(
        self, data: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and what the gradient will need."""

    @abstractmethod
    def weight_rows(self, slope: Tensor, seen: Tensor, shape: Sequence[int], **_: Any) -> Tensor:
        """Return the weight's gradient of each record.

        Args:
            slope: gradient with respect to the output, (n, ...).
            seen: what the layer noted, (n, ...).
            shape: of the weight.
        """

    @abstractmethod
    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the bias's gradient of each record."""


class _Conv2d(Rule):
    """Patches of the input times the output's gradient."""

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        given = dict(zip(names, args, strict=False)) | kwargs
        if given.pop("groups", 1) != 1 or isinstance(given.get("padding"), str):
            raise UnknownUse
        return given

    def forward(
        self, data: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        if data.ndim != 4:
            raise UnknownUse
        return F.conv2d(data, weight, bias, **options), data

    def weight_rows(
        self, slope: Tensor, seen: Tensor, shape: Sequence[int], **options: Any
    ) -> Tensor:
        patches = F.unfold(seen.flatten(0, 1), tuple(shape[2:]), **options)  # (n * m, c k k, l)
        slope = slope.flatten(0, 1).flatten(2)  # (n * m, o, l)
        rows = torch.bmm(slope, patches.transpose(1, 2))
        count, many = seen.shape[:2]
        return rows.view(count, many, *rows.shape[1:]).sum(1) if many > 1 else rows

    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return slope.sum((1, 3, 4))


class _Linear(Rule):
    """The output's gradient times the input, summed over whatever lies between."""

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs

    def forward(
        self, data: Tensor, weight: Tensor, bias: Tensor | None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        return F.linear(data, weight, bias), data

    def weight_rows(self, slope: Tensor, seen: Tensor, shape: Sequence[int], **_: Any) -> Tensor:
        count = len(slope)
        slope, seen = slope.reshape(count, -1, shape[0]), seen.reshape(count, -1, shape[1])
        return torch.bmm(slope.transpose(1, 2), seen)

    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return slope.reshape(len(slope), -1, shape[0]).sum(1)


class _GroupNorm(Rule):
    """Scale and shift of channels: the output's gradient times the normalised input."""

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = ("input", "num_groups", "weight", "bias", "eps")
        return {"eps": 1e-5} | dict(zip(names, args, strict=False)) | kwargs

    def forward(
        self, data: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        normal = F.group_norm(data, options["num_groups"], eps=options["eps"])
        wide = (-1, *(1,) * (data.ndim - 2))
        output = normal * weight.view(wide)
        return (output if bias is None else output + bias.view(wide)), normal

    def weight_rows(self, slope: Tensor, seen: Tensor, shape: Sequence[int], **_: Any) -> Tensor:
        return self.bias_rows(slope * seen, shape)

    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return slope.reshape(*slope.shape[:3], -1).sum((1, 3))


class _LayerNorm(Rule):
    """Scale and shift of the last dimensions."""

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = ("input", "normalized_shape", "weight", "bias", "eps")
        return {"eps": 1e-5} | dict(zip(names, args, strict=False)) | kwargs

    def forward(
        self, data: Tensor, weight: Tensor, bias: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        normal = F.layer_norm(data, options["normalized_shape"], eps=options["eps"])
        return (normal * weight if bias is None else normal * weight + bias), normal

    def weight_rows(self, slope: Tensor, seen: Tensor, shape: Sequence[int], **_: Any) -> Tensor:
        return self.bias_rows(slope * seen, shape)

    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return slope.reshape(len(slope), -1, math.prod(shape)).sum(1)


class _Embedding(Rule):
    """The output's gradient, added to the rows of the table that were looked up."""

    def arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
        kept = {name: given.pop(name) for name in ("input", "weight")}
        given.pop("norm_type", None)  # means nothing without max_norm
        if len(args) > 2 or not all(v is None or v is False for v in given.values()):
            raise UnknownUse  # padding, a norm to keep to, gradients scaled by frequency
        return kept

    def forward(
        self, data: Tensor, weight: Tensor, bias: Tensor | None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        return F.embedding(data, weight), data

    def weight_rows(self, slope: Tensor, seen: Tensor, shape: Sequence[int], **_: Any) -> Tensor:
        count = len(slope)
        rows = slope.new_zeros((count, *shape))
        slope = slope.reshape(count, -1, shape[1])
        place = seen.reshape(count, -1, 1).expand_as(slope)
        return rows.scatter_add(1, place, slope)

    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        raise UnknownUse


RULES: dict[Any, Rule] = {
    torch.conv2d: _Conv2d(),
    F.linear: _Linear(),
    F.group_norm: _GroupNorm(),
    F.layer_norm: _LayerNorm(),
    F.embedding: _Embedding(),
}


@dataclass(frozen=True)
class Layer:
    """One use of parameters by a layer that we have a rule for."""

    rule: Rule
    weight: str
    bias: str | None
    output: tuple[int, ...]
    """Shape of the output for one record."""
    options: Mapping[str, Any]

    def rows(self, slope: Tensor, seen: Tensor, params: Params) -> list[tuple[str, Tensor]]:
        """Return the name of each parameter with its gradient of each record."""
        shape = params[self.weight].shape
        found = [(self.weight, self.rule.weight_rows(slope, seen, shape, **self.options))]
        if self.bias is not None:
            found.append((self.bias, self.rule.bias_rows(slope, shape)))
        return found


class Tap:
    """Stand in for a parameter: a layer that takes it is noted on the tape, and done there."""

    def __init__(self, tape: Tape, name: str) -> None:
        self.tape, self.name = tape, name

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        given = kwargs or {}
        tape: Tape = next(a.tape for a in (*args, *given.values()) if isinstance(a, Tap))
        if func not in RULES:
            raise UnknownUse
        return tape.apply(RULES[func], RULES[func].arguments(*args, **given))

    def __getattr__(self, name: str) -> Any:
        if name in PLAIN:
            return getattr(self.tape.params[self.name], name)
        raise UnknownUse


class Tape:
    """Follow one record through a loss, layer by layer.

    Args:
        params: the parameters.
        zeros: what to add to the output of each layer in turn; None to find out which there are.
    """

    def __init__(self, params: Params, zeros: Sequence[Tensor] | None) -> None:
        self.params, self.zeros = params, zeros
        self.seen: list[Tensor] = []
        self.layers: list[Layer] = []

    def taps(self) -> Params:
        """Return what the loss takes for its parameters."""
        return cast(Params, {name: Tap(self, name) for name in self.params})

    def apply(self, rule: Rule, given: dict[str, Any]) -> Tensor:
        """Do a layer."""
        weight, bias, data = given.pop("weight"), given.pop("bias", None), given.pop("input")
        known = isinstance(weight, Tap) and (bias is None or isinstance(bias, Tap))
        if not known or isinstance(data, Tap):
            raise UnknownUse
        shift = None if bias is None else self.params[bias.name]
        output, seen = rule.forward(data, self.params[weight.name], shift, **given)
        if self.zeros is None:
            named = None if bias is None else bias.name
            self.layers.append(Layer(rule, weight.name, named, tuple(output.shape), given))
            return output
        output = output + self.zeros[len(self.seen)]
        self.seen.append(seen)
        return output
