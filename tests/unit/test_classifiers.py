"""The papers' networks: their sizes, their initialisation, small and large images."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from understudy.nets.classifiers import MODULES, NETWORKS, ModuleNetwork, classifier
from understudy.nets.params import Network, parameter_count
from understudy.training.sgd import SGD, fit

HEAVY = ("resnet110", "wideresnet", "resnext")


def conv(inputs: int, outputs: int, kernel: int, bias: bool = True) -> int:
    return outputs * (inputs * kernel**2 + bias)


def block(inputs: int, outputs: int) -> int:
    """A residual block of two 3 x 3 convolutions, each with a norm, and a shortcut if needed."""
    body = conv(inputs, outputs, 3, False) + conv(outputs, outputs, 3, False) + 4 * outputs
    return body + (inputs * outputs + 2 * outputs if inputs != outputs else 0)


def resnext_block(inputs: int, outputs: int) -> int:
    middle = 2 * outputs
    body = inputs * middle + middle * middle // 8 * 9 + middle * outputs
    norms = 4 * middle + 2 * outputs
    return body + norms + (inputs * outputs + 2 * outputs if inputs != outputs else 0)


def wide_block(inputs: int, outputs: int) -> int:
    body = conv(inputs, outputs, 3, False) + conv(outputs, outputs, 3, False)
    return body + 2 * inputs + 2 * outputs + (inputs * outputs if inputs != outputs else 0)


SIZES = [
    ("mlp", (1, 28, 28), 784 * 128 + 128 + 128 * 128 + 128 + 1290),
    ("lenet", (1, 28, 28), 61_706),
    ("lenet", (3, 32, 32), 62_006),
    (
        "alexnet",
        (1, 28, 28),
        conv(1, 128, 5) + conv(128, 192, 5) + conv(192, 256, 3) + conv(256, 192, 3)
        + conv(192, 192, 3) + 192 * 4 * 4 * 10 + 10,
    ),
    (
        "vgg11",
        (1, 28, 28),
        conv(1, 64, 3) + conv(64, 128, 3) + conv(128, 256, 3) + conv(256, 256, 3)
        + conv(256, 512, 3) + 3 * conv(512, 512, 3) + 2 * (64 + 128 + 512 + 4 * 512) + 5130,
    ),
    ("resnet18", (3, 32, 32), 11_173_962),
    (
        "resnet18",
        (1, 28, 28),
        576 + 128 + 2 * block(64, 64) + block(64, 128) + block(128, 128) + block(128, 256)
        + block(256, 256) + block(256, 512) + block(512, 512) + 5130,
    ),
    (
        "resnet9",
        (3, 32, 32),
        conv(3, 64, 3, False) + conv(64, 128, 5, False) + 2 * conv(128, 128, 3, False)
        + conv(128, 256, 3, False) + 2 * conv(256, 256, 3, False) + conv(256, 128, 3, False)
        + 2 * (64 + 3 * 128 + 3 * 256 + 128) + 1280,
    ),
    ("datalens-cnn", (1, 28, 28), 320 + 18_496 + 11 * 11 * 64 * 64 + 64 + 650),
    (
        "resnet110",
        (3, 32, 32),
        432 + 32 + 18 * block(16, 16) + block(16, 32) + 17 * block(32, 32) + block(32, 64)
        + 17 * block(64, 64) + 650,
    ),
    (
        "wideresnet",
        (3, 32, 32),
        432 + wide_block(16, 64) + 5 * wide_block(64, 64) + wide_block(64, 128)
        + 5 * wide_block(128, 128) + wide_block(128, 256) + 5 * wide_block(256, 256) + 512 + 2570,
    ),
    (
        "resnext",
        (3, 32, 32),
        1728 + 128 + resnext_block(64, 256) + 2 * resnext_block(256, 256) + resnext_block(256, 512)
        + 2 * resnext_block(512, 512) + resnext_block(512, 1024) + 2 * resnext_block(1024, 1024)
        + 10_250,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape", "expected"), SIZES)
def test_parameters_are_as_many_as_the_papers(name, shape, expected):
    assert sum(p.numel() for p in MODULES[name](shape, 10).parameters()) == expected


def test_every_network_was_counted():
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    for name in NETWORKS:
        count = parameter_count(classifier(name, (1, 28, 28), 10).init(torch.Generator()))
        assert f"{count:,}".replace(",", " ") in page
        assert f"`{name}`" in page
    assert {name for name, *_ in SIZES} == set(MODULES)
    assert set(NETWORKS) == {"convnet", "scatternet", *MODULES}


@pytest.mark.parametrize(
    "shape", [(1, 4, 4), (1, 8, 8), (1, 10, 9), (3, 13, 20), (1, 28, 28), (3, 64, 64)]
)
@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in HEAVY])
def test_images_of_any_size_are_told_apart(name, shape):
    """Also where maps get small: an instance norm of one pixel is a constant."""
    network = classifier(name, shape, 7, width=8)
    params = network.init(torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = network(params, torch.randn(2, *shape))
    assert logits.shape == (2, 7)
    assert logits.isfinite().all()
    assert (logits[0] - logits[1]).abs().max() > 1e-5


@pytest.mark.parametrize("name", HEAVY)
def test_deep_networks_take_the_smallest_images(name):
    network = classifier(name, (1, 8, 8), 3)
    with torch.no_grad():
        logits = network(network.init(torch.Generator().manual_seed(0)), torch.randn(2, 1, 8, 8))
    assert (logits[0] - logits[1]).abs().max() > 1e-5


@pytest.mark.parametrize("name", [name for name in MODULES if name not in HEAVY])
def test_initialisation_is_torchs_default_drawn_from_the_generator(name):
    network = ModuleNetwork(name, (1, 28, 28), 10)
    torch.manual_seed(1)
    params = network.init(torch.Generator().manual_seed(0))
    again = network.init(torch.Generator().manual_seed(0))
    other = network.init(torch.Generator().manual_seed(1))
    torchs = dict(MODULES[name]((1, 28, 28), 10).named_parameters())
    assert list(params) == list(torchs)
    for part, ours in params.items():
        assert torch.equal(ours, again[part])
        if ours.ndim > 1:
            assert not torch.equal(ours, other[part])
            assert ours.std().item() == pytest.approx(torchs[part].std().item(), rel=0.3)
            assert abs(ours.mean()) < 0.3 * ours.std()
        elif ours.unique().numel() == 1:  # of a norm
            assert torch.equal(ours, torchs[part])


def test_a_module_network_is_its_module():
    network = ModuleNetwork("lenet", (1, 28, 28), 10)
    module = MODULES["lenet"]((1, 28, 28), 10)
    images = torch.randn(3, 1, 28, 28)
    assert torch.allclose(network(dict(module.named_parameters()), images), module(images))


def test_lenet_and_alexnet_pad_as_in_the_paper():
    """The first convolution of LeNet by 2 at 28 px, that of AlexNet by 4."""
    images = torch.randn(2, 1, 28, 28)
    for name, padding in (("lenet", 2), ("alexnet", 4)):
        module = MODULES[name]((1, 28, 28), 10)
        layers = [layer for layer in module if not isinstance(layer, nn.ZeroPad2d)]
        first = layers[0]
        papers = nn.Conv2d(1, first.out_channels, 5, padding=padding)
        papers.load_state_dict(first.state_dict())
        expected = nn.Sequential(papers, *layers[1:])(images)
        assert torch.allclose(module(images), expected, atol=1e-6), name


def in_threads(job: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=job, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_do_not_see_each_others_parameters():
    network = ModuleNetwork("mlp", (1, 8, 8), 2)
    images = torch.randn(16, 1, 8, 8)
    drawn = [network.init(torch.Generator().manual_seed(seed)) for seed in range(4)]
    expected = [network(params, images) for params in drawn]
    wrong = []

    def job(number: int) -> None:
        for _ in range(100):
            if not torch.equal(network(drawn[number], images), expected[number]):
                wrong.append(number)

    in_threads(job, 4)
    assert not wrong


@pytest.mark.parametrize("name", ["mlp", "datalens-cnn", "resnet9"])
def test_they_learn(name):
    network: Network = classifier(name, (1, 8, 8), 2)
    labels = torch.arange(16) % 2
    images = 0.3 * torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    images += (2.0 * labels - 1)[:, None, None, None]
    params = network.init(torch.Generator().manual_seed(0))
    assert parameter_count(params) > 0
    sgd = SGD(lr=0.02, epochs=15, momentum=0.9)
    trained = fit(network, params, images, labels, sgd=sgd, generator=torch.Generator())
    assert (network(trained, images).argmax(1) == labels).all()
