"""The `gradient` release, held to a plain loop, to Opacus, and to the errors others have made."""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import numpy as np
import opacus
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from door import access_to, linear_loss, linear_params, some_images, without
from static import static_engine
from understudy.errors import InvalidData, PlanViolation
from understudy.nets.convnet import ConvNet
from understudy.privacy import records
from understudy.privacy.bounded import clipped_sum, noisy_bounded_sum
from understudy.privacy.gradients import GradientRows, split_like
from understudy.privacy.records import View
from understudy.privacy.releases.gradient import gradient
from understudy.privacy.sampling import Access

UNITS_OF_SEVERAL = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 5]


def plain_loop(data, loss, params, clip_norm, units=None):
    """Clip each unit's gradient, summed over its records; sum; all in the most obvious way."""
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    for unit in range(int(data.units.max()) + 1) if units is None else units:
        summed = {name: torch.zeros_like(p) for name, p in params.items()}
        for record in np.flatnonzero(data.units == unit):
            leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
            image = torch.from_numpy(data.images[record]).float() / 255
            label = torch.tensor(int(data.labels[record]))
            grads = torch.autograd.grad(loss(leaves, image, label), list(leaves.values()))
            summed = {n: summed[n] + g for n, g in zip(params, grads, strict=True)}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in summed.values()))
        scale = min(1.0, clip_norm / norm) if norm else 1.0
        total = {n: total[n] + scale * summed[n].double() for n in params}
    return total


def flat(params) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in params.values()])


@pytest.mark.parametrize("units", [None, UNITS_OF_SEVERAL], ids=["records", "groups"])
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 100.0])
def test_equals_a_plain_loop(units, clip_norm):
    data = some_images(12, units=units)
    network = ConvNet((1, 8, 8), 3, width=4)
    params = network.init(torch.Generator().manual_seed(1))

    def loss(p, image, label):
        return nn.functional.cross_entropy(network(p, image[None]), label[None])

    access = access_to(data)
    released = gradient(access, loss, params, clip_norm=clip_norm)
    expected = flat(plain_loop(data, loss, params, clip_norm)) / access.expected_batch
    assert torch.allclose(flat(released), expected, atol=1e-5 * clip_norm, rtol=1e-5)


@pytest.mark.parametrize("units", [None, UNITS_OF_SEVERAL], ids=["records", "groups"])
def test_equals_opacus(units):
    clip_norm = 0.5
    data = some_images(12, units=units)
    network = ConvNet((1, 8, 8), 3, width=4)
    params = network.init(torch.Generator().manual_seed(1))

    def loss(p, image, label):
        return nn.functional.cross_entropy(network(p, image[None]), label[None])

    module = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.GroupNorm(4, 4), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(4 * 16, 3),
    )  # fmt: skip
    module.load_state_dict(
        dict(zip(module.state_dict(), params.values(), strict=True)), strict=True
    )
    sampled = opacus.GradSampleModule(module, loss_reduction="sum")
    images = torch.from_numpy(data.images).float() / 255
    nn.functional.cross_entropy(
        sampled(images), torch.from_numpy(data.labels), reduction="sum"
    ).backward()
    per_record = torch.cat([p.grad_sample.flatten(1) for p in sampled.parameters()], dim=1)
    count = int(data.units.max()) + 1
    per_unit = torch.zeros(count, per_record.shape[1])
    per_unit.index_add_(0, torch.from_numpy(data.units), per_record)
    scale = (clip_norm / per_unit.norm(dim=1, keepdim=True)).clamp(max=1)
    access = access_to(data)
    expected = (per_unit * scale).sum(0) / access.expected_batch

    released = flat(gradient(access, loss, params, clip_norm=clip_norm))
    assert torch.allclose(released.float(), expected, atol=1e-5)


def test_denominator_is_public():
    """One unit sampled of twelve: dividing by the realised count would give six times as much."""
    data, params = some_images(12), linear_params()
    access = access_to(data, select=(3,), sampling_rate=0.5)
    released = flat(gradient(access, linear_loss, params, clip_norm=1e-3))
    assert released.norm() * 0.5 * 12 == pytest.approx(1e-3, rel=1e-4)


def test_an_empty_slot_counts_in_the_denominator():
    """It is N0 that was declared; how many slots are filled is private."""
    data = some_images(12)
    released = [
        flat(gradient(access_to(d, select=(3,)), linear_loss, linear_params(), clip_norm=1e-3))
        for d in (data, without(data, 5))
    ]
    assert torch.equal(*released)


