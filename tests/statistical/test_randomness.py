"""Noise has the stated scale, sampling the stated rate, and neither follows any seed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from scipy import stats

from door import (
    CPU,
    a_vault,
    features_of,
    linear_loss,
    linear_params,
    open_curator,
    records_of,
    some_images,
)
from understudy.privacy.randomness import SAMPLER_REACH, SecretRandomness
from understudy.privacy.sampling import Access
from understudy.training.engine import Engine

ALPHA = 1e-4  # chance that a correct implementation fails one of these tests


def ks(sample, scale: float) -> float:
    return float(stats.kstest(np.asarray(sample) / scale, "norm").pvalue)


def noise_of(kind: str, ledger, folder, count: int = 40) -> tuple[np.ndarray, float]:
    """Return what a release adds to a known sum, and the claimed standard deviation."""
    data = some_images(50)
    vault = a_vault(ledger, data)
    bound = {"class_sums": 2.0, "histogram": 1.0, "votes": 3.0}.get(kind, 0.25)
    zero = features_of(lambda image: torch.zeros(64), bound=bound)
    blocks = zero.blocks if kind == "class_sums" else ()
    curator = open_curator(ledger, folder, vault=vault, kind=kind, count=count, blocks=blocks)
    of_members = kind in ("votes", "sample_gradient")
    claimed = curator.calibration.noise_multiplier * (2 * bound if of_members else bound)
    members = curator.ensemble(torch.zeros(10, 64), members=10) if of_members else None
    draws = []
    for _ in range(count):
        if kind == "gradient":
            # a constant loss has no gradient: what comes out is noise alone, divided by N0
            params = linear_params()
            flat = curator.gradient(lambda p, x, y: p["bias"].sum() * 0, params, clip_norm=bound)
            draws.append(torch.cat([t.flatten() for t in flat.values()]) * 50)
            curator.checkpoint(1, {})
        elif kind == "class_sums":
            draws.append(curator.class_sums(zero)["features"].flatten())
        elif kind == "votes":
            said = curator.votes(members, lambda state, _: state, dimension=64, bound=bound)
            draws.append(said)
            curator.checkpoint(1, {})
        elif kind == "sample_gradient":
            images, labels = torch.zeros(1, 1, 8, 8), torch.zeros(1, dtype=torch.int64)
            mean = curator.sample_gradient(
                members, lambda state, images, _: state @ images.flatten(), images, labels,
                bound=bound,
            )  # fmt: skip
            draws.append(10 * mean.flatten())
            curator.checkpoint(1, {})
        else:
            draws.append(curator.histogram() - torch.from_numpy(np.bincount(data.labels)))
    return torch.cat(draws).numpy(), claimed


@pytest.mark.parametrize(
    "kind", ["gradient", "class_sums", "histogram", "votes", "sample_gradient"]
)
def test_noise_scale_is_accepted_and_other_scales_rejected(kind, ledger, tmp_path):
    count = 400 if kind == "histogram" else 40
    noise, claimed = noise_of(kind, ledger, tmp_path, count)
    assert ks(noise, claimed) > ALPHA
    assert ks(noise, claimed * 2 / 3) < ALPHA
    assert ks(noise, claimed * 3 / 2) < ALPHA


def test_noise_is_fresh_for_every_release(ledger, tmp_path):
    noise, _ = noise_of("gradient", ledger, tmp_path)
    first, second = noise[:195], noise[195:390]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(195)
    assert len({row.tobytes() for row in noise.reshape(40, -1)}) == 40


def test_the_sampler_reaches_far_into_the_tail():
    """Two million draws: the tail beyond 4.5 has its share, and values are float64."""
    draws = SecretRandomness(CPU).normal(2_000_000)
    assert draws.dtype == torch.float64
    assert ks(draws, 1.0) > ALPHA
    beyond = int((draws.abs() > 4.5).sum())
    expected = 2 * stats.norm.sf(4.5) * 2_000_000
    assert stats.poisson.cdf(beyond, expected) > ALPHA
    assert stats.poisson.sf(beyond - 1, expected) > ALPHA
    assert SAMPLER_REACH <= 10
    # float64, not float32 widened: low mantissa bits are in use
    assert (draws.numpy().view(np.uint64) & 0x1FFFFFFF).astype(bool).mean() > 0.99


def access(rate: float, units: int = 2000) -> Access:
    data = some_images(units)
    return Access(
        records=records_of(data),
        randomness=SecretRandomness(CPU),
        units=units,
        classes=3,
        sampling_rate=rate,
        noise_multiplier=1.0,
        engine=Engine(),
    )


@pytest.mark.parametrize("rate", [0.004, 0.1, 0.9])
def test_units_are_sampled_independently_at_the_stated_rate(rate):
    opened = access(rate)
    batches = [opened.sample_units() for _ in range(200)]
    sizes = np.array([len(b) for b in batches])
    total = stats.binomtest(int(sizes.sum()), 200 * 2000, rate)
    assert total.pvalue > ALPHA
    # Poisson sampling: sizes vary as a binomial's do, not as a fixed batch would
    spread = (sizes.var(ddof=1) * 199) / (2000 * rate * (1 - rate))
    assert stats.chi2.cdf(spread, 199) > ALPHA
    assert stats.chi2.sf(spread, 199) > ALPHA
    per_unit = np.bincount(torch.cat(batches).numpy(), minlength=2000)
    assert per_unit.max() <= stats.binom.ppf(1 - ALPHA / 2000, 200, rate)


@pytest.mark.parametrize(("count", "rate"), [(0, 0.5), (1, 0.5), (3, 1e-300), (50, 1 - 1e-16)])
def test_extreme_counts_and_rates(count, rate):
    draws = SecretRandomness(CPU)
    for _ in range(20):
        found = draws.choose(count, rate).tolist()
        assert found == sorted(set(found))
        assert all(0 <= unit < count for unit in found)
        if rate < 1e-100:
            assert found == []
        if rate > 0.99:
            assert found == list(range(count))


def test_a_gap_of_nothing_takes_no_unit_twice():
    """numpy's geometric draw is 0 where its exponential is: about once in 10^16 draws."""
    draws = SecretRandomness(CPU)
    draws._sampling = type("Zeros", (), {"geometric": lambda _, rate, n: np.zeros(n, np.int64)})()
    assert draws.choose(40, 0.01).tolist() == list(range(40))


def test_rate_one_takes_every_unit():
    assert torch.equal(access(1.0).sample_units(), torch.arange(2000))


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def test_global_seeds_change_neither_batches_nor_noise():
    seen = []
    for _ in range(2):
        seed_everything()
        opened = access(0.5)
        seen.append((opened.sample_units().tolist(), opened.randomness.normal(8).tolist()))
    assert seen[0][0] != seen[1][0]
    assert seen[0][1] != seen[1][1]


def test_a_release_leaves_global_generators_untouched(ledger, tmp_path):
    curator = open_curator(ledger, tmp_path, sampling_rate=0.5)
    seed_everything()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    curator.gradient(linear_loss, linear_params(), clip_norm=1.0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_each_opening_of_a_vault_has_its_own_secrets(ledger, tmp_path):
    """Also after a resume of the same run."""
    draws = []
    vault = a_vault(ledger)
    for run_id in ("a", "a", "b"):
        curator = open_curator(ledger, tmp_path, vault=vault, run_id=run_id)
        draws.append(tuple(curator._randomness.normal(4).tolist()))
    assert len(set(draws)) == 3
