"""Folders of images: class folders, label files, units, and what may be wrong with them."""

from __future__ import annotations

import os

import numpy as np
import pytest
from PIL import Image

from sources import encoded, pictures, png_claiming, write_folder, write_listed
from understudy.data import decode
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.errors import InvalidData
from understudy.progress import Progress


class Notes(Progress):
    def __init__(self):
        self.said = []
        self.counted = {}

    def say(self, text):
        self.said.append(text)

    def steps(self, steps, *, spent=None, what=""):
        for step in steps:
            yield step
            self.counted[what] = (step + 1, steps.stop)


@pytest.fixture
def folder(tmp_path):
    """Return six grey pictures in two class folders, 0 and 1."""
    return write_folder(tmp_path / "scans", pictures(6), np.arange(6) % 2)


def test_class_folders(folder):
    data = read_source(folder)
    assert data.name == "scans"
    assert data.class_names == ("0", "1")
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert np.array_equal(data.images[:, 0], pictures(6)[[0, 2, 4, 1, 3, 5]])


@pytest.mark.parametrize("form", ["png", "webp"])
def test_lossless_formats_are_exact(tmp_path, form):
    images = pictures(4, channels=3)
    data = read_source(write_folder(tmp_path / "set", images, np.array([0, 0, 1, 1]), form))
    assert np.array_equal(data.images, images.transpose(0, 3, 1, 2))


def test_jpeg_is_read_upright(tmp_path):
    """EXIF orientation 6 means: turn by 90 degrees clockwise to view."""
    steps = np.repeat(np.arange(0, 240, 30, dtype=np.uint8)[:, None], 12, axis=1)  # 8 x 12
    exif = Image.Exif()
    exif[0x0112] = 6
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        content = encoded(steps, "JPEG", quality=95, exif=exif)
        (tmp_path / "set" / label / "x.jpg").write_bytes(content)
    data = read_source(tmp_path / "set")
    assert data.shape == (1, 12, 8)
    expected = np.rot90(steps, -1).astype(int)
    assert np.abs(data.images[0, 0].astype(int) - expected).max() < 12


@pytest.mark.parametrize(
    ("mode", "channels"),
    [("1", 1), ("L", 1), ("LA", 1), ("I;16", 1), ("P", 3), ("RGB", 3), ("RGBA", 3)],
)
def test_every_kind_of_png(tmp_path, mode, channels):
    sixteen_bits = Image.fromarray(np.full((8, 8), 65535, np.uint16))
    white = Image.fromarray(np.full((8, 8, 3), 255, np.uint8))
    picture = sixteen_bits if mode == "I;16" else white.convert(mode)
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        picture.save(tmp_path / "set" / label / "x.png")
    data = read_source(tmp_path / "set")
    assert data.shape == (channels, 8, 8)
    assert data.images.min() == 255


def test_mixed_sizes_need_a_size(folder):
    (folder / "1" / "wide.png").write_bytes(encoded(np.zeros((8, 20), np.uint8)))
    with pytest.raises(InvalidData, match=r"wide.png is 8 x 20 .* 8 x 8; .*--size"):
        read_source(folder)
    data = read_source(folder, Reading(size=6))
    assert data.images.shape == (7, 1, 6, 6)


def test_mixed_channels_need_a_choice(folder):
    (folder / "1" / "colour.png").write_bytes(encoded(np.zeros((8, 8, 3), np.uint8)))
    with pytest.raises(InvalidData, match=r"colour.png is in colour, .* is grey; .*--channels"):
        read_source(folder)
    assert read_source(folder, Reading(channels=3)).shape == (3, 8, 8)
    assert read_source(folder, Reading(channels=1)).shape == (1, 8, 8)


def test_size_crops_the_middle(tmp_path):
    picture = np.zeros((8, 24), np.uint8)
    picture[:, 8:16] = 255
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "x.png").write_bytes(encoded(picture))
    assert read_source(tmp_path / "set", Reading(size=8)).images.min() == 255


def test_images_too_large_to_learn_from_need_a_size(tmp_path):
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "x.jpg").write_bytes(
            encoded(np.zeros((1200, 1300), np.uint8), "JPEG")
        )
    with pytest.raises(InvalidData, match=r"1200 x 1300 .*--size"):
        read_source(tmp_path / "set")
    assert read_source(tmp_path / "set", Reading(size=16)).shape == (1, 16, 16)


def test_an_unreadable_file_is_named_or_skipped(folder):
    (folder / "0" / "0001.png").write_bytes(b"no picture")
    (folder / "1" / "0003.png").write_bytes((folder / "1" / "0003.png").read_bytes()[:60])
    with pytest.raises(InvalidData, match=r"0/0001.png cannot be read .*--skip-bad"):
        read_source(folder)
    notes = Notes()
    data = read_source(folder, Reading(skip_bad=True), notes)
    assert len(data.images) == 5
    assert [name[-10:] for name in data.skipped] == ["0/0001.png", "1/0003.png"]
    assert "2 images could not be read" in notes.said[-1]
    assert data.labels.tolist() == [0, 0, 0, 1, 1]


