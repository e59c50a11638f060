"""PSG with a prior, with augmentation, and with classes of different sizes."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn

from door import LOOSE, a_vault, some_images
from static import static_engine
from understudy.errors import Interrupted, InvalidSettings
from understudy.methods.class_counts import noisy_counts
from understudy.methods.method import configure
from understudy.methods.psg import PSG, ImageStep, PSGConfig, matching_distance
from understudy.nets.released import Generator, codes_of
from understudy.privacy.curator import Curator, Pace
from understudy.privacy.plan import Budget, PublicFacts
from understudy.privacy.randomness import InjectedRandomness
from understudy.progress import Progress
from understudy.seeds import public_generator
from understudy.training.sgd import mean_loss

CIFAR = PublicFacts(
    units=50_000, class_names=tuple("0123456789"), shape=(3, 32, 32), mean=(0.5,) * 3,
    std=(0.2,) * 3,
)  # fmt: skip
TINY = {
    "rounds": 2, "outer": 2, "batches": 2, "inner": 2, "batch": 15, "images_per_class": 2,
    "width": 2,
}  # fmt: skip
FREE = Budget(epsilon=math.inf, delta=1e-5)
"""No noise, and nothing to calibrate."""
EVERYTHING = {"prior": "dcgan", "average": 0.5, "counts": "histogram", "augment": "crop,color"}


class World:
    """Runs of PSG on the same thirty records."""

    def __init__(self, ledger, folder, data=None, **settings):
        self.data = data or some_images(30)
        self.vault = a_vault(ledger, self.data)
        self.config = configure(PSG, self.vault.facts, 10, settings=TINY | settings).config
        self.ledger, self.folder = ledger, folder

    def method(self):
        return PSG(self.config, self.vault.facts, seed=3)

    def open(self, run_id="run", *, budget=FREE, vault=None, **options):
        return (vault or self.vault).open(
            self.method().plan(), budget, self.ledger, workspace=self.folder / run_id,
            run_id=run_id, allow_large_delta=True, **options,
        )  # fmt: skip

    def run(self, run_id="run", **options):
        return self.method().run(self.open(run_id, **options), Progress())


def constant_draws(noise=0.1):
    return InjectedRandomness(
        uniform=lambda n: torch.zeros(n, dtype=torch.float64),
        normal=lambda n: torch.full((n,), noise, dtype=torch.float64),
    )


# The prior


@pytest.mark.parametrize(("per_class", "outer", "inner"), [(1, 1, 1), (10, 10, 50), (20, 20, 25)])
def test_with_a_prior_preset_paper_keeps_the_schedule(per_class, outer, inner):
    settings = {"images_per_class": per_class, "prior": "dcgan"}
    config = configure(PSG, CIFAR, 10, preset="paper", settings=settings).config
    assert (config.outer, config.inner, config.rounds) == (outer, inner, 1000)
    assert [config.lr_at(step) for step in (0, config.steps - 1)] == [0.01, 0.01]
    assert not config.project


@pytest.mark.parametrize("preset", ["best", "small"])
def test_presets_leave_out_what_is_of_pixels(preset):
    config = configure(PSG, CIFAR, 10, preset=preset, settings={"prior": "dcgan"}).config
    assert (config.smooth, config.start, config.image_lr) == (0.0, 1.0, 0.1)
    assert config.project


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prior": "vae"}, "prior is 'vae', expected none or dcgan"),
        ({"prior": "dcgan", "smooth": 1.0}, "smooth is 1, which means nothing with prior dcgan"),
        ({"prior": "dcgan", "image_lr": 0.3}, "image_lr is 0.3, .* leave it out"),
        ({"prior_lr": 0.02}, "prior_lr is 0.02, which means nothing with prior none"),
        ({"prior": "dcgan", "prior_lr": 0.0}, "prior_lr"),
        ({"code": 0}, "code"),
    ],
)
def test_settings_that_contradict_the_prior_are_refused(bad, message):
    with pytest.raises(InvalidSettings, match=message):
        PSGConfig(**bad)


class Normed(nn.Module):
    def forward(self, maps):
        return maps / maps.square().mean(1, keepdim=True).add(1e-8).sqrt()


def naive_algorithm_2(data, config, facts, seed, noise):
    """Algorithm 2 with torch modules and torch's Adam, for 8 px."""
    private = (torch.from_numpy(data.images).float() / 255 - facts.mean[0]) / facts.std[0]
    labels = torch.arange(3).repeat_interleave(config.images_per_class)
    painter = nn.Sequential(
        nn.Linear(13, 128 * 4), nn.Unflatten(1, (128, 2, 2)), nn.ReLU(), Normed(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1), nn.ReLU(), Normed(),
        nn.ConvTranspose2d(64, 1, 4, 2, 1),
    )  # fmt: skip
    method = PSG(config, facts, seed=seed)
    first = method.canvas.network.init(public_generator(seed, "generator"))
    painter.load_state_dict(dict(zip(painter.state_dict(), first.values(), strict=True)))
    codes = torch.randn((len(labels), 10), generator=public_generator(seed, "sample"))
    inputs = torch.cat([nn.functional.one_hot(labels).float(), codes], 1)
    adam = torch.optim.Adam(painter.parameters(), lr=0.01)
    for r in range(config.rounds):
        theta = method.network.init(public_generator(seed, "network", r))
        theta = {name: weight.requires_grad_() for name, weight in theta.items()}
        for t in range(config.outer):
            for _ in range(config.batches):
                total = {name: torch.zeros_like(weight) for name, weight in theta.items()}
                for x, y in zip(private, torch.from_numpy(data.labels), strict=True):
                    loss = mean_loss(method.network, theta, x[None], y[None])
                    grads = torch.autograd.grad(loss, list(theta.values()))
                    norm = torch.cat([g.flatten() for g in grads]).norm()
                    scale = min(1.0, config.clip_norm / norm)
                    by_name = zip(total.items(), grads, strict=True)
                    total = {n: old + scale * g for (n, old), g in by_name}
                noisy = {n: (g + noise * config.clip_norm) / config.batch for n, g in total.items()}
                loss = mean_loss(method.network, theta, painter(inputs), labels)
                mine = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
                adam.zero_grad()
                matching_distance(noisy, dict(zip(theta, mine, strict=True))).backward()
                adam.step()
            if t < config.outer - 1:
                sgd = torch.optim.SGD(theta.values(), lr=config.network_lr)
                for _ in range(config.inner):
                    sgd.zero_grad()
                    mean_loss(method.network, theta, painter(inputs).detach(), labels).backward()
                    sgd.step()
    return painter(inputs).detach() * facts.std[0] + facts.mean[0]


