"""Every reader: what goes in comes out; damage and lies are refused, in little memory."""

from __future__ import annotations

import contextlib
import gzip
import shutil
import struct
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sources import (
    WRITERS,
    encoded,
    huggingface_names,
    idx_bytes,
    parquet_claiming,
    pictures,
    png_claiming,
    write_cifar,
    write_folder,
    write_idx,
    write_listed,
    write_mosaic,
    write_npz,
    write_parquet,
)
from understudy.data import storage
from understudy.data.images import LabelledImages
from understudy.data.reading import Pointer, Reading
from understudy.data.sources import read_path, read_source
from understudy.errors import InvalidData, InvalidSettings
from understudy.progress import Progress

# The same examples every time: a build must not fail by chance. Raise max_examples to find more.
FEW = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
SIDES = {"cifar": (32,)}


@FEW
@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data())
def test_what_goes_in_comes_out(name, data, tmp_path_factory):
    write, channels = WRITERS[name]
    images = pictures(
        data.draw(st.integers(2, 60), "images"),
        side=data.draw(st.sampled_from(SIDES.get(name, (4, 7, 8))), "side"),
        channels=data.draw(st.sampled_from(channels), "channels"),
        seed=data.draw(st.integers(0, 99), "seed"),
    )
    labels = np.arange(len(images)) % 2
    found = read_source(write(tmp_path_factory.mktemp("set") / "set", images, labels))
    expected = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    # Class folders come class by class; all others in the order written.
    order = np.argsort(labels, kind="stable") if name == "class folders" else np.arange(len(labels))
    assert found.images.dtype == np.uint8
    assert np.array_equal(found.images, expected[order])
    assert np.array_equal(found.labels, labels[order])
    assert found.class_names == ("0", "1")
    assert found.unit == "record"
    assert np.array_equal(found.units, np.arange(len(images)))


@pytest.fixture(scope="session")
def intact(tmp_path_factory) -> dict[str, Path]:
    """Return one small set of each format."""
    root = tmp_path_factory.mktemp("intact")
    sets = {}
    for name, (write, channels) in WRITERS.items():
        images = pictures(6, side=32 if name == "cifar" else 8, channels=channels[-1])
        sets[name] = write(root / name / "set", images, np.arange(6) % 2)
    return sets


