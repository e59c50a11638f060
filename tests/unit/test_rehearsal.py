"""Rehearsal: its estimates, what it declares, what it learns, and that it goes on where it was."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from door import LOOSE, a_vault, access_to, some_images, without
from static import static_engine
from understudy.data.images import labelled_images
from understudy.errors import Interrupted, InvalidSettings
from understudy.methods.method import configure
from understudy.methods.rehearsal import Rehearsal, RehearsalConfig
from understudy.methods.rehearsing import (
    REACH,
    Beyond,
    Lens,
    Teaching,
    records_means,
    warm_start,
    whitening,
)
from understudy.nets.convnet import ConvNet
from understudy.nets.rehearsed import RehearsedGenerator, warped
from understudy.nets.released import Generator
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.curator import Pace
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Block, Budget, Plan, PublicFacts, joint_bound
from understudy.privacy.randomness import InjectedRandomness
from understudy.privacy.releases.class_sums import Embedding, class_sums
from understudy.progress import Progress
from understudy.training.siamese import GRID, Siamese, changed

FACTS = PublicFacts(units=60, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
TINY = {
    "images_per_class": 2, "waves": 10, "components": 4, "samples": 30, "networks": 2, "width": 4,
    "hidden": 3, "refine_steps": 2, "refine_batch": 12, "match_steps": 2,
}  # fmt: skip
LARGE = TINY | {"match_steps": 0, "teacher_steps": 4, "taught": 8}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def a_method(settings, facts=FACTS, epsilon=10):
    config = configure(Rehearsal, facts, epsilon, settings=settings).config
    return Rehearsal(config, facts, seed=0)


def stripes(count=300, seed=0):
    """Rows, columns and checks of any phase, with some noise: three classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    row, column = np.mgrid[:8, :8]
    kinds = [row // 2 % 2, column // 2 % 2, (row // 2 + column // 2) % 2]
    images = np.stack([np.roll(kinds[k], rng.integers(0, 2), (0, 1)) for k in labels]) * 160
    images = images + rng.integers(0, 60, images.shape)
    return labelled_images(images.astype(np.uint8)[:, None], labels, classes=3, name="stripes")


# Estimates


def test_whitened_components_vary_equally_nearly():
    mixing = torch.randn(30, 30, generator=seeded()) * torch.linspace(0.1, 3, 30)
    described = torch.randn(4000, 30, generator=seeded(1)) @ mixing + 5
    found = whitening(described, 10, seeded(2))
    white = described @ found["project"].T - found["offset"]
    assert white.mean(0).abs().max() < 1e-3
    covariance = white.T @ white / len(white)
    off = covariance - covariance.diag().diag()
    assert off.abs().max() < 0.02
    assert 0.3 < covariance.diag().min() <= covariance.diag().max() < 1


def test_a_warm_start_learns_what_can_be_told_apart():
    labels = torch.arange(90) % 3
    seen = torch.nn.functional.one_hot(labels, 5).float() + 0.1 * torch.randn(90, 5)
    taught = warm_start(seen, labels, 3)
    assert ((seen @ taught.average.T).argmax(1) == labels).all()
    assert taught.velocity.abs().max() == 0


def test_the_average_is_of_the_later_weights():
    state, weights = Teaching(*torch.zeros(3, 1)), []
    for step in range(6):
        state = state.after(torch.tensor([float(step)]), 0.1, step - 3)
        weights.append(state.weight)
    assert torch.allclose(state.average, torch.stack(weights[3:]).mean(0))


# What is released


def test_what_a_lens_sees_beyond_samples_is_bounded_and_adds_up_to_class_means():
    data = some_images(24)
    images, labels = torch.from_numpy(data.images).float() / 255, torch.from_numpy(data.labels)
    network = ConvNet((1, 8, 8), 3, 4)
    lens, weights = Lens(network, (0.5,), (0.5,)), network.init(seeded())
    samples = torch.rand(30, 1, 8, 8, generator=seeded(1))
    beyond = Beyond(lens)
    for some in (samples, samples[:3].repeat(10, 1, 1, 1)):  # of which the latter are all alike
        known = beyond.found(weights, some, torch.arange(30) % 3, classes=3)
        for record in zip(images, labels, strict=True):
            assert beyond(*record, known)[0].norm() <= 1 + 1e-6
    wide = known | {REACH: torch.tensor(10.0)}  # nothing is cut
    blocks = (Block(name="features", dimension=64),)
    embedding = Embedding(beyond, blocks, takes_label=True, public=wide)
    sums = class_sums(access_to(data), embedding).view(3, -1)
    means = torch.stack([lens(weights, images[labels == c]).mean(0) for c in range(3)])
    assert torch.allclose(records_means(wide, sums, torch.full((3,), 8.0)), means, atol=1e-5)


def test_a_network_sees_all_images_changed_in_the_same_way():
    network, mean, std = ConvNet((1, 8, 8), 3, 4), (0.2,), (0.5,)
    lens, plain = Lens(network, mean, std, Siamese(("scale", "rotate"))), Lens(network, mean, std)
    images = torch.rand(5, 1, 8, 8, generator=seeded())
    weights, own = (found.drawn(0, 3) for found in (lens, plain))
    seen = lens(weights, images)
    by_hand = changed((images - 0.2) / 0.5, weights) * 0.5 + 0.2
    assert torch.allclose(seen, plain(own, by_hand), atol=1e-6)
    assert not torch.allclose(seen, plain(own, images), atol=1e-2)
    alone = torch.cat([lens(weights, image[None]) for image in images])
    assert torch.allclose(seen, alone, atol=1e-6)
    assert not torch.equal(weights[GRID], lens.drawn(0, 4)[GRID])


@pytest.mark.parametrize("units", [None, [n // 3 for n in range(60)]], ids=["records", "groups"])
def test_emptying_a_unit_moves_each_release_by_at_most_its_bound(units, ledger, tmp_path):
    """Every embedding of a run, in its turn, on the records with and without a unit."""
    data = some_images(60, units=units)
    data.images[data.units == 4] = 255
    vault = a_vault(ledger, data)
    method = a_method(LARGE, vault.facts)
    curator = vault.open(
        method.plan(), LOOSE, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    real, seen = curator.class_sums, []

    class Watching:
        def __getattr__(self, name):
            return getattr(curator, name)

        def class_sums(self, embedding, *, release):
            blocks = embedding.blocks
            scale = torch.cat(
                [torch.full((b.sums(3) * b.dimension,), b.bound * b.ratio) for b in blocks]
            )
            worlds = [class_sums(access_to(d), embedding) for d in (data, without(data, 4))]
            moved = ((worlds[0] - worlds[1]) / scale).double().norm()
            seen.append((release, float(moved), joint_bound(blocks)))
            return real(embedding, release=release)

    method.run(Watching(), Progress())
    assert [name for name, _, _ in seen] == ["overview", "means", "moments", *["features"] * 2]
    for _, moved, bound in seen:
        assert 0 < moved <= bound * (1 + 1e-4)


@pytest.mark.parametrize("sorted_by_class", [True, False])
def test_units_of_several_records_lead_to_the_same_gaussians(sorted_by_class, tmp_path):
    """Each answer scales what a unit adds by another factor; divided by one count, they err."""
    plain, owners = stripes(), np.arange(300) // 5
    order = np.argsort(plain.labels, kind="stable") if sorted_by_class else np.arange(300)
    held = labelled_images(
        plain.images[order], plain.labels[order], classes=3, units=owners, unit="patient",
        name="held",
    )  # fmt: skip
    free, found = Budget(epsilon=float("inf"), delta=1e-5), []
    for number, data in enumerate((plain, held)):
        ledger = Ledger(tmp_path / f"ledger{number}")  # of a world of its own
        vault = a_vault(ledger, data)
        method = a_method(TINY | {"waves": 30, "components": 8}, vault.facts)
        curator = vault.open(
            method.plan(), free, ledger, workspace=tmp_path / f"{number}", run_id=f"{number}",
            allow_large_delta=True,
        )  # fmt: skip
        sizes, mean = method._overview(curator)
        gaussians = method._gaussians(curator, sizes, mean)
        contrast = (gaussians.mean - gaussians.mean.mean(0)).norm()
        found.append((float(contrast), float(gaussians.factor.square().sum())))
    (contrast, variance), (same_contrast, same_variance) = found
    assert same_contrast == pytest.approx(contrast, rel=0.05)
    assert same_variance == pytest.approx(variance, rel=0.2)


def test_shares_of_the_budget_are_kept_whatever_the_number_of_releases():
    """A line of several answers, each with more noise, costs what one would cost."""
    plan = a_method(LARGE | {"networks": 25, "teacher_steps": 9}).plan()
    precision = {line.name: line.count / line.noise_ratio**2 for line in plan}
    config = configure(Rehearsal, FACTS, 10, settings=LARGE).config
    for name, found in precision.items():
        assert found == pytest.approx(getattr(config, f"{name}_share"))
    together = replace(plan["overview"], noise_ratio=1 / math.sqrt(sum(precision.values())))
    apart, one = (epsilon_of(p, 3.0, 1e-5, "pld") for p in (plan, Plan((together,))))
    assert apart == pytest.approx(one, rel=0.01)


def test_bounds_follow_what_was_declared_of_pixels():
    dark = replace(FACTS, std=(0.25,))
    bounds = [
        [block.bound for line in a_method(TINY, facts).plan() for block in line.blocks]
        for facts in (FACTS, dark)
    ]
    ratios = [a / b for a, b in zip(*bounds, strict=True)]
    assert ratios == pytest.approx([2, 1, 2, 4, 1])  # mean, counts, means, moments, features


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (TINY, ["overview", "means", "moments", "features"]),
        (LARGE, ["overview", "means", "moments", "features", "teacher"]),
        (LARGE | {"networks": 0, "refine_steps": 0}, ["overview", "means", "moments", "teacher"]),
    ],
    ids=["small", "large", "without networks"],
)
def test_parts_can_be_left_out(settings, lines, ledger, tmp_path):
    vault = a_vault(ledger, some_images(60))
    method = a_method(settings, vault.facts)
    assert [line.name for line in method.plan()] == lines
    curator = vault.open(
        method.plan(), LOOSE, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    made = method.run(curator, Progress())
    assert len(made) == 6
    assert (made.generator is None) == bool(method.config.match_steps)
    assert (made.soft_labels is None) == (not method.config.teacher_steps)
    assert curator.made() == {line.name: line.count for line in curator.plan}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"networks": 0}, "nothing to refine"),
        ({"networks": -1}, "0 or more"),
        ({"teacher_steps": 5}, "set one of them to 0"),
        ({"moments_share": 0.0}, "positive"),
        ({"waves": 0}, "at least 1"),
        ({"augment": "crop,twirl"}, "twirl"),
    ],
)
def test_settings_that_mean_nothing_are_refused(bad, message):
    with pytest.raises(InvalidSettings, match=message):
        RehearsalConfig(**bad)


