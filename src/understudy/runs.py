"""Run directories: complete or absent under their name, `NAME.partial` while the work goes on.

runs/scans-psg/
  release/   the set, a picture, the data card, certificate.json; the generator, if the method
             trains one; or a classifier instead of a set: may be shared as it is
  private/   settings, metrics on real records: mode 0700, never exported
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from understudy.errors import InvalidData, InvalidSettings, OutputExists
from understudy.files import (
    make_directory,
    parse_json,
    read_whole,
    remove_temporaries,
    storage_errors,
    sync_directory,
    write_file,
    write_json,
)

PARTIAL = ".partial"
MOST_BYTES = 2**28
"""Of settings or metrics."""
SET_FILE = "synthetic.safetensors"
SHEET_FILE = "contact_sheet.png"
GENERATOR_FILE = "generator.safetensors"
CLASSIFIER_FILE = "classifier.safetensors"
SETTINGS_FILE = "run.json"
METRICS_FILE = "metrics.json"
METRICS_FORMAT = 1
COST_FILE = "cost.json"
LEDGER_FILE = "ledger.json"
"""How far the ledger had come when the run was last charged."""
SNAPSHOTS = "snapshots"


def free_directory(wanted: Path) -> Path:
    """Return `wanted`, or `wanted-2` and so on when it is taken."""
    path, number = wanted, 1
    while path.exists() or partial(path).exists():
        number += 1
        path = wanted.with_name(f"{wanted.name}-{number}")
    return path


def unfinished_directory(wanted: Path) -> Path:
    """Return the one unfinished run that would have been called `wanted` or `wanted-N`."""
    names = [p.name.removesuffix(PARTIAL) for p in wanted.parent.glob(f"{wanted.name}*{PARTIAL}")]
    found = [n for n in names if n == wanted.name or n[len(wanted.name) :].lstrip("-").isdigit()]
    if len(found) == 1:
        return wanted.with_name(found[0])
    if not found:
        raise InvalidSettings(
            f"there is no unfinished run {wanted}{PARTIAL} to resume; name it with --out, or leave "
            "out --resume"
        )
    raise InvalidSettings(
        f"several runs could be resumed ({', '.join(sorted(found))}); name one with --out"
    )


def partial(path: Path) -> Path:
    """Return the name that a run has while it is unfinished."""
    return path.with_name(path.name + PARTIAL)


def released_part(path: Path) -> Path:
    """Return the released part of a run; `path` itself if it travelled alone."""
    return path / "release" if (path / "release").is_dir() else path


def classifier_file(place: Path) -> Path:
    """Return the file of a classifier, given itself, its run, or the run's released part."""
    return released_part(place) / CLASSIFIER_FILE if place.is_dir() else place


