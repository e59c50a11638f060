"""The report page: one HTML file that holds everything it shows.

It loads nothing: a Content-Security-Policy allows the one style sheet and the one script inlined
here, by their hashes, and pictures that are part of the page.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from understudy import __version__
from understudy.charts import Chart, Table
from understudy.errors import InvalidData, InvalidSettings
from understudy.files import write_file
from understudy.finished import check_outside, verify
from understudy.privacy import certificate as certificates
from understudy.report.measured import (
    Measured,
    accuracy_chart,
    best_accuracy,
    convergence_chart,
    read_measured,
)
from understudy.report.released import Released, attack_chart, epsilon_chart
from understudy.runs import PARTIAL, RunDirectory, partial, released_part

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class RunPage:
    """One run's part of the page."""

    anchor: str
    released: Released
    measured: Measured | None
    """None where the page is to be shared, or the released part travelled alone."""
    folder: str
    """Name of its directory; empty where the page is to be shared."""
    epsilon_chart: Chart | None
    attack_chart: Chart | None

    @property
    def is_private(self) -> bool:
        """Whether it shows anything that may not be shared."""
        return self.measured is not None or not self.released.has_guarantee


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side; the second half was computed on private data."""

    table: Table
    epsilon_chart: Chart | None
    attack_chart: Chart | None
    accuracies: Table | None
    accuracy_chart: Chart | None
    convergence_chart: Chart | None


@dataclass(frozen=True)
class WrittenReport:
    """A page on disk."""

    path: Path
    is_private: bool
    """Whether it shows anything that was computed on private data, or has no guarantee."""


def write_report(
    runs: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    shareable: bool = False,
    ledger: str | Path | bool = False,
) -> Path:
    """Write one page about one or several runs; return where it is. See `written_report`."""
    return written_report(runs, out=out, shareable=shareable, ledger=ledger).path


def written_report(
    runs: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    shareable: bool = False,
    ledger: str | Path | bool = False,
) -> WrittenReport:
    """Write one page about one or several runs.

    Every run is verified first: what does not match its certificate is not shown.

    Args:
        runs: directories of runs, or of their released parts alone.
        out: file to write; by default within `private/` of the only run, or beside the first one.
        shareable: leave out everything that was computed on private data.
        ledger: check the certificates' origin too; True for the ledger each run was made with.
    """
    given = [Path(run) for run in runs]
    if not given:
        raise InvalidSettings("no run was named; expected at least one directory of a run")
    pages = [
        _collect(path, shareable=shareable, ledger=ledger, letter=_letter(number, of=len(given)))
        for number, path in enumerate(given)
    ]
    target = Path(out) if out else _default_place(given, pages)
    _check_place(target, given)
    is_private = any(page.is_private for page in pages)
    write_file(target, render(pages).encode(), mode=0o600 if is_private else 0o644)
    return WrittenReport(target, is_private)


def render(pages: Sequence[RunPage]) -> str:
    """Write the HTML."""
    style = Markup((TEMPLATES / "style.css").read_text())
    script = Markup((TEMPLATES / "script.js").read_text())
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        pages=pages,
        comparison=_compare(pages) if len(pages) > 1 else None,
        policy=policy,
        style=style,
        script=script,
        version=__version__,
        holds_private=any(page.is_private for page in pages),
    )


def _collect(path: Path, *, shareable: bool, ledger: str | Path | bool, letter: str) -> RunPage:
    release = _released_part(path)
    run = RunDirectory(path)
    verification = verify(path, ledger=ledger)
    if shareable and not verification.certificate.has_guarantee:
        raise InvalidSettings(
            f"{path} has no guarantee: it was made without noise and shows private data; leave out "
            "--shareable, and keep the page to yourself"
        )
    released = Released.load(release, verification, letter)
    is_whole = run.has_private_part and not shareable
    return RunPage(
        anchor=f"run-{letter.lower()}" if letter else "run",
        released=released,
        measured=read_measured(run, released) if is_whole else None,
        folder="" if shareable else path.resolve().name,
        epsilon_chart=epsilon_chart([released]),
        attack_chart=attack_chart([released]),
    )


def _released_part(path: Path) -> Path:
    """Find the released part of a run; refuses what is none, each with its reason."""
    if path.name.endswith(PARTIAL) or (not path.exists() and partial(path).exists()):
        raise InvalidData(
            f"{path} is an unfinished run; finish it with the command that started it and "
            "--resume, then report on it"
        )
    if path.is_file():
        raise InvalidData(
            f"{path} is a file, expected the directory of a run; a ledger is named with "
            "--ledger-path"
        )
    if not path.is_dir():
        raise InvalidData(f"there is no directory {path}; expected one that a run has written")
    release = released_part(path)
    if not (release / certificates.FILE_NAME).is_file():
        raise InvalidData(
            f"{path} is not a run: it has no {certificates.FILE_NAME}; expected a directory that "
            "`understudy generate` wrote, or its release/ alone"
        )
    return release


def _letter(number: int, *, of: int) -> str:
    if of == 1:
        return ""
    return chr(ord("A") + number) if number < 26 else f"R{number + 1}"


def _default_place(given: Sequence[Path], pages: Sequence[RunPage]) -> Path:
    first = given[0].resolve()
    run = first.parent if first.name == "release" else first
    if len(given) > 1:
        is_private = any(page.is_private for page in pages)
        return run.with_name("report.html" if is_private else "report-shareable.html")
    if pages[0].measured:
        return run / "private" / "report.html"
    return run.with_name(f"{run.name}-report.html")


def _check_place(target: Path, given: Sequence[Path]) -> None:
    if target.is_dir():
        raise InvalidSettings(f"{target} is a directory; expected a file, such as report.html")
    for path in given:
        check_outside(target, _released_part(path))


def _compare(pages: Sequence[RunPage]) -> Comparison:
    sets = [page.released for page in pages]
    rows = [
        (
            one.letter,
            str(one.content["method"]["name"]),
            str(one.content["data_set"]["name"]),
            one.epsilon,
            one.delta,
            one.amount,
            str(one.content["data_set"]["public_facts"]["unit"]),
        )
        for one in sets
    ]
    columns = ("run", "method", "data", "epsilon", "delta", "images", "unit")
    measured = [(page, page.measured) for page in pages if page.measured]
    accuracies = [
        (
            page.released.letter,
            page.folder,
            str(page.released.content["method"]["name"]),
            str(page.released.content["data_set"]["name"]),
            page.released.epsilon,
            best_accuracy(found.entries.get("utility", [])),
            page.released.amount,
        )
        for page, found in measured
    ]
    private_columns = ("run", "folder", "method", "data", "epsilon", "best accuracy", "images")
    return Comparison(
        table=Table("What was released", columns, rows),
        epsilon_chart=epsilon_chart(sets),
        attack_chart=attack_chart(sets),
        accuracies=Table("What they are worth", private_columns, accuracies) if measured else None,
        accuracy_chart=accuracy_chart(
            [(page.released.letter, found.entries.get("utility", [])) for page, found in measured]
        ),
        convergence_chart=convergence_chart(
            [
                (page.released.letter, found.entries.get("convergence", []))
                for page, found in measured
            ]
        ),
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