def test_clips_before_summing():
    """Twelve equal units add up; clipping their mean would leave one clip norm in all."""
    data = some_images(12)
    data.images[:], data.labels[:] = 200, 1
    released = gradient(access_to(data), linear_loss, linear_params(), clip_norm=1e-3)
    assert flat(released).norm() * 6 == pytest.approx(12e-3, rel=1e-4)


def test_clips_the_whole_vector_of_a_unit():
    """Neither tensor by tensor nor record by record."""
    data = some_images(12, units=[0] * 11 + [1])
    access = access_to(data, select=(0,))
    released = gradient(access, linear_loss, linear_params(), clip_norm=1e-3)
    assert flat(released).norm() * access.expected_batch == pytest.approx(1e-3, rel=1e-4)


def test_empty_batch_is_noise():
    params = linear_params()
    access = access_to(some_images(12), select=(), noise_multiplier=2.0, noise=1.5)
    released = flat(gradient(access, linear_loss, params, clip_norm=0.1))
    assert torch.allclose(released, torch.full_like(released, 2.0 * 0.1 * 1.5 / 6), rtol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_counts_zero(poison):
    data, params = some_images(12), linear_params()
    data.images[5] = 255

    def loss(p, image, label):
        return linear_loss(p, image, label) * torch.where(image.min() == 1, poison, 1.0)

    released = flat(gradient(access_to(data), loss, params, clip_norm=0.1))
    others = [u for u in range(12) if u != 5]
    expected = flat(plain_loop(data, linear_loss, params, 0.1, units=others)) / 6
    assert torch.allclose(released, expected, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    unit=st.integers(0, 4),
    scale=st.sampled_from([1e-6, 1.0, 1e6, 1e30]),
    clip_norm=st.sampled_from([1e-3, 0.1, 10.0]),
)
def test_emptying_a_unit_moves_the_sum_by_at_most_the_clip_norm(seed, unit, scale, clip_norm):
    data = some_images(12, units=UNITS_OF_SEVERAL, seed=seed)
    params = linear_params()

    def loss(p, image, label):
        return scale * linear_loss(p, image, label)

    sums = []
    for world in (data, without(data, unit)):
        access = access_to(world)
        sums.append(flat(gradient(access, loss, params, clip_norm=clip_norm)) * 3)
    # The released mean is rounded to float32, which the noise hides but this test sees.
    rounding = 1e-6 * max(s.abs().max() for s in sums)
    assert (sums[0] - sums[1]).norm() <= clip_norm + rounding


def test_bound_holds_after_float32_rounding():
    rows = torch.randn(64, 30_000) * torch.logspace(-3, 6, 64)[:, None]
    for row in rows:
        assert clipped_sum([row[None]], 0.1).norm() <= 0.1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e4, 3e38])
def test_bound_holds_for_huge_and_half_precision_rows(kind, size):
    rows = (torch.randn(4, 10_000).clamp(-1, 1) * size).to(kind)
    for row in rows:
        for bound in (3e-5, 0.1):
            assert clipped_sum([row[None]], bound).norm() <= bound


def test_answers_lie_on_a_public_grid():
    """The last bits of an answer must not depend on the sum: all are multiples of one step."""
    data, params = some_images(12), linear_params()
    generator = torch.Generator().manual_seed(0)
    for clip_norm in (0.1, 3.7):
        access = access_to(data, noise_multiplier=0.93)
        access.randomness.normal = lambda n: torch.randn(
            n, generator=generator, dtype=torch.float64
        )
        total = noisy_bounded_sum(
            access, GradientRows(linear_loss), params, dimension=195, bound=clip_norm
        )
        step = 2.0 ** (math.floor(math.log2(0.93 * clip_norm)) - 20)
        assert torch.equal(total / step, torch.round(total / step))
        assert step < 1e-6 * 0.93 * clip_norm


def test_scalar_parameters_are_allowed():
    def loss(p, image, label):
        return p["scale"] * linear_loss(p, image, label)

    params = linear_params() | {"scale": torch.tensor(1.5)}
    released = gradient(access_to(some_images(12)), loss, params, clip_norm=0.1)
    assert released["scale"].shape == ()


def test_batch_norm_is_refused():
    norm = nn.BatchNorm1d(64)

    def loss(p, image, label):
        return linear_loss(p, norm(image.flatten()[None])[0], label)

    with pytest.raises(PlanViolation, match="record by record"):
        gradient(access_to(some_images(12)), loss, linear_params(), clip_norm=0.1)


def test_public_randomness_inside_a_loss_is_refused():
    def loss(p, image, label):
        return linear_loss(p, image + torch.rand_like(image), label)

    with pytest.raises(PlanViolation, match="record by record"):
        gradient(access_to(some_images(12)), loss, linear_params(), clip_norm=0.1)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.inf, math.nan])
