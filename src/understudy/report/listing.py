"""The runs in a folder: what each is, in one line, whatever state it is in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from understudy.card import never_less
from understudy.errors import InvalidData, UnderstudyError
from understudy.files import parse_json
from understudy.privacy import certificate as certificates
from understudy.report.measured import best_accuracy
from understudy.runs import CLASSIFIER_FILE, PARTIAL, SET_FILE, SETTINGS_FILE, RunDirectory
from understudy.synthetic import SyntheticSet

UNKNOWN = "–"


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """One run in a list."""

    name: str
    state: str
    when: datetime
    method: str = UNKNOWN
    data: str = UNKNOWN
    epsilon: str = UNKNOWN
    accuracy: str = UNKNOWN
    images: str = UNKNOWN


def list_runs(directory: Path) -> list[RunLine]:
    """Return the runs in `directory`, oldest first; a run that cannot be read says why."""
    if not directory.is_dir():
        raise InvalidData(
            f"there is no directory {directory}; expected the folder that holds the runs"
        )
    lines = []
    for path in directory.iterdir():
        certificate = path / "release" / certificates.FILE_NAME
        settings = path / "private" / SETTINGS_FILE
        if certificate.is_file():
            lines.append(_readable(path, certificate))
        elif path.name.endswith(PARTIAL) and settings.is_file():
            lines.append(_unfinished(path, settings))
    return sorted(lines, key=lambda line: (line.when, line.name))


def _readable(path: Path, certificate: Path) -> RunLine:
    try:
        return _finished(path, certificate)
    except (UnderstudyError, KeyError, TypeError) as error:
        state = f"cannot be read: {' '.join(str(error).split())}"
        return RunLine(name=path.name, state=state, when=_when(certificate))


def _finished(path: Path, certificate: Path) -> RunLine:
    found = certificates.read(certificate)
    utility = RunDirectory(path).metrics().get("utility", [])
    return RunLine(
        name=path.name,
        state="finished",
        when=_when(certificate),
        method=str(found.content["method"]["name"]),
        data=str(found.content["data_set"]["name"]),
        epsilon=f"{never_less(found.epsilon):g}" if found.has_guarantee else "no guarantee",
        accuracy=best_accuracy(utility) if utility else UNKNOWN,
        images=_images(path / "release"),
    )


def _images(release: Path) -> str:
    if (release / CLASSIFIER_FILE).exists():
        return "classifier"
    return f"{SyntheticSet.count(release / SET_FILE):,}"


def _unfinished(path: Path, settings: Path) -> RunLine:
    try:
        asked = parse_json(settings.read_bytes())
        request, data = asked["request"], asked["data_set"]
        epsilon = float(request["epsilon"])
        return RunLine(
            name=path.name.removesuffix(PARTIAL),
            state="unfinished",
            when=_when(settings),
            method=str(request["method"]),
            data=str(data),
            epsilon=f"{epsilon:g}" if math.isfinite(epsilon) else "no guarantee",
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return RunLine(
            name=path.name, state="unfinished, settings unreadable", when=_when(settings)
        )


def _when(path: Path) -> datetime:
    return datetime.fromtimestamp(path.stat().st_mtime)