def test_psg_with_a_prior_is_algorithm_2(ledger, tmp_path):
    settings = {"prior": "dcgan", "project": False, "batch": 8}
    world = World(ledger, tmp_path, some_images(12), **settings)
    curator = world.open(budget=LOOSE, randomness=constant_draws(0.7))
    made = world.method().run(curator, Progress())
    noise = 0.7 * curator.calibration.noise_multiplier
    expected = naive_algorithm_2(world.data, world.config, world.vault.facts, 3, noise)
    assert torch.allclose(made.images, expected, atol=1e-2)
    assert curator.made() == {"gradient": 8}


@pytest.mark.parametrize("settings", [{}, {"project": False}, {"average": 0.5}], ids=str)
def test_the_generator_is_released_and_draws_the_set(ledger, tmp_path, settings):
    world = World(ledger, tmp_path, prior="dcgan", **settings)
    made = world.run()
    generator = Generator.from_bytes(made.generator.to_bytes())
    (codes,) = codes_of(generator.network, 6, 3)
    assert torch.allclose(
        generator.network(generator.params, codes, made.labels), made.images, atol=1e-5
    )
    assert (made.images.min() >= 0 and made.images.max() <= 1) == world.config.project
    drawn, labels = generator.sample(per_class=2, seed=3)  # the seed of the run
    assert torch.equal(labels, made.labels)
    assert torch.allclose(drawn, made.images.clamp(0, 1), atol=0.5 / 255 + 1e-5)
    assert (generator.sample(per_class=2, seed=4)[0] - drawn).abs().max() > 0.05


