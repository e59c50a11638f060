"""Bounds on attacks, charts and the list of runs."""

from __future__ import annotations

import itertools
import math
import shutil
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from reports import make_run, measure
from understudy.charts import (
    Bar,
    Series,
    bar_chart,
    decades,
    heat_map,
    line_chart,
    linear,
    shares,
)
from understudy.cli.main import main
from understudy.errors import InvalidData
from understudy.privacy.certificate import Certificate, implied_curve
from understudy.privacy.plan import Plan, PlannedRelease
from understudy.privacy.trade_off import FURTHER_DELTAS, attack_curve, most_true_positives
from understudy.report.listing import list_runs


def gaussian_certificate(
    multiplier: float, accountant: str = "pld", *, count: int = 1, rate: float = 1.0
) -> Certificate:
    released = PlannedRelease(
        name="sums", kind="class_sums", count=count, dimension=10, sampling_rate=rate
    )
    plan = Plan((released,))
    line = plan.to_json()[0] | {"made": count, "bounds": [1.0], "noise_multiplier": multiplier}
    guarantee = {"accountant": accountant, "delta_split": {"sampler_tail": 1e-11}}
    return Certificate({"guarantee": guarantee, "releases": [line]})


@pytest.mark.parametrize("multiplier", [0.5, 1.0, 4.0])
def test_the_bound_on_attacks_is_that_of_the_gaussian_mechanism(multiplier):
    """The best attack on one Gaussian release is known exactly: bounded, and nearly reached."""
    curve = implied_curve(gaussian_certificate(multiplier), FURTHER_DELTAS)
    assert len(curve) == len(FURTHER_DELTAS)
    for rate, most in attack_curve(curve):
        exact = norm.cdf(norm.ppf(rate) + 1 / multiplier)
        assert exact - 1e-9 <= most <= exact + 0.03, rate


def test_the_bound_on_attacks_holds_for_the_renyi_accountant():
    curve = implied_curve(gaussian_certificate(1.0, "renyi"), FURTHER_DELTAS)
    for rate, most in attack_curve(curve):
        assert most >= norm.cdf(norm.ppf(rate) + 1) - 1e-9, rate
    assert most_true_positives(0.001, curve) < 0.5


def test_the_curve_of_a_small_budget_is_that_of_the_gaussian_it_is_close_to():
    """By the central limit these samples are one Gaussian; no loss vanishes between two steps."""
    rate, count, shift = 0.01, 10_000, 0.03
    multiplier = rate * math.sqrt(count) / shift
    sampled = implied_curve(
        gaussian_certificate(multiplier, count=count, rate=rate), FURTHER_DELTAS
    )
    exact = implied_curve(gaussian_certificate(1 / shift), FURTHER_DELTAS)
    assert sampled[0][0] == pytest.approx(exact[0][0], rel=0.03)
    for false, most in attack_curve(sampled):
        assert most == pytest.approx(most_true_positives(false, exact), abs=1e-3), false


def test_one_guarantee_is_reached_by_randomised_response():
    epsilon = math.log(3)  # tells the truth three times of four
    for rate, reached in ((0.0, 0.0), (0.25, 0.75), (1.0, 1.0)):
        assert most_true_positives(rate, [(epsilon, 0.0)]) == pytest.approx(reached)


@given(
    rate=st.floats(0, 1),
    curve=st.lists(st.tuples(st.floats(0, 2000), st.floats(0, 1)), max_size=5),
)
def test_bounds_are_shares_no_better_than_guessing_and_fall_with_more_guarantees(rate, curve):
    most = most_true_positives(rate, curve)
    assert rate <= most <= 1
    assert most <= most_true_positives(rate, curve[1:])


@pytest.mark.parametrize(("low", "high"), [(0, 13.2), (0, 0.004), (0, 1), (0, 0), (3, 1e6)])
def test_axes_take_in_their_range_with_a_few_ticks(low, high):
    axis = linear("x", low, high)
    assert axis.low <= low
    assert axis.high >= high
    assert 2 <= len(axis.ticks) <= 7
    assert axis.place(axis.low) == 0
    assert axis.place(axis.high) == 1


def test_logarithmic_axes_have_a_tick_for_each_power():
    axis = decades("delta", 1e-8, 1e-4)
    assert [text for _, text in axis.ticks] == ["10⁻⁸", "10⁻⁷", "10⁻⁶", "10⁻⁵", "10⁻⁴"]
    assert axis.place(1e-6) == pytest.approx(0.5)
    assert len(decades("delta", 1e-5, 1e-5).ticks) == 2


def drawn(chart) -> ET.Element:
    return ET.fromstring(str(chart.svg))