def test_a_senseless_clip_norm_is_refused(bound):
    with pytest.raises(PlanViolation):
        gradient(access_to(some_images(12)), linear_loss, linear_params(), clip_norm=bound)


def test_memory_is_bounded_at_any_batch(monkeypatch):
    """Chunks of three rows: the same sum, and three records at a time, somebody's or fillers."""
    units = [0] * 50 + list(range(1, 31))
    data, params = some_images(80, units=units), linear_params()
    expected = flat(gradient(access_to(data), linear_loss, params, clip_norm=0.1))
    dimension = flat(params).numel()
    monkeypatch.setattr(records, "FEW", 1)
    monkeypatch.setattr(records, "ROW_BYTES", 3 * 4 * dimension)
    seen = []
    original = records.Records._contributions

    def watched(self, some, contribution, inputs):
        seen.append(len(some))
        return original(self, some, contribution, inputs)

    monkeypatch.setattr(records.Records, "_contributions", watched)
    released = flat(gradient(access_to(data), linear_loss, params, clip_norm=0.1))
    assert set(seen) == {3}
    assert 80 <= sum(seen) < 80 + 3 * 11  # 31 units are eleven chunks, each filled up
    assert torch.allclose(released, expected, atol=1e-9, rtol=1e-5)


def halves(image):
    """What a view shows: not pixels, and not their shape."""
    return image.flatten().view(2, 32).flip(0).flatten() - 0.5


@pytest.mark.parametrize("units", [None, UNITS_OF_SEVERAL], ids=["records", "groups"])
@pytest.mark.parametrize("is_static", [False, True], ids=["plain", "compiled"])
def test_a_view_shows_each_record_to_the_loss(units, is_static, monkeypatch):
    data, params = some_images(12, units=units), linear_params()
    select = (0, 1, 3) if units else (0, 2, 3, 5, 11)

    def loss(p, image, label):
        return linear_loss(p, halves(image), label)

    expected = flat(gradient(access_to(data, select=select), loss, params, clip_norm=0.3))
    access = access_to(data, select=select)
    if is_static:
        access = replace(access, engine=static_engine(monkeypatch))
    view = View(halves)
    released = flat(gradient(access, linear_loss, params, clip_norm=0.3, view=view))
    assert torch.allclose(released, expected, atol=1e-7)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 4))
def test_emptying_a_unit_moves_what_a_view_shows_by_at_most_the_clip_norm(seed, unit):
    data, params = some_images(12, units=UNITS_OF_SEVERAL, seed=seed), linear_params()
    sums = []
    for world in (data, without(data, unit)):
        view = View(lambda image: 1e4 * halves(image))
        released = gradient(access_to(world), linear_loss, params, clip_norm=0.3, view=view)
        sums.append(flat(released) * 3)
    assert (sums[0] - sums[1]).norm() <= 0.3 * (1 + 1e-5)


def test_a_view_is_made_once_for_the_records_in_use_and_goes_with_its_maker():
    data, params, made = some_images(12), linear_params(), []

    def counted(image):
        made.append(image.shape)
        return halves(image)

    access = access_to(data)
    view = View(counted)
    for _ in range(3):
        gradient(access, linear_loss, params, clip_norm=0.3, view=view)
    assert len(made) == 1  # for all records at once
    assert len(access.records._views) == 1
    assert "sealed" in repr(access.records._views[view])
    del view
    gc.collect()
    assert len(access.records._views) == 0


def test_a_view_that_mixes_records_is_refused():
    norm = nn.BatchNorm1d(64)
    view = View(lambda image: norm(image.flatten()[None])[0])
    with pytest.raises(PlanViolation, match="record by record"):
        gradient(access_to(some_images(12)), linear_loss, linear_params(), clip_norm=1.0, view=view)


def test_a_view_of_no_records_is_noise():
    data = some_images(12)
    access = access_to(data, select=(), noise_multiplier=1.0, noise=1.0)
    released = gradient(access, linear_loss, linear_params(), clip_norm=0.6, view=View(halves))
    assert torch.allclose(flat(released).float(), torch.full((195,), 0.1))


def test_split_like_keeps_names_shapes_and_order():
    params = linear_params()
    pieces = split_like(torch.arange(195, dtype=torch.float64), params)
    assert list(pieces) == list(params)
    assert pieces["bias"].tolist() == [192, 193, 194]
    assert pieces["weight"].shape == (3, 64)