@pytest.mark.parametrize("prior", ["none", "dcgan"])
def test_matching_gets_closer(prior):
    """Towards the gradient of other images, without noise."""
    facts = PublicFacts(units=100, class_names=("a", "b"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
    method = PSG(PSGConfig(prior=prior, width=8, images_per_class=3), facts, seed=0)
    theta = method.network.init(public_generator(1, "network"))
    known = method.canvas.known(torch.tensor([0, 0, 0, 1, 1, 1]), 0)
    codes = {name: part.clone() for name, part in known.items()}
    target = torch.randn(6, 1, 8, 8, generator=public_generator(2, "target"))

    def slopes(images):
        weights = {name: weight.clone().requires_grad_() for name, weight in theta.items()}
        loss = mean_loss(method.network, weights, images, known["labels"])
        found = torch.autograd.grad(loss, list(weights.values()))
        return dict(zip(weights, found, strict=True))

    g_real, step = slopes(target), method._image_step(method.network, 0.0)
    state, distances = method.canvas.start(known, 0), []
    for _ in range(60):
        images = method.canvas.images(state[0], known).detach()
        distances.append(matching_distance(g_real, slopes(images)).item())
        state = step(state, known, theta, g_real, torch.tensor(method.config.lr_at(0)))
    assert distances[-1] < 0.5 * distances[0]
    assert all(torch.equal(known[name], part) for name, part in codes.items())


@pytest.mark.parametrize(
    "settings",
    [{}, {"prior": "dcgan"}, {"augment": "flip,scale"}, {"counts": "histogram"}, EVERYTHING],
    ids=lambda s: "+".join(s) or "plain",
)
def test_a_run_cut_in_two_is_the_same_run(ledger, tmp_path, settings):
    def draws():
        source = torch.Generator().manual_seed(7)
        return InjectedRandomness(
            uniform=lambda n: torch.rand(n, generator=source, dtype=torch.float64),
            normal=lambda n: torch.randn(n, generator=source, dtype=torch.float64),
        )

    world = World(ledger, tmp_path, **settings)
    whole = world.run("whole", randomness=draws())
    stops, same = iter([False, False, True]), draws()
    pace = Pace(seconds=0.0, should_stop=lambda: next(stops, False))
    with pytest.raises(Interrupted):
        world.run("cut", randomness=same, pace=pace)
    curator = world.open("cut", randomness=same)
    resumed = world.method().run(curator, Progress())
    assert torch.allclose(whole.images, resumed.images, atol=1e-5)
    assert torch.equal(whole.labels, resumed.labels)
    assert curator.made() == {line.name: line.count for line in curator.plan}


@pytest.mark.parametrize("prior", ["none", "dcgan"])
@pytest.mark.parametrize("side", [32, 64])
def test_colour_sets_of_32_and_64_pixels(ledger, tmp_path, prior, side):
    data = some_images(30, shape=(3, side, side))
    small = {"rounds": 1, "outer": 1, "batches": 1, "images_per_class": 1}
    made = World(ledger, tmp_path, data, prior=prior, project=True, **small).run()
    assert made.images.shape == (3, 3, side, side)
    assert 0 <= made.images.min() < made.images.max() <= 1


# Augmentation


def test_private_and_synthetic_images_get_the_same_change(ledger, tmp_path, monkeypatch):
    told = []
    release, step = Curator.gradient, ImageStep.__call__
    monkeypatch.setattr(
        Curator, "gradient",
        lambda self, loss, theta, change, **rest: (
            told.append(change), release(self, loss, theta, change, **rest)
        )[1],
    )  # fmt: skip
    monkeypatch.setattr(
        ImageStep, "__call__",
        lambda self, state, known, *rest: (
            told.append(known), step(self, state, known, *rest)
        )[1],
    )  # fmt: skip
    World(ledger, tmp_path, augment="crop,rotate,scale", image_steps=2).run()
    private, first, again = told[::3], told[1::3], told[2::3]
    assert len(private) == len(again) == 8
    for change, *images in zip(private, first, again, strict=True):
        assert change.keys() < images[0].keys()
        assert all(torch.equal(part, i[name]) for name, part in change.items() for i in images)
    grids = {tuple(change["change.grid"].flatten().tolist()) for change in private}
    assert len(grids) > 4


def test_changes_differ_by_the_seed_alone(ledger, tmp_path):
    """They are public: nothing secret is drawn for them, and nothing secret can be told by them."""
    method = World(ledger, tmp_path, augment="crop,color,cutout").method()
    cpu = torch.device("cpu")
    one, same, other = (method._change(step, cpu) for step in (4, 4, 5))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_change_is_an_input_of_one_program(ledger, tmp_path, monkeypatch):
    engine = static_engine(monkeypatch)
    world = World(ledger, tmp_path, augment="color,crop,cutout,flip,scale,rotate", rounds=1)
    made = world.run(vault=world.vault.beside(engine), randomness=constant_draws())
    assert engine.said == []
    assert len(engine.compiled) == 3  # release, image step, network step
    plain = world.run(
        "plain", vault=world.vault.beside(type(engine)(compile=False)), randomness=constant_draws()
    )
    assert torch.allclose(made.images, plain.images, atol=1e-3)


def test_augmentation_is_off_in_every_preset():
    for preset in PSG.presets:
        assert configure(PSG, CIFAR, 10, preset=preset).config.siamese is None


@pytest.mark.parametrize("bad", ["mirror", "crop,", "", "crop flip", "none,crop"])
def test_unknown_changes_are_refused(bad):
    with pytest.raises(InvalidSettings, match="expected none, or some of color,crop"):
        PSGConfig(augment=bad)


# Classes of different sizes


def test_counts_that_the_user_gives(ledger, tmp_path):
    world = World(ledger, tmp_path, prior="dcgan")
    world.config = configure(
        PSG, world.vault.facts, 10,
        settings={**{n: v for n, v in TINY.items() if n != "images_per_class"}, "counts": "4,1,2",
                  "prior": "dcgan"},
    ).config  # fmt: skip
    made = world.run()
    assert Counter(made.labels.tolist()) == {0: 4, 1: 1, 2: 2}
    assert torch.equal(made.generator.sample(7, seed=3)[1], made.labels)
    assert [line.name for line in world.method().plan()] == ["gradient"]


def test_presets_follow_the_mean_of_the_counts():
    config = configure(PSG, CIFAR, 10, preset="paper", settings={"counts": "30," * 9 + "10"}).config
    assert (config.outer, config.inner) == (28, 17)


@pytest.mark.parametrize("bad", ["20,x", "20,-1", "20,0", "many", "", "3.5,1"])
def test_counts_that_are_none_are_refused(bad):
    with pytest.raises(InvalidSettings, match="counts is .* such as 20,10,5"):
        PSGConfig(counts=bad)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"counts": "5,5"}, "counts has 2 numbers, expected one for each of the 10 classes"),
        ({"counts": "5," * 9 + "5", "images_per_class": 5}, "pass one"),
    ],
)
@pytest.mark.parametrize("preset", PSG.presets)
def test_counts_that_do_not_fit_are_refused_before_anything_is_read(preset, settings, message):
    with pytest.raises(InvalidSettings, match=message):
        PSG(
            configure(PSG, CIFAR, 10, preset=preset, settings=settings).config, CIFAR, seed=0
        ).plan()


def test_shares_by_a_noisy_histogram_are_charged(ledger, tmp_path):
    data = some_images(40)
    data.labels[:] = [0] * 28 + [1] * 10 + [2] * 2
    world = World(ledger, tmp_path, data, counts="histogram", images_per_class=5)
    curator = world.open()
    made = world.method().run(curator, Progress())
    assert Counter(made.labels.tolist()) == {0: 10, 1: 4, 2: 1}  # of 10.5, 3.75 and 0.75
    assert curator.made() == {"histogram": 1, "gradient": 8}
    line = curator.plan["histogram"]
    assert (line.sampling_rate, line.noise_ratio, line.dimension) == (1.0, 4.0, 3)


@pytest.mark.parametrize("counts", [[5.0] * 4, [1e6, 0, -3, 2], [-1.0] * 4, [9.0, 9.0, 0, 0]])
@pytest.mark.parametrize("total", [4, 6, 40])
def test_no_class_goes_without_whatever_the_noise(counts, total):
    found = noisy_counts(torch.tensor(counts), total)
    assert sum(found) == total
    assert min(found) >= 1
