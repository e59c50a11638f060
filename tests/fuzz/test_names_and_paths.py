"""Names from elsewhere reach files, pages and terminals as names, and nothing leaves its folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from understudy.card import About, data_card
from understudy.cli.main import main
from understudy.cli.output import Output
from understudy.data.fetch import fetch
from understudy.data.images import labelled_images
from understudy.data.known import KnownFiles
from understudy.data.sources import read_source
from understudy.errors import InvalidData, UnderstudyError
from understudy.exports import BESIDE, export_release, folder_names
from understudy.files import write_file
from understudy.privacy.plan import PublicFacts
from understudy.progress import Progress
from understudy.report.page import write_report
from understudy.synthetic import SyntheticSet
from understudy.text import is_name, legible, one_line

from .readers import CORPUS, home_at
from .seeds import certified

FEW = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
ODD = ("../x", "/etc/passwd", "<script>alert(1)</script>", '" onload="x', "{{ 7 * 7 }}", "[a](b)",
       "`x`", "README.md", "certificate.json", ".", "..", "x" * 200, "ـعربي", "é", "e\u0301",
       "$(x)", "&lt;", "CON", "a\\b", "-rf", "~")  # fmt: skip
"""Names that are allowed: they can be printed."""
names = st.one_of(st.sampled_from(ODD), st.text(max_size=9).filter(is_name))


@FEW
@given(st.lists(names, min_size=1, max_size=9, unique=True))
def test_a_class_becomes_one_folder_whatever_it_is_called(classes):
    folders = folder_names(classes)
    assert len(folders) == len(classes)
    assert sorted(folders) == folders  # readers number classes in this order
    for name in folders:
        assert Path(name).name == name
        assert name not in ("", ".", "..")
        assert len(name.encode()) <= 255
    alike = {unicodedata.normalize("NFC", name).lower() for name in folders}
    assert len(alike) == len(folders)  # also where case and composition do not count
    assert not alike & {name.lower() for name in BESIDE}


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[2Jx", "\u202egnp.exe", "tab\there", "\x7f", "\u2028", b"\xff\xfe"]
)
def test_folders_that_cannot_be_shown_are_refused_in_words(name, tmp_path, capsys):
    for folder in (os.fsencode("plain"), os.fsencode(name)):
        place = os.path.join(os.fsencode(tmp_path), folder)
        os.makedirs(place)
        with open(os.path.join(place, b"1.png"), "wb") as file:
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(file, "PNG")
    with pytest.raises(InvalidData) as refusal:
        read_source(tmp_path)
    assert str(refusal.value).isprintable()
    with pytest.raises(SystemExit) as stop:
        main(["register", str(tmp_path), "--ledger", str(tmp_path / "ledger")])
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert all(c.isprintable() or c == "\n" for c in said.out + said.err)
    assert said.err.count("\n") == 1


def test_names_that_are_too_long_are_refused_before_they_fill_memory(tmp_path):
    images, labels = np.zeros((2, 8, 8), np.uint8), np.array(["a", "b" * 201])
    with pytest.raises(InvalidData, match="up to 200 characters") as refusal:
        labelled_images(images, labels)
    assert len(str(refusal.value)) < 500
    np.savez(tmp_path / "x.npz", images=images, labels=np.array(["a", "9" * 5000]))
    with pytest.raises(InvalidData, match="up to 200 characters"):
        read_source(tmp_path / "x.npz")


@FEW
@given(st.text(max_size=3000))
def test_any_text_becomes_one_line_that_can_be_printed(text):
    assert one_line(text).isprintable()
    assert str(UnderstudyError(text)).isprintable()
    assert len(one_line(text)) < 25_000
    assert legible(text).isprintable()
    assert not text.isprintable() or legible(text) == text


def test_a_terminal_is_told_nothing_by_a_name(capsys):
    output = Output()
    output.say("a \x1b[2J\nb \ud800")
    output.result("c \x9b31m")
    output.table("t \x1b]0;x\x07", ["name"], [["d \x1b[0m"], ["\u202ee"]])
    said = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in said)
    assert "\\x1b[2J" in said
    assert "\\u202ee" in said


def released(folder: Path, classes: tuple[str, ...]) -> Path:
    """Write a release of a set with classes of these names; anyone could have sealed it."""
    release = folder / "run" / "release"
    release.mkdir(parents=True)
    pixels = torch.zeros(len(classes), 1, 4, 4)
    made = SyntheticSet(pixels, torch.arange(len(classes)), classes).to_bytes()
    content = json.loads((CORPUS / "certificate" / "intact.json").read_bytes())
    facts = content["data_set"]["public_facts"]
    facts["class_names"] = list(classes)
    content["data_set"]["name"] = content["guarantee"]["unit"] = facts["unit"] = classes[0]
    (release / "synthetic.safetensors").write_bytes(made)
    (release / "certificate.json").write_bytes(certified(content, made))
    return release


def test_odd_classes_stay_in_their_folders_and_out_of_the_page(tmp_path):
    release = released(tmp_path, ODD)
    export_release(release, "png", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "out"}
    exported = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert len(exported) == len(ODD) + 2
    assert read_source(tmp_path / "out").labels.tolist() == list(range(len(ODD)))
    page = write_report([release.parent], out=tmp_path / "page.html", shareable=True).read_text()
    assert "<script>alert" not in page
    assert '" onload="x' not in page
    assert "{{ 7 * 7 }}" in page  # shown, not computed
    assert page.count("<script") == 1


def test_a_card_shows_names_and_makes_nothing_of_them():
    facts = PublicFacts(units=9, class_names=ODD, shape=(1, 4, 4), mean=(0.5,), std=(0.5,),
                        unit="<b>")  # fmt: skip
    synthetic = SyntheticSet(torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64), ODD)
    about = About(name="<img src=x>", method="`a`", facts=facts, epsilon=1.0, delta=1e-5)
    body = data_card(about, synthetic, {}).split("---\n", 2)[2]
    assert not re.search(r"(?<!\\)[<\[]", body)
    assert r"\<script\>alert(1)" in body


def test_an_export_is_not_led_elsewhere_by_a_link(tmp_path):
    release = released(tmp_path, ("a", "b"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("x")
    (tmp_path / "out.exporting").symlink_to(elsewhere)
    export_release(release, "npz", tmp_path / "out")
    assert [path.name for path in elsewhere.iterdir()] == ["mine"]
    assert not (tmp_path / "out").is_symlink()


def test_a_write_is_not_led_elsewhere_by_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for target in (victim, tmp_path / "nowhere"):
        (tmp_path / ".tmp-new").symlink_to(target)
        write_file(tmp_path / "new", b"other")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "victim"]
        assert (tmp_path / "new").read_bytes() == b"other"
    assert victim.read_text() == "mine"


def test_a_pipe_in_a_release_is_refused_not_waited_for(tmp_path):
    release = released(tmp_path, ("a", "b"))
    (release / "synthetic.safetensors").unlink()
    os.mkfifo(release / "synthetic.safetensors")
    with pytest.raises(UnderstudyError, match="is not a file"):
        export_release(release, "npz", tmp_path / "out")
    (release / "certificate.json").unlink()
    os.mkfifo(release / "certificate.json")
    with pytest.raises(UnderstudyError, match="not a file"):
        export_release(release, "npz", tmp_path / "out")


WANTED = {"a.bin": b"first", "b.bin": b"second"}
PLACES = ("", "x/", "../", "../../", "/tmp/", "./", "a.bin/", "C:\\", "x/../../y/")
TYPES = (tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
members = st.tuples(
    st.sampled_from(PLACES),
    st.sampled_from(("evil", "a.bin", "b.bin", "..", "", "known.lock")),
    st.sampled_from(TYPES),
    st.sampled_from(("/etc/passwd", "../../evil", "a.bin", ".")),
)


def tar_of(hostile) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", compresslevel=1) as tar:
        for place, name, kind, target in hostile:
            member = tarfile.TarInfo(place + name)
            member.type, member.linkname = kind, target
            tar.addfile(member, io.BytesIO())
        for name, content in WANTED.items():
            member = tarfile.TarInfo(f"../../{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return made.getvalue()


def wheel_of(hostile) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as wheel:
        for place, name, kind, target in hostile:
            if (place, name) != ("", "") and name not in WANTED:
                entry = zipfile.ZipInfo(place + name)
                entry.external_attr = (0o120777 if kind == tarfile.SYMTYPE else 0o644) << 16
                wheel.writestr(entry, target)
        for name, content in WANTED.items():
            wheel.writestr(f"../../{name}", content)
    return made.getvalue()


@pytest.mark.parametrize(("ending", "pack"), [("tar.gz", tar_of), ("whl", wheel_of)])
@FEW
@given(hostile=st.lists(members, max_size=5))
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_gives_its_wanted_files_and_nothing_else(
    ending, pack, hostile, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("machine")
    (folder / "data" / "known").mkdir(parents=True)
    (folder / "data" / "known" / f"x.{ending}").write_bytes(pack(hostile))

    class Known(KnownFiles):
        shelf = "shelf"

    digests = {name: hashlib.sha256(content).hexdigest() for name, content in WANTED.items()}
    with home_at(folder / "home"):
        known = Known(name="known", title="Known", files=digests)
        fetched = fetch(known, data_dir=folder / "data", progress=Progress())
    assert {path.name: path.read_bytes() for path in fetched.iterdir()} == WANTED
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    left = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert left == {
        f"data/known/x.{ending}", "home/shelf/known.lock",
        "home/shelf/known/a.bin", "home/shelf/known/b.bin",
    }  # fmt: skip
