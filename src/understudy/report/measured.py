"""What was measured on real records: the part of a page that must not be shared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from understudy.charts import (
    Bar,
    Chart,
    Series,
    Side,
    Table,
    bar_chart,
    heat_map,
    line_chart,
    linear,
    percent,
    shares,
    spread,
)
from understudy.errors import InvalidData
from understudy.report.released import Released, Tile, tile_of
from understudy.runs import METRICS_FILE, RunDirectory
from understudy.synthetic import SyntheticSet

Entry = Mapping[str, Any]
SECTIONS = ("utility", "quality", "memorisation", "convergence", "audit")


@dataclass(frozen=True)
class Memorisation:
    """How near synthetic images come to training records."""

    chart: Chart
    text: str
    nearest: tuple[Tile, ...]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything below the line, for one run."""

    utility: Table | None
    accuracy: Chart | None
    by_class: tuple[Chart, ...]
    quality: Table | None
    memorisation: tuple[Memorisation, ...]
    convergence: Chart | None
    audit: Chart | None
    audit_table: Table | None
    cost: Table | None
    others: str
    """Sections that this version does not know, as JSON."""
    entries: Mapping[str, Sequence[Entry]]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was measured yet."""
        return not any(self.entries.values())


def read_measured(run: RunDirectory, released: Released) -> Measured:
    """Read a run's measurements.

    Raises:
        InvalidData: they are of another version, or an entry lacks what it must have.
    """
    entries, calls = run.metrics(), run.cost()
    try:
        return _measured(entries, calls, released)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InvalidData(
            f"{run.path / 'private' / METRICS_FILE} lacks or garbles a field ({error!r}); use the "
            "version of understudy that wrote it, or evaluate again"
        ) from error


def _measured(
    entries: Mapping[str, Sequence[Entry]], calls: Sequence[Entry], released: Released
) -> Measured:
    utility, names = entries.get("utility", []), released.facts.class_names
    others = {key: value for key, value in entries.items() if key not in SECTIONS}
    return Measured(
        utility=_utility_table(utility) if utility else None,
        accuracy=accuracy_chart([("", utility)]),
        by_class=_by_class(utility, names),
        quality=_quality_table(entries.get("quality", [])),
        memorisation=tuple(
            _memorisation(entry, released.synthetic) for entry in entries.get("memorisation", [])
        ),
        convergence=convergence_chart([("", entries.get("convergence", []))]),
        audit=audit_chart(entries.get("audit", [])),
        audit_table=_audit_table(entries.get("audit", [])),
        cost=_cost_table(utility, calls),
        others=json.dumps(others, indent=2, ensure_ascii=False) if others else "",
        entries=entries,
    )


def best(utility: Sequence[Entry]) -> Entry | None:
    """Return the entry with the highest mean accuracy; not of networks that saw real records."""
    private = [entry for entry in utility if entry["trained_on"] != "real"]
    return max(private, key=lambda entry: float(entry["mean"]), default=None)


def best_accuracy(utility: Sequence[Entry]) -> str:
    """Write the best accuracy, and of which network it is."""
    found = best(utility)
    return f"{percent(found['mean'])} ({found['model']})" if found else "not measured"


def entry_names(entries: Sequence[Entry]) -> list[str]:
    """Name each measurement by what tells it from the others.

    >>> shared = {"protocol": "psg", "tested_on": "test set", "trained_on": "synthetic"}
    >>> entry_names([
    ...     shared | {"model": "mlp", "options": {"epochs": 5, "seed": 0}},
    ...     shared | {"model": "mlp", "options": {"epochs": 9, "seed": 0}},
    ...     shared | {"model": "convnet", "trained_on": "real", "options": {"epochs": 9}},
    ... ])
    ['mlp, epochs 5', 'mlp, epochs 9', 'convnet, real records']
    """
    names = []
    for entry in entries:
        parts = [str(entry["model"])]
        if entry.get("trained_on") == "real":
            parts.append("real records")
        parts += [
            str(entry[key])
            for key in ("protocol", "tested_on")
            if len({other.get(key) for other in entries}) > 1
        ]
        same = ("protocol", "model", "trained_on", "tested_on")
        twins = [o for o in entries if all(o.get(key) == entry.get(key) for key in same)]
        for option, value in sorted((entry.get("options") or {}).items()):
            if any((twin.get("options") or {}).get(option) != value for twin in twins):
                parts.append(f"{option.replace('_', ' ')} {value}")
        names.append(", ".join(parts))
    return names


def accuracy_chart(groups: Sequence[tuple[str, Sequence[Entry]]]) -> Chart | None:
    """Draw the accuracy of every network; groups are runs, by their letters.

    The same network of several runs stands together.
    """
    found: dict[str, list[Bar]] = {}
    for letter, utility in groups:
        for entry, name in zip(utility, entry_names(utility), strict=True):
            bar = Bar(
                f"{letter}: {name}" if letter else name,
                float(entry["mean"]),
                float(entry["std"]) if len(entry["accuracies"]) > 1 else None,
                is_hatched=entry["trained_on"] == "real",
                cells=(str(entry["tested_on"]),),
            )
            found.setdefault(name, []).append(bar)
    bars = [bar for same in found.values() for bar in same]
    if not bars:
        return None
    return bar_chart(
        "Accuracy by network",
        "Share of real test images that each network classifies rightly, with the standard "
        "deviation over its repetitions. Hatched bars were trained on real records: the ceiling.",
        bars,
        columns=("tested on",),
    )


def _utility_table(utility: Sequence[Entry]) -> Table:
    rows = [
        (
            name,
            spread(entry["mean"], entry["std"] if len(entry["accuracies"]) > 1 else None),
            ", ".join(f"{100 * accuracy:.1f}" for accuracy in entry["accuracies"]),
            str(entry["trained_on"]),
            _count(entry.get("train_images")),
            str(entry["tested_on"]),
            _count(entry.get("test_images")),
        )
        for entry, name in zip(utility, entry_names(utility), strict=True)
    ]
    columns = (
        "network", "accuracy", "each", "trained on", "training images", "tested on", "test images",
    )  # fmt: skip
    return Table("Accuracy on real records", columns, rows)


def _by_class(utility: Sequence[Entry], names: Sequence[str]) -> tuple[Chart, ...]:
    charts = []
    ordered = sorted(
        zip(utility, entry_names(utility), strict=True), key=lambda pair: -float(pair[0]["mean"])
    )
    ordered.sort(key=lambda pair: pair[0]["trained_on"] == "real")
    for entry, name in ordered:
        if entry.get("per_class"):
            bars = [
                Bar(label, float(share), is_hatched=entry["trained_on"] == "real")
                for label, share in zip(names, entry["per_class"], strict=True)
            ]
            title = f"Accuracy by class: {name}"
            charts.append(bar_chart(title, "Mean accuracy on the test images of each class.", bars))
        if entry.get("confusion"):
            description = (
                "Of the test images of each true class (row), the percentage taken for each class "
                "(column). What lies off the diagonal was mistaken."
            )
            charts.append(heat_map(f"Confusion: {name}", description, names, entry["confusion"]))
    return tuple(charts)


def _quality_table(quality: Sequence[Entry]) -> Table | None:
    if not quality:
        return None
    rows = [
        (
            str(entry["features"]),
            f"{entry['reference']}, {_count(entry.get('reference_images'))}",
            _value(entry.get("fid")),
            _value(entry.get("frechet_distance")),
            _value(entry.get("kid"), entry.get("kid_std")),
            _value(entry.get("precision")),
            _value(entry.get("recall")),
            _value(entry.get("inception_score"), entry.get("inception_score_std")),
        )
        for entry in quality
    ]
    columns = (
        "features", "compared with", "FID", "Fréchet distance", "KID", "precision", "recall",
        "inception score",
    )  # fmt: skip
    return Table("Image quality", columns, rows)


def _memorisation(entry: Entry, synthetic: SyntheticSet | None) -> Memorisation:
    def points(key: str) -> list[tuple[float, float]]:
        return list(zip(entry["quantiles"], entry[key], strict=True))

    sides: tuple[tuple[str, str, int, Side], ...] = (
        ("synthetic", "synthetic", 0, "left"),
        ("held_out", "held-out records", 1, "right"),
    )
    lines = [
        Series(name, points(key), style=style, label_at=0.6, label_side=side)
        for key, name, style, side in sides
    ]
    chart = line_chart(
        f"Distance to the nearest training record: {entry['reference']}",
        "Quantiles over the images. Synthetic images that lie much nearer to training records than "
        "held-out records do would be a sign of copying.",
        lines,
        x=shares("share of images"),
        y=linear("distance", 0, max(*entry["synthetic"], *entry["held_out"])),
    )
    share = percent(entry["closer_than_held_out"])
    text = (
        f"{share} of the synthetic images lie nearer to a training record than 99 % of the "
        "held-out records do; about 1 % is what chance gives."
    )
    nearest = tuple(
        tile_of(synthetic, index, f"Synthetic image number {index}, near a training record")
        for index in entry.get("nearest") or ()
        if synthetic is not None and 0 <= index < len(synthetic)
    )
    return Memorisation(chart, text, nearest)


def convergence_chart(groups: Sequence[tuple[str, Sequence[Entry]]]) -> Chart | None:
    """Draw accuracy against the epsilon spent so far; groups are runs, by their letters."""
    series: list[Series] = []
    for letter, entries in groups:
        keys = sorted({(str(e["model"]), str(e["protocol"]), str(e["tested_on"])) for e in entries})
        for model, protocol, tested_on in keys:
            of_key = [
                e for e in entries
                if (e["model"], e["protocol"], e["tested_on"]) == (model, protocol, tested_on)
            ]  # fmt: skip
            of_key.sort(key=lambda e: float(e["epsilon"]))
            series.append(
                Series(
                    f"{letter}: {model}" if letter else model,
                    [(float(e["epsilon"]), float(e["mean"])) for e in of_key],
                    errors=[float(e["std"]) for e in of_key],
                    style=len(series),
                )
            )
    if not series:
        return None
    largest = max(epsilon for one in series for epsilon, _ in one.points)
    return line_chart(
        "Accuracy as the budget is spent",
        "Test accuracy of a released classifier, or of networks trained on a released set, as it "
        "stood when this much of epsilon was spent, with the standard deviation over repetitions.",
        series,
        x=linear("epsilon spent", 0, largest),
        y=shares("accuracy"),
    )


def audit_chart(audits: Sequence[Entry]) -> Chart | None:
    """Draw the lower bounds that attacks show against the claim; above the line is a fault."""
    if not audits:
        return None
    points = sorted((float(entry["claimed"]), float(entry["bound"])) for entry in audits)
    most = 1.2 * max(value for point in points for value in point)
    lines = [
        Series(
            "as claimed", [(share * most, share * most) for share in (0.0, 0.5, 1.0)], style=3,
            has_markers=False, label_at=0.5, label_side="left",
        ),
        Series("the best attack", points[-1:], label_side="left", shows_values=True),
    ]  # fmt: skip
    return line_chart(
        "Lower bounds on epsilon against the claim",
        "What attacks on the released part alone show of epsilon at least, with 95 % confidence: "
        "the best of them. Above the line would be a fault; below it nothing is proved.",
        lines,
        x=linear("claimed epsilon", 0, most),
        y=linear("lower bound", 0, most),
    )


def _audit_table(audits: Sequence[Entry]) -> Table | None:
    rows = [
        (
            str(entry["attack"]),
            _value(entry["claimed"]),
            _value(entry["bound"]),
            f"{entry['how']}, {_count(entry['repetitions'])} records tried",
            str(entry["verdict"]),
        )
        for entry in audits
    ]
    columns = ("attack", "claimed epsilon", "lower bound", "how", "verdict")
    return Table("Audit", columns, rows) if rows else None


def _cost_table(utility: Sequence[Entry], calls: Sequence[Entry]) -> Table | None:
    rows = []
    if calls:
        seconds = sum(call["seconds"] for call in calls)
        devices = ", ".join(dict.fromkeys(str(call["device"]) for call in calls))
        rows.append(("making it", _seconds(seconds), devices))
    rows += [
        (f"evaluating {name}", _seconds(entry["seconds"]), str(entry.get("device", "not recorded")))
        for entry, name in zip(utility, entry_names(utility), strict=True)
        if entry.get("seconds") is not None
    ]
    return Table("Time that was recorded", ("step", "time", "device"), rows) if rows else None


def _seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _count(number: Any) -> str:
    return "unknown" if number is None else f"{int(number):,}"


def _value(number: Any, deviation: Any = None) -> str:
    if number is None:
        return "–"
    return f"{number:.4g}" if deviation is None else f"{number:.4g} ± {deviation:.2g}"
