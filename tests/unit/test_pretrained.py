"""Loading encoders: files of others are data, and nothing but the right weights gets through."""

from __future__ import annotations

import hashlib
import io
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from understudy.data import weights
from understudy.data.checkpoints import read_arrays, read_state_dict
from understudy.errors import InvalidSettings, MissingWeights
from understudy.nets.encoders import IMAGENET_MEAN, Encoder
from understudy.training.pretrained import KNOWN, EncoderHeader, load_encoder

SHAPE = (1, 8, 8)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    return tmp_path


def place(folder: Path, name: str, content: bytes, monkeypatch) -> Path:
    """Place a file of weights, and let the registry take it for the known one."""
    known = weights.WEIGHTS[name]
    (file,) = known.files
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / file).write_bytes(content)
    changed = replace(known, files={file: hashlib.sha256(content).hexdigest()}, web=(), pypi=None)
    monkeypatch.setitem(weights.WEIGHTS, name, replace(changed, sdist=None))
    return folder


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def drawn(name: str) -> dict[str, Tensor]:
    return Encoder(name, SHAPE).init(torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def vgg16() -> dict[str, Tensor]:
    return drawn("vgg16")


def as_flax(params: dict[str, Tensor]) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    kernels = [name for name, weight in params.items() if weight.ndim == 4]
    return {
        "VGG16_0": {
            f"Conv_{number}": {
                "kernel": params[name].permute(2, 3, 1, 0).numpy(),
                "bias": params[name.replace("weight", "bias")].numpy(),
            }
            for number, name in enumerate(kernels)
        },
        "NetLinLayer_0": {"Conv_0": {"kernel": np.ones((1, 1, 64, 1), np.float32)}},
    }


def test_vgg16_comes_from_a_pickle_of_arrays(home, vgg16, monkeypatch):
    content = pickle.dumps(as_flax(vgg16), protocol=3)
    folder = place(home / "data", "vgg16", content, monkeypatch)
    encoder, params, origin = load_encoder("vgg16", SHAPE, layers="-2:", data_dir=folder)
    assert encoder == Encoder("vgg16", SHAPE, "-2:")
    for name in set(vgg16) - {"mean", "std"}:
        torch.testing.assert_close(params[name], vgg16[name], rtol=0, atol=0)
    torch.testing.assert_close(params["mean"], torch.tensor(IMAGENET_MEAN))
    assert origin.to_json() == {
        "kind": "weights",
        "name": "vgg16",
        "trained_on": "ImageNet",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    assert encoder.activations(params, torch.rand(2, *SHAPE)).shape == (2, encoder.dimension)


def test_mobilenetv2_comes_from_its_state_dict(home, monkeypatch):
    params = drawn("mobilenetv2")
    file = {n: w for n, w in params.items() if n not in ("mean", "std")} | {
        "features.0.1.num_batches_tracked": torch.tensor(1),
        "classifier.1.weight": torch.zeros(10, 2),
    }
    folder = place(home / "data", "mobilenetv2", saved(file), monkeypatch)
    _, found, _ = load_encoder("mobilenetv2", (3, 28, 28), data_dir=folder)
    assert set(found) == set(params)
    torch.testing.assert_close(
        found["features.5.conv.2.weight"], params["features.5.conv.2.weight"]
    )


def test_weights_of_another_network_are_refused(home, vgg16, monkeypatch):
    folder = place(home / "data", "vgg19", saved({}), monkeypatch)
    with pytest.raises(MissingWeights, match=r"no file of vgg19: features\.0\.weight is missing"):
        load_encoder("vgg19", SHAPE, data_dir=folder)
    folder = place(
        home / "more", "vgg19", saved({"features.0.weight": torch.zeros(2)}), monkeypatch
    )
    with pytest.raises(MissingWeights, match=r"has shape \(2,\), expected \(64, 3, 3, 3\)"):
        load_encoder("vgg19", SHAPE, data_dir=folder)
    short = as_flax(vgg16)
    del short["VGG16_0"]["Conv_7"]
    folder = place(home / "other", "vgg16", pickle.dumps(short), monkeypatch)
    with pytest.raises(MissingWeights, match="other arrays than those of a VGG16"):
        load_encoder("vgg16", SHAPE, data_dir=folder)


def test_a_file_that_was_altered_is_refused(home, vgg16, monkeypatch):
    folder = place(home / "data", "vgg16", pickle.dumps(as_flax(vgg16)), monkeypatch)
    (folder / "vgg16" / "vgg16.ckpt").write_bytes(pickle.dumps({}))
    with pytest.raises(MissingWeights, match="wrong checksum.*put vgg16.ckpt"):
        load_encoder("vgg16", SHAPE, data_dir=folder)


class Malicious:
    """A pickle that would leave a mark when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("read", [read_arrays, read_state_dict])
def test_no_pickle_can_run_a_program(tmp_path, read):
    mark = tmp_path / "run"
    content = {"VGG16_0": Malicious(mark)}
    bad = pickle.dumps(content) if read is read_arrays else saved(content)
    with pytest.raises(MissingWeights) as refusal:
        read(bad, "FILE")
    assert not mark.exists()
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith("FILE cannot be read as weights")
    pickle.loads(pickle.dumps(content))
    assert mark.exists()  # the trap would have worked


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        pickle.dumps(np.array([print], dtype=object)),
        pickle.dumps({"a": np.array(["text"])}),
        pickle.dumps({"a": np.array([1, 2])}),
        pickle.dumps({"a": torch.zeros(1)}),
        pickle.dumps({1: np.zeros(2)}),
        pickle.dumps([np.zeros(2)]),
        pickle.dumps({"a": 1}),
        pickle.dumps({"a": np.zeros(2)})[:-20],
        b"",
        b"no pickle",
    ],
)
def test_what_else_a_pickle_may_hold_is_refused_in_one_line(content):
    with pytest.raises(MissingWeights, match="FILE cannot be read as weights") as refusal:
        read_arrays(content, "FILE")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_come_back_as_they_are(protocol):
    arrays = {
        "plain": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float64).reshape(2, 3)),
        "big": np.arange(3, dtype=">f4"),
    }
    found = read_arrays(pickle.dumps({"inner": arrays}, protocol=protocol), "FILE")["inner"]
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].numpy(), array)


@pytest.mark.parametrize("content", [b"", b"no archive", saved({"a": torch.zeros(3)})[:-30]])
def test_a_damaged_state_dict_is_refused(content):
    with pytest.raises(MissingWeights, match="cannot be read as weights"):
        read_state_dict(content, "FILE")


def _packed(content: bytes, how: int, times: int = 1) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as found, zipfile.ZipFile(made, "w", how) as archive:
        for member in found.namelist() * times:
            archive.writestr(member, found.read(member))
    return made.getvalue()


def _claiming(content: bytes) -> bytes:
    """Let the archive's table say of its last member that it takes three gigabytes."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        size = archive.infolist()[-1].file_size
    start = content.rindex(b"PK\x01\x02")
    assert content[start + 24 : start + 28] == size.to_bytes(4, "little")
    return content[: start + 24] + (3 * 2**30).to_bytes(4, "little") + content[start + 28 :]


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda content: _packed(content, zipfile.ZIP_DEFLATED), "it is packed"),
        (lambda content: _packed(content, zipfile.ZIP_STORED, 2), "a member twice"),
        (_claiming, "claim more than it holds"),
    ],
    ids=["packed", "twice", "claims gigabytes"],
)
def test_an_archive_that_torch_would_not_write_is_refused(change, complaint):
    content = _packed(saved({"a": torch.arange(3.0)}), zipfile.ZIP_STORED)
    assert read_state_dict(content, "FILE")["a"].tolist() == [0, 1, 2]
    with pytest.raises(MissingWeights, match=complaint):
        read_state_dict(change(content), "FILE")


