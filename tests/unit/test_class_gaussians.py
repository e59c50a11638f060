"""Gaussians of classes: what noise leaves of counts, means and second moments."""

from __future__ import annotations

import math

import pytest
import torch

from understudy.methods.class_gaussians import (
    ClassGaussians,
    above_noise,
    class_differences,
    class_sizes,
    clipped,
    symmetric,
    upper_triangle,
)
from understudy.nets.frequencies import low_frequencies


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_clipping_keeps_direction_and_bound():
    vector = torch.tensor([3.0, 4.0])
    assert torch.allclose(clipped(vector, 1.0), vector / 5)
    assert torch.equal(clipped(vector, 6.0), vector)
    assert torch.equal(clipped(torch.zeros(2), 6.0), torch.zeros(2))


def test_sizes_of_classes_are_positive_whatever_the_noise():
    for noise_std in (0.0, 3.0, 1e6):
        found = class_sizes(torch.tensor([-1e5, 40.0, 3.0]), 60, noise_std)
        assert found.min() >= 1
        assert found.isfinite().all()


def test_classes_are_drawn_together_where_they_differ_by_noise_alone():
    true = torch.randn(10, 40, generator=seeded())
    true[:, 20:] = 0
    sizes = torch.linspace(50, 150, 10)
    sums = sizes[:, None] * true + 100 * torch.randn(10, 40, generator=seeded(1))
    found = class_differences(sums, sizes, 100.0)
    plain = sums / sizes[:, None]
    assert (found - true)[:, 20:].norm() < 0.6 * (plain - true)[:, 20:].norm()
    assert (found - true)[:, :20].norm() < (plain - true)[:, :20].norm()
    assert torch.allclose(class_differences(sums, sizes, 0.0), plain)
    assert not class_differences(torch.zeros(2, 3), torch.ones(2), 0.0).isnan().any()


def test_triangles_hold_matrices_with_their_norms():
    vectors = torch.randn(5, 7, generator=seeded())
    triangles = torch.stack([upper_triangle(vector) for vector in vectors])
    products = vectors[:, :, None] * vectors[:, None, :]
    assert torch.allclose(symmetric(triangles, 7), products, atol=1e-6)
    assert torch.allclose(triangles.norm(dim=1), products.flatten(1).norm(dim=1))


def test_eigenvalues_of_noise_are_left_out_and_others_are_corrected():
    size, std = 60, 0.1
    noise = torch.randn(size, size, generator=seeded(), dtype=torch.float64) * std
    noise = (noise.triu(1) + noise.triu(1).T) / math.sqrt(2) + noise.diag().diag()
    edge = torch.tensor(std * math.sqrt(2 * size), dtype=torch.float64)
    assert above_noise(torch.linalg.eigvalsh(noise), 1.1 * edge).abs().max() == 0
    true = torch.zeros(size, dtype=torch.float64)
    true[:2] = torch.tensor([5.0, -4.0])
    values = above_noise(torch.linalg.eigvalsh(noise + true.diag()), 1.1 * edge)
    assert (values != 0).sum() == 2
    assert values.max() == pytest.approx(5, abs=0.3)
    assert values.min() == pytest.approx(-4, abs=0.3)


def test_gaussians_without_noise_are_those_of_the_data():
    waves = low_frequencies((1, 4, 4), 6)
    mixing = torch.randn(3, 6, 6, generator=seeded())
    means = torch.randn(3, 6, generator=seeded(1))
    covariance = mixing @ mixing.mT
    sizes = torch.tensor([10.0, 20.0, 30.0])
    rows, columns = torch.triu_indices(6, 6)
    weight = torch.where(rows == columns, 1.0, math.sqrt(2))
    moments = sizes[:, None] * covariance[:, rows, columns] * weight
    fitted = ClassGaussians.fitted(
        means, moments, sizes=sizes, noise_std=0.0, waves=waves, components=6
    )
    assert torch.allclose(fitted.mean, means @ waves, atol=1e-5)
    spread = fitted.factor @ fitted.factor.mT
    pixels = fitted.basis.T @ spread @ fitted.basis
    assert torch.allclose(pixels, waves.T @ covariance @ waves, atol=1e-3)


def test_gaussians_of_noise_alone_do_not_vary():
    waves = low_frequencies((1, 8, 8), 20)
    noise = 40 * torch.randn(10, 210, generator=seeded())
    fitted = ClassGaussians.fitted(
        torch.zeros(10, 20), noise, sizes=torch.full((10,), 100.0), noise_std=60.0, waves=waves,
        components=10,
    )  # fmt: skip
    assert fitted.factor.abs().max() == 0
