"""Sums that a CPU's compiler has had its hands on: the same, and bounded as they were."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace

import pytest
import torch

from door import access_to, linear_loss, linear_params, some_images, without
from understudy.privacy import records
from understudy.privacy.releases.gradient import gradient
from understudy.training import engine

NEEDS_A_COMPILER = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", engine.COMPILER)) is None, reason="there is no C++ compiler"
)


def flat(params) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in params.values()])


def compiling(monkeypatch, data, params=None):
    """Return access with an engine of a CPU that compiles at once, batches in parts of three."""
    dimension = flat(params or linear_params()).numel()
    monkeypatch.setattr(engine, "TO_COMPILE", 0)
    monkeypatch.setattr(records, "FEW", 1)
    monkeypatch.setattr(records, "ROW_BYTES", 3 * 4 * dimension)
    return replace(access_to(data), engine=engine.Engine(say=pytest.fail))


@NEEDS_A_COMPILER
def test_compiled_for_a_cpu_it_is_the_same_sum_and_nothing_that_is_not_finite_gets_in(monkeypatch):
    data, params = some_images(40), linear_params()

    def loss(p, image, label):
        """Not finite for two records, in two ways; much too large for others."""
        odd = image[0, 0, 0] > 0.8
        return torch.where(odd, torch.where(label > 0, math.inf, math.nan), 1e3) * linear_loss(
            p, image, label
        )

    plain = flat(gradient(access_to(data), loss, params, clip_norm=0.1))
    access = compiling(monkeypatch, data)
    for _ in range(3):
        released = flat(gradient(access, loss, params, clip_norm=0.1))
        assert released.isfinite().all()
        assert torch.allclose(released, plain, atol=1e-9, rtol=1e-5)
    assert len(access.engine._programs) == 1
    odd = (torch.from_numpy(data.images)[:, 0, 0, 0] > 0.8 * 255).nonzero().flatten().tolist()
    assert len(odd) >= 2
    kept = tuple(set(range(40)) - set(odd))
    without_them = flat(gradient(access_to(data, select=kept), loss, params, clip_norm=0.1))
    assert torch.allclose(plain, without_them, atol=1e-9)


@NEEDS_A_COMPILER
def test_compiled_the_row_that_is_summed_is_the_one_that_was_bounded(monkeypatch):
    """A compiler takes norms before it rounds to bfloat16, and sums after, unless it is stopped."""
    data = some_images(40)
    data.images[:] = 128
    params = {"w": torch.full((64,), 0.0078)}

    def loss(p, image, label):
        narrow = torch.exp(p["w"].bfloat16() * image.flatten().bfloat16())
        return 1e6 * ((narrow.float() - 1.00389) ** 2).sum()

    access = compiling(monkeypatch, data, params)
    for _ in range(3):
        one, none = (
            flat(gradient(some, loss, params, clip_norm=0.1)) * access.expected_batch
            for some in (
                replace(access, randomness=access_to(data, select=chosen).randomness)
                for chosen in ((5,), ())
            )
        )
        assert (one - none).norm() <= 0.1 * (1 + 1e-7)
    assert len(access.engine._programs) == 1


def test_which_call_is_compiled_first_does_not_depend_on_a_unit(monkeypatch):
    """The last part of a batch may be a single unit, and its slot empty."""
    data, counts = some_images(40), []
    nothing = 0 * flat(linear_params())
    for world in (data, without(data, 5)):
        access = compiling(monkeypatch, world)
        alone = replace(access, randomness=access_to(data, select=(0, 1, 2, 5)).randomness)
        calls: list[int] = []
        monkeypatch.setattr(
            access.engine, "run", lambda *_, calls=calls, **__: calls.append(1) or nothing
        )
        gradient(alone, linear_loss, linear_params(), clip_norm=0.1)
        counts.append(len(calls))
    assert counts == [2, 2]


def test_a_small_batch_on_a_cpu_is_not_filled_up(monkeypatch):
    """Parts of a cache's size, if a batch has several: else the place of one would be wasted."""
    shapes = []
    original = records.Records.padded_places

    def watched(self, units, size):
        shapes.append(size)
        return original(self, units, size)

    monkeypatch.setattr(records.Records, "padded_places", watched)
    gradient(access_to(some_images(40)), linear_loss, linear_params(), clip_norm=0.1)
    assert shapes == []
    access = compiling(monkeypatch, some_images(40))
    gradient(replace(access, engine=engine.Engine()), linear_loss, linear_params(), clip_norm=0.1)
    assert shapes == [3]
    plain = replace(access, engine=engine.Engine(compile=False))
    gradient(plain, linear_loss, linear_params(), clip_norm=0.1)
    assert shapes == [3]
