"""Compare each Triton kernel with its plain twin; run with TRITON_INTERPRET=1, or on a GPU."""

from __future__ import annotations

import torch

from understudy.nets import fused, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = fused.NORM_EPS
COMPARED: set[str] = set()


def compare(name, *args) -> None:
    ours = getattr(kernels, name)(*args)
    theirs = getattr(fused, name)._init_fn(*args)
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    for a, b in pairs:
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        # A GPU multiplies float32 with 10 bits of mantissa.
        tolerance = 1e-5 if DEVICE == "cpu" and a.dtype == torch.float32 else 2e-2
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < tolerance, (name, [tuple(x.shape) for x in args[:1]], error)
    COMPARED.add(name)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for n, h, w, c in ((2, 4, 6, 3), (3, 16, 16, 40), (1, 8, 8, 64)):
            x, v = drawn(n, h, w, c, dtype=dtype) + 0.5, drawn(n, h, w, c, dtype=dtype)
            s, a, b = (drawn(n, c) for _ in range(3))
            t = drawn(c).expand(n, c)  # one row for all images
            g = drawn(n, h // 2, w // 2, c, dtype=dtype)
            compare("norm_relu_pool", x, s, t, EPS)
            compare("norm_relu_pool_slope", x, s, t, g, EPS)
            compare("norm_relu_pool_curve", x, s, t, g, v, a, b, EPS)
        for n, pixels, filters, taps in ((2, 64, 128, 16), (2, 100, 20, 16), (1, 9, 200, 48)):
            p, q = (drawn(n, 4 * pixels, taps, dtype=dtype) for _ in range(2))
            a, b = (drawn(n, filters, taps) for _ in range(2))
            g = drawn(n, pixels, filters, dtype=dtype)
            compare("masked_pool", p, a, q, b)
            compare("masked_filter_slope", p, a, q, g)
            compare("masked_patch_slope", p, a, b, g)
    assert {name for name in dir(fused) if name.startswith(("norm_", "masked_"))} == COMPARED
    for name in sorted(COMPARED):
        print(name, "equal")


if __name__ == "__main__":
    main()
