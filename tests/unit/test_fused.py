"""Fused operators against autograd, `vmap` and the plain network; their kernels against both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from torch.autograd import gradcheck, gradgradcheck
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from understudy.methods.psg import PSG, PSGConfig
from understudy.nets import convnet, fused, kernels
from understudy.privacy.bounded import _BoundedSum
from understudy.privacy.gradients import GradientRows
from understudy.privacy.plan import PublicFacts
from understudy.training import engine
from understudy.training.sgd import RecordLoss, SGDStep

FACTS = PublicFacts(
    units=100, class_names=tuple("0123"), shape=(1, 16, 16), mean=(0.5,), std=(0.5,)
)

SHARED_MEMORY = 232_448
"""Bytes that the programs on a multiprocessor of an H100 or H200 share."""


def leaf(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def conv(p, a):
    return fused.masked_pool(p, a, p, a)


def norm(x, s, t):
    return fused.norm_relu_pool(x, s, t, fused.NORM_EPS)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [(norm, (leaf(2, 4, 6, 3), leaf(2, 3), leaf(2, 3))), (conv, (leaf(2, 16, 5), leaf(2, 3, 5)))],
)
def test_first_and_second_derivatives(function, inputs):
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs)


def test_under_vmap_each_record_has_its_own_slope():
    x, s, t = leaf(5, 1, 4, 6, 3), leaf(5, 3), leaf(3)
    by_record = torch.vmap(lambda x, s: norm(x, s[None], t[None]).square().sum())(x, s)
    whole = norm(x[:, 0], s, t.expand(5, 3)).square().sum((1, 2, 3))
    assert torch.allclose(by_record, whole)
    ours, theirs = (torch.autograd.grad(y.sum(), (x, s, t)) for y in (by_record, whole))
    assert all(torch.allclose(a, b) for a, b in zip(ours, theirs, strict=True))


def steps():
    """The three steps of PSG with their arguments, as a GPU would get them."""
    psg = PSG(PSGConfig(width=8, images_per_class=5), FACTS, seed=0)
    theta = psg._draw(0, torch.device("cpu"))
    gradient = {name: torch.randn_like(weight) for name, weight in theta.items()}
    images, labels = torch.randn(20, 1, 16, 16), torch.arange(20) % 4
    private = torch.randint(0, 256, (50, 1, 16, 16), dtype=torch.uint8), torch.arange(50) % 4
    places, counts = torch.arange(32), torch.arange(32) < 30
    release = _BoundedSum(GradientRows(RecordLoss(psg.network, FACTS.mean, FACTS.std)), 0.1)
    prepared = psg.network.prepare(images)
    return [
        (
            psg._image_step(psg.network, 1.0),
            (
                ({"images": images}, {"images": torch.zeros_like(images)}),
                {"labels": labels},
                theta,
                gradient,
                torch.tensor(0.1),
            ),
        ),
        (SGDStep(psg.network), ((theta, {}), prepared, labels, torch.tensor(0.01))),
        (release, (*private, theta, places, counts)),
    ]


@pytest.mark.parametrize("which", range(3))
def test_traced_steps_with_fused_operators_equal_plain_ones(which, monkeypatch):
    """What a GPU compiles: the fused operators, traced through vmap and double backward."""
    step, args = steps()[which]
    expected = pytree.tree_leaves(step(*args))
    monkeypatch.setattr(convnet, "_conv_relu_pool", conv)
    monkeypatch.setattr(
        convnet, "_norm_relu_pool", lambda x, s, t: norm(x, *(p.expand(len(x), -1) for p in (s, t)))
    )
    leaves, structure = pytree.tree_flatten(args)
    laid_out = [engine._laid_out(tensor) for tensor in leaves]

    def flat(*leaves):
        return pytree.tree_leaves(step(*pytree.tree_unflatten(leaves, structure)))

    traced = make_fx(flat, decomposition_table=engine.SMALL_PRODUCTS)(*laid_out)
    names = {str(node.target) for node in traced.graph.nodes}
    assert any("masked_pool" in name for name in names)
    assert any("norm_relu_pool_slope" in name for name in names)
    assert any("norm_relu_pool_curve" in name for name in names) == (which == 0)
    for ours, theirs in zip(traced(*laid_out), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * theirs.abs().max().item())


def test_kernels_equal_their_plain_twins():
    """The kernels themselves, run by Triton's interpreter."""
    script = Path(__file__).parent / "interpreted_kernels.py"
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal") == 6


class Launches:
    """Stand in for a kernel; keep what it would be launched with."""

    def __init__(self, kernel):
        self.kernel, self.kept = kernel, None

    def __getitem__(self, grid):
        def keep(*args, **options):
            self.kept = args, options

        return keep

    def compiled(self):
        """Compile what was launched for an H100 or H200, which takes no GPU."""
        args, options = self.kept
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | options
        kinds = {torch.float32: "*fp32", torch.bfloat16: "*bf16"}
        signature = {
            name: kinds[given[name].dtype] if name.endswith("_ptr") else "constexpr"
            for name in self.kernel.arg_names
        }
        fixed = {
            (place,): given[name]
            for place, name in enumerate(self.kernel.arg_names)
            if signature[name] == "constexpr"
        }
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=fixed)
        options = {"num_stages": options["num_stages"]}
        return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("name", ["pool", "filter_slope", "patch_slope"])
def test_masked_products_fit_into_a_multiprocessor(name, monkeypatch):
    """Colour images in float32, as when sets are evaluated; several programs should fit at once."""
    launches = Launches(getattr(kernels, f"_{name}_kernel"))
    monkeypatch.setattr(kernels, f"_{name}_kernel", launches)
    p, a = torch.randn(1, 1024, 32), torch.randn(1, 128, 32)
    g = torch.randn(1, 256, 128)
    last = {"pool": (p, a), "filter_slope": (p, g), "patch_slope": (a, g)}[name]
    getattr(kernels, f"masked_{name}")(p, a, *last)
    assert launches.compiled().metadata.shared <= SHARED_MEMORY / 4
