"""An experiment's numbers as Markdown and as a page: measured beside published."""

from __future__ import annotations

import html as escaping
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from understudy.charts import Chart, Series, counted, line_chart, linear, shares, standalone
from understudy.evaluation.downstream import RELEASED
from understudy.reproduce.experiment import FID, Experiment

Cell = Mapping[str, Any]
Lines = dict[tuple[Any, ...], dict[Any, list[Cell]]]
"""The cells of each line of a table, by column."""
NOT_COMPARABLE = (
    "Scale smoke: tiny settings on built-in data, to see that everything works. The numbers say "
    "nothing about the method and are not comparable with published ones."
)
WORDS = {
    "images_per_class": "images per class",
    "cifar10": "CIFAR-10",
    "fashion-mnist": "Fashion-MNIST",
    "mnist": "MNIST",
}


@dataclass(frozen=True)
class Grid:
    """A table of texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def plain(self) -> Grid:
        """Return it without Markdown."""
        return Grid(self.columns, [[text.replace("**", "") for text in row] for row in self.rows])


def accuracies(experiment: Experiment, cells: Sequence[Cell]) -> Grid:
    """Lay out measured and published accuracies as the experiment says."""
    layout, shown = experiment.table, _shown(experiment, cells)
    columns = sorted({cell[layout.columns] for cell in shown}, key=_order)
    lines: Lines = {}
    for cell in shown:
        line = tuple(cell.get(name, "") for name in layout.rows)
        lines.setdefault(line, {}).setdefault(cell[layout.columns], []).append(cell)
    heads = [_word(name) for name in layout.rows]
    heads += [f"{_word(layout.columns)} {_word(value)}" for value in columns]
    rows = [
        [*(_word(value) for value in line), *(_text(found.get(value, [])) for value in columns)]
        for line, found in _in_order(lines)
    ]
    if layout.mean:
        heads.append(f"mean over {len(columns)}")
        for row, (_, found) in zip(rows, _in_order(lines), strict=True):
            row.append(_text(_mean([found.get(value, []) for value in columns])))
    return Grid(heads, rows)


def _in_order(lines: Lines) -> list[tuple[tuple[Any, ...], dict[Any, list[Cell]]]]:
    return sorted(lines.items(), key=lambda item: [_order(v) for v in item[0]])


def _mean(columns: Sequence[Sequence[Cell]]) -> list[Cell]:
    """Return a cell with the mean over columns, as far as none is missing."""
    mean: dict[str, Any] = {"published": None}
    for what in ("published", "measured"):
        values = [[c[what] for c in cells if c.get(what) is not None] for cells in columns]
        if all(values):
            mean[what] = fmean(fmean(value) for value in values)
    return [mean]


def _shown(experiment: Experiment, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with what was published for each, and published numbers without a cell."""
    shown: list[Cell] = [
        {**cell, "published": experiment.published_for(cell), "measured": fmean(_values(cell))}
        for cell in cells
    ]
    for entry in experiment.published:
        fields = {key: value for key, value in entry.items() if key != "accuracy"}
        if not any(all(cell.get(k) == v for k, v in fields.items()) for cell in shown):
            shown.append({**fields, "published": entry["accuracy"], "preset": ""})
    return [cell for cell in shown if experiment.table.columns in cell]


def _values(cell: Cell) -> list[float]:
    """Return accuracies in %, or distances."""
    if "distances" in cell:
        return list(cell["distances"])
    return [100 * value for value in cell["accuracies"]]


def _text(cells: Sequence[Cell]) -> str:
    """Write the mean over sets, its spread if there are several, and the published number."""
    if not cells:
        return ""
    published = cells[0]["published"]
    beside = "" if published is None else f"published {published:.1f}"
    values = [cell["measured"] for cell in cells if "measured" in cell]
    if not values:
        return beside
    spread = f" ± {pstdev(values):.1f}" if len(values) > 1 else ""
    return f"**{fmean(values):.1f}**{spread}" + (f" ({beside})" if beside else "")


def provenance(cells: Sequence[Cell]) -> Grid:
    """Say of each number how it came about."""
    columns = (
        "run", "model", "measured", "certified epsilon", "releases", "seconds", "peak GiB",
        "device", "torch", "commit", "remark",
    )  # fmt: skip
    rows = [
        (
            cell["run"], cell["model"],
            " / ".join(f"{value:.1f}" for value in _values(cell)),
            _certified(cell), str(cell["releases"]),
            f"{sum(cell['seconds']):.0f}", str(cell["peak_gib"] or "-"),
            cell["device"], cell["torch"], cell["commit"], cell.get("remark", ""),
        )
        for cell in cells
    ]  # fmt: skip
    return Grid(columns, rows)


def curves(cells: Sequence[Cell]) -> Grid:
    """List accuracy against the epsilon spent, or after each stage, where it was measured."""
    rows = [
        (
            cell["run"], cell["model"],
            *(
                [f"stage {point['stage']}"] if "stage" in point
                else [f"{point['epsilon']:.2f}", str(point["releases"])]
            ),
            f"{100 * point['mean']:.1f} ± {100 * point['std']:.1f}",
        )
        for cell in cells
        for point in cell.get("curve", ())
    ]  # fmt: skip
    are_staged = any(_is_staged(cell) for cell in cells)
    when = ["after"] if are_staged else ["epsilon spent", "releases"]
    return Grid(("run", "model", *when, "accuracy, %"), rows)