def test_nothing_readable_is_refused_even_when_skipping(folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"")
    with pytest.raises(InvalidData, match="none of the 6 images"):
        read_source(folder, Reading(skip_bad=True))


def test_a_bomb_is_not_decoded(folder, monkeypatch):
    (folder / "0" / "bomb.png").write_bytes(png_claiming(9000, 9000))
    with pytest.raises(InvalidData, match="claims 9000 x 9000 pixels"):
        read_source(folder)


def test_an_empty_class_folder_is_refused(folder):
    (folder / "2").mkdir()
    (folder / "2" / "notes.txt").write_text("none yet")
    with pytest.raises(InvalidData, match=r"class folder .*scans/2 holds no"):
        read_source(folder)


def test_folders_without_images_or_classes_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidData, match="holds no images"):
        read_source(tmp_path / "empty")
    (tmp_path / "empty" / "a.png").write_bytes(encoded(pictures(1)[0]))
    with pytest.raises(InvalidData, match="no class folders"):
        read_source(tmp_path / "empty")


def test_other_files_are_left_out_with_a_notice(folder):
    (folder / "0" / "scan.dcm").write_bytes(b"")
    (folder / ".DS_Store").write_bytes(b"")
    notes = Notes()
    assert len(read_source(folder, None, notes).images) == 6
    assert "1 .dcm" in notes.said[0]


def test_progress_counts_to_the_end(folder, monkeypatch):
    monkeypatch.setattr(decode, "PER_TASK", 2)
    monkeypatch.setattr(decode, "WORKERS", 2)
    notes = Notes()
    read_source(folder, None, notes)
    assert notes.counted == {"reading images": (2, 2)}


def test_links_to_folders_are_followed_but_not_in_circles(folder, tmp_path):
    elsewhere = write_folder(tmp_path / "elsewhere", pictures(2, seed=1), np.array([2, 2]))
    (folder / "2").symlink_to(elsewhere / "2")
    (folder / "2" / "up").symlink_to(folder)
    assert read_source(folder).labels.tolist() == [0] * 3 + [1] * 3 + [2] * 2


@pytest.mark.parametrize("link", ["symlink_to", "hardlink_to"])
def test_one_record_under_two_names_is_refused(folder, link):
    """Or one image would count as two units."""
    getattr(folder / "1" / "again.png", link)(folder / "0" / "0000.png")
    with pytest.raises(InvalidData, match="are the same file"):
        read_source(folder)


def test_one_patient_folder_under_two_names_is_refused(tmp_path):
    for number, image in enumerate(pictures(4)):
        place = tmp_path / "set" / "ab"[number % 2] / f"p{number}" / "x.png"
        place.parent.mkdir(parents=True)
        place.write_bytes(encoded(image))
    (tmp_path / "set" / "a" / "p9").symlink_to(tmp_path / "set" / "a" / "p0")
    with pytest.raises(InvalidData, match="are the same file"):
        read_source(tmp_path / "set", Reading(unit="patient=folder:2"))


def test_what_is_no_file_is_not_waited_for(folder):
    os.mkfifo(folder / "0" / "pipe.png")
    with pytest.raises(InvalidData, match="is not a file"):
        read_source(folder)
    for name in ("x.npz", "x.parquet", "x-images-idx3-ubyte", "x.bin"):
        os.mkfifo(folder / name)
        with pytest.raises(InvalidData, match="is not a file"):
            read_source(folder / name)


@pytest.mark.parametrize("name", [b"s\xff", b"a\nb", b" "])
def test_names_that_no_certificate_can_show_are_refused(folder, name):
    os.rename(folder / "1", os.path.join(os.fsencode(folder), name))
    with pytest.raises(InvalidData, match="no usable 'class'"):
        read_source(folder)


def test_the_folder_one_is_in_has_a_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert read_source(".").name == "scans"
    with pytest.raises(InvalidData, match="the source is called ''"):
        read_source("")


def test_an_unreadable_bad_name_can_be_skipped(folder):
    with open(os.path.join(os.fsencode(folder), b"0", b"\xff.png"), "wb"):
        pass
    (skipped,) = read_source(folder, Reading(skip_bad=True)).skipped
    assert skipped.endswith("udcff.png")


def test_train_and_test_folders_are_splits_not_classes(tmp_path):
    write_folder(tmp_path / "set" / "train", pictures(6), np.arange(6) % 3)
    write_folder(tmp_path / "set" / "test", pictures(2), np.array([0, 2]))
    data = read_source(tmp_path / "set")
    assert data.class_names == ("0", "1", "2")
    assert data.test.labels.tolist() == [0, 2]
    assert (data.name, len(data.images)) == ("set", 6)


