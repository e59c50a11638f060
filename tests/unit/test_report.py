"""The report page: what it holds, what it leaves out, what it refuses."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reports import CLASSES, make_run, measure
from understudy.errors import InvalidData, InvalidSettings, VerificationFailed
from understudy.report import write_report
from understudy.report.page import TEMPLATES
from understudy.runs import RunDirectory

MARK = "zq-private-marker"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with a measured run `a` and a bare run `b`."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, "a")
    make_run(folder, "b", epsilon=2)
    measure(folder / "a")
    return folder


@pytest.fixture
def run(made, tmp_path):
    """Return a copy of the measured run, to be spoilt."""
    shutil.copytree(made / "a", tmp_path / "a")
    return tmp_path / "a"


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*runs: Path, **options) -> str:
    out = runs[0].parent / "page.html"
    return write_report(runs, out=out, **options).read_text()


def plant(private: Path) -> None:
    """Put the marker into every private file, in keys and values, and add files."""
    measure(private.parent, mark=MARK)
    settings = json.loads((private / "run.json").read_text())

    def marked(value):
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()} | {MARK: MARK}
        return [MARK] if isinstance(value, list) else f"{value}{MARK}"

    (private / "run.json").write_text(json.dumps(marked(settings)))
    (private / "cost.json").write_text(json.dumps([{"device": MARK, "seconds": 5, MARK: MARK}]))
    for name in ("checkpoint.bin", "log.txt", "timings.json"):
        (private / name).write_text(MARK)


def test_a_shareable_page_holds_nothing_private(run):
    plant(run / "private")
    for file in (run / "private").glob("*.*"):
        assert MARK in file.read_text() or file.name in ("metrics.lock", "ledger.json")
    assert MARK in page_of(run)
    assert MARK not in page_of(run, shareable=True)
    assert "private data. Do not share" not in page_of(run, shareable=True)


def test_a_shareable_page_is_the_page_of_the_release_alone(made, tmp_path):
    shutil.copytree(made / "a" / "release", tmp_path / "elsewhere")
    alone = page_of(tmp_path / "elsewhere")
    assert alone == page_of(made / "a", shareable=True) == page_of(made / "a" / "release")
    assert "Shareable report" in alone


def test_the_page_shows_every_part(made):
    page = page_of(made / "a", ledger=True)
    for part in (
        "What was released", "stated as they are, without noise", "The guarantee",
        "What an attacker could gain at most",
        "How it was made", "The certificate", "understudy verify", "ledger knows the certificate",
        "Below this line: computed on private data. Do not share.", "Accuracy by network",
        "Accuracy as the budget is spent", "Accuracy by class", "Confusion", "Image quality",
        "Memorisation", "Cost", "Other measurements", "something new", "70.0 ± 2.0 %", "123.4",
        "2 more", "12.5 s",
    ):  # fmt: skip
        assert part in page, part
    shared, _, private = page.partition('<p class="line">')
    for measured in ("± 2.0 %", "123.4", "convnet"):
        assert measured in private
        assert measured not in shared
    assert len(re.findall(r'class="tile"', shared)) == 10 * len(CLASSES)
    unauthenticated = page_of(made / "a")
    assert "ledger knows the certificate" not in unauthenticated


def test_a_run_without_measurements_says_so(made):
    assert "Nothing was measured yet" in page_of(made / "b")


def test_several_runs_are_compared_first(made):
    page = page_of(made / "a", made / "b")
    assert page.index("side by side") < page.index('id="comparison"') < page.index('id="run-a"')
    assert "A: convnet" in page
    assert page.count("one row per class</figcaption>") == 2
    assert re.search(r'<th scope="row">B</th><td>b</td><td>psg</td>.*not measured', page)
    shareable = page_of(made / "a", made / "b", shareable=True)
    assert "best accuracy" not in shareable
    assert 'id="run-b"' in shareable


@pytest.mark.parametrize("runs", [("a",), ("a", "b")])
def test_the_page_is_well_formed_escaped_and_accessible(made, runs):
    text = page_of(*(made / name for name in runs))
    page = Page(text)
    assert "<b>cat</b>" not in text
    assert "alert(1)</script>" not in text
    assert any(CLASSES[0] in piece for piece in page.text)
    assert len(page.all("script")) == len(page.all("style")) == 1
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h\d", tag)]
    assert levels.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert {a["href"] for a in page.all("a")} <= {f"#{one}" for one in ids}
    assert all("alt" in image for image in page.all("img"))
    assert page.all("html") == [{"lang": "en"}]
    assert len(page.all("svg")) - 1 == text.count("<desc>") == text.count("<svg ") - 1
    assert len(page.all("details")) >= text.count("<desc>")


def test_the_page_can_load_nothing(made):
    text = page_of(made / "a")
    page = Page(text)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv"))
    assert policy.startswith("default-src 'none'; img-src data:; ")
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL).group(1)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    for tag, attributes in page.tags:
        assert "style" not in attributes, tag
        assert not any(name.startswith("on") for name in attributes), tag
        assert (attributes.get("src") or "data:").startswith("data:"), tag
        assert (attributes.get("href") or "#").startswith("#"), tag
    assert not re.search(r"https?://|url\((?!#)|@import", text)


def edit_certificate(run: Path, **changes) -> None:
    file = run / "release" / "certificate.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))


def edit_metrics(run: Path, **changes) -> None:
    file = run / "private" / "metrics.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def unfinish(run: Path) -> None:
    shutil.rmtree(run / "release")
    run.rename(f"{run}.partial")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda run: edit_certificate(run, format=2), VerificationFailed, "format 2.*newer"),
        (lambda run: edit_certificate(run, extra_attempts=7), VerificationFailed, "was edited"),
        (lambda run: edit_metrics(run, format=2), InvalidData, "another version"),
        (lambda run: edit_metrics(run, utility=[{"model": "x"}]), InvalidData, "lacks or garbles"),
        (lambda run: edit_metrics(run, utility="x"), InvalidData, "lacks or garbles"),
        (lambda run: (run / "private" / "metrics.json").write_text("{"), InvalidData, "not JSON"),
        (lambda run: (run / "release" / "README.md").write_text("x"), VerificationFailed, "README"),
        (lambda run: (run / "release" / "certificate.json").unlink(), InvalidData, "is not a run"),
        (shutil.rmtree, InvalidData, "there is no directory"),
        (unfinish, InvalidData, "unfinished run.*--resume"),
    ],
)  # fmt: skip
def test_what_cannot_be_reported_on_is_refused_in_one_line(run, spoil, error, message):
    spoil(run)
    with pytest.raises(error, match=message) as caught:
        write_report([run], out=run.parent / "page.html")
    assert "\n" not in str(caught.value)
    assert not (run.parent / "page.html").exists()


def test_places_that_would_break_a_release_are_refused(run):
    with pytest.raises(InvalidSettings, match="lies in a released directory"):
        write_report([run], out=run / "release" / "page.html")
    with pytest.raises(InvalidSettings, match="is a directory"):
        write_report([run], out=run.parent)
    with pytest.raises(InvalidSettings, match="no run was named"):
        write_report([])


def test_default_places_and_modes(run):
    full = write_report([run])
    assert full == run / "private" / "report.html"
    assert full.stat().st_mode & 0o077 == 0
    shared = write_report([run], shareable=True)
    assert shared == run.parent / "a-report.html"
    assert shared.stat().st_mode & 0o044
    assert write_report([run / "release"]) == shared
    both = write_report([run, run / "release"])
    assert both == run.parent / "report.html"
    assert both.stat().st_mode & 0o077 == 0
    apart = write_report([run, run / "release"], shareable=True)
    assert apart == run.parent / "report-shareable.html"
    assert apart.stat().st_mode & 0o044


def test_a_page_never_says_that_something_may_be_shared(run):
    page = page_of(run, shareable=True)
    assert "is for the custodian to decide" in page
    assert "may be shared" not in page
    assert "Blind guessing finds 1&nbsp;% at 1&nbsp;% false alarms." in page


def test_the_card_and_the_page_state_the_same_factor(run):
    (said,) = re.findall(r"e\^epsilon = ([^;]+);", (run / "release" / "README.md").read_text())
    assert f"e<sup>ε</sup> = {said};" in page_of(run, shareable=True)


def test_a_set_without_guarantee_is_never_called_shareable(tmp_path):
    made = make_run(tmp_path, epsilon=float("inf"), data="secret")
    with pytest.raises(InvalidSettings, match="no guarantee"):
        page_of(made.directory, shareable=True)
    shutil.copytree(made.directory / "release", tmp_path / "alone")
    for path in (made.directory, tmp_path / "alone"):
        page = page_of(path)
        assert "Nothing here may be shared" in page
        assert "Full report" in page
        assert "may be shared:" not in page
        assert (tmp_path / "page.html").stat().st_mode & 0o077 == 0
    compared = page_of(made.directory, made.directory)
    assert "without any guarantee" in compared


def luminance(colour: str) -> float:
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_have_contrast_in_both_themes():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    blocks = re.findall(r":root[^{]*\{([^}]*)\}", (TEMPLATES / "style.css").read_text())
    themes = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks]
    light, *dark = [theme for theme in themes if theme]
    assert len(dark) == 2
    assert dark[0] == dark[1]  # by preference and by button
    for theme in (light, dark[0]):
        pairs = [(i, g) for i in ("ink", "quiet", "accent", "warn") for g in ("paper", "raised")]
        pairs += [("warn", "warn-ground"), ("ink", "warn-ground")]
        pairs += [(f"series{k}", "paper") for k in range(4)]
        pairs += [("on-light", f"heat{k}") for k in (1, 2, 3)]
        pairs += [("on-dark", f"heat{k}") for k in (4, 5)]
        for ink, ground in pairs:
            assert contrast(theme[ink], theme[ground]) >= 4.5, (ink, ground)


def test_metrics_are_read_only_when_they_are_shown(run, monkeypatch):
    def read(*_):
        raise AssertionError("private metrics were read")

    monkeypatch.setattr(RunDirectory, "metrics", read)
    monkeypatch.setattr(RunDirectory, "settings", read)
    page_of(run, shareable=True)
    with pytest.raises(AssertionError, match="were read"):
        page_of(run)
