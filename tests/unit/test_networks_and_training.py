"""The ConvNet against its torch twin, training, augmentation, evaluation, pictures."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from static import static_engine
from understudy.errors import InvalidData
from understudy.nets.convnet import ConvNet
from understudy.nets.params import parameter_count
from understudy.seeds import public_generator
from understudy.synthetic import SyntheticSet
from understudy.training.augmentation import CropScaleOrRotate, Shift, augmented
from understudy.training.engine import Engine
from understudy.training.sgd import SGD, fit, mean_loss
from understudy.training.siamese import KINDS, Siamese


def twin(width: int) -> nn.Sequential:
    """The paper's ConvNet for 1 x 28 x 28, written with torch modules."""
    layers: list[nn.Module] = []
    for channels, padding in ((1, 3), (width, 1), (width, 1)):
        layers += [
            nn.Conv2d(channels, width, 3, padding=padding),
            nn.GroupNorm(width, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 16, 10))


def shared(module: nn.Sequential) -> list[nn.Parameter]:
    """The twin's parameters, without the biases that its norms take out again."""
    unused = [layer.bias for layer in module if isinstance(layer, nn.Conv2d)]
    return [p for p in module.parameters() if all(p is not bias for bias in unused)]


def load(module: nn.Sequential, params) -> None:
    with torch.no_grad():
        for theirs, ours in zip(shared(module), params.values(), strict=True):
            theirs.copy_(ours)


def test_convnet_is_the_papers():
    network, module = ConvNet((1, 28, 28), 10, width=8), twin(8)
    params = network.init(torch.Generator().manual_seed(0))
    params = {n: p + 0.1 * torch.randn(p.shape) if p.ndim == 1 else p for n, p in params.items()}
    load(module, params)
    images = torch.randn(5, 1, 28, 28)
    assert torch.allclose(network(params, images), module(images), atol=1e-5)
    full = ConvNet((1, 28, 28), 10).init(torch.Generator())
    assert parameter_count(full) == sum(p.numel() for p in shared(twin(128))) == 317_322


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 8, 8), (3, 33, 20), (1, 64, 64)])
def test_convnet_is_the_textbooks_at_any_size(shape):
    """Against conv, group norm, ReLU and pool one after the other, in float64."""
    network = ConvNet(shape, 4, width=5)
    drawn = network.init(torch.Generator().manual_seed(0))
    params = {n: p.double() + 0.1 * torch.randn(p.shape).double() for n, p in drawn.items()}
    images = torch.randn(3, *shape, dtype=torch.float64)
    rows, columns = (a - b for a, b in zip(network.padded, shape[1:], strict=True))
    hidden = nn.functional.pad(
        images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    )
    for block in range(network.depth):
        hidden = nn.functional.conv2d(hidden, params[f"conv{block}.weight"], padding=1)
        hidden = nn.functional.group_norm(
            hidden, 5, params[f"norm{block}.weight"], params[f"norm{block}.bias"]
        )
        hidden = nn.functional.avg_pool2d(hidden.relu(), 2)
    expected = hidden.flatten(1) @ params["linear.weight"].T + params["linear.bias"]
    assert torch.allclose(network(params, images), expected, atol=1e-12)


def test_half_precision_maps_change_little():
    network = ConvNet((1, 28, 28), 10, width=16)
    params, images = network.init(torch.Generator().manual_seed(0)), torch.randn(8, 1, 28, 28)
    fine, coarse = network(params, images), replace(network, maps=torch.bfloat16)(params, images)
    assert coarse.dtype == torch.float32
    assert (fine - coarse).abs().max() < 0.02 * fine.abs().max()


def test_initialisation_follows_torchs_default():
    params = ConvNet((1, 28, 28), 10).init(torch.Generator().manual_seed(0))
    for name, module in zip(
        ("conv0", "conv1", "linear"), (twin(128)[0], twin(128)[4], twin(128)[-1]), strict=True
    ):
        for part in ("weight", "bias") if name == "linear" else ("weight",):
            ours, torchs = params[f"{name}.{part}"], getattr(module, part)
            assert ours.shape == torchs.shape
            assert ours.abs().max() <= 1 / np.sqrt(module.weight[0].numel())
            if ours.numel() > 100:
                assert ours.std().item() == pytest.approx(torchs.std().item(), rel=0.3)


