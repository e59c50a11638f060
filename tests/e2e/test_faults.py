"""Faults of disk and machine: one line that says what to do, nothing half-written, nothing lost.

`make faults` tries every moment; otherwise some are.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

import understudy
from disk import ForgetfulDisk, failing
from door import some_images
from trained import TINY, train
from understudy import exports, job
from understudy.cli.main import main
from understudy.errors import InvalidSettings, LedgerError, UnderstudyError
from understudy.files import make_directory, write_file
from understudy.finished import export
from understudy.privacy import safekeeping
from understudy.privacy.curator import Pace
from understudy.privacy.ledger import Ledger

EVERY = bool(os.environ.get("UNDERSTUDY_FAULTS"))


def some(moments, share):
    """Return all moments, or a few that are spread over them, the last one always."""
    return moments if EVERY else moments[::-share][::-1]


@pytest.fixture(autouse=True)
def _a_block_for_each_step(monkeypatch):
    monkeypatch.setattr(job, "Pace", lambda **options: Pace(seconds=0.0, **options))


def goes_on(folder: Path) -> None:
    """Repeat the command that was cut off, then compare ledger, certificate and what was asked."""
    train(folder, resume=(folder / "run.partial").exists() or (folder / "run").exists())
    in_order(folder)
    assert not [path.name for path in folder.rglob(".tmp-*")]


def outcome(folder: Path) -> str:
    """Return what a run that may fail has to say."""
    try:
        train(folder)
    except UnderstudyError as error:
        return str(error)
    return ""


def in_order(folder: Path) -> None:
    found = understudy.verify(folder / "run", ledger=folder / "ledger")
    (release,) = found.certificate.content["releases"]
    assert release["made"] == release["count"] == TINY["steps"]
    with closing(Ledger(folder / "ledger")) as ledger:
        safekeeping.check(ledger, [folder])
        (charged,) = ledger.charged_runs(1)
        assert charged["state"] == "finished"
        made = [block.releases.get("gradient", 0) for block in ledger.blocks(charged["id"])]
        assert sum(made) == TINY["steps"]


@pytest.mark.parametrize("names", ["synced", "all"])
def test_a_loss_of_power_at_any_moment(tmp_path, names):
    disk = ForgetfulDisk(tmp_path / "disk")
    disk.root.mkdir()
    with disk.watched():
        train(disk.root)
    assert len(disk.moments) > 40
    for number, moment in enumerate(some(disk.moments, 11)):
        place = tmp_path / str(number)
        disk.lay_out(moment, place, names=names)
        if (place / "run").exists():
            in_order(place)  # complete, or it would not have its name
        else:
            goes_on(place)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A finished run with a generator, for what comes after a run."""
    folder = tmp_path_factory.mktemp("fitted")
    small = {"steps": 2, "batch": 6, "hidden": 8, "images_per_class": 2, "features": 20}
    return understudy.synthesize(
        some_images(60, name="pets"), method="dp-merf", settings=small, epsilon=8, delta=1e-3,
        accountant="renyi", out=folder / "run", ledger=folder / "ledger", device="cpu",
    ).directory  # fmt: skip


def test_an_export_is_there_whole_or_not_at_all(fitted, tmp_path):
    disk = ForgetfulDisk(tmp_path / "disk")
    disk.root.mkdir()
    with disk.watched():
        export(fitted, to="npz", out=disk.root / "out")
    whole = {path.name: path.read_bytes() for path in (disk.root / "out").iterdir()}
    seen = set()
    for number, moment in enumerate(disk.moments):
        for names in ("synced", "all"):
            place = tmp_path / f"{number}-{names}"
            disk.lay_out(moment, place, names=names)
            seen.add((place / "out").exists())
            if (place / "out").exists():
                assert {p.name: p.read_bytes() for p in (place / "out").iterdir()} == whole
            else:
                export(fitted, to="npz", out=place / "out")
    assert seen == {True, False}


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "can be written|make it writable")],
)
def test_a_disk_that_fails_at_any_moment(tmp_path, number, word):
    with failing(1_000_000) as count:
        train(tmp_path / "whole")
        writes = count()
    for after in some(range(writes), 14):
        folder = tmp_path / str(after)
        folder.mkdir()
        with failing(after, number):
            said = outcome(folder)
        if said:
            assert re.search(word, said)
            assert "\n" not in said
            goes_on(folder)
        else:  # only what it took could not be noted any more
            assert after > writes - 5
            in_order(folder)


def test_a_new_folder_in_new_folders_survives(tmp_path):
    disk = ForgetfulDisk(tmp_path / "disk")
    disk.root.mkdir()
    with disk.watched():
        write_after = disk.root / "a" / "b" / "c"
        make_directory(write_after)
        write_file(write_after / "file", b"content")
    disk.lay_out(disk.moments[-1], tmp_path / "left", names="synced")
    assert (tmp_path / "left" / "a" / "b" / "c" / "file").read_bytes() == b"content"


