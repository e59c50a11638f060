"""Waves and scattering: against plain sums, and what they must not see."""

from __future__ import annotations

import math

import pytest
import torch

from understudy.nets.frequencies import low_frequencies
from understudy.nets.scattering import Scattering, _filters
from understudy.nets.scatternet import ScatterNet

CPU = torch.device("cpu")
CENTRE_OF_FINE = 3 * math.pi / 4
"""Radians per pixel of the finest wavelets."""


def pictures(count, shape, seed=0):
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 6, 10)])
def test_waves_are_orthonormal_and_all_of_them_give_the_image_back(shape):
    pixels = math.prod(shape)
    waves = low_frequencies(shape, pixels)
    assert torch.allclose(waves @ waves.T, torch.eye(pixels), atol=1e-5)
    images = pictures(3, shape).flatten(1)
    assert torch.allclose(images @ waves.T @ waves, images, atol=1e-5)


def test_of_a_square_grey_image_the_lowest_waves_are_a_corner_of_the_cosine_transform():
    waves = low_frequencies((1, 28, 28), 171)
    low = low_frequencies((1, 28, 28), 784)[:171]
    assert torch.equal(waves, low)
    crossings = (waves.view(171, 28, 28).sign().diff(dim=1) != 0).any(2).sum(1)
    crossings += (waves.view(171, 28, 28).sign().diff(dim=2) != 0).any(1).sum(1)
    assert int(crossings.max()) == 17  # i + j < 18


def test_the_first_wave_is_brightness_and_colour_comes_later():
    waves = low_frequencies((3, 8, 8), 12).view(12, 3, 64)
    assert torch.allclose(waves[0], waves[0, 0, 0].expand(3, 64))
    assert torch.allclose(waves[:3, :1].expand(3, 3, 64), waves[:3])
    differs = (waves - waves.mean(1, keepdim=True)).flatten(1).norm(dim=1)
    assert differs.max() > 0.99


@pytest.mark.parametrize(
    ("shape", "scales", "dimension"),
    [((1, 8, 8), 1, 144), ((1, 28, 28), 2, 3969), ((3, 32, 32), 2, 15_552), ((1, 12, 20), 1, 540)],
)
def test_sizes_follow_the_image(shape, scales, dimension):
    transform = Scattering(shape)
    assert (transform.scales, transform.dimension) == (scales, dimension)
    assert transform(pictures(2, shape)).shape == (2, dimension)


def convolved(image, spectrum):
    """Convolve around the edges, pixel by pixel, with the filter of a spectrum."""
    taps = torch.fft.ifft2(spectrum.to(torch.complex64))
    height, width = image.shape
    total = torch.zeros(height, width, dtype=torch.complex64)
    for down in range(height):
        for right in range(width):
            total += taps[down, right] * torch.roll(image.to(total.dtype), (down, right), (0, 1))
    return total


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 64, 64)])
def test_groups_are_the_maps_that_are_made_together(shape, monkeypatch):
    """And each of them, of each channel, is normalised as one."""
    made, blurred = [], Scattering._blurred

    def watched(self, spectrum, blur, scale):
        made.append(spectrum.shape[2])
        return blurred(self, spectrum, blur, scale)

    monkeypatch.setattr(Scattering, "_blurred", watched)
    like, images = Scattering(shape), pictures(2, shape)
    found = like(images).view(2, shape[0], like.paths, -1)
    assert tuple(made) == like.groups
    sizes = list(made)
    seen = ScatterNet(shape, 3).prepare(images).view(found.shape)
    for part, own in zip(torch.split(found, sizes, 2), torch.split(seen, sizes, 2), strict=True):
        std, mean = torch.std_mean(part, (2, 3), correction=0, keepdim=True)
        assert torch.allclose(own, (part - mean) / (std**2 + 1e-5).sqrt(), atol=1e-3)


def test_a_first_order_is_a_blurred_modulus_of_a_plain_convolution():
    transform, image = Scattering((1, 12, 12)), pictures(1, (1, 12, 12))
    found = transform(image).view(9, 6, 6)
    wavelets, blur = _filters(transform, CPU)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2), mode="reflect")[0, 0]
    for path in (0, 3, 6):
        modulus = convolved(padded, wavelets[0][path]).abs()
        expected = convolved(modulus, blur).real[2:14:2, 2:14:2]
        assert torch.allclose(found[1 + path], expected, atol=1e-5)
    assert torch.allclose(found[0], convolved(padded, blur).real[2:14:2, 2:14:2], atol=1e-5)


def test_later_orders_are_those_of_plain_convolutions_nearly():
    """Maps are thinned out on the way, which the wavelets' narrow spectra allow."""
    transform, image = Scattering((1, 28, 28)), pictures(1, (1, 28, 28))
    image = torch.nn.functional.avg_pool2d(image, 3, 1, 1)
    found = transform(image).view(81, 7, 7)
    wavelets, blur = _filters(transform, CPU)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4), mode="reflect")
    spectra = torch.fft.fft2(padded)[0]

    def filtered(spectrum, bump):
        return torch.fft.ifft2(spectrum * bump)

    fine = filtered(spectra, wavelets[0]).abs()
    both = filtered(torch.fft.fft2(fine)[:, None], wavelets[1]).abs().flatten(0, 1)
    expected = filtered(torch.fft.fft2(both), blur).real[:, 4:32:4, 4:32:4]
    # Paths: blurred, 8 fine ones, 64 fine and coarse, 8 coarse.
    error = (found[9:73] - expected).norm() / expected.norm()
    assert error < 0.02
    coarse = filtered(torch.fft.fft2(filtered(spectra, wavelets[1]).abs()), blur).real
    coarse = coarse[:, 4:32:4, 4:32:4]
    assert (found[73:] - coarse).norm() / coarse.norm() < 0.02


def test_an_even_image_has_no_waves_and_stripes_have_those_of_their_direction():
    transform = Scattering((1, 28, 28))
    even = transform(torch.full((1, 1, 28, 28), 0.7)).view(81, 49)
    assert torch.allclose(even[0], torch.full((49,), 0.7), atol=1e-4)
    assert even[1:].abs().max() < 1e-4
    across = torch.sin(CENTRE_OF_FINE * torch.arange(28.0)).expand(1, 1, 28, 28)
    first = transform(across).view(81, 49)[1:9].mean(1)
    assert int(first.argmax()) == 0  # waves that run along the rows
    turned = transform(across.mT).view(81, 49)[1:9].mean(1)
    assert int(turned.argmax()) == 4


def test_shifted_stripes_are_the_same_stripes():
    stripes = torch.sin(CENTRE_OF_FINE * torch.arange(29.0)).expand(1, 1, 28, 29)
    here, there = stripes[..., :28], stripes[..., 1:]
    assert (here - there).norm() > here.norm()
    before, after = (Scattering((1, 28, 28))(image).view(81, 7, 7) for image in (here, there))
    middle = slice(1, -1)  # edges are mirrored, and look different
    moved = (before - after)[1:, middle, middle].norm()
    assert moved < 0.1 * before[1:, middle, middle].norm()


def test_each_record_by_itself_gives_the_same():
    transform, images = Scattering((3, 16, 12)), pictures(4, (3, 16, 12))
    one_by_one = torch.func.vmap(lambda image: transform(image[None])[0])(images)
    assert torch.allclose(one_by_one, transform(images), atol=1e-6)
