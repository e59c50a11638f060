"""Distances to the nearest training record: right, exact when small, and telling when copied."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from understudy.errors import InvalidData
from understudy.evaluation import memorisation as copies
from understudy.evaluation.memorisation import QUANTILES, memorisation, nearest_distances
from understudy.privacy.disclosure import RealImages
from understudy.synthetic import SyntheticSet


def some(count: int, seed: int, side: int = 6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 1, side, side), dtype=torch.uint8, generator=generator)


def real(images, what: str = "training records of x") -> RealImages:
    return RealImages(images, torch.zeros(len(images), dtype=torch.int64), what)


def made(images) -> SyntheticSet:
    return SyntheticSet(images, torch.zeros(len(images), dtype=torch.int64), ("0",))


def by_brute_force(a, b):
    a, b = (part.numpy().reshape(len(part), -1).astype(float) / 255 for part in (a, b))
    return np.linalg.norm(a[:, None] - b[None], axis=-1).min(1)


@pytest.mark.parametrize(("queries", "records"), [(4096, 16384), (5, 7), (64, 3)])
def test_distances_are_those_of_brute_force(monkeypatch, queries, records):
    """In one part, and in parts that are ragged and smaller than the number of candidates."""
    monkeypatch.setattr(copies, "QUERIES_AT_ONCE", queries)
    monkeypatch.setattr(copies, "RECORDS_AT_ONCE", records)
    images, others = some(23, 1), some(40, 2)
    assert np.allclose(nearest_distances(images, others), by_brute_force(images, others))
    assert np.allclose(nearest_distances(images / 255, others), by_brute_force(images, others))
    assert np.allclose(nearest_distances(images, others[:2]), by_brute_force(images, others[:2]))


def test_a_copy_has_distance_zero_and_a_near_copy_its_own():
    """Where a matrix product alone would be off by its rounding."""
    records = some(500, 1, side=28)
    copied = records[:9].float() / 255
    copied[1, 0, 3, 3] += 1e-4 if copied[1, 0, 3, 3] < 0.5 else -1e-4
    found = nearest_distances(copied, records)
    assert found[0] == 0
    assert float(found[1]) == pytest.approx(1e-4, rel=1e-2)
    product = torch.cdist(
        copied.flatten(1), records.flatten(1) / 255, compute_mode="use_mm_for_euclid_dist"
    )
    assert float(product.amin(1).max()) > 1e-3  # the trap that this test is about


def test_what_lies_beyond_the_range_is_cut_off():
    records = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).repeat(1, 1, 2, 1)
    beyond = torch.tensor([-5.0, 9.0]).view(1, 1, 1, 2).repeat(1, 1, 2, 1)
    assert float(nearest_distances(beyond, records)) == 0


def test_copies_are_told_from_new_images():
    training, unseen = some(400, 1), some(300, 2)
    fresh = memorisation(made(some(50, 3) / 255), real(training), real(unseen, "test set x"))
    assert fresh.closer_than_held_out < 0.1
    blurred = (training[:50].float() / 255 + 0.01).clamp(0, 1)
    mixed = torch.cat([some(50, 3) / 255, blurred])
    found = memorisation(made(mixed), real(training), real(unseen, "test set x"))
    assert 0.5 <= found.closer_than_held_out < 0.6
    assert set(found.nearest) <= set(range(50, 100))
    assert len(found.nearest) == 10
    content = found.to_json()
    assert content["reference"] == "training records of x"
    assert content["held_out_from"] == "test set x"
    assert content["quantiles"] == QUANTILES
    everything = np.sort(by_brute_force(unseen, training))
    assert content["held_out"] == pytest.approx(np.quantile(everything, QUANTILES).tolist())
    assert list(content["synthetic"]) == sorted(content["synthetic"])


@pytest.mark.parametrize(
    ("images", "records", "message"),
    [
        (some(2, 1), some(2, 1, side=5), "expected the same"),
        (some(0, 1), some(2, 1), "no images"),
        (some(2, 1), some(0, 1), "no training records"),
        (torch.full((1, 1, 6, 6), torch.nan), some(2, 1), "not all finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(images, records, message):
    with pytest.raises(InvalidData, match=message):
        nearest_distances(images, records)


def test_a_hundred_images_against_a_large_set_take_seconds():
    images, records = some(100, 1, side=28), some(60_000, 2, side=28)
    started = time.process_time()
    assert len(nearest_distances(images, records)) == 100
    assert time.process_time() - started < 10
