"""What commands refuse before they begin, in a line."""

from __future__ import annotations

import json

import pytest
import torch

from door import some_images
from understudy.cli import main as cli
from understudy.cli.main import main
from understudy.errors import InvalidData
from understudy.privacy.registration import RegistrationTerms, declared_facts


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("generat digits", "there is no command 'generat' (did you mean generate?)"),
        ("-v", "there is no command '-v'"),
        ("plan --records 0", "records is 0, expected 1 to"),
        ("plan --records 100 --classes 0", "classes is 0, expected 2 to 1000"),
        ("plan --records 100 --shape 1 0 8", "shape: each side is 0, expected"),
        ("plan --records 100 --shape 2 8 8", "shape begins with 2 channels, expected 1 or 3"),
        ("ledger check nowhere", "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(line, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("UNDERSTUDY_LEDGER", str(tmp_path / "ledger.sqlite"))
    if line.startswith("ledger"):
        with pytest.raises(SystemExit):
            main(["register", "digits", "--quiet"])
        capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 TB"), True),
        (RuntimeError("shapes do not fit"), False),
    ],
)
def test_lack_of_memory_is_told_from_bugs(error, is_one, monkeypatch, capsys):
    def fails(_):
        raise error

    monkeypatch.setattr(cli, "build_app", fails)
    with pytest.raises(SystemExit) as ended:
        main(["runs"])
    assert ended.value.code == (2 if is_one else 1)
    assert ("Traceback" in capsys.readouterr().err) != is_one


def test_a_set_without_runs_is_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("UNDERSTUDY_LEDGER", str(tmp_path / "ledger.sqlite"))
    for line in (["register", "digits", "--quiet"], ["ledger", "--json"]):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main(line)
    listed = json.loads(capsys.readouterr().out.splitlines()[0])
    assert (listed["data_set"], listed["runs"], listed["units"]) == ("digits", 0, 1438)


def test_a_hold_out_of_nobody_is_refused():
    with pytest.raises(InvalidData, match="is none, expected at least one to hold out"):
        declared_facts(some_images(40), RegistrationTerms(hold_out=0.001))
