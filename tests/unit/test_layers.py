"""Rows by layer equal rows by record, for every rule; what has no rule goes record by record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from understudy.nets.convnet import ConvNet
from understudy.privacy.gradients import find_layers, gradient_rows

IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0])


def drawn(**shapes):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}


def classes(logits, label):
    return F.cross_entropy(logits.reshape(1, 4), label[None])


def linear(p, image, label):
    return classes(F.linear(image.flatten(), p["w"], p["b"]), label)


def linear_over_rows(p, image, label):
    return classes(F.linear(image, p["v"]).tanh().sum((0, 1)), label)


def strided_conv(p, image, label):
    maps = F.conv2d(image[None], p["c"], p["d"], stride=2, padding=2, dilation=2)
    return classes(maps.tanh().mean((2, 3)), label)


def conv_over_crops(p, image, label):
    crops = torch.stack([image[:, :5, :5], image[:, 3:, 3:]])
    return classes(F.conv2d(crops, p["c"], bias=p["d"]).square().mean((0, 2, 3)), label)


def group_norm(p, image, label):
    maps = F.group_norm(F.conv2d(image[None], p["c"]), 2, p["n"], p["m"], 1e-3)
    return classes(maps.relu().mean((2, 3)), label)


def layer_norm(p, image, label):
    scaled = F.layer_norm(image, (8,), p["s"], p["t"])
    return classes(F.linear(scaled, p["v"]).sum((0, 1)), label)


def embedding(p, image, label):
    near = F.embedding((label + torch.arange(3)) % 4, p["e"])
    return (near.sum(0) * image.mean((1, 2))).tanh().sum()


def shared_twice(p, image, label):
    return classes(F.linear(F.linear(image[0], p["q"]).tanh(), p["q"])[:4, :1], label)


def asks_for_shapes(p, image, label):
    pixels = image.reshape(-1)[: p["w"].shape[1]]
    return classes(F.linear(pixels, p["w"], p["b"]), label)


SHAPES = {
    "w": (4, 192), "b": (4,), "v": (4, 8), "c": (4, 3, 3, 3), "d": (4,), "n": (4,), "m": (4,),
    "s": (8,), "t": (8,), "e": (4, 3), "q": (8, 8), "unused": (2, 3),
}  # fmt: skip
KNOWN = [
    linear, linear_over_rows, strided_conv, conv_over_crops, group_norm, layer_norm, embedding,
    shared_twice, asks_for_shapes,
]  # fmt: skip


@pytest.mark.parametrize("loss", KNOWN)
def test_rows_by_layer_are_rows_by_record(loss):
    params = drawn(**SHAPES)
    assert find_layers(loss, params, IMAGES[0], LABELS[0])
    by_layer = gradient_rows(loss, params, by_layer=True)(IMAGES, LABELS)
    by_record = gradient_rows(loss, params, by_layer=False)(IMAGES, LABELS)
    assert by_record.abs().max() > 0
    assert torch.allclose(by_layer, by_record, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8)])
def test_the_networks_of_the_methods_go_layer_by_layer(shape):
    network = ConvNet(shape, 4, 6)
    params = network.init(torch.Generator().manual_seed(0))
    images = torch.rand(3, *shape)

    def loss(p, image, label):
        return F.cross_entropy(network(p, image[None]), label[None])

    found = find_layers(loss, params, images[0], LABELS[0])
    assert {layer.weight for layer in found} | {layer.bias for layer in found} == set(params)
    by_layer = gradient_rows(loss, params, by_layer=True)(images, LABELS[:3])
    by_record = gradient_rows(loss, params, by_layer=False)(images, LABELS[:3])
    assert torch.allclose(by_layer, by_record, atol=1e-6)


def operator(p, image, label):
    return classes(F.linear(image.flatten(), 2 * p["w"]), label)


def method_of_a_tensor(p, image, label):
    return classes(F.linear(image.flatten(), p["w"].relu()), label)


def grouped(p, image, label):
    return classes(F.conv2d(image[None], p["g"], groups=3).mean((2, 3))[:, :4], label)


def as_input(p, image, label):
    return classes(F.linear(p["u"], p["w"]), label) + image.mean()


def padded_embedding(p, image, label):
    return F.embedding(label[None], p["e"], padding_idx=0).tanh().sum()


@pytest.mark.parametrize(
    "loss", [operator, method_of_a_tensor, grouped, as_input, padded_embedding]
)
def test_other_uses_go_record_by_record(loss):
    params = drawn(**SHAPES, g=(6, 1, 3, 3), u=(192,))
    assert find_layers(loss, params, IMAGES[0], LABELS[0]) == []
    rows = gradient_rows(loss, params, by_layer=True)(IMAGES, LABELS)
    assert torch.equal(rows, gradient_rows(loss, params, by_layer=False)(IMAGES, LABELS))


def test_a_row_depends_on_its_record_alone():
    params = drawn(**SHAPES)
    rows = gradient_rows(group_norm, params, by_layer=True)
    changed = IMAGES.clone()
    changed[2] = 0
    before, after = rows(IMAGES, LABELS), rows(changed, LABELS)
    assert torch.equal(before[[0, 1, 3, 4]], after[[0, 1, 3, 4]])
    assert not torch.equal(before[2], after[2])
