"""What every method must keep, whatever it does. A new method is a new row."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from door import LOOSE, a_vault, some_images
from understudy.errors import BudgetRefused, Interrupted, InvalidSettings
from understudy.methods import METHODS, load_method
from understudy.methods.method import configure
from understudy.nets.released import Classifier
from understudy.privacy.curator import Pace
from understudy.privacy.plan import Budget
from understudy.privacy.randomness import InjectedRandomness
from understudy.progress import Progress

FEW = {"steps": 4, "batch": 6, "hidden": 8, "images_per_class": 3}
TAUGHT = {**FEW, "teachers": 5, "teacher_batch": 3, "first_steps": 2, "width": 2, "code": 3}
GAN = {"images_per_class": 3, "steps": 4, "turns": 2, "batch": 12, "fakes": 6, "code": 3}
KEPT = {"keeps_members": True}
"""Methods with an ensemble can only go on with what it learned."""
TINY = {
    "psg": {"rounds": 2, "outer": 2, "batches": 2, "inner": 2, "images_per_class": 2},
    "rehearsal": {
        "images_per_class": 3,
        "waves": 10,
        "components": 4,
        "samples": 30,
        "networks": 2,
        "width": 4,
        "refine_steps": 2,
        "refine_batch": 12,
        "hidden": 3,
        "match_steps": 2,
    },
    "dp-merf": {**FEW, "features": 20, "count_ratio": 2.0},
    "dp-mepf": {
        **FEW,
        "encoder": "random",
        "layers": ":2",
        "looks": 2,
        "code": 3,
        "count_ratio": 2.0,
    },
    "datalens": {**TAUGHT, "top": 5},
    "g-pate": {
        **TAUGHT,
        "projections": 2,
        "bins": 4,
        "critic": "records",
        "generator": "gallery",
        "falling": True,
    },
    "pate-gan": {
        **TAUGHT,
        "critic": "records",
        "generator": "gallery",
        "student_steps": 2,
        "generator_steps": 2,
        "memory": 2,
        "spread": 0.1,
        "smooth": 1.0,
    },
    "gs-wgan": {
        "images_per_class": 3,
        "critics": 5,
        "asked": 2.5,
        "steps": 4,
        "batch": 6,
        "width": 4,
        "critic_width": 2,
        "warm_up": 2,
    },
    "dpdm": {
        "images_per_class": 3,
        "steps": 4,
        "batch": 12,
        "copies": 2,
        "width": 4,
        "levels": 1,
        "blocks": 1,
        "average": 0.8,
        "sample_steps": 2,
        "churn": 1.0,
    },
    "dp-gan": {**GAN, "width": 2, "critic_width": 2, "penalty": 1.0, "count_ratio": 2.0},
    "dp-cgan": {**GAN, "width": 8, "critic_width": 8, "weight_clip": 0.5},
    "dp-sinkhorn": {
        "images_per_class": 3,
        "steps": 4,
        "batch": 12,
        "generated": 6,
        "code": 3,
        "width": 2,
    },
    "dp-sgd": {"steps": 6, "batch": 12, "width": 4, "momentum": 0.9, "average": 0.8},
    "dp-hp": {**FEW, "sum_order": 4, "product_order": 2, "pairs": 3, "count_ratio": 2.0},
}

OF_EACH_KIND = ("psg", "dp-merf", "datalens", "gs-wgan", "dp-sinkhorn")
"""A method for each kind of release: for what releases do, whoever asks for them."""
ABANDONED = ("datalens", "g-pate", "gs-wgan", "pate-gan")
"""Methods with an ensemble: unless it was to be kept, a run that was cut off is lost."""


def injected() -> InjectedRandomness:
    source = torch.Generator().manual_seed(7)
    return InjectedRandomness(
        uniform=lambda n: torch.rand(n, generator=source, dtype=torch.float64),
        normal=lambda n: torch.randn(n, generator=source, dtype=torch.float64),
    )


class World:
    def __init__(self, name, ledger, folder, **data):
        terms = {"max_per_unit": data.pop("max_per_unit", None)}
        self.vault = a_vault(ledger, some_images(60, **data), **terms)
        self.configured = configure(load_method(name), self.vault.facts, 10, settings=TINY[name])
        self.name, self.ledger, self.folder = name, ledger, folder

    def method(self, seed=0):
        return load_method(self.name)(self.configured.config, self.vault.facts, seed=seed)

    def open(self, run_id, **options):
        return self.vault.open(
            self.method().plan(),
            options.pop("budget", LOOSE),
            self.ledger,
            workspace=self.folder / run_id,
            run_id=run_id,
            allow_large_delta=True,
            **options,
        )


def values(made):
    """All numbers of what a method has made, to compare it with another."""
    if isinstance(made, Classifier):
        return torch.cat([weights.flatten() for weights in made.params.values()])
    return made.images


def shape_of(made):
    return made.shape if isinstance(made, Classifier) else made.images.shape[1:]


def check_valid(made, facts):
    if isinstance(made, Classifier):
        images = torch.rand(9, *facts.shape)
        labels, total = made.predict(images), made.probabilities(images).sum(1)
        assert torch.allclose(total, torch.ones(9))
        assert values(made).isfinite().all()
    else:
        labels = made.labels
        assert made.images.dtype == torch.float32
        assert made.images.min() >= 0
        assert made.images.max() <= 1
    assert shape_of(made) == facts.shape
    assert labels.dtype == torch.int64
    assert set(labels.tolist()) <= set(range(facts.classes))
    assert made.class_names == facts.class_names


def test_every_method_has_a_row_here():
    assert set(TINY) == set(METHODS)


@pytest.fixture(params=METHODS)
def world(request, ledger, tmp_path):
    return World(request.param, ledger, tmp_path)


def test_makes_what_is_valid_with_exactly_the_planned_releases(world):
    curator = world.open("run")
    check_valid(world.method().run(curator, Progress()), world.vault.facts)
    planned = {line.name: line.count for line in curator.plan}
    assert curator.made() == planned
    committed = [block.releases for block in world.ledger.blocks("run")]
    assert sum(sum(r.values()) for r in committed) == sum(planned.values())
    assert curator.calibration.epsilon <= LOOSE.epsilon


@pytest.mark.thorough
def test_is_deterministic_when_its_draws_are_injected(world):
    sets = [
        values(world.method().run(world.open(name, randomness=injected()), Progress()))
        for name in ("a", "b")
    ]
    assert torch.equal(*sets)


@pytest.mark.parametrize("world", OF_EACH_KIND, indirect=True)
def test_the_seed_decides_neither_batches_nor_noise(world):
    """The same public seed, and torch's and numpy's global seeds, twice: other results."""
    sets = []
    for name in ("a", "b"):
        torch.manual_seed(0)
        sets.append(values(world.method(seed=5).run(world.open(name), Progress())))
    assert not torch.equal(*sets)


@pytest.mark.parametrize("name", ABANDONED)
def test_what_cannot_be_resumed_says_so_and_stays_charged(name, ledger, tmp_path):
    world = World(name, ledger, tmp_path)
    pace = Pace(seconds=0.0, should_stop=lambda: True)
    with pytest.raises(Interrupted):
        world.method().run(world.open("run", pace=pace), Progress())
    with pytest.raises(InvalidSettings, match="start a new run"):
        world.method().run(world.open("run"), Progress())
    assert ledger.run("run")["state"] == "reserved"


def test_resumes_where_it_stopped(world):
    """Stopped after every checkpoint and resumed, it ends with the plan exactly used up."""
    for _ in range(100):
        stops = iter([False, True])
        pace = Pace(seconds=0.0, should_stop=lambda stops=stops: next(stops, True), **KEPT)
        curator = world.open("run", pace=pace)
        try:
            made = world.method().run(curator, Progress())
            break
        except Interrupted:
            continue
    assert curator.made() == {line.name: line.count for line in curator.plan}
    assert shape_of(made) == world.vault.facts.shape


@pytest.mark.thorough
def test_cut_off_after_the_last_release_nothing_is_lost(world):
    """Everything is paid for, and an ensemble is not asked any more."""
    made = world.method().run(world.open("run"), Progress())
    again = world.open("run")
    assert torch.equal(values(world.method().run(again, Progress())), values(made))
    assert again.made() == {line.name: line.count for line in again.plan}


@pytest.mark.thorough
def test_resuming_changes_nothing_but_fresh_draws(world):
    """With the same draws, a run cut in two gives the same as one in a piece."""
    whole = values(world.method().run(world.open("whole", randomness=injected()), Progress()))
    draws = injected()
    stops = iter([False, False, True])
    pace = Pace(seconds=0.0, should_stop=lambda: next(stops, False), **KEPT)
    with pytest.raises(Interrupted):
        world.method().run(world.open("cut", randomness=draws, pace=pace), Progress())
    resumed = values(world.method().run(world.open("cut", randomness=draws), Progress()))
    assert torch.allclose(whole, resumed, atol=1e-6)


@pytest.mark.parametrize("world", OF_EACH_KIND, indirect=True)
def test_refuses_an_exhausted_budget(world, ledger, tmp_path):
    poor = a_vault(ledger, some_images(61, seed=9, name="poor"), lifetime_epsilon=1.0)
    with pytest.raises(BudgetRefused):
        poor.open(
            world.method().plan(), LOOSE, ledger, workspace=tmp_path / "p", run_id="p",
            allow_large_delta=True,
        )  # fmt: skip


def test_runs_without_noise(world):
    curator = world.open("inf", budget=Budget(epsilon=float("inf"), delta=1e-5))
    world.method().run(curator, Progress())
    assert not curator.has_guarantee


@pytest.mark.parametrize(
    "data",
    [
        {"classes": 2, "shape": (3, 16, 12)},
        {
            "classes": 20,
            "shape": (1, 12, 12),
            "units": [n // 3 for n in range(60)],
            "unit": "patient",
            "max_per_unit": 2,
        },
    ],
    ids=["two classes, colour, not square", "twenty classes, groups"],
)
@pytest.mark.parametrize("name", METHODS)
def test_takes_any_size_classes_and_units(name, data, ledger, tmp_path):
    world = World(name, ledger, tmp_path, **data)
    made = world.method().run(world.open("run"), Progress())
    assert shape_of(made) == world.vault.facts.shape
    assert len(made.class_names) == world.vault.facts.classes


def test_configuration_is_frozen_explained_and_survives_json(world):
    config = world.configured.config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.images_per_class = 3
    assert all(field.metadata["help"] for field in dataclasses.fields(config))
    assert type(config)(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert world.configured.tuned_on