def settings_of(facts, epsilon, **given):
    return configure(Rehearsal, facts, epsilon, settings=given).config


def test_small_sets_move_pixels_and_large_ones_have_a_teacher_where_records_suffice():
    many = replace(FACTS, units=60_000, shape=(1, 28, 28))
    assert configure(Rehearsal, FACTS, 1).preset == "small"
    assert configure(Rehearsal, many, 1).preset == "best"
    for facts in (FACTS, many):
        small = settings_of(facts, 1, images_per_class=50)
        assert small.match_steps
        assert not small.teacher_steps
        assert not settings_of(facts, 1, images_per_class=1000).match_steps
    taught = settings_of(many, 1, images_per_class=1000)
    assert taught.teacher_steps
    assert taught.features_share < settings_of(many, 1).features_share
    for plain in (
        settings_of(FACTS, 1, images_per_class=1000),
        settings_of(many, 1, images_per_class=1000, teacher_steps=0),
    ):
        assert not plain.teacher_steps
        assert plain.features_share == settings_of(many, 1).features_share


@pytest.mark.parametrize("preset", ["cpu", "quick", "small"])
def test_networks_see_changes_where_a_small_set_has_budget(preset):
    def seen(epsilon, **given):
        many = replace(FACTS, units=30_000)
        return configure(Rehearsal, many, epsilon, preset=preset, settings=given).config.augment

    assert seen(1.9) == seen(10, images_per_class=200) == seen(10, augment="none") == "none"
    assert seen(2) == seen(10) == "crop,scale,rotate"


