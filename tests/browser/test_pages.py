"""The report's pages in a real browser: offline, accessible, readable, and nothing in them runs."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from datetime import UTC, datetime

import browsing
import pytest
from axe_playwright_python.sync_playwright import Axe
from hostile import HOSTILE, SERVED, WRITTEN

from dflash_diag import report
from dflash_diag.history import row_of
from dflash_diag.watch.overview import FILE, Overview
from dflash_diag.watch.regression import Rule
from dflash_diag.watch.state import Seen

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(browsing.CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
PAGES = ["index", *report.NOTEBOOKS]
WIDE, NARROW = {"width": 1200, "height": 900}, {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def browser(hostile_site):
    """The browser; after the site, whose notebooks need this thread's event loop."""
    with browsing.chromium() as made:
        yield made


@contextmanager
def opened(browser, path, **context):
    """A page from the disk, and what it wants or runs beside itself: all of it is refused."""
    wanted = []
    with browser.new_context(viewport=WIDE, **context) as made:
        made.route("**/*", lambda r: r.continue_() if is_file(r.request.url) else r.abort())
        page = made.new_page()
        page.on("request", lambda request: wanted.append(request.url))
        page.on(
            "dialog", lambda dialog: (wanted.append(f"dialog {dialog.message}"), dialog.dismiss())
        )
        page.on("console", lambda message: wanted.append(f"console {message.text}"))
        page.on("pageerror", lambda error: wanted.append(f"error {error}"))
        page.goto(path.as_uri())
        assert wanted.pop(0) == path.as_uri()
        yield page, wanted


def is_file(url: str) -> bool:
    return url.startswith("file://")


@pytest.fixture(params=PAGES)
def path(request, hostile_site):
    return hostile_site / f"{request.param}.html"


# How much the pixels of a picture differ: 0 where it shows nothing.
CONTRAST = """async picture => {
    await picture.decode();
    const canvas = Object.assign(document.createElement('canvas'), {width: 200, height: 200});
    const on = canvas.getContext('2d');
    on.fillStyle = 'white';
    on.fillRect(0, 0, 200, 200);
    on.drawImage(picture, 0, 0, 200, 200);
    const {data} = on.getImageData(0, 0, 200, 200);
    return 255 - data.reduce((least, one) => Math.min(least, one), 255);
}"""
# Cells without anything that a person could see.
BLANK = """cells => cells.filter(cell => {
    const box = cell.getBoundingClientRect();
    return box.height < 8 || !(cell.innerText.trim() || cell.querySelector('img'));
}).map(cell => cell.outerHTML.slice(0, 300))"""


def test_a_page_wants_nothing_and_shows_everything(browser, path):
    with opened(browser, path, offline=True) as (page, wanted):
        open_all(page)
        pictures = page.locator("img").all()
        for picture in pictures:
            assert len(picture.get_attribute("alt")) > 40
            assert picture.evaluate(CONTRAST) > 100
            box = picture.bounding_box()
            assert min(box["width"], box["height"]) > 50
        assert page.locator(".jp-Cell, section.dflash-diag").evaluate_all(BLANK) == []
        assert page.locator("main").inner_text().count(" ") > 50
        assert wanted == []


def open_all(page) -> None:
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")


# Rows of a table are alike; axe takes time for each.
SHORTEN = """document.querySelectorAll('tbody').forEach(
    body => [...body.rows].slice(3).forEach(row => row.remove()))"""


@pytest.mark.parametrize(
    ("scheme", "size"), [("light", WIDE), ("dark", NARROW)], ids=["light-wide", "dark-narrow"]
)
def test_axe_finds_no_violation(browser, path, scheme, size):
    with opened(browser, path, color_scheme=scheme) as (page, _):
        page.set_viewport_size(size)
        open_all(page)
        page.evaluate(SHORTEN)
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def test_a_narrow_page_does_not_scroll_sideways(browser, path):
    with opened(browser, path) as (page, _):
        page.set_viewport_size(NARROW)
        open_all(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_the_keyboard_reaches_what_is_folded_and_opens_it(browser, path):
    with opened(browser, path) as (page, _):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('href')") == "#main"
        folded = page.locator("details:not([open])").count()
        assert folded >= 1
        while page.locator("details:not([open])").count() == folded:
            page.keyboard.press("Tab")
            focused = page.evaluate_handle("document.activeElement")
            assert focused.evaluate("one => one !== document.body"), "nothing folded was reached"
            if focused.evaluate("one => one.matches('details:not([open]) > summary')"):
                page.keyboard.press("Enter")
        assert focused.evaluate("one => one.parentElement.open")
        assert focused.evaluate("one => one.nextElementSibling.checkVisibility()")


def test_print_shows_what_is_folded_and_no_navigation(browser, path):
    with opened(browser, path) as (page, _):
        page.emulate_media(media="print")
        page.set_viewport_size({"width": 690, "height": 1000})  # A4 less its margins
        assert not page.locator("nav").is_visible()
        for folded in page.locator("details:not([open]) > summary + *").all():
            assert folded.bounding_box()["height"] > 0
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_copied_folder_works(browser, hostile_site, tmp_path):
    kept = ["captures", "scores", "results"]
    copy = shutil.copytree(hostile_site, tmp_path / "else where", ignore=lambda *_: kept)
    with opened(browser, copy / "index.html") as (page, wanted):
        links = page.locator("nav a, footer a, .steps a").evaluate_all(
            "all => all.map(a => a.href)"
        )
        for link in links:
            assert link.startswith(copy.as_uri()), link
        for name in report.NOTEBOOKS:
            page.locator(f'nav a[href="{name}.html"]').click()
            page.wait_for_url(f"**/{name}.html")
            assert page.locator("h1").is_visible()
        visited = [f"{copy.as_uri()}/{name}.html" for name in report.NOTEBOOKS]
        assert [one.partition("#")[0] for one in wanted] == visited


def test_names_and_texts_that_would_like_to_be_markup_are_shown_as_they_are(browser, hostile_site):
    shown = ""
    for name in PAGES:
        with opened(browser, hostile_site / f"{name}.html") as (page, wanted):
            open_all(page)
            shown += page.locator("body").inner_text()
            assert page.locator(MARKUP).count() == 0
            assert wanted == []
    names = (HOSTILE, "</pre><script>alert(2)</script>", 'a<b>&c" onload="alert(4)')
    for text in (*names, *SERVED.values(), WRITTEN):
        assert text in shown


MARKUP = "[onerror], [onload], [onclick], script, b:has-text('&c')"
"""What those names and texts would become."""


def test_what_a_server_said_is_text_on_the_page_over_all_checkpoints(
    browser, hostile_site, tmp_path
):
    said = f"http://127.0.0.1:1 is not ready (status 503: {SERVED['model']} {HOSTILE})"
    seen = [Seen(SERVED["version"], "s", NOON, "failed", error=said)]
    seen.append(Seen(SERVED["precision"], "s", NOON, "waiting"))
    row = row_of(hostile_site, beside=tmp_path, written=NOON)
    facts = {"server_model": SERVED["model"]}
    Overview(SERVED["version"], tmp_path, [row], seen, Rule(draws=400), facts).write()
    with opened(browser, tmp_path / FILE) as (page, wanted):
        shown = page.locator("body").inner_text()
        assert page.locator(MARKUP).count() == 0
        assert wanted == []
    for text in (said, row.name, *SERVED.values()):
        assert text in shown


NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