@settings(FEW, max_examples=30)
@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data())
def test_damaged_files_are_refused_or_read(name, data, intact, tmp_path_factory):
    """Whatever bytes change: a set or InvalidData, nothing else."""
    copy = tmp_path_factory.mktemp("damaged") / "set"
    source = intact[name]
    if source.is_dir():
        shutil.copytree(source, copy)
        victim = data.draw(st.sampled_from(sorted(p for p in copy.rglob("*") if p.is_file())))
    else:
        copy = victim = Path(shutil.copy(source, copy.with_suffix(source.suffix)))
    content = bytearray(victim.read_bytes())
    for _ in range(data.draw(st.integers(1, 4), "changes")):
        at = data.draw(st.integers(0, max(0, len(content) - 1)), "at")
        match data.draw(st.sampled_from(["cut", "set", "insert", "drop"]), "how"):
            case "cut":
                del content[at:]
            case "set":
                content[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "insert":
                content[at:at] = data.draw(st.binary(max_size=9))
            case "drop":
                del content[at : at + data.draw(st.integers(1, 9))]
    victim.write_bytes(bytes(content))
    with contextlib.suppress(InvalidData):
        # Past the net of `read_source`, which would hide what a reader did not foresee.
        assert isinstance(read_path(copy, Reading(), Progress()), LabelledImages)


@settings(FEW, max_examples=40)
@pytest.mark.parametrize("name", ["x.npz", "x.parquet", "x-images-idx3-ubyte", "x.idx.gz", "x.bin"])
@given(content=st.binary(max_size=300))
def test_any_bytes_are_refused(name, content, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(content)
    with pytest.raises(InvalidData):
        read_source(path)


def claiming_idx(folder: Path, *, packed: bool) -> Path:
    head = struct.pack(">IIII", 0x803, 2**32 - 1, 2**8, 1)  # 2**40 bytes
    path = folder / f"x-images-idx3-ubyte{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(head + bytes(1000)) if packed else head + bytes(1000))
    return path


def claiming_npz(folder: Path, *, packed: bool) -> Path:
    head = b"\x93NUMPY\x01\x00"
    text = str({"descr": "|u1", "fortran_order": False, "shape": (2**40, 1, 8, 8)})
    text = text.ljust(117) + "\n"
    path = folder / "x.npz"
    how = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", how) as archive:
        body = head + struct.pack("<H", len(text)) + text.encode() + bytes(500)
        archive.writestr("images.npy", body)
        archive.writestr("labels.npy", body)
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("claim", [claiming_idx, claiming_npz])
def test_a_small_file_that_claims_a_terabyte_is_refused_without_allocating(claim, packed, tmp_path):
    path = claim(tmp_path, packed=packed)
    assert path.stat().st_size < 2500
    refused_in_little_memory(path, "but is|ends after")


def test_a_table_that_claims_a_terabyte_is_refused_without_allocating(tmp_path):
    path = parquet_claiming(tmp_path, 2**40)
    refused_in_little_memory(path, "1099511627776 images|cannot be read")


def test_a_decompression_bomb_is_refused_without_allocating(tmp_path):
    folder = write_folder(tmp_path / "set", pictures(4), np.arange(4) % 2)
    (folder / "0" / "bomb.png").write_bytes(png_claiming(60_000, 60_000))
    refused_in_little_memory(folder, r"bomb.png cannot be read")


def refused_in_little_memory(path: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidData, match=message):
            read_source(path)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_large_sets_are_kept_in_a_file_that_nobody_else_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))
    images, labels = pictures(50, channels=3), np.arange(50) % 2
    in_memory = [read_source(w(tmp_path / n, images, labels)) for n, w in
                 (("npz", write_npz), ("idx", write_idx), ("folder", write_folder))]  # fmt: skip
    monkeypatch.setattr(storage, "IN_MEMORY", 1000)
    for small, path in zip(in_memory, ("npz/set.npz", "idx", "folder"), strict=True):
        mapped = read_source(tmp_path / path)
        assert np.array_equal(mapped.images, small.images)
        assert is_mapped(mapped.images), path
    assert list((tmp_path / "home" / "scratch").iterdir()) == []
    assert (tmp_path / "home" / "scratch").stat().st_mode & 0o077 == 0


def is_mapped(array: np.ndarray | None) -> bool:
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


@pytest.mark.parametrize("name", ["npz", "idx", "cifar", "mosaic", "class folders", "parquet"])
def test_size_and_channels_are_converted_alike_whatever_the_source(name, tmp_path):
    write, _ = WRITERS[name]
    images = pictures(6, side=32, channels=3)
    path = write(tmp_path / "set", images, np.arange(6) % 2)
    converted = read_source(path, Reading(size="12x16", channels=1))
    assert converted.shape == (1, 12, 16)
    wanted = read_source(
        write_npz(tmp_path / "npz", images, np.arange(6) % 2), Reading(size="12x16", channels=1)
    )
    found, expected = np.sort(converted.images.mean((1, 2, 3))), wanted.images.mean((1, 2, 3))
    assert np.allclose(found, np.sort(expected))


@pytest.mark.parametrize("shape", [(0, 8, 8), (6, 2**24, 0, 2**31), (0, 2**32 - 1, 2**32 - 1)])
def test_an_empty_array_with_huge_sides_is_refused(tmp_path, shape):
    head = struct.pack(f">I{len(shape)}I", 0x800 + len(shape), *shape)
    (tmp_path / "x-images-idx3-ubyte").write_bytes(head)
    with pytest.raises(InvalidData, match="is empty"):
        read_source(tmp_path / "x-images-idx3-ubyte")


def test_idx_splits_and_labels(tmp_path):
    images, labels = pictures(6), np.arange(6) % 3
    folder = write_idx(tmp_path / "set", images, labels)
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(images[:2]))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(labels[:2]))
    data = read_source(folder)
    assert len(data.test.images) == 2
    assert data.test.class_names == data.class_names == ("0", "1", "2")
    alone = read_source(folder / "train-images-idx3-ubyte")
    assert np.array_equal(alone.images, data.images)
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(InvalidData, match="no labels beside it"):
        read_source(folder / "train-images-idx3-ubyte")
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(images))
    with pytest.raises(InvalidData, match="3 dimensions, expected 1"):
        read_source(folder)
    (folder / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels) + b"!")
    with pytest.raises(InvalidData, match="more than the 6 bytes"):
        read_source(folder)


