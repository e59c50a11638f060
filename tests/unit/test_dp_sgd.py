"""DP-SGD: its steps, its settings, and going on from a released classifier."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

import understudy
from door import LOOSE, a_vault, chosen, some_images
from static import static_engine
from trained import train
from understudy.data.images import Normalisation
from understudy.errors import InvalidData, InvalidSettings, VerificationFailed
from understudy.methods import dp_sgd
from understudy.methods.dp_sgd import DPSGD, DPSGDConfig, NoisyStep
from understudy.methods.method import configure
from understudy.privacy.plan import Budget, PublicFacts
from understudy.privacy.randomness import InjectedRandomness
from understudy.progress import Progress
from understudy.runs import CLASSIFIER_FILE
from understudy.seeds import public_generator
from understudy.training.sgd import RecordLoss

NO_NOISE = Budget(epsilon=float("inf"), delta=1e-5)


@pytest.fixture
def run(trained_runs, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(trained_runs["run"].directory, tmp_path / "copy")


def opened(vault, method, ledger, folder, **options):
    return vault.open(
        method.plan(), options.pop("budget", LOOSE), ledger, workspace=folder / "w", run_id="r",
        allow_large_delta=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("network", "seen_at_most"), [("convnet", 0), ("scatternet", 2**32), ("scatternet", 0)]
)
def test_steps_are_those_of_plain_clipped_sgd(network, seen_at_most, ledger, tmp_path, monkeypatch):
    """Without noise and with every unit in the batch, a loop over records gives the same.

    It does not matter whether coefficients are computed once, or in each step.
    """
    monkeypatch.setattr(dp_sgd, "SEEN_AT_MOST", seen_at_most)
    vault = a_vault(ledger, some_images(6))
    facts = vault.facts
    config = DPSGDConfig(
        steps=3, batch=3, clip_norm=0.3, lr=0.7, lr_end=0.5, momentum=0.9, average=0.15, width=3,
        network=network,
    )  # fmt: skip
    method = DPSGD(config, facts, seed=2)
    everyone = InjectedRandomness(
        uniform=lambda count: chosen(*range(6), of=count),
        normal=lambda count: torch.zeros(count, dtype=torch.float64),
    )
    curator = opened(vault, method, ledger, tmp_path, budget=NO_NOISE, randomness=everyone)
    made = method.run(curator, Progress())

    loss = RecordLoss(method.network, facts.mean, facts.std)
    params = method.network.init(public_generator(2, "network"))
    average, velocity = dict(params), {n: torch.zeros_like(w) for n, w in params.items()}
    images, labels = some_images(6).images, some_images(6).labels
    for step in range(3):
        total = {n: torch.zeros_like(w) for n, w in params.items()}
        for image, label in zip(images, labels, strict=True):
            pixels = torch.from_numpy(image).float() / 255
            slopes = torch.func.grad(loss)(params, pixels, torch.tensor(label))
            norm = torch.cat([slope.flatten() for slope in slopes.values()]).norm()
            scale = min(1.0, 0.3 / float(norm))
            total = {n: total[n] + scale * slope for n, slope in slopes.items()}
        lr, decay = 0.7 * (1 - 0.5 * step / 3), min(0.15, (1 + step) / (10 + step))
        velocity = {n: 0.9 * velocity[n] + total[n] / 3 for n in params}
        params = {n: w - lr * velocity[n] for n, w in params.items()}
        average = {n: decay * average[n] + (1 - decay) * params[n] for n in params}
    for name, weight in average.items():
        assert torch.allclose(made.params[name], weight, atol=1e-5), name


def test_a_compiled_step_does_the_same(monkeypatch):
    engine, step = static_engine(monkeypatch), NoisyStep(momentum=0.9)
    params = {"a": torch.rand(3, 4, 2, 2), "b": torch.rand(3)}
    plain = compiled = (params, {n: torch.zeros_like(w) for n, w in params.items()}, params)
    for number in range(3):
        slopes = {n: torch.randn_like(w) for n, w in params.items()}
        lr, decay = torch.tensor(0.5 - 0.1 * number), torch.tensor(0.1 * number)
        plain = step(plain, slopes, lr, decay)
        compiled = engine.run(NoisyStep(momentum=0.9), compiled, slopes, lr, decay)
    assert len(engine.compiled) == 1
    assert not engine.said
    for ours, theirs in zip(plain, compiled, strict=True):
        for name, values in ours.items():
            assert torch.allclose(values, theirs[name])
    assert not torch.equal(plain[0]["a"], plain[2]["a"])


def test_it_learns_to_read_digits(tmp_path):
    settings = {"steps": 15, "batch": 1438, "width": 6, "lr": 16.0}
    result = train(tmp_path, data="digits", settings=settings, epsilon=10, delta=1e-5)
    (found,) = understudy.evaluate(
        result.directory, ledger=tmp_path / "ledger", device="cpu", missing=True
    )
    assert found.mean > 0.8
    assert result.certificate.epsilon <= 10


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"clip_norm": 0.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"average": 1.0},
     {"average": -0.1}, {"lr_end": 2.0}, {"batch": 61}, {"network": "lenet"}],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_and_leave_nothing(tmp_path, wrong):
    with pytest.raises(InvalidSettings):
        train(tmp_path, settings=wrong)
    assert not (tmp_path / "run.partial").exists()


def test_the_best_preset_learns_one_layer_boldly_where_noise_is_small():
    facts = PublicFacts(
        units=1000, class_names=("a", "b"), shape=(1, 8, 8), mean=(0.5,), std=(0.5,)
    )

    def best(epsilon, **given):
        return configure(DPSGD, facts, epsilon, preset="best", settings=given).config

    assert [best(epsilon).lr for epsilon in (1, 9, 11)] == [2.0, 2.0, 8.0]
    assert best(1).network == "scatternet"
    assert best(1, network="convnet").width == 64


# Going on from a released classifier


def test_it_goes_on_from_what_was_released(trained_runs, tmp_path):
    first = trained_runs["run"]
    result = train(tmp_path, settings={"start": str(first.directory), "lr": 1e-9})
    moved = [
        float((result.classifier.params[name] - weight).abs().max())
        for name, weight in first.classifier.params.items()
    ]
    assert max(moved) < 1e-5  # such steps lead nowhere: it began where the other ended
    content = first.certificate.content
    (origin,) = result.certificate.content["method"]["public_inputs"]
    assert origin["sha256"] == content["files"][CLASSIFIER_FILE]
    assert origin["kind"] == "released"
    assert origin["trained_on"].startswith("pets with epsilon")
    assert result.certificate.content["method"]["settings"]["start"] == first.directory.name
    assert str(first.directory) not in result.certificate.to_bytes().decode()
    page = understudy.write_report([result.directory], out=tmp_path / "page.html").read_text()
    assert f"classifier of run {content['run']}" in page


def test_it_keeps_the_constants_it_was_trained_with(trained_runs, tmp_path):
    constants = Normalisation(mean=(0.1,), std=(0.2,))
    like = some_images(60, name="others", seed=4, normalisation=constants)
    fresh = train(tmp_path, "fresh", data=like)
    assert fresh.classifier.mean == (0.1,)
    start = {"start": str(trained_runs["run"].directory / "release" / CLASSIFIER_FILE)}
    assert train(tmp_path, data=like, settings=start).classifier.mean == (0.5,)


def test_what_has_no_guarantee_gives_none(trained_runs, tmp_path):
    start = {"start": str(trained_runs["noiseless"].directory)}
    with pytest.raises(InvalidSettings, match="has no guarantee"):
        train(tmp_path, settings=start)
    assert not list(tmp_path.glob("run*"))
    result = train(tmp_path, settings=start, epsilon=float("inf"))
    assert not result.certificate.has_guarantee


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"settings": {"width": 5}}, "pass --width 4"),
        ({"settings": {"network": "scatternet"}}, "pass --network convnet"),
        ({"data": some_images(60, classes=2)}, "expected the same"),
        ({"data": some_images(60, shape=(1, 12, 12))}, "expected the same"),
    ],
)
def test_another_network_or_data_set_cannot_go_on(trained_runs, tmp_path, change, says):
    settings = {"start": str(trained_runs["run"].directory)} | change.pop("settings", {})
    with pytest.raises(InvalidSettings, match=says):
        train(tmp_path, settings=settings, **change)
    assert not list(tmp_path.glob("run*"))


def test_only_what_its_certificate_names_is_gone_on_from(run, tmp_path):
    other = tmp_path / "alone" / CLASSIFIER_FILE
    other.parent.mkdir()
    shutil.copy(run / "release" / CLASSIFIER_FILE, other)
    with pytest.raises(VerificationFailed, match="no readable certificate"):
        train(tmp_path, settings={"start": str(other)})
    classifier = understudy.load_classifier(run)
    params = {name: weight + 1 for name, weight in classifier.params.items()}
    (run / "release" / CLASSIFIER_FILE).write_bytes(replace(classifier, params=params).to_bytes())
    with pytest.raises(VerificationFailed, match="is not the file that the certificate"):
        train(tmp_path, settings={"start": str(run)})
    with pytest.raises(InvalidData, match="nothing"):
        train(tmp_path, settings={"start": str(tmp_path / "nothing")})
    assert not list(tmp_path.glob("run*"))
