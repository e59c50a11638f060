"""Noise has the stated scale, sampling the stated rate, and neither follows any seed.

A correct implementation fails an assertion here with a probability of `ALPHA` at most, and no test
makes more than ten of them: a false alarm comes once in a million runs or less.
"""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest
import torch
from scipy import stats

from door import (
    CPU,
    LOOSE,
    OneOfTwo,
    a_vault,
    features_of,
    linear_loss,
    linear_params,
    open_curator,
    records_of,
    some_images,
)
from understudy.errors import InvalidSettings
from understudy.privacy import certificate
from understudy.privacy.briefing import Briefing
from understudy.privacy.plan import Plan
from understudy.privacy.randomness import SAMPLER_REACH, SecretRandomness
from understudy.privacy.sampling import Access
from understudy.privacy.secure import SecureRandomness, secret_randomness
from understudy.privacy.vault import Vault, follow
from understudy.training.engine import Engine

ALPHA = 1e-7
FAR = 5.5  # a normal variable is beyond it with a probability of 4e-8


@pytest.fixture(params=["Philox", "AES-256-CTR"])
def secure(request) -> bool:
    """Whether draws come from the cipher."""
    if is_secure := request.param != "Philox":
        pytest.importorskip("cryptography")
    assert secret_randomness(CPU, secure=is_secure).generator == request.param
    return is_secure


def has_scale(sample, scale: float) -> bool:
    """Whether the sum of squares is what that of normals of this scale can be."""
    squares = float(np.square(np.asarray(sample, dtype=np.float64) / scale).sum())
    return (
        min(stats.chi2.cdf(squares, len(sample)), stats.chi2.sf(squares, len(sample))) > ALPHA / 2
    )


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
    is_whole = kind == "batch_gradient"
    claimed = curator.calibration.noise_multiplier * bound * (2 if of_members or is_whole else 1)
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
        elif is_whole:
            params = {"w": linear_params()["weight"]}
            flat = curator.batch_gradient(lambda p, *_: p["w"].sum() * 0, params, bound=bound)
            draws.append(flat["w"].flatten())
            curator.checkpoint(1, {})
        else:
            draws.append(curator.histogram() - torch.from_numpy(np.bincount(data.labels)))
    return torch.cat(draws).numpy(), claimed


@pytest.mark.parametrize(
    "kind",
    ["gradient", "class_sums", "histogram", "votes", "sample_gradient", "batch_gradient"],
)
def test_noise_scale_is_accepted_and_other_scales_rejected(kind, ledger, tmp_path):
    count = 200 if kind == "histogram" else 40
    noise, claimed = noise_of(kind, ledger, tmp_path, count)
    assert ks(noise, claimed) > ALPHA
    assert has_scale(noise, claimed)
    assert not has_scale(noise, claimed * 2 / 3)
    assert not has_scale(noise, claimed * 3 / 2)


def test_noise_is_fresh_for_every_release(ledger, tmp_path):
    noise, claimed = noise_of("gradient", ledger, tmp_path)
    releases = noise.reshape(40, -1) / claimed
    assert len({row.tobytes() for row in releases}) == 40
    for lag in (1, 2, 3, 7):
        products = releases[lag:] * releases[:-lag]
        assert abs(products.sum()) < FAR * np.sqrt(products.size)


def test_the_sampler_reaches_far_into_the_tail(secure):
    """A million draws: the tail beyond 4 has its share, and values are float64."""
    draws = secret_randomness(CPU, secure=secure).normal(1_000_001)
    assert draws.shape == (1_000_001,)
    assert draws.dtype == torch.float64
    assert ks(draws[:100_000], 1.0) > ALPHA
    assert has_scale(draws, 1.0)
    beyond = int((draws.abs() > 4).sum())
    expected = 2 * stats.norm.sf(4) * len(draws)
    assert stats.poisson.cdf(beyond, expected) > ALPHA
    assert stats.poisson.sf(beyond - 1, expected) > ALPHA
    assert SAMPLER_REACH <= 10
    # float64, not float32 widened: low mantissa bits are in use
    assert (draws.numpy().view(np.uint64) & 0x1FFFFFFF).astype(bool).mean() > 0.99