@pytest.mark.parametrize("batch", [4, 5, 12, 32])
def test_static_batches_give_the_same_sum(batch, monkeypatch):
    """Twelve units in passes of `batch`: filled up with places that do not count, none left out."""
    data, params = some_images(12), linear_params()
    select = (0, 2, 3, 5, 6, 7, 8, 9, 11)
    expected = flat(gradient(access_to(data, select=select), linear_loss, params, clip_norm=0.1))
    monkeypatch.setattr(Access, "static_batch", property(lambda _: batch))
    access = replace(access_to(data, select=select), engine=static_engine(monkeypatch))
    for _ in range(2):
        released = flat(gradient(access, linear_loss, params, clip_norm=0.1))
        assert torch.allclose(released, expected, atol=1e-7)
    assert len(access.engine.compiled) == 1
    assert access.engine.said == []


def test_static_batches_of_nothing_and_with_empty_slots(monkeypatch):
    data, params = some_images(12), linear_params()
    engine = static_engine(monkeypatch)
    nobody = replace(access_to(data, select=()), engine=engine)
    assert flat(gradient(nobody, linear_loss, params, clip_norm=0.1)).abs().max() == 0
    emptied = without(data, 0)
    expected = flat(gradient(access_to(emptied), linear_loss, params, clip_norm=0.1))
    access = replace(access_to(emptied), engine=engine)
    assert torch.allclose(
        flat(gradient(access, linear_loss, params, clip_norm=0.1)), expected, atol=1e-7
    )


def test_what_fills_a_static_batch_up_counts_for_nothing(monkeypatch):
    """The first record fills batches up; here its loss is infinite, and it was not sampled."""
    data, params = some_images(12), linear_params()
    data.images[0] = 255

    def loss(p, image, label):
        return linear_loss(p, image, label) / (image.min() < 1)

    select = (1, 4, 5)
    expected = flat(gradient(access_to(data, select=select), loss, params, clip_norm=0.1))
    access = replace(access_to(data, select=select), engine=static_engine(monkeypatch))
    released = flat(gradient(access, loss, params, clip_norm=0.1))
    assert released.isfinite().all()
    assert torch.allclose(released, expected, atol=1e-7)


def test_units_of_several_records_take_the_general_path(monkeypatch):
    data, params = some_images(12, units=UNITS_OF_SEVERAL), linear_params()
    expected = flat(gradient(access_to(data), linear_loss, params, clip_norm=0.1))
    access = replace(access_to(data), engine=static_engine(monkeypatch))
    assert torch.equal(flat(gradient(access, linear_loss, params, clip_norm=0.1)), expected)
    assert access.engine.compiled == []


def test_static_batches_are_two_standard_deviations_above_the_expected_one():
    access = access_to(some_images(4000), sampling_rate=0.064)
    assert access.expected_batch == pytest.approx(256)
    assert access.static_batch == 288  # 256 + 2 * 15.5, rounded up to a multiple of 32
    fewer = {most: replace(access, at_once=most).static_batch for most in (512, 100, 7)}
    assert fewer == {512: 288, 100: 96, 7: 7}


def test_rows_of_another_length_than_declared_are_refused():
    """Broadcast over all coordinates, a bounded row of one would no longer be bounded."""
    for wrong in (1, 7):
        with pytest.raises(PlanViolation, match=f"have {wrong} coordinates, expected 400"):
            noisy_bounded_sum(
                access_to(some_images(12)),
                lambda _, images, __, wrong=wrong: [torch.ones(len(images), wrong)],
                dimension=400,
                bound=1.0,
            )


def test_which_kernels_run_does_not_depend_on_a_unit():
    """A set of groups takes the general path even where, by chance, each group has one record."""
    groups = some_images(12, units=list(range(12)))
    assert not access_to(groups).records.one_each
    assert access_to(some_images(12)).records.one_each
    with pytest.raises(InvalidData, match="a unit has several records"):
        access_to(some_images(12, units=UNITS_OF_SEVERAL, unit="record"))


def test_rounded_rows_are_bounded_as_they_are():
    """bfloat16 rows: the norm is that of the rounded row, so the bound holds for what is summed."""
    torch.manual_seed(0)
    rows = [torch.randn(50, 3, 40).bfloat16() * 10, torch.randn(50, 70)]
    for number in range(50):
        one = [block[number : number + 1] for block in rows]
        assert 0.1 - 1e-6 < clipped_sum(one, 0.1).norm() <= 0.1
    small = [block / 1e6 for block in rows]
    exact = torch.cat([block.double().flatten(1) for block in small], dim=1).sum(0)
    assert torch.allclose(clipped_sum(small, 0.1), exact, atol=1e-12)


def test_rows_in_any_memory_order_give_sums_in_the_parameters_order():
    block = torch.randn(6, 4, 5, 2)
    strided = block.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    assert strided.stride() != block.stride()
    assert torch.allclose(clipped_sum([strided], 1.0), clipped_sum([block], 1.0))
