"""Encoders: record by record, differentiable, of the sizes that papers name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from understudy.errors import InvalidData, InvalidSettings
from understudy.nets import encoders, modules
from understudy.nets.encoders import ARCHITECTURES, Encoder, MobileNetV2, ResNet18, StoredNorm, Vgg

NAMES = list(ARCHITECTURES)


def made(name: str, shape: tuple[int, int, int], **options) -> tuple[Encoder, dict[str, Tensor]]:
    encoder = Encoder(name, shape, width=4, **options)
    params = encoder.init(torch.Generator().manual_seed(1))
    draw = torch.Generator().manual_seed(2)
    for part, weight in params.items():  # statistics that are not trivial
        if part.endswith(("running_mean", "bias")):
            params[part] = 0.3 * torch.randn(weight.shape, generator=draw)
        elif part.endswith("running_var"):
            params[part] = 0.5 + torch.rand(weight.shape, generator=draw)
    return encoder, params


def pictures(count: int, shape: tuple[int, int, int]) -> Tensor:
    return torch.rand((count, *shape), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("name", "shape", "dimension"),
    [
        ("vgg19", (3, 32, 32), 303_104),
        ("vgg19", (3, 64, 64), 1_212_416),
        ("vgg16", (3, 32, 32), 276_480),
        ("resnet18", (1, 28, 28), 425_984),
        ("mobilenetv2", (3, 224, 224), 973_728),
        ("vgg16", (1, 8, 8), 18_432),  # the fourth pooling would leave nothing
    ],
)
def test_dimensions(name, shape, dimension):
    assert Encoder(name, shape).dimension == dimension


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 20)])
def test_the_dimension_is_inferred_without_images(name, shape):
    encoder, params = made(name, shape)
    features = encoder.activations(params, pictures(2, shape))
    assert features.shape == (2, encoder.dimension)
    assert features.dtype == torch.float32
    assert len(encoder.sizes) == ARCHITECTURES[name].layers
    assert bool(torch.isfinite(features).all())
    assert bool((features >= 0).all()) == (name != "mobilenetv2")


@pytest.mark.parametrize("name", NAMES)
def test_each_record_is_by_itself(name):
    shape = (1, 16, 16)
    encoder, params = made(name, shape)
    images = pictures(4, shape).double()
    together = encoder.activations(params, images)
    alone = torch.vmap(lambda image: encoder.activations(params, image[None])[0])(images)
    torch.testing.assert_close(together, alone)
    others = images.clone()
    others[1:] = 1 - 100 * others[1:]
    torch.testing.assert_close(encoder.activations(params, others)[0], together[0])


@pytest.mark.parametrize("name", NAMES)
def test_images_learn_through_it_and_it_can_be_traced(name):
    shape = (3, 8, 8)
    encoder, params = made(name, shape, layers=":7")
    images = pictures(2, shape)

    def slope(images: Tensor) -> Tensor:
        return torch.func.grad(lambda x: encoder.activations(params, x).square().mean())(images)

    found = slope(images)
    assert bool((found.flatten(1).norm(dim=1) > 0).all())
    torch.testing.assert_close(make_fx(slope)(images)(images), found)
    wide = images.double()
    step = 1e-6 * torch.ones_like(wide)
    ahead, behind = (
        encoder.activations(params, wide + sign * step).square().mean() for sign in (1, -1)
    )
    expected = (slope(wide) * step).sum() * 2
    torch.testing.assert_close(ahead - behind, expected, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet18"])
def test_norms_are_batch_norm_in_evaluation(name, monkeypatch):
    """The same network with torch's own BatchNorm2d, and the same parameters."""
    shape = (3, 16, 16)
    encoder, params = made(name, shape)
    monkeypatch.setattr(encoders, "StoredNorm", nn.BatchNorm2d)
    reference = MobileNetV2() if name == "mobilenetv2" else ResNet18(4, nn.BatchNorm2d)
    missing = reference.load_state_dict(params, strict=False).missing_keys
    assert all(key.endswith("num_batches_tracked") for key in missing)
    assert sum(isinstance(part, nn.BatchNorm2d) for part in reference.modules()) > 15
    images = pictures(3, shape)
    with torch.no_grad():
        layers = reference.eval()(images, ARCHITECTURES[name].layers, None)
    expected = torch.cat([layer.flatten(1) for layer in layers], dim=1)
    torch.testing.assert_close(encoder.activations(params, images), expected, rtol=1e-4, atol=1e-4)
    assert all(not isinstance(part, StoredNorm) for part in reference.modules())


