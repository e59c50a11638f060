"""`class_sums` and `histogram`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from door import access_to, some_images, without
from understudy.errors import PlanViolation
from understudy.privacy.releases.class_sums import FeatureMap, class_sums
from understudy.privacy.releases.histogram import histogram


def unit_pixels(image):
    flat = image.flatten()
    return flat / flat.norm().clamp(min=1e-9)


PIXELS = FeatureMap(unit_pixels, dimension=64, bound=1.0)


def test_sums_by_class():
    data = some_images(12)
    released = class_sums(access_to(data, sampling_rate=1.0), PIXELS)
    images = torch.from_numpy(data.images).float().flatten(1)
    rows = images / images.norm(dim=1, keepdim=True)
    for label in range(3):
        expected = rows[torch.from_numpy(data.labels) == label].sum(0)
        assert torch.allclose(released[label], expected, atol=1e-5)


def test_a_declared_bound_is_enforced():
    liar = FeatureMap(lambda image: 1e6 * image.flatten(), dimension=64, bound=1.0)
    released = class_sums(access_to(some_images(12), select=(4,)), liar)
    assert released.norm() <= 1.0


def test_declared_non_negativity_is_enforced():
    liar = FeatureMap(
        lambda image: -unit_pixels(image), dimension=64, bound=1.0, is_non_negative=True
    )
    assert class_sums(access_to(some_images(12)), liar).min() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_features_that_are_not_finite_count_zero(poison):
    bad = FeatureMap(lambda image: image.flatten() * poison, dimension=64, bound=1.0)
    assert class_sums(access_to(some_images(12)), bad).abs().sum() == 0


def test_features_that_mix_records_are_refused():
    norm = nn.BatchNorm1d(64)
    mixing = FeatureMap(lambda image: norm(image.flatten()[None])[0], dimension=64, bound=1.0)
    with pytest.raises(PlanViolation, match="record by record"):
        class_sums(access_to(some_images(12)), mixing)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), unit=st.integers(0, 3), bound=st.sampled_from([0.01, 1.0, 50]))
def test_emptying_a_unit_moves_sums_by_at_most_the_bound(seed, unit, bound):
    units = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 4]
    data = some_images(12, units=units, seed=seed)
    wild = FeatureMap(lambda image: 100 * image.flatten(), dimension=64, bound=bound)
    before, after = (class_sums(access_to(d), wild) for d in (data, without(data, unit)))
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
    assert torch.allclose(class_sums(access, PIXELS), torch.full((3, 64), -3.0))


def test_max_per_unit_caps_records():
    data = some_images(12, units=[0] * 11 + [1])
    loose = FeatureMap(lambda image: torch.ones(1), dimension=1, bound=1e6)
    assert class_sums(access_to(data), loose).sum() == pytest.approx(12, rel=1e-4)
    assert class_sums(access_to(data, max_per_unit=2), loose).sum() == pytest.approx(3, rel=1e-4)
