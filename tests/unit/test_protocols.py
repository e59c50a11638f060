"""Training on a synthetic set, testing on real images: protocols, models, options."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from static import static_engine
from understudy.errors import InvalidData, InvalidSettings
from understudy.evaluation import classical, downstream
from understudy.evaluation.classical import CLASSICAL
from understudy.evaluation.downstream import Evaluation, TrainingSet, Utility, check_fit
from understudy.evaluation.protocols import PROTOCOLS, Asked, Recipe
from understudy.nets.classifiers import NETWORKS, ModuleNetwork
from understudy.privacy.disclosure import RealImages
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.synthetic import SyntheticSet
from understudy.training import sgd as sgd_module
from understudy.training.sgd import SGD, fit

FACTS = PublicFacts(units=100, class_names=("a", "b"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,))
INSTALLED = [name for name in CLASSICAL if classical.is_installed(name)]


def stripes(count: int, seed: int, noise: float = 0.2) -> tuple[torch.Tensor, torch.Tensor]:
    """Two classes that any network can tell apart: horizontal and vertical stripes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    bars = (torch.arange(8) % 2).float()
    patterns = torch.stack([bars[None].expand(8, 8), bars[:, None].expand(8, 8)])
    speckle = noise * torch.rand(count, 1, 8, 8, generator=generator)
    return ((1 - noise) * patterns[labels][:, None] + speckle), labels


def real(count: int = 200, noise: float = 0.2) -> RealImages:
    images, labels = stripes(count, seed=1, noise=noise)
    return RealImages((images * 255).byte(), labels, "stripes")


def training(count: int = 20, noise: float = 0.2, **changes) -> TrainingSet:
    images, labels = stripes(count, seed=2, noise=noise)
    return replace(TrainingSet(images=images, labels=labels), **changes)


def measured(train: TrainingSet, tested: RealImages | None = None, **asked) -> list[Utility]:
    evaluation = Evaluation(real=tested or real(), facts=FACTS, asked=Asked(**asked))
    return list(evaluation.run(train))


@pytest.mark.parametrize(
    ("protocol", "model"), [(None, "convnet"), ("dp-mepf", "resnet9"), ("dp-merf", "logreg")]
)
def test_accuracy_tells_good_sets_from_bad(protocol, model):
    quick = {"protocol": protocol, "models": [model], "seeds": 2, "epochs": 15, "width": 8}
    good = training()
    few = real(60)
    (found,) = measured(good, few, **quick)
    (swapped,) = measured(replace(good, labels=1 - good.labels), few, **quick)
    assert found.mean > 0.9
    assert swapped.mean < 0.1
    assert len(found.accuracies) == (1 if model == "logreg" else 2)


@pytest.mark.parametrize("model", INSTALLED)
def test_classical_models_learn(model):
    (found,) = measured(training(100), real(60), protocol="dp-merf", models=[model])
    assert found.mean > 0.9
    assert found.device == "cpu"


@pytest.mark.parametrize(
    "model",
    [name for name in INSTALLED if name not in ("linear-svc", "adaboost")],  # hardly: order, ties
)
def test_only_models_that_a_seed_changes_are_called_random(model):
    (images, labels), (test, _) = (stripes(60, seed, noise=0.9) for seed in (3, 4))
    found = [
        classical.predictions(
            model, images.numpy(), labels.numpy(), test.numpy(), seed=seed
        ).tolist()
        for seed in (0, 0, 1, 2, 3)
    ]
    assert found[0] == found[1]
    if not CLASSICAL[model].is_random:
        assert all(one == found[0] for one in found)
    else:
        assert any(one != found[0] for one in found)


def test_a_class_without_images_is_never_predicted():
    images, labels = stripes(40, seed=2)
    found = classical.predictions(
        "gaussian-nb", images.numpy(), (labels * 2 + 1).numpy(), images.numpy(), seed=0
    )
    assert set(found) == {1, 3}
    with pytest.raises(InvalidSettings, match="1 class"):
        classical.predictions("logreg", images.numpy(), np.zeros(40), images.numpy(), seed=0)


@pytest.mark.parametrize("model", ["mlp", "bagging"])
def test_a_seed_does_not_depend_on_how_many_run_beside_it(model):
    hard = real(noise=0.95)
    options = {"models": [model], "epochs": 3}
    train = training(40, noise=0.95)
    alone, among = (measured(train, hard, seeds=n, **options)[0].accuracies for n in (1, 4))
    assert among[0] == alone[0]
    assert len(set(among)) > 1
    (other,) = measured(train, hard, seeds=4, seed=1, **options)
    assert other.accuracies != among


