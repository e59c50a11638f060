"""Adam as a pure function: equal to torch's, compiled or not."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from static import static_engine
from understudy.training.adam import Adam
from understudy.training.engine import Engine


def slopes_of(params):
    """The gradient of a function that is flat in places and steep in others."""
    leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
    loss = sum((weight.sin() * (10.0 ** -place) * weight).sum()
               for place, weight in enumerate(leaves.values()))  # fmt: skip
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def some_params():
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (4, 3), "bias": (3,), "tiny": (2, 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.999), (0.0, 0.9)])
def test_it_is_torchs_adam(betas):
    params, adam = some_params(), Adam(betas)
    theirs = {name: weight.clone().requires_grad_() for name, weight in params.items()}
    optimizer = torch.optim.Adam(theirs.values(), lr=0.01, betas=betas)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    state = adam.start(params)
    for step in range(20):
        for name, slope in slopes_of(theirs).items():
            theirs[name].grad = slope
        optimizer.step()
        schedule.step()
        lr = torch.tensor(0.01 * 0.5 ** (step // 5))
        params, state = adam.step(params, slopes_of(params), state, lr)
        for name, weight in params.items():
            assert torch.allclose(weight, theirs[name], rtol=0, atol=1e-6), (step, name)
    assert not torch.allclose(params["tiny"], some_params()["tiny"], atol=1e-2)
    assert float(state.steps) == 20


def test_the_state_is_tensors_and_a_step_changes_nothing_in_place():
    params, adam = some_params(), Adam()
    state = adam.start(params)
    before = [leaf.clone() for leaf in pytree.tree_leaves((params, state))]
    assert len(before) == 3 * 3 + 1
    assert all(isinstance(leaf, torch.Tensor) for leaf in before)
    assert state.steps.shape == ()
    adam.step(params, slopes_of(params), state, torch.tensor(0.1))
    after = pytree.tree_leaves((params, state))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_compiled_and_repeated_it_is_the_same(monkeypatch):
    adam, engine = Adam(), static_engine(monkeypatch)

    def step(state, lr):
        params, moments = state
        return adam.step(params, slopes_of(params), moments, lr)

    start = some_params()
    state, lr = (start, adam.start(start)), torch.tensor(0.05)
    ours = engine.run(step, state, lr, times=4)
    theirs = Engine().run(step, state, lr, times=4)
    assert engine.said == []
    assert float(ours[1].steps) == 4
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