def test_what_a_killed_write_left_is_gone_after_the_next(tmp_path):
    file, leftover = tmp_path / "file", tmp_path / ".tmp-file"
    leftover.write_bytes(b"half, and longer than the whole")
    leftover.chmod(0o644)
    write_file(file, b"whole", mode=0o600)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"whole"}
    assert file.stat().st_mode & 0o077 == 0


def test_writers_of_one_file_wait_for_each_other(tmp_path):
    contents = [bytes([number]) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda one: write_file(tmp_path / "file", one), contents * 5):
            assert (tmp_path / "file").read_bytes() in contents
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_short_command_at_once(fitted, tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(exports, "data_card", lambda *_, **__: os.kill(os.getpid(), number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run unattended
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(fitted), "--to", "npz", "--out", str(tmp_path / "out")])
    assert ended.value.code == 128 + number
    assert capsys.readouterr().err == "understudy: stopped at once; nothing was written\n"
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_ledger_that_cannot_grow_says_so(tmp_path):
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        ledger._connection.execute("PRAGMA max_page_count = 1")  # no page more than there are
        with pytest.raises(LedgerError, match=r"disk is full.*run the same command again"):
            for number in range(200):
                ledger.disclose(None, what="x" * 500, purpose=str(number))
        assert len(ledger.rows("SELECT * FROM disclosures")) == number
        ledger._connection.execute("PRAGMA max_page_count = 100000")
        ledger.disclose(None, what="x", purpose="there is room again")
        safekeeping.check(ledger)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of two megabytes, if we may have one."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def tree(folder: Path) -> dict[str, bytes]:
    """Everything in a folder but locks, which hold nothing, and what stands beside the ledger."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock" and not path.name.startswith("ledger")
    }


def test_every_command_on_a_full_disk(fitted, small_disk, capsys):
    run, ledger = small_disk / "run", small_disk / "ledger"
    subprocess.run(["cp", "-r", str(fitted), str(run)], check=True)
    where = ["--ledger", str(ledger)]
    few = ["--delta", "1e-3", "--accountant", "renyi", "--method", "dp-merf", "--steps", "2"]
    commands = {
        "generate": ["digits", *few, *where, "--out", str(small_disk / "new")],
        "evaluate": [str(run), "--test", "digits", "--models", "gaussian-nb", *where],
        "report": [str(run)],
        "export": [str(run), "--to", "npz"],
        "sample": [str(run), "--count", "5"],
        "continual": ["digits", "--stages", "0,1", *few, *where, "--out", str(small_disk / "c")],
        "train-classifier": ["digits", "--steps", "2", "--width", "4", "--delta", "1e-3",
                             "--accountant", "renyi", *where, "--out", str(small_disk / "t")],
    }  # fmt: skip
    if not EVERY:
        commands = {name: commands[name] for name in ("generate", "report", "export", "sample")}
    before = tree(small_disk)
    filler = small_disk / "filler"
    for name, arguments in commands.items():
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(1000))
        with pytest.raises(SystemExit) as ended:
            main([name, *arguments])
        said = capsys.readouterr().err
        assert ended.value.code == 2, said
        assert said.count("\n") == 1, said
        assert "full" in said or "space" in said, said
        filler.unlink()
        assert tree(small_disk) == before, name
    for path in small_disk.glob("ledger*"):
        path.unlink()


def test_a_run_of_another_version_is_not_resumed(tmp_path, monkeypatch):
    with failing(30), pytest.raises(UnderstudyError):
        train(tmp_path)
    file = tmp_path / "run.partial" / "private" / "run.json"
    settings = json.loads(file.read_bytes())
    file.write_text(json.dumps(settings | {"understudy": "0.0.1"}))
    with pytest.raises(InvalidSettings, match="begun with understudy 0.0.1"):
        train(tmp_path, resume=True)
    file.write_text(json.dumps(settings))
    goes_on(tmp_path)


def test_a_ledger_put_back_under_a_run_is_known(tmp_path):
    """With all that stands beside it: only the run can tell."""
    train(tmp_path, "first")
    kept = {path: path.read_bytes() for path in tmp_path.glob("ledger*")}
    with failing(30), pytest.raises(UnderstudyError):
        train(tmp_path, seed=1)
    for path, content in kept.items():
        path.write_bytes(content)
    with pytest.raises(LedgerError, match="put back to an older state"):
        train(tmp_path, resume=True, seed=1)
    with closing(Ledger(tmp_path / "ledger")) as ledger:
        safekeeping.check(ledger, [tmp_path / "first"])
        with pytest.raises(LedgerError, match="run.partial/private/ledger.json has seen"):
            safekeeping.check(ledger, [tmp_path])
