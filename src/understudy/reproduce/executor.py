"""Do what an experiment says: make its sets, measure them, keep each number as soon as it is there.

Only missing numbers are computed. An unfinished run goes on from its last committed block, so a
table can grow over many calls on a borrowed machine. Several processes can work on one table: each
takes a run that no other is working on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from understudy import __version__
from understudy.charts import standalone
from understudy.continual.curve import evaluate_stages
from understudy.continual.stages import learn_stages, split
from understudy.data.images import LabelledImages
from understudy.errors import Interrupted, InvalidData
from understudy.evaluation.downstream import RELEASED
from understudy.files import make_directory, write_file, write_json
from understudy.finished import load_result
from understudy.job import StopRequest, stop_signals
from understudy.measures import evaluate, measure_convergence, measure_quality, measure_real
from understudy.methods import OF_CLASSIFIERS
from understudy.pipeline import load_data, make_run
from understudy.privacy.certificate import Certificate
from understudy.privacy.registration import RegistrationTerms
from understudy.progress import Progress
from understudy.provenance import commit, device_name
from understudy.reproduce import tables
from understudy.reproduce.experiment import FID, REAL, Experiment, PlannedRun
from understudy.runs import SHEET_FILE, RunDirectory, held, partial, released_part

FORMAT = 1
Cell = dict[str, Any]
"""A measured number with everything it takes to make it again."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an experiment is done."""

    work: Path
    """Runs and their ledger; experiments that need the same run share it."""
    results: Path
    """The table: NAME.json, NAME.md, NAME.html."""
    data_dir: str | None = None
    device: str = "auto"
    compile: bool = True
    remark: str = ""
    """What a reader of the times should know of the machine."""

    def of(self, run: PlannedRun) -> Place:
        """Return where a run is done: apart, by a ledger of its own, if it holds units out.

        What is held out of a set is fixed once and for all in a ledger.
        """
        if not run.hold_out:
            return self
        return replace(self, work=self.work / f"hold-out-{run.hold_out:g}")


@dataclass(frozen=True)
class Outcome:
    """How far an experiment has got."""

    cells: list[Cell]
    missing: int
    files: list[Path]


