"""DP-GAN and DP-CGAN: what touches records, what does not, and what was published."""

from __future__ import annotations

import math
from contextlib import closing

import pytest
import torch
import torch.nn.functional as F

import understudy
from door import a_vault, chosen, some_images
from static import static_engine
from understudy.errors import InvalidSettings
from understudy.methods.dp_gan import DPCGAN, DPGAN, DPGANConfig
from understudy.methods.method import configure
from understudy.nets.discriminators import ConvDiscriminator, DenseDiscriminator, with_classes
from understudy.nets.generators import ClassNormGenerator
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.gradients import GradientRows, find_layers
from understudy.privacy.ledger import Ledger
from understudy.privacy.plan import Budget, Plan, PlannedRelease, PublicFacts
from understudy.privacy.randomness import InjectedRandomness
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.training.adversarial import Game

NO_NOISE = Budget(epsilon=float("inf"), delta=1e-5)
FACTS = PublicFacts(units=60, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
TINY = {
    "images_per_class": 2, "steps": 2, "turns": 1, "batch": 4, "fakes": 5, "code": 3, "width": 2,
    "critic_width": 2,
}  # fmt: skip


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(network):
    """Fresh parameters, the class table too."""
    params = network.init(seeded())
    table = torch.randn(params["classes.weight"].shape, generator=seeded(1)) / 5
    return params | {"classes.weight": table}


# Discriminators


@pytest.mark.parametrize(
    ("shape", "depth"), [((1, 8, 8), 1), ((1, 28, 28), 3), ((3, 32, 32), 3), ((3, 64, 64), 4)]
)
def test_the_depth_follows_the_size(shape, depth):
    network = ConvDiscriminator(shape, 10, 2)
    assert network.depth == depth
    assert network(network.init(seeded()), torch.rand(2, *shape), torch.tensor([0, 9])).shape == (
        2,
    )


@pytest.mark.parametrize(
    "network",
    [ConvDiscriminator((3, 16, 12), 4, 4), ConvDiscriminator((1, 16, 16), 4, 3, norm=False),
     DenseDiscriminator((1, 8, 8), 4, 6)],
    ids=["group norm", "no norm", "dense"],
)  # fmt: skip
def test_every_parameter_gets_its_rows_by_layer(network):
    """None falls back to a copy for each record, and the rows are those of plain derivatives."""
    params, images = drawn(network), torch.rand(5, *network.shape, generator=seeded(2))
    labels = torch.tensor([0, 1, 2, 3, 1])
    game = Game(network, "non-saturating")

    def loss(params, image, label):
        return game.of_real(network(params, image[None], label[None]))[0]

    layers, copied = find_layers(loss, params, images[0], labels[0])
    assert not copied
    found = {layer.weight for layer in layers} | {layer.bias for layer in layers} - {None}
    assert found == set(params)
    by_layer, plain = (
        GradientRows(loss, by_layer=way)(params, images, labels) for way in (True, False)
    )
    for ours, theirs in zip(by_layer, plain, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_dense_one_takes_one_hot_classes_beside_pixels():
    network = DenseDiscriminator((1, 4, 4), 3, 5)
    params, images = drawn(network), torch.rand(2, 1, 4, 4, generator=seeded(3))
    labels = torch.tensor([2, 0])
    beside = torch.cat([2 * images.flatten(1) - 1, F.one_hot(labels, 3)], 1)
    whole = torch.cat([params["hidden.weight"], params["classes.weight"].T], 1)
    hidden = F.relu(F.linear(beside, whole, params["hidden.bias"]))
    expected = F.linear(hidden, params["score.weight"], params["score.bias"])[:, 0]
    assert torch.allclose(network(params, images, labels), expected, atol=1e-6)


@pytest.mark.parametrize("kind", [ConvDiscriminator, ClassNormGenerator])
def test_classes_can_be_exchanged(kind):
    few, many = kind((1, 8, 8), 3, width=4), kind((1, 8, 8), 5, width=4)
    params = few.init(seeded())
    given = with_classes(params, [2, 0, 0, 1, 2])
    if kind is ClassNormGenerator:
        inputs = few.codes(2, seeded(4))
    else:
        inputs = torch.rand(2, 1, 8, 8, generator=seeded(4))
        params = params | {"classes.weight": torch.rand_like(params["classes.weight"])}
        given = with_classes(params, [2, 0, 0, 1, 2])
    labels, rows = torch.tensor([0, 1]), torch.tensor([2, 0])
    assert torch.allclose(many(given, inputs, labels), few(params, inputs, rows), atol=1e-6)
    assert not torch.allclose(many(given, inputs, labels), few(params, inputs, labels), atol=1e-6)


def test_an_image_does_not_depend_on_its_batch():
    network = ClassNormGenerator((3, 28, 20), 3, code=4, width=2)
    params, codes = network.init(seeded()), torch.randn(6, 4, generator=seeded(1))
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    images = network(params, codes, labels)
    assert images.shape == (6, 3, 28, 20)
    assert torch.allclose(network(params, codes[3:4], labels[3:4])[0], images[3], atol=1e-6)
    assert not torch.allclose(network(params, codes[3:4], labels[4:5])[0], images[3], atol=1e-3)


# Losses


@pytest.mark.parametrize("loss", ["non-saturating", "hinge", "wasserstein"])
def test_losses_pull_scores_apart_and_the_generator_pulls_back(loss):
    game, scores = Game(ConvDiscriminator((1, 8, 8), 2), loss), torch.zeros(3, requires_grad=True)
    for of, sign in ((game.of_real, -1), (game.of_fake, 1), (game.of_generator, -1)):
        (slope,) = torch.autograd.grad(of(scores).sum(), scores)
        assert torch.equal(slope.sign(), torch.full((3,), float(sign)))


def test_only_what_is_steeper_than_one_is_penalised():
    game = Game(DenseDiscriminator((1, 2, 2), 2, 1), "hinge")
    params = {
        "hidden.weight": torch.tensor([[1.0, 0, 0, 0]]), "hidden.bias": torch.ones(1) * 9,
        "classes.weight": torch.zeros(2, 1), "score.weight": torch.ones(1, 1),
        "score.bias": torch.zeros(1),
    }  # fmt: skip
    images, labels = torch.rand(3, 1, 2, 2), torch.tensor([0, 1, 0])
    assert game.steepness(params, images, labels).item() == pytest.approx(1)  # a slope of 2
    flat = params | {"score.weight": torch.full((1, 1), 0.4)}
    assert game.steepness(flat, images, labels).item() == 0


# Steps


def everyone(count):
    return InjectedRandomness(
        uniform=lambda units: chosen(*range(count), of=units),
        normal=lambda numbers: torch.zeros(numbers, dtype=torch.float64),
    )


def run_of(method, vault, ledger, folder, **options):
    curator = vault.open(
        method.plan(), NO_NOISE, ledger, workspace=folder / "w", run_id="r",
        allow_large_delta=True, **options,
    )  # fmt: skip
    return method.run(curator, Progress())


def bounded_mean(loss, params, images, labels, bound):
    total = {n: torch.zeros_like(w) for n, w in params.items()}
    for image, label in zip(images, labels, strict=True):
        slopes = torch.func.grad(loss)(params, image, label)
        norm = float(torch.cat([slope.flatten() for slope in slopes.values()]).norm())
        total = {n: total[n] + min(1.0, bound / norm) * slope for n, slope in slopes.items()}
    return total


def test_a_step_is_that_of_a_plain_loop(ledger, tmp_path):
    """Without noise and with every unit in the batch: both sides bounded one by one, then Adam."""
    vault = a_vault(ledger, some_images(6))
    facts, bound = vault.facts, 0.7
    config = DPGANConfig(**TINY | {"steps": 1, "batch": 3, "clip_norm": bound, "ema": 0.0})
    method = DPGAN(config, facts, seed=2)
    made = run_of(method, vault, ledger, tmp_path, randomness=everyone(6)).generator

    maker, judge = method._first()
    source, network = some_images(6), method.discriminator
    game = Game(network, "non-saturating")
    pixels, labels = torch.from_numpy(source.images).float() / 255, torch.from_numpy(source.labels)
    draws = public_generator(2, "codes", 0)
    given = torch.arange(5) % facts.classes
    codes = method.network.codes(5, draws)
    fakes = method.network(maker, codes, given)

    def real(params, image, label):
        return F.softplus(-network(params, image[None], label[None]))[0]

    def fake(params, image, label):
        return F.softplus(network(params, image[None], label[None]))[0]

    reals = bounded_mean(real, judge, pixels, labels, bound)
    others = bounded_mean(fake, judge, fakes.detach(), given, bound)
    slopes = {n: (reals[n] / 3 + others[n] / 5) / bound for n in judge}
    # The first step of Adam goes as far as the learning rate says, whatever the slope.
    expected = {n: w - 5e-4 * slopes[n] / (slopes[n].abs() + 1e-8) for n, w in judge.items()}
    leaves = {n: w.detach().requires_grad_() for n, w in maker.items()}
    scores = network(expected, method.network(leaves, codes, given), given)
    grads = torch.autograd.grad(game.of_generator(scores).mean(), list(leaves.values()))
    for (name, weight), slope in zip(maker.items(), grads, strict=True):
        after = weight - 2e-4 * slope / (slope.abs() + 1e-8)
        clear = slope.abs() > 1e-6
        assert torch.allclose(made.params[name][clear], after[clear], atol=2e-6), name


def test_weights_stay_within_their_bound():
    config = DPGANConfig(**TINY | {"weight_clip": 0.05, "critic_lr": 1.0})
    method = DPGAN(config, FACTS, seed=0)
    maker, judge = method._first()
    step = method.discriminator_step
    state = judge, step.adam.start(judge)
    batch = torch.randn(5, 3), torch.arange(5) % 3
    released = {n: torch.randn_like(w) for n, w in judge.items()}
    params, _ = step(state, released, maker, batch, torch.tensor(1.0))
    assert max(weight.abs().max() for weight in params.values()) == pytest.approx(0.05)


def test_a_compiled_step_does_the_same(monkeypatch):
    engine = static_engine(monkeypatch)
    method = DPGAN(DPGANConfig(**TINY | {"penalty": 1.0}), FACTS, seed=0)
    maker, judge = method._first()
    batch = torch.randn(5, 3), torch.arange(5) % 3
    released = {n: torch.randn_like(w) for n, w in judge.items()}
    state = judge, method.discriminator_step.adam.start(judge)
    plain = method.discriminator_step(state, released, maker, batch, torch.tensor(0.1))
    compiled = engine.run(
        method.discriminator_step, state, released, maker, batch, torch.tensor(0.1)
    )
    assert not engine.said
    for name, weight in plain[0].items():
        assert torch.allclose(weight, compiled[0][name], atol=1e-4), name
    known = {"discriminator": judge, "kept": torch.tensor(0.5)}
    begun = method.generator_step.start(maker)
    plain = method.generator_step(begun, *batch, known, torch.tensor(0.1))
    compiled = engine.run(method.generator_step, begun, *batch, known, torch.tensor(0.1))
    assert not engine.said
    for part in ("first.weight", "norm0.classes.weight", "last.weight"):  # whose slopes are clear
        (name,) = (name for name in maker if name.endswith(part))
        assert torch.allclose(plain[2][name], compiled[2][name], atol=1e-4), name


def test_classes_get_their_noisy_shares(ledger, tmp_path):
    data = some_images(60, classes=2)
    data.labels[:] = [0] * 45 + [1] * 15
    vault = a_vault(ledger, data)
    config = DPGANConfig(**TINY | {"images_per_class": 20, "count_ratio": 1.0})
    method = DPGAN(config, vault.facts, seed=0)
    assert [line.name for line in method.plan()] == ["histogram", "gradient"]
    made = run_of(method, vault, ledger, tmp_path, randomness=everyone(60))
    assert made.labels.bincount().tolist() == [30, 10]
    assert made.generator.shares == pytest.approx((0.75, 0.25))


def test_a_set_without_labels(tmp_path):
    """Labels change nothing then, and there are none."""
    made = []
    for name, classes in (("a", 3), ("b", 2)):
        with closing(Ledger(tmp_path / f"{name}.sqlite")) as ledger:
            vault = a_vault(ledger, some_images(60, classes=classes))
            method = DPGAN(DPGANConfig(**TINY | {"labelled": False}), vault.facts, seed=0)
            found = run_of(method, vault, ledger, tmp_path / name, randomness=everyone(60))
        assert found.labels.unique().tolist() == [-1]
        made.append(found.generator.params)
    for params, others in zip(*(params.values() for params in made), strict=True):
        assert torch.equal(params, others)


def test_it_learns_digits(tmp_path):
    settings = {
        "steps": 100, "turns": 1, "fakes": 40, "images_per_class": 40, "width": 8, "lr": 4e-3,
        "critic_lr": 4e-3, "critic_width": 8, "ema": 0.9,
    }  # fmt: skip
    result = understudy.synthesize(
        "digits", method="dp-gan", epsilon=10, out=tmp_path / "run", ledger=tmp_path / "ledger",
        accountant="renyi", settings=settings, device="cpu",
    )  # fmt: skip
    test = understudy.load_data("digits").test
    centres = torch.stack([result.images[result.labels == c].mean(0) for c in range(10)])
    images = torch.from_numpy(test.images).float() / 255
    nearest = torch.cdist(images.flatten(1), centres.flatten(1)).argmin(1)
    assert (nearest == torch.from_numpy(test.labels)).float().mean() > 0.4
    assert result.certificate.epsilon <= 10


# Settings


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"turns": 0}, {"fakes": 0}, {"clip_norm": 0.0}, {"loss": "hing"},
     {"network": "deep"}, {"momentum": 1.0}, {"ema": -0.1}, {"penalty": -1.0},
     {"weight_clip": float("nan")}, {"count_ratio": -1.0}, {"lr": 0.0},
     {"critic_lr": float("inf")}, {"start": "x", "network": "dense"},
     {"count_ratio": 1.0, "labelled": False}],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        DPGANConfig(**wrong)


@pytest.mark.parametrize("method", [DPGAN, DPCGAN])
def test_presets_can_be_planned(method):
    for units, shape in ((60_000, (1, 28, 28)), (50_000, (3, 64, 64)), (900, (1, 8, 8))):
        facts = PublicFacts(
            units=units, class_names=tuple("0123456789"), shape=shape,
            mean=(0.5,) * shape[0], std=(0.5,) * shape[0],
        )  # fmt: skip
        for preset in ("auto", *method.presets):
            config = configure(method, facts, 1.0, preset=preset).config
            if config.batch <= units:
                assert method(config, facts, seed=0).plan().total == config.steps


# The published claim


def test_the_published_epsilon_of_dp_cgan():
    """Each of four tensors is bounded apart: the joint bound is twice what the noise is for."""

    def of(multiplier, units, accountant):
        rate = 600 / units
        line = PlannedRelease(
            name="g", kind="gradient", count=30_200, dimension=1, sampling_rate=rate
        )
        return epsilon_of(Plan((line,)), multiplier, 1e-5, accountant)

    assert of(1.12 * 1.1, 60_000, "renyi") < 9.6  # the bound counted as noise
    assert of(1.12 / math.sqrt(4), 55_000, "pld") == pytest.approx(66, abs=1)
