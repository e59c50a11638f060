"""DP-MERF and DP-HP: their features, what they declare of them, and what they learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from door import LOOSE, a_vault
from understudy.data.images import labelled_images
from understudy.errors import InvalidSettings
from understudy.methods.dp_hp import DPHP, DPHPConfig, Hermite, hermite_features, largest_norm
from understudy.methods.dp_merf import (
    DPMERF,
    DPMERFConfig,
    drawn_frequencies,
    embedding_distance,
    random_features,
    unbiased_distance,
)
from understudy.methods.fitting import class_means, shares_of, unbiased_gap
from understudy.methods.method import configure
from understudy.privacy.plan import Budget, PublicFacts
from understudy.progress import Progress

FACTS = PublicFacts(units=100, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))


def images(count: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scales", [[5.0], [20.0, 5.0, 1.25]])
def test_random_features_are_a_mean_of_gaussian_kernels(scales):
    generator = torch.Generator().manual_seed(1)
    frequencies = drawn_frequencies(
        30_000, 64, scale=scales[0], finer=len(scales) - 1, generator=generator
    )
    features = random_features(images(6), frequencies)
    assert torch.allclose(features.norm(dim=1), torch.ones(6))
    pixels = images(6).flatten(1)
    squares = torch.cdist(pixels, pixels).square()
    kernel = torch.stack([torch.exp(-squares / (2 * scale)) for scale in scales]).mean(0)
    assert torch.allclose(features @ features.T, kernel, atol=0.03)


def test_hermite_features_are_a_gaussian_kernel():
    x = torch.linspace(0, 1, 11, dtype=torch.float64)
    features = hermite_features(x, 0.15, 100)
    kernel = torch.exp(-(x[:, None] - x).square() / (2 * 0.15))
    assert torch.allclose(features @ features.T, kernel, atol=1e-9)


@pytest.mark.parametrize(("scale", "order", "square"), [(0.005, 100, 0.686), (0.005, 20, 0.357)])
def test_a_cut_off_series_has_a_smaller_norm(scale, order, square):
    assert largest_norm(scale, order) ** 2 == pytest.approx(square, abs=1e-3)


def test_hermite_recursion_is_stable_in_single_precision():
    x = torch.linspace(0, 1, 1001)
    wide = hermite_features(x.double(), 0.005, 100)
    assert torch.allclose(hermite_features(x, 0.005, 100).double(), wide, atol=1e-5)


def test_declared_norms_hold_for_every_image_and_are_reached():
    embedding = Hermite(0.005, 30, 5, 1.0)
    pairs = torch.tensor([[0, 1], [5, 60], [3, 9]])
    single, product = embedding.norms
    grid = torch.linspace(0, 1, 1001)
    even = grid[:, None, None, None].expand(-1, 1, 8, 8)  # all pixels alike
    for some in (images(50), even, (images(50) > 0.5).float()):
        assert embedding.single(some).norm(dim=1).max() <= single * (1 + 1e-5)
        assert embedding.products(some, pairs).norm(dim=1).max() <= product * (1 + 1e-5)
    assert embedding.single(even).norm(dim=1).max() == pytest.approx(single, rel=1e-4)
    assert embedding.products(even, pairs).norm(dim=1).max() == pytest.approx(product, rel=1e-4)


def test_class_means_divide_by_all():
    features, labels = torch.tensor([[1.0], [3.0], [5.0], [7.0]]), torch.tensor([0, 0, 2, 2])
    assert class_means(features, labels, 3).tolist() == [[1.0], [0.0], [3.0]]


def test_the_distance_of_a_set_from_itself_is_zero():
    frequencies = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
    some, labels = images(12), torch.arange(12) % 3
    target = class_means(random_features(some, frequencies), labels, 3)
    known = {"frequencies": frequencies, "target": target}
    assert embedding_distance(some, labels, known) < 1e-12
    assert embedding_distance(some, (labels + 1) % 3, known) > 1e-3
    hermite, pairs = Hermite(0.15, 5, 2, 2.0), torch.tensor([[0, 1], [5, 60]])
    known = {
        "single": class_means(hermite.single(some), labels, 3),
        "products": class_means(hermite.products(some, pairs), labels, 3),
        "pairs": pairs,
    }
    assert hermite(some, labels, known) < 1e-12
    assert hermite(some, (labels + 1) % 3, known) > 1e-6


def test_few_images_estimate_the_distance_of_many_without_bias():
    frequencies = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) / 3
    pool, private = images(600, seed=1), images(600, seed=2) * 0.9
    labels = torch.arange(600) % 3
    target = class_means(random_features(private, frequencies), labels, 3)
    known = {"frequencies": frequencies, "target": target, "shares": torch.full((3,), 1 / 3)}
    whole = unbiased_distance(pool, labels, known)
    few = list(zip(pool.split(6), labels.split(6), strict=True))  # two of each class
    unbiased = torch.stack([unbiased_distance(*some, known) for some in few])
    biased = torch.stack([embedding_distance(*some, known) for some in few])
    error = unbiased.std() / math.sqrt(len(few))
    assert (unbiased.mean() - whole).abs() < 3 * error
    assert biased.mean() - whole > 10 * error


def test_features_of_any_norm_have_no_bias():
    pool, labels = images(600, seed=1).flatten(1), torch.arange(600) % 3
    target, shares = class_means(pool, labels, 3), torch.full((3,), 1 / 3)
    few = zip(pool.split(6), labels.split(6), strict=True)
    gaps = torch.stack([unbiased_gap(*some, target, shares) for some in few])
    error = gaps.std() / math.sqrt(len(gaps))
    assert gaps.mean().abs() < 3 * error
    biased = (class_means(pool[:6], labels[:6], 3) - target).square().sum()
    assert biased > 10 * error


def test_a_class_with_one_image_or_none_has_a_finite_distance():
    frequencies = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    known = {"frequencies": frequencies, "target": torch.zeros(3, 10), "shares": torch.ones(3) / 3}
    found = unbiased_distance(images(3).requires_grad_(), torch.tensor([0, 0, 1]), known)
    assert found.isfinite()


def test_shares_are_positive_and_add_up():
    shares = shares_of(torch.tensor([[30.0], [10.0], [-2.0]]))
    assert sum(shares) == pytest.approx(1)
    assert shares[0] / shares[1] == pytest.approx(3)
    assert shares[2] > 0


def bright_by_class(counts=(40, 40, 40)):
    """Images whose brightness tells the class."""
    labels = np.repeat(np.arange(3), counts)
    noise = np.random.default_rng(0).integers(0, 30, (len(labels), 1, 8, 8))
    return labelled_images((labels[:, None, None, None] * 100 + noise).astype(np.uint8), labels)


def run(method, config, ledger, tmp_path, *, counts=(40, 40, 40), budget=None):
    vault = a_vault(ledger, bright_by_class(counts))
    made = method(config, vault.facts, seed=0)
    budget = budget or Budget(epsilon=math.inf, delta=1e-5)
    curator = vault.open(
        made.plan(), budget, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    return made.run(curator, Progress())


@pytest.mark.parametrize(
    ("method", "config"),
    [
        (DPMERF, DPMERFConfig(steps=150, features=200, scale=10, images_per_class=20)),
        (DPMERF, DPMERFConfig(steps=150, features=300, scale=10, finer=2, unbiased=True,
                              images_per_class=20)),
        (DPHP, DPHPConfig(steps=150, sum_order=10, scale=0.15, images_per_class=20, hidden=50)),
        (DPHP, DPHPConfig(steps=150, sum_order=10, scale=0.15, pairs=0, generator="conv",
                          images_per_class=20, hidden=50)),
        (DPHP, DPHPConfig(steps=150, sum_order=10, scale=0.15, unbiased=True, grain=0.05,
                          images_per_class=20, hidden=50)),
    ],
    ids=[
        "dp-merf", "dp-merf of three kernels, unbiased", "dp-hp", "dp-hp without products",
        "dp-hp, unbiased",
    ],
)  # fmt: skip
def test_without_noise_classes_are_learned(method, config, ledger, tmp_path):
    made = run(method, config, ledger, tmp_path)
    means = [made.images[made.labels == label].mean().item() for label in range(3)]
    assert means == pytest.approx([0.06, 0.45, 0.84], abs=0.12)
    assert made.labels.bincount().tolist() == [20, 20, 20]
    again, _ = made.generator.sample(60, seed=0)
    assert torch.equal(again, made.images)


def test_unequal_classes_are_drawn_in_proportion_to_noisy_counts(ledger, tmp_path):
    config = DPMERFConfig(steps=2, features=20, images_per_class=100, count_ratio=1.0)
    made = run(DPMERF, config, ledger, tmp_path, counts=(80, 30, 10))
    assert made.labels.bincount().tolist() == pytest.approx([200, 75, 25], abs=2)


def test_equal_classes_are_assumed_without_a_word_on_counts(ledger, tmp_path):
    config = DPMERFConfig(steps=2, features=20, images_per_class=100)
    made = run(DPMERF, config, ledger, tmp_path, counts=(80, 30, 10), budget=LOOSE)
    assert made.labels.bincount().tolist() == [100, 100, 100]


def test_one_release_holds_all_blocks():
    plan = DPHP(DPHPConfig(count_ratio=5), FACTS, seed=0).plan()
    (line,) = plan
    assert line.count == 1
    assert [block.name for block in line.blocks] == ["single", "products", "counts"]
    assert line.dimension == 3 * (64 * 101 + 10 * 21**2 + 1)


def test_length_scale_follows_the_number_of_pixels():
    assert configure(DPMERF, FACTS, 1, preset="paper").config.scale == pytest.approx(105 * 64 / 784)
    assert configure(DPMERF, FACTS, 1).preset == "small"
    assert configure(DPHP, FACTS, 1).preset == "small"


@pytest.mark.parametrize(
    "bad",
    [
        {"pairs": -1},
        {"generator": "gan"},
        {"scale": 0},
        {"steps": 0},
        {"grain": -0.1},
        {"product_ratio": math.inf},
    ],
)
def test_senseless_settings_are_refused(bad):
    with pytest.raises(InvalidSettings, match=next(iter(bad))):
        DPHPConfig(**bad)


@pytest.mark.parametrize("bad", [{"finer": -1}, {"code": 0}, {"scale": math.inf}])
def test_senseless_settings_of_dp_merf_are_refused(bad):
    with pytest.raises(InvalidSettings, match=next(iter(bad))):
        DPMERFConfig(**bad)
