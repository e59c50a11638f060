"""Write the intact inputs that damage starts from: `python -m tests.fuzz.seeds`."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as save_tensors

import understudy
from understudy.federated.release import facts_of, release
from understudy.files import canonical_json
from understudy.nets.classifiers import classifier
from understudy.nets.encoders import Encoder
from understudy.nets.generators import GENERATORS
from understudy.nets.released import Classifier, Generator
from understudy.privacy.federation import Course, Part
from understudy.synthetic import SyntheticSet
from understudy.training.pretrained import EncoderHeader

sys.path.append(str(Path(__file__).parents[1]))
from sources import encoded, idx_bytes, pictures, write_cifar, write_npz, write_parquet

from .readers import CORPUS

QUICK = {
    "method": "psg", "settings": {"rounds": 1, "outer": 1, "batches": 1}, "accountant": "renyi",
}  # fmt: skip


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """Yield (reader, ending, content)."""
    images, labels = pictures(6, side=4), np.arange(6) % 2
    yield "idx", "", idx_bytes(images)
    yield "idx", "labels", idx_bytes(labels)
    yield "idx", "gz", gzip.compress(idx_bytes(images), mtime=0)
    yield from _files(images, labels)
    for form in ("PNG", "JPEG", "WEBP"):
        yield "images", form.lower(), encoded(images[0], form)
    yield "images", "16bit.png", encoded((images[0].astype(np.uint16) << 8) + 3)
    yield "csv", "csv", b"file,label,patient\n1.png,a,p1\n2.png,b,p2\n"
    arrays = {"a": np.ones((2, 3), np.float32), "b": {"c": np.zeros(4, ">f8")}}
    for protocol in (3, 4):
        yield "arrays", f"{protocol}.pickle", pickle.dumps(arrays, protocol=protocol)
    yield from _networks()
    yield "config", "toml", b'epsilon = 3\npreset = "auto"\nimages_per_class = 2\nseed = 1\n'
    folder = resources.files("understudy.reproduce") / "experiments"
    yield "experiment", "toml", (folder / "psg-table-3.toml").read_bytes()
    metrics = {"format": 1, "utility": [{"model": "convnet", "accuracy": {"mean": 0.5}}]}
    run = {"request": {"epsilon": 1.0, "method": "psg"}, "data_set": "a", "ledger": "b"} | metrics
    yield "run", "json", json.dumps(run).encode()
    yield from _archives()
    message = {
        "arrays": {
            "images": {"dtype": "float32", "shape": [1, 2], "stype": "understudy.raw",
                       "bytes": [0] * 8},
            "labels": {"dtype": "int64", "shape": [1], "stype": "understudy.raw",
                       "bytes": [0] * 8},
        },
        "said": {"round": "a", "is-asked": True, "declined": "", "delta": 0.1},
    }  # fmt: skip
    yield "wire", "json", json.dumps(message).encode()


def _files(images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[str, str, bytes]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        yield "npz", "npz", write_npz(folder, images, labels).read_bytes()
        np.savez_compressed(
            folder / "x.npz", images=images / 255, labels=np.array(["a", "b"])[labels],
            classes=["a", "b"], test_images=images, test_labels=np.array(["a", "b"])[labels],
        )  # fmt: skip
        yield "npz", "packed.npz", (folder / "x.npz").read_bytes()
        yield "parquet", "parquet", write_parquet(folder, images, labels).read_bytes()
        coloured = pictures(2, side=32, channels=3)
        batch = write_cifar(folder, coloured, labels[:2]) / "data_batch_1.bin"
        yield "cifar", "bin", batch.read_bytes()
        data = understudy.labelled_images(pictures(8), np.arange(8) % 2, classes=("a", "b"))
        made = understudy.synthesize(data, out=folder / "run", ledger=folder / "ledger", **QUICK)
        content = json.loads((made.directory / "release" / "certificate.json").read_bytes())
        yield "certificate", "json", certified(content, _set().to_bytes())
        part = Part(rounds_answered=3, noise_multiplier=2.0, delta=1e-5)
        course = Course(
            clients=3, asked_per_round=1, rounds=4, rounds_with_all_clients=4, dimension=64,
            parts=(part, part), rounds_with_equal_noise=4,
        )  # fmt: skip
        of_clients = release(
            _set(), course, folder / "federation", facts=facts_of(3, [1, 4, 4], ["a", "b"]),
            name="gs-wgan", settings={"steps": 4},
        )  # fmt: skip
        yield "certificate", "federation.json", certified(of_clients.content, _set().to_bytes())


def certified(content: dict, made: bytes) -> bytes:
    """Return a certificate's content as one of the set `made`, sealed."""
    content["files"] = {"synthetic.safetensors": hashlib.sha256(made).hexdigest()}
    del content["seal"]
    content["seal"] = hashlib.sha256(canonical_json(content)).hexdigest()
    return canonical_json(content)


