"""Per-record gradients layer by layer: what each kind of layer notes, and how rows come about.

Giving every record its own copy of the weights makes large weights the subject of many small
products, which no machine likes. But a layer's weight gradient is a product of two things that are
cheap for a whole batch: the layer's input, and the gradient of its output. So each parameter is
replaced by a `Tap`. A layer that takes a tap as its weight adds a zero to its output, one per
record, and notes its input. The gradient with respect to the zeros, times what was noted, record by
record, is the gradient with respect to the weight. A parameter that is used in any other way is
copied for each record after all; mostly these are small.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight
from torch.utils import _pytree as pytree

from understudy.nets.params import Params

LONG = 2
"""Products in the sum of a convolution's gradient, per channel, that are many for a CPU."""


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
    """Patches of the input times the output's gradient, summed over pixels and images."""

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
        count, many = seen.shape[:2]
        if seen.device.type == "cpu" and many * slope[0, 0, 0].numel() >= LONG * shape[1]:
            # One convolution with a group for each record: no patches, but short sums are slow.
            seen, slope = (maps.transpose(0, 1).flatten(1, 2) for maps in (seen, slope))
            sizes = (count * shape[0], *shape[1:])
            rows = cast(Any, conv2d_weight)(seen, sizes, slope, groups=count, **options)
            return cast(Tensor, rows.view(count, *shape))
        patches = _patches(seen.flatten(0, 1), shape[2:], **options)  # (n m, l, k k c)
        patches = patches.reshape(count, -1, patches.shape[-1])  # (n, m l, k k c)
        slope = slope.movedim(2, -1).reshape(count, -1, shape[0])  # (n, m l, o)
        rows = torch.bmm(slope.transpose(1, 2), patches)
        return rows.view(count, shape[0], *shape[2:], shape[1]).movedim(-1, 2)

    def bias_rows(self, slope: Tensor, shape: Sequence[int]) -> Tensor:
        return slope.sum((1, 3, 4))


def _patches(
    images: Tensor,
    kernel: Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Cut images (n, c, h, w) into what each output pixel sees: (n, pixels, kernel * c).

    `F.unfold` does the same with one launch per image, and with channels first.
    """
    (step_y, step_x), (pad_y, pad_x), (far_y, far_x) = map(_pair, (stride, padding, dilation))
    images = F.pad(images.movedim(1, -1), (0, 0, pad_x, pad_x, pad_y, pad_y))
    reach = [(size - 1) * far + 1 for size, far in zip(kernel, (far_y, far_x), strict=True)]
    patches = images.unfold(1, reach[0], step_y).unfold(2, reach[1], step_x)
    patches = patches[..., ::far_y, ::far_x].movedim(3, -1)  # (n, h, w, kernel, kernel, c)
    return patches.flatten(3).flatten(1, 2)


def _pair(option: int | Sequence[int]) -> tuple[int, int]:
    y, x = (option, option) if isinstance(option, int) else option
    return y, x


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
        # `F.group_norm` asks how its input lies in memory, which `vmap` cannot tell while tracing.
        many, channels, values = *data.shape[:2], math.prod(data.shape[2:])
        groups, eps = options["num_groups"], options["eps"]
        normal, *_ = torch.native_group_norm(
            data.contiguous(), None, None, many, channels, values, groups, eps
        )
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
    dtype: torch.dtype
    """Type of the output."""
    options: Mapping[str, Any]

    def rows(self, slope: Tensor, seen: Tensor, params: Params) -> list[tuple[str, Tensor]]:
        """Return the name of each parameter with its gradient of each record."""
        shape = params[self.weight].shape
        found = [(self.weight, self.rule.weight_rows(slope, seen, shape, **self.options))]
        if self.bias is not None:
            found.append((self.bias, self.rule.bias_rows(slope, shape)))
        return found


class Tap(Tensor):
    """Stand in for a parameter: whatever is done with it is done by the tape."""

    tape: Tape
    parameter: str
    cast: torch.dtype

    @staticmethod
    def on(tape: Tape, name: str, cast: torch.dtype) -> Tap:
        """Return a tap that stands for the parameter `name` of `tape`, as type `cast`."""
        tap: Tap = torch.Tensor._make_subclass(Tap, torch.empty(0))
        tap.tape, tap.parameter, tap.cast = tape, name, cast
        return tap

    @classmethod
    def __torch_function__(
        cls, func: Any, _: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        taps = [a for a in pytree.tree_leaves((args, given)) if isinstance(a, Tap)]
        return taps[0].tape.apply(func, args, given)


SHAPE_QUESTIONS = [
    getattr(Tensor, name).__get__
    for name in ("shape", "ndim", "device", "is_cuda", "requires_grad")
]
"""What a network may ask of a parameter without using it."""


class Tape:
    """Follow one record through a loss: note layers that we have a rule for, copy other parameters.

    Args:
        params: the parameters.
        zeros: what to add to the output of each layer in turn; None to find out which there are.
        copies: this record's own copies of the parameters that are used otherwise.
    """

    def __init__(
        self, params: Params, zeros: Sequence[Tensor] | None = None, copies: Params | None = None
    ) -> None:
        self.params, self.zeros, self.copies = params, zeros, copies
        self.seen: list[Tensor] = []
        self.layers: list[Layer] = []
        self.copied: set[str] = set()

    def taps(self) -> Params:
        """Return what the loss takes for its parameters."""
        return {name: Tap.on(self, name, tensor.dtype) for name, tensor in self.params.items()}

    def apply(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Do `func`, some of whose arguments are taps."""
        if args and isinstance(tap := args[0], Tap):
            if func in SHAPE_QUESTIONS:
                return func(self.params[tap.parameter])
            if func == Tensor.dtype.__get__:  # type: ignore[attr-defined]
                return tap.cast
            if func == Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype):
                return Tap.on(self, tap.parameter, args[1])
        if func in RULES:
            with contextlib.suppress(UnknownUse):
                return self._layer(RULES[func], RULES[func].arguments(*args, **given))
        args, given = pytree.tree_map_only(Tap, self._copy, (args, given))
        return func(*args, **given)

    def _copy(self, tap: Tap) -> Tensor:
        self.copied.add(tap.parameter)
        source = self.params if self.copies is None else self.copies
        return source[tap.parameter].to(tap.cast)

    def _layer(self, rule: Rule, given: dict[str, Any]) -> Tensor:
        weight, bias, data = given.pop("weight"), given.pop("bias", None), given.pop("input")
        known = isinstance(weight, Tap) and (bias is None or isinstance(bias, Tap))
        if not known or isinstance(data, Tap):
            raise UnknownUse
        tensors = [
            None if t is None else self.params[t.parameter].to(t.cast) for t in (weight, bias)
        ]
        output, seen = rule.forward(data, cast(Tensor, tensors[0]), tensors[1], **given)
        if self.zeros is None:
            named = None if bias is None else bias.parameter
            shape = tuple(output.shape)
            self.layers.append(Layer(rule, weight.parameter, named, shape, output.dtype, given))
            return output
        output = output + self.zeros[len(self.seen)]
        self.seen.append(seen)
        return output
