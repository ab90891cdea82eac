"""The export: nothing is fetched, nothing is blank, untrusted text stays text."""

from __future__ import annotations

from xml.etree import ElementTree

import nbformat
import pandas as pd
import pytest
from nbformat import v4

from dflash_diag import pages, report, views
from dflash_diag.errors import DiagError
from dflash_diag.results import Result, Verdict


@pytest.mark.parametrize(
    "html",
    [
        '<img src="https://cdn.example/x.png">',
        "<img src='//cdn.example/x.png'>",
        '<link rel="stylesheet" href="http://cdn.example/x.css">',
        '<img srcset="https://cdn.example/x.png 2x">',
        '<video poster="https://cdn.example/x.png">',
        "<script>alert(1)</script>",
        "<iframe></iframe>",
        "<style>@import 'x.css';</style>",
        "<style>p { background: url(https://cdn.example/x.png) }</style>",
        '<p style="background: url(//cdn.example/x.png)">',
        '<svg><use xlink:href="https://cdn.example/x.svg#a"></svg>',
        '<form action="https://example.org/">',
        '<img src="file:///etc/passwd">',
    ],
)
def test_what_a_page_would_fetch_is_found(html):
    with pytest.raises(DiagError, match="would not work offline"):
        views.check_offline(html, "page.html")


@pytest.mark.parametrize(
    "html",
    [
        '<img src="data:image/png;base64,AAAA">',
        '<a href="https://example.org/">a link is followed, not fetched</a>',
        '<a href="02_acceptance.html#acceptance.prompts">here</a>',
        "<style>p { color: red }</style><p>see https://example.org/x.png</p>",
        "<pre>&lt;script src=&quot;https://cdn.example/x.js&quot;&gt;</pre>",
    ],
)
def test_what_a_page_only_says_is_not_mistaken_for_that(html):
    views.check_offline(html, "page.html")


def test_a_page_that_is_too_large_is_refused_with_what_is_large_on_it():
    picture = f'<img src="data:image/svg+xml;base64,{"A" * 2_000_000}">'
    views.check_size(picture, "page.html")
    with pytest.raises(DiagError, match=r"page.html is 4.0 MB, 4.0 MB of it pictures"):
        views.check_size(picture * 2, "page.html")
    with pytest.raises(DiagError, match=r"3.2 MB, 2.0 MB of it pictures"):
        views.check_size(picture + "é" * 600_000, "page.html")


def notebook(**data) -> nbformat.NotebookNode:
    output = v4.new_output("display_data", data)
    return v4.new_notebook(cells=[v4.new_code_cell("x", outputs=[output])])


def test_a_widget_without_a_static_twin_is_refused():
    view = {report.WIDGET_VIEW: {"model_id": "1"}, "text/plain": "View()"}
    with pytest.raises(DiagError, match="static twin"):
        report.refuse_stubs(notebook(**view), "x.ipynb")
    for text in ("interactive(children=(IntSlider(value=1),))", "Output()", "HBox(children=())"):
        with pytest.raises(DiagError, match="static twin"):
            report.refuse_stubs(notebook(**{"text/plain": text}), "x.ipynb")
    report.refuse_stubs(notebook(**view, **{"text/html": "<p>7</p>"}), "x.ipynb")
    report.refuse_stubs(notebook(**{"text/plain": "interactive proofs"}), "x.ipynb")


def result(**changes) -> Result:
    given = {
        "id": "demo",
        "question": "How many?",
        "headline": "3 of 4.",
        "verdict": Verdict.PASS,
        "frame": pd.DataFrame({"id": [f"<p{i}>" for i in range(9)], "tau": [1.5] * 9}),
    }
    return Result(**given | changes)


def test_tables_scroll_fold_and_align():
    html = views.polish(result().html())
    assert (
        '<details><summary>Table: How many? (9 rows)</summary><div aria-label="How many?"' in html
    )
    assert 'class="scroll" role="group" tabindex="0"' in html
    assert '<td class="num">1.5</td>' in html
    assert '<th class="num" scope="col">tau</th>' in html
    assert "<td>&lt;p0&gt;</td>" in html
    short = views.polish(result(frame=pd.DataFrame({"tau": [1.5]})).html())
    assert "<details>" not in short


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_is_a_glyph_and_a_word(verdict):
    html = views.polish(result(verdict=verdict).html())
    assert f'<span class="verdict {verdict.name}">' in html
    assert verdict.glyph in html
    assert f"</span> {verdict.name}</span>" in html


def test_junit_has_a_case_a_question_and_survives_control_characters():
    found = [
        result(id="a"),
        result(id="b", verdict=Verdict.FAIL, headline="bad \x00\x1b & <b>"),
        result(id="c", verdict=Verdict.ERROR),
        result(id="d", verdict=Verdict.SKIPPED),
        result(id="e", verdict=Verdict.WARN),
    ]
    suite = ElementTree.fromstring(report.junit(found))
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "5", "failures": "1", "errors": "1", "skipped": "1"}
    kinds = [[child.tag for child in case] for case in suite]
    assert kinds == [
        ["system-out"],
        ["failure", "system-out"],
        ["error", "system-out"],
        ["skipped", "system-out"],
        ["system-out"],
    ]
    assert "&" in suite[1][0].get("message")


def test_facts_are_flattened_and_the_unknown_left_out():
    facts = {"a": {"b": 1, "c": None, "d": {}}, "e": [1, 2], "f": [], "g": ""}
    assert list(pages._flat(facts)) == [("a · b", "1"), ("e", "1, 2")]
