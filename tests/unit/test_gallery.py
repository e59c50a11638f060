"""A generator of pictures and their mixtures."""

from __future__ import annotations

import pytest
import torch

from understudy.nets.gallery import GalleryGenerator
from understudy.nets.released import Generator

SHAPE = (1, 4, 5)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("classes", [0, 3])
def test_an_image_is_a_mixture_of_two_pictures_of_its_class(classes):
    network = GalleryGenerator(SHAPE, classes, code=6)
    params = network.init(seeded())
    codes, labels = network.codes(50, seeded(1)), torch.arange(50) % max(1, classes)
    assert torch.allclose(codes.sum(1), torch.ones(50))
    assert ((codes > 0).sum(1) <= 2).all()
    assert (codes > 0).sum(0).min() > 0, "all are drawn"
    pictures = params["pictures"].sigmoid().view(max(1, classes), 6, -1)
    mixed = torch.einsum("nm,nmp->np", codes, pictures[labels])
    assert torch.allclose(network(params, codes, labels).flatten(1), mixed, atol=1e-6)


def test_the_pictures_themselves_are_judged_each_once():
    network = GalleryGenerator(SHAPE, 3, code=2)
    params = network.init(seeded())
    labels = (torch.arange(6) + 1) % 3  # they may begin with any class
    shown = network(params, network.codes_to_show(6, seeded(1)), labels).flatten(1)
    pictures = params["pictures"].sigmoid()
    places = [int(torch.cdist(one[None], pictures).argmin()) for one in shown]
    assert sorted(places) == list(range(6))
    assert [place // 2 for place in places] == labels.tolist()


def test_it_is_kept_in_a_file():
    network = GalleryGenerator(SHAPE, 3, code=2)
    params = network.init(seeded())
    made = Generator(network, params, network.statistics(params, seeded(1)))
    again = Generator.from_bytes(made.to_bytes())
    assert again.network == network
    one, other = (g.sample(9, seed=4) for g in (made, again))
    assert torch.equal(one[0], other[0])
