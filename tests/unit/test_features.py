"""Feature networks: what they are given, what they refuse, and what they are called."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from understudy.data.digits import read_digits
from understudy.errors import InvalidData, InvalidSettings, MissingWeights
from understudy.evaluation.features import (
    Inception,
    ReferenceNetwork,
    ReferenceTraining,
    eight_bits,
    features_of,
    resized,
)
from understudy.nets.convnet import ConvNet
from understudy.privacy.disclosure import RealImages
from understudy.privacy.plan import PublicFacts
from weights_of_corners import make_weights

CPU = torch.device("cpu")
FACTS = PublicFacts(
    units=10, class_names=tuple("0123456789"), shape=(1, 8, 8), mean=(0.3,), std=(0.4,)
)


@pytest.fixture
def weights_file(tmp_path, monkeypatch):
    return make_weights(tmp_path, monkeypatch)


def test_inception_is_given_three_channels_of_299_pixels_in_the_right_range(weights_file):
    network = Inception(weights_file, CPU)
    grey = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    grey[0], grey[1, 0, -1, -1] = 255, 128
    found = network(grey)
    assert found.dtype == torch.float32
    assert found[:, 0].tolist() == [299 * 299] * 2
    assert found[0, 1:].tolist() == [127 / 128] * 6
    # The last output pixel looks beyond the middle of the last one, where it meets the border.
    assert found[1, 1:].tolist() == [-1] * 3 + [0] * 3
    colour = torch.tensor([0, 128, 255], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 9, 5)
    assert network(colour)[0, 1:4].tolist() == [-1, 0, 127 / 128]


def test_weights_of_others_are_never_run(weights_file):
    content = weights_file.read_bytes()
    weights_file.write_bytes(content[:-1] + b"x")
    with pytest.raises(MissingWeights, match="wrong checksum.*understudy fetch inception"):
        Inception(weights_file, CPU)
    with pytest.raises(MissingWeights, match="cannot be read"):
        Inception(weights_file.with_name("nowhere.pt"), CPU)


def test_bytes_and_floats_of_one_picture_have_the_same_features(weights_file):
    network = Inception(weights_file, CPU)
    network.at_once = 3
    pixels = torch.randint(0, 256, (7, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator())
    whole = torch.cat(list(features_of(network, pixels)))
    assert len(whole) == 7
    assert torch.equal(whole, torch.cat(list(features_of(network, pixels / 255))))
    beyond = torch.where(pixels == 0, -3.0, torch.where(pixels == 255, 7.0, pixels / 255))
    assert torch.equal(eight_bits(beyond), pixels)
    for bad in (torch.tensor([torch.nan]), torch.tensor([1], dtype=torch.int64)):
        with pytest.raises(InvalidData, match="expected bytes or floats"):
            eight_bits(bad)


@pytest.mark.parametrize("shape", [(8, 8), (5, 12)])
def test_resizing_puts_the_first_pixel_on_the_first(shape):
    """Against a plain loop, and apart from what torch does with centres of pixels."""
    image = np.random.default_rng(0).random(shape)
    expected = np.zeros((21, 21))
    for row in range(21):
        for column in range(21):
            y, x = row * shape[0] / 21, column * shape[1] / 21
            top, left = int(y), int(x)
            low, right = min(top + 1, shape[0] - 1), min(left + 1, shape[1] - 1)
            a, b = y - top, x - left
            upper = (1 - b) * image[top, left] + b * image[top, right]
            lower = (1 - b) * image[low, left] + b * image[low, right]
            expected[row, column] = (1 - a) * upper + a * lower
    given = torch.from_numpy(image)[None, None]
    assert np.allclose(resized(given, 21)[0, 0].numpy(), expected, atol=1e-12)
    centred = F.interpolate(given, (21, 21), mode="bilinear", align_corners=False)
    assert not np.allclose(centred[0, 0].numpy(), expected, atol=0.05)


def test_features_of_a_convnet_are_what_its_last_layer_sees():
    network = ConvNet((1, 8, 8), 10, 4)
    params = network.init(torch.Generator().manual_seed(0))
    prepared = network.prepare(torch.randn(3, 1, 8, 8))
    seen = network.features(params, prepared)
    assert seen.shape == (3, 4 * 4 * 4)
    logits = seen @ params["linear.weight"].T + params["linear.bias"]
    assert torch.allclose(logits, network.logits(params, prepared), atol=1e-6)


def test_a_network_trained_on_the_reference_knows_it():
    test = read_digits().test
    real = RealImages(
        torch.from_numpy(test.images), torch.from_numpy(test.labels), "test set digits"
    )
    quick = ReferenceTraining(steps=60, width=16, lr=0.1)
    network = ReferenceNetwork(real, FACTS, training=quick)
    assert network.name == "convnet trained on test set digits"
    guessed = network.probabilities(real.images)
    assert torch.allclose(guessed.sum(1), torch.ones(len(guessed), dtype=torch.float64))
    assert float((guessed.argmax(1) == real.labels).double().mean()) > 0.6
    assert network(real.images[:5]).shape == (5, 256)
    again = ReferenceNetwork(real, FACTS, training=quick)
    assert torch.equal(again(real.images[:5]), network(real.images[:5]))
    with pytest.raises(InvalidSettings, match="steps is 0"):
        ReferenceTraining(steps=0)