def test_charts_are_xml_with_title_description_and_table():
    hostile = '<i>"&'
    charts = [
        line_chart(
            hostile, "text", [Series(hostile, [(0, 0), (1, 0.5)], errors=[0.1, 0.1])],
            x=linear("x", 0, 1), y=shares("y"),
        ),
        bar_chart(hostile, "text", [Bar(hostile, 0.5, 0.1), Bar("b", 1.0, is_hatched=True)]),
        heat_map(hostile, "text", [hostile, "b"], [[3, 1], [0, 0]]),
    ]  # fmt: skip
    for chart in charts:
        svg = drawn(chart)
        assert svg.find("title").text == hostile
        assert svg.find("desc").text == "text"
        assert chart.table.rows
        assert all(len(row) == len(chart.table.columns) for row in chart.table.rows)


def test_bars_are_as_long_as_their_shares_and_say_them():
    svg = drawn(bar_chart("t", "d", [Bar("a", 0.25), Bar("b", 0.5, 0.1, is_hatched=True)]))
    quarter, half = (float(bar.get("width")) for bar in svg.iter("rect"))
    assert half == pytest.approx(2 * quarter)
    assert [bar.get("class") for bar in svg.iter("rect")] == ["bar", "bar hatched"]
    texts = [text.text for text in svg.iter("text")]
    assert {"25.0 %", "50.0 ± 10.0 %"} <= set(texts)


def test_lines_differ_in_marker_and_name():
    axes = {"x": linear("x", 0, 1), "y": shares("y")}
    series = [Series(name, [(0, 0.5), (1, 0.5)], style=k) for k, name in enumerate("ABCD")]
    svg = drawn(line_chart("t", "d", series, **axes))
    groups = list(svg.iter("g"))
    assert [group.get("class") for group in groups] == [f"series style{k}" for k in range(4)]
    markers = [group.findall("*")[-1] for group in groups]
    shapes = [(m.tag, len((m.get("points") or "").split())) for m in markers]
    assert shapes == [("circle", 0), ("polygon", 4), ("polygon", 3), ("polygon", 4)]
    labels = [text for text in svg.iter("text") if text.get("class") == "label"]
    heights = sorted(float(label.get("y")) for label in labels)
    assert {label.text for label in labels} == set("ABCD")
    assert all(b - a >= 15 for a, b in itertools.pairwise(heights))


def test_a_heat_map_shows_shares_of_each_true_class():
    svg = drawn(heat_map("t", "d", ["a", "b"], [[3, 1], [0, 8]]))
    numbers = [t.text for t in svg.iter("text") if (t.get("class") or "").startswith("on")]
    assert numbers == ["75", "25", "100"]
    wide = drawn(heat_map("t", "d", [str(k) for k in range(40)], [[1] * 40] * 40))
    assert float(wide.get("width")) > 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, "first")
    measure(folder / "first", mean=0.7)
    for name in ("second", "third.partial", "broken", "newer"):
        shutil.copytree(folder / "first", folder / name)
    shutil.rmtree(folder / "second" / "private")
    shutil.rmtree(folder / "third.partial" / "release")
    (folder / "broken" / "release" / "certificate.json").write_text("{}")
    (folder / "newer" / "private" / "metrics.json").write_text('{"format": 9}')
    (folder / "no run").mkdir()
    return folder


def test_runs_are_listed_whatever_their_state(folder):
    lines = {line.name: line for line in list_runs(folder)}
    assert set(lines) == {"first", "second", "third", "broken", "newer"}
    first = lines["first"]
    assert (first.state, first.method, first.epsilon, first.images) == (
        "finished", "psg", "10", "36",
    )  # fmt: skip
    assert first.data == 'pets "<i>"'
    assert first.accuracy == "70.0 % (convnet)"
    assert lines["second"].accuracy == "–"
    assert (lines["third"].state, lines["third"].epsilon) == ("unfinished", "10")
    assert lines["broken"].state.startswith("cannot be read")
    assert "another version" in lines["newer"].state
    with pytest.raises(InvalidData, match="there is no directory"):
        list_runs(folder / "nowhere")


def call(*arguments, capsys) -> str:
    main([str(argument) for argument in arguments] + ["--json"])
    return capsys.readouterr().out


def test_commands(folder, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        call("runs", folder, capsys=capsys)
    assert not stop.value.code
    assert '"name": "third"' in capsys.readouterr().out
    with pytest.raises(SystemExit):
        call("report", folder / "first", "--shareable", "--out", tmp_path / "x", capsys=capsys)
    assert '"shareable": true' in capsys.readouterr().out
    assert (tmp_path / "x").read_text().startswith("<!doctype html>")
    with pytest.raises(SystemExit) as stop:
        call("report", folder / "no run", capsys=capsys)
    assert stop.value.code == 2
