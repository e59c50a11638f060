"""`class_sums` and `histogram`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from door import access_to, features_of, open_curator, some_images, without
from static import static_engine
from understudy.errors import InvalidSettings, PlanViolation
from understudy.privacy import bounded
from understudy.privacy.plan import Block, Plan, PlannedRelease, joint_bound
from understudy.privacy.releases.class_sums import Embedding, class_sums
from understudy.privacy.releases.histogram import histogram


def unit_pixels(image):
    flat = image.flatten()
    return flat / flat.norm().clamp(min=1e-9)


def sums(access, embedding):
    return embedding.split(class_sums(access, embedding), access.classes)["features"]


PIXELS = features_of(unit_pixels)


def test_sums_by_class():
    data = some_images(12)
    released = sums(access_to(data, sampling_rate=1.0), PIXELS)
    images = torch.from_numpy(data.images).float().flatten(1)
    rows = images / images.norm(dim=1, keepdim=True)
    for label in range(3):
        expected = rows[torch.from_numpy(data.labels) == label].sum(0)
        assert torch.allclose(released[label], expected, atol=1e-5)


def test_a_missing_record_takes_away_its_own_row_and_no_more():
    """Divided by realised counts, sums would move the rest of the class as well."""
    data = some_images(12)
    for unit in (0, 1, 5):
        before, after = (sums(access_to(d), PIXELS) for d in (data, without(data, unit)))
        row = unit_pixels(torch.from_numpy(data.images[unit]).float())
        expected = torch.zeros(3, 64)
        expected[data.labels[unit]] = row
        assert torch.allclose(before - after, expected, atol=1e-5)


def test_a_declared_bound_is_enforced():
    liar = features_of(lambda image: 1e6 * image.flatten())
    released = sums(access_to(some_images(12), select=(4,)), liar)
    assert released.norm() <= 1.0


def test_declared_non_negativity_is_enforced():
    liar = features_of(lambda image: -unit_pixels(image), is_non_negative=True)
    assert sums(access_to(some_images(12)), liar).min() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_features_that_are_not_finite_count_zero(poison):
    bad = features_of(lambda image: image.flatten() * poison)
    assert sums(access_to(some_images(12)), bad).abs().sum() == 0


def test_features_that_mix_records_are_refused():
    norm = nn.BatchNorm1d(64)
    mixing = features_of(lambda image: norm(image.flatten()[None])[0])
    with pytest.raises(PlanViolation, match="record by record"):
        sums(access_to(some_images(12)), mixing)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 3), bound=st.sampled_from([0.01, 1.0, 50]))
def test_emptying_a_unit_moves_sums_by_at_most_the_bound(seed, unit, bound):
    units = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 4]
    data = some_images(12, units=units, seed=seed)
    wild = features_of(lambda image: 100 * image.flatten(), bound=bound)
    before, after = (sums(access_to(d), wild) for d in (data, without(data, unit)))
    assert (before - after).double().norm() <= bound * (1 + 1e-5)


def test_histogram_counts_records():
    data = some_images(14)
    released = histogram(access_to(data, sampling_rate=1.0))
    assert np.allclose(released, np.bincount(data.labels), atol=1e-4)


def test_histogram_weighs_a_unit_at_most_one():
    data = some_images(12, units=[0] * 11 + [1])
    assert histogram(access_to(data, select=(0,))).norm() <= 1.0


def test_empty_batch_is_noise():
    access = access_to(some_images(12), select=(), noise_multiplier=3.0, noise=-1.0)
    assert torch.allclose(histogram(access), torch.full((3,), -3.0))
    assert torch.allclose(sums(access, PIXELS), torch.full((3, 64), -3.0))


def test_max_per_unit_caps_records():
    data = some_images(12, units=[0] * 11 + [1])
    loose = features_of(lambda image: torch.ones(1), dimension=1, bound=1e6)
    assert sums(access_to(data), loose).sum() == pytest.approx(12, rel=1e-4)
    assert sums(access_to(data, max_per_unit=2), loose).sum() == pytest.approx(3, rel=1e-4)


THREE = Embedding(
    lambda image: [50 * image.flatten() - 10, image.mean((1, 2)), torch.ones(1)],
    (
        Block(name="pixels", dimension=64, bound=2.0, is_non_negative=True),
        Block(name="mean", dimension=1, bound=0.5, ratio=10, by_class=False),
        Block(name="counts", dimension=1, ratio=4),
    ),
)
"""Blocks by class and over all, with bounds and ratios of their own."""


def three_sums(data, **options):
    access = access_to(data, **options)
    return THREE.split(class_sums(access, THREE), access.classes)


@pytest.mark.parametrize("units", [None, list(range(12))])
def test_blocks_are_bounded_and_summed_each_in_its_way(units):
    """With one record per unit, declared or not, nothing but the blocks' own bounds acts."""
    data = some_images(12, units=units)
    images = torch.from_numpy(data.images).float() / 255
    pixels = (50 * images.flatten(1) - 10).clamp(min=0)
    pixels = 2 * pixels / pixels.norm(dim=1, keepdim=True)
    mean = images.mean((1, 2, 3)).clamp(max=0.5)
    found = three_sums(data)
    labels = torch.from_numpy(data.labels)
    for label in range(3):
        assert torch.allclose(found["pixels"][label], pixels[labels == label].sum(0), atol=1e-4)
    assert torch.allclose(found["mean"], mean.sum()[None], atol=1e-4)
    assert torch.allclose(found["counts"].flatten(), torch.full((3,), 4.0), atol=1e-4)