def test_npz_units_splits_and_orders(tmp_path):
    images = pictures(10, channels=3)
    patients = np.array(["b", "a", "b", "c", "c", "a", "d", "d", "d", "e"])
    path = write_npz(
        tmp_path, np.asfortranarray(images), np.arange(10) % 2, patient=patients,
        classes=["x", "y"], test_images=images[:3] / 255, test_labels=np.array([1, 0, 1]),
    )  # fmt: skip
    data = read_source(path, Reading(unit="patient"))
    assert np.array_equal(data.images, images.transpose(0, 3, 1, 2))
    assert data.units.tolist() == [0, 1, 0, 2, 2, 1, 3, 3, 3, 4]
    assert (data.unit, data.name, data.class_names) == ("patient", "set", ("x", "y"))
    assert np.array_equal(data.test.images, data.images[:3])
    assert data.test.labels.tolist() == [1, 0, 1]


def test_parquet_columns_names_and_splits(tmp_path):
    images, labels = pictures(6), np.array([0, 1, 1, 0, 2, 2])
    path = write_parquet(tmp_path / "data", images, labels, patient=["a", "b"] * 3)
    huggingface_names(path, ["cat", "dog", "cow"])
    path.rename(path.with_name("train-0.parquet"))
    write_parquet(tmp_path / "data", images[:2], labels[:2]).rename(
        tmp_path / "data" / "test-0.parquet"
    )
    data = read_source(tmp_path / "data", Reading(unit="patient"))
    assert data.class_names == ("cat", "dog", "cow")
    assert data.units.tolist() == [0, 1, 0, 1, 0, 1]
    assert data.unit == "patient"
    assert len(data.test.images) == 2
    with pytest.raises(InvalidData, match="no column 'nurse'"):
        read_source(tmp_path / "data", Reading(unit="nurse"))
    named = write_parquet(tmp_path / "words", images, np.array(list("xyyxzz")))
    assert read_source(named).class_names == ("x", "y", "z")


def test_parquet_rows_that_are_no_images(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    good = [encoded(image) for image in pictures(5)]
    table = pa.table({"image": [b"no image", None, *good], "label": [1, 1, 0, 1, 0, 1, 0]})
    parquet.write_table(table, tmp_path / "set.parquet")
    with pytest.raises(InvalidData, match="row 0 cannot be read"):
        read_source(tmp_path / "set.parquet")
    data = read_source(tmp_path / "set.parquet", Reading(skip_bad=True))
    assert len(data.images) == 5
    assert [name[-5:] for name in data.skipped] == ["row 0", "row 1"]
    assert data.labels.tolist() == [0, 1, 0, 1, 0]


def test_mosaics_take_any_array_as_label_or_unit(tmp_path):
    images = pictures(120, channels=3)
    path = write_mosaic(
        tmp_path / "set", images, np.zeros(120, int), gender=np.arange(120) % 2,
        person=np.arange(120) // 3,
    )  # fmt: skip
    data = read_source(path, Reading(labels="gender", unit="person"))
    assert np.array_equal(data.images, images.transpose(0, 3, 1, 2))
    assert data.labels.tolist() == [0, 1] * 60
    assert int(data.units.max()) + 1 == 40
    with pytest.raises(InvalidData, match="found: gender, label, person"):
        read_source(path, Reading(labels="age"))
    np.savez(path / "labels.npz", label=np.zeros(200, int))
    with pytest.raises(InvalidData, match="labels 200 images"):
        read_source(path)


def test_units_of_arrays_from_a_csv_file_in_order(tmp_path):
    path = write_cifar(tmp_path / "set", pictures(6, side=32, channels=3), np.arange(6) % 2)
    csv = tmp_path / "people.csv"
    csv.write_text("person\nann\nbob\nann\nann\nbob\neve\n")
    data = read_source(path, Reading(unit=str(csv)))
    assert data.units.tolist() == [0, 1, 0, 0, 1, 2]
    assert data.unit == "person"
    csv.write_text("person\nann\n")
    with pytest.raises(InvalidData, match="1 rows, the set 6 images"):
        read_source(path, Reading(unit=str(csv)))
    with pytest.raises(InvalidData, match="folder:1 needs images in folders"):
        read_source(path, Reading(unit="folder:1"))


def test_like_lends_public_constants(tmp_path):
    path = write_npz(tmp_path, pictures(6), np.arange(6) % 2)
    data = read_source(path, Reading(like="mnist"))
    assert data.normalisation.mean == (0.1307,)
    assert not data.is_public_benchmark
    with pytest.raises(InvalidData, match="do not fit"):
        read_source(path, Reading(like="cifar10"))
    with pytest.raises(InvalidData, match=r"did you mean mnist\?"):
        read_source(path, Reading(like="mnits"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("patient", Pointer("patient", column="patient")),
        ("folder:2", Pointer("folder", level=2)),
        ("patient=folder:2", Pointer("patient", level=2)),
        ("a/b.csv", Pointer(None, file=Path("a/b.csv"))),
        ("a/b.csv:who", Pointer("who", column="who", file=Path("a/b.csv"))),
        ("person=a/b.csv:who", Pointer("person", column="who", file=Path("a/b.csv"))),
        ("person=who", Pointer("person", column="who")),
    ],
)
def test_pointers_are_written_as_they_are_read(text, expected):
    assert Pointer.parse(text) == expected
    assert Pointer.parse(str(expected)) == expected


@pytest.mark.parametrize("bad", [{"size": "big"}, {"size": "3x"}, {"channels": 2}])
def test_bad_settings_of_reading_are_refused(bad):
    with pytest.raises(InvalidSettings, match="expected"):
        Reading(**bad)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.npz", "does not exist"),
        ("fashion-mnits", "did you mean fashion-mnist"),
        ("usps", "put usps.npz"),
    ],
)
def test_unknown_sources_are_refused(source, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidData, match=message):
        read_source(source)


