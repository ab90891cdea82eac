"""The production path: papermill over the notebooks, export, and what the site must hold."""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest
import typer
from bs4 import BeautifulSoup

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world
from hostile import HOSTILE

from dflash_diag import diagnostics, front_page, next_steps, paths, report, storage, views
from dflash_diag.cli import app
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput
from dflash_diag.results import MIME_TYPE
from dflash_diag.runs import Run


@pytest.fixture(scope="module")
def config(hostile_config) -> RunConfig:
    return hostile_config


@pytest.fixture(scope="module")
def site(hostile_site) -> Path:
    return hostile_site


PAGES = ["index", *report.NOTEBOOKS]


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.ids: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids |= {value for name, value in attrs if name == "id"}

    def all(self, tag: str) -> list[dict]:
        return [attrs for name, attrs in self.tags if name == tag]

    def names(self) -> list[str]:
        return [name for name, _ in self.tags]


@pytest.fixture(params=PAGES)
def page(request, site) -> Tags:
    return Tags((site / f"{request.param}.html").read_text())


def test_a_page_needs_no_network_and_runs_no_script(site):
    for name in PAGES:
        html = (site / f"{name}.html").read_text()
        views.check_offline(html, name)
        views.check_size(html, name)
        assert "<script" not in html
        assert "default-src 'none'" in html


def test_a_page_is_accessible(page):
    names = page.names()
    assert names.count("main") == names.count("h1") == names.count("title") == 1
    assert {"header", "nav", "footer"} <= set(names)
    assert page.all("html")[0]["lang"] == "en"
    assert [link for link in page.all("a") if link.get("href") == "#main"]
    for image in page.all("img"):
        assert len(image["alt"]) > 40
    for tag, level in (("h2", 1), ("h3", 2)):
        if tag in names:
            assert f"h{level}" in names[: names.index(tag)]


def test_every_figure_on_a_notebooks_page_is_followed_by_its_table(site):
    for name in report.NOTEBOOKS:
        names = [
            one
            for one in Tags((site / f"{name}.html").read_text()).names()
            if one in ("figure", "table")
        ]
        # A page whose question was not asked has nothing to draw.
        assert "figure" in names or "SKIPPED" in (site / f"{name}.html").read_text()
        for at, this in enumerate(names):
            assert this != "figure" or names[at + 1] == "table"


def test_links_lead_somewhere(site):
    pages = {f"{name}.html": Tags((site / f"{name}.html").read_text()) for name in PAGES}
    for name, page in pages.items():
        for link in page.all("a"):
            target, _, anchor = link["href"].partition("#")
            assert not target.startswith(("/", "..")), link
            assert (site / (target or name)).is_file(), link
            assert not anchor or anchor in pages[target or name].ids, link


def test_untrusted_text_stays_text(site):
    for name in PAGES:
        html = (site / f"{name}.html").read_text()
        assert HOSTILE not in html
        assert "a<b>" not in html
        assert "<script>alert" not in html
    assert "&lt;img src=x" in (site / "02_acceptance.html").read_text()


def test_the_front_page_says_verdict_number_interval_and_reference(site):
    html = (site / "index.html").read_text()
    summary = json.loads((site / "summary.json").read_text())
    tau = summary["scores"]["drafter"]["tau"]["walked_micro"]
    for needle in (summary["verdict"], f"{tau['value']:.2f}", "interval", "reference gets"):
        assert needle in html
    assert html.count("<figure>") == len(front_page.KEY_FIGURES) == 6
    assert "hidden states against torch/bfloat16" in html


def test_the_front_page_leads_to_every_page_with_its_question_and_verdict(site, config):
    page = BeautifulSoup((site / "index.html").read_text(), "html.parser")
    rows = page.find("h2", string="Pages").find_next("tbody").find_all("tr")
    assert [row.a["href"] for row in rows] == [f"{name}.html" for name in report.NOTEBOOKS]
    run = Run.open(config)
    for name, row in zip(report.NOTEBOOKS, rows, strict=True):
        cells = json.loads((paths.notebooks_dir() / f"{name}.ipynb").read_text())["cells"]
        assert row.a.get_text() == "".join(cells[0]["source"]).splitlines()[0][2:]
        verdict = row.find(class_="verdict")["class"][1]
        own = [run.result(id_) for id_, d in diagnostics.catalogue().items() if d.page == name]
        assert verdict in {one.verdict.name for one in own}


def test_the_front_page_says_what_to_do_next(site, config):
    page = BeautifulSoup((site / "index.html").read_text(), "html.parser")
    shown = [(li.strong.get_text(), li.a["href"]) for li in page.select(".steps > li")]
    known = diagnostics.catalogue()
    steps = next_steps.next_steps(Run.open(config).results())
    assert steps
    assert shown == [(one.do, f"{known[one.check].page}.html#{one.check}") for one in steps]


def test_an_option_that_a_skipped_check_names_is_one_that_report_takes(site):
    known = {name for p in typer.main.get_command(app).commands["report"].params for name in p.opts}
    summary = json.loads((site / "summary.json").read_text())
    named = {
        option
        for one in summary["results"]
        if one["verdict"] == "SKIPPED"
        for option in next_steps.OPTION.findall(one["headline"])
    }
    assert len(named) > 3
    assert named <= known


def test_results_are_stored_once_and_shown_by_the_notebooks(site):
    ids = set(diagnostics.catalogue())
    assert {path.name for path in (site / "results").iterdir()} == ids
    shown = set()
    for name in report.NOTEBOOKS:
        notebook = nbformat.read(site / "notebooks" / f"{name}.ipynb", as_version=4)
        assert notebook.metadata.papermill.exception is None
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                data = output.get("data", {})
                if MIME_TYPE in data:
                    shown.add(data[MIME_TYPE]["id"])
                    stored = json.loads(
                        (site / "results" / data[MIME_TYPE]["id"] / "result.json").read_text()
                    )
                    assert stored["headline"] == data[MIME_TYPE]["headline"]
    assert shown == ids


