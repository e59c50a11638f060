"""What an experiment file says: which sets to make, how to measure them, what was published.

[runs.NAME]      fields of a run; a list stands for one run with each of its elements
[measure]        protocol, models and seeds of the evaluation
[[published]]    a number of the paper, and the fields of the cell that it belongs to
[table]          which fields make the lines, and which one the columns
[smoke]          what `--scale smoke` replaces; a group's own `smoke`: of its settings
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal

from understudy.data.catalogue import suggestion
from understudy.errors import InvalidSettings
from understudy.text import one_line

Scale = Literal["full", "smoke"]
FID = "fid"
REAL = "real"
"""In place of a method: no set is made, but training starts from real records, all or
`settings.images_per_class` of each class; further settings are options of the evaluation."""
OF_RUN = (
    "method",
    "data",
    "epsilon",
    "delta",
    "preset",
    "accountant",
    "seed",
    "snapshots",
    "variant",
    "stages",
    "hold_out",
)
NOT_REQUESTED = ("data", "variant", "stages", "hold_out")
"""What a run's request to a method does not say."""

UNREADABLE = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What a file that is no experiment may lead to."""
MOST_RUNS = 10_000
"""Lists multiply: a few long ones would plan runs without end."""

OF_GROUP = ("settings", "reading", "smoke")
"""What a group of runs has beside the fields of each."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A set to make."""

    method: str
    data: str
    epsilon: float
    delta: float = 1e-5
    preset: str = "auto"
    accountant: str = "pld"
    seed: int = 0
    snapshots: int = 0
    variant: str = ""
    """What is special about its settings, in words."""
    stages: str = ""
    """Continual learning: classes of each stage, `5,6 1,2`; a run is then made of each."""
    hold_out: float = 0.0
    """Share of the units to test on, of a set without a test split."""
    settings: tuple[tuple[str, Any], ...] = ()
    reading: tuple[tuple[str, Any], ...] = ()
    """How a set that is not a known one is read, such as which of its labels."""

    @property
    def name(self) -> str:
        """Return a name for its directory, the same whenever it is the same run."""
        given = [f"{key}{value}" for key, value in self.settings]
        given += [f"snapshots{self.snapshots}"] if self.snapshots else []
        given += [f"stages{self.stages}"] if self.stages else []
        parts = [self.data, self.method, self.preset, f"eps{self.epsilon:g}", *given]
        return re.sub(r"[^\w.=-]+", "_", "-".join([*parts, f"seed{self.seed}"]))

    def request(self) -> dict[str, Any]:
        """Return what to ask `synthesize` for."""
        asked = {name: getattr(self, name) for name in OF_RUN if name not in NOT_REQUESTED}
        return asked | {"settings": dict(self.settings)}

    def fields(self) -> dict[str, Any]:
        """Return what a table can refer to."""
        own = {name: getattr(self, name) for name in OF_RUN}
        if math.isinf(self.epsilon):
            own["epsilon"] = "inf"  # as JSON has no such number
        return own | dict(self.settings)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How the sets are evaluated."""

    protocol: str = "psg"
    models: tuple[str, ...] = ("convnet",)
    """What is trained on the set; `fid` is the distance of its images from the training records,
    `released classifier` what a run trained itself."""
    seeds: int = 3
    options: Mapping[str, Any] = field(default_factory=dict)
    convergence: bool = False
    """Whether to evaluate the snapshots too."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The form of the table."""

    rows: tuple[str, ...]
    columns: str = "model"
    mean: bool = False
    """Whether to add the mean over all columns."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure to make."""

    name: str
    title: str
    source: str
    about: str
    runs: tuple[PlannedRun, ...]
    measure: Measure
    table: Layout
    published: tuple[Mapping[str, Any], ...]
    scale: Scale

    def published_for(self, cell: Mapping[str, Any]) -> float | None:
        """Return what was published for the cell with these fields: accuracy in %, or distance."""
        for entry in self.published:
            if all(cell.get(key) == value for key, value in entry.items() if key != "accuracy"):
                return float(entry["accuracy"])
        return None


def names() -> list[str]:
    """List the experiments."""
    folder = resources.files("understudy.reproduce") / "experiments"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith("toml"))


def load_experiment(name: str, scale: Scale = "full") -> Experiment:
    """Read the experiment called `name`."""
    if name not in names():
        raise InvalidSettings(
            f"there is no experiment '{name}'{suggestion(name, names())}; known: "
            f"{', '.join(names())}"
        )
    file = resources.files("understudy.reproduce") / "experiments" / f"{name}.toml"
    return parse_experiment(name, file.read_bytes(), scale)


def parse_experiment(name: str, content: bytes, scale: Scale = "full") -> Experiment:
    """Read the text of an experiment file."""
    try:
        return _parsed(name, tomllib.loads(content.decode()), scale)
    except UNREADABLE as error:
        raise InvalidSettings(
            f"the experiment {name} cannot be read ({one_line(error)}); expected TOML with runs, a "
            "table, a title and a source; correct it"
        ) from error


def _parsed(name: str, content: Mapping[str, Any], scale: Scale) -> Experiment:
    changed = content.get("smoke", {}) if scale == "smoke" else {}
    measure = content.get("measure", {}) | changed.get("measure", {})
    runs = [
        run
        for group in content["runs"].values()
        for run in _expanded(group | _of_runs(changed), _forced(group, changed))
    ]
    return Experiment(
        name=name,
        title=content["title"],
        source=content["source"],
        about=" ".join(content.get("about", "").split()),
        runs=tuple(dict.fromkeys(runs)),  # at a small scale some may be the same
        measure=Measure(**measure | {"models": tuple(measure.get("models", ("convnet",)))}),
        table=Layout(**content["table"] | {"rows": tuple(content["table"]["rows"])}),
        published=() if scale == "smoke" else tuple(content.get("published", ())),
        scale=scale,
    )


def _of_runs(changed: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changed.items() if key not in ("settings", "measure")}


def _forced(group: Mapping[str, Any], changed: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that a small scale forces on a group of runs."""
    forced: Mapping[str, Any] = changed.get("settings", {})
    return group.get("smoke", forced) if changed else forced


def _expanded(group: Mapping[str, Any], forced: Mapping[str, Any]) -> Iterator[PlannedRun]:
    """Yield a run for each combination of the listed values."""
    fields = {key: value for key, value in group.items() if key not in OF_GROUP}
    reading = tuple(sorted(group.get("reading", {}).items()))
    unknown = set(fields) - set(OF_RUN)
    if unknown:
        raise InvalidSettings(
            f"an experiment has runs with {', '.join(sorted(unknown))}, expected "
            f"{', '.join(OF_RUN)}, settings or reading"
        )
    settings = {**group.get("settings", {}), **forced}
    axes = {**fields, **{f"settings.{key}": value for key, value in settings.items()}}
    choices = [value if isinstance(value, list) else [value] for value in axes.values()]
    if math.prod(map(len, choices)) > MOST_RUNS:
        raise InvalidSettings(
            f"an experiment asks for {math.prod(map(len, choices))} runs, expected at most "
            f"{MOST_RUNS}; shorten a list"
        )
    for chosen in itertools.product(*choices):
        values = dict(zip(axes, chosen, strict=True))
        own = {key: value for key, value in values.items() if not key.startswith("settings.")}
        given = {key.partition(".")[2]: values[key] for key in values if key not in own}
        own["epsilon"] = float(own["epsilon"])
        yield PlannedRun(**own, settings=tuple(sorted(given.items())), reading=reading)
