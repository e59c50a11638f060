"""Pre-training on public images: what it learns, what it writes, and what it refuses."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from understudy.cli.main import main
from understudy.data.images import labelled_images
from understudy.data.sources import read_source
from understudy.errors import (
    DataChanged,
    InvalidData,
    InvalidSettings,
    LedgerError,
    OutputExists,
    StorageError,
)
from understudy.nets.encoders import Encoder
from understudy.pipeline import register
from understudy.pretraining import pretrain
from understudy.privacy.registration import RegistrationTerms
from understudy.training.augmentation import Shift, augmented
from understudy.training.pretrained import load_encoder
from understudy.training.pretraining import (
    BATCH,
    BatchNorm,
    Classifier,
    Learner,
    Pretraining,
    statistics,
    train_encoder,
)


@pytest.fixture(scope="module")
def digits():
    return read_source("digits")


@pytest.fixture(scope="module")
def trained(digits, tmp_path_factory):
    path = tmp_path_factory.mktemp("encoders") / "new" / "digits.safetensors"
    return pretrain(digits, out=path, epochs=4, width=4, augment="none")


def test_it_learns_and_says_what_it_is(trained, digits):
    header = trained.header
    assert header.test_accuracy > 0.5  # one in ten by chance
    assert (header.trained_on, header.images, header.width) == ("digits", 1438, 4)
    assert header.images_sha256 == hashlib.sha256(digits.images.tobytes()).hexdigest()
    assert header.mean == (0.305,) * 3  # the known set's, once for each channel


def test_the_file_gives_the_encoder_back(trained):
    encoder, params, origin = load_encoder(trained.path, (1, 8, 8))
    assert encoder == Encoder("resnet18", (1, 8, 8), width=4)
    assert origin.trained_on == "digits"
    assert origin.sha256 == hashlib.sha256(trained.path.read_bytes()).hexdigest()
    features = encoder.activations(params, torch.rand(3, 1, 8, 8))
    assert bool(torch.isfinite(features).all())
    other, _, _ = load_encoder(trained.path, (3, 20, 12), layers="-1:")  # other sizes, colours
    assert other.activations(params, torch.rand(2, 3, 20, 12)).shape == (2, other.dimension)


def test_the_stored_network_is_the_one_whose_accuracy_is_told(trained, digits):
    """Classify the test split by the encoder's last layer, block and head in the file."""
    from safetensors.torch import load_file

    header, stored = trained.header, load_file(trained.path)
    learner = Learner(4, 10, header.mean, header.std, is_stored=True)
    params = {n if n.startswith("head.") else f"trunk.{n}": w for n, w in stored.items()}
    images, labels = torch.from_numpy(digits.test.images), digits.test.labels
    found = learner(params, images).argmax(1).numpy()
    assert float((found == labels).mean()) == header.test_accuracy
    alone = torch.cat([learner(params, image[None]) for image in images[:20]]).argmax(1)
    np.testing.assert_array_equal(alone, found[:20])


def test_it_is_the_same_again(digits):
    digits = replace(digits, images=digits.images[:300], labels=digits.labels[:300])
    first, second = (train_encoder(digits, Pretraining(epochs=1, width=2)) for _ in range(2))
    assert first[1] == second[1]
    for name, weight in first[0].items():
        assert torch.equal(weight, second[0][name])


def test_training_normalises_as_torch_does_in_training():
    learner = Learner(2, 3, (0.5,) * 3, (0.5,) * 3)
    params = learner.init(torch.Generator().manual_seed(0))
    params = {n: torch.rand_like(w) if "norm2" in n else w for n, w in params.items()}
    reference = Classifier(2, 3, nn.BatchNorm2d)
    reference.load_state_dict(params, strict=False)
    prepared = learner.prepare(torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8))
    torch.testing.assert_close(
        learner.logits(params, prepared), reference.train()(prepared), rtol=1e-4, atol=1e-5
    )


def test_statistics_are_those_of_all_images():
    learner = Learner(2, 3, (0.4,) * 3, (0.2,) * 3)
    params = learner.init(torch.Generator().manual_seed(0))
    images = torch.randint(256, (BATCH + 40, 1, 8, 8), dtype=torch.uint8)  # two unequal batches
    found = statistics(learner, params, images, torch.Generator().manual_seed(0))
    norms = [n for n, m in learner.module.named_modules() if isinstance(m, BatchNorm)]
    assert set(found) == {f"{n}.running_{what}" for n in norms for what in ("mean", "var")}
    seen = torch.conv2d(learner.prepare(images), params["trunk.conv.weight"], padding=1)
    torch.testing.assert_close(found["trunk.norm.running_mean"], seen.mean((0, 2, 3)))
    torch.testing.assert_close(
        found["trunk.norm.running_var"], seen.var((0, 2, 3), correction=0), rtol=1e-4, atol=1e-5
    )
    assert not any(len(m._forward_pre_hooks) for m in learner.module.modules())


def test_a_last_batch_of_one_image_is_no_obstacle():
    images = np.random.default_rng(0).integers(0, 256, (BATCH + 1, 8, 8), dtype=np.uint8)
    data = labelled_images(images, np.arange(BATCH + 1) % 2)
    params, header = train_encoder(data, Pretraining(epochs=1, width=2))
    assert all(bool(torch.isfinite(weight).all()) for weight in params.values())
    assert header.test_accuracy is None
    assert header.mean == pytest.approx((images.mean() / 255,) * 3)


