"""Charts as inline SVG, each with the table of its numbers.

Drawn for a width of 400 units, so that text stays readable on a phone. Nothing depends on colour:
series have a marker, a dash pattern and a name beside them; bars carry their numbers; real records
are hatched. Colours are classes of the report's `style.css`, so both themes share one drawing;
`standalone` makes a file of a line chart, with its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup, escape

WIDTH, HEIGHT = 400.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 388.0, 18.0, 226.0
"""The plane of a line chart within the drawing."""
STYLES = 4
Side = Literal["above", "left", "right"]
LABEL_OFFSETS: dict[Side, tuple[float, float]] = {
    "above": (0, -10), "left": (-7, -5), "right": (12, 15),
}  # fmt: skip
LETTERS_IN_LABEL = 38
SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


STANDALONE_STYLE = """
svg { --paper: #fdfdfb; --ink: #1c1d1f; --quiet: #55585e; --rule: #d9d9d2; background: var(--paper);
  --series0: #0b5563; --series1: #a3401f; --series2: #5a3d8a; --series3: #55585e }
@media (prefers-color-scheme: dark) { svg { --paper: #16181a; --ink: #ececea; --quiet: #a9adb3;
  --rule: #3a3e43; --series0: #7fc8d6; --series1: #f0a585; --series2: #c3aef0;
  --series3: #a9adb3 } }
text { font: 12.5px system-ui, sans-serif; fill: var(--ink) }
.tick { fill: var(--quiet); font-size: 12px }
.label { font-weight: 650; paint-order: stroke; stroke: var(--paper); stroke-width: 4px }
.grid { stroke: var(--rule) } .axis { stroke: var(--quiet) } .error { stroke: var(--ink) }
.series polyline { fill: none; stroke-width: 2.25 } .marker { stroke: var(--paper) }
.style0 polyline { stroke: var(--series0) } .style0 .marker { fill: var(--series0) }
.style1 polyline { stroke: var(--series1); stroke-dasharray: 8 4 }
.style1 .marker { fill: var(--series1) }
.style2 polyline { stroke: var(--series2); stroke-dasharray: 2 4 }
.style2 .marker { fill: var(--series2) }
.style3 polyline { stroke: var(--series3); stroke-dasharray: 10 4 2 4 }
.style3 .marker { fill: var(--series3) }
"""


@dataclass(frozen=True)
class Table:
    """Numbers as text, the first cell of a row its name."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Chart:
    """A drawing and the numbers behind it."""

    title: str
    description: str
    svg: Markup
    table: Table


@dataclass(frozen=True)
class Axis:
    """One axis: a label, a range, and where its ticks are."""

    label: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, 0 at the low end to 1 at the high end."""
        low, high, at = self.low, self.high, min(max(value, self.low), self.high)
        if self.is_log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return (at - low) / (high - low) if high > low else 0.5


@dataclass(frozen=True)
class Series:
    """One line: its points, and the name that stands beside it."""

    name: str
    points: Sequence[tuple[float, float]]
    errors: Sequence[float] = ()
    style: int = 0
    has_markers: bool = True
    shows_values: bool = False
    label_at: float = 1.0
    """Where along the line the name stands, 0 to 1."""
    label_side: Side = "above"


@dataclass(frozen=True)
class Bar:
    """One bar of shares; a hatched one stands for real records."""

    name: str
    value: float
    error: float | None = None
    is_hatched: bool = False
    cells: tuple[str, ...] = field(default=())
    """Further cells of its row in the table."""


def percent(share: float, digits: int = 1) -> str:
    """Write a share.

    >>> percent(0.6713), percent(1.0)
    ('67.1 %', '100.0 %')
    """
    return f"{100 * share:.{digits}f} %"


def power(value: float) -> str:
    """Write a small number by its power of ten.

    >>> power(1e-5), power(2.5e-6), power(0.01)
    ('10⁻⁵', '2.5 × 10⁻⁶', '0.01')
    """
    if not 0 < value < 0.001:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    tens = "10⁻" + str(-int(exponent)).translate(SUPERSCRIPTS)
    return tens if float(mantissa) == 1 else f"{float(mantissa):g} × {tens}"


def spread(mean: float, deviation: float | None) -> str:
    """Write a share and its standard deviation."""
    return percent(mean) if deviation is None else f"{100 * mean:.1f} ± {100 * deviation:.1f} %"


def linear(label: str, low: float, high: float, *, unit: str = "") -> Axis:
    """Return an axis with about five round ticks that takes in `low` and `high`.

    >>> [text for _, text in linear("epsilon", 0, 13.2).ticks]
    ['0', '5', '10', '15']
    """
    width = (high - low) or 1.0
    power = 10.0 ** math.floor(math.log10(width / 4))
    step = next(power * k for k in (1, 2, 2.5, 5, 10) if width / (power * k) <= 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    values = [step * k for k in range(first, max(last, first + 1) + 1)]
    return Axis(label, values[0], values[-1], tuple((v, f"{v:g}{unit}") for v in values))


def shares(label: str) -> Axis:
    """Return an axis from 0 to 100 %."""
    return Axis(label, 0, 1, tuple((k / 4, f"{25 * k} %") for k in range(5)))


def counted(label: str, last: int) -> Axis:
    """Return an axis with a tick at each whole number from 1 to `last`.

    >>> counted("stage", 3).ticks
    ((1.0, '1'), (2.0, '2'), (3.0, '3'))
    """
    return Axis(label, 1.0, last, tuple((float(n), str(n)) for n in range(1, last + 1)))


def decades(label: str, low: float, high: float) -> Axis:
    """Return a logarithmic axis with a tick at each power of ten."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    powers = [10.0**k for k in range(first, max(last, first + 1) + 1)]
    return Axis(label, powers[0], powers[-1], tuple((p, power(p)) for p in powers), is_log=True)


def line_chart(
    title: str, description: str, series: Sequence[Series], *, x: Axis, y: Axis
) -> Chart:
    """Draw lines over a plane."""
    parts = [*_grid(x, y), *(_line(one, x, y) for one in series)]
    parts += _labels([one for one in series if one.name], x, y)
    has_errors = any(one.errors for one in series)
    rows = tuple(
        (one.name, _number(px), _number(py), *([_number(error)] if has_errors else []))
        for one in series
        for (px, py), error in zip(one.points, one.errors or [0.0] * len(one.points), strict=True)
    )
    columns = ("line", x.label, y.label, *(["standard deviation"] if has_errors else []))
    svg = _svg(title, description, HEIGHT, parts)
    return Chart(title, description, svg, Table(title, columns, rows))


def bar_chart(
    title: str, description: str, bars: Sequence[Bar], *, columns: Sequence[str] = ()
) -> Chart:
    """Draw shares as bars, each under its name and number, with the standard deviation."""
    step, first = 42.0, 10.0
    left, right = 4.0, 396.0
    bottom = first + step * len(bars)
    parts = []
    for tick in range(5):
        at = left + (right - left) * tick / 4
        anchor = ("start", "middle", "middle", "middle", "end")[tick]
        parts.append(_tag("line", class_="grid", x1=at, x2=at, y1=first, y2=bottom))
        parts.append(_text(f"{25 * tick} %", at, bottom + 16, anchor=anchor, class_="tick"))
    for number, bar in enumerate(bars):
        parts += _bar(bar, first + step * number, left, right)
    svg = _svg(title, description, bottom + 24, parts)
    rows = tuple((bar.name, spread(bar.value, bar.error), *bar.cells) for bar in bars)
    table = Table(title, ("bar", "accuracy", *columns), rows)
    return Chart(title, description, svg, table)


def _bar(bar: Bar, top: float, left: float, right: float) -> list[Markup]:
    width = right - left
    name = bar.name if len(bar.name) <= LETTERS_IN_LABEL else f"{bar.name[: LETTERS_IN_LABEL - 1]}…"
    reach = max(bar.value * width, 1.0)
    shape = {"x": left, "y": top + 18, "width": reach, "height": 12.0}
    parts = [
        _text(name, left, top + 13),
        _text(spread(bar.value, bar.error), right, top + 13, anchor="end", class_="number"),
        _tag("rect", class_="bar hatched" if bar.is_hatched else "bar", **shape),
    ]
    if bar.error:
        low, high = (left + width * min(max(bar.value + s * bar.error, 0), 1) for s in (-1, 1))
        for x1, x2, y1, y2 in (
            (low, high, 24.0, 24.0), (low, low, 20.0, 28.0), (high, high, 20.0, 28.0),
        ):  # fmt: skip
            parts.append(_tag("line", class_="error", x1=x1, x2=x2, y1=top + y1, y2=top + y2))
    return parts


def heat_map(
    title: str, description: str, names: Sequence[str], counts: Sequence[Sequence[float]]
) -> Chart:
    """Draw a confusion matrix: of each true class (row), the share predicted as each class."""
    size = len(names)
    cell = max((WIDTH - 62) / size, 18.0)
    left, top = 60.0, 42.0
    parts = [
        _text("predicted class", left + cell * size / 2, 14, anchor="middle", class_="tick"),
        _text("true class", 2, 14, class_="tick"),
    ]
    for column, name in enumerate(names):
        parts.append(_text(_brief(name, cell), left + cell * (column + 0.5), 34, anchor="middle"))
    for row, (name, line) in enumerate(zip(names, counts, strict=True)):
        y, total = top + cell * row, sum(line)
        parts.append(_text(_brief(name, 56.0), left - 6, y + cell / 2 + 4, anchor="end"))
        for column, count in enumerate(line):
            share = count / total if total else 0.0
            step = min(5, math.ceil(share * 5)) if share >= 0.005 else 0
            x = left + cell * column
            parts.append(_tag("rect", class_=f"heat heat{step}", x=x, y=y, width=cell, height=cell))
            if cell >= 26 and step:
                at = (x + cell / 2, y + cell / 2 + 4)
                text = _text(f"{100 * share:.0f}", *at, anchor="middle", class_=f"on{step}")
                parts.append(text)
    width = max(WIDTH, left + cell * size + 2)
    svg = _svg(title, description, top + cell * size + 4, parts, width=width)
    rows = tuple(
        (name, *(f"{count:g}" for count in line)) for name, line in zip(names, counts, strict=True)
    )
    table = Table(title, ("true class, then counts by predicted class", *names), rows)
    return Chart(title, description, svg, table)


def _brief(name: str, room: float) -> str:
    letters = max(1, int(room / 7.5))
    return name if len(name) <= letters else f"{name[: max(1, letters - 1)]}…"


def _grid(x: Axis, y: Axis) -> list[Markup]:
    parts = []
    for value, text in y.ticks:
        at = _y(y, value)
        parts.append(_tag("line", class_="grid", x1=LEFT, x2=RIGHT, y1=at, y2=at))
        parts.append(_text(text, LEFT - 7, at + 4, anchor="end", class_="tick"))
    for value, text in x.ticks:
        at = _x(x, value)
        parts.append(_tag("line", class_="axis", x1=at, x2=at, y1=BOTTOM, y2=BOTTOM + 4))
        anchor = "end" if at > RIGHT - 8 else "middle"
        parts.append(_text(text, at, BOTTOM + 18, anchor=anchor, class_="tick"))
    parts.append(_tag("line", class_="axis", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM))
    parts.append(_text(y.label, 2, 10, class_="tick"))
    middle = (LEFT + RIGHT) / 2
    parts.append(_text(x.label, middle, BOTTOM + 38, anchor="middle", class_="tick"))
    return parts


def _line(series: Series, x: Axis, y: Axis) -> Markup:
    places = [(_x(x, px), _y(y, py)) for px, py in series.points]
    style = series.style % STYLES
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    parts = [_tag("polyline", class_="line", points=path)]
    for (px, _), (_, value), error in zip(places, series.points, series.errors, strict=False):
        y1, y2 = _y(y, value - error), _y(y, value + error)
        parts.append(_tag("line", class_="error", x1=px, x2=px, y1=y1, y2=y2))
    if series.has_markers:
        parts += [_marker(style, px, py) for px, py in places]
    if series.shows_values:
        for (px, py), (_, value) in zip(places, series.points, strict=True):
            anchor = "end" if px > RIGHT - 12 else "start" if px < LEFT + 12 else "middle"
            parts.append(_text(f"{value:.3g}", px, py - 9, anchor=anchor, class_="number"))
    return _tag("g", *parts, class_=f"series style{style}")


def _marker(style: int, x: float, y: float) -> Markup:
    if style == 0:
        return _tag("circle", class_="marker", cx=x, cy=y, r=4.0)
    outline = (
        ((-4, -4), (4, -4), (4, 4), (-4, 4)),
        ((0, -5), (5, 4), (-5, 4)),
        ((0, -5.5), (5.5, 0), (0, 5.5), (-5.5, 0)),
    )[style - 1]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in outline)
    return _tag("polygon", class_="marker", points=points)


def _labels(series: Sequence[Series], x: Axis, y: Axis) -> list[Markup]:
    """Write names beside their lines, moved apart where they would lie on one another."""
    wanted = []
    for one in series:
        px, py = one.points[round(one.label_at * (len(one.points) - 1))]
        dx, dy = LABEL_OFFSETS[one.label_side]
        wanted.append((_y(y, py) + dy, _x(x, px) + dx, one))
    parts, lowest = [], -math.inf
    for py, px, one in sorted(wanted, key=lambda place: place[0]):
        lowest = max(py, lowest + 16, TOP)
        anchor = {"left": "end", "right": "start"}.get(one.label_side) or _anchor(px)
        parts.append(_text(one.name, px, lowest, anchor=anchor, class_="label"))
    return parts


def _anchor(x: float) -> str:
    """Keep a text at `x` within the drawing."""
    return "end" if x > WIDTH * 0.7 else "start" if x < WIDTH * 0.3 else "middle"


def _x(axis: Axis, value: float) -> float:
    return LEFT + (RIGHT - LEFT) * axis.place(value)


def _y(axis: Axis, value: float) -> float:
    return BOTTOM - (BOTTOM - TOP - 6) * axis.place(value)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(text: str, x: float, y: float, *, anchor: str = "start", class_: str = "text") -> Markup:
    return _tag("text", text, x=x, y=y, text_anchor=anchor, class_=class_)


def standalone(chart: Chart) -> str:
    """Return a line chart as an SVG file, which any page or Markdown can show."""
    style = Markup("<style>{}</style>").format(Markup(STANDALONE_STYLE))
    start = '<svg xmlns="http://www.w3.org/2000/svg" '
    return str(chart.svg).replace("<svg ", start, 1).replace("<title>", f"{style}<title>", 1) + "\n"


def _svg(
    title: str, description: str, height: float, parts: Sequence[Markup], *, width: float = WIDTH
) -> Markup:
    named = (_tag("title", title), _tag("desc", description))
    box = f"0 0 {width:.0f} {height:.0f}"
    return _tag(
        "svg", *named, *parts, role="img", class_="chart", viewBox=box, width=width, height=height
    )


def _tag(name: str, *children: str, **attributes: str | float) -> Markup:
    """Write an element; texts and attributes are escaped, elements are not."""
    written = Markup("").join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"),
            f"{value:.1f}" if isinstance(value, float) else value,
        )
        for key, value in attributes.items()
    )
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, inside)
