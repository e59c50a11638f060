"""Every method that sums features of records: what it declares of them holds by brute force."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_methods import TINY

from door import access_to, some_images, without
from understudy.methods import METHODS, load_method
from understudy.methods.method import configure
from understudy.privacy.plan import PublicFacts, joint_bound
from understudy.privacy.releases import class_sums as release
from understudy.privacy.releases.class_sums import Embedding, class_sums
from understudy.progress import Progress
from understudy.training.engine import Engine

FACTS = PublicFacts(units=12, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
UNITS = [0, 0, 0, 1, 2, 2, 3, 4, 4, 4, 4, 4]


class AskedFor(Exception):
    """What a method asked for first."""


def embedding_of(name: str) -> Embedding | None:
    """Run a method until it asks for sums; None if it never plans to."""
    method_class = load_method(name)
    config = configure(method_class, FACTS, 10, settings=TINY[name]).config
    method = method_class(config, FACTS, seed=0)
    if not any(line.kind == "class_sums" for line in method.plan()):
        return None

    def ask(embedding, *, release=None):
        raise AskedFor(embedding)

    curator = SimpleNamespace(engine=Engine(), facts=FACTS, class_sums=ask, plan=method.plan())
    with pytest.raises(AskedFor) as asked:
        method.run(curator, Progress())
    (embedding,) = asked.value.args
    assert embedding.blocks == next(iter(method.plan())).blocks
    return embedding


EMBEDDINGS = {name: found for name in METHODS if (found := embedding_of(name)) is not None}


def test_the_family_is_here():
    assert {"dp-merf", "dp-hp", "dp-mepf", "rehearsal"} <= set(EMBEDDINGS)


def scaled_sums(embedding, data):
    """What the noise of one joint Gaussian is added to."""
    access = access_to(data)
    found = embedding.split(class_sums(access, embedding), access.classes)
    blocks = {block.name: block for block in embedding.blocks}
    return torch.cat(
        [v.flatten().double() / (blocks[n].bound * blocks[n].ratio) for n, v in found.items()]
    )


def worst_cases():
    """Pictures that stretch features: even ones of every shade, stripes, a point, noise."""
    rng = np.random.default_rng(0)
    cases = [np.full((1, 8, 8), shade) for shade in (0, 64, 128, 200, 255)]
    stripes, point = np.zeros((1, 8, 8)), np.zeros((1, 8, 8))
    stripes[:, ::2], point[:, 3, 3] = 255, 255
    return [*cases, stripes, 255 - stripes, point, *rng.choice([0, 255], (3, 1, 8, 8))]


@pytest.mark.parametrize("units", [None, UNITS], ids=["records", "groups"])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_emptying_any_unit_moves_the_sums_by_at_most_the_bound(name, units):
    embedding = EMBEDDINGS[name]
    bound = joint_bound(embedding.blocks) * (1 + 1e-5)
    for number, picture in enumerate(worst_cases()):
        data = some_images(12, units=units, seed=number)
        unit = number % 4
        data.images[data.units == unit] = picture
        if number % 2:  # all that a unit has in one class
            data.labels[data.units == unit] = 2
        before, after = (scaled_sums(embedding, d) for d in (data, without(data, unit)))
        assert (before - after).norm() <= bound


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_declared_norms_are_not_exceeded_so_nothing_is_cut(name):
    """The release would enforce them; a method whose features need that says something false."""
    embedding = EMBEDDINGS[name]
    pictures = [torch.from_numpy(p).float() / 255 for p in worst_cases()]
    pictures += list(torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    for picture in pictures:
        for block, features in zip(embedding.blocks, embedding.function(picture), strict=True):
            assert features.norm() <= block.bound * (1 + 1e-5)
            assert not block.is_non_negative or features.min() >= 0


def test_brute_force_finds_a_release_that_lets_too_much_through(monkeypatch):
    embedding = EMBEDDINGS["dp-merf"]
    bound = joint_bound(embedding.blocks) * (1 + 1e-5)
    monkeypatch.setattr(release, "_bounded", lambda features, block: 3 * features / block.ratio)
    monkeypatch.setattr(release, "joint_bound", lambda blocks: 3 * joint_bound(blocks))
    data = some_images(12)
    moved = scaled_sums(embedding, data) - scaled_sums(embedding, without(data, 3))
    assert moved.norm() > bound
