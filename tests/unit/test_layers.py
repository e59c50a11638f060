"""Rows by layer equal rows by record, for every rule; what has no rule is copied per record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from understudy.nets.convnet import ConvNet
from understudy.privacy.gradients import GradientRows, find_layers

IMAGES = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 1, 2, 3, 0])


def rows_of(loss, params, images=IMAGES, labels=LABELS, *, by_layer=True):
    blocks = GradientRows(loss, by_layer=by_layer)(params, images, labels)
    assert [block.shape[1:] for block in blocks] == [p.shape for p in params.values()]
    return torch.cat([block.flatten(1) for block in blocks], dim=1)


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
    layers, copied = find_layers(loss, params, IMAGES[0], LABELS[0])
    assert layers
    assert not copied
    by_layer, by_record = (rows_of(loss, params, by_layer=how) for how in (True, False))
    assert by_record.abs().max() > 0
    assert torch.allclose(by_layer, by_record, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8)])
def test_the_convnet_goes_by_layer_where_its_weights_are_large(shape):
    network = ConvNet(shape, 4, 6)
    params = network.init(torch.Generator().manual_seed(0))
    images = torch.rand(3, *shape)

    def loss(p, image, label):
        return F.cross_entropy(network(p, image[None]), label[None])

    layers, copied = find_layers(loss, params, images[0], LABELS[0])
    by_layer = {f"conv{b}.weight" for b in range(1, network.depth)} | {"linear.weight"}
    assert {layer.weight for layer in layers} == by_layer
    assert set(copied) == set(params) - by_layer - {"linear.bias"}
    by_layer, by_record = (
        rows_of(loss, params, images, LABELS[:3], by_layer=how) for how in (True, False)
    )
    assert torch.allclose(by_layer, by_record, atol=1e-5)


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


def in_a_list(p, image, label):
    return classes(torch.stack([p["b"], p["d"]]).tanh().sum(0) * image.mean(), label)


@pytest.mark.parametrize(
    "loss", [operator, method_of_a_tensor, grouped, as_input, padded_embedding, in_a_list]
)
def test_other_uses_are_copied_for_each_record(loss):
    params = drawn(**SHAPES, g=(6, 1, 3, 3), u=(192,))
    layers, copied = find_layers(loss, params, IMAGES[0], LABELS[0])
    assert not layers
    assert copied
    by_layer, by_record = (rows_of(loss, params, by_layer=how) for how in (True, False))
    assert by_record.abs().max() > 0
    assert torch.allclose(by_layer, by_record, atol=1e-6)


def used_in_both_ways(p, image, label):
    return classes(F.linear(image.flatten(), p["w"], p["b"]), label) + p["w"].square().sum()


def cast_to_another_type(p, image, label):
    narrow = F.linear(image.flatten().bfloat16(), p["w"].to(torch.bfloat16))
    return classes(narrow.float() + p["b"].to(torch.float64).float(), label)


@pytest.mark.parametrize("loss", [used_in_both_ways, cast_to_another_type])
def test_a_parameter_may_be_used_by_layer_and_otherwise(loss):
    params = drawn(**SHAPES)
    layers, copied = find_layers(loss, params, IMAGES[0], LABELS[0])
    assert layers
    assert copied
    by_layer, by_record = (rows_of(loss, params, by_layer=how) for how in (True, False))
    assert torch.allclose(by_layer, by_record, atol=1e-6, rtol=1e-2)


def test_a_row_depends_on_its_record_alone():
    params = drawn(**SHAPES)
    changed = IMAGES.clone()
    changed[2] = 0
    before, after = rows_of(group_norm, params), rows_of(group_norm, params, changed)
    assert torch.equal(before[[0, 1, 3, 4]], after[[0, 1, 3, 4]])
    assert not torch.equal(before[2], after[2])
