"""DP-MEPF: its features, its moving average, early stopping by a noisy glance, public encoders."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import understudy
from door import LOOSE, a_vault, some_images
from understudy.errors import InvalidSettings, MissingWeights, PlanViolation
from understudy.methods.dp_mepf import DPMEPF, DPMEPFConfig, MovingAverageStep, Perception
from understudy.methods.fitting import GeneratorFit, Schedule, Selection
from understudy.nets.encoders import Encoder
from understudy.nets.generators import ConvGenerator
from understudy.privacy.plan import Budget, PublicFacts
from understudy.progress import Progress
from understudy.report import write_report
from understudy.training.adam import Adam

FACTS = PublicFacts(units=100, class_names=tuple("abc"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
ENCODER = Encoder("resnet18", (1, 8, 8), ":3", width=4)
WEIGHTS = ENCODER.init(torch.Generator().manual_seed(0))
TINY = {
    "encoder": "random", "layers": ":2", "steps": 6, "looks": 2, "batch": 6, "hidden": 8, "code": 3,
    "images_per_class": 2,
}  # fmt: skip


def images(count: int = 12) -> torch.Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def run(ledger, tmp_path, *, budget=LOOSE, **settings):
    vault = a_vault(ledger, some_images(60))
    method = DPMEPF(DPMEPFConfig(**TINY | settings), vault.facts, seed=0)
    curator = vault.open(
        method.plan(), budget, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    return method.run(curator, Progress())


def test_features_keep_the_norm_that_is_declared():
    perception = Perception(ENCODER, 2)
    found = perception.features(WEIGHTS, images())
    for features in (*found.values(), perception.glance(WEIGHTS, images())):
        assert torch.allclose(features.norm(dim=1), torch.ones(12))
    assert found["second"].min() >= 0
    assert found["first"].shape == (12, ENCODER.dimension)
    black = torch.zeros(1, 1, 8, 8)
    dead = {name: torch.zeros_like(weight) for name, weight in WEIGHTS.items()} | {
        "std": torch.ones(3)
    }
    assert perception.features(dead, black)["first"].norm() == 0  # not NaN


def test_second_moments_are_of_activations_as_they_are():
    seen = ENCODER.activations(WEIGHTS, images())
    found = Perception(ENCODER, 2).features(WEIGHTS, images())["second"]
    assert torch.allclose(found, seen.square() / seen.square().norm(dim=1, keepdim=True))


def test_the_average_closes_in_on_the_difference_at_its_rate():
    """With a generator that stands still, k steps leave (1 - rate)^k of the way."""
    network = ConvGenerator((1, 8, 8), 3, code=3, hidden=8)
    step = MovingAverageStep(network, Perception(ENCODER, 1), 3, rate=0.1)
    state = step.start(network.init(torch.Generator().manual_seed(0)))
    codes, labels = torch.randn(9, 3), torch.arange(9) % 3
    target = torch.rand(3, ENCODER.dimension)
    known = {"weights": WEIGHTS, "first": target}
    still = torch.zeros(())
    averages = []
    for _ in range(20):
        state = step(state, codes, labels, known, still)
        averages.append(state[2]["first"])
    gap = averages[0] / 0.1
    for count in (1, 7, 20):
        assert torch.allclose(averages[count - 1], gap * (1 - 0.9**count), rtol=1e-4, atol=1e-6)


def test_adam_on_a_mean_squared_error_of_millions_is_a_moving_average():
    """What the paper trains with Adam, at the size of CIFAR-10: N = 3 031 040 entries."""
    entries, adam = 3_031_040, Adam(betas=(0.5, 0.999), eps=1e-8)
    rate = 1e-4 * 2 / (entries * 1e-8)
    gap = 1e-3 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    trained, moving = {"v": torch.zeros(1000)}, torch.zeros(1000)
    state = adam.start(trained)
    for _ in range(300):
        slopes = {"v": 2 * (trained["v"] - gap) / entries}
        trained, state = adam.step(trained, slopes, state, torch.tensor(1e-4))
        moving = torch.lerp(moving, gap, rate)
    assert rate == pytest.approx(0.0066, abs=1e-4)
    assert (trained["v"] - moving).norm() < 0.1 * moving.norm()


def test_without_noise_it_learns_what_classes_look_like(ledger, tmp_path):
    """Classes that are bright in another third each."""
    data = some_images(90)
    thirds = [slice(0, 3), slice(3, 5), slice(5, 8)]
    data.images[:] = data.images // 8
    for label, third in enumerate(thirds):
        data.images[data.labels == label, :, third] += 200
    vault = a_vault(ledger, data)
    settings = TINY | {"steps": 200, "rate": 1.0, "lr": 0.01, "batch": 30, "images_per_class": 10}
    method = DPMEPF(DPMEPFConfig(**settings), vault.facts, seed=0)
    curator = vault.open(
        method.plan(), Budget(epsilon=math.inf, delta=1e-5), ledger, workspace=tmp_path / "w",
        run_id="r", allow_large_delta=True,
    )  # fmt: skip
    made = method.run(curator, Progress())
    for label in range(3):
        mean = made.images[made.labels == label].mean((0, 1, 3))
        brightness = torch.stack([mean[third].mean() for third in thirds])
        assert brightness.argmax() == label


@dataclass(frozen=True)
class Counting:
    """A step that counts: its parameters are the number of steps made."""

    network: ConvGenerator

    def start(self, params):
        return ({"count": torch.zeros(())},)

    def __call__(self, state, codes, labels, known, lr):
        return ({"count": state[0]["count"] + 1},)


def test_the_generator_with_the_lowest_score_is_kept(ledger, tmp_path):
    vault = a_vault(ledger, some_images(60))
    method = DPMEPF(DPMEPFConfig(**TINY), vault.facts, seed=0)
    curator = vault.open(
        method.plan(), LOOSE, ledger, workspace=tmp_path / "w", run_id="r", allow_large_delta=True
    )
    curator.class_sums(method._embedding(*method._loaded(torch.device("cpu"), Progress())))
    scores = {2: 0.7, 4: 0.2, 6: math.nan, 8: 0.5}
    looks = []

    def score(params):
        looks.append(int(params["count"]))
        return torch.tensor(scores[looks[-1]])

    fit = GeneratorFit(
        step=Counting(ConvGenerator((1, 8, 8), 3)),
        schedule=Schedule(steps=9, batch=3, lr=0.1),
        facts=FACTS,
        seed=0,
        selection=Selection(2, score),
    )
    assert fit.run({}, curator, Progress())["count"] == 4
    assert looks == [2, 4, 6, 8]


def test_stopping_is_decided_by_the_release(ledger, tmp_path):
    """What a score compares with is the noisy answer, which is a block of the plan."""
    method = DPMEPF(DPMEPFConfig(**TINY), FACTS, seed=0)
    (line,) = method.plan()
    by_name = {block.name: block for block in line.blocks}
    assert by_name["glance"].ratio == 10
    assert by_name["glance"].dimension == method._perception.encoder.maps[-1][0]
    perception, weights = method._loaded(torch.device("cpu"), Progress())
    network = method._network()
    params = network.init(torch.Generator().manual_seed(0))
    codes, labels = network.codes(2000, torch.Generator().manual_seed(1)), torch.arange(2000) % 3
    seen = perception.glance(weights, network(params, codes, labels))
    near = torch.stack([seen[labels == label].mean(0) for label in range(3)])
    scores = [
        method._selection(network, perception, {"weights": weights, "glance": glance}).score(params)
        for glance in (near, near + 0.1 * torch.randn_like(near))
    ]
    assert scores[0] < 0.1 * scores[1]


def test_without_labels_the_set_has_none(ledger, tmp_path):
    made = run(ledger, tmp_path, labelled=False)
    assert not made.is_labelled
    assert len(made) == 6
    (line,) = DPMEPF(DPMEPFConfig(**TINY, labelled=False), FACTS, seed=0).plan()
    assert not any(block.by_class for block in line.blocks)
    images, labels = made.generator.sample(4, seed=1)
    assert images.shape == (4, 1, 8, 8)
    assert labels.tolist() == [-1] * 4


def test_an_encoder_that_mixes_records_is_refused(ledger, tmp_path, monkeypatch):
    norm = nn.BatchNorm2d(1)

    def mixing(self, params, images):
        return norm(images).flatten(1).repeat(1, 40)[:, : self.dimension]

    monkeypatch.setattr(Encoder, "activations", mixing)
    with pytest.raises(PlanViolation, match="record by record"):
        run(ledger, tmp_path)


def test_a_certificate_lists_the_encoder(tmp_path):
    file = tmp_path / "mine.safetensors"
    understudy.pretrain("digits", out=file, width=4, epochs=1)
    result = understudy.synthesize(
        "digits", method="dp-mepf", epsilon=10, out=tmp_path / "run", ledger=tmp_path / "ledger",
        settings=TINY | {"encoder": str(file)},
    )  # fmt: skip
    (used,) = result.certificate.content["method"]["public_inputs"]
    assert used["name"] == "mine"
    assert used["trained_on"] == "digits"
    assert understudy.verify(result.directory).files == 4
    page = write_report([tmp_path / "run"], out=tmp_path / "r.html")
    assert "mine (trained on digits)" in page.read_text()


@pytest.mark.parametrize(
    "bad",
    [
        {"moments": 3}, {"looks": 7}, {"rate": 0}, {"look_ratio": -1}, {"steps": 0, "looks": 0},
        {"count_ratio": 1.0, "labelled": False},
    ],
)  # fmt: skip
def test_senseless_settings_are_refused(bad):
    with pytest.raises(InvalidSettings, match=next(iter(bad))):
        DPMEPFConfig(**TINY | bad)


@pytest.mark.parametrize("encoder", ["vgg61", "nothing.safetensors"])
def test_encoders_that_are_not_there_are_refused_before_anything_is_released(encoder):
    with pytest.raises((InvalidSettings, MissingWeights)):
        DPMEPF(DPMEPFConfig(**TINY | {"encoder": encoder}), FACTS, seed=0).plan()