def reproduce(
    experiment: Experiment,
    place: Place,
    *,
    only: Sequence[str] = (),
    minutes: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Compute what is missing of `experiment` and write its table.

    Args:
        experiment: what to do.
        place: where.
        only: compute only runs whose name contains one of these, or fits one as a pattern
            (`mnist-*`).
        minutes: stop, to be continued, after about this long.
        progress: where to report.
    """
    report = progress or Progress()
    kept = Kept(experiment, place.results)
    wanted = [run for run in experiment.runs if not only or any(_asks_for(run, o) for o in only)]
    with stop_signals() as stop:
        if minutes is not None:
            stop.deadline = time.monotonic() + 60 * minutes
        for run in wanted:
            if not kept.lacks(run) or stop():
                continue
            its_place = place.of(run)
            make_directory(its_place.work)
            try:
                with held(its_place.work / f".{run.name}.lock"):
                    kept.refresh()
                    if kept.lacks(run):
                        _Executor(experiment, its_place, kept, stop, report).complete(run)
            except BlockingIOError:
                report.say(f"{run.name} is left to another process, which is working on it")
            except Interrupted:
                report.say(f"{run.name} is not finished; the same command goes on with it")
    files = kept.write()
    return Outcome(kept.cells, sum(map(kept.lacks, experiment.runs)), files)


def _asks_for(run: PlannedRun, words: str) -> bool:
    return words in run.name or fnmatch(run.name, words)


class Kept:
    """The numbers of an experiment that are there already."""

    def __init__(self, experiment: Experiment, results: Path) -> None:
        self.experiment, self.results = experiment, results
        suffix = "" if experiment.scale == "full" else f"-{experiment.scale}"
        self._file = results / f"{experiment.name}{suffix}.json"
        self.cells: list[Cell] = self._read()

    def refresh(self) -> None:
        """Take up what other processes have measured meanwhile."""
        self.cells = self._read()

    def _read(self) -> list[Cell]:
        """Return the numbers in the file, of runs that belong to the experiment."""
        if not self._file.exists():
            return []
        content = json.loads(self._file.read_bytes())
        if content.get("format") != FORMAT:
            raise InvalidData(
                f"{self._file} was written by another version of understudy; move it away"
            )
        planned = {run.name for run in self.experiment.runs}
        return [cell for cell in content["cells"] if cell["run"] in planned]

    def lacks(self, run: PlannedRun) -> bool:
        """Whether a number of `run` is missing."""
        return any(self.lacks_model(run, model) for model in self.experiment.measure.models)

    def lacks_model(self, run: PlannedRun, model: str) -> bool:
        """Whether this model was not yet trained on the set of `run`."""
        return not self._has(run.name, model)

    def _has(self, run: str, model: str) -> bool:
        return any(c["run"] == run and c["model"] == model for c in self.cells)

    def add(self, cell: Cell) -> None:
        """Keep a number, at once."""
        self.write(cell)

    def show(self, run: PlannedRun, sheet: Path) -> None:
        """Keep some of the images of `run` to show beside its numbers."""
        make_directory(self.results)
        write_file(self.results / self._sheet(run), sheet.read_bytes())

    def _sheet(self, run: PlannedRun) -> str:
        return f"{self._file.stem}-{run.name}.png"

    def write(self, *new: Cell) -> list[Path]:
        """Write the table in its three forms, and what can be drawn; return the files."""
        make_directory(self.results)
        with held(self.results / f".{self._file.stem}.lock", wait=True):
            self.refresh()  # others may have added to it, even what is new here
            self.cells += [cell for cell in new if not self._has(cell["run"], cell["model"])]
            return self._write()

    def _write(self) -> list[Path]:
        order = {run.name: number for number, run in enumerate(self.experiment.runs)}
        cells = sorted(self.cells, key=lambda cell: order[cell["run"]])
        write_json(self._file, {"format": FORMAT, "cells": cells})
        contents, pictures = {}, {}
        for data, chart in tables.figures(cells).items():
            name = f"{self._file.stem}-{data}.svg"
            contents[name], pictures[chart.title] = standalone(chart), name
        sheets = {run.name: self._sheet(run) for run in self.experiment.runs}
        sheets = {name: file for name, file in sheets.items() if (self.results / file).exists()}
        contents[f"{self._file.stem}.md"] = tables.markdown(
            self.experiment, cells, pictures, sheets
        )
        contents[f"{self._file.stem}.html"] = tables.html(self.experiment, cells)
        for name, text in contents.items():
            write_file(self.results / name, text.encode())
        return [self._file, *(self.results / name for name in contents)]


@dataclass(frozen=True)
class _Executor:
    experiment: Experiment
    place: Place
    kept: Kept
    stop: StopRequest
    report: Progress

    def complete(self, run: PlannedRun) -> None:
        """Compute the numbers of `run` that are missing."""
        self.report.say(run.name)
        data = self._data(run)
        places = self._made(run, data)
        sheets = [released_part(place) / SHEET_FILE for place in places]
        if len(sheets) == 1 and sheets[0].exists():
            self.kept.show(run, sheets[0])
        certificates = [load_result(place).certificate for place in places]
        about = {
            "run": run.name,
            **run.fields(),
            **_cost(places),
            "certified_epsilon": _certified(certificates),
            "releases": sum(r["made"] for one in certificates for r in one.content["releases"]),
            "device": device_name(),
            "torch": torch.__version__,
            "understudy": __version__,
            "commit": commit(),
            "remark": self.place.remark,
        }
        for model in self.experiment.measure.models:
            if self.stop():
                return
            if self.kept.lacks_model(run, model):
                with self.stop.at_once():
                    cell = self._cell(run, places, data, model)
                self.kept.add(about | cell)

    def _cell(self, run: PlannedRun, places: list[Path], data: LabelledImages, model: str) -> Cell:
        """Return a number: a classifier that was released is tested as it is."""
        is_trained = run.method in OF_CLASSIFIERS and not run.stages
        asked = self._asked(run, data, RELEASED if is_trained else model)
        if run.method == REAL:
            return self._on_real(run, asked, model)
        return (self._after_each if run.stages else self._measured)(places, asked, model)

    def _data(self, run: PlannedRun) -> LabelledImages:
        """Read a known set, or another one from the folder of data sets."""
        folder, source = self.place.data_dir, run.data
        if run.reading:  # not a known set
            if folder is None or not (Path(folder) / source).exists():
                raise InvalidData(
                    f"{run.name} needs the data set '{source}'; pass --data-dir with the folder "
                    "that it is in"
                )
            source = str(Path(folder) / source)
        return load_data(source, progress=self.report, data_dir=folder, **dict(run.reading))

    def _made(self, run: PlannedRun, data: LabelledImages) -> list[Path]:
        """Return the run's directory, or those of its stages, made now or before."""
        if run.method == REAL:
            return []
        out, how = self.place.work / run.name, {**self._where, "stop": self.stop}
        if run.stages:
            parts = split(data, run.stages.split())
            return learn_stages(parts, out=out, **run.request(), **how)
        if not RunDirectory(out).is_finished:
            terms = RegistrationTerms(hold_out=run.hold_out)
            again = partial(out).exists()
            make_run(data, **run.request(), out=out, resume=again, terms=terms, **how)
        return [out]

    def _measured(self, places: list[Path], asked: dict[str, Any], model: str) -> Cell:
        """Train `model` on the set, and on what was kept on the way if the experiment says so."""
        (place,), started = places, time.perf_counter()
        if model == FID:
            quality = measure_quality(place, reference="training", **self._where)
            seconds = round(time.perf_counter() - started, 1)
            distances = [quality.frechet_distance]
            return {"model": FID, "distances": distances, "evaluation_seconds": seconds}
        (found,) = evaluate(place, **asked)
        cell: Cell = {"model": model, "accuracies": found.accuracies}
        if self.experiment.measure.convergence:
            wanted = ("releases", "epsilon", "accuracies", "mean", "std")
            points = measure_convergence(place, **asked)
            cell["curve"] = [{name: point[name] for name in wanted} for point in points]
        return cell | {"evaluation_seconds": round(time.perf_counter() - started, 1)}

    def _on_real(self, run: PlannedRun, asked: dict[str, Any], model: str) -> Cell:
        """Train `model` on real records."""
        given, started = dict(run.settings), time.perf_counter()
        given["subsample"] = given.pop("images_per_class", None)
        (found,) = measure_real(asked.pop("test"), **asked | given)
        seconds = round(time.perf_counter() - started, 1)
        return {"model": model, "accuracies": found.accuracies, "evaluation_seconds": seconds}

    def _after_each(self, places: list[Path], asked: dict[str, Any], model: str) -> Cell:
        """Train `model` on the sets of all stages so far, after each of them."""
        started = time.perf_counter()
        curve = evaluate_stages(places, **asked)
        wanted = ("stage", "accuracies", "mean", "std")
        points = [point.to_json() for point in curve.points]
        return {
            "model": model,
            "accuracies": curve.points[-1].accuracies,
            "certified_epsilon": curve.statement.epsilon,
            "curve": [{name: point[name] for name in wanted} for point in points],
            "evaluation_seconds": round(time.perf_counter() - started, 1),
        }

    @property
    def _where(self) -> dict[str, Any]:
        return {
            "ledger": self._ledger,
            "device": self.place.device,
            "compile": self.place.compile,
            "progress": self.report,
        }

    def _asked(self, run: PlannedRun, data: LabelledImages, model: str) -> dict[str, Any]:
        tested = None if run.hold_out else data  # by default what was held out
        measure, asked = self.experiment.measure, self._where | {"test": tested}
        if model == RELEASED:
            return asked
        trained = {"protocol": measure.protocol, "models": [model], "seeds": measure.seeds}
        return asked | trained | dict(measure.options)

    @property
    def _ledger(self) -> Path:
        return self.place.work / "ledger.sqlite"


def _certified(certificates: Sequence[Certificate]) -> float | None:
    """Return the largest epsilon; None where there is no guarantee, or nothing to have one."""
    largest = max((one.epsilon for one in certificates), default=math.inf)
    return largest if math.isfinite(largest) else None


def _cost(places: Sequence[Path]) -> dict[str, Any]:
    """Return what making the runs took, call by call."""
    calls = [call for place in places for call in RunDirectory(place).cost()]
    peaks = [call["peak_gib"] for call in calls if call["peak_gib"] is not None]
    return {"seconds": [call["seconds"] for call in calls], "peak_gib": max(peaks, default=None)}