@pytest.mark.parametrize("model", ["convnet", "datalens-cnn"])
def test_side_by_side_and_captured_as_on_a_gpu_is_the_same(model, monkeypatch):
    quick = Asked(models=[model], seeds=3, epochs=2, width=4)
    evaluation = Evaluation(real=real(noise=0.9), facts=FACTS, asked=quick)
    (in_turn,) = evaluation.run(training(noise=0.9))
    monkeypatch.setattr(downstream, "SIDE_BY_SIDE", ("cpu",))
    engine = static_engine(monkeypatch)
    (beside,) = replace(evaluation, engine=engine).run(training(noise=0.9))
    assert engine.compiled
    assert not engine.said
    assert beside.accuracies == in_turn.accuracies
    assert beside.confusion == in_turn.confusion
    assert len(set(beside.accuracies)) > 1


def test_confusion_and_classes_add_up():
    facts = replace(FACTS, class_names=("a", "b", "never tested"))
    evaluation = Evaluation(
        real=real(), facts=facts, asked=Asked(models="gaussian-nb,bernoulli-nb", protocol="psg")
    )
    for found in evaluation.run(training()):
        confusion = torch.tensor(found.confusion)
        assert confusion.shape == (3, 3)
        assert confusion.sum(1).tolist() == [100, 100, 0]
        assert found.per_class[2] is None
        assert found.mean == pytest.approx(int(confusion.diagonal().sum()) / 200)
        assert found.per_class[0] == confusion[0, 0] / 100
    evaluation = replace(evaluation, asked=Asked(models=["bagging"], seeds=3))
    (found,) = evaluation.run(training())
    assert np.sum(found.confusion) == 3 * 200
    assert Utility.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_recipes_are_the_papers():
    def recipe(protocol: str, channels: int = 1, per_class: float = 10) -> Recipe:
        return Asked(protocol=protocol).recipe(channels, per_class)

    psg = recipe("psg")
    assert (psg.sgd.epochs, psg.sgd.drop_at, psg.augment) == (1000, (500,), True)
    assert recipe("psg", 3) == Recipe(replace(psg.sgd, epochs=300, drop_at=(150,)), augment=False)
    assert recipe("psg", 1, 1000).sgd.epochs == 1000
    assert recipe("psg", 1, 1001).sgd.epochs == recipe("psg", 3, 6000).sgd.epochs == 40
    assert recipe("dpimagebench").sgd.lr_at(45) == pytest.approx(0.1 * 0.2**2)
    assert recipe("datalens").sgd == SGD(lr=2e-3, epochs=600, batch=512)
    short = Asked(protocol="psg", epochs=3).recipe(1, 10).sgd
    assert (short.epochs, short.drop_at) == (3, (1,))
    for name, protocol in PROTOCOLS.items():
        for models in (protocol.grey, protocol.colour):
            assert set(models) <= {*NETWORKS, *CLASSICAL}
            assert protocol.recipe or not set(models) & set(NETWORKS), name
    assert Asked().chosen_models(1) == ("convnet",)
    assert len(Asked(protocol="psg").chosen_models(1)) == 6


def test_protocols_and_models_are_documented():
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    for name in (*PROTOCOLS, *CLASSICAL):
        assert f"`{name}`" in page


def test_the_triangle_is_the_papers():
    sgd = Asked(protocol="dp-mepf").recipe(3, 5000).sgd
    steps = 98
    papers = np.interp(np.arange(10 * steps), [0, 5 * steps, 10 * steps], [0, 1, 0]) * 0.5
    ours = [sgd.lr_at(epoch + number / steps) for epoch in range(10) for number in range(steps)]
    assert np.allclose(ours, papers)
    for epochs in (1, 2, 3):
        shorter = Asked(protocol="dp-mepf", epochs=epochs).recipe(3, 5000).sgd
        assert max(shorter.lr_at(step / 4) for step in range(4 * epochs)) == 0.5


