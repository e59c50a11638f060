"""Operations of the ConvNet that one GPU kernel does without storing what is in between.

Two families, each closed under the derivatives that gradient matching takes:

* masked products: with patches p and filters a, `1[p a > 0] * (q b)` averaged over 2x2 squares.
  With q = p and b = a it is convolution, ReLU and pooling. Being linear in q and in b, its
  derivatives, and theirs, are three functions in all.
* norm, ReLU and pool of a map; its gradient ("slope"), and the derivative of that along a step
  ("curve"), which by the symmetry of second derivatives is also what double backward needs.

They are torch operators with plain implementations for a CPU, and kernels (`kernels.py`) for a GPU.
Where they are used is up to the network: autograd and `vmap` follow them, `torch.func.grad` cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

NORM_EPS = 1e-5


def _operator(plain: Callable[..., Any]) -> Any:
    """Make an operator of `plain`: on a GPU the kernel of the same name, under `vmap` one call."""
    name = plain.__name__

    def on_gpu(*args: Any) -> Any:
        from understudy.nets import kernels

        return getattr(kernels, name)(*args)

    def under_vmap(info: Any, dims: tuple[int | None, ...], *args: Any) -> Any:
        size = info.batch_size
        folded = [
            _fold(arg, dim, size) if isinstance(arg, Tensor) else arg
            for arg, dim in zip(args, dims, strict=True)
        ]
        result = operator(*folded)
        if isinstance(result, Tensor):
            return _unfold(result, size), 0
        return tuple(_unfold(part, size) for part in result), (0,) * len(result)

    operator = torch.library.custom_op(f"understudy::{name}", plain, mutates_args=())
    operator.register_kernel("cuda", on_gpu)
    operator.register_fake(lambda *args: pytree.tree_map(torch.Tensor.contiguous, plain(*args)))
    operator.register_vmap(under_vmap)
    return operator


def _fold(arg: Tensor, dim: int | None, size: int) -> Tensor:
    batched = arg.expand(size, *arg.shape) if dim is None else arg.movedim(dim, 0)
    return batched.flatten(0, 1)


def _unfold(result: Tensor, size: int) -> Tensor:
    return result.view(size, -1, *result.shape[1:])


def _derivative(operator: Any, backward: Callable[..., Any]) -> None:
    """Let autograd differentiate `operator` by `backward(inputs, *cotangents)`."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.others = len(inputs) - len(tensors)

    def call(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        return (*backward(ctx.saved_tensors, *cotangents), *(None,) * ctx.others)

    operator.register_autograd(call, setup_context=setup)


# Masked products: patches (n, 4 * pixels, k) by quarter, filters (n, filters, k).


def _signs(p: Tensor, a: Tensor) -> Tensor:
    return torch.matmul(p.to(a.dtype), a.transpose(1, 2)) > 0


@_operator
def masked_pool(p: Tensor, a: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """Average `1[p a > 0] * (q b)` over the four quarters: (n, pixels, filters), as `p`'s type."""
    value = torch.matmul(q.to(b.dtype), b.transpose(1, 2))
    kept = torch.where(_signs(p, a), value, 0)
    return kept.view(len(kept), 4, -1, kept.shape[-1]).mean(1).to(p.dtype)


@_operator
def masked_filter_slope(p: Tensor, a: Tensor, q: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of `<masked_pool(p, a, q, b), g>` with respect to b."""
    kept = torch.where(_signs(p, a), g.repeat(1, 4, 1).to(a.dtype) / 4, 0)
    return torch.matmul(kept.transpose(1, 2), q.to(a.dtype))


@_operator
def masked_patch_slope(p: Tensor, a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of `<masked_pool(p, a, q, b), g>` with respect to q."""
    kept = torch.where(_signs(p, a), g.repeat(1, 4, 1).to(a.dtype) / 4, 0)
    return torch.matmul(kept, b).to(p.dtype)


_derivative(
    masked_pool,
    lambda saved, g: (
        None,
        None,
        masked_patch_slope(saved[0], saved[1], saved[3], g),
        masked_filter_slope(saved[0], saved[1], saved[2], g),
    ),
)
_derivative(
    masked_filter_slope,
    lambda saved, b: (
        None,
        None,
        masked_patch_slope(saved[0], saved[1], b, saved[3]),
        masked_pool(saved[0], saved[1], saved[2], b),
    ),
)
_derivative(
    masked_patch_slope,
    lambda saved, q: (
        None,
        None,
        masked_filter_slope(saved[0], saved[1], q, saved[3]),
        masked_pool(saved[0], saved[1], q, saved[2]),
    ),
)


# Norm, ReLU and pool: maps (n, height, width, c), scale and shift (n, c).


@_operator
def norm_relu_pool(x: Tensor, s: Tensor, t: Tensor, eps: float) -> Tensor:
    """Normalise each map, scale by `s`, shift by `t`, apply ReLU, average over 2x2 squares."""
    h, _ = _normal(x.to(s.dtype), eps)
    return _pool(F.relu(h * s[:, None, None] + t[:, None, None])).to(x.dtype)


@_operator
def norm_relu_pool_slope(
    x: Tensor, s: Tensor, t: Tensor, g: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `<norm_relu_pool(x, s, t), g>` with respect to x, s and t."""
    s, t = s[:, None, None], t[:, None, None]
    h, k = _normal(x.to(s.dtype), eps)
    u = torch.where(h * s + t > 0, _spread(g.to(s.dtype)), 0)
    return (s * k * _tangent(u, h)).to(x.dtype), (u * h).sum((1, 2)), u.sum((1, 2))


@_operator
def norm_relu_pool_curve(  # noqa: PLR0917
    x: Tensor, s: Tensor, t: Tensor, g: Tensor, v: Tensor, a: Tensor, b: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how the slopes in x and s, and the output, change along a step (v, a, b) in x, s, t.

    The slope in t does not change.
    """
    s, t, a, b = (part[:, None, None] for part in (s, t, a, b))
    h, k = _normal(x.to(s.dtype), eps)
    step = v.to(s.dtype)
    w = k * _tangent(step, h)
    dk = -k * k * (step * h).mean((1, 2), keepdim=True)
    mask = h * s + t > 0
    moved = _pool(torch.where(mask, s * w + a * h + b, 0)).to(g.dtype)
    u = torch.where(mask, _spread(g.to(s.dtype)), 0)
    uh, uw = ((u * other).mean((1, 2), keepdim=True) for other in (h, w))
    gx = (a * k + s * dk) * _tangent(u, h) - s * k * (w * uh + h * uw)
    return gx.to(x.dtype), (u * w).sum((1, 2)), moved


_derivative(norm_relu_pool, lambda saved, g: norm_relu_pool_slope(*saved, g.contiguous(), NORM_EPS))


def _slope_backward(
    saved: tuple[Tensor, ...], v: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor | None, ...]:
    gx, gs, gg = norm_relu_pool_curve(*saved, v, a, b, NORM_EPS)
    return gx, gs, None, gg


_derivative(norm_relu_pool_slope, _slope_backward)


def _normal(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return normalised maps, and 1 / their standard deviation."""
    centred = x - x.mean((1, 2), keepdim=True)
    k = torch.rsqrt(centred.square().mean((1, 2), keepdim=True) + eps)
    return centred * k, k


def _tangent(u: Tensor, h: Tensor) -> Tensor:
    """Take out of `u` what a norm takes out: its mean, and its part along the normalised map."""
    return u - u.mean((1, 2), keepdim=True) - h * (u * h).mean((1, 2), keepdim=True)


def _pool(maps: Tensor) -> Tensor:
    count, height, width, channels = maps.shape
    return maps.reshape(count, height // 2, 2, width // 2, 2, channels).mean((2, 4))


def _spread(pooled: Tensor) -> Tensor:
    """Undo pooling: its transpose."""
    return pooled.repeat_interleave(2, 1).repeat_interleave(2, 2) / 4
