"""Triton kernels of the ConvNet's hot spots. Imported only where there is a GPU (or in tests).

`fused.py` says what they compute; each has a plain twin there, which tests hold it to. All read
maps with channels last, compute in float32, and keep everything between their input and output in
registers: what they save is memory traffic.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64
"""Pooled pixels that one program of a masked product works on."""
FILTERS, SUMMED_FILTERS = 32, 128
"""Filters that one program works on; and where it sums over pixels, or over filters."""
CHANNELS, TILE = 32, 2048
"""Channels that one program of the norm works on, and values of a quarter of a map it may hold."""

# Masked products


@triton.jit
def _patches(ptr, n, quad, rows, taps, ROWS_IN_ALL, K):
    there = (rows < ROWS_IN_ALL)[:, None] & (taps < K)[None, :]
    place = ((n * 4 + quad) * ROWS_IN_ALL + rows)[:, None] * K + taps[None, :]
    return tl.load(ptr + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _filters(ptr, n, filters, taps, F, K):
    there = (filters < F)[:, None] & (taps < K)[None, :]
    place = (n * F + filters)[:, None] * K + taps[None, :]
    return tl.load(ptr + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _maps(ptr, n, rows, filters, ROWS_IN_ALL, F):
    there = (rows < ROWS_IN_ALL)[:, None] & (filters < F)[None, :]
    place = (n * ROWS_IN_ALL + rows)[:, None] * F + filters[None, :]
    return tl.load(ptr + place, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _pool_kernel(
    p_ptr, a_ptr, q_ptr, b_ptr, y_ptr,
    ROWS_IN_ALL: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, FB: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    n, taps = tl.program_id(0), tl.arange(0, KB)
    rows, filters = tl.program_id(1) * R + tl.arange(0, R), tl.program_id(2) * FB + tl.arange(0, FB)
    a = tl.trans(_filters(a_ptr, n, filters, taps, F, K))
    b = tl.trans(_filters(b_ptr, n, filters, taps, F, K))
    total = tl.zeros([R, FB], tl.float32)
    for quad in tl.static_range(4):
        sign = tl.dot(_patches(p_ptr, n, quad, rows, taps, ROWS_IN_ALL, K), a)
        value = tl.dot(_patches(q_ptr, n, quad, rows, taps, ROWS_IN_ALL, K), b)
        total += tl.where(sign > 0, value, 0.0)
    there = (rows < ROWS_IN_ALL)[:, None] & (filters < F)[None, :]
    place = (n * ROWS_IN_ALL + rows)[:, None] * F + filters[None, :]
    tl.store(y_ptr + place, (0.25 * total).to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _filter_slope_kernel(
    p_ptr, a_ptr, q_ptr, g_ptr, out_ptr,
    ROWS_IN_ALL: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, FB: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    n, taps = tl.program_id(0), tl.arange(0, KB)
    filters = tl.program_id(1) * FB + tl.arange(0, FB)
    a = tl.trans(_filters(a_ptr, n, filters, taps, F, K))
    total = tl.zeros([FB, KB], tl.float32)
    for start in range(0, ROWS_IN_ALL, R):
        rows = start + tl.arange(0, R)
        g = 0.25 * _maps(g_ptr, n, rows, filters, ROWS_IN_ALL, F)
        for quad in tl.static_range(4):
            sign = tl.dot(_patches(p_ptr, n, quad, rows, taps, ROWS_IN_ALL, K), a)
            kept = tl.where(sign > 0, g, 0.0)
            total += tl.dot(tl.trans(kept), _patches(q_ptr, n, quad, rows, taps, ROWS_IN_ALL, K))
    there = (filters < F)[:, None] & (taps < K)[None, :]
    tl.store(out_ptr + (n * F + filters)[:, None] * K + taps[None, :], total, mask=there)


@triton.jit
def _patch_slope_kernel(
    p_ptr, a_ptr, b_ptr, g_ptr, out_ptr,
    ROWS_IN_ALL: tl.constexpr, F: tl.constexpr, K: tl.constexpr,
    R: tl.constexpr, FB: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    n, quad, taps = tl.program_id(0), tl.program_id(2), tl.arange(0, KB)
    rows = tl.program_id(1) * R + tl.arange(0, R)
    p = _patches(p_ptr, n, quad, rows, taps, ROWS_IN_ALL, K)
    total = tl.zeros([R, KB], tl.float32)
    for start in range(0, F, FB):
        filters = start + tl.arange(0, FB)
        sign = tl.dot(p, tl.trans(_filters(a_ptr, n, filters, taps, F, K)))
        kept = tl.where(sign > 0, 0.25 * _maps(g_ptr, n, rows, filters, ROWS_IN_ALL, F), 0.0)
        total += tl.dot(kept, _filters(b_ptr, n, filters, taps, F, K))
    there = (rows < ROWS_IN_ALL)[:, None] & (taps < K)[None, :]
    place = ((n * 4 + quad) * ROWS_IN_ALL + rows)[:, None] * K + taps[None, :]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there)


def _sizes(patches: Tensor, filters: Tensor, most: int) -> tuple[int, int, int, dict[str, Any]]:
    pooled, count, taps = patches.shape[1] // 4, filters.shape[1], patches.shape[2]
    taps_at_once = max(16, triton.next_power_of_2(taps))
    fits = 16 * most // taps_at_once  # the more taps, the fewer filters there is room for
    # Nothing is loaded ahead: in float32 that takes more memory than a multiprocessor has, and the
    # programs that share one wait for memory in turns.
    blocks = {
        "R": ROWS,
        "FB": max(16, min(fits, triton.next_power_of_2(count))),
        "KB": taps_at_once,
        "num_stages": 1,
    }
    return pooled, count, taps, blocks


def masked_pool(p: Tensor, a: Tensor, q: Tensor, b: Tensor) -> Tensor:
    """Launch the kernel of `fused.masked_pool`."""
    p, a, q, b = (tensor.contiguous() for tensor in (p, a, q, b))
    pooled, count, taps, blocks = _sizes(p, a, FILTERS)
    y = torch.empty((len(p), pooled, count), dtype=p.dtype, device=p.device)
    grid = (len(p), triton.cdiv(pooled, ROWS), triton.cdiv(count, blocks["FB"]))
    _pool_kernel[grid](p, a, q, b, y, pooled, count, taps, **blocks)
    return y


def masked_filter_slope(p: Tensor, a: Tensor, q: Tensor, g: Tensor) -> Tensor:
    """Launch the kernel of `fused.masked_filter_slope`."""
    p, a, q, g = (tensor.contiguous() for tensor in (p, a, q, g))
    pooled, count, taps, blocks = _sizes(p, a, SUMMED_FILTERS)
    out = torch.empty_like(a, dtype=torch.float32)
    grid = (len(p), triton.cdiv(count, blocks["FB"]))
    _filter_slope_kernel[grid](p, a, q, g, out, pooled, count, taps, **blocks)
    return out


def masked_patch_slope(p: Tensor, a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """Launch the kernel of `fused.masked_patch_slope`."""
    p, a, b, g = (tensor.contiguous() for tensor in (p, a, b, g))
    pooled, count, taps, blocks = _sizes(p, a, SUMMED_FILTERS)
    out = torch.empty_like(p)
    grid = (len(p), triton.cdiv(pooled, ROWS), 4)
    _patch_slope_kernel[grid](p, a, b, g, out, pooled, count, taps, **blocks)
    return out


# Norm, ReLU, pool


@triton.jit
def _quarter(ptr, place, there, quad: tl.constexpr, W, C):
    """Load one pixel of each 2x2 square."""
    offset = ((quad // 2) * W + quad % 2) * C
    return tl.load(ptr + place + offset, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, place, x0, x1, x2, x3, there, W, C):
    """Store a map by quarters."""
    kind = ptr.dtype.element_ty
    tl.store(ptr + place, x0.to(kind), mask=there)
    tl.store(ptr + place + C, x1.to(kind), mask=there)
    tl.store(ptr + place + W * C, x2.to(kind), mask=there)
    tl.store(ptr + place + W * C + C, x3.to(kind), mask=there)


@triton.jit
def _by_plane(ptr, channel, exists):
    return tl.load(ptr + channel, mask=exists, other=0.0)[None, :]


@triton.jit
def _over(x0, x1, x2, x3, there):
    return tl.sum(tl.where(there, x0 + x1 + x2 + x3, 0.0), 0)[None, :]


@triton.jit
def _places(n, H, W, C, P: tl.constexpr, CB: tl.constexpr):
    """Return where a map's 2x2 squares begin, where they go when pooled, and which there are."""
    pixel, channel = tl.arange(0, P), tl.program_id(1) * CB + tl.arange(0, CB)
    row, column = pixel // (W // 2), pixel % (W // 2)
    there = (pixel < (H // 2) * (W // 2))[:, None] & (channel < C)[None, :]
    place = ((n * H + 2 * row) * W + 2 * column)[:, None] * C + channel[None, :]
    pooled = (n * (H // 2) * (W // 2) + pixel)[:, None] * C + channel[None, :]
    return place, pooled, there, channel, channel < C


@triton.jit
def _normal(x_ptr, place, there, N, W, C, EPS: tl.constexpr):
    """Return a normalised map by quarters, and 1 / its standard deviation."""
    x0, x1 = _quarter(x_ptr, place, there, 0, W, C), _quarter(x_ptr, place, there, 1, W, C)
    x2, x3 = _quarter(x_ptr, place, there, 2, W, C), _quarter(x_ptr, place, there, 3, W, C)
    mean = _over(x0, x1, x2, x3, there) / N
    x0, x1, x2, x3 = x0 - mean, x1 - mean, x2 - mean, x3 - mean
    k = tl.rsqrt(_over(x0 * x0, x1 * x1, x2 * x2, x3 * x3, there) / N + EPS)
    return x0 * k, x1 * k, x2 * k, x3 * k, k


@triton.jit
def _norm_kernel(
    x_ptr, s_ptr, t_ptr, y_ptr, SN, TN, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    P: tl.constexpr, CB: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    place, pooled, there, channel, exists = _places(n, H, W, C, P, CB)
    h0, h1, h2, h3, _ = _normal(x_ptr, place, there, H * W, W, C, EPS)
    s = _by_plane(s_ptr + n * SN, channel, exists)
    t = _by_plane(t_ptr + n * TN, channel, exists)
    y = tl.maximum(h0 * s + t, 0.0) + tl.maximum(h1 * s + t, 0.0)
    y += tl.maximum(h2 * s + t, 0.0) + tl.maximum(h3 * s + t, 0.0)
    tl.store(y_ptr + pooled, (0.25 * y).to(y_ptr.dtype.element_ty), mask=there)


@triton.jit
def _slope_kernel(
    x_ptr, s_ptr, t_ptr, g_ptr, dx_ptr, ds_ptr, dt_ptr, SN, TN,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    P: tl.constexpr, CB: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    place, pooled, there, channel, exists = _places(n, H, W, C, P, CB)
    N = H * W
    h0, h1, h2, h3, k = _normal(x_ptr, place, there, N, W, C, EPS)
    s = _by_plane(s_ptr + n * SN, channel, exists)
    t = _by_plane(t_ptr + n * TN, channel, exists)
    g = 0.25 * tl.load(g_ptr + pooled, mask=there, other=0.0).to(tl.float32)
    u0, u1 = tl.where(h0 * s + t > 0, g, 0.0), tl.where(h1 * s + t > 0, g, 0.0)
    u2, u3 = tl.where(h2 * s + t > 0, g, 0.0), tl.where(h3 * s + t > 0, g, 0.0)
    su = _over(u0, u1, u2, u3, there)
    suh = _over(u0 * h0, u1 * h1, u2 * h2, u3 * h3, there)
    tl.store(ds_ptr + n * C + channel, tl.sum(suh, 0), mask=exists)
    tl.store(dt_ptr + n * C + channel, tl.sum(su, 0), mask=exists)
    gain, mean, along = s * k, su / N, suh / N
    x0, x1 = gain * (u0 - mean - h0 * along), gain * (u1 - mean - h1 * along)
    x2, x3 = gain * (u2 - mean - h2 * along), gain * (u3 - mean - h3 * along)
    _store(dx_ptr, place, x0, x1, x2, x3, there, W, C)


@triton.jit
def _curve_kernel(
    x_ptr, s_ptr, t_ptr, g_ptr, v_ptr, a_ptr, b_ptr, gx_ptr, gs_ptr, gg_ptr, SN, TN, AN, BN,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    P: tl.constexpr, CB: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0)
    place, pooled, there, channel, exists = _places(n, H, W, C, P, CB)
    N = H * W
    h0, h1, h2, h3, k = _normal(x_ptr, place, there, N, W, C, EPS)
    s = _by_plane(s_ptr + n * SN, channel, exists)
    t = _by_plane(t_ptr + n * TN, channel, exists)
    a = _by_plane(a_ptr + n * AN, channel, exists)
    b = _by_plane(b_ptr + n * BN, channel, exists)
    # What a step (v, a, b) does to the normalised map (w), and to 1 / its standard deviation (dk).
    w0, w1 = _quarter(v_ptr, place, there, 0, W, C), _quarter(v_ptr, place, there, 1, W, C)
    w2, w3 = _quarter(v_ptr, place, there, 2, W, C), _quarter(v_ptr, place, there, 3, W, C)
    mean = _over(w0, w1, w2, w3, there) / N
    along = _over(w0 * h0, w1 * h1, w2 * h2, w3 * h3, there) / N
    w0, w1 = k * (w0 - mean - h0 * along), k * (w1 - mean - h1 * along)
    w2, w3 = k * (w2 - mean - h2 * along), k * (w3 - mean - h3 * along)
    dk = -k * k * along
    m0, m1, m2, m3 = h0 * s + t > 0, h1 * s + t > 0, h2 * s + t > 0, h3 * s + t > 0
    y = tl.where(m0, s * w0 + a * h0 + b, 0.0) + tl.where(m1, s * w1 + a * h1 + b, 0.0)
    y += tl.where(m2, s * w2 + a * h2 + b, 0.0) + tl.where(m3, s * w3 + a * h3 + b, 0.0)
    tl.store(gg_ptr + pooled, (0.25 * y).to(gg_ptr.dtype.element_ty), mask=there)
    g = 0.25 * tl.load(g_ptr + pooled, mask=there, other=0.0).to(tl.float32)
    u0, u1 = tl.where(m0, g, 0.0), tl.where(m1, g, 0.0)
    u2, u3 = tl.where(m2, g, 0.0), tl.where(m3, g, 0.0)
    u_mean = _over(u0, u1, u2, u3, there) / N
    uh = _over(u0 * h0, u1 * h1, u2 * h2, u3 * h3, there) / N
    suw = _over(u0 * w0, u1 * w1, u2 * w2, u3 * w3, there)
    tl.store(gs_ptr + n * C + channel, tl.sum(suw, 0), mask=exists)
    first, second, uw = a * k + s * dk, s * k, suw / N
    x0 = first * (u0 - u_mean - h0 * uh) - second * (w0 * uh + h0 * uw)
    x1 = first * (u1 - u_mean - h1 * uh) - second * (w1 * uh + h1 * uw)
    x2 = first * (u2 - u_mean - h2 * uh) - second * (w2 * uh + h2 * uw)
    x3 = first * (u3 - u_mean - h3 * uh) - second * (w3 * uh + h3 * uw)
    _store(gx_ptr, place, x0, x1, x2, x3, there, W, C)


def _launch(
    kernel: Any, maps: Tensor, *tensors: Tensor, by_plane: tuple[Tensor, ...], eps: float
) -> None:
    """Launch on all maps; `by_plane`: (n, c), where all images may share one row in memory."""
    count, height, width, channels = maps.shape
    pixels = triton.next_power_of_2((height // 2) * (width // 2))
    some = max(1, min(CHANNELS, TILE // pixels, triton.next_power_of_2(channels)))
    grid = (count, triton.cdiv(channels, some))
    strides = [tensor.stride(0) for tensor in by_plane]
    kernel[grid](maps, *tensors, *strides, height, width, channels, P=pixels, CB=some, EPS=eps)


def _rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def norm_relu_pool(x: Tensor, s: Tensor, t: Tensor, eps: float) -> Tensor:
    """Launch the kernel of `fused.norm_relu_pool`."""
    count, height, width, channels = x.shape
    x, (s, t) = x.contiguous(), _rows(s, t)
    y = torch.empty((count, height // 2, width // 2, channels), dtype=x.dtype, device=x.device)
    _launch(_norm_kernel, x, s, t, y, by_plane=(s, t), eps=eps)
    return y


def norm_relu_pool_slope(
    x: Tensor, s: Tensor, t: Tensor, g: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel of `fused.norm_relu_pool_slope`."""
    x, g, (s, t) = x.contiguous(), g.contiguous(), _rows(s, t)
    out = torch.empty_like(x), _planes(x, s), _planes(x, t)
    _launch(_slope_kernel, x, s, t, g, *out, by_plane=(s, t), eps=eps)
    return out


def norm_relu_pool_curve(
    x: Tensor, s: Tensor, t: Tensor, g: Tensor, v: Tensor, a: Tensor, b: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel of `fused.norm_relu_pool_curve`."""
    x, g, v = x.contiguous(), g.contiguous(), v.contiguous()
    s, t, a, b = _rows(s, t, a, b)
    out = torch.empty_like(x), _planes(x, s), torch.empty_like(g)
    _launch(_curve_kernel, x, s, t, g, v, a, b, *out, by_plane=(s, t, a, b), eps=eps)
    return out


def _planes(x: Tensor, like: Tensor) -> Tensor:
    return torch.empty((x.shape[0], x.shape[-1]), dtype=like.dtype, device=x.device)
