"""What commands refuse before they begin, in a line."""

from __future__ import annotations

import pytest

from door import some_images
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


def test_a_hold_out_of_nobody_is_refused():
    with pytest.raises(InvalidData, match="is none, expected at least one to hold out"):
        declared_facts(some_images(40), RegistrationTerms(hold_out=0.001))
