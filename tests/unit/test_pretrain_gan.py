"""A GAN pre-trained on public images: its file, and private training that starts from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import understudy
from static import static_engine
from understudy.cli.main import main
from understudy.data.images import labelled_images
from understudy.data.sources import read_source
from understudy.errors import DataChanged, InvalidData, InvalidSettings, MissingWeights
from understudy.methods.dp_gan import DPGAN, DPGANConfig
from understudy.pipeline import register
from understudy.pretraining import pretrain_gan
from understudy.privacy.plan import PublicFacts
from understudy.training.engine import Engine
from understudy.training.gan_pretraining import GANPretraining, PretrainedGAN, train_gan

QUICK = {"steps": 2, "batch": 6, "code": 3, "width": 2, "critic_width": 2}
PRIVATE = {
    "images_per_class": 2, "steps": 2, "turns": 1, "batch": 40, "fakes": 6, "code": 3, "width": 2,
    "critic_width": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return read_source("digits")


@pytest.fixture(scope="module")
def file(digits, tmp_path_factory):
    path, _ = pretrain_gan(digits, out=tmp_path_factory.mktemp("g") / "d.safetensors", **QUICK)
    return path


def facts(names="0123456789", shape=(1, 8, 8)):
    return PublicFacts(units=60, class_names=tuple(names), shape=shape, mean=(0.5,), std=(0.5,))


def test_the_file_gives_the_networks_back(file, digits):
    found, origin = PretrainedGAN.load(file)
    made = train_gan(digits, GANPretraining(**QUICK))
    assert found.header == made.header
    assert found.header.images_sha256 == hashlib.sha256(digits.images.tobytes()).hexdigest()
    for ours, theirs in ((found.generator, made.generator),
                         (found.discriminator, made.discriminator)):  # fmt: skip
        assert list(ours) == list(theirs)
        assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())
    assert (origin.trained_on, origin.name) == ("digits", "d")
    assert origin.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_it_learns_what_is_bright(digits):
    """Two flat classes, one dark and one bright: the generator tells them apart."""
    labels = np.arange(80) % 2
    images = np.where(labels[:, None, None] == 1, 220, 30).repeat(8, 1).repeat(8, 2)
    data = labelled_images(images.astype(np.uint8), labels)
    how = GANPretraining(
        steps=60, batch=16, code=3, width=4, critic_width=4, lr=5e-3, critic_lr=5e-3, ema=0.5
    )
    made = train_gan(data, how)
    network = made.header.network
    codes = network.codes(20, torch.Generator().manual_seed(0))
    dark, bright = (
        network(made.generator, codes, torch.full((20,), label)).mean().item() for label in (0, 1)
    )
    assert bright - dark > 0.3


def test_compiled_steps_do_the_same(monkeypatch, digits):
    engine = static_engine(monkeypatch)
    few = replace(digits, images=digits.images[:50], labels=digits.labels[:50])
    how = GANPretraining(**QUICK | {"lr": 1e-5, "critic_lr": 1e-5})
    plain, compiled = (train_gan(few, how, engine=e) for e in (Engine(compile=False), engine))
    assert not engine.said
    assert len(engine.compiled) == 2
    for name, weight in plain.generator.items():
        assert torch.allclose(weight, compiled.generator[name], atol=5e-5), name


def test_classes_start_as_those_of_the_public_set(file):
    found, _ = PretrainedGAN.load(file)
    table = found.discriminator["classes.weight"]
    _, same = found.for_classes(("3", "new", "1", "other"), seed=0)
    assert torch.equal(same["classes.weight"][[0, 2]], table[[3, 1]])
    rows = [
        (row[None] - table).abs().sum(1).argmin().item() for row in same["classes.weight"][[1, 3]]
    ]
    assert torch.equal(same["classes.weight"][[1, 3]], table[rows])
    maker, judge = found.for_classes((), seed=0)
    assert len(judge["classes.weight"]) == 1
    assert all(len(w) == 1 for n, w in maker.items() if n.endswith("classes.weight"))


def test_without_labels_all_classes_start_alike(digits):
    made = train_gan(digits, GANPretraining(**QUICK | {"labelled": False}))
    assert made.header.class_names == ()
    assert len(made.discriminator["classes.weight"]) == 1
    _, judge = made.for_classes(("a", "b", "c"), seed=0)
    assert torch.equal(judge["classes.weight"], made.discriminator["classes.weight"].expand(3, -1))


def test_private_training_starts_there_and_the_certificate_says_so(file, tmp_path):
    found, origin = PretrainedGAN.load(file)
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    private = labelled_images(images, np.arange(60) % 10, name="private")
    settings = PRIVATE | {"start": str(file), "lr": 1e-9, "critic_lr": 1e-9}
    result = understudy.synthesize(
        private, method="dp-gan", epsilon=10, out=tmp_path / "run", ledger=tmp_path / "ledger",
        settings=settings, device="cpu", accountant="renyi",
    )  # fmt: skip
    assert result.certificate.content["method"]["public_inputs"] == [origin.to_json()]
    released = result.synthetic.generator
    for name, weight in found.generator.items():
        assert torch.allclose(released.params[name], weight, atol=1e-6), name


@pytest.mark.parametrize(
    ("changes", "shape", "said"),
    [
        ({}, (1, 12, 12), "images of shape"),
        ({"width": 4}, (1, 8, 8), "--code 3 --width 2 --critic-width 2 --norm$"),
        ({"norm": False}, (1, 8, 8), "--norm"),
    ],
)
def test_networks_that_do_not_fit_are_refused_when_planning(file, changes, shape, said):
    config = DPGANConfig(**PRIVATE | {"start": str(file)} | changes)
    with pytest.raises(InvalidSettings, match=said):
        DPGAN(config, facts(shape=shape), seed=0).plan()


def test_other_files_are_refused(file, tmp_path):
    with pytest.raises(MissingWeights, match=r"x\.safetensors cannot be read \(No such file"):
        PretrainedGAN.load(tmp_path / "x.safetensors")
    other = tmp_path / "other.safetensors"
    for content in (b"", b"garbage" * 9, file.read_bytes()[:-8], _encoder(tmp_path)):
        other.write_bytes(content)
        with pytest.raises(MissingWeights, match="written by `understudy pretrain-gan`"):
            PretrainedGAN.load(other)
    content = file.read_bytes().replace(b'\\"width\\": 2', b'\\"width\\": 3')
    assert content != file.read_bytes()
    other.write_bytes(content)
    with pytest.raises(MissingWeights, match="of another shape"):
        PretrainedGAN.load(other)


def _encoder(folder):
    path = folder / "e.safetensors"
    understudy.pretrain("digits", out=path, epochs=1, width=2)
    return path.read_bytes()


def test_what_is_not_public_is_refused(tmp_path, ledger):
    images = np.random.default_rng(1).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    data = labelled_images(images, np.arange(12) % 2, name="scans")
    with pytest.raises(InvalidData, match="not a known public set"):
        pretrain_gan(data, out=tmp_path / "x.safetensors", **QUICK)
    register(data, ledger=ledger)
    with pytest.raises(DataChanged, match="12 of the images"):
        pretrain_gan(data, out=tmp_path / "x.safetensors", public=True, ledger=ledger, **QUICK)
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"batch": 0}, {"turns": 0}, {"loss": "l2"}, {"penalty": -1.0}, {"lr": 0.0},
     {"ema": 1.0}, {"augment": "crop"}],
    ids=str,
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(InvalidSettings, match=next(iter(wrong))):
        GANPretraining(**wrong)


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "digits.safetensors"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items()]
    with pytest.raises(SystemExit) as stop:
        main(["pretrain-gan", "digits", "--out", str(out), "--no-labelled", *flags, "--json"])
    assert stop.value.code == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["trained_on"], last["path"], last["class_names"]) == ("digits", str(out), [])
    assert out.exists()
