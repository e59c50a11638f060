"""DP-Sinkhorn: transport plans, the loss and its slopes, the generator, and the published claim."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from door import a_vault
from static import static_engine
from understudy.data.images import labelled_images
from understudy.errors import InvalidSettings
from understudy.methods.dp_sinkhorn import (
    DPSinkhorn,
    DPSinkhornConfig,
    Draft,
    Remoteness,
    evened_out,
)
from understudy.methods.method import configure
from understudy.methods.transport import Transport, transport_plan
from understudy.nets.generators import TransposedGenerator
from understudy.privacy.accounting import epsilon_of
from understudy.privacy.plan import Budget, Plan, PlannedRelease, PublicFacts
from understudy.progress import Progress
from understudy.training.engine import Engine

FACTS = PublicFacts(units=200, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def some_points(count, seed=0, classes=3):
    images = torch.rand(count, 1, 4, 4, generator=seeded(seed)) * 2 - 1
    return images, torch.arange(count) % classes


def plain_sinkhorn(costs, rows, columns, temperature, steps=5000):
    """The textbook: scale rows and columns of a kernel in turn."""
    kernel = np.exp(-costs / temperature)
    column_scale = np.ones(len(columns))
    for _ in range(steps):
        row_scale = rows / (kernel @ column_scale)
        column_scale = columns / (kernel.T @ row_scale)
    return row_scale[:, None] * kernel * column_scale


def cheapest(costs, rows, columns):
    """The least cost of any plan, by linear programming."""
    n, m = costs.shape
    of_rows, of_columns = np.kron(np.eye(n), np.ones(m)), np.kron(np.ones(n), np.eye(m))
    found = linprog(
        costs.ravel(), A_eq=np.vstack([of_rows, of_columns]), b_eq=np.concatenate([rows, columns])
    )
    return found.fun


# Transport


@pytest.mark.parametrize("absolute", [0.0, 1.5])
def test_costs_are_what_the_paper_says(absolute):
    """A class is 15 in a coordinate of its own, and costs are those of all coordinates."""
    (first, labels), (second, others) = some_points(4), some_points(5, seed=1)
    label_cost = 2 * 15**2 + 2 * 15 * absolute
    found = Transport(absolute=absolute, label_cost=label_cost, temperature=1.0).costs(
        first, labels, second, others
    )
    points = [
        torch.cat([x.flatten(1), 15 * torch.eye(3)[y]], 1)
        for x, y in ((first, labels), (second, others))
    ]
    gap = points[0][:, None] - points[1]
    expected = gap.square().sum(-1) + absolute * gap.abs().sum(-1)
    assert torch.allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("temperature", [2.0, 10.0])
def test_a_plan_is_sinkhorns(temperature):
    transport = Transport(absolute=1.0, label_cost=20.0, temperature=temperature)
    costs = transport.costs(*some_points(6), *some_points(5, seed=1)).double()
    rows = torch.tensor([1.0, 2, 0, 1, 1, 1]).double() / 6
    columns = torch.tensor([1.0, 0, 3, 2, 1]).double() / 7
    expected = plain_sinkhorn(costs.numpy(), rows.numpy(), columns.numpy(), temperature)
    longer = [*transport.temperatures(16), *[temperature] * 300]
    found = transport_plan(costs, rows, columns, longer)
    assert np.abs(found.numpy() - expected).max() < 1e-6
    quickly = transport_plan(costs, rows, columns, transport.temperatures(16))
    assert np.abs(quickly.numpy() - expected).sum() < 0.1
    assert torch.allclose(quickly.sum(1), rows)
    assert quickly[:, 1].max() == quickly[2].max() == 0


def test_a_cold_plan_is_nearly_the_cheapest():
    transport = Transport(absolute=1.0, label_cost=20.0, temperature=0.05)
    costs = transport.costs(*some_points(8), *some_points(8, seed=1))
    equal = torch.full((8,), 1 / 8)
    found = transport_plan(costs, equal, equal, transport.temperatures(16))
    least = cheapest(costs.numpy(), equal.numpy(), equal.numpy())
    assert (found * costs).sum() == pytest.approx(least, rel=0.1)
    assert (found.sum(0) - equal).abs().sum() < 0.2
    warm = transport_plan(costs, equal, equal, [20.0] * 50)
    assert (warm * costs).sum() > 1.2 * least


def test_the_slope_is_that_of_the_entropic_cost():
    """By finite differences of cost and entropy, both at their best plan."""
    transport = Transport(absolute=0.5, label_cost=5.0, temperature=4.0)
    (images, labels), other = some_points(4), some_points(5, seed=1)
    images, others = images.double(), (other[0].double(), other[1])
    leaf = images.clone().requires_grad_()
    (slope,) = torch.autograd.grad(transport.cost(leaf, labels, *others), leaf)

    def smoothed(images):
        costs = transport.costs(images, labels, *others).numpy()
        rows, columns = np.full(4, 1 / 4), np.full(5, 1 / 5)
        plan = plain_sinkhorn(costs, rows, columns, 4.0)
        entropy = (plan * np.log(plan / np.outer(rows, columns))).sum()
        return (plan * costs).sum() + 4.0 * entropy

    for pixel in (0, 7, 30):
        step = torch.zeros(images.numel(), dtype=torch.float64)
        step[pixel] = 1e-4
        step = step.view(images.shape)
        by_hand = (smoothed(images + step) - smoothed(images - step)) / 2e-4
        assert slope.flatten()[pixel].item() == pytest.approx(by_hand, rel=0.02, abs=1e-3)


def test_the_number_of_iterations_comes_from_public_numbers():
    cold, warm = (Transport(absolute=1.0, label_cost=480.0, temperature=t) for t in (0.05, 50.0))
    assert len(cold.temperatures(784)) == 34
    assert len(warm.temperatures(784)) < 16
    steps = cold.temperatures(784)
    assert steps[-1] == 0.05
    assert steps[0] >= 4 * 784 + 2 * 784 + 480
    assert all(b < a for a, b in pairwise(steps))
    assert Transport(absolute=0.0, label_cost=0.0, temperature=1e6).temperatures(784) == [1e6]


# The loss


def test_records_that_only_fill_up_change_nothing():
    images, labels = some_points(6)
    generated, given = some_points(4, seed=1)
    inputs = {"images": generated, "labels": given, "own_slope": torch.zeros_like(generated)}
    padded = torch.cat([images, torch.zeros(3, 1, 4, 4)]), torch.cat([labels, torch.zeros(3)])
    counts = torch.arange(9) < 6
    for by_class in (False, True):
        loss = Remoteness(Transport(absolute=1.0, label_cost=9.0, temperature=1.0), by_class)
        exact = loss(inputs, images, labels, counts[:6])
        assert torch.allclose(loss(inputs, padded[0], padded[1].long(), counts), exact)


def test_classes_are_evened_out():
    given = torch.tensor([0, 0, 1, 2])
    labels = torch.tensor([0, 1, 1, 1, 3, 0])
    counts = torch.tensor([1.0, 1, 1, 1, 1, 0])
    rows, columns = evened_out(given, labels, counts)
    assert rows.tolist() == [1, 1, 1, 0]  # nothing to learn from for the last
    assert torch.allclose(columns, torch.tensor([2, 1 / 3, 1 / 3, 1 / 3, 0, 0]))


def test_a_batch_is_not_drawn_to_its_own_copy():
    """Two batches of one generator: what they would move by is taken off what records ask for."""
    network = TransposedGenerator((1, 8, 8), 3, code=2, width=2)
    transport = Transport(absolute=1.0, label_cost=30.0, temperature=0.5)
    draft = Draft(network, transport, more=2)
    codes, labels = network.codes(8, seeded()), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    images, slope = draft(network.init(seeded(1)), codes, labels)
    assert images.min() >= -1
    assert images.max() <= 1
    assert torch.allclose(images, 2 * network(network.init(seeded(1)), codes, labels) - 1)
    leaf = images.clone().requires_grad_()
    cost = transport.cost(leaf[:6], labels[:6], leaf[2:], labels[2:])
    assert torch.allclose(slope, -torch.autograd.grad(cost, leaf)[0])
    # Records that are the copy itself: only the pull of the copy on the batch remains.
    inputs = {"images": images[:6], "labels": labels[:6], "own_slope": slope[:6]}
    records = (images[2:] / 2 + 0.5, labels[2:], torch.ones(6).bool())
    point = images[:6].clone().requires_grad_()
    loss = Remoteness(transport, by_class=False)(inputs | {"images": point}, *records)
    (found,) = torch.autograd.grad(loss, point)
    (pull,) = torch.autograd.grad(
        2 * transport.cost(point, labels[:6], images[2:], labels[2:]), point
    )
    assert torch.allclose(found, pull + slope[:6], atol=1e-5)
    assert found.norm() < pull.norm()


# The generator


def test_the_published_generator_has_its_shape():
    network = TransposedGenerator((1, 28, 28), 10)
    params = network.init(seeded())
    shapes = [tuple(w.shape) for w in params.values() if w.ndim == 4]
    assert shapes == [(26, 256, 7, 7), (256, 128, 4, 4), (128, 64, 4, 4), (1, 64, 3, 3)]
    images = network(params, network.codes(4, seeded()), torch.arange(4))
    assert images.shape == (4, 1, 28, 28)


def made_of(vault, ledger, folder, *, epsilon=math.inf, **settings):
    configured = configure(DPSinkhorn, vault.facts, 10, settings=settings)
    method = DPSinkhorn(configured.config, vault.facts, seed=0)
    curator = vault.open(
        method.plan(), Budget(epsilon=epsilon, delta=1e-5), ledger, workspace=folder / "w",
        run_id="r", allow_large_delta=True,
    )  # fmt: skip
    return method.run(curator, Progress())


@pytest.mark.parametrize(
    ("network", "lr"), [("transposed", 5e-3), ("resnet", 5e-3), ("gallery", 0.1)]
)
def test_it_learns_two_simple_classes_without_noise(network, lr, ledger, tmp_path):
    images = torch.randint(0, 60, (80, 1, 8, 8), generator=seeded(), dtype=torch.uint8).numpy()
    labels = (torch.arange(80) % 2).numpy()
    images[labels == 0, :, :4] += 190
    images[labels == 1, :, 4:] += 190
    vault = a_vault(ledger, labelled_images(images, labels, classes=2))
    made = made_of(
        vault, ledger, tmp_path, steps=40, batch=10, generated=8, lr=lr, ema=0.9, width=4,
        images_per_class=10, network=network, by_class=True, label_cost=1000.0, temperature=5.0,
    )  # fmt: skip
    top, bottom = made.images[:, :, :4].mean((1, 2, 3)), made.images[:, :, 4:].mean((1, 2, 3))
    assert (top - bottom)[made.labels == 0].mean() > 0.3
    assert (bottom - top)[made.labels == 1].mean() > 0.3


def test_a_gallery_shows_each_picture_in_each_step():
    config = DPSinkhornConfig(network="gallery", code=2, generated=6, fresh=0.0, steps=2)
    method = DPSinkhorn(config, FACTS, seed=0)
    params = method.network.init(seeded())
    pictures = next(iter(params.values())).sigmoid()
    for codes, labels in method._batches(0, torch.device("cpu")):
        shown = method.network(params, codes, labels).flatten(1)
        assert torch.equal(shown.sort(0).values, pictures.sort(0).values)


def test_what_a_gallery_is_told_is_smooth():
    """Advice on one pixel moves its neighbours too, none of another picture."""
    config = DPSinkhornConfig(network="gallery", code=2, generated=6, fresh=0.0, smooth=1.0)
    method = DPSinkhorn(config, FACTS, seed=0)
    told = {}

    def asked(loss, params, public, bound):
        advice = torch.zeros_like(params["images"])
        advice[2, 0, 3, 3] = 1.0
        return {"images": advice}

    def run(step, *args):
        if step is method.follow:
            told["advice"] = args[-1]
        return step(*args)

    curator = SimpleNamespace(engine=SimpleNamespace(run=run), batch_gradient=asked)
    state = method.follow.start(method.network.init(seeded()))
    method.turn(curator, state, *next(method._batches(0, torch.device("cpu"))))
    advice = told["advice"]
    assert advice.flatten(1).any(1).tolist() == [False, False, True, False, False, False]
    assert 0 < advice[2, 0, 3, 4] < advice[2, 0, 3, 3] < 2
    assert advice.sum() == pytest.approx(2.0, rel=1e-3)


def test_a_step_is_compiled_once_whatever_the_batch(monkeypatch):
    """All that happens outside the release, on an engine that traces."""
    engine = static_engine(monkeypatch)
    settings = {"generated": 6, "width": 2, "temperature": 5.0, "steps": 3}
    config = configure(DPSinkhorn, FACTS, 10, settings=settings).config
    states = []
    for engine_used in (engine, Engine()):
        monkeypatch.setattr(Engine, "is_static", property(lambda self, e=engine: self is e))
        method = DPSinkhorn(config, FACTS, seed=0)
        asked = lambda loss, params, public, bound: params  # noqa: E731
        curator = SimpleNamespace(engine=engine_used, batch_gradient=asked)
        state = method.follow.start(method.network.init(seeded()))
        batches = method._batches(0, engine_used.device)
        for _ in range(3):
            state = method.turn(curator, state, *next(batches))
        states.append(state)
    assert len(engine.compiled) == 2
    assert not engine.said
    for name, weight in states[0].average.items():
        assert torch.allclose(weight, states[1].average[name], atol=1e-4), name


def test_classes_take_turns():
    config = DPSinkhornConfig(generated=4, fresh=0.5, steps=3)
    batches = list(DPSinkhorn(config, FACTS, seed=0)._batches(0, torch.device("cpu")))
    labels = [labels.tolist() for _, labels in batches[:3]]
    assert labels == [[0, 1, 2, 0, 0, 1], [1, 2, 0, 1, 1, 2], [2, 0, 1, 2, 2, 0]]
    codes = [codes for codes, _ in batches]
    later = next(DPSinkhorn(config, FACTS, seed=0)._batches(2, torch.device("cpu")))
    assert torch.equal(later[0], codes[2])


def test_the_plan_is_one_release_for_each_step():
    config = DPSinkhornConfig(batch=10, steps=7, generated=6)
    (line,) = DPSinkhorn(config, FACTS, seed=0).plan()
    assert (line.kind, line.count, line.sampling_rate) == ("batch_gradient", 7, 0.05)
    assert line.dimension == 6 * 64


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fresh": 1.5}, "fresh is 1.5, expected a share from 0 to 1"),
        ({"ema": 1.0}, "ema"),
        ({"network": "dense"}, "network is 'dense', expected transposed, resnet, gallery"),
        ({"label_cost": -1.0}, "label_cost"),
        ({"absolute": math.inf}, "absolute"),
        ({"temperature": 0.0}, "temperature"),
        ({"generated": 0}, "generated"),
        ({"smooth": -1.0}, "smooth"),
        ({"grain": -0.1}, "grain"),
        ({"clip_norm": math.inf}, "clip_norm"),
    ],
)
def test_senseless_settings_are_refused(settings, message):
    with pytest.raises(InvalidSettings, match=message):
        DPSinkhornConfig(**settings)


def test_a_batch_beyond_the_units_is_refused():
    method = DPSinkhorn(DPSinkhornConfig(batch=300), FACTS, seed=0)
    with pytest.raises(InvalidSettings, match="lower the batch"):
        method.plan()


@pytest.mark.parametrize(
    ("units", "shape", "preset"),
    [
        (500, (1, 28, 28), "small"),
        (60_000, (1, 28, 28), "paper"),
        (60_000, (3, 64, 64), "paper-colour"),
    ],
)
def test_presets_follow_public_facts(units, shape, preset):
    facts = PublicFacts(units=units, class_names=tuple("ab"), shape=shape, mean=(0.5,), std=(0.5,))
    found = configure(DPSinkhorn, facts, 10)
    assert found.preset == preset
    DPSinkhorn(found.config, facts, seed=0).plan()


def test_best_shows_as_many_images_of_each_class_as_records_are_drawn():
    facts = PublicFacts(
        units=60_000, class_names=tuple("abc"), shape=(1, 28, 28), mean=(0.5,), std=(0.5,)
    )
    config = configure(DPSinkhorn, facts, 10, preset="best").config
    assert config.batch == config.generated == 15
    (line,) = DPSinkhorn(config, facts, seed=0).plan().releases
    assert line.sampling_rate * 60_000 == pytest.approx(15)
    assert line.dimension == 15 * 784


def test_costs_of_presets_grow_with_the_pixels():
    small, large = (
        configure(
            DPSinkhorn, PublicFacts(units=60_000, class_names=("a",), shape=(1, side, side),
                                    mean=(0.5,), std=(0.5,)), 10, preset="paper-fashion",
        ).config
        for side in (28, 56)
    )  # fmt: skip
    assert (small.absolute, small.label_cost, small.temperature) == (3.0, 540.0, 0.05)
    assert (large.label_cost, large.temperature) == (4 * 540.0, 0.2)


# The published claim, epsilon 10 at delta 1e-5; docs/methods/dp-sinkhorn.md quotes these numbers

RATE = 50 / 60_000


def published(steps: int, sigma: float) -> float:
    line = PlannedRelease(
        name="a", kind="batch_gradient", count=steps, dimension=50 * 784, sampling_rate=RATE
    )
    return epsilon_of(Plan((line,)), sigma, 1e-5, "renyi")


def test_what_the_published_mechanism_costs():
    """400 epochs, as the published commands say; and all steps that the published code takes."""
    assert published(480_000, 1.1) == pytest.approx(2.94, abs=0.01)
    assert published(3_440_000, 1.1) == pytest.approx(9.15, abs=0.01)
    assert published(480_000, 0.9) == pytest.approx(4.23, abs=0.01)
    assert published(1_810_000, 0.9) == pytest.approx(9.16, abs=0.01)
