"""One block of a tiny run: drafted as it is scored, shown slot by slot, moved by its controls."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag.alignment_runs import positions
from dflash_diag.config import RunConfig
from dflash_diag.conventions import Convention
from dflash_diag.one_block import BlockDrafts, sights
from dflash_diag.runs import Run
from dflash_diag.scoring import score
from dflash_diag.sweeps import Sweep
from dflash_diag.widgets import BlockBrowser

HOSTILE = "<img src=x onerror=alert(1)>"
D = tiny_world.BLOCK - 1


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    """A drafter with random weights, and prompts that would like to be markup."""
    world = tiny_world.write_world(tmp_path_factory.mktemp("world"))
    prompts = [
        {"id": HOSTILE, "text": "</pre><script>alert(2)</script>"},
        {"id": "p1", "text": "def f(x):\n    return"},
    ]
    (world / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return Run.open(
        RunConfig(
            target=str(world / "target"),
            drafter=str(world / "drafter"),
            prompts=str(world / "prompts.jsonl"),
            max_new_tokens=16,
            draws=200,
            out=str(world / "out"),
        )
    )


@pytest.fixture
def browser(run) -> BlockBrowser:
    return BlockBrowser(run)


def table(html: str) -> list[dict[str, str]]:
    """Rows of the one table by column."""
    (found,) = BeautifulSoup(html, "html.parser").find_all("table")
    head = [cell.get_text() for cell in found.thead.find_all("th")]
    rows = found.tbody.find_all("tr")
    return [dict(zip(head, [c.get_text() for c in r.find_all("td")], strict=True)) for r in rows]


def outcomes(right) -> list[str]:
    """What is said of proposals that are right or wrong."""
    misses = [k for k, one in enumerate(right) if not one] or [len(right)]
    words = ["accepted", "first miss", "after the miss"]
    signs = ["✓" if one else "✗" for one in right]
    return [f"{s} {words[np.sign(k - misses[0]) + 1]}" for k, s in enumerate(signs)]


def test_a_block_shows_what_was_scored_at_its_anchor(run, browser):
    scores = run.scores("drafter")
    word = browser.words.quoted
    for a in range(0, len(scores.anchor), 5):
        prompt, anchor = scores.prompt_ids[scores.prompt[a]], int(scores.anchor[a])
        html = browser.html(prompt, anchor, 0)
        first, *rows = table(html)
        token = run.capture.tokens(run.capture.index(prompt))[anchor]
        assert (first["slot"], first["position"]) == ("0", str(anchor))
        assert first["fed"] == word(int(token))
        assert {first[name] for name in ("predicts", "drafter", "outcome")} == {"—"}
        assert [row["fed"] for row in rows] == ["mask"] * D
        ahead = [str(anchor + k) for k in range(1, D + 1)]
        assert [row["position"] for row in rows] == ahead
        assert [row["predicts"] for row in rows] == ahead
        assert [row["target"] for row in rows] == [word(int(t)) for t in scores.labels[a]]
        assert [row["drafter"] for row in rows] == [word(int(t)) for t in scores.proposed[a]]
        assert [row["rank"] for row in rows] == [str(r) for r in scores.rank[a]]
        best = np.exp(scores.topk_logprobs[a, :, 0])
        assert [float(row["p"]) for row in rows] == pytest.approx(best, abs=0.006)
        right = scores.proposed[a] == scores.labels[a]
        assert [row["outcome"] for row in rows] == outcomes(right)
        assert {row["phase"] for row in rows} == {"0"}
        assert {row["sees"] for row in rows} == {f"rows 0-{anchor - 1}; slots 0-{D}"}
        assert {row["served"] for row in rows} == {"✓ same"}
        assert f"accepted {scores.accepted[a]} of {D}." in html


@pytest.mark.parametrize(
    "changes",
    [
        {"position_offset": 1},
        {"label_layout": "next"},
        {"label_offset": 1},
        {"context_bound": "inclusive"},
        {"other_blocks": "all"},
        {"window": (3, None), "window_rule": "anchor"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_block_is_drafted_as_it_is_scored_under_every_reading(run, changes):
    declared = run.drafter("drafter")
    drafter = declared.under(replace(declared.convention, **changes))
    scores = score(run.capture, drafter, silent=True)
    drafts = BlockDrafts(run.capture, drafter)
    for a in range(0, len(scores.anchor), 3):
        index = int(scores.prompt[a])
        found = drafts.draft(index, int(scores.anchor[a]))
        assert found.labels.tolist() == scores.labels[a].tolist()
        assert found.proposed.ids.tolist() == scores.proposed[a].tolist()
        assert found.proposed.rank.tolist() == scores.rank[a].tolist()
        assert found.accepted == scores.accepted[a]
        tokens = run.capture.tokens(index)
        assert tokens[list(found.predicts)].tolist() == scores.labels[a].tolist()
    for index in range(2):
        anchors = scores.anchor[scores.prompt == index].tolist()
        assert list(drafts.anchors(index)) == anchors


def test_outcomes_are_told_by_sign_words_and_weight(browser, monkeypatch):
    prompt, anchor = browser.typical()
    index = browser.run.capture.index(prompt)
    drafted = browser.drafts.draft(index, anchor)
    labels = drafted.proposed.ids.clone()
    labels[2] += 1  # two right ones, a wrong one and a right one
    block = replace(drafted, labels=labels)
    monkeypatch.setattr(browser.drafts, "draft", lambda *_: block)
    html = browser.html(prompt, anchor, 0)
    assert f"accepted 2 of {D}." in html
    said = [row["outcome"] for row in table(html)]
    assert said == ["—", "✓ accepted", "✓ accepted", "✗ first miss", "✓ after the miss"]
    rows = BeautifulSoup(html, "html.parser").tbody.find_all("tr")
    assert [row.get("class") for row in rows] == [None, None, None, ["miss"], ["rest"]]


def test_an_offset_moves_the_positions_and_drafts_again(run, browser):
    declared = run.drafter("drafter")
    moved = declared.under(replace(declared.convention, position_offset=-2))
    scores = score(run.capture, moved, silent=True)
    differs = (scores.proposed != run.scores("drafter").proposed).any(1)
    a = int(np.flatnonzero(differs)[0])  # random weights, too, care where the block sits
    prompt, anchor = scores.prompt_ids[scores.prompt[a]], int(scores.anchor[a])
    html = browser.html(prompt, anchor, -2)
    rows = table(html)
    assert [row["position"] for row in rows] == [str(anchor - 2 + k) for k in range(D + 1)]
    said = [row["drafter"] for row in rows[1:]]
    assert said == [browser.words.quoted(int(t)) for t in scores.proposed[a]]
    stays = run.scores("drafter").accepted[a]
    assert f"with the block moved by -2; {stays} of {D} in its place" in html
    assert all(int(row["phase"]) > 0 for row in rows)


def test_phases_are_those_of_the_page(run, browser):
    there = positions(Sweep(run.capture, run.drafter("drafter")))
    assert browser.offsets == there["offsets"]
    for own, other in zip(browser.phases, there["phase_degrees"], strict=True):
        assert own == pytest.approx(other, abs=1e-3)


# --- what slots see -----------------------------------------------------------------------------


def reading(**changes) -> Convention:
    plain = {
        "block_size": 3,
        "layer_ids": (0,),
        "in_block": ("bidirectional", "bidirectional"),
        "window": (None, None),
        "rope_theta": 1e4,
        "rotary_width": 8,
        "mask_token_id": 0,
    }
    return Convention(**plain | changes)


def test_what_a_server_has_is_servable():
    (first,), *_ = seen = sights(reading(), 4, range(2, 8))
    assert (first.layers, first.rows, first.slots, first.others) == ((), (0, 1, 2, 3), (0, 1, 2), 0)
    assert not any(s.beyond_rows or s.beyond_slots for slot in seen for s in slot)


def test_the_anchors_own_row_and_other_blocks_are_beyond_a_server():
    (first,), *_ = sights(reading(context_bound="inclusive", other_blocks="later"), 4, range(2, 8))
    assert first.rows == (0, 1, 2, 3, 4)
    assert first.beyond_rows == (4,)
    assert first.others == 3  # at 5, 6 and 7
    (first,), *_ = sights(reading(other_blocks="all"), 4, range(2, 8))
    assert first.others == 5


def test_layers_with_rules_of_their_own_are_told_apart():
    how = reading(window=(None, 2), in_block=("bidirectional", "causal"), window_rule="anchor")
    whole, windowed = sights(how, 4, range(2, 8))[1]
    assert (whole.layers, windowed.layers) == ((0,), (1,))
    assert (windowed.rows, windowed.slots) == ((2, 3), (0, 1))
    assert windowed.beyond_rows == (2, 3)  # a server's window is counted from slot 1, at 5
    assert windowed.beyond_slots == ()
    causal = reading(window=(2, 2), in_block=("causal",) * 2)
    assert [slot[0].slots for slot in sights(causal, 4, range(2, 8))] == [(0,), (0, 1), (1, 2)]


def test_a_leak_is_said_in_words(run):
    config = run.given.model_copy(
        update={"overrides": ("context_bound=inclusive", "other_blocks=all", "window=none,4")}
    )
    leaky = BlockBrowser(Run.open(config))
    prompt, anchor = leaky.typical()
    others = len(leaky.drafts.anchors(leaky.run.capture.index(prompt))) - 1
    row = table(leaky.html(prompt, anchor, 0))[1]
    assert row["sees"].split("\n") == [
        f"layer 0: rows 0-{anchor}; slots 0-{D}; {others} other blocks",
        f"layer 1: rows {anchor - 2}-{anchor}; slots 0-{D}; {others} other blocks",
    ]
    assert row["served"].split("\n") == [f"✗ lacks rows {anchor}; other blocks"] * 2


# --- controls and the static twin ---------------------------------------------------------------


def test_menus_draft_again_and_anchors_follow_the_prompt(run, browser):
    *rows, shown = browser.widget().children
    prompt, anchor, offset = menus = [row.children[0] for row in rows]
    assert [menu.description for menu in menus] == ["prompt", "anchor", "moved by"]
    assert shown.value == browser.html(*browser.typical(), 0)
    offset.value = 3
    assert shown.value == browser.html(prompt.value, anchor.value, 3)
    anchor.index = len(anchor.options) - 1
    assert shown.value == browser.html(prompt.value, anchor.value, 3)

    drafted = []
    draft = browser.drafts.draft
    browser.drafts.draft = lambda *args: drafted.append(args) or draft(*args)
    other = next(one for one in browser.prompts if one != prompt.value)
    prompt.value = other
    index = run.capture.index(other)
    assert [args[0] for args in drafted] == [index] * 2  # moved, and in its place
    assert [value for _, value in anchor.options] == list(browser.drafts.anchors(index))
    assert anchor.value in browser.drafts.anchors(index)
    assert shown.value == browser.html(other, anchor.value, 3)
    anchor.index = 0
    _, up, down = rows[1].children
    down.click()
    assert shown.value == browser.html(other, anchor.options[1][1], 3)
    up.click()
    up.click()
    assert shown.value == browser.html(other, anchor.options[0][1], 3)


def test_the_static_twin_is_a_typical_block_without_a_script(run, browser):
    scores = run.scores("drafter")
    prompt, anchor = browser.typical()
    at = (np.array(scores.prompt_ids)[scores.prompt] == prompt) & (scores.anchor == anchor)
    apart = abs(scores.accepted - np.median(scores.accepted))
    assert apart[at].tolist() == [apart.min()]
    html = browser.static_html()
    assert f"Of {len(scores.anchor)} blocks the median has" in html
    assert browser.html(prompt, anchor, 0) in html
    assert "<script" not in html
    assert "color:" not in html  # shades and marks, in whatever colour the theme has
    bundle = browser._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/plain"} <= set(bundle)
    assert bundle["text/html"] == html


def test_hostile_text_stays_text(run, browser):
    browser.words.__dict__["decode"] = lambda token: f"<script>{token}</script>"
    html = browser.html(HOSTILE, browser.drafts.anchors(0)[0], 0)
    assert HOSTILE not in html
    assert "<script" not in html
    page = BeautifulSoup(html, "html.parser")
    assert HOSTILE in page.p.get_text()
    assert not page.find_all(["script", "img"])
    pieces = run.capture.positions(0)["text"]
    shown = page.pre.get_text()
    anchor = browser.drafts.anchors(0)[0]
    assert shown == "…" + "".join(pieces[anchor - 20 : anchor + D + 1])
    assert page.pre.find(class_="anchor").get_text() == pieces[anchor]


def test_without_a_tokenizer_tokens_have_the_captures_text_or_their_id(run, tmp_path):
    config = RunConfig(
        capture=str(run.capture.path), drafter=run.config.drafter, out=str(tmp_path), draws=200
    )
    alone = BlockBrowser(Run.open(config))
    seen = set(torch.cat([run.capture.tokens(i) for i in range(2)]).tolist())
    unseen = next(token for token in range(tiny_world.VOCABULARY) if token not in seen)
    letter = next(t for t, text in alone.words.known.items() if text.isalpha() and text.isascii())
    assert alone.words.quoted(letter) == repr(BlockBrowser(run).words.decode(letter))
    assert alone.words.quoted(unseen) == f"[{unseen}]"
    assert table(alone.html(*alone.typical(), 0))