def test_a_known_set_that_cannot_be_fetched_is_read_where_it_was_put(tmp_path):
    images = pictures(20, side=16)
    np.savez(tmp_path / "usps.npz", images=images, labels=np.arange(20) % 10,
             test_images=images, test_labels=np.arange(20) % 10)  # fmt: skip
    data = read_source("usps", Reading(data_dir=tmp_path))
    assert data.normalisation.mean == (0.2545,)
    assert not data.is_public_benchmark  # nobody has verified it
    assert len(data.test.images) == 20


def test_other_endings_are_refused(tmp_path):
    (tmp_path / "scans.tiff").write_bytes(b"II")
    with pytest.raises(InvalidData, match=r"ending '\.tiff'"):
        read_source(tmp_path / "scans.tiff")
    listed = write_listed(tmp_path / "set", pictures(4), np.arange(4) % 2)
    assert len(read_source(listed).images) == 4


@pytest.mark.parametrize(
    "ids",
    [
        np.array([1, np.nan, 2, 3, 4, 5]),
        np.array(["a", "", "b", "c", "d", "e"]),
        np.array(["a", " ", "b", "c", "d", "e"]),
        np.array([b"a", b"", b"c", b"d", b"e", b"f"]),
        np.array([1.5, 2, 3, 4, 5, 6]),
        np.array(["NaT", "2020-01-01"] * 3, "datetime64[D]"),
        np.arange(6) * 1j,
        np.zeros((6, 2), int),
        np.array(7),
        np.zeros(6, [("a", "f4")]),
    ],
)
def test_missing_and_odd_ids_are_refused(tmp_path, ids):
    path = write_npz(tmp_path, pictures(6), np.arange(6) % 2, patient=ids)
    with pytest.raises(InvalidData, match="usable 'patient'|dimensions|objects or records"):
        read_source(path, Reading(unit="patient"))


@pytest.mark.parametrize(
    ("ids", "units"),
    [
        (np.array(["p1", "p1 ", "p2", "p2", "p1", " p2"]), [0, 0, 1, 1, 0, 1]),
        (np.array([7.0, 7, 8, 9, 7, 8]), [0, 0, 1, 2, 0, 1]),
        (np.array([b"a", b"b", b"a", b"b", b"c", b"a"]), [0, 1, 0, 1, 2, 0]),
        (np.array([2**63, 1, 2**63 + 1, 1, 2, 3], np.uint64), [0, 1, 2, 1, 3, 4]),
    ],
)
def test_what_means_the_same_is_the_same_unit(tmp_path, ids, units):
    path = write_npz(tmp_path, pictures(6), np.arange(6) % 2, patient=ids)
    assert read_source(path, Reading(unit="patient")).units.tolist() == units