def test_the_summary_and_the_junit_file_agree(site):
    summary = json.loads((site / "summary.json").read_text())
    assert summary["schema"] == report.SUMMARY_SCHEMA
    assert set(summary["scores"]) == {"drafter", "reference"}
    suite = ElementTree.parse(site / "junit.xml").getroot()
    assert [case.get("name") for case in suite] == [one["id"] for one in summary["results"]]
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == [one["id"] for one in summary["results"] if one["verdict"] == "FAIL"]
    assert suite.get("failures") == str(len(failed))


def test_a_second_run_reads_what_is_there_and_says_the_same(site, config):
    before = {
        path.relative_to(site): path.stat().st_mtime_ns
        for folder in ("captures", "scores", "lossless", "results")
        for path in (site / folder).rglob("*")
    }
    again = Run.open(config)
    again.compute()
    after = {path: (site / path).stat().st_mtime_ns for path in before}
    assert after == before
    summary = json.loads((site / "summary.json").read_text())
    new = storage.plain(report.summary(again, again.results()))
    for one in (summary, new):
        one["provenance"].pop("times")
        for score in one["scores"].values():
            score.pop("provenance")
    assert new == summary


def test_a_parameter_that_a_notebook_does_not_take_is_an_error(config, monkeypatch):
    run = Run.open(config)
    monkeypatch.setattr(report, "notebook_parameters", lambda *_: {"colour": "red"})
    with pytest.raises(BadInput, match="no parameter colour"):
        report.execute("00_overview", run)


def test_loading_stays_within_its_budget(site):
    for name in report.NOTEBOOKS:
        notebook = nbformat.read(site / "notebooks" / f"{name}.ipynb", as_version=4)
        assert (
            notebook.metadata.papermill.duration < notebook.metadata.dflash_diag.budget_s["loaded"]
        )


def test_the_browser_of_states_is_static_where_nobody_is_there(site):
    path = site / "notebooks" / "03_hidden_state_divergence.ipynb"
    notebook = nbformat.read(path, as_version=4)
    outputs = [o.data for c in notebook.cells for o in c.get("outputs", []) if "data" in o]
    assert not [data for data in outputs if report.WIDGET_VIEW in data]  # nobody could move it
    (view,) = [data for data in outputs if 'browser states"' in data.get("text/html", "")]
    page = BeautifulSoup((site / f"{path.stem}.html").read_text(), "html.parser")
    (shown,) = page.select(".states")
    assert BeautifulSoup(view["text/html"], "html.parser").pre.get_text() in shown.get_text()
    modules, layers = shown.find_all("table")
    assert len(modules.tbody.find_all("tr")) > 3
    assert len(layers.tbody.find_all("tr")) == 5  # the embedding and four layers
    assert shown.select(".rest")
    assert not page.find_all("script")


def test_the_browser_of_blocks_is_static_where_nobody_is_there(site):
    path = site / "notebooks" / "04_position_alignment.ipynb"
    notebook = nbformat.read(path, as_version=4)
    outputs = [o.data for c in notebook.cells for o in c.get("outputs", []) if "data" in o]
    assert not [data for data in outputs if report.WIDGET_VIEW in data]  # nobody could move it
    (view,) = [data for data in outputs if 'browser block"' in data.get("text/html", "")]
    page = BeautifulSoup((site / f"{path.stem}.html").read_text(), "html.parser")
    (shown,) = page.select(".browser.block")
    assert BeautifulSoup(view["text/html"], "html.parser").pre.get_text() == shown.pre.get_text()
    assert len(shown.tbody.find_all("tr")) == tiny_world.BLOCK


def test_the_explorer_is_static_where_nobody_is_there(site):
    path = site / "notebooks" / "09_explorer.ipynb"
    notebook = nbformat.read(path, as_version=4)
    outputs = [o.data for c in notebook.cells for o in c.get("outputs", []) if "data" in o]
    assert not [data for data in outputs if report.WIDGET_VIEW in data]  # nobody could move it
    (view,) = [data for data in outputs if 'browser explorer"' in data.get("text/html", "")]
    html = (site / f"{path.stem}.html").read_text()
    shown = BeautifulSoup(html, "html.parser").select(".browser.explorer")
    static = BeautifulSoup(view["text/html"], "html.parser").select(".browser.explorer")
    assert [one.get_text() for one in shown] == [one.get_text() for one in static]
    assert len(shown) >= 2  # which rounds there are, and one of them at least
    for one in shown[1:]:
        assert one.pre.get_text()
        assert len(one.svg.find_all("circle")) == 17
        assert len(one.find_all("table")) == 4  # proposals, each drafter's candidates, the walk
    assert len(html) < 1_000_000


def test_the_transcript_holds_every_token_once_and_every_round(site, config):
    run = Run.open(config)
    html = views.Transcript(run, n=2).static_html()
    assert html.count("<details") == 2
    assert html.count("<details open>") == 1
    rows = views.Transcript(run, n=2).rows
    for row, part in zip(rows, html.split("<details")[1:], strict=True):
        assert part.count('title="round ') == len(row["rounds"])
        index = run.capture.index(row["id"])
        expected = "".join(run.capture.positions(index)["text"])
        text = BeautifulSoup(f"<details{part}", "html.parser").pre.get_text()
        assert text == expected