def test_shifts_move_whole_images():
    images = torch.arange(2 * 16 * 16).view(2, 1, 16, 16) % 251 + 1
    moved = augmented(images.byte(), Shift(), torch.Generator().manual_seed(4))
    assert moved.dtype == torch.uint8
    for before, after in zip(images[:, 0].byte(), moved[:, 0], strict=True):
        found = [
            (rows, columns)
            for rows in range(-2, 3)
            for columns in range(-2, 3)
            if torch.equal(_rolled(before, rows, columns), after)
        ]
        assert len(found) == 1
    same = torch.rand(1, 1, 8, 8).expand(300, -1, -1, -1)
    for change, ways in ((Shift(), 9), (Shift(mirror=True), 18)):  # by a pixel, at 8 pixels
        changed = augmented(same, change, torch.Generator().manual_seed(5))
        assert len({tuple(image.flatten().tolist()) for image in changed}) == ways


def _rolled(image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    return padded[2 + rows : 18 + rows, 2 + columns : 18 + columns]


@pytest.fixture
def scans(tmp_path):
    """A set that nobody knows."""
    images = np.random.default_rng(1).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "scans.npz", images=images, labels=np.arange(12) % 2)
    return tmp_path / "scans.npz"


QUICK = {"epochs": 1, "width": 2}


def test_an_unknown_set_must_be_declared_public(scans, tmp_path):
    out = tmp_path / "scans.safetensors"
    with pytest.raises(InvalidData, match="scans is not a known public set.*--public"):
        pretrain(scans, out=out, **QUICK)
    assert not out.exists()
    assert pretrain(scans, out=out, public=True, **QUICK).header.trained_on == "scans"


def test_a_private_set_is_refused_whatever_is_declared(scans, tmp_path, ledger):
    register(scans, ledger=ledger)
    images, labels = (np.load(scans)[name] for name in ("images", "labels"))
    other = np.random.default_rng(2).integers(0, 256, (6, 8, 8), dtype=np.uint8)
    mixed = labelled_images(np.concatenate([other, images[:1]]), np.arange(7) % 2, name="mixed")
    with_test = replace(
        labelled_images(other, np.arange(6) % 2, name="tested"),
        test=labelled_images(images, labels),
    )
    for data, said in (
        (scans, "12 of the images of scans are in 'scans'"),
        (mixed, "1 of the images of mixed"),
        (with_test, "12 of the images"),
        (replace(mixed, images=mixed.images // 2, source=str(scans)), "lies in, or holds"),
    ):
        with pytest.raises(DataChanged, match=said):
            pretrain(data, out=tmp_path / "x.safetensors", public=True, ledger=ledger, **QUICK)
    unseen = labelled_images(other, np.arange(6) % 2)
    assert pretrain(
        unseen, out=tmp_path / "x.safetensors", public=True, ledger=ledger, **QUICK
    ).path.exists()


@pytest.mark.parametrize("how", ["a lost ledger", "a link to nowhere"])
def test_a_ledger_out_of_reach_is_not_taken_for_none(scans, tmp_path, monkeypatch, how):
    own = tmp_path / "own.sqlite"
    monkeypatch.setenv("UNDERSTUDY_LEDGER", str(own))
    register(scans, ledger=own)
    if how == "a lost ledger":
        own.unlink()
    else:
        own.rename(tmp_path / "unmounted.sqlite")
        own.with_name(f"{own.name}.head").unlink()
        own.symlink_to(tmp_path / "nowhere" / "own.sqlite")
    with pytest.raises(LedgerError, match="is gone, but|leads to no ledger"):
        pretrain(scans, out=tmp_path / "x.safetensors", public=True, **QUICK)


def test_a_registered_public_benchmark_stays_public(digits, tmp_path, ledger):
    register(digits, ledger=ledger, terms=RegistrationTerms())
    assert pretrain(digits, out=tmp_path / "x.safetensors", ledger=ledger, **QUICK).path.exists()


def test_outputs_are_checked_before_any_work(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "understudy.pretraining.train_encoder", lambda *_, **__: pytest.fail("worked")
    )
    with pytest.raises(InvalidSettings, match=r"called x\.pt, expected a name in \.safetensors"):
        pretrain(digits, out=tmp_path / "x.pt")
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(OutputExists, match="exists already"):
        pretrain(digits, out=tmp_path / "x.safetensors")
    with pytest.raises(StorageError, match="is no folder that can be written"):
        pretrain(digits, out=tmp_path / "x.safetensors" / "y.safetensors")


@pytest.mark.parametrize(
    "setting", [{"epochs": 0}, {"width": 0}, {"lr": float("nan")}, {"weight_decay": -1},
                {"augment": "crop"}],
)  # fmt: skip
def test_bad_settings(setting):
    with pytest.raises(InvalidSettings, match=next(iter(setting)).replace("_", "-")):
        Pretraining(**setting)


def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "digits.safetensors"
    arguments = ["pretrain", "digits", "--out", str(out), "--epochs", "1", "--width", "2"]
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--json"])
    assert stop.value.code == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any("PUBLIC: nothing protects" in line.get("text", "") for line in lines)
    assert lines[-1]["trained_on"] == "digits"
    assert lines[-1]["path"] == str(out)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "exists already" in capsys.readouterr().err