def torch_trained(targets: torch.Tensor, smoothing: float, lrs: list[float]) -> dict:
    network = ModuleNetwork("mlp", (1, 8, 8), 2)
    params = network.init(torch.Generator().manual_seed(0))
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 2),
    )  # fmt: skip
    module.load_state_dict(params)
    images, _ = stripes(20, seed=0)
    for lr in lrs:
        module.zero_grad()
        nn.functional.cross_entropy(module(images), targets, label_smoothing=smoothing).backward()
        with torch.no_grad():
            for weight in module.parameters():
                weight.sub_(lr * weight.grad)
    return dict(module.named_parameters())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("peak_at", [None, 2])
def test_fit_takes_soft_labels_smoothing_and_schedules(smoothing, kind, peak_at):
    images, labels = stripes(20, seed=0)
    soft = torch.softmax(torch.randn(20, 2, generator=torch.Generator().manual_seed(3)), 1)
    targets = labels if kind == "hard" else soft
    sgd = SGD(
        lr=0.1, epochs=5, label_smoothing=smoothing, peak_at=peak_at, drop_at=(2, 4), drop=0.5
    )
    network = ModuleNetwork("mlp", (1, 8, 8), 2)
    params = network.init(torch.Generator().manual_seed(0))
    trained = fit(network, params, images, targets, sgd=sgd, generator=torch.Generator())
    lrs = [0.0, 0.05, 0.1, 0.2 / 3, 0.1 / 3] if peak_at else [0.1, 0.1, 0.05, 0.05, 0.025]
    for part, expected in torch_trained(targets, smoothing, lrs).items():
        assert torch.allclose(trained[part], expected, atol=1e-6)


def test_equal_steps_may_be_one_program(monkeypatch):
    images, labels = stripes(20, seed=0)
    network = ModuleNetwork("lenet", (1, 8, 8), 2)
    params, trained, seen = network.init(torch.Generator().manual_seed(0)), [], []

    def heard(epochs: range) -> Iterator[int]:
        seen.extend(epochs)
        return iter(epochs)

    for most in (5, 4):
        monkeypatch.setattr(sgd_module, "MOST_REPEATED", most)
        how = SGD(lr=0.1, epochs=5, momentum=0.9, drop_at=(3,))
        trained.append(
            fit(network, params, images, labels, sgd=how, generator=torch.Generator(), epochs=heard)
        )
    assert seen == [0, 1, 2, 3, 4]  # once
    for part in params:
        assert torch.equal(trained[0][part], trained[1][part])


def test_soft_labels_teach_and_can_be_left_out():
    images, labels = stripes(20, seed=2)
    soft = nn.functional.one_hot(1 - labels, 2).float()  # against the hard ones
    train = TrainingSet(images=images, labels=labels, soft_labels=soft)
    quick = {"models": ["convnet"], "seeds": 1, "epochs": 30, "width": 8}
    (found,) = measured(train, **quick)
    assert found.mean < 0.1
    assert found.options["soft_labels"]
    (hard,) = measured(replace(train, soft_labels=None), **quick)
    assert hard.mean > 0.9
    (classic,) = measured(train, models=["logreg"])
    assert classic.mean > 0.9


def test_images_are_not_changed_if_so_asked(monkeypatch):
    changes = []
    monkeypatch.setattr(
        "understudy.training.augmentation.CropScaleOrRotate.__call__",
        lambda self, images, drawn: changes.append(len(images)) or images,
    )
    images, labels = stripes(4, seed=2)
    train = TrainingSet(images=images, labels=labels)
    quick = {"models": ["convnet"], "seeds": 1, "epochs": 1, "width": 8}
    (plain,) = measured(train, augment=False, **quick)
    assert not changes
    assert plain.options["augment"] is False
    (usual,) = measured(train, **quick)
    assert changes
    assert "augment" not in usual.options  # as measured before there was a choice


def test_subsamples_are_balanced_and_seeded():
    train = training(41, soft_labels=torch.rand(41, 2))
    small = train.subsample(7, FACTS.class_names, seed=0)
    assert torch.bincount(small.labels).tolist() == [7, 7]
    place = (train.images.flatten(1)[:, None] == small.images.flatten(1)[None]).all(2).nonzero()
    assert len(set(place[:, 0].tolist())) == 14
    assert torch.equal(train.soft_labels[place[:, 0]], small.soft_labels[place[:, 1]])
    other = train.subsample(7, FACTS.class_names, seed=1)
    assert not torch.equal(small.images, other.images)
    with pytest.raises(InvalidSettings, match="20 synthetic images of class 'b'"):
        train.subsample(21, FACTS.class_names, seed=0)
    (found,) = measured(train, models=["gaussian-nb"], subsample=5)
    assert found.train_images == 10


