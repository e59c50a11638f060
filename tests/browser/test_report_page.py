"""The report page in a browser: Debian's Chromium, driven by Playwright.

Screenshots go to `tests/browser/screenshots/`, which git ignores.
"""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

import pytest

from reports import make_run, measure
from understudy.report import write_report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SCREENSHOTS = Path(__file__).parent / "screenshots"
SIZES = {"desktop": {"width": 1280, "height": 900}, "phone": {"width": 390, "height": 844}}

pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="NO CHROMIUM: the report page was NOT tested in a browser; install it, for instance "
    "with `apt-get install chromium`, and run the tests again",
)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Return reports of one run, of two, and one to be shared."""
    folder = tmp_path_factory.mktemp("runs")
    shape = {"classes": ("cat", "dog", "owl"), "data": "pets", "images_per_class": 5}
    for name, epsilon, mean in (("a", 10, 0.7), ("b", 1, 0.4)):
        make_run(folder, name, epsilon=epsilon, **shape)
        measure(folder / name, mean=mean)
    one, two = folder / "a", folder / "b"
    return {
        "one": write_report([one], out=folder / "one.html"),
        "two": write_report([one, two], out=folder / "two.html"),
        "shareable": write_report([one], out=folder / "shareable.html", shareable=True),
    }


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser, pages):
    """Open a report; afterwards nothing may have failed or been asked of a network."""
    complaints: list[str] = []
    opened = []

    def note(request) -> None:
        if not request.url.startswith(("file:", "data:")):
            complaints.append(request.url)

    def open_page(name: str, size: str = "desktop", theme: str = "light"):
        context = browser.new_context(
            viewport=SIZES[size], color_scheme=theme, reduced_motion="reduce"
        )
        context.on("request", note)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(pages[name].as_uri())
        opened.append(context)
        return page

    open_page.complaints = complaints
    yield open_page
    for context in opened:
        context.close()
    assert complaints == []


@pytest.mark.parametrize(
    ("name", "size", "theme"),
    [
        ("one", "desktop", "light"),
        ("one", "phone", "dark"),
        ("two", "desktop", "dark"),
        ("two", "phone", "light"),
        ("shareable", "phone", "light"),
    ],
)
def test_nothing_scrolls_sideways(visit, name, size, theme):
    page = visit(name, size, theme)
    page.screenshot(path=_screenshot(f"{name}-{size}-{theme}"), full_page=True)
    width = "document.documentElement.scrollWidth"
    assert page.evaluate(width) == SIZES[size]["width"]
    _open_all(page)
    assert page.evaluate(width) == SIZES[size]["width"]


@pytest.mark.parametrize(
    ("name", "size", "theme"), [("two", "desktop", "light"), ("one", "phone", "dark")]
)
def test_axe_finds_nothing_serious(visit, name, size, theme):
    page = visit(name, size, theme)
    _open_all(page)
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert found["testEngine"]["name"] == "axe-core"
    assert len(found["passes"]) > 10
    grave = [
        (one["id"], [node["html"][:200] for node in one["nodes"]])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ]
    assert grave == []


def test_a_sample_is_enlarged_by_mouse_and_keyboard(visit):
    page = visit("one")
    dialog, picture = page.locator("#zoom"), page.locator("#zoom-image")
    tiles = page.locator(".tile")
    assert not dialog.is_visible()
    tiles.nth(3).click()
    assert dialog.is_visible()
    assert picture.get_attribute("src") == tiles.nth(3).locator("img").get_attribute("src")
    assert picture.bounding_box()["width"] > 5 * tiles.nth(3).bounding_box()["width"]
    page.keyboard.press("ArrowRight")
    assert page.locator("#zoom-text").inner_text() == "Synthetic image 5 of class cat"
    page.screenshot(path=_screenshot("zoom"))
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert picture.get_attribute("alt") == "Synthetic image 3 of class cat"
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert tiles.nth(2).evaluate("(tile) => tile === document.activeElement")
    page.keyboard.press("Enter")
    assert dialog.is_visible()
    page.locator("#zoom-close").click()
    assert not dialog.is_visible()


def test_the_theme_is_switched_and_remembered(visit):
    page = visit("one")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    button = page.locator("#theme")
    assert button.inner_text() == "Dark theme"
    button.click()
    dark = page.evaluate(ground)
    assert dark != light
    page.reload()
    assert page.evaluate(ground) == dark
    assert button.inner_text() == "Light theme"
    button.click()
    assert page.evaluate(ground) == light
    assert visit("one", theme="dark").evaluate(ground) == dark


def test_the_page_works_where_storage_is_denied(visit):
    page = visit("one")
    denied = "Object.defineProperty(window, 'localStorage', {get() { throw new Error('denied'); }})"
    page.add_init_script(denied)
    page.reload()
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_two_runs_are_compared(visit):
    page = visit("two")
    first = page.locator("main section").first
    assert first.locator("h2").inner_text() == "Comparison"
    assert first.locator("table").first.locator("tbody tr").count() == 2
    sheets = first.locator(".overviews img")
    assert sheets.count() == 2
    left, right = sheets.nth(0).bounding_box(), sheets.nth(1).bounding_box()
    assert left["y"] == right["y"]
    assert right["x"] > left["x"] + left["width"]
    page.locator("nav a", has_text="B: pets").click()
    page.wait_for_url("**#run-b")
    assert -1 <= page.locator("#run-b").bounding_box()["y"] < SIZES["desktop"]["height"] / 2


def test_everything_can_be_reached_and_seen_by_keyboard(visit):
    page = visit("one")
    page.keyboard.press("Tab")
    assert page.locator(":focus").inner_text() == "Skip to the content"
    assert page.locator(":focus").bounding_box()["x"] >= 0
    page.keyboard.press("Tab")
    assert page.locator(":focus").get_attribute("id") == "theme"
    outline = page.locator(":focus").evaluate("(one) => getComputedStyle(one).outlineStyle")
    assert outline == "solid"


def test_the_policy_stops_what_the_page_does_not_hold(visit):
    """The guard of the other tests works: a foreign script and picture are refused, loudly."""
    page = visit("shareable")
    page.evaluate(
        """() => {
          const script = document.createElement("script");
          script.textContent = "window.intruder = true";
          document.head.append(script);
          const image = document.createElement("img");
          image.src = "https://example.invalid/x.png";
          document.body.append(image);
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.intruder") is None
    assert any("script-src" in complaint for complaint in visit.complaints)
    assert any("img-src" in complaint for complaint in visit.complaints)
    visit.complaints.clear()


def _open_all(page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


def _screenshot(name: str) -> Path:
    SCREENSHOTS.mkdir(exist_ok=True)
    return SCREENSHOTS / f"{name}.png"
