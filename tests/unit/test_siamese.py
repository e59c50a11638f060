"""One drawn change for all images: what each kind does, and that it stays within a record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from door import access_to, some_images, without
from understudy.nets.convnet import ConvNet
from understudy.privacy.gradients import GradientRows
from understudy.privacy.releases.gradient import gradient
from understudy.training.siamese import COLOUR, GRID, KEPT, KINDS, Siamese, changed

IMAGES = torch.randn(4, 3, 16, 12, generator=torch.Generator().manual_seed(0))


def draw(kind, seed=0, sides=(16, 12)):
    return Siamese((kind,)).draw(sides, torch.Generator().manual_seed(seed))


def test_without_a_change_nothing_changes():
    assert changed(IMAGES, {"labels": torch.zeros(4)}) is IMAGES


def test_flip_turns_all_images_or_none():
    turned = 0
    for seed in range(30):
        after = changed(IMAGES, draw("flip", seed))
        is_turned = torch.allclose(after, IMAGES.flip(3), atol=1e-5)
        assert is_turned or torch.allclose(after, IMAGES, atol=1e-5)
        turned += is_turned
    assert 5 < turned < 25


def test_crop_shifts_by_whole_pixels_up_to_an_eighth():
    shifts = set()
    for seed in range(60):
        after = changed(IMAGES, draw("crop", seed))
        padded = F.pad(IMAGES, (2, 2, 2, 2))
        fits = [
            (y, x) for y in range(5) for x in range(5)
            if torch.allclose(after, padded[..., y : y + 16, x : x + 12], atol=1e-4)
        ]  # fmt: skip
        assert len(fits) == 1
        shifts |= set(fits)
    assert {y for y, _ in shifts} == {0, 1, 2, 3, 4}
    assert {x for _, x in shifts} >= {1, 2, 3}


def test_cutout_cuts_one_rectangle_of_at_most_half_the_sides():
    for seed in range(20):
        kept = draw("cutout", seed)[KEPT]
        after = changed(IMAGES, draw("cutout", seed))
        assert torch.allclose(after, IMAGES * kept, atol=1e-5)
        rows, columns = (kept == 0).any(1).sum(), (kept == 0).any(0).sum()
        assert (kept == 0).sum() == rows * columns
        assert 4 <= rows <= 8
        assert 3 <= columns <= 6


def test_colour_keeps_the_pattern_of_grey_images():
    grey = IMAGES[:, :1]
    after = changed(grey, draw("color", 1))
    a, b = (part.flatten(1) - part.flatten(1).mean(1, keepdim=True) for part in (grey, after))
    ratio = (a * b).sum(1) / a.square().sum(1)
    assert torch.allclose(b, ratio[:, None] * a, atol=1e-4)
    brightness, _, contrast = draw("color", 1)[COLOUR]
    assert torch.allclose(ratio, 1 + contrast)
    assert torch.allclose((after - grey).mean((1, 2, 3)), brightness, atol=1e-5)


@pytest.mark.parametrize("kind", ["scale", "rotate"])
def test_scale_and_rotate_keep_the_middle(kind):
    spot = torch.zeros(1, 1, 17, 17)
    spot[..., 7:10, 7:10] = 1
    after = changed(spot, draw(kind, 3, (17, 17)))
    assert after[0, 0, 8, 8] == pytest.approx(1, abs=1e-3)
    assert not torch.allclose(after, spot, atol=1e-2)
    assert after[0, 0, 0].abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_each_image_changes_by_itself_and_passes_slopes_on(kind):
    images = IMAGES.clone().requires_grad_()
    after = changed(images, draw(kind, 2))
    assert torch.allclose(after[1:2], changed(images[1:2], draw(kind, 2)), atol=1e-5)
    (slope,) = torch.autograd.grad(after[1].square().sum(), images)
    assert slope[1].abs().max() > 0
    assert slope[[0, 2, 3]].abs().max() == 0


def test_kinds_take_turns():
    seen = set()
    both = Siamese(("cutout", "flip"))
    for seed in range(20):
        change = both.draw((8, 8), torch.Generator().manual_seed(seed))
        seen.add(bool((change[KEPT] == 0).any()))
        assert change[GRID].shape == (8, 8, 2)
    assert seen == {True, False}


# In a release


NETWORK = ConvNet((1, 8, 8), 3, width=4)
THETA = NETWORK.init(torch.Generator().manual_seed(0))


def loss(theta, image, label):
    return F.cross_entropy(NETWORK(theta, changed(image[None], theta)), label[None])


@pytest.mark.parametrize("by_layer", [True, False])
def test_rows_are_gradients_of_changed_records(by_layer):
    images, labels = torch.rand(5, 1, 8, 8), torch.arange(5) % 3
    change = draw("rotate", 1, (8, 8))
    rows = GradientRows(loss, public=change, by_layer=by_layer)(THETA | change, images, labels)
    before = changed(images, change)
    expected = GradientRows(loss, by_layer=by_layer)(THETA, before, labels)
    assert len(rows) == len(THETA)
    for ours, theirs in zip(rows, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    other = GradientRows(loss, public=change)(THETA | draw("rotate", 2, (8, 8)), images, labels)
    assert not torch.allclose(rows[0], other[0], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_emptying_a_unit_moves_the_sum_by_at_most_the_clip_norm(kind):
    data, change = some_images(20), draw(kind, 5, (8, 8))
    flat = []
    for records in (data, without(data, 7)):
        found = gradient(access_to(records), loss, THETA, change, clip_norm=0.01)
        flat.append(torch.cat([part.flatten() for part in found.values()]) * 10)  # of 20, half
    distance = (flat[0] - flat[1]).norm().item()
    assert 0.009 < distance <= 0.01 * (1 + 1e-5)