def test_a_cipher_of_nothing_but_zeros_goes_beyond_what_is_charged(monkeypatch):
    """The rarest bits of all: far beyond the reach, finite, and in every direction."""
    pytest.importorskip("cryptography")
    turns = torch.arange(8) * 2**60

    def words(self, count, device):
        return torch.cat([torch.zeros(count - 8, dtype=torch.int64), turns])

    monkeypatch.setattr(SecureRandomness, "_words", words)
    pairs = SecureRandomness(CPU).normal(16).view(2, 8)
    assert torch.allclose(pairs.norm(dim=0), torch.tensor(2 * 127 * np.log(2)).sqrt())
    assert pairs.norm(dim=0).min() > SAMPLER_REACH + 3
    assert torch.allclose(pairs[:, 0] + pairs[:, 4], torch.zeros(2, dtype=torch.float64), atol=1e-9)


def test_the_bits_are_the_ciphers():
    """AES-256 in counter mode of an all-zero key, from NIST's known answers."""
    pytest.importorskip("cryptography")
    draws = SecureRandomness(CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("secrets.token_bytes", bytes)
        first = draws._words(2, CPU)
    assert first.numpy().tobytes().hex() == "dc95c078a2408989ad48a21492842087"
    assert not torch.equal(draws._words(2, CPU), first)
    assert not torch.equal(draws._words(2, CPU), draws._words(2, CPU))


def access(rate: float, units: int = 2000, *, secure: bool = False) -> Access:
    data = some_images(units)
    return Access(
        records=records_of(data),
        randomness=secret_randomness(CPU, secure=secure),
        units=units,
        classes=3,
        sampling_rate=rate,
        noise_multiplier=1.0,
        engine=Engine(),
    )


@pytest.mark.parametrize("rate", [0.004, 0.1, 0.9])
def test_units_are_sampled_independently_at_the_stated_rate(rate, secure):
    opened = access(rate, secure=secure)
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
def test_extreme_counts_and_rates(count, rate, secure):
    draws = secret_randomness(CPU, secure=secure)
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


def test_global_seeds_change_neither_batches_nor_noise(secure):
    seen = []
    for _ in range(2):
        seed_everything()
        opened = access(0.5, secure=secure)
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


def sources_of(where: str, ledger, folder, *, secure: bool) -> list:
    """Return the generators that draw at different places of one run, or in different runs."""
    data = some_images(40)
    vault = a_vault(ledger, data)

    def opened(vault, run_id):
        source = secret_randomness(CPU, secure=secure)
        return open_curator(ledger, folder, vault=vault, run_id=run_id, randomness=source)

    if where == "steps":
        return [opened(vault, "a")._randomness] * 3
    if where == "resumes":
        return [opened(vault, "a")._randomness for _ in range(3)]
    if where == "runs side by side":
        return [opened(vault.beside(Engine()), run_id)._randomness for run_id in "abc"]
    leader = OneOfTwo(0)
    registration = vault.registration
    curators = [opened(Vault(data, registration, ledger, group=leader), "a")]
    briefing = Briefing.from_bytes(leader.sent[0])
    plan = Plan.from_json(briefing.plan)
    curators += [follow(briefing, data, plan, engine=Engine(), group=OneOfTwo(1)) for _ in range(2)]
    assert len({curator.generator for curator in curators}) == 1
    return [curator._randomness for curator in curators]


@pytest.mark.parametrize("where", ["steps", "resumes", "runs side by side", "processes"])
def test_noise_and_batches_are_independent_across(where, secure, ledger, tmp_path):
    """Of three, any two: normals are uncorrelated, and units meet in both batches by chance."""
    count, sides = 20_000, []
    for source in sources_of(where, ledger, tmp_path, secure=secure):
        signs = -np.ones(count)
        signs[source.choose(count, 0.5)] = 1
        sides.append((source.normal(count).numpy(), signs))
    for one, other in itertools.combinations(sides, 2):
        for drawn, also in zip(one, other, strict=True):
            assert abs(drawn @ also) < FAR * np.sqrt(count)


def test_each_opening_of_a_vault_has_its_own_secrets(ledger, tmp_path):
    """Also after a resume of the same run."""
    draws = []
    vault = a_vault(ledger)
    for run_id in ("a", "a", "b"):
        curator = open_curator(ledger, tmp_path, vault=vault, run_id=run_id)
        draws.append(tuple(curator._randomness.normal(4).tolist()))
    assert len(set(draws)) == 3


def test_a_certificate_names_the_generator(ledger, tmp_path, secure):
    source = secret_randomness(CPU, secure=secure)
    curator = open_curator(ledger, tmp_path, randomness=source)
    assert curator.has_guarantee
    guarantee = certificate._guarantee(curator, LOOSE, allow_large_delta=True)
    assert guarantee["randomness"] == source.generator


def test_without_the_package_a_cipher_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.modes", None)
    with pytest.raises(InvalidSettings, match=r"pip install '\.\[secure\]'"):
        secret_randomness(CPU, secure=True)