@pytest.mark.parametrize(
    ("shape", "depth"),
    [((1, 8, 8), 1), ((1, 16, 16), 2), ((1, 28, 28), 3), ((3, 32, 32), 3), ((3, 64, 64), 4),
     ((3, 28, 40), 3), ((1, 4, 4), 1), ((1, 20, 13), 2)],
)  # fmt: skip
@pytest.mark.parametrize("classes", [2, 100])
def test_depth_follows_the_size(shape, depth, classes):
    network = ConvNet(shape, classes, width=4)
    assert network.depth == depth
    params = network.init(torch.Generator())
    assert network(params, torch.randn(3, *shape)).shape == (3, classes)


def test_fit_equals_torchs_sgd():
    network, module = ConvNet((1, 28, 28), 10, width=4), twin(4)
    params = network.init(torch.Generator().manual_seed(0))
    load(module, params)
    images, labels = torch.randn(20, 1, 28, 28), torch.arange(20) % 10
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimiser, 3, 0.1)
    for _ in range(6):
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        optimiser.step()
        schedule.step()
    sgd = SGD(lr=0.1, epochs=6, momentum=0.9, weight_decay=5e-4, drop_at=(3,))
    trained = fit(network, params, images, labels, sgd=sgd, generator=torch.Generator())
    for ours, torchs in zip(trained.values(), shared(module), strict=True):
        assert torch.allclose(ours, torchs, atol=1e-4)


def test_fit_uses_every_image_once_per_epoch():
    """With more images than a batch, an epoch is a shuffled pass over all of them."""
    seen = []

    class Counting(ConvNet):
        def prepare(self, images):
            seen.append(len(images))
            return super().prepare(images)

    network = Counting((1, 8, 8), 2, width=2)
    images, labels = torch.randn(500, 1, 8, 8), torch.arange(500) % 2
    params = network.init(torch.Generator())
    sgd = SGD(lr=0.1, epochs=3)
    trained = fit(network, params, images, labels, sgd=sgd, generator=torch.Generator())
    assert seen == [256, 244] * 3
    before, after = (mean_loss(network, p, images, labels) for p in (params, trained))
    assert after < before


CHANGES = [None, CropScaleOrRotate(), Shift(mirror=True), Siamese(KINDS)]


@pytest.mark.parametrize("augment", CHANGES, ids=lambda change: type(change).__name__)
def test_training_in_one_program_is_training_step_by_step(monkeypatch, augment):
    """A step that picks, changes and prepares its images is compiled once for each batch size."""
    network, engine = ConvNet((1, 8, 8), 2, width=2), static_engine(monkeypatch)
    images, labels = torch.randn(50, 1, 8, 8), torch.arange(50) % 2
    params = network.init(torch.Generator().manual_seed(1))
    sgd = SGD(lr=0.1, epochs=3, batch=20, momentum=0.9, drop_at=(2,))

    def trained(engine):
        generator = torch.Generator().manual_seed(2)
        return fit(
            network, params, images, labels, sgd=sgd, generator=generator, augment=augment,
            engine=engine,
        )  # fmt: skip

    plain = Engine(compile=False)
    expected = trained(plain)
    found = trained(engine)
    assert len(engine.compiled) == 2
    assert engine.said == []
    others = [found]
    for ahead in (2, 3):  # with a rest of the nine steps, and without
        monkeypatch.setattr("understudy.training.sgd.AHEAD", ahead)
        others.append(trained(plain))
    for other in others:
        assert all(torch.allclose(other[name], expected[name], atol=1e-6) for name in expected)


def test_progress_counts_epochs_that_are_trained_not_drawn():
    """Chances of many steps are drawn ahead; what is shown to the user must not run ahead."""
    events = []

    class Logging(ConvNet):
        def prepare(self, images):
            events.append("step")
            return super().prepare(images)

    def epochs(numbers):
        for number in numbers:
            events.append(number)
            yield number

    network = Logging((1, 8, 8), 2, width=2)
    images, labels = torch.randn(30, 1, 8, 8), torch.arange(30) % 2
    fit(
        network, network.init(torch.Generator()), images, labels,
        sgd=SGD(lr=0.1, epochs=3, batch=20), generator=torch.Generator(), epochs=epochs,
    )  # fmt: skip
    assert events == [0, "step", "step", 1, "step", "step", 2, "step", "step"]


