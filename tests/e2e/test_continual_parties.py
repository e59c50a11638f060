"""Three parties on the command line: two make a stage each, a third evaluates what they released.

Each has a working directory, a home and a ledger of its own. What goes from one to another is a
copy of a released folder; everything else is moved away before it could be read.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

from understudy.cli.main import main

TINY = [
    "--method", "psg", "--rounds", "1", "--outer", "2", "--batches", "1", "--inner", "1",
    "--batch", "40", "--width", "2", "--images-per-class", "2", "--accountant", "renyi",
]  # fmt: skip
QUICK = ["--epochs", "1", "--width", "2", "--seeds", "2", "--quiet"]


def work(folder: Path, arguments: list[str]) -> None:
    """Run a command as a party in `folder`; write down every file that it opens."""
    os.chdir(folder)
    os.environ["UNDERSTUDY_HOME"] = str(folder / "home")
    opened: list[str] = []

    def note(event: str, details: tuple) -> None:
        reads = event in ("open", "os.listdir", "os.scandir", "sqlite3.connect")
        if reads and isinstance(details[0], str | bytes | Path):
            opened.append(os.path.abspath(os.fsdecode(details[0])))

    sys.addaudithook(note)
    sys.stdout, sys.stderr = (folder / "out.txt").open("w"), (folder / "err.txt").open("w")
    try:
        main(arguments)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    found = sorted(set(opened))
    (folder / "opened.json").write_text(json.dumps(found))
    os._exit(code)


def party(folder: Path, *arguments: object) -> tuple[int, list[str]]:
    """Run a command in a process of its own; return its exit code and what it opened."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sklearn.datasets", "understudy.cli.continual"])
    process = context.Process(target=work, args=(folder, [str(a) for a in arguments]))
    process.start()
    process.join(120)
    return process.exitcode, json.loads((folder / "opened.json").read_text())


@pytest.fixture(scope="module")
def handed(tmp_path_factory) -> Path:
    """A folder with what two parties have handed on: their released folders, nothing else."""
    world = tmp_path_factory.mktemp("world")
    received = world / "received"
    for number, classes in ((1, "5,6"), (2, "1,2")):
        own = world / f"party-{number}"
        code, opened = party(
            own, "generate", "digits", "--only", classes, "--out", "stage", "--quiet", *TINY
        )
        assert code == 0, (own / "err.txt").read_text()
        others = [path for path in opened if path.startswith(str(world))]
        assert others
        assert all(path.startswith(str(own)) for path in others)
        shutil.copytree(own / "stage" / "release", received / str(number))
        own.rename(tmp_path_factory.mktemp("away") / "gone")
    return received


def evaluated(handed: Path, judge: Path, *options: str) -> tuple[int, list[str]]:
    return party(
        judge, "continual", "evaluate", handed / "1", handed / "2", "--test", "digits",
        "--out", "curve", *QUICK, *options,
    )  # fmt: skip


def test_whoever_evaluates_reads_released_folders_alone(handed, tmp_path):
    judge = tmp_path / "judge"
    code, opened = evaluated(handed, judge)
    assert code == 0, (judge / "err.txt").read_text()
    around = [Path(p) for p in opened if p.startswith(str(handed.parent)) and Path(p).is_file()]
    allowed = {handed / n / name for n in "12" for name in os.listdir(handed / n)}
    assert set(around) == allowed  # each was verified
    elsewhere = [p for p in opened if "/away" in p]
    assert elsewhere == []
    assert str(judge / "home" / "ledger.sqlite") in opened  # the reading of the test set

    statement = json.loads((judge / "curve" / "statement.json").read_text())
    assert statement["kind"] == "sum"  # the judge's ledger knows neither data set
    assert statement["epsilon"] == pytest.approx(sum(p["epsilon"] for p in statement["parts"]))
    assert [part["classes"] for part in statement["parts"]] == [["5", "6"], ["1", "2"]]
    assert "the sum over 2 stages" in (judge / "curve" / "statement.txt").read_text()
    points = json.loads((judge / "curve" / "private" / "curve.json").read_text())["points"]
    assert [len(point["classes"]) for point in points] == [2, 4]
    assert "the sum over 2 stages" in (judge / "out.txt").read_text()


def test_the_parties_may_declare_that_nobody_is_in_two_stages(handed, tmp_path):
    judge = tmp_path / "judge"
    code, _ = evaluated(handed, judge, "--declare-disjoint")
    assert code == 0
    statement = json.loads((judge / "curve" / "statement.json").read_text())
    assert statement["kind"] == "declared"
    assert statement["epsilon"] == max(part["epsilon"] for part in statement["parts"])


def test_a_forged_folder_is_refused(handed, tmp_path):
    forged = tmp_path / "forged"
    shutil.copytree(handed, forged)
    shutil.copy(handed / "1" / "synthetic.safetensors", forged / "2")
    judge = tmp_path / "judge"
    code, _ = evaluated(forged, judge)
    assert code == 5
    assert "is not the file that was certified" in (judge / "err.txt").read_text()
    assert not (judge / "curve").exists()


def test_all_stages_on_one_machine(tmp_path):
    folder = tmp_path / "one"
    asked = ["continual", "digits", "--stages", "5,6", "1,2", "--out", "stages", *TINY]
    asked += ["--curve.epochs", "1", "--curve.width", "2", "--curve.seeds", "1", "--json"]
    code, _ = party(folder, *asked)
    assert code == 0, (folder / "err.txt").read_text()
    result = json.loads((folder / "out.txt").read_text().splitlines()[-1])
    assert result["statement"]["kind"] == "proved"
    assert [point["stage"] for point in result["points"]] == [1, 2]
    assert (folder / "stages" / "private" / "curve.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits"], "expected one data set with --stages"),
        (["digits", "digits", "--stages", "5,6"], "expected one data set with --stages"),
        (["digits", "--stages", "5,6", "6,7"], "'6' is in two stages"),
        (["digits", "--stages", "5", "6,7"], "2 or more"),
        (["evaluate", "--test", "digits"], "no released folders"),
    ],
)
def test_what_makes_no_stages_is_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["continual", *arguments, "--out", str(tmp_path / "out")])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
