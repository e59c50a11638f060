"""Stacked critics: the same networks as one by one, and the layers that they claim to be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from understudy.nets.critics import DenseCritic, Teacher, halved, logit_loss, patches

MEMBERS = 3
either = pytest.mark.parametrize(
    "teacher", [Teacher((1, 8, 8), 2, channels=3, hidden=5), DenseCritic((1, 8, 8), 2, hidden=5)]
)


def several(teacher):
    drawn = [teacher.init(torch.Generator().manual_seed(n)) for n in range(MEMBERS)]
    return {name: torch.stack([one[name] for one in drawn]).double() for name in drawn[0]}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 13, 10)])
def test_members_side_by_side_are_members_one_by_one(shape, norm):
    teacher = Teacher(shape, 4, channels=3, hidden=5, norm=norm)
    params = several(teacher)
    images = torch.rand(MEMBERS, 6, *shape, dtype=torch.float64)
    labels = torch.arange(6).remainder(4).repeat(MEMBERS, 1)

    def loss(one, images, labels):
        return logit_loss(teacher(one, images, labels), are_real=True)

    together = vmap(grad(loss))(params, images, labels)
    for n in range(MEMBERS):
        alone = grad(loss)({name: w[n] for name, w in params.items()}, images[n], labels[n])
        for name, slope in alone.items():
            assert torch.allclose(together[name][n], slope, atol=1e-12), name


@pytest.mark.parametrize("sides", [(28, 28), (9, 14), (3, 3)])
def test_patches_make_a_convolution(sides):
    images, weight = torch.rand(2, 3, *sides), torch.randn(4, 3, 5, 5)
    found = (weight.flatten(1) @ patches(images)).view(2, 4, *map(halved, sides))
    assert torch.allclose(found, F.conv2d(images, weight, stride=2, padding=2), atol=1e-4)


@either
def test_a_teacher_looks_at_the_class(teacher):
    params = teacher.init(torch.Generator().manual_seed(0))
    image = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    one, other = (teacher(params, image, torch.tensor([label])) for label in (0, 1))
    assert not torch.allclose(one, other)


@either
def test_without_norm_an_image_is_judged_by_itself(teacher):
    params = teacher.init(torch.Generator().manual_seed(0))
    images, labels = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
    assert torch.allclose(
        teacher(params, images, labels)[:1], teacher(params, images[:1], labels[:1]), atol=1e-6
    )


def test_records_that_do_not_exist_do_not_count():
    logits = torch.tensor([2.0, -3.0, 100.0])
    kept = logit_loss(logits, are_real=False, weights=torch.tensor([1.0, 1.0, 0.0]))
    assert torch.allclose(kept, logit_loss(logits[:2], are_real=False))
    assert logit_loss(logits, are_real=True, weights=torch.zeros(3)) == 0