def test_augmentation_crops_scales_or_rotates_each_image():
    images = torch.rand(300, 1, 28, 28) + 1
    change = CropScaleOrRotate()
    changed = augmented(images, change, torch.Generator().manual_seed(0))
    assert changed.shape == images.shape
    assert (changed != images).flatten(1).any(1).float().mean() > 0.95
    mean = images.mean()
    # A crop moves whole pixels: it repeats the image's values, and else has the mean's.
    cropped = [
        image
        for image, source in zip(changed, images, strict=True)
        if bool((torch.isin(image, source) | torch.isclose(image, mean)).all())
    ]
    scaled = changed[(changed == 0).flatten(1).any(1)]  # what comes in from outside is zero
    assert 60 < len(cropped) < 140
    assert 60 < len(scaled) < 140
    for image in cropped:
        rows, columns = (int(torch.isclose(image[0], mean).all(side).sum()) for side in (1, 0))
        assert max(rows, columns) <= 4
    centre = augmented(torch.full((50, 3, 8, 8), 0.25), change, torch.Generator())[..., 3:5, 3:5]
    assert torch.allclose(centre, torch.full_like(centre, 0.25), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_set_survives_its_file_and_its_picture(tmp_path, channels):
    images = torch.rand(6, channels, 8, 8)
    made = SyntheticSet(images, torch.tensor([0, 0, 0, 0, 1, 1]), ("cat", "two words"))
    path = tmp_path / "set.safetensors"
    path.write_bytes(made.to_bytes())
    back = SyntheticSet.load(path)
    assert torch.equal(back.images, images)
    assert back.class_names == ("cat", "two words")
    picture = Image.open(io.BytesIO(made.contact_sheet(per_class=3)))
    assert picture.size == (3 * 60, 2 * 60)
    assert picture.mode == ("L" if channels == 1 else "RGB")
    corner = np.asarray(picture.convert("L"))[5, 5] / 255
    shade = images[0, :, 0, 0].numpy() @ ([1] if channels == 1 else [0.299, 0.587, 0.114])
    assert corner == pytest.approx(float(shade), abs=0.01)


def test_a_picture_shows_images_from_all_over_a_set():
    shades = torch.arange(9) / 8
    made = SyntheticSet(shades.view(9, 1, 1, 1).expand(9, 1, 8, 8), torch.zeros(9).long(), ("cat",))
    picture = np.asarray(Image.open(io.BytesIO(made.contact_sheet(per_class=3))))
    seen = picture.reshape(60, 3, 60)[30, :, 30] / 255
    assert seen.tolist() == pytest.approx([0, 3 / 8, 6 / 8], abs=0.01)


def test_a_set_without_labels_has_its_picture_too():
    made = SyntheticSet(torch.zeros(7, 1, 8, 8), torch.full((7,), -1), ("cat", "dog"))
    picture = np.asarray(Image.open(io.BytesIO(made.contact_sheet(per_class=3))))
    assert picture.shape == (3 * 60, 3 * 60)
    tiles = picture.reshape(3, 60, 3, 60)[:, 30, :, 30]
    assert (tiles == 0).sum() == 7  # the others are blank


def test_a_garbled_set_is_refused(tmp_path):
    path = tmp_path / "set.safetensors"
    for content in (b"", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(InvalidData):
            SyntheticSet.load(path)
    with pytest.raises(InvalidData):
        SyntheticSet(torch.zeros(3, 8, 8), torch.zeros(3), ("a",))


def test_public_generators_depend_on_seed_and_purpose():
    draws = {
        key: torch.rand(3, generator=public_generator(*key)).tolist()
        for key in ((0, "a"), (1, "a"), (0, "b"), (0, "a", 1))
    }
    assert len({tuple(d) for d in draws.values()}) == 4
    assert draws[0, "a"] == torch.rand(3, generator=public_generator(0, "a")).tolist()