def test_what_is_known_is_not_computed_again(monkeypatch):
    evaluation = Evaluation(real=real(), facts=FACTS, asked=Asked(models=["logreg", "gaussian-nb"]))
    first = list(evaluation.run(training()))
    known = json.loads(json.dumps([first[0].to_json()]))
    computed = []
    original = downstream.predictions

    def counting(model, *args, **kwargs):
        computed.append(model)
        return original(model, *args, **kwargs)

    monkeypatch.setattr(downstream, "predictions", counting)
    again = list(evaluation.run(training(), known=known))
    assert computed == ["gaussian-nb"]
    assert again[0] == first[0]
    list(replace(evaluation, asked=Asked(models=["logreg"], seed=1)).run(training(), known=known))
    assert computed == ["gaussian-nb", "logreg"]


def test_xgboost_is_an_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "xgboost" else find(name)
    )
    with pytest.raises(InvalidSettings, match=r"pip install '\.\[xgboost\]'"):
        Asked(models=["xgboost"])
    asked = Asked(protocol="dp-mepf")
    assert asked.chosen_models(1) == ("logreg", "sklearn-mlp")
    assert asked.left_out(1) == ("xgboost",)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"protocol": "dp-mrf"}, "did you mean 'dp-merf'"),
        ({"protocol": "other"}, "expected one of psg, dp-merf"),
        ({"models": "LeNet5"}, "did you mean 'lenet'"),
        ({"models": ["convnet", "xx"]}, "expected one of convnet, mlp"),
        ({"models": ""}, "there is no model ''"),
        ({"protocol": "dp-merf", "models": "convnet"}, "use --protocol psg"),
        ({"seeds": 0}, "seeds is 0, expected at least 1"),
        ({"subsample": -1}, "subsample is -1"),
    ],
)
def test_bad_requests_are_refused_on_one_line(asked, says):
    with pytest.raises(InvalidSettings) as refused:
        Asked(**asked)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("synthetic", "tested", "says"),
    [
        ({}, {"images": torch.zeros(4, 1, 9, 9)}, r"test images have shape \(1, 9, 9\)"),
        ({}, {"labels": torch.full((200,), 2)}, "the test set has label 2"),
        ({"labels": torch.full((20,), -1)}, {}, "the synthetic set has no labels"),
        ({"labels": torch.full((20,), 2)}, {}, "the synthetic set has label 2"),
        ({"images": torch.full((20, 1, 8, 8), torch.nan)}, {}, "NaN or infinite"),
    ],
)
def test_sets_that_do_not_fit_are_refused(synthetic, tested, says):
    good = SyntheticSet(*stripes(20, seed=2), ("a", "b"))
    check_fit(good, real(), FACTS)
    with pytest.raises(InvalidData, match=says):
        check_fit(replace(good, **synthetic), replace(real(), **tested), FACTS)


def test_soft_labels_survive_their_file_and_are_checked(tmp_path):
    soft = torch.tensor([[0.25, 0.75], [1.0, 0.0]])
    made = SyntheticSet(torch.rand(2, 1, 8, 8), torch.tensor([1, 0]), ("a", "b"), soft)
    path = tmp_path / "set.safetensors"
    path.write_bytes(made.to_bytes())
    assert torch.equal(SyntheticSet.load(path).soft_labels, soft)
    assert SyntheticSet.from_bytes(replace(made, soft_labels=None).to_bytes()).soft_labels is None
    for wrong in (soft[:1], soft[:, :1], soft * 2, -soft, soft / 0, soft.long()):
        with pytest.raises(InvalidData, match="soft labels"):
            replace(made, soft_labels=wrong)


def test_progress_says_what_is_being_done():
    class Listening(Progress):
        def __init__(self):
            self.heard = []

        def steps(self, steps, *, spent=None, what=""):
            self.heard.append((what, len(steps)))
            yield from steps

        def say(self, text):
            self.heard.append(text)

    progress = Listening()
    asked = Asked(models=["mlp", "gaussian-nb"], seeds=2, epochs=3)
    evaluation = Evaluation(real=real(), facts=FACTS, asked=asked, progress=progress)
    list(evaluation.run(training()))
    assert progress.heard[:2] == [("mlp, seed 1 of 2", 3), ("mlp, seed 2 of 2", 3)]
    assert progress.heard[2].startswith("mlp, trained on synthetic images: ")
    assert progress.heard[3] == ("gaussian-nb", 1)
