"""Distances between sets of features, against textbook formulas computed another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch

from understudy.errors import InvalidData
from understudy.evaluation import quality
from understudy.evaluation.quality import (
    Moments,
    Quality,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_and_recall,
)
from understudy.seeds import public_generator


def normal(count: int, size: int, *, seed: int = 0, mean: float = 0.0, scale: float = 1.0):
    draws = np.random.default_rng(seed).normal(mean, scale, (count, size))
    mixing = np.random.default_rng(99).normal(size=(size, size)) / math.sqrt(size)
    return torch.from_numpy(draws @ (mixing + np.eye(size)))


def dice(seed: int = 0) -> torch.Generator:
    return public_generator(seed, "test")


def textbook(a, b, *, correction: int = 1) -> float:
    """|m1 - m2|^2 + tr S1 + tr S2 - 2 sum sqrt eigvals(S1 S2), as torchmetrics writes it."""
    a, b = a.numpy(), b.numpy()
    s1, s2 = (np.cov(part, rowvar=False, ddof=correction) for part in (a, b))
    roots = np.sqrt(np.linalg.eigvals(s1 @ s2).astype(complex)).real.sum()
    gap = ((a.mean(0) - b.mean(0)) ** 2).sum()
    return float(gap + np.trace(s1) + np.trace(s2) - 2 * roots)


def distance(a, b) -> float:
    return frechet_distance(Moments().update(a), Moments().update(b))


@pytest.mark.parametrize(("counts", "size"), [((60, 80), 8), ((30, 200), 16), ((500, 40), 5)])
def test_frechet_distance_is_the_textbooks(counts, size):
    a, b = normal(counts[0], size, seed=1), normal(counts[1], size, seed=2, mean=0.3, scale=1.4)
    expected = textbook(a, b)
    assert expected > 0.1
    assert distance(a, b) == pytest.approx(expected, abs=1e-6)
    assert distance(b, a) == pytest.approx(expected, abs=1e-6)
    s1, s2 = (np.cov(part.numpy(), rowvar=False) for part in (a, b))
    by_root = np.trace(s1 + s2 - 2 * scipy.linalg.sqrtm(s1 @ s2).real)
    gap = float((a.mean(0) - b.mean(0)).square().sum())
    assert distance(a, b) == pytest.approx(gap + by_root, abs=1e-6)


def test_the_covariance_is_that_of_a_sample():
    """Dividing by n instead of n - 1, on either side, is far outside the tolerance."""
    a, b = normal(6, 4, seed=1), normal(9, 4, seed=2, scale=2.0)
    assert distance(a, b) == pytest.approx(textbook(a, b), abs=1e-6)
    assert abs(distance(a, b) - textbook(a, b, correction=0)) > 0.05
    assert torch.allclose(Moments().update(a).covariance, torch.cov(a.T), atol=1e-12)


@pytest.mark.parametrize("count", [400, 20])
def test_a_set_against_itself(count):
    """With rank (400 rows) and without (20 rows of 64 features)."""
    a = normal(count, 64)
    assert distance(a, a) < 1e-3
    assert distance(a, a[torch.randperm(count)]) < 1e-3


def test_a_shift_gives_its_square_and_a_scale_its_trace():
    a = normal(200, 12)
    shift = torch.linspace(-1, 1, 12, dtype=torch.float64)
    assert distance(a, a + shift) == pytest.approx(float(shift.square().sum()), abs=1e-6)
    a = a - a.mean(0)
    trace = float(torch.cov(a.T).trace())
    assert distance(a, 3 * a) == pytest.approx(4 * trace, rel=1e-9)  # (3 - 1)^2 tr S


def test_covariances_without_rank():
    """Fewer rows than features on one side, on both, and a constant feature."""
    few, many = normal(10, 32, seed=3), normal(300, 32, seed=4)
    for a, b in ((few, many), (few, normal(7, 32, seed=5)), (few * torch.eye(32)[0], many)):
        found = distance(a, b)
        assert math.isfinite(found)
        assert found == pytest.approx(textbook(a, b), abs=1e-5)
    # Covariances on orthogonal axes share nothing: only traces and means remain.
    a, b = torch.zeros(50, 4).double(), torch.zeros(50, 4).double()
    a[:, 0], b[:, 1] = normal(50, 1)[:, 0], normal(50, 1, seed=8)[:, 0]
    gap = float((a.mean(0) - b.mean(0)).square().sum())
    assert distance(a, b) == pytest.approx(gap + float(a[:, 0].var() + b[:, 1].var()), abs=1e-9)


def test_moments_in_parts_keep_their_digits():
    """Far from zero, where sums of squares in float32 or naive float64 lose the covariance."""
    a = normal(90, 6) + 1e6
    parts = Moments()
    for part in torch.split(a, [1, 40, 9, 40]):
        parts.update(part)
    assert parts.count == 90
    assert torch.allclose(parts.mean, a.mean(0), rtol=1e-14)
    assert torch.allclose(parts.covariance, torch.cov(a.T), atol=1e-8)
    with pytest.raises(InvalidData, match="at least 2 images, found 1"):
        _ = Moments().update(a[:1]).covariance


def test_kernel_distance_is_the_unbiased_estimate():
    a, b = normal(12, 5, seed=1).numpy(), normal(12, 5, seed=2, mean=0.5).numpy()

    def k(x, y):
        return (float(x @ y) / 5 + 1) ** 3

    pairs = [(i, j) for i in range(12) for j in range(12)]
    expected = (
        sum(k(a[i], a[j]) for i, j in pairs if i != j) / 132
        + sum(k(b[i], b[j]) for i, j in pairs if i != j) / 132
        - 2 * sum(k(a[i], b[j]) for i, j in pairs) / 144
    )
    found, std = kernel_distance(torch.from_numpy(a), torch.from_numpy(b), generator=dice())
    assert found == pytest.approx(expected, abs=1e-9)
    assert std == pytest.approx(0, abs=1e-9)  # the subsets are the sets


def test_kernel_distance_of_two_halves_is_about_zero_and_of_others_is_not():
    a = normal(2000, 8)
    halves, spread = kernel_distance(a[:1000], a[1000:], generator=dice(), subsets=50, size=200)
    assert abs(halves) < 0.3 * spread
    assert spread > 0
    apart, _ = kernel_distance(a[:1000], a[1000:] + 0.5, generator=dice(), subsets=50, size=200)
    assert apart > 3 * spread
    again, _ = kernel_distance(a[:1000], a[1000:], generator=dice(), subsets=50, size=200)
    assert again == halves
    with pytest.raises(InvalidData, match="at least 2 images"):
        kernel_distance(a[:1], a, generator=dice())


def test_precision_and_recall_at_their_ends():
    a = normal(80, 6).float()
    assert precision_and_recall(a, a) == (1, 1)
    assert precision_and_recall(a, a + 1000) == (0, 0)
    assert precision_and_recall(a[:3], a) is None
    # A few images amid many: they look real, and cover little.
    precision, recall = precision_and_recall(a[:10], a)
    assert precision == 1
    assert recall < 1


@pytest.mark.parametrize("at_once", [2**25, 100])
@pytest.mark.parametrize("size", [5, 33, 257, 1000])
def test_balls_of_radius_zero_hold_their_centres_despite_rounding(monkeypatch, at_once, size):
    """Every real image four times."""
    monkeypatch.setattr(quality, "MOST_DISTANCES", at_once)
    for count in (7, 70, 133):
        rows = torch.from_numpy(np.random.default_rng(count).normal(size=(count, size)))
        assert precision_and_recall(rows[: max(4, count // 2)], rows.repeat(4, 1))[0] == 1


def test_precision_and_recall_by_brute_force(monkeypatch):
    monkeypatch.setattr(quality, "MOST_DISTANCES", 100)  # several parts
    made, given = normal(37, 3, seed=1).numpy(), normal(53, 3, seed=2, mean=0.7).numpy()

    def share(rows, others):
        apart = np.linalg.norm(others[:, None] - others[None], axis=-1)
        reach = np.sort(apart, axis=1)[:, 3]
        to = np.linalg.norm(rows[:, None] - others[None], axis=-1)
        return (to <= reach).any(1).mean()

    found = precision_and_recall(torch.from_numpy(made), torch.from_numpy(given))
    assert found == pytest.approx((share(made, given), share(given, made)))
    assert 0.1 < found[0] < 0.95  # so that neither end hides a mistake


def test_inception_score_at_its_ends_and_by_formula():
    sure = torch.eye(10, dtype=torch.float64).repeat_interleave(100, 0)  # sorted by class
    score, std = inception_score(sure, generator=dice())
    assert 9.5 < score <= 10  # each split has about ten of each class
    assert std < 0.3
    assert inception_score(sure, generator=dice(), splits=1)[0] == pytest.approx(10)
    assert inception_score(torch.full((100, 10), 0.1), generator=dice())[0] == pytest.approx(1)
    assert inception_score(sure[:19], generator=dice()) is None
    guess = torch.rand(40, 3, generator=dice()).double().softmax(1)
    p = guess.numpy()
    expected = np.exp((p * (np.log(p) - np.log(p.mean(0)))).sum(1).mean())
    assert inception_score(guess, generator=dice(), splits=1)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("features", "called"),
    [("inception", "fid"), ("convnet trained on test set mnist", "frechet_distance")],
)
def test_only_the_distance_in_inceptions_features_is_called_fid(features, called):
    found = Quality(
        features=features, reference="test set mnist", images=1, reference_images=1,
        frechet_distance=2.5, kid=0.0, kid_std=0.0, precision=None, recall=None,
        inception_score=None, inception_score_std=None, reference_steps=None,
    ).to_json()  # fmt: skip
    assert found[called] == 2.5
    assert ("fid" in found) != ("frechet_distance" in found)