def test_noise_goes_by_bound_and_ratio():
    found = three_sums(some_images(12), select=(), noise_multiplier=3.0, noise=1.0)
    joint = math.sqrt(1 + 0.1**2 + 0.25**2)
    assert torch.allclose(found["pixels"], torch.full((3, 64), 3 * joint * 2.0))
    assert torch.allclose(found["mean"], torch.full((1,), 3 * joint * 0.5 * 10))
    assert torch.allclose(found["counts"], torch.full((3, 1), 3 * joint * 4))


def scaled(found):
    """What the noise is added to, as one vector."""
    blocks = {block.name: block for block in THREE.blocks}
    parts = [v.flatten().double() / (blocks[n].bound * blocks[n].ratio) for n, v in found.items()]
    return torch.cat(parts)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 3), extreme=st.booleans())
def test_emptying_a_unit_moves_all_blocks_together_by_at_most_the_joint_bound(seed, unit, extreme):
    units = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 4]
    data = some_images(12, units=units, seed=seed)
    if extreme:  # as bright as can be, all in one class
        data.images[data.units == unit] = 255
        data.labels[data.units == unit] = 1
    before, after = (scaled(three_sums(d)) for d in (data, without(data, unit)))
    assert (before - after).norm() <= joint_bound(THREE.blocks) * (1 + 1e-5)


def test_a_record_reaches_the_joint_bound():
    """No tighter bound would hold."""
    data = some_images(12)
    data.images[5] = 255
    before, after = (scaled(three_sums(d)) for d in (data, without(data, 5)))
    assert (before - after).norm() == pytest.approx(joint_bound(THREE.blocks), rel=1e-4)


BY_LABEL = Embedding(
    lambda image, label: [9 * image.flatten() - label, (1.0 + label)[None]],
    (Block(name="pixels", dimension=64, bound=2.0), Block(name="counts", dimension=1, ratio=3)),
    takes_label=True,
)
"""Features that depend on the record's own label."""


def by_label(data, **options):
    access = access_to(data, **options)
    found = BY_LABEL.split(class_sums(access, BY_LABEL), access.classes)
    ratios = {block.name: block.bound * block.ratio for block in BY_LABEL.blocks}
    return {name: values.double() / ratios[name] for name, values in found.items()}


@pytest.mark.parametrize("units", [None, list(range(12))])
def test_features_may_depend_on_the_records_own_label(units):
    data = some_images(12, units=units)
    images = torch.from_numpy(data.images).float().flatten(1) / 255
    labels = torch.from_numpy(data.labels)
    rows = 9 * images - labels[:, None]
    rows = rows / rows.norm(dim=1, keepdim=True)
    found = by_label(data)
    for label in range(3):
        expected = rows[labels == label].double().sum(0)
        assert torch.allclose(found["pixels"][label], expected, atol=1e-5)
    assert torch.allclose(found["counts"], torch.full((3, 1), 4 / 3, dtype=torch.float64))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 3), moved=st.booleans())