@contextlib.contextmanager
def held(lock: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock file; BlockingIOError if another process does and we do not wait."""
    with storage_errors(lock):
        file = lock.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    try:
        content = parse_json(read_whole(path, most=MOST_BYTES))
    except ValueError as error:
        raise InvalidData(
            f"{path} is not JSON ({error}); it was edited or damaged, remove it or put it back"
        ) from error
    if not isinstance(content, dict):
        raise InvalidData(f"{path} does not hold a JSON object; it was edited, put it back")
    return content


class RunDirectory:
    """One run on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def _working(self) -> Path:
        return partial(self.path)

    @property
    def blocks(self) -> Path:
        """Return where committed blocks are kept while the run is unfinished."""
        return self._working / "private" / "blocks"

    def keep_snapshot(self, made: Mapping[str, int], content: bytes) -> None:
        """Keep the set as it was when these releases had been made, in the private part."""
        folder = self._working / "private" / SNAPSHOTS
        make_directory(folder, mode=0o700)
        file = folder / f"{sum(made.values()):09d}.safetensors"
        write_file(file, content, mode=0o600)
        write_json(file.with_suffix(".json"), dict(made), mode=0o600)  # now it counts

    def snapshots(self) -> list[tuple[dict[str, int], Path]]:
        """Return (releases made until then, file) of each set that was kept on the way."""
        notes = sorted((self.path / "private" / SNAPSHOTS).glob("*.json"))
        return [(json.loads(n.read_bytes()), n.with_suffix(".safetensors")) for n in notes]

    @property
    def is_finished(self) -> bool:
        """Whether the directory is complete."""
        return (self.path / "release").is_dir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the unfinished directory against a second process."""
        make_directory(self._working)
        make_directory(self._working / "private", mode=0o700)
        remove_temporaries(self._working / "private")
        try:
            with held(self._working / "private" / "lock"):
                yield
        except BlockingIOError as error:
            raise OutputExists(
                f"another process is working on {self._working}; wait for it, or stop it"
            ) from error

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Write down how the run was asked for."""
        write_json(self._working / "private" / SETTINGS_FILE, settings, mode=0o600)

    def note_ledger(self, seen: Mapping[str, Any]) -> None:
        """Keep how far the ledger has come: one put back to before this run is then known."""
        write_json(self._working / "private" / LEDGER_FILE, seen, mode=0o600)

    def ledger_seen(self) -> tuple[dict[str, Any], Path] | None:
        """Return how far the ledger had come, and the file that says so."""
        root = self.path if self.is_finished else self._working
        path = root / "private" / LEDGER_FILE
        return (_read_object(path), path) if path.exists() else None

    @property
    def has_settings(self) -> bool:
        """Whether the run got as far as writing its settings."""
        return (self._working / "private" / SETTINGS_FILE).exists()

    @property
    def has_private_part(self) -> bool:
        """Whether this is a whole run, not a released part that travelled alone."""
        return (self.path / "private" / SETTINGS_FILE).exists()

    def settings(self) -> dict[str, Any]:
        """Return how the run was asked for."""
        root = self.path if self.is_finished else self._working
        path = root / "private" / SETTINGS_FILE
        try:
            return _read_object(path)
        except FileNotFoundError:
            raise InvalidData(
                f"{self.path} is not a run with its private part; expected a directory that "
                "`understudy generate` wrote"
            ) from None

    def discard(self) -> None:
        """Remove an unfinished run of which nothing was released."""
        shutil.rmtree(self._working, ignore_errors=True)

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Write the released files and give the directory its name, in one step."""
        release = self._working / "release"
        shutil.rmtree(release, ignore_errors=True)  # a finish cut short
        make_directory(release)
        for name, content in files.items():
            write_file(release / name, content)
        with storage_errors(self.path):
            os.rename(self._working, self.path)
            sync_directory(self.path.parent)
            # The blocks are needed until the rename is durable, and not after it.
            shutil.rmtree(self.path / "private" / "blocks", ignore_errors=True)
            (self.path / "private" / "lock").unlink(missing_ok=True)

    def add_cost(self, call: Mapping[str, Any]) -> None:
        """Keep what one call took; a resumed run has several."""
        root = self.path if self.is_finished else self._working
        if root.exists():
            write_json(root / "private" / COST_FILE, [*self.cost(), dict(call)], mode=0o600)

    def cost(self) -> list[dict[str, Any]]:
        """Return seconds, device and GPU memory of each call."""
        root = self.path if self.is_finished else self._working
        try:
            calls = parse_json((root / "private" / COST_FILE).read_bytes())
        except (FileNotFoundError, ValueError):  # nothing hangs on it
            return []
        return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """Return what was measured on real records, by section; nothing yet if there is nothing."""
        try:
            content = _read_object(self.path / "private" / METRICS_FILE)
        except FileNotFoundError:
            return {}
        if content.pop("format", None) != METRICS_FORMAT:
            raise InvalidData(
                f"{self.path} has metrics of another version of understudy; use that version, or "
                f"remove private/{METRICS_FILE} and evaluate again"
            )
        return dict(content)

    def record(self, section: str, entry: Mapping[str, Any], *, key: Sequence[str]) -> None:
        """Keep a measurement on real records; one that agrees with it in `key` is replaced."""

        def same(other: Mapping[str, Any]) -> bool:
            return all(other.get(name) == plain.get(name) for name in key)

        plain = json.loads(json.dumps(dict(entry)))  # tuples become lists, as they will be read
        with held(self.path / "private" / "metrics.lock", wait=True):
            content = self.metrics()
            others = [other for other in content.get(section, []) if not same(other)]
            content[section] = [*others, plain]
            file = self.path / "private" / METRICS_FILE
            write_json(file, {"format": METRICS_FORMAT} | content, mode=0o600)
