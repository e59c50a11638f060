"""PSG against a second, naive implementation of Algorithm 1."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from door import LOOSE, a_vault, some_images
from understudy.errors import InvalidSettings
from understudy.methods.canvas import blurred
from understudy.methods.method import configure
from understudy.methods.psg import PSG, ImageStep, PSGConfig, matching_distance
from understudy.privacy.plan import PublicFacts
from understudy.privacy.randomness import InjectedRandomness
from understudy.progress import Progress
from understudy.seeds import public_generator

MNIST = PublicFacts(
    units=60_000, class_names=tuple("0123456789"), shape=(1, 28, 28), mean=(0.13,), std=(0.31,)
)


@pytest.mark.parametrize(
    ("per_class", "outer", "inner"), [(1, 1, 1), (10, 10, 50), (20, 20, 25), (50, 50, 10)]
)
@pytest.mark.parametrize(("epsilon", "rounds"), [(10, 1000), (1, 200)])
def test_preset_paper_is_the_papers_table(per_class, outer, inner, epsilon, rounds):
    found = configure(PSG, MNIST, epsilon, preset="paper", settings={"images_per_class": per_class})
    config = found.config
    assert (config.outer, config.inner, config.rounds) == (outer, inner, rounds)
    assert (config.batches, config.batch, config.clip_norm) == (10, 256, 0.1)
    assert (config.image_lr, config.image_momentum, config.network_lr) == (0.1, 0.5, 0.01)
    assert config.steps == rounds * outer * 10
    (line,) = PSG(config, MNIST, seed=0).plan()
    assert (line.count, line.sampling_rate) == (config.steps, 256 / 60_000)
    assert line.dimension == 317_322


def test_presets_are_chosen_by_public_facts():
    assert configure(PSG, MNIST, 10).preset == "paper"
    small = PublicFacts(
        units=1438, class_names=("a", "b"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,)
    )
    assert configure(PSG, small, 10).preset == "small"


def test_settings_win_over_presets_and_unknown_ones_are_refused():
    assert configure(PSG, MNIST, 10, settings={"rounds": 3}).config.rounds == 3
    with pytest.raises(InvalidSettings, match="did you mean 'rounds'"):
        configure(PSG, MNIST, 10, settings={"round": 3})
    with pytest.raises(InvalidSettings, match="no preset"):
        configure(PSG, MNIST, 10, preset="finest")


@pytest.mark.parametrize(
    "bad", [{"rounds": 0}, {"clip_norm": 0.0}, {"image_lr": -1.0}, {"batch": 0}]
)
def test_senseless_settings_are_refused(bad):
    with pytest.raises(InvalidSettings):
        PSGConfig(**bad)


def test_a_batch_larger_than_the_set_is_refused():
    config = configure(PSG, MNIST, 10, settings={"batch": 70_000}).config
    with pytest.raises(InvalidSettings, match="lower the batch"):
        PSG(config, MNIST, seed=0).plan()


def test_matching_distance_by_hand():
    real = {"w": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "b": torch.ones(2)}
    same = {"w": torch.tensor([[5.0, 0.0], [0.0, -1.0]]), "b": torch.zeros(2)}
    assert matching_distance(real, same).item() == pytest.approx(0 + 2, abs=1e-5)


def naive_psg(data, config, facts, seed, draws) -> torch.Tensor:
    """Algorithm 1 with torch modules, autograd double backward, three nested loops."""

    def normalise(images):
        return (images - facts.mean[0]) / facts.std[0]

    private = normalise(torch.from_numpy(data.images).float() / 255)
    labels = torch.arange(facts.classes).repeat_interleave(config.images_per_class)
    shape = (len(labels), *facts.shape)
    images = torch.randn(shape, generator=public_generator(seed, "images")).requires_grad_()
    optimiser = torch.optim.SGD([images], lr=config.image_lr, momentum=config.image_momentum)
    loss = nn.CrossEntropyLoss()
    reference = PSG(config, facts, seed=seed).network
    for r in range(config.rounds):
        width = config.width
        net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.GroupNorm(width, width), nn.ReLU(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(width * 16, facts.classes),
        )  # fmt: skip
        theta = reference.init(public_generator(seed, "network", r))
        net.load_state_dict(dict(zip(net.state_dict(), theta.values(), strict=True)))
        weights = list(net.parameters())
        for t in range(config.outer):
            for _ in range(config.batches):
                total = [torch.zeros_like(w) for w in weights]
                for x, y in zip(private, torch.from_numpy(data.labels), strict=True):
                    grads = torch.autograd.grad(loss(net(x[None]), y[None]), weights)
                    norm = torch.cat([g.flatten() for g in grads]).norm()
                    scale = min(1.0, config.clip_norm / norm)
                    total = [a + scale * g for a, g in zip(total, grads, strict=True)]
                noisy = [(a + draws(config) * config.clip_norm) / config.batch for a in total]
                mine = torch.autograd.grad(loss(net(images), labels), weights, create_graph=True)
                distance = sum(
                    (1 - nn.functional.cosine_similarity(a.flatten(1), b.flatten(1))).sum()
                    for a, b in zip(noisy, mine, strict=True)
                    if a.ndim > 1
                )
                optimiser.zero_grad()
                (images.grad,) = torch.autograd.grad(distance, images)
                optimiser.step()
            if t < config.outer - 1:
                steps = torch.optim.SGD(weights, lr=config.network_lr)
                for _ in range(config.inner):
                    steps.zero_grad()
                    loss(net(images.detach()), labels).backward()
                    steps.step()
    return images.detach() * facts.std[0] + facts.mean[0]


def test_psg_is_algorithm_1(ledger, tmp_path):
    data = some_images(30)
    vault = a_vault(ledger, data)
    settings = {
        "rounds": 2, "outer": 2, "batches": 2, "inner": 3, "batch": 15, "images_per_class": 2,
        "width": 4, "image_lr": 0.1, "project": False,
    }  # fmt: skip
    config = configure(PSG, vault.facts, 10, settings=settings).config
    method = PSG(config, vault.facts, seed=3)
    constant = 0.7
    curator = vault.open(
        method.plan(),
        LOOSE,
        ledger,
        workspace=tmp_path / "w",
        run_id="r",
        allow_large_delta=True,
        randomness=InjectedRandomness(
            uniform=lambda n: torch.zeros(n, dtype=torch.float64),
            normal=lambda n: torch.full((n,), constant, dtype=torch.float64),
        ),
    )
    made = method.run(curator, Progress())
    noise = curator.calibration.noise_multiplier * constant
    expected = naive_psg(data, config, vault.facts, 3, lambda _: noise)
    assert torch.allclose(made.images, expected, atol=2e-3)
    assert made.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert curator.made() == {"gradient": config.steps} == {"gradient": 8}


def test_projection_keeps_pixels_in_range(ledger, tmp_path):
    vault = a_vault(ledger, some_images(30))
    settings = {"rounds": 1, "outer": 1, "batches": 4, "image_lr": 50.0, "project": True}
    method = PSG(configure(PSG, vault.facts, 10, settings=settings).config, vault.facts, seed=0)
    curator = vault.open(
        method.plan(), LOOSE, ledger, workspace=tmp_path, run_id="r", allow_large_delta=True
    )
    method.run(curator, Progress())
    _, state = curator.restore()
    mean, std = vault.facts.mean[0], vault.facts.std[0]
    pixels = state["painted"]["images"] * std + mean
    assert pixels.min() >= -1e-5
    assert pixels.max() <= 1 + 1e-5


def test_rows_that_noise_explains_do_not_count():
    """Rows of lengths 1 and 3 with two coordinates of noise 1: nothing of the first is signal."""
    real = {"w": torch.tensor([[1.0, 0.0], [3.0, 0.0]])}
    other = {"w": torch.tensor([[0.0, 1.0], [0.0, 1.0]])}
    assert matching_distance(real, other, noise_std=1.0).item() == pytest.approx(1 - 2 / 9)
    assert matching_distance(real, other).item() == pytest.approx(2)


def recorded(ledger, tmp_path, monkeypatch, **settings):
    """Run PSG on fixed draws; return the images and rates of all image steps, and the set."""
    data = some_images(30)
    vault = a_vault(ledger, data)
    small = {
        "rounds": 2, "outer": 2, "batches": 2, "inner": 1, "batch": 15, "images_per_class": 1,
        "width": 2, "project": False,
    }  # fmt: skip
    config = configure(PSG, vault.facts, 10, settings=small | settings).config
    method = PSG(config, vault.facts, seed=3)
    curator = vault.open(
        method.plan(),
        LOOSE,
        ledger,
        workspace=tmp_path / "w",
        run_id=tmp_path.name,
        allow_large_delta=True,
        randomness=InjectedRandomness(
            uniform=lambda n: torch.zeros(n, dtype=torch.float64),
            normal=lambda n: torch.full((n,), 0.1, dtype=torch.float64),
        ),
    )
    steps = []
    original = ImageStep.__call__

    def watched(self, state, *rest):
        result = original(self, state, *rest)
        steps.append((result[0]["images"], rest[-1].item()))
        return result

    monkeypatch.setattr(ImageStep, "__call__", watched)
    made = method.run(curator, Progress())
    return [image for image, _ in steps], [lr for _, lr in steps], made


def test_images_of_the_last_steps_are_averaged(ledger, tmp_path, monkeypatch):
    images, _, made = recorded(ledger, tmp_path, monkeypatch, average=0.25)
    mean = torch.stack(images[-2:]).mean(0)
    facts = a_vault(ledger, some_images(30)).facts
    expected = mean * facts.std[0] + facts.mean[0]
    assert len(images) == 8
    assert torch.allclose(made.images, expected, atol=1e-6)


def test_the_learning_rate_falls_linearly(ledger, tmp_path, monkeypatch):
    _, rates, _ = recorded(ledger, tmp_path, monkeypatch, image_lr=1.0, image_lr_end=0.2)
    assert rates == pytest.approx([1 - 0.8 * step / 8 for step in range(8)])


def test_several_image_steps_per_release(ledger, tmp_path, monkeypatch):
    images, _, _ = recorded(ledger, tmp_path, monkeypatch, image_steps=3)
    assert len(images) == 24


def test_images_start_as_noise_of_the_given_size(ledger, tmp_path, monkeypatch):
    slow = {"image_lr": 1e-9, "width": 1}
    (loud, *_), _, _ = recorded(ledger, tmp_path / "a", monkeypatch, **slow)
    (quiet, *_), _, _ = recorded(ledger, tmp_path / "b", monkeypatch, **slow, start=0.1)
    assert torch.allclose(quiet, 0.1 * loud, atol=1e-6)


def test_a_blur_spreads_a_point_evenly():
    point = torch.zeros(2, 1, 9, 9)
    point[1, 0, 4, 4] = 1.0
    spread = blurred(point, 0.8)
    assert spread[0].abs().max() == 0
    assert spread[1].sum().item() == pytest.approx(1, abs=1e-5)
    assert torch.allclose(spread[1], spread[1].transpose(1, 2))
    assert torch.allclose(spread[1], spread[1].flip(1, 2))
    assert (spread[1, 0, 4, 4] / spread[1, 0, 4, 5]).item() == pytest.approx(
        math.exp(0.5 / 0.8**2), rel=1e-5
    )


def test_smooth_steps_are_blurred_steps(ledger, tmp_path, monkeypatch):
    (rough, *_), _, _ = recorded(ledger, tmp_path / "a", monkeypatch, image_lr=1.0)
    (smooth, *_), _, _ = recorded(ledger, tmp_path / "b", monkeypatch, image_lr=1.0, smooth=1.0)
    (start, *_), _, _ = recorded(ledger, tmp_path / "c", monkeypatch, image_lr=1e-9, width=2)
    assert torch.allclose(smooth - start, blurred(rough - start, 1.0), atol=1e-4)


@pytest.mark.parametrize(
    "bad",
    [
        {"average": 1.5},
        {"image_lr_end": -0.1},
        {"image_steps": 0},
        {"smooth": -1.0},
        {"start": 0.0},
    ],
)
def test_new_settings_are_checked(bad):
    with pytest.raises(InvalidSettings):
        PSGConfig(**bad)