def test_emptying_a_unit_of_any_labels_moves_such_sums_by_at_most_the_bound(seed, unit, moved):
    for units in (None, [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 4]):
        data = some_images(12, units=units, seed=seed)
        if moved:
            data.labels[data.units == unit] = 2
        before, after = (by_label(d) for d in (data, without(data, unit)))
        change = torch.cat([(before[name] - after[name]).flatten() for name in before])
        assert change.norm() <= joint_bound(BY_LABEL.blocks) * (1 + 1e-5)


@dataclass(frozen=True)
class Scaled:
    """Features that are scaled by something public."""

    to: tuple[int, ...] = (64,)

    def __call__(self, image, label, public):
        pixels = public["by"] * (image.view(*self.to) - 0.5)
        return [pixels, public["by"] * (1.0 + label)[None]]


@pytest.mark.parametrize("units", [None, [n // 2 for n in range(40)]], ids=["records", "groups"])
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_features_may_depend_on_public_tensors_and_are_compiled_once_for_all(
    units, kind, monkeypatch
):
    data = some_images(40, units=units)
    blocks = (
        Block(name="pixels", dimension=64, bound=2.0),
        Block(name="all", dimension=1, by_class=False),
    )
    asked = Embedding(Scaled(), blocks, takes_label=True)
    access = access_to(data, sampling_rate=1.0)
    if kind == "compiled":
        access = replace(access, engine=static_engine(monkeypatch))
    for by in (0.1, 3.0):
        public = {"by": torch.tensor(by)}
        released = class_sums(access, replace(asked, public=public))
        known = replace(asked, function=lambda image, label, p=public: Scaled()(image, label, p))
        expected = class_sums(access_to(data, sampling_rate=1.0), known)
        assert torch.allclose(released, expected, atol=1e-5)
    if kind == "compiled":
        assert len(access.engine.compiled) == int(units is None)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 10))
def test_emptying_a_unit_moves_sums_of_static_batches_by_at_most_the_bound(seed, unit):
    data = some_images(12, seed=seed)
    blocks = (Block(name="pixels", dimension=64, bound=2.0), Block(name="ones", dimension=1))
    asked = Embedding(Scaled(), blocks, takes_label=True, public={"by": torch.tensor(50.0)})
    sums = []
    with pytest.MonkeyPatch.context() as patch:
        engine = static_engine(patch)
        for world in (data, without(data, unit)):
            access = replace(access_to(world, sampling_rate=1.0), engine=engine)
            parts = asked.split(class_sums(access, asked), 3)
            sums.append({b.name: parts[b.name].double() / b.bound for b in blocks})
    change = torch.cat([(sums[0][name] - sums[1][name]).flatten() for name in sums[0]])
    assert change.norm() <= joint_bound(blocks) * (1 + 1e-5)


def test_wide_rows_are_summed_piece_by_piece(monkeypatch):
    whole = three_sums(some_images(30))
    monkeypatch.setattr(bounded, "LARGEST_PIECE", 100)
    in_pieces = three_sums(some_images(30))
    assert all(torch.equal(whole[name], in_pieces[name]) for name in whole)


@pytest.mark.parametrize(
    "function",
    [lambda image: [image.flatten()], lambda image: [image.flatten(), image[0, 0], torch.ones(1)]],
    ids=["a block is missing", "a block is longer than declared"],
)
def test_an_embedding_that_is_not_as_declared_is_refused(function):
    with pytest.raises(PlanViolation, match="declared"):
        class_sums(access_to(some_images(12)), Embedding(function, THREE.blocks))


def test_blocks_other_than_planned_are_refused_before_a_record_is_read(ledger, tmp_path):
    curator = open_curator(ledger, tmp_path, kind="class_sums", blocks=PIXELS.blocks)
    wider = features_of(unit_pixels, bound=2.0)
    with pytest.raises(PlanViolation, match="planned with blocks"):
        curator.class_sums(wider)
    assert curator.made() == {"class_sums": 0}


@pytest.mark.parametrize("bad", [{"bound": 0}, {"ratio": math.inf}, {"dimension": 0}])
def test_blocks_that_mean_nothing_are_refused(bad):
    with pytest.raises(InvalidSettings, match="block 'x'"):
        Block(**{"name": "x", "dimension": 1} | bad)


def test_a_plan_with_blocks_survives_json():
    line = PlannedRelease(name="s", kind="class_sums", count=1, dimension=9, blocks=THREE.blocks)
    plan = Plan((line,))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
