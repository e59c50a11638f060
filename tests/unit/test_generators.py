"""Generators: the papers' sizes, classes that matter, statistics, tracing, and files."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from static import static_engine
from understudy.errors import InvalidData, InvalidSettings
from understudy.nets.generators import (
    GENERATORS,
    ConvGenerator,
    DCGANGenerator,
    DenseGenerator,
    GeneratorNetwork,
    ResnetGenerator,
)
from understudy.nets.modules import Doubling
from understudy.nets.params import parameter_count
from understudy.nets.released import Generator, divided
from understudy.training.adam import Adam
from understudy.training.engine import Engine


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("kernel", "padding", "more"), [(8, 0, 0), (5, 2, 1), (4, 1, 0), (3, 1, 1), (2, 0, 0)]
)
def test_doubling_by_a_convolution_is_the_transposed_one(kernel, padding, more):
    torch.manual_seed(0)
    theirs = nn.ConvTranspose2d(3, 2, kernel, 2, padding, output_padding=more).double()
    ours = Doubling(3, 2, kernel, padding=padding, more=more).double()
    ours.load_state_dict(theirs.state_dict())
    results = []
    for layer in (ours, theirs):
        maps = torch.randn(4, 3, 5, 6, generator=seeded(), dtype=torch.float64, requires_grad=True)
        images = layer(maps)
        slopes = torch.autograd.grad(images.square().sum(), [maps, *layer.parameters()])
        results.append([images, *slopes])
    for ours_, theirs_ in zip(*results, strict=True):
        assert torch.allclose(ours_, theirs_, atol=1e-12)


def a_network(name, shape=(1, 8, 8), classes=3) -> GeneratorNetwork:
    small = {
        "class-norm": {"width": 4},
        "conv": {"hidden": 20},
        "dcgan": {"width": 4},
        "deconv": {"hidden": 20, "channels": 4},
        "dense": {"hidden": (20, 30)},
        "pixel-norm": {"width": 4},
        "resnet": {"width": 4},
        "transposed": {"width": 4},
    }
    return GENERATORS[name](shape, classes, **small[name])


def a_generator(name="conv", *, shares=None, **described) -> Generator:
    network = a_network(name, **described)
    params = network.init(seeded())
    return Generator(network, params, network.statistics(params, seeded(1), batches=2), shares)


every = pytest.mark.parametrize("name", GENERATORS)
with_batch_norms = pytest.mark.parametrize(
    "name", [n for n in GENERATORS if n not in ("class-norm", "dcgan", "pixel-norm")]
)


@pytest.mark.parametrize(
    ("network", "size"),
    [
        (ConvGenerator((1, 28, 28), 10), 166_161),
        (ConvGenerator((1, 28, 28), 10, hidden=500), 406_761),
        (ConvGenerator((1, 28, 28), 10, code=90, hidden=500), 449_261),
        (DCGANGenerator((1, 28, 28), 10), 1_114_305),
        (DenseGenerator((1, 28, 28), 10), 653_284),
        (ResnetGenerator((3, 32, 32), 10), 3_319_555),
        (ResnetGenerator((3, 64, 64), 0, code=100), 11_745_539),
    ],
)
def test_they_have_the_papers_sizes(network, size):
    assert parameter_count(network.init(seeded())) == size


@every
@pytest.mark.parametrize("classes", [0, 3])
@pytest.mark.parametrize(
    "shape",
    [(1, 8, 8), (3, 8, 8), (1, 28, 28), (3, 32, 32), (1, 15, 9), (3, 16, 30), (1, 64, 64)],
    ids=str,
)
def test_they_make_images_of_any_shape(name, shape, classes):
    network = a_network(name, shape, classes)
    params = network.init(seeded())
    images = network(params, network.codes(4, seeded(1)), torch.tensor([0, 1, 2, 0]))
    assert images.shape == (4, *shape)
    assert images.dtype == torch.float32
    assert 0 <= images.min() < images.max() <= 1


def test_what_is_too_large_is_cropped_in_the_middle():
    large, small = (ConvGenerator((1, side, side), 2) for side in (12, 9))
    params, codes, labels = large.init(seeded()), large.codes(3, seeded(1)), torch.tensor([0, 1, 1])
    whole = large(params, codes, labels)
    assert torch.equal(small(params, codes, labels), whole[..., 1:10, 1:10])


def test_the_residual_generator_starts_as_the_paper_says():
    params = ResnetGenerator((3, 32, 32), 10).init(seeded())
    weight = params["2.body.3.weight"]
    assert weight.shape == (256, 512, 3, 3)
    bound = (6 / (9 * (256 + 512))) ** 0.5
    assert 0.99 * bound < weight.abs().max() <= bound


@every
def test_class_and_code_decide_the_image(name):
    network = a_network(name)
    params, codes = network.init(seeded()), network.codes(6, seeded(1))
    statistics = network.statistics(params, seeded(2), batches=2)

    def draw(codes, labels):
        return network(params, codes, torch.tensor(labels), statistics=statistics)

    first = draw(codes, [0] * 6)
    assert (first - draw(codes, [1] * 6)).abs().amax((1, 2, 3)).min() > 1e-3
    assert (first[0] - first[1]).abs().max() > 1e-3
    assert torch.equal(first, draw(codes, [0] * 6))
    free = replace(network, classes=0)
    params = free.init(seeded())
    assert torch.equal(free(params, codes, torch.zeros(6)), free(params, codes, None))


@with_batch_norms
def test_statistics_make_images_independent_of_their_batch(name):
    made, labels = a_generator(name), torch.arange(40) % 3
    codes = made.network.codes(40, seeded(5))
    together = made.network(made.params, codes, labels, statistics=made.statistics)
    alone = made.network(made.params, codes[:1], labels[:1], statistics=made.statistics)
    assert torch.allclose(together[:1], alone, atol=1e-5)
    in_training = made.network(made.params, codes, labels)
    others = made.network(made.params, codes[:20], labels[:20])
    assert torch.allclose(in_training[:20], others, atol=1e-4) == (name == "pixel-norm")


@with_batch_norms
def test_statistics_are_those_of_training(name):
    """With thousands of codes, a large batch in training looks as it does with statistics."""
    network = a_network(name)
    params = network.init(seeded())
    statistics = network.statistics(params, seeded(1))
    assert all(values.isfinite().all() for values in statistics.values())
    assert bool(statistics) == (name != "pixel-norm")  # its norms know no batch
    codes, labels = network.codes(2000, seeded(2)), torch.arange(2000) % 3
    wrong = {part: values * 1.3 + 0.1 for part, values in statistics.items()}
    with torch.no_grad():
        expected = network(params, codes, labels)
        right, off = (
            (network(params, codes, labels, statistics=one) - expected).abs().mean()
            for one in (statistics, wrong)
        )
    assert right < 0.1 * expected.std()
    assert off > 0.1 * expected.std() or not statistics
    again = network.statistics(params, seeded(1))
    assert all(torch.equal(again[part], values) for part, values in statistics.items())
    assert not any(values.requires_grad for values in statistics.values())


@dataclass(frozen=True)
class Step:
    """Bring the mean image of each class to a target."""

    network: GeneratorNetwork
    adam = Adam()

    def __call__(self, state, codes, labels, target, lr):
        params, moments = state
        leaves = {name: weight.detach().requires_grad_() for name, weight in params.items()}
        images = self.network(leaves, codes, labels)
        loss = (images - target[labels]).square().sum()
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        return self.adam.step(params, dict(zip(leaves, slopes, strict=True)), moments, lr)


def training(network, count=30):
    params = network.init(seeded())
    codes, labels = network.codes(count, seeded(1)), torch.arange(count) % 3
    target = torch.rand(3, *network.shape, generator=seeded(2))
    return (params, Adam().start(params)), codes, labels, target, torch.tensor(0.01)


@every
def test_a_training_step_can_be_traced(name):
    step, args = Step(a_network(name)), training(a_network(name))
    leaves, structure = pytree.tree_flatten(args)

    def flat(*leaves):
        return pytree.tree_leaves(step(*pytree.tree_unflatten(leaves, structure)))

    traced = make_fx(flat)(*leaves)
    state, _, labels, target, lr = args
    codes = step.network.codes(len(labels), seeded(9))  # not those that were traced
    other = pytree.tree_leaves((state, codes, labels.flip(0), target, lr))
    for ours, theirs in zip(traced(*other), flat(*other), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_training_step_runs_in_the_engine(monkeypatch):
    step, (state, *rest) = Step(a_network("conv")), training(a_network("conv"))
    engine = static_engine(monkeypatch)
    ours, theirs = (one.run(step, state, *rest, times=2) for one in (engine, Engine()))
    assert engine.said == []
    # Not parameters: a bias before a norm has no slope but rounding, which Adam makes large.
    ours, theirs = (step.network(params, *rest[:2]) for params, _ in (ours, theirs))
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert not torch.allclose(ours, step.network(state[0], *rest[:2]), atol=1e-2)


@every
def test_they_learn_their_classes(name):
    network = a_network(name)
    state, _, labels, target, lr = training(network, count=60)
    step, generator = Step(network), seeded(5)
    for _ in range(150):
        state = step(state, network.codes(60, generator), labels, target, lr)
    statistics = network.statistics(state[0], seeded(3), batches=4)
    images = network(state[0], network.codes(60, seeded(4)), labels, statistics=statistics)
    distances = (images[:, None] - target[None]).square().sum((2, 3, 4))
    assert (distances.argmin(1) == labels).float().mean() > 0.9


def test_threads_do_not_see_each_others_parameters():
    network = a_network("conv")
    drawn = [network.init(seeded(seed)) for seed in range(4)]
    codes, labels, wrong = network.codes(8, seeded()), torch.arange(8) % 3, []
    kept = [network.statistics(params, seeded(), batches=1) for params in drawn]
    expected = [
        network(params, codes, labels, statistics=statistics)
        for params, statistics in zip(drawn, kept, strict=True)
    ]

    def job(number):
        for _ in range(20):
            made = network(drawn[number], codes, labels, statistics=kept[number])
            again = network.statistics(drawn[number], seeded(), batches=1, batch=50)
            if not torch.equal(made, expected[number]) or not again:
                wrong.append(number)

    threads = [threading.Thread(target=job, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def counts(labels):
    return torch.bincount(labels, minlength=3).tolist()


def test_samples_are_whole_bytes_and_follow_the_seed():
    made = a_generator()
    images, labels = made.sample(301, seed=3)  # more than is drawn at once
    assert images.shape == (301, 1, 8, 8)
    assert labels.dtype == torch.int64
    assert torch.equal(images, torch.round(images * 255) / 255)
    assert not images.requires_grad
    assert torch.equal(images, made.sample(301, seed=3)[0])
    assert not torch.equal(images, made.sample(301, seed=4)[0])
    assert len(images.flatten(1).unique(dim=0)) > 200


def test_labels_are_balanced_or_follow_the_shares():
    assert counts(a_generator().sample(11, seed=0)[1]) == [4, 4, 3]
    assert counts(a_generator().sample(seed=0, per_class=2)[1]) == [2, 2, 2]
    shared = a_generator(shares=(0.5, 0.3, 0.2))
    assert counts(shared.sample(11, seed=0)[1]) == [6, 3, 2]  # 5.5, 3.3, 2.2
    assert counts(shared.sample(seed=0, per_class=2)[1]) == [2, 2, 2]
    images, labels = a_generator(classes=0).sample(5, seed=0)
    assert images.shape == (5, 1, 8, 8)
    assert labels.tolist() == [-1] * 5


@pytest.mark.parametrize("count", [1, 7, 48, 49, 50, 60_000])
@pytest.mark.parametrize("classes", [1, 3, 7, 10, 49])
def test_equal_shares_are_divided_evenly(count, classes):
    found = divided(count, [1 / classes] * classes)
    assert found == [count // classes + (place < count % classes) for place in range(classes)]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "expected a number of images"),
        ({"count": 3, "per_class": 1}, "and not both"),
        ({"count": 0}, "0 images were asked for"),
        ({"per_class": -1}, "-1 images were asked for"),
    ],
)
def test_impossible_numbers_are_refused(asked, message):
    with pytest.raises(InvalidSettings, match=message):
        a_generator().sample(seed=0, **asked)


def test_without_classes_none_can_be_counted():
    with pytest.raises(InvalidSettings, match="no classes"):
        a_generator(classes=0).sample(seed=0, per_class=2)


@pytest.mark.parametrize(
    "shares", [(0.5, 0.5), (0.5, 0.6, -0.1), (0.1, 0.1, 0.1), (float("nan"), 0.5, 0.5)]
)
def test_shares_must_be_probabilities(shares):
    with pytest.raises(InvalidData, match="shares"):
        a_generator(shares=shares)


def test_grain_is_noise_on_pixels_and_stays_with_the_file():
    smooth = a_generator()
    grainy = Generator.from_bytes(replace(smooth, grain=0.1).to_bytes())
    images, labels = grainy.sample(301, seed=3)
    assert torch.equal(labels, smooth.sample(301, seed=3)[1])
    assert torch.equal(images, grainy.sample(301, seed=3)[0])
    added = images - smooth.sample(301, seed=3)[0]
    free = (images > 0) & (images < 1)  # not cut off at black or white
    assert free.float().mean() > 0.9
    assert added[free].std() == pytest.approx(0.1, rel=0.1)
    assert abs(added[free].mean()) < 0.01
    assert not torch.equal(added[0], added[250])  # of another part
    assert Generator.from_bytes(edited(smooth.to_bytes(), grain=...)).grain == 0  # an older file
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InvalidData, match="grain"):
            replace(smooth, grain=wrong)


@every
@pytest.mark.parametrize("shares", [None, (0.5, 0.3, 0.2)])
def test_a_generator_survives_its_file(name, shares, tmp_path):
    made = a_generator(name, shares=shares)
    path = tmp_path / "generator.safetensors"
    path.write_bytes(made.to_bytes())
    back = Generator.load(path)
    assert back.network == made.network
    assert back.shares == shares
    assert torch.equal(back.sample(20, seed=1)[0], made.sample(20, seed=1)[0])
    assert back.to_bytes() == made.to_bytes()


def edited(content, *, without=None, **changes):
    length = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["generator"])
    tensors = {name: values for name, values in load(content).items() if name != without}
    about = {name: value for name, value in (about | changes).items() if value is not ...}
    return save(tensors, metadata={"generator": json.dumps(about)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2.*reads 1; use a newer version"),
        ({"format": 0}, "format 0"),
        ({"format": "x"}, "not the file of a generator"),
        ({"network": "flow"}, "'flow'.*class-norm, conv, .*, diffusion, gallery, rehearsed"),
        ({"config": {"shape": [1, 8, 8]}}, "classes"),
        ({"config": {"shape": [1, 8, 8], "classes": 3, "hidden": 21}}, "params/0.bias"),
        ({"config": {"shape": "abc", "classes": 3}}, "not the file of a generator"),
        ({"config": [1]}, "not the file of a generator"),
        ({"without": "statistics/1.running_var"}, "statistics/1.running_var is missing"),
        ({"shares": ["a", "b", "c"]}, "not the file of a generator"),
        ({"grain": "fine"}, "not the file of a generator"),
        ({"grain": -1}, "grain is -1"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(changes, message):
    content = a_generator().to_bytes()
    assert Generator.from_bytes(edited(content)).network == a_network("conv")
    with pytest.raises(InvalidData, match=message) as caught:
        Generator.from_bytes(edited(content, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"x" * 100, save({"a": torch.zeros(1)})])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match="not the file of a generator"):
        Generator.load(path)
    with pytest.raises(InvalidData, match="nowhere"):
        Generator.load(tmp_path / "nowhere")