def figures(cells: Sequence[Cell]) -> dict[str, Chart]:
    """Draw accuracy against the epsilon spent, or after each stage, by the name of the chart.

    One chart for each data set, and for each epsilon where a line does not show it.
    """
    charts: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.get("curve"):
            name = f"{cell['data']}-eps{cell['epsilon']:g}" if _is_staged(cell) else cell["data"]
            charts.setdefault(name, []).append(cell)
    return {name: _figure(found) for name, found in charts.items()}


def _is_staged(cell: Cell) -> bool:
    return bool(cell.get("stages"))


def _line_of(cell: Cell) -> str:
    parts = [f"{cell['method']} {cell['preset']}", cell["variant"], f"seed {cell['seed']}"]
    return ", ".join(part for part in parts if part)


def _figure(cells: Sequence[Cell]) -> Chart:
    first = cells[0]
    at, when = "epsilon", "against the epsilon spent"
    if _is_staged(first):
        at, when = "stage", f"after each stage, epsilon {first['epsilon']:g}"
    series = [
        Series(
            _line_of(cell),
            [(point[at], point["mean"]) for point in cell["curve"]],
            [point["std"] for point in cell["curve"]],
            style=number,
        )
        for number, cell in enumerate(cells)
    ]
    places = [x for one in series for x, _ in one.points]
    return line_chart(
        f"{_word(first['data'])}: accuracy {when}",
        "One line for each run; bars are standard deviations over evaluation networks.",
        series,
        x=counted(at, round(max(places)))
        if at == "stage"
        else linear("epsilon spent", 0, max(places)),
        y=shares("test accuracy"),
    )


def _sections(experiment: Experiment, cells: Sequence[Cell]) -> list[tuple[str, Grid]]:
    has_distances = FID in experiment.measure.models
    heading = "Test accuracy, %" + ("; Fréchet inception distance" if has_distances else "")
    sections = [(heading, accuracies(experiment, cells))]
    if any("curve" in cell for cell in cells):
        sections.append(("On the way", curves(cells)))
    return [*sections, ("How each number came about", provenance(cells))]


def _notes(experiment: Experiment) -> list[str]:
    notes = [experiment.about, f"Published: {experiment.source}."] if experiment.published else []
    measure = experiment.measure
    tested = (
        "each classifier is tested as it was released"
        if measure.models == (RELEASED,)
        else f"{measure.seeds} evaluation networks per set (protocol {measure.protocol})"
    )
    how = (
        "Mean over the runs of all seeds, ± their standard deviation where there are several; "
        f"{tested}. Seconds are wall-clock, with compilation, summed over "
        f"resumed calls, without evaluation. Written by `understudy reproduce {experiment.name}`."
    )
    notes = [*(notes or [experiment.about]), how]
    return [NOT_COMPARABLE, *notes] if experiment.scale == "smoke" else notes


def _certified(cell: Cell) -> str:
    epsilon = cell["certified_epsilon"]
    return "none" if epsilon is None else f"{epsilon:.4f}"


def markdown(
    experiment: Experiment,
    cells: Sequence[Cell],
    pictures: Mapping[str, str] | None = None,
    sheets: Mapping[str, str] | None = None,
) -> str:
    """Write the table as Markdown, with charts above and images of runs below: titles, files."""
    lines = [f"# {experiment.title}", ""]
    for note in _notes(experiment):
        lines += [note, ""]
    for title, file in (pictures or {}).items():
        lines += [f"![{title}]({file})", ""]
    for heading, grid in _sections(experiment, cells):
        lines += [f"## {heading}", "", "| " + " | ".join(grid.columns) + " |"]
        lines += ["|" + "---|" * len(grid.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in grid.rows] + [""]
    for title, file in (sheets or {}).items():
        lines += [f"## Images of {title}", "", f"![Some images of each class]({file})", ""]
    return "\n".join(lines[:-1]) + "\n"


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }}
body {{ max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
figure {{ margin: 1rem 0 }}
th, td {{ text-align: left; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #8886 }}
</style></head>
<body><main><h1>{title}</h1>
{body}
</main></body></html>
"""


def html(experiment: Experiment, cells: Sequence[Cell]) -> str:
    """Write the table as a page that stands alone."""
    parts = [f"<p>{escaping.escape(note)}</p>" for note in _notes(experiment)]
    parts += [f"<figure>{standalone(chart)}</figure>" for chart in figures(cells).values()]
    for heading, grid in _sections(experiment, cells):
        head = "".join(f'<th scope="col">{escaping.escape(name)}</th>' for name in grid.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{_inline(text)}</td>" for text in row) + "</tr>"
            for row in grid.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        label = escaping.escape(heading)
        parts.append(
            f'<h2>{label}</h2><div class="scroll" tabindex="0" role="region" '
            f'aria-label="{label}">{table}</div>'
        )
    return PAGE.format(title=escaping.escape(experiment.title), body="\n".join(parts))


def _inline(text: str) -> str:
    """Escape, and turn the one piece of Markdown that cells use into HTML."""
    first, *rest = escaping.escape(text).split("**")
    return first + "".join(
        f"<strong>{part}</strong>" if number % 2 == 0 else part for number, part in enumerate(rest)
    )


def _word(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return WORDS.get(value, str(value)) if isinstance(value, str) else str(value)


def _order(value: Any) -> tuple[int, float, str]:
    """Sort numbers as numbers and names as names."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))