def test_vgg_is_its_plain_sequence():
    shape = (3, 32, 32)
    encoder, params = made("vgg16", shape)
    plain = Vgg((2, 2, 3, 3, 3))
    plain.load_state_dict(params)
    images = pictures(2, shape)
    last = plain.features((images - 0.5) / 0.5)
    found = encoder.activations(params, images)
    torch.testing.assert_close(found[:, -encoder.sizes[-1] :], last.flatten(1))
    places = [n for n, part in enumerate(plain.features) if isinstance(part, nn.Conv2d)]
    assert places == [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]  # torchvision's names


def test_normalisation_is_inside_and_grey_is_repeated():
    encoder, params = made("vgg16", (3, 8, 8))
    grey, _ = made("vgg16", (1, 8, 8))
    images = pictures(2, (1, 8, 8))
    colour = images.repeat(1, 3, 1, 1)
    features = encoder.activations(params, colour)
    torch.testing.assert_close(grey.activations(params, images), features)
    moved = params | {"mean": params["mean"] * 2, "std": params["std"] * 2}
    torch.testing.assert_close(encoder.activations(moved, colour * 2), features)


@pytest.mark.parametrize(
    ("layers", "places"), [(":", range(13)), (":2", range(2)), ("-3:", range(10, 13)),
                           ("4:6", range(4, 6)), ("-3:-1", range(10, 12))],
)  # fmt: skip
def test_layers_are_chosen(layers, places):
    whole, params = made("vgg16", (1, 8, 8))
    some = Encoder("vgg16", (1, 8, 8), layers)
    images = pictures(2, (1, 8, 8))
    parts = whole.activations(params, images).split(whole.sizes, dim=1)
    expected = torch.cat([parts[place] for place in places], dim=1)
    assert some.dimension == expected.shape[1]
    torch.testing.assert_close(some.activations(params, images), expected)


@pytest.mark.parametrize("name", NAMES)
def test_precision_is_of_the_maps_alone(name):
    encoder, params = made(name, (1, 16, 16))
    rough = Encoder(name, (1, 16, 16), precision=torch.bfloat16, width=4)
    images = pictures(3, (1, 16, 16))
    fine, found = (e.activations(params, images) for e in (encoder, rough))
    assert found.dtype == torch.float32
    distance = ((found - fine).norm() / fine.norm()).item()
    assert 1e-4 < distance < 0.05


def test_a_description_is_a_value():
    assert Encoder("vgg16", (1, 8, 8)) == Encoder("vgg16", (1, 8, 8), ":")
    assert len({Encoder("vgg16", (1, 8, 8)), Encoder("vgg16", (1, 8, 8), ":2")}) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("vgg11", (1, 8, 8)), "no encoder 'vgg11', expected one of vgg16"),
        (("vgg16", (2, 8, 8)), r"shape \(2, 8, 8\)"),
        (("vgg16", (1, 8, 8), "last 3"), "layers is 'last 3', expected a slice"),
        (("vgg16", (1, 8, 8), "20:"), "chooses none of the 13 layers"),
        (("resnet18", (1, 8, 8), ":", None, 0), "width is 0"),
    ],
)
def test_bad_descriptions(arguments, said):
    with pytest.raises(InvalidSettings, match=said):
        Encoder(*arguments)


def test_images_of_another_shape_are_refused():
    encoder, params = made("vgg16", (1, 8, 8))
    with pytest.raises(InvalidData, match=r"shape \(1, 9, 9\)"):
        encoder.activations(params, pictures(1, (1, 9, 9)))


def test_missing_parameters_are_an_error():
    encoder, params = made("vgg16", (1, 8, 8))
    del params["features.0.bias"]
    with pytest.raises(RuntimeError, match=r"features\.0\.bias"):
        encoder.activations(params, pictures(1, (1, 8, 8)))


def test_a_first_use_under_vmap_draws_nothing():
    """The module may be built there: nothing random may happen."""
    encoder = Encoder("resnet18", (1, 8, 8), ":2", width=3)
    params = encoder.init(torch.Generator().manual_seed(0))
    modules._skeleton.cache_clear()
    torch.vmap(lambda image: encoder.activations(params, image[None])[0])(torch.rand(2, 1, 8, 8))
