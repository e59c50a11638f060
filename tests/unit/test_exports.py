"""Exports open in the tools they are made for, and come from `release/` alone."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import understudy
from understudy.data.sources import read_source
from understudy.errors import InvalidSettings, OutputExists, StorageError, VerificationFailed
from understudy.exports import FORMS, folder_names
from understudy.synthetic import SyntheticSet

QUICK = {
    "method": "psg", "settings": {"rounds": 1, "outer": 1, "batches": 1}, "accountant": "renyi",
}  # fmt: skip


@pytest.fixture(scope="module", params=[1, 3], ids=["grey", "colour"])
def release(request, tmp_path_factory):
    """Return the released part of a run, and nothing else of it."""
    folder = tmp_path_factory.mktemp("run")
    shape = (40, 8, 8) if request.param == 1 else (40, 8, 8, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = understudy.labelled_images(
        images, np.arange(40) % 2, classes=("T-shirt/top", "Bag"), name="clothes"
    )
    made = understudy.synthesize(data, out=folder / "made", ledger=folder / "ledger", **QUICK)
    shutil.move(made.directory / "release", folder / "alone")
    shutil.rmtree(made.directory)
    return folder / "alone"


def pixels(release):
    """Return the released images with 8 bits, (n, c, h, w)."""
    return (understudy.load(release).images * 255).round().byte().numpy()


@pytest.mark.parametrize("to", FORMS)
def test_every_format_comes_with_a_card_and_the_certificate(release, tmp_path, to):
    found = understudy.export(release, to=to, out=tmp_path / "out")
    assert found.images == 20
    card = (found.directory / "README.md").read_text()
    _, header, body = card.split("---\n", 2)
    meta = yaml.safe_load(header)
    assert meta["task_categories"] == ["image-classification"]
    assert {"synthetic", "differential-privacy"} <= set(meta["tags"])
    assert re.search(r"epsilon (10|9\.99\d?) and", body)
    for part in ("## Guarantee", "delta 1e-05", "each record", "## What it is for",
                 "## What it is not for", "## Files", "T-shirt/top"):  # fmt: skip
        assert part in body
    certificate = (found.directory / "certificate.json").read_bytes()
    assert certificate == (release / "certificate.json").read_bytes()
    assert not list(tmp_path.glob("*.partial"))
    with pytest.raises(OutputExists):
        understudy.export(release, to=to, out=tmp_path / "out")


@pytest.mark.parametrize("to", ["npz", "idx", "png", "parquet"])
def test_our_own_readers_read_it_back(release, tmp_path, to):
    out = understudy.export(release, to=to, out=tmp_path / "out").directory
    data = read_source(out / "synthetic.npz" if to == "npz" else out)
    assert np.array_equal(data.images, pixels(release))
    assert data.labels.tolist() == understudy.load(release).labels.tolist()


def test_parquet_opens_in_datasets(release, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    out = understudy.export(release, to="parquet", out=tmp_path / "out").directory
    opened = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(opened.features["image"], datasets.Image)
    assert isinstance(opened.features["label"], datasets.ClassLabel)
    assert opened.features["label"].names == ["T-shirt/top", "Bag"]
    assert len(opened) == 20
    for number in (0, 7, 19):
        array = np.asarray(opened[number]["image"])
        expected = pixels(release)[number]
        assert np.array_equal(array if array.ndim == 3 else array[..., None],
                              expected.transpose(1, 2, 0))  # fmt: skip
    assert opened["label"][:] == understudy.load(release).labels.tolist()


@pytest.fixture
def soft_release(tmp_path):
    """Return a softly labelled set's released part."""
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    data = understudy.labelled_images(images, np.arange(40) % 2, classes=("a", "b"), name="soft")
    few = {
        "images_per_class": 200, "waves": 6, "components": 2, "samples": 20, "networks": 1,
        "width": 2, "hidden": 2, "refine_steps": 1, "refine_batch": 4, "teacher_steps": 1,
        "taught": 4,
    }  # fmt: skip
    made = understudy.synthesize(
        data, method="rehearsal", settings=few, out=tmp_path / "made", ledger=tmp_path / "ledger",
        accountant="renyi",
    )  # fmt: skip
    return made.directory / "release"