def test_labels_csv_with_a_column_of_units(tmp_path):
    folder = write_listed(tmp_path / "set", pictures(4), np.arange(4) % 2)
    (folder / "labels.csv").write_text(
        "file;diagnosis;patient\n0000.png;ill;p1\n0001.png;well;p2\n0002.png;ill;p1\n"
    )
    notes = Notes()
    how = Reading(labels="labels.csv:diagnosis", unit="patient")
    data = read_source(folder, how, notes)
    assert data.class_names == ("ill", "well")
    assert data.labels.tolist() == [0, 1, 0]
    assert data.units.tolist() == [0, 1, 0]
    assert data.unit == "patient"
    assert "1 images without a row" in notes.said[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("file,label\n0000.png,a\n9999.png,b", "row 3 .* names 9999.png, which is not in"),
        ("file,label\n0000.png,a\n../x.png,b", "which is not in"),
        ("file,label\n0000.png,a\n0000.png,b", "twice, in rows 2 and 3"),
        ("file,label\n0000.png,a\n0001.png", "row 3 .* 1 cells"),
        ("file,label\n0000.png,a\n0001.png,", "0001.png has no usable 'label'"),
        ("file,label", "no rows below its header"),
        ("name,label\n0000.png,a", "no column for the images"),
        ("file,one,two\n0000.png,a,b", "say which one to use"),
        ("file,label,x\n0000.png,a,b\nlabels.csv,b,c", "is not a PNG"),
        ("file,label,label\n0000.png,a,b", "names a column twice"),
        ("file,label\n/etc/passwd,a", "which is not in"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_bad_label_files_are_refused(tmp_path, rows, message):
    folder = write_listed(tmp_path / "set", pictures(4), np.arange(4) % 2)
    content = rows if isinstance(rows, bytes) else rows.encode()
    (folder / "labels.csv").write_bytes(content)
    with pytest.raises(InvalidData, match=message):
        read_source(folder)


def test_absolute_names_inside_the_folder_are_understood(tmp_path):
    folder = write_listed(tmp_path / "set", pictures(2), np.arange(2))
    rows = [f"{folder / '0000.png'},a", "0001.png,b"]
    (folder / "labels.csv").write_text("file,label\n" + "\n".join(rows))
    assert len(read_source(folder).images) == 2


@pytest.mark.parametrize(("place", "given"), [
    ("site=3", "who=site=3/p.csv"), ("scans", "who=p.csv"),
])  # fmt: skip
def test_a_csv_file_is_found_again_from_anywhere(folder, monkeypatch, place, given):
    """Whether it was named from here or lies beside the images."""
    monkeypatch.chdir(folder.parent)
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.png"))
    (folder.parent / place).mkdir(exist_ok=True)
    (folder.parent / place / "p.csv").write_text(
        "file,person\n" + "\n".join(f"{name},p" for name in names)
    )
    data = read_source("scans", Reading(unit=given))
    assert data.unit == "who"
    monkeypatch.chdir("/")
    again = read_source(data.source, data.reading)
    assert (again.unit, again.units.tolist()) == ("who", [0] * 6)


def test_units_from_a_csv_file(folder, tmp_path, monkeypatch):
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.png"))
    rows = [f"{name},{person}" for name, person in zip(names, "aaabcc", strict=True)]
    (tmp_path / "people.csv").write_text("file,person\n" + "\n".join(reversed(rows)))
    monkeypatch.chdir(tmp_path)
    data = read_source("scans", Reading(unit="people.csv"))
    assert data.units.tolist() == [0, 0, 0, 1, 2, 2]
    assert data.unit == "person"
    # What was written down about reading works from anywhere.
    monkeypatch.chdir("/")
    assert read_source(data.source, data.reading).units.tolist() == [0, 0, 0, 1, 2, 2]
    (tmp_path / "people.csv").write_text("file,person\n" + "\n".join([*rows, rows[0]]))
    with pytest.raises(InvalidData, match="twice, in rows 2 and 8"):
        read_source(data.source, data.reading)
    (tmp_path / "people.csv").write_text("file,person\n" + "\n".join(rows[1:]))
    with pytest.raises(InvalidData, match="no row for 1 of 6 images, the first 0/0000.png"):
        read_source(data.source, data.reading)


def test_units_and_labels_from_folder_levels(tmp_path):
    for number, image in enumerate(pictures(8)):
        place = tmp_path / "set" / f"p{number % 4}" / "ab"[number // 4] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(image))
    data = read_source(tmp_path / "set", Reading(labels="folder:2", unit="patient=folder:1"))
    assert data.class_names == ("a", "b")
    assert data.units.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.unit == "patient"
    with pytest.raises(InvalidData, match="no folder:3"):
        read_source(tmp_path / "set", Reading(labels="folder:3"))


def test_a_skipped_image_takes_its_label_and_unit_with_it(folder):
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.png"))
    (folder / "people.csv").write_text(
        "file,person\n" + "\n".join(f"{name},p{n // 2}" for n, name in enumerate(names))
    )
    (folder / names[1]).write_bytes(b"")
    data = read_source(folder, Reading(unit="people.csv", skip_bad=True))
    assert len(data.images) == 5
    assert data.units.tolist() == [0, 1, 1, 2, 2]
    assert data.labels.tolist() == [0, 0, 1, 1, 1]