def test_a_state_dict_holds_tensors_only():
    with pytest.raises(MissingWeights, match="other things than tensors"):
        read_state_dict(saved({"a": 1}), "FILE")


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.ones(1).expand(2**40),
    ],
    ids=["sparse", "without values", "claims a terabyte"],
)
def test_a_state_dict_holds_ordinary_tensors(weight):
    with pytest.raises(MissingWeights, match="other things than tensors|claim more than it holds"):
        read_state_dict(saved({"a": weight}), "FILE")


def test_a_pickle_may_share_its_parts_but_not_hold_itself():
    array = np.ones(3, np.float32)
    found = read_arrays(pickle.dumps({"a": array, "b": {"c": array}}, protocol=4), "FILE")
    assert found["a"] is found["b"]["c"]
    circle: dict = {}
    circle["a"] = circle
    with pytest.raises(MissingWeights, match="holds itself"):
        read_arrays(pickle.dumps(circle, protocol=4), "FILE")


def test_names_that_are_no_encoder(tmp_path):
    with pytest.raises(InvalidSettings, match=r"'vgg-16'.*did you mean vgg16.*understudy pretrain"):
        load_encoder("vgg-16", SHAPE)
    with pytest.raises(InvalidSettings, match="'inception' is not a known encoder"):
        load_encoder("inception", SHAPE)
    with pytest.raises(MissingWeights, match="No such file"):
        load_encoder(tmp_path / "mine.safetensors", SHAPE)
    assert set(KNOWN) < set(weights.WEIGHTS)


def header(**changes) -> EncoderHeader:
    fields = {
        "name": "resnet18", "width": 2, "shape": (3, 16, 16), "class_names": ("a", "b"),
        "mean": (0.1, 0.2, 0.3), "std": (0.5, 0.6, 0.7), "trained_on": "shapes", "images": 5,
        "images_sha256": "00", "epochs": 1, "test_accuracy": None,
    }  # fmt: skip
    return EncoderHeader(**fields | changes)


def test_our_own_file_brings_its_constants(tmp_path):
    drawn = Encoder("resnet18", SHAPE, width=2).init(torch.Generator().manual_seed(0))
    stored = {n: w for n, w in drawn.items() if n not in ("mean", "std")}
    path = tmp_path / "mine.safetensors"
    path.write_bytes(header().to_file(stored | {"head.weight": torch.zeros(2, 16)}))
    assert EncoderHeader.of_file(path.read_bytes()) == header()
    encoder, params, origin = load_encoder(str(path), SHAPE, precision=torch.bfloat16)
    assert encoder == Encoder("resnet18", SHAPE, precision=torch.bfloat16, width=2)
    assert params["mean"].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert params["std"].tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert (origin.name, origin.trained_on) == ("mine", "shapes")
    assert origin.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_damaged_files_of_ours_are_refused(tmp_path):
    path = tmp_path / "mine.safetensors"
    whole = header().to_file({"conv.weight": torch.zeros(2, 3, 3, 3)})
    path.write_bytes(whole)
    with pytest.raises(MissingWeights, match=r"no file of resnet18: norm\.weight is missing"):
        load_encoder(path, SHAPE)
    from safetensors.torch import save

    for content in (whole[:-9], whole[:20], b"", save({"a": torch.zeros(1)})):
        path.write_bytes(content)
        with pytest.raises(MissingWeights, match="cannot be read as an encoder"):
            load_encoder(path, SHAPE)
    path.write_bytes(header(format=2).to_file({}))
    with pytest.raises(MissingWeights, match="has format 2, expected 1"):
        load_encoder(path, SHAPE)
