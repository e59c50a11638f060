"""Parameters, and the type that maps between layers have on a device."""

from __future__ import annotations

import pytest
import torch

from understudy.nets.convnet import ConvNet
from understudy.nets.params import narrow_on

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_maps_are_narrow_where_that_is_fast(monkeypatch):
    assert narrow_on(GPU) == torch.bfloat16
    assert narrow_on(CPU) is None  # for tests processors are all alike
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert narrow_on(CPU) == torch.bfloat16
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")  # of another version of torch
    assert narrow_on(CPU) is None


@pytest.mark.parametrize("sides", [(8, 8), (28, 28)])
def test_narrow_maps_give_nearly_the_same_logits_and_gradients(sides, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    wide = ConvNet((1, *sides), 5, 16)
    narrow = wide.on(CPU)
    params = wide.init(torch.Generator().manual_seed(0))
    images = torch.rand(6, 1, *sides, generator=torch.Generator().manual_seed(1))
    found = []
    for network in (wide, narrow):
        leaves = {name: weight.clone().requires_grad_() for name, weight in params.items()}
        logits = network(leaves, images)
        slopes = torch.autograd.grad(logits.square().sum(), list(leaves.values()))
        assert {slope.dtype for slope in slopes} == {torch.float32}
        found.append(torch.cat([slope.flatten() for slope in (logits.detach(), *slopes)]))
    assert (found[1] - found[0]).norm() < 0.03 * found[0].norm()
    assert not torch.equal(*found)
