"""Real data in, usable data out: as a person meets it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sources import encoded, idx_bytes, pictures, png_claiming, write_folder, write_idx, write_npz
from test_cli import TINY, call, folder  # noqa: F401
from understudy.data import catalogue, storage
from understudy.privacy import ledger as ledgers


def faces(root: Path, count: int = 60) -> Path:
    """Write class folders of JPEG files, and a CSV file with a person for every three images."""
    images = pictures(count, channels=3)
    rows = ["file,person"]
    for number, image in enumerate(images):
        place = root / "faces" / ("man", "woman")[number % 2] / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(image, "JPEG"))
        rows.append(f"{place.relative_to(root / 'faces').as_posix()},p{number // 3}")
    (root / "people.csv").write_text("\n".join(rows))
    return root / "faces"


def test_faces_the_whole_way(folder, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    path = faces(folder)
    how = [path, "--unit", "people.csv", "--size", "8"]
    code, out, _ = call("register", *how, "--name", "faces", "--hold-out", "0.2", capsys=capsys)
    assert code == 0
    assert "16 units (each a person), 2 classes, shape (3, 8, 8)" in out
    code, _, err = call("generate", *how, "--batch", "8", "--out", "run", *TINY, capsys=capsys)
    assert code == 0, err
    certificate = json.loads((folder / "run" / "release" / "certificate.json").read_text())
    assert certificate["guarantee"]["unit"] == "person"
    assert certificate["data_set"]["public_facts"]["class_names"] == ["man", "woman"]
    assert "people.csv" not in json.dumps(certificate)
    monkeypatch.chdir("/")  # the run remembers how its data was read
    quick = ["--epochs", "2", "--width", "4"]
    code, out, err = call("evaluate", folder / "run", *quick, capsys=capsys)
    assert code == 0, err
    assert "on 12 images, hold-out of faces" in out
    code, out, err = call("export", folder / "run", "--to", "parquet", capsys=capsys)
    assert code == 0, err
    assert f"20 images as parquet: {folder / 'run-parquet'}" in out
    import datasets

    opened = datasets.load_dataset(
        str(folder / "run-parquet"), split="train", cache_dir=str(folder / "cache")
    )
    assert opened.features["label"].names == ["man", "woman"]
    # A test set elsewhere, without one of the classes, is read at the size of the run.
    shutil.copytree(path / "woman", folder / "other" / "woman")
    code, out, err = call(
        "evaluate", folder / "run", "--test", folder / "other", *quick, capsys=capsys
    )
    assert code == 0, err
    assert "on 30 images, test set other" in out


def test_the_same_images_with_another_unit_are_not_another_set(folder, capsys):  # noqa: F811
    path = faces(folder)
    shared = ["--size", "8"]
    assert call("register", path, "--unit", "people.csv", *shared, capsys=capsys)[0] == 0
    code, _, err = call("generate", path, *shared, *TINY, capsys=capsys)
    assert code == 2
    assert "registered as 'faces' with unit person" in err
    assert "--unit" in err


def test_skipped_images_are_counted_and_recorded(folder, capsys):  # noqa: F811
    path = faces(folder)
    (path / "man" / "00004.jpg").write_bytes(b"gone")
    code, _, err = call("generate", path, "--size", "8", "--out", "run", *TINY, capsys=capsys)
    assert code == 2
    assert "man/00004.jpg cannot be read" in err
    code, out, err = call(
        "generate", path, "--size", "8", "--skip-bad", "--out", "run", "--batch", "8", *TINY,
        capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    assert "1 images could not be read and are left out" in out
    recorded = json.loads((folder / "run" / "private" / "run.json").read_text())["skipped"]
    assert [Path(name).name for name in recorded] == ["00004.jpg"]
    released = b"".join(p.read_bytes() for p in (folder / "run" / "release").iterdir())
    assert b"00004" not in released


def test_generate_fetches_a_known_set(folder, capsys, monkeypatch):  # noqa: F811
    import hashlib

    images, labels = pictures(40), np.arange(40) % 10
    place = folder / "data" / "mnist"
    write_idx(place, images, labels, packed=True)
    files = {
        "train-images-idx3-ubyte": hashlib.sha256(idx_bytes(images)).hexdigest(),
        "train-labels-idx1-ubyte": hashlib.sha256(idx_bytes(labels)).hexdigest(),
    }
    tiny = catalogue.KnownSet(
        **vars(catalogue.CATALOGUE["mnist"]) | {"files": files, "web": (), "npm": None}
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "mnist", tiny)
    monkeypatch.setenv("UNDERSTUDY_HOME", str(folder / "home"))
    code, _, err = call("generate", "mnist", *TINY, capsys=capsys)
    assert code == 2
    assert "put train-images-idx3-ubyte, train-labels-idx1-ubyte" in err
    monkeypatch.setenv("UNDERSTUDY_DATA", str(folder / "data"))
    code, out, err = call(
        "generate", "mnist", "--out", "run", "--batch", "8", "--width", "4", *TINY, capsys=capsys
    )
    assert code == 0, err
    assert "mnist: from folder" in out
    certificate = json.loads((folder / "run" / "release" / "certificate.json").read_text())
    assert certificate["data_set"]["is_public_benchmark"]
    assert certificate["data_set"]["public_facts"]["mean"] == [0.1307]
    code, out, _ = call("fetch", "mnist", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["directory"] == str(folder / "home" / "data" / "mnist")
    _, out, _ = call("fetch", capsys=capsys)
    assert "can be fetched" in out
    code, _, err = call("fetch", "minst", capsys=capsys)
    assert code == 2
    assert "did you mean mnist?" in err


def spoiled(root: Path, name: str, content: bytes) -> Path:
    """Return class folders of which one file holds `content`."""
    path = write_folder(root / "set", pictures(6), np.arange(6) % 2)
    (path / "0" / name).write_bytes(content)
    return path


def cut(path: Path, *, to: int) -> Path:
    path.write_bytes(path.read_bytes()[:to])
    return path


def listed(root: Path, rows: str) -> Path:
    path = write_folder(root / "set", pictures(6), np.arange(6) % 2)
    (path / "labels.csv").write_text(rows)
    return path


def cut_idx(root: Path) -> Path:
    path = write_idx(root / "set", pictures(6), np.arange(6) % 2)
    cut(path / "train-images-idx3-ubyte", to=100)
    return path


def claiming(root: Path) -> Path:
    path = root / "x-images-idx3-ubyte"
    path.write_bytes(idx_bytes(pictures(2))[:4] + b"\xff" * 8 + b"\0\0\1\0" + bytes(1000))
    return path


def empty_class(root: Path) -> Path:
    path = write_folder(root / "set", pictures(6), np.arange(6) % 2)
    (path / "2").mkdir()
    return path


def twice(root: Path) -> list[object]:
    path = write_folder(root / "set", pictures(2), np.arange(2) % 2)
    (root / "p.csv").write_text("file,p\n0/0000.png,a\n1/0001.png,b\n0/0000.png,c\n")
    return [path, "--unit", "p.csv"]


def no_parquet(root: Path) -> Path:
    (root / "x.parquet").write_bytes(b"PAR1 nothing of the kind PAR1")
    return root / "x.parquet"


WIDE, COLOUR = np.zeros((8, 30), np.uint8), np.zeros((8, 8, 3), np.uint8)
BAD = {
    "truncated IDX": (lambda f: [cut_idx(f)], "copy it again"),
    "claims more than it holds": (lambda f: [claiming(f)], "but is 1016 bytes long"),
    "truncated npz": (
        lambda f: [cut(write_npz(f, pictures(6), np.arange(6) % 2), to=300)],
        "cannot be read as .npz",
    ),
    "corrupt png": (lambda f: [spoiled(f, "x.png", b"\x89PNG\r\n\x1a\n")], "0/x.png cannot"),
    "corrupt parquet": (lambda f: [no_parquet(f)], "cannot be read as parquet"),
    "bomb": (lambda f: [spoiled(f, "x.png", png_claiming(9000, 9999))], "9000 x 9999"),
    "mixed sizes": (lambda f: [spoiled(f, "x.png", encoded(WIDE))], "--size"),
    "mixed channels": (lambda f: [spoiled(f, "x.png", encoded(COLOUR))], "--channels"),
    "empty class": (lambda f: [empty_class(f)], "class folder"),
    "missing image": (lambda f: [listed(f, "file,label\nx.png,a")], "names x.png"),
    "duplicate unit": (twice, "names 0/0000.png twice, in rows 2 and 4"),
    "unknown name": (lambda _: ["cifar-10"], "did you mean cifar10?"),
    "bad size": (lambda f: [write_npz(f, pictures(6), np.arange(6) % 2), "--size", "x"], "size"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.filterwarnings("ignore:.*decompression bomb")
def test_bad_data_gets_one_line_and_leaves_nothing(name, folder, capsys):  # noqa: F811
    arguments, message = BAD[name]
    given = arguments(folder)
    before = sorted(folder.rglob("*"))
    code, _, err = call("generate", *given, *TINY, capsys=capsys)
    assert code == 2, err
    assert err.count("\n") == 1, err
    assert message in err
    assert sorted(folder.rglob("*")) == before


def test_no_room_for_a_large_set_is_said(folder, capsys, monkeypatch):  # noqa: F811
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setenv("UNDERSTUDY_HOME", str(folder / "home"))
    monkeypatch.setattr(storage, "IN_MEMORY", 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    path = write_folder(folder / "set", pictures(6), np.arange(6) % 2)
    code, _, err = call("generate", path, *TINY, capsys=capsys)
    assert code == 2
    assert "no space left on device; free some space" in err
    assert err.count("\n") == 1
    assert not (folder / "runs").exists()


def test_export_on_the_command_line(folder, capsys):  # noqa: F811
    assert call("generate", "digits", "--out", "run", *TINY, capsys=capsys)[0] == 0
    shutil.rmtree("run/private")  # what was shared has none
    code, out, _ = call("export", "run", "--to", "png", "--out", "shared", capsys=capsys)
    assert code == 0
    assert "100 images as png: shared" in out
    assert len(list((folder / "shared").glob("*/*.png"))) == 100
    code, _, err = call("export", "run", "--to", "gif", capsys=capsys)
    assert code == 2
    assert "gif" in err
    code, _, err = call("evaluate", "run", capsys=capsys)
    assert code == 2
    assert "pass a test set with --test" in err
    assert not ledgers.Ledger(folder / "ledger.sqlite").disclosures(1)


def test_the_example_of_the_docs_runs(folder, capsys):  # noqa: F811
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    example = page.rpartition("```python\n")[2].partition("```")[0]
    made = "runs/digits-rehearsal-eps10"  # as the page has it; any run will do
    assert call("generate", "digits", "--out", made, *TINY, capsys=capsys)[0] == 0
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=True
    )
    assert "accuracy on real digits: 0." in done.stdout