def test_rows_with_names_are_not_matched_by_their_order(tmp_path):
    images, labels = pictures(4), np.arange(4) % 2
    csv = tmp_path / "people.csv"
    csv.write_text("file,person\n3.png,a\n2.png,a\n1.png,b\n0.png,c\n")
    nameless = write_npz(tmp_path, images, labels)
    with pytest.raises(InvalidData, match="have no names"):
        read_source(nameless, Reading(unit=str(csv)))
    import pyarrow as pa
    from pyarrow import parquet

    cells = [{"bytes": encoded(image), "path": f"{n}.png"} for n, image in enumerate(images)]
    path = tmp_path / "set.parquet"
    parquet.write_table(pa.table({"image": cells, "label": labels, "person": list("wxyz")}), path)
    for how in (str(csv), f"{csv}:person"):  # by order it would be 0, 0, 1, 2
        assert read_source(path, Reading(unit=how)).units.tolist() == [0, 1, 2, 2]


@pytest.mark.parametrize("column", [[[1], [2], [3], [4]], [{"a": 1}] * 4, [1, None, 2, 3]])
def test_odd_columns_of_a_table_are_refused(tmp_path, column):
    path = write_parquet(tmp_path, pictures(4), np.arange(4) % 2, patient=column)
    with pytest.raises(InvalidData, match="no usable 'patient'|one value in each cell"):
        read_source(path, Reading(unit="patient"))


def test_parts_come_in_the_order_of_their_numbers(tmp_path):
    """As text, part 10 would come before part 2, and labels would go to other images."""
    images = pictures(11 * 50, channels=3)
    for part in range(11):
        write_mosaic(tmp_path / "set", images[part * 50 : part * 50 + 50], np.zeros(50, int))
        (tmp_path / "set" / "part_00.webp").rename(tmp_path / "set" / f"m{part}.webp")
    np.savez(tmp_path / "set" / "labels.npz", label=np.arange(550) % 2)
    assert np.array_equal(read_source(tmp_path / "set").images, images.transpose(0, 3, 1, 2))
    np.savez(tmp_path / "set" / "labels.npz", label=np.arange(60) % 2)
    with pytest.raises(InvalidData, match="labels 60 images, so none of m2.webp"):
        read_source(tmp_path / "set")


def test_splits_of_a_table_are_known_by_their_folders_too(tmp_path):
    for split, count in (("train", 6), ("test", 4), ("validation", 2), ("train/.cache", 6)):
        write_parquet(tmp_path / "set" / split, pictures(count), np.arange(count) % 2)
    data = read_source(tmp_path / "set")
    assert (len(data.images), len(data.test.images)) == (6, 4)


def test_labels_of_the_training_images_are_not_given_to_the_test_images(tmp_path):
    images = pictures(4)
    folder = write_idx(tmp_path / "set", images, np.zeros(4, int))
    (folder / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(images))
    (folder / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([1, 1, 0, 0])))
    (folder / "train-labels-flipped").write_bytes(b"not the labels")
    (tmp_path / "new.csv").write_text("label\n0\n1\n0\n1\n")
    data = read_source(folder, Reading(labels=str(tmp_path / "new.csv")))
    assert data.labels.tolist() == [0, 1, 0, 1]
    assert data.test.labels.tolist() == [1, 1, 0, 0]


def test_known_sets_take_nothing_from_elsewhere(tmp_path):
    for how in ({"labels": "x.csv"}, {"classes": 3}, {"like": "mnist"}, {"unit": "x.csv"}):
        with pytest.raises(InvalidData, match="cannot be given with the known set digits"):
            read_source("digits", Reading(**how))


@pytest.mark.parametrize("size", [3, 2000, "9" * 5000])
def test_sizes_that_cannot_be_are_refused_before_anything_is_read(size):
    with pytest.raises(InvalidSettings, match="size is"):
        Reading(size=size)