def _set(**more) -> SyntheticSet:
    pixels = torch.arange(64).reshape(4, 1, 4, 4) / 255
    return SyntheticSet(pixels, torch.tensor([0, 1, 0, 1]), ("a", "b"), **more)


def _networks() -> Iterator[tuple[str, str, bytes]]:
    yield "set", "safetensors", _set().to_bytes()
    yield "set", "soft.safetensors", _set(soft_labels=torch.full((4, 2), 0.5)).to_bytes()
    draws = torch.Generator().manual_seed(0)
    for name, size in (("dense", {"hidden": (4,)}), ("conv", {"hidden": 4, "channels": (2, 2)})):
        painter = GENERATORS[name]((1, 4, 4), 2, code=2, **size)
        params = painter.init(draws)
        statistics = painter.statistics(params, draws, batches=1)
        generator = Generator(painter, params, statistics, (0.5, 0.5))
        yield "generator", f"{name}.safetensors", generator.to_bytes()
    encoder = Encoder("resnet18", (3, 16, 16), ":", None, 1)
    header = EncoderHeader(
        name="resnet18", width=1, shape=(3, 16, 16), class_names=("a", "b"), mean=(0.5,) * 3,
        std=(0.5,) * 3, trained_on="a", images=2, images_sha256="0", epochs=1, test_accuracy=None,
    )  # fmt: skip
    shapes = encoder.parameter_shapes.items()
    yield "encoder", "safetensors", header.to_file({n: torch.zeros(s) for n, s in shapes})
    params = classifier("convnet", (1, 8, 8), 2, width=2).init(draws)
    made = Classifier(name="convnet", shape=(1, 8, 8), width=2, class_names=("a", "b"),
                      mean=(0.5,), std=(0.5,), params=params)  # fmt: skip
    yield "classifier", "safetensors", made.to_bytes()
    header = {"run": "run", "block": 0, "attempt": 1, "kind": "checkpoint", "step": 1,
              "releases": {"a": 1}, "notes": {}, "names": ["x"]}  # fmt: skip
    block = save_tensors({"x": torch.ones(2)}, metadata={"understudy": json.dumps(header)})
    yield "block", "block", block + bytes(32)
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2, 3), "b": torch.zeros(4)}, buffer)
    yield "state_dict", "pt", buffer.getvalue()


def _archives() -> Iterator[tuple[str, str, bytes]]:
    files = {"data_batch_1.png": encoded(pictures(1, side=32, channels=3).reshape(1, 1024, 3)),
             "test_batch.png": encoded(pictures(1, side=32, channels=3).reshape(1, 1024, 3)),
             "train_lables.json": b"[1]", "test_lables.json": b"[0]"}  # fmt: skip
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    yield "archive", "tgz", made.getvalue()
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"package/{name}", content)
    yield "archive", "whl", made.getvalue()


def main() -> None:
    """Write them all."""
    for reader, ending, content in seeds():
        folder = CORPUS / reader
        folder.mkdir(parents=True, exist_ok=True)
        name = "intact" + (f".{ending}" if ending else "")
        (folder / name).write_bytes(content)
        print(f"{reader}/{name}: {len(content)} bytes")


if __name__ == "__main__":
    main()