def test_soft_labels_are_exported_wherever_they_can_be_and_hard_ones_everywhere(
    soft_release, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    made = understudy.load(soft_release)
    assert torch.equal(made.labels, made.soft_labels.argmax(1))
    out = {to: understudy.export(soft_release, to=to, out=tmp_path / to).directory for to in FORMS}
    cards = {to: (folder / "README.md").read_text() for to, folder in out.items()}
    stored = load_file(out["safetensors"] / "synthetic.safetensors")
    assert torch.equal(stored["soft_labels"], made.soft_labels)
    with np.load(out["npz"] / "synthetic.npz") as arrays:
        assert np.array_equal(arrays["soft_labels"], made.soft_labels.numpy())
    opened = datasets.load_dataset(
        str(out["parquet"]), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert np.allclose(opened["soft_labels"][:], made.soft_labels.numpy())
    for to in ("npz", "safetensors", "parquet"):
        assert "`soft_labels`" in cards[to]
    for to in ("png", "idx"):
        assert "likeliest class" in cards[to]
    for to in ("npz", "idx", "parquet"):
        data = read_source(out[to] / "synthetic.npz" if to == "npz" else out[to])
        assert data.labels.tolist() == made.labels.tolist()
    assert "`soft_labels`" in (soft_release / "README.md").read_text()


def test_what_is_drawn_later_is_labelled_softly_too(soft_release, tmp_path):
    made = understudy.load(soft_release)
    again = understudy.sample(soft_release, count=len(made), seed=0, device="cpu")
    assert torch.equal(again.images, made.images)
    assert torch.allclose(again.soft_labels, made.soft_labels, atol=1e-4)
    more = understudy.sample(soft_release, per_class=7, seed=1, out=tmp_path / "m.safetensors")
    stored = SyntheticSet.load(tmp_path / "m.safetensors")
    assert len(stored) == 14
    assert torch.equal(stored.soft_labels, more.soft_labels)
    assert torch.equal(stored.labels, more.soft_labels.argmax(1))


def test_png_folders_sort_in_the_order_of_the_labels(release, tmp_path):
    out = understudy.export(release, to="png", out=tmp_path / "out").directory
    classes = sorted(p.name for p in out.iterdir() if p.is_dir())
    assert classes == ["0_T-shirt_top", "1_Bag"]
    first = sorted((out / classes[1]).iterdir())[0]
    assert np.asarray(Image.open(first)).shape[:2] == (8, 8)


def test_tensors_are_exact(release, tmp_path):
    made = understudy.load(release)
    out = understudy.export(release, to="safetensors", out=tmp_path / "a").directory
    assert torch.equal(load_file(out / "synthetic.safetensors")["images"], made.images)
    with np.load(understudy.export(release, to="npz", out=tmp_path / "b").directory
                 / "synthetic.npz") as arrays:  # fmt: skip
        assert np.array_equal(arrays["images"], made.images.numpy())
        assert arrays["classes"].tolist() == ["T-shirt/top", "Bag"]


def test_a_loader_takes_it_as_it_is(release):
    dataset = understudy.load(release)
    assert isinstance(dataset, torch.utils.data.Dataset)
    image, label = dataset[3]
    assert image.shape == dataset.images.shape[1:]
    assert isinstance(label, int)
    batches = list(DataLoader(dataset, batch_size=8, shuffle=True))
    assert sum(len(labels) for _, labels in batches) == len(dataset) == 20


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        (["b", "a"], ["0_b", "1_a"]),
        (["a/b", "a_b"], ["0_a_b", "1_a_b"]),
        (["..", "x"], ["_", "x"]),
        ([str(n) for n in range(11)], [f"{n:02}_{n}" for n in range(11)]),
        (["A", "a"], ["0_A", "1_a"]),
    ],
)
def test_folder_names_are_safe_distinct_and_sorted(names, expected):
    assert folder_names(names) == expected
    assert sorted(expected) == expected


def test_a_release_that_was_altered_is_not_passed_on(release, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(release, copy)
    (copy / "synthetic.safetensors").write_bytes(b"other")
    with pytest.raises(VerificationFailed):
        understudy.export(copy, to="npz", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_a_guarantee_a_flag_is_needed(tmp_path):
    run = understudy.synthesize(
        "digits", epsilon=float("inf"), out=tmp_path / "run", ledger=tmp_path / "ledger", **QUICK
    ).directory
    with pytest.raises(InvalidSettings, match="--without-guarantee"):
        understudy.export(run, to="npz")
    assert not (tmp_path / "run-npz").exists()
    out = understudy.export(run, to="npz", without_guarantee=True).directory
    assert out == tmp_path / "run-npz"
    card = (out / "README.md").read_text()
    assert "**None.**" in card
    assert "differential-privacy" not in card
    for contradiction in ("no cost", "the guarantee", "Training and testing", "A guarantee for"):
        assert contradiction not in card
        assert contradiction not in (run / "release" / "README.md").read_text()
    assert "may show the data of any one record" in card
    assert json.loads((out / "certificate.json").read_text())["guarantee"]["kind"] == "none"


def test_a_full_disk_leaves_nothing(release, tmp_path, monkeypatch):
    from understudy import exports

    written = []

    def full(path, content):
        written.append(path)
        if len(written) > 5:
            raise StorageError("cannot write: no space left on device")
        path.write_bytes(content)

    monkeypatch.setattr(exports, "write_file", full)
    with pytest.raises(StorageError):
        understudy.export(release, to="png", out=tmp_path / "out")
    assert len(written) == 6
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_of_the_same_name_is_left_alone(release, tmp_path):
    (tmp_path / "out.partial" / "private").mkdir(parents=True)
    understudy.export(release, to="npz", out=tmp_path / "out")
    assert (tmp_path / "out.partial" / "private").is_dir()


def test_idx_holds_no_labels_above_255():
    many = SyntheticSet(
        torch.zeros(300, 1, 8, 8), torch.arange(300), tuple(str(n) for n in range(300))
    )
    with pytest.raises(InvalidSettings, match="up to 255"):
        list(FORMS["idx"].write(many))


def test_a_set_without_labels_has_one_folder_and_no_idx():
    made = SyntheticSet(torch.zeros(3, 1, 8, 8), torch.full((3,), -1), ("cat", "dog"))
    names = [name for name, _ in FORMS["png"].write(made)]
    assert names == [f"unlabelled/{number:06}.png" for number in range(3)]
    with pytest.raises(InvalidSettings, match="no labels"):
        list(FORMS["idx"].write(made))
