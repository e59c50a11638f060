"""Diffusion: draws of a record, the U-Net's gradients, the denoiser, samplers, and DPDM itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import understudy
from door import a_vault, access_to, some_images, without
from static import static_engine
from understudy.data.images import labelled_images
from understudy.errors import InvalidData, InvalidSettings
from understudy.methods.dpdm import DPDM, DPDMConfig
from understudy.methods.method import configure
from understudy.nets.diffusion import Denoiser, DiffusionGenerator, Sampler
from understudy.nets.draws import normals, seed_of, uniforms
from understudy.nets.released import Generator
from understudy.nets.unet import UNet
from understudy.privacy.gradients import GradientRows, find_layers
from understudy.privacy.plan import Budget, PublicFacts
from understudy.privacy.releases.gradient import gradient
from understudy.progress import Progress
from understudy.training.diffusion import DenoisingLoss, draws_of

CPU = torch.device("cpu")
SHAPE = (1, 8, 8)
TINY = UNet(SHAPE, 3, width=4, levels=2, blocks=1, attention=4)
SHALLOW = replace(TINY, levels=1)
KEY = torch.tensor([12, 345])


def params_of(network, seed=0):
    """Parameters none of which is zero: at the start most gradients are."""
    generator = torch.Generator().manual_seed(seed)
    started = network.init(generator)
    return {n: w + 0.1 * torch.randn(w.shape, generator=generator) for n, w in started.items()}


def flat(params):
    return torch.cat([tensor.double().flatten() for tensor in params.values()])


def drawn(step=0):
    return draws_of(step, seed=0, device=CPU)


def released(data, loss, params, *, clip_norm=0.5, step=0, **access):
    opened = replace(access_to(data), **access)
    return gradient(opened, loss, params, drawn(step), clip_norm=clip_norm)


# Draws


def test_draws_are_uniform_normal_and_independent():
    seeds = [seed_of(torch.tensor([number]), KEY) for number in range(20)]
    levels = torch.stack([uniforms(seed, (20_000,), stream=0) for seed in seeds])
    assert levels.min() > 0
    assert levels.max() <= 1
    even = torch.linspace(0, 1, levels.numel())
    assert (levels.flatten().sort().values - even).abs().max() < 1.7 / levels.numel() ** 0.5
    noise = torch.stack([normals(seed, (20_000,), stream=1) for seed in seeds])
    expected = torch.erf(noise.flatten().sort().values / 2**0.5) / 2 + 0.5
    assert (expected - even).abs().max() < 1.7 / noise.numel() ** 0.5
    others = [normals(seed, (20_000,), stream=2) for seed in seeds]
    apart = torch.corrcoef(torch.cat([noise, torch.stack(others)])) - torch.eye(40)
    assert apart.abs().max() < 5 / 20_000**0.5


def test_a_seed_tells_numbers_places_and_keys_apart():
    pixels = torch.zeros(6, dtype=torch.int64)
    swapped, moved = pixels.clone(), pixels.clone()
    swapped[2], moved[3] = 1, 1
    seeds = [seed_of(values, KEY) for values in (pixels, swapped, moved, pixels[:5])]
    seeds += [seed_of(pixels, KEY + 1)]
    assert len({tuple(seed.tolist()) for seed in seeds}) == 5
    assert torch.equal(seed_of(pixels, KEY), seeds[0])
    assert torch.equal(normals(seeds[0], (5,), stream=3), normals(seeds[0], (5,), stream=3))


# Gradients of the U-Net, record by record


@pytest.mark.parametrize(
    "network", [TINY, UNet((3, 9, 6), 3, width=4, levels=3, blocks=1, attention=16)]
)
def test_gradients_by_layer_are_gradients_by_record(network):
    params, loss = params_of(network), DenoisingLoss(Denoiser(network), 3)
    images, labels = torch.rand(4, *network.shape), torch.tensor([0, 1, 2, 0])
    known = drawn()
    layers, copied = find_layers(
        lambda p, x, y: loss(p | known, x, y), params, images[0], labels[0]
    )
    assert {layer.weight for layer in layers} == {n for n in params if n.endswith("weight")}
    assert not copied
    by_layer, by_record = (
        GradientRows(loss, public=known, by_layer=how)(params | known, images, labels)
        for how in (True, False)
    )
    for name, found, expected in zip(params, by_layer, by_record, strict=True):
        assert expected.abs().max() > 0, name
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max(), name


def test_maps_may_be_narrower_than_parameters():
    narrow = replace(SHALLOW, maps=torch.bfloat16)
    params, images, labels = params_of(SHALLOW), torch.rand(4, *SHAPE), torch.tensor([0, 1, 2, 0])
    wide, rows = (
        torch.cat(
            [
                block.flatten(1).double()
                for block in GradientRows(DenoisingLoss(Denoiser(network), 2), public=drawn())(
                    params | drawn(), images, labels
                )
            ],
            1,
        )
        for network in (SHALLOW, narrow)
    )
    assert torch.cosine_similarity(wide, rows).min() > 0.99


def test_a_record_s_gradient_depends_on_itself_and_the_step_alone():
    """A record's noise must not follow from its place in a batch: others' absence would move it."""
    loss, params, data = DenoisingLoss(Denoiser(SHALLOW), 2), params_of(SHALLOW), some_images(12)
    whole = flat(released(data, loss, params, clip_norm=0.5))
    emptied = flat(released(without(data, 3), loss, params, clip_norm=0.5))
    other_step = flat(released(data, loss, params, clip_norm=0.5, step=1))
    expected_batch = 6
    moved = (whole - emptied).norm() * expected_batch
    assert 0.25 < moved <= 0.5 * (1 + 1e-6)
    assert (whole - other_step).norm() * expected_batch > 0.5


def test_a_release_in_passes_is_the_same_and_no_pass_is_larger(monkeypatch):
    seen, plainly = [], GradientRows.__call__

    def watched(self, inputs, images, labels):
        seen.append(len(images))
        return plainly(self, inputs, images, labels)

    monkeypatch.setattr(GradientRows, "__call__", watched)
    params, data = params_of(SHALLOW), some_images(12)
    loss = DenoisingLoss(Denoiser(SHALLOW), 2)
    whole, parts = (flat(released(data, loss, params, at_once=most)) for most in (12, 5))
    assert torch.allclose(parts, whole, atol=1e-6)
    assert seen == [12, 5, 5, 2]


def test_compiled_passes_give_the_same(monkeypatch):
    params, data = params_of(SHALLOW), some_images(12)
    loss = DenoisingLoss(Denoiser(SHALLOW), 2)
    whole = flat(released(data, loss, params))
    engine = static_engine(monkeypatch)
    parts = flat(released(data, loss, params, at_once=5, engine=engine))
    assert torch.allclose(parts, whole, atol=1e-6)
    assert len(engine.compiled) == 1
    assert not engine.said


def test_units_of_several_records_are_bounded_as_one():
    params, units = params_of(SHALLOW), [0] * 5 + [1, 2, 2, 3]
    loss, data = DenoisingLoss(Denoiser(SHALLOW), 2), some_images(9, units=units, unit="patient")
    whole = flat(released(data, loss, params, clip_norm=0.1, at_once=2))
    emptied = flat(released(without(data, 0), loss, params, clip_norm=0.1, at_once=2))
    assert (whole - emptied).norm() * 2 <= 0.1 * (1 + 1e-6)


# The loss and the denoiser


def test_an_untrained_network_has_a_loss_of_one_at_every_noise_level():
    network = UNet(SHAPE, 3, width=4, levels=1, blocks=1)
    params = network.init(torch.Generator().manual_seed(0))
    images = torch.rand(20, *SHAPE, generator=torch.Generator().manual_seed(1))
    for mean in (-4.0, -1.2, 2.0):
        loss = DenoisingLoss(Denoiser(network), 40, log_mean=mean, log_std=0.1)
        losses = [loss(params | drawn(), image, torch.tensor(0)) for image in images]
        assert torch.stack(losses).mean() == pytest.approx(1, abs=0.1)


def test_stratified_noise_levels_have_the_same_distribution_and_fill_it():
    seed = seed_of(torch.tensor([1]), KEY)
    alone, spread = (
        DenoisingLoss(Denoiser(TINY), 4000, stratified=how)._levels(seed).log()
        for how in (False, True)
    )
    assert spread.mean() == pytest.approx(-1.2, abs=1e-3)
    assert spread.std() == pytest.approx(1.2, abs=5e-3)
    assert alone.mean() == pytest.approx(-1.2, abs=0.1)
    assert alone.std() == pytest.approx(1.2, abs=0.1)
    assert (spread.diff() > 0).all()
    assert spread.exp().isfinite().all()


def test_the_class_is_dropped_as_often_as_asked():
    told = []

    class Listening:
        network = TINY

        def __call__(self, params, noisy, sigma, labels):
            told.append(labels.tolist())
            return noisy

    loss = DenoisingLoss(Listening(), 2, label_dropout=0.3)
    for image in torch.rand(300, *SHAPE, generator=torch.Generator().manual_seed(1)):
        loss(drawn(), image, torch.tensor(1))
    assert all(one in ([1, 1], [3, 3]) for one in told)  # once for all copies
    assert sum(one == [3, 3] for one in told) / 300 == pytest.approx(0.3, abs=0.08)


# Samplers


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(steps=40),
        Sampler(steps=400, heun=False),
        Sampler(steps=40, churn=20),
        Sampler(steps=400, churn=30, churn_min=0.01, heun=False),
    ],
    ids=["heun", "ddim", "churn", "churned ddim"],
)
def test_samplers_draw_from_the_distribution_whose_denoiser_they_follow(sampler):
    """Of normal pixels, with a mean and a variance, the best denoiser is known."""
    generator = torch.Generator().manual_seed(0)
    mean, std = 0.3, 0.2

    def denoised(images, sigma):
        return mean + (images - mean) * std**2 / (std**2 + sigma**2)

    drawn = sampler(
        torch.randn(2000, 1, 3, 3, generator=generator),
        denoised,
        lambda _: torch.randn(2000, 1, 3, 3, generator=generator),
    )
    assert drawn.mean() == pytest.approx(mean, abs=0.01)
    assert drawn.std() == pytest.approx(std, rel=0.06)


def test_fresh_noise_changes_an_image_and_none_does_not():
    def rough(images, sigma):
        return images / (1 + sigma**2)

    start, ones = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)
    plain, churned, outside = (
        Sampler(steps=10, churn=churn, churn_max=most)(start, rough, lambda _: ones)
        for churn, most in ((0, 50.0), (5, 50.0), (5, 0.01))
    )
    assert not torch.allclose(plain, churned)
    assert torch.equal(plain, outside)


def small_generator(**changes):
    return DiffusionGenerator(
        SHAPE, 3, width=4, levels=2, blocks=1, attention=4, steps=3, **changes
    )


def test_an_image_does_not_depend_on_its_batch():
    network = small_generator(churn=5.0, guidance=0.5)
    params = params_of(network)
    codes, labels = network.codes(6, torch.Generator().manual_seed(0)), torch.arange(6) % 3
    whole = network(params, codes, labels)
    assert whole.shape == (6, *SHAPE)
    assert torch.allclose(network(params, codes[4:5], labels[4:5])[0], whole[4], atol=1e-3)
    assert not torch.allclose(whole[0], whole[3], atol=0.1)


def test_guidance_drives_images_away_from_those_of_no_class():
    params = params_of(small_generator())
    codes = small_generator().codes(4, torch.Generator().manual_seed(0))
    classes, guided = (
        small_generator(guidance=weight)(params, codes, torch.tensor([0, 1, 2, 0]))
        for weight in (0.0, 1.0)
    )
    nobody = small_generator()(params, codes, None)
    assert not torch.allclose(classes, nobody, atol=1e-4)
    assert not torch.allclose(classes, guided, atol=1e-4)


def test_a_generator_s_file_holds_network_and_sampler():
    generator = Generator(small_generator(churn=5.0), params_of(small_generator()), {})
    again = Generator.from_bytes(generator.to_bytes())
    assert again.network == generator.network
    images, labels = again.sample(7, seed=1)
    assert torch.equal(images, generator.sample(7, seed=1)[0])
    assert labels.tolist() == [0, 0, 0, 1, 1, 2, 2]
    lacking = dict(generator.params)
    del lacking["first.weight"]
    with pytest.raises(InvalidData, match="params/first.weight is missing"):
        Generator.from_bytes(replace(generator, params=lacking).to_bytes())


# The method


def facts_of(shape, units=60_000):
    constants = (0.5,) * shape[0]
    return PublicFacts(
        units=units, class_names=tuple("0123456789"), shape=shape, mean=constants, std=constants
    )


def test_presets_follow_the_size_of_images():
    def chosen(preset, shape, epsilon=10):
        return configure(DPDM, facts_of(shape), epsilon, preset=preset).config

    mnist = chosen("paper", (1, 28, 28))
    assert (mnist.steps, mnist.batch, mnist.copies, mnist.clip_norm) == (4500, 4096, 32, 1.0)
    assert DPDM(mnist, facts_of((1, 28, 28)), seed=0).plan()["gradient"].dimension == 1_754_401
    faces, large = chosen("paper", (3, 32, 32)), chosen("paper", (3, 64, 64))
    assert (faces.batch, faces.levels, faces.attention) == (2048, 3, 16)
    assert (large.levels, large.attention) == (4, 16)
    assert chosen("paper-cifar10", (3, 32, 32)).copies == 8
    assert chosen("paper", (1, 28, 28), epsilon=1).churn_min == 0.1
    for shape in ((1, 28, 28), (3, 32, 32), (3, 64, 64)):
        best, paper = chosen("best", shape), chosen("paper", shape)
        assert best.copies < paper.copies
        assert best.levels == paper.levels


def test_fewer_records_at_once_where_copies_are_many_or_large():
    def at_once(shape, device="cuda", **settings):
        method = DPDM(DPDMConfig(**settings), facts_of(shape), seed=0)
        return method._at_once(torch.device(device))

    assert at_once((1, 28, 28)) == 167
    assert at_once((1, 28, 28), copies=8) == 668
    assert at_once((3, 64, 64)) == 32
    assert at_once((3, 64, 64), copies=10_000) == 1
    assert at_once((1, 28, 28), "cpu") == 10


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"copies": 0}, "copies is 0, expected at least 1"),
        ({"width": 5}, "width is 5, expected an even number"),
        ({"average": 1.0}, "average is 1.0, expected 0 to below 1"),
        ({"churn": -1.0}, "churn is -1.0, expected 0 or more"),
        ({"guidance": 1.0, "label_dropout": 0.0}, "pass --label-dropout"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0, expected a positive number"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(InvalidSettings, match=text):
        DPDMConfig(**settings)


def test_it_learns_what_the_classes_look_like(ledger, tmp_path):
    """Without noise: one class is dark, one bright, and so are the images drawn.

    Batches are secret, so no two trainings are alike: in 24 of them it was 0.40 to 0.69.
    """
    images = torch.cat([torch.full((20, 1, 4, 4), 40), torch.full((20, 1, 4, 4), 220)]).byte()
    data = labelled_images(images.numpy(), [0] * 20 + [1] * 20)
    vault = a_vault(ledger, data)
    config = DPDMConfig(
        images_per_class=20, steps=60, batch=20, copies=4, stratified=True, lr=2e-2, average=0.8,
        width=4, levels=1, blocks=1, sample_steps=6, churn=0.0,
    )  # fmt: skip
    method = DPDM(config, vault.facts, seed=0)
    curator = vault.open(
        method.plan(), Budget(epsilon=float("inf"), delta=1e-5), ledger,
        workspace=tmp_path / "w", run_id="r", allow_large_delta=True,
    )  # fmt: skip
    made = method.run(curator, Progress())
    dark, bright = (made.images[made.labels == label].mean() for label in (0, 1))
    assert bright - dark > 0.2


def test_more_images_can_be_drawn_from_a_finished_run(tmp_path):
    tiny = {
        "images_per_class": 2, "steps": 2, "batch": 12, "copies": 2, "width": 4, "levels": 1,
        "blocks": 1, "sample_steps": 2,
    }  # fmt: skip
    understudy.synthesize(
        some_images(60, name="pets"), method="dpdm", epsilon=8, accountant="renyi", delta=1e-3,
        settings=tiny, out=tmp_path / "run", ledger=tmp_path / "ledger", device="cpu",
    )  # fmt: skip
    more = understudy.sample(tmp_path / "run", count=9, seed=4)
    assert more.labels.bincount().tolist() == [3, 3, 3]
    assert more.images.shape == (9, *SHAPE)
    assert understudy.verify(tmp_path / "run").files == 4


def test_every_setting_of_the_network_and_the_sampler_reaches_the_generator():
    config = DPDMConfig(
        width=6, levels=2, blocks=3, attention=9, guidance=0.7, sample_steps=11, heun=False,
        churn=3.0, churn_min=0.2,
    )  # fmt: skip
    network = DPDM(config, facts_of((1, 28, 28)), seed=0).network
    assert network.unet == UNet((1, 28, 28), 10, width=6, levels=2, blocks=3, attention=9)
    assert network.sampler == Sampler(steps=11, heun=False, churn=3.0, churn_min=0.2)
    assert network.guidance == 0.7