def test_little_budget_goes_to_class_means_first():
    shares = [settings_of(FACTS, epsilon).means_share for epsilon in (0.1, 100, 1e4, math.inf)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 0.3
    assert shares[-1] == 0.04


# What is made


def injected():
    source = seeded(7)
    return InjectedRandomness(
        uniform=lambda n: torch.rand(n, generator=source, dtype=torch.float64),
        normal=lambda n: torch.randn(n, generator=source, dtype=torch.float64),
    )


def test_a_large_run_is_the_same_wherever_it_was_cut_off(ledger, tmp_path):
    """Between networks, while refining, between the teacher's gradients."""
    vault = a_vault(ledger, some_images(60))
    method = a_method(LARGE, vault.facts)

    def run(name, draws, stops):
        pace = Pace(seconds=0.0, should_stop=lambda: next(stops, False))
        curator = vault.open(
            method.plan(), LOOSE, ledger, workspace=tmp_path / name, run_id=name, pace=pace,
            randomness=draws, allow_large_delta=True,
        )  # fmt: skip
        return a_method(LARGE, vault.facts).run(curator, Progress())

    whole = run("whole", injected(), iter(()))
    for cut in (1, 3, 5, 6, 7, 8):
        draws = injected()
        with pytest.raises(Interrupted):
            run(f"cut{cut}", draws, iter([False] * (cut - 1) + [True]))
        again = run(f"cut{cut}", draws, iter(()))
        assert torch.equal(whole.images, again.images)
        assert torch.allclose(whole.soft_labels, again.soft_labels, atol=1e-5)


def test_a_run_without_a_refiner_goes_on_where_it_was_cut_off(ledger, tmp_path):
    """An act that was left out has nothing to restore."""
    settings = TINY | {"refine_steps": 0, "match_steps": 6}
    vault = a_vault(ledger, some_images(60))

    def run(stops):
        method = a_method(settings, vault.facts)
        pace = Pace(seconds=0.0, should_stop=lambda: next(stops, False))
        curator = vault.open(
            method.plan(), LOOSE, ledger, workspace=tmp_path / "w", run_id="r", pace=pace,
            allow_large_delta=True,
        )  # fmt: skip
        return method.run(curator, Progress())

    with pytest.raises(Interrupted):
        run(iter([False] * 4 + [True]))
    assert run(iter(())).images.shape == (6, 1, 8, 8)


@pytest.mark.parametrize("settings", [TINY, LARGE], ids=["small", "large"])
def test_steps_are_compiled_once(settings, ledger, tmp_path, monkeypatch):
    engine = static_engine(monkeypatch)
    vault = a_vault(ledger, some_images(60)).beside(engine)
    method = a_method(settings, vault.facts)
    curator = vault.open(
        method.plan(), LOOSE, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    method.run(curator, Progress())
    assert engine.said == []
    assert len(curator.engine._programs) == (2 if settings is TINY else 1)


LEARN = {
    "waves": 30, "components": 8, "samples": 120, "networks": 4, "width": 8, "hidden": 8,
    "refine_steps": 60, "refine_batch": 48, "refine_lr": 3e-3,
}  # fmt: skip


@pytest.mark.parametrize(
    "settings",
    [
        LEARN | {"images_per_class": 4, "match_steps": 60},
        LEARN | {"images_per_class": 60, "match_steps": 0, "teacher_steps": 15, "taught": 20},
    ],
    ids=["small", "large"],
)
def test_it_learns_the_classes(settings, ledger, tmp_path):
    """Images of each class are nearer to real ones of it; the teacher knows real ones."""
    vault = a_vault(ledger, stripes())
    method = a_method(settings, vault.facts)
    curator = vault.open(
        method.plan(), Budget(epsilon=float("inf"), delta=1e-5), ledger, workspace=tmp_path / "w",
        run_id="r", allow_large_delta=True,
    )  # fmt: skip
    made = method.run(curator, Progress())
    fresh = stripes(60, seed=1)
    real = torch.from_numpy(fresh.images).float() / 255
    labels = torch.from_numpy(fresh.labels)
    nearest = torch.cdist(real.flatten(1), made.images.flatten(1)).argmin(1)
    assert (made.labels[nearest] == labels).float().mean() > 0.8
    if made.generator:
        told = made.generator.network.opinions(made.generator.params, real)
        assert (told.argmax(1) == labels).float().mean() > 0.9


# The generator


def a_generator(**described):
    network = RehearsedGenerator((1, 8, 8), 3, code=4, **{"hidden": 3, "taught": 5} | described)
    shapes = {n: p.shape for n, p in network.build().named_parameters()}
    params = {n: torch.randn(shape, generator=seeded()) for n, shape in shapes.items()}
    return Generator(network, params | network.init(seeded()), {})


def test_a_generator_with_its_teacher_survives_its_file_and_labels_what_it_draws():
    made = a_generator(warps=True)
    again = Generator.from_bytes(made.to_bytes())
    assert again.network == made.network
    one, other = (g.drawn(tuple("abc"), 20, seed=1) for g in (made, again))
    assert torch.equal(one.images, other.images)
    assert torch.equal(one.soft_labels, other.soft_labels)
    assert torch.equal(one.labels, one.soft_labels.argmax(1))
    plain = a_generator(taught=0).drawn(tuple("abc"), per_class=4, seed=1)
    assert plain.soft_labels is None
    assert plain.labels.bincount().tolist() == [4, 4, 4]


def test_a_refiner_starts_as_nearly_the_identity():
    whole, plain = a_generator(taught=0), a_generator(hidden=0, taught=0)
    shared = {name: whole.params[name] / 10 + 0.5 for name in plain.params}
    codes, labels = whole.network.codes(12, seeded(2)), torch.arange(12) % 3
    refined = whole.network(whole.params | shared, codes, labels)
    raw = plain.network(shared, codes, labels).clamp(0, 1)
    assert (refined - raw).abs().mean() < 0.1


def test_warps_are_mild_and_none_at_the_middle_of_a_code():
    images = torch.rand(5, 2, 12, 10, generator=seeded())
    assert torch.allclose(warped(images, torch.zeros(5, 6)), images, atol=1e-5)
    blob = torch.zeros(200, 1, 28, 28)
    blob[:, :, 12:16, 12:16] = 1
    moved = warped(blob, torch.randn(200, 6, generator=seeded()))
    place = torch.arange(28.0)
    mass = moved.sum((1, 2, 3))
    down = (moved.sum((1, 3)) * place).sum(1) / mass - 13.5
    assert down.abs().max() < 2.6
    assert down.std() > 0.8
    assert moved.min() >= 0
