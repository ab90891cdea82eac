"""The page over all checkpoints: what it says first, its rows, links, and what it never does."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import pytest
from bs4 import BeautifulSoup

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from test_watch_parts import BASE, NOON, a_row

from dflash_diag import views
from dflash_diag.errors import OutputError
from dflash_diag.history import append, read_history
from dflash_diag.watch.overview import Overview
from dflash_diag.watch.regression import Rule
from dflash_diag.watch.state import Seen

RULE = Rule(draws=2000)


def step(number: int, shift: int, **more):
    """A checkpoint that gets ``shift`` tenths of a token more than `BASE` on every prompt."""
    given = {"hour": number, "step": number, "checkpoint": f"/train/step_{number}"} | more
    return a_row(f"step_{number}", [t + shift for t in BASE], **given)


def finish(out: Path, *rows, reference: bool = True) -> None:
    """Leave the report of each."""
    scored = {"per_prompt": [{"id": f"p{i}", "rounds": [3, 2]} for i in range(len(BASE))]}
    summary = {
        "drafters": {"reference": "theirs"},
        "scores": {"reference": scored} if reference else {},
    }
    for row in rows:
        folder = out / row.out
        folder.mkdir(parents=True)
        (folder / "index.html").write_text("report")
        (folder / "summary.json").write_text(json.dumps(summary))


def overview(out: Path, rows=(), seen=(), **more) -> Overview:
    given = {"where": "/train", "rule": RULE, "facts": {"target": "/t"}} | more
    return Overview(out=out, rows=rows, seen=seen, **given)


def page(made: Overview) -> BeautifulSoup:
    html = made.html()
    views.check_offline(html, "index.html")
    return BeautifulSoup(html, "html.parser")


def words(tag) -> str:
    return " ".join(tag.get_text(" ", strip=True).split())


def cells(soup) -> list[list[str]]:
    return [[words(cell) for cell in row.find_all(["th", "td"])] for row in soup.select("tbody tr")]


def test_the_newest_comes_first_and_links_resolve(tmp_path):
    rows = [step(1, 0), step(10, 3, verdict="FAIL", cause="mask.anchor_included"), step(2, 2)]
    finish(tmp_path, *rows)
    soup = page(overview(tmp_path, rows))
    assert words(soup.h1) == "step_10 is better than step_2"
    leads = [words(one) for one in soup.select(".lead")]
    assert leads[0].endswith("mask.anchor_included")
    assert leads[1].startswith(
        "+0.10 (95 % interval +0.10 to +0.10) tokens a round, paired over 30"
    )
    found = cells(soup)
    assert [one[0].split()[0] for one in found] == ["step_10", "step_2", "step_1"]
    assert found[0][1:] == [
        "✗ FAIL", "2.50 tokens a round", "+0.10 95 % +0.10 to +0.10", "Yes", "mask.anchor_included"
    ]  # fmt: skip
    assert found[2][3:] == ["–", "The first", "–"]  # noqa: RUF001
    links = [unquote(one["href"]) for one in soup.select("tbody a")]
    assert links == [f"runs/step_{i}-1/index.html" for i in (10, 2, 1)]
    assert all((tmp_path / one).read_text() == "report" for one in links)


@pytest.mark.parametrize(
    ("shift", "said", "answer"),
    [
        ([2] * 30, "step_2 is better than step_1", "Yes"),
        ([-2] * 30, "step_2 is worse than step_1", "No, step_1 is better"),
        ([0] * 30, "step_2 does the same as step_1", "No, they do the same"),
        (
            [1, -1, 0] * 10,
            "step_2 is no real gain over step_1",
            "No, a gain that matters is excluded",
        ),
    ],
)
def test_the_answer_is_that_of_the_paired_interval(tmp_path, shift, said, answer):
    new = a_row("step_2", [a + b for a, b in zip(BASE, shift, strict=True)], hour=2, step=2)
    soup = page(overview(tmp_path, [step(1, 0), new]))
    assert words(soup.h1) == said
    assert cells(soup)[0][4] == answer


def test_what_is_open_says_how_many_prompts_it_takes(tmp_path):
    new = a_row("step_2", [a + b for a, b in zip(BASE, [-5, 6] * 15, strict=True)], hour=2, step=2)
    soup = page(overview(tmp_path, [step(1, 0), new]))
    needs = cells(soup)[0][4].removeprefix("Not settled, it ")
    assert needs.startswith("needs ")
    assert words(soup.h1) == f"Whether step_2 is better than step_1 is open: it {needs}"
    assert int(needs.split()[1]) > 10


def test_an_answer_stays_when_checkpoints_follow(tmp_path):
    rng = random.Random(0)
    rows = [
        a_row(f"step_{i}", [t + rng.randint(-4, 5) for t in BASE], hour=i, step=i)
        for i in range(1, 6)
    ]
    early, late = (cells(page(overview(tmp_path, rows[:n]))) for n in (3, 5))
    assert early == late[2:]


def test_the_best_before_and_the_reference_are_told(tmp_path):
    rows = [step(1, 5), step(2, 0), step(3, 1)]
    finish(tmp_path, *rows)
    soup = page(overview(tmp_path, rows))
    assert "step_1 was the best before it. step_3 is worse than step_1: -0.40" in words(soup.main)
    numbers = {words(one.dt): words(one.dd) for one in soup.select(".numbers > div")}
    assert numbers["the highest so far, step_1"].startswith("2.70")
    assert numbers["the reference, theirs"].startswith("2.50")
    assert numbers["regression"] == "✓ none against step_2, margin 0.05"
    alt = soup.figure.img["alt"]
    assert "3 checkpoints, step 1: tau 2.70, step 3: tau 2.30; the reference, theirs: 2.50" in alt


def test_a_report_or_reference_that_is_gone_is_no_crash(tmp_path):
    rows = [step(1, 0), step(2, 1)]
    finish(tmp_path, rows[0])
    soup = page(overview(tmp_path, rows, rule=replace(RULE, against="reference")))
    assert "its report is gone" in cells(soup)[0][0]
    assert [one.get_text() for one in soup.select("tbody a")] == ["step_1"]
    assert "regression" not in {words(one) for one in soup.select("dt")}
    assert soup.figure is not None


def test_a_name_is_text_whatever_it_holds(tmp_path):
    evil = '<script>alert(1)</script> "a" #1?%20'
    row = a_row(evil, BASE, step=1, run_id="odd #1?-1", out="runs/odd #1?%20-1", cause="<b>x</b>")
    finish(tmp_path, row)
    seen = [Seen("<img src=//evil.example/x>", "s", NOON, "failed", error="<iframe>")]
    seen.append(Seen("<b>next</b>", "s", NOON, "waiting"))
    soup = page(overview(tmp_path, [row], seen, where="</title><script>"))
    assert not soup.select("script, iframe, main img, b")
    link = soup.select_one("tbody a")
    assert link.get_text() == evil
    assert (tmp_path / unquote(link["href"])).read_text() == "report"
    assert not set("#?") & set(link["href"])
    assert "<b>next</b>" in words(soup.main)
    assert "<iframe>" in words(soup.main)


def test_replaced_in_place_and_other_texts(tmp_path):
    old, new = step(1, 0), step(1, 2, hour=3, run_id="step_1-2")
    assert words(page(overview(tmp_path, [old, new])).h1) == (
        "step_1 is better than step_1 of 2026-11-30 13:00"
    )
    other = step(2, 0, capture="other")
    found = cells(page(overview(tmp_path, [old, other])))
    assert found[0][4] == "The first that was measured on this text"
    ids = tuple(f"q{i}" for i in range(30))
    found = cells(page(overview(tmp_path, [old, step(2, 0, ids=ids)])))
    assert found[0][4] == "No prompt in common with the one before"


def test_what_has_no_report_is_told_with_its_reason(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a-step_2.log").write_text("why")
    seen = [
        Seen("a/step_2", "s", NOON, "failed", error="out of memory"),
        Seen("step_3", "s", NOON, "unreadable", error="it is truncated"),
        *(Seen(f"step_{i}", "s", NOON, "waiting") for i in range(4, 11)),
        Seen("step_1", "s", NOON, "done"),
    ]
    soup = page(overview(tmp_path, [step(1, 0)], seen))
    leads = [words(one) for one in soup.select(".lead")]
    assert "Still to be measured: step_4, step_5, step_6, step_7, step_8 and 2 more." in leads
    assert "2 could not be measured: the reasons are at the end." in leads
    facts = [words(one) for one in soup.select("main dl.facts dd")]
    assert facts == [
        "its report failed twice: out of memory ( log )", "could not be read: it is truncated"
    ]  # fmt: skip
    assert (tmp_path / soup.select_one("main dl.facts a")["href"]).read_text() == "why"


def test_nothing_is_blank_before_the_first(tmp_path):
    soup = page(overview(tmp_path))
    assert words(soup.h1) == "No checkpoint has been measured yet"
    assert [words(one) for one in soup.select(".lead")] == ["None has appeared so far."]
    assert not soup.select("table, figure, h2")
    for tag in soup.select("main, h1, h2, p, dd, dt, td, th, small"):
        assert words(tag), tag
    stepless = page(overview(tmp_path, [a_row("final", BASE)]))
    assert "Neither the files of final nor its name tell its training step." in words(stepless)
    for tag in stepless.select("h2, p, dd, dt, td, th, small"):
        assert words(tag), tag


def test_it_is_written_when_something_is_new_and_left_whole(tmp_path, monkeypatch):
    path = tmp_path / "index.html"
    rows = [step(1, 0)]
    overview(tmp_path, rows).write()
    old, stat = path.read_text(), path.stat()
    overview(tmp_path, rows).write()
    assert path.stat().st_mtime_ns == stat.st_mtime_ns
    assert path.stat().st_ino == stat.st_ino

    def full(*_):
        raise OSError(28, "No space left on device")

    grown = overview(tmp_path, [*rows, step(2, 1)])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OutputError, match=r"index\.html: the disk is full"):
            grown.write()
    assert path.read_text() == old
    assert [one.name for one in tmp_path.iterdir()] == ["index.html"]
    grown.write()
    assert "step_2 is better than step_1" in path.read_text()


def test_rows_that_were_kept_make_the_same_page(tmp_path):
    rows = [step(1, 0), step(2, 1)]
    for row in rows:
        append(tmp_path / "history.parquet", row)
    kept = read_history(tmp_path / "history.parquet")
    assert overview(tmp_path, kept).key == overview(tmp_path, rows).key
    assert cells(page(overview(tmp_path, kept))) == cells(page(overview(tmp_path, rows)))
