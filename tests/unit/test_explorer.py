"""The explorer over a tiny run whose scores are planted: what it shows, and what moves it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag import trees
from dflash_diag.bundle import Capture
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput
from dflash_diag.runs import Run
from dflash_diag.scoring import Scores
from dflash_diag.token_kinds import kind_of
from dflash_diag.widgets import Explorer
from dflash_diag.widgets.explorer import drawing, tree
from dflash_diag.widgets.explorer.blocks import ANY, NO_MISS, Block, Filter
from dflash_diag.widgets.explorer.controls import NOWHERE, Controls

HOSTILE = "<img src=x onerror=alert(1)>"
D, W = tiny_world.BLOCK - 1, 64


def plant(scores: Scores, skill: float, seed: int) -> Scores:
    """The same anchors with proposals that are right about ``skill`` of the time."""
    rng = np.random.default_rng(seed)
    shape = scores.labels.shape
    logits = -np.sort(-rng.normal(0, 2.5, (*shape, tiny_world.VOCABULARY)))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(rng.random(logprobs.shape), axis=-1)
    wrong = rng.geometric(0.08, shape).clip(1, tiny_world.VOCABULARY - 1)
    rank = np.where(rng.random(shape) < skill, 0, wrong)
    for at in np.ndindex(shape):
        other = int(np.flatnonzero(ids[at] == scores.labels[at])[0])
        ids[at][[rank[at], other]] = ids[at][[other, rank[at]]]
    picked = rank[..., None]
    return replace(
        scores,
        proposed=ids[..., 0],
        rank=rank.astype(np.int32),
        label_logprob=np.take_along_axis(logprobs, picked, -1)[..., 0].astype(np.float32),
        topk_ids=np.ascontiguousarray(ids[..., :W]).astype(np.int32),
        topk_logprobs=np.ascontiguousarray(logprobs[..., :W]).astype(np.float32),
    )


def planted(run: Run) -> Run:
    """A run whose stored scores are planted, opened again so that they are read from disk."""
    for seed, role in enumerate(run.roles):
        made = plant(run.scores(role), 0.45 + 0.25 * seed, seed)
        folder = run.out / "scores" / run.score_key(role)[:12]
        shutil.rmtree(folder)
        made.save(folder)
    return Run.open(run.given)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return tiny_world.write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def run(world) -> Run:
    """Two drafters, and a prompt that would like to be markup."""
    prompts = [
        {"id": HOSTILE, "text": "</pre><script>alert(2)</script>"},
        {"id": "p1", "text": "def f(x):\n    return"},
        {"id": "p2", "text": "x = 12\n"},
    ]
    (world / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    config = RunConfig(
        target=str(world / "target"),
        drafter=str(world / "drafter"),
        reference=str(world / "reference"),
        prompts=str(world / "prompts.jsonl"),
        max_new_tokens=24,
        draws=200,
        out=str(world / "out"),
    )
    return planted(Run.open(config))


@pytest.fixture
def explorer(run) -> Explorer:
    return Explorer(run)


@pytest.fixture
def controls(explorer) -> Controls:
    return Controls(explorer)


# --- the truth, worked out by itself --------------------------------------------------------------


def accepted(scores: Scores, row: int) -> int:
    right = [p == t for p, t in zip(scores.proposed[row], scores.labels[row], strict=True)]
    return len(list(itertools.takewhile(bool, right)))


def walk(scores: Scores, prompt: int) -> list[int]:
    """Rows at which the rounds of a prompt start."""
    rows = np.flatnonzero(scores.prompt == prompt).tolist()
    visited, at = [], 0
    while at < len(rows):
        visited.append(rows[at])
        at += accepted(scores, rows[at]) + 1
    return visited


def passing(explorer: Explorer, role: str, wanted: Filter) -> list[int]:
    """Rows that pass a filter."""
    scores = explorer.run.scores(role)
    decoded = {row for i in range(len(scores.prompt_ids)) for row in walk(scores, i)}
    found = []
    for row in range(len(scores.anchor)):
        n = accepted(scores, row)
        kind = "" if n == D else kind_of(explorer.words.text(int(scores.labels[row, n])))
        if (
            (row in decoded or not wanted.decoded)
            and wanted.miss in (ANY, NO_MISS if n == D else n + 1)
            and wanted.kind in ("", kind)
            and wanted.prompt in ("", scores.prompt_ids[scores.prompt[row]])
        ):
            found.append(row)
    return found


def rows_of(html: str, caption: str) -> list[dict[str, list[str]]]:
    """Rows of the table with ``caption`` in its caption: texts by column, which may recur."""
    page = BeautifulSoup(html, "html.parser")
    (found,) = [t for t in page.find_all("table") if caption in t.caption.get_text()]
    head = [cell.get_text() for cell in found.thead.find_all("th")]
    made = []
    for row in found.tbody.find_all("tr"):
        cells: dict[str, list[str]] = {}
        for name, cell in zip(head, row.find_all("td"), strict=True):
            cells.setdefault(name, []).append(cell.get_text())
        made.append(cells)
    return made


def rounded(logprob: float) -> str:
    p = float(np.exp(logprob))
    return f"{p:.2f}" if p >= 0.01 else f"{p:.1g}"


# --- one block ------------------------------------------------------------------------------------


def test_a_block_is_what_was_scored_with_both_drafters_side_by_side(run, explorer):
    word = explorer.words.quoted
    ours, theirs = run.scores("drafter"), run.scores("reference")
    for row in range(0, len(ours.anchor), 7):
        prompt, anchor = ours.prompt_ids[ours.prompt[row]], int(ours.anchor[row])
        html = explorer.html("drafter", prompt, anchor, beside="reference")
        shown = rows_of(html, "proposal by proposal")
        assert [one["k"] for one in shown] == [[str(k)] for k in range(1, D + 1)]
        assert [one["target"] for one in shown] == [[word(int(t))] for t in ours.labels[row]]
        for side, (name, scores) in enumerate((("drafter", ours), ("reference", theirs))):
            n = accepted(scores, row)
            for k, one in enumerate(shown):
                assert one[name] == [word(int(scores.proposed[row, k]))]
                sign = "✓" if scores.proposed[row, k] == scores.labels[row, k] else "✗"
                said = ["accepted", "first miss", "after the miss"][np.sign(k - n) + 1]
                assert one["outcome"][side] == f"{sign} {said}"
                assert one["p"][side] == rounded(scores.topk_logprobs[row, k, 0])
                assert one["rank"][side] == str(scores.rank[row, k])
            text = BeautifulSoup(html, "html.parser").find_all("li")[side].get_text()
            assert text.startswith(f"{name}: {n} of {D} accepted")
            assert (f"first miss at k = {n + 1} (" in text) == (n < D)
            p = np.exp(scores.topk_logprobs[row, :, 0].astype(float))
            assert f"expected {np.cumprod(p).sum():.1f}" in text
            chance = np.prod(p[:n]) * (1 - p[n] if n < D else 1)
            assert f"surprise {-np.log(chance):.2f} nats" in text


def test_candidates_are_the_stored_ones_and_the_targets_is_named(run, explorer):
    scores, word = run.scores("drafter"), explorer.words.quoted
    inside = outside = 0
    for row in range(0, len(scores.anchor), 5):
        place = explorer.blocks("drafter").place(row)
        shown = rows_of(explorer.html("drafter", *place), "tokens of each slot")
        for k, one in enumerate(shown):
            rank = int(scores.rank[row, k])
            for r in range(drawing.CANDIDATES):
                said = f"{word(int(scores.topk_ids[row, k, r]))} "
                said += rounded(scores.topk_logprobs[row, k, r])
                assert one[f"rank {r}"] == [f"{said} target" if r == rank else said]
            there = f"rank {rank}"
            if rank >= drawing.CANDIDATES:
                label = word(int(scores.labels[row, k]))
                there = f"{label} {rounded(scores.label_logprob[row, k])}, {there}"
                outside += 1
            else:
                inside += 1
            assert one["target's token"] == [there]
    assert inside > 10
    assert outside > 10


def test_tokens_stand_in_boxes_with_marks(run, explorer):
    scores = run.scores("drafter")
    row = next(r for r in range(len(scores.anchor)) if 0 < accepted(scores, r) < D - 1)
    n = accepted(scores, row)
    html = explorer.html("drafter", *explorer.blocks("drafter").place(row))
    lines = BeautifulSoup(html, "html.parser").find(class_="lines")
    boxes = lines.find_all(class_="token")
    assert len(boxes) == 2 * D
    classes = [box["class"][1:] for box in boxes[D:]]
    assert classes == [["got"]] * n + [["miss"]] + [["rest"]] * (D - n - 1)
    right = scores.proposed[row] == scores.labels[row]
    signs = ["✓" if one else "✗" for one in right]
    assert [box.b.get_text() for box in boxes[D:]] == signs


def test_the_context_is_the_captures_text_up_to_the_anchor(run, explorer):
    scores = run.scores("drafter")
    anchor = int(scores.anchor[-1])
    pieces = run.capture.positions(2)["text"]
    html = explorer.html("drafter", "p2", anchor)
    shown = BeautifulSoup(html, "html.parser").pre
    boxed = shown.find(class_="anchor").extract().get_text()
    assert boxed.strip("↵⇥␣") == pieces[anchor].strip()
    start = max(0, anchor - drawing.BEFORE)
    assert shown.get_text() == "…" * bool(start) + "".join(pieces[start:anchor])


# --- the tree -------------------------------------------------------------------------------------


def brute_force(block: Block, n: int) -> set[tuple[int, ...]]:
    """The n most probable prefixes, from all that could be among them.

    A prefix has at least as many others before it as its ranks, counted from 1, multiply to.
    """
    rows = np.minimum(block.topk_logprobs.astype(float), 0).tolist()
    found: list[tuple[float, tuple[int, ...]]] = []

    def extend(ranks: tuple[int, ...], cost: float, room: int) -> None:
        if len(ranks) < len(rows):
            for r in range(min(room, W)):
                longer, dearer = (*ranks, r), cost - rows[len(ranks)][r]
                found.append((dearer, longer))
                extend(longer, dearer, room // (r + 1))

    extend((), 0.0, n)
    return {ranks for _, ranks in sorted(found)[:n]}


@pytest.mark.parametrize("n", [1, 4, 8, 16])
def test_the_trees_path_is_what_the_target_says_of_the_most_probable_prefixes(run, explorer, n):
    depths = trees.ddtree_depths(
        run.scores("drafter").topk_logprobs, run.scores("drafter").rank, [n]
    )[:, 0]
    found = []
    for row in range(0, len(depths), 6):
        block = explorer.blocks("drafter").block(row)
        nodes = brute_force(block, n)
        ranks = tuple(block.rank.tolist())
        expected = max((d for d in range(D + 1) if not d or ranks[:d] in nodes), default=0)
        drawn = tree.grow(block, n)
        assert len(drawn.tree.depth) == n
        assert [int(drawn.tree.rank[node]) for node in drawn.path] == list(ranks[:expected])
        assert expected == depths[row]
        found.append(expected)
        html = explorer.html("drafter", *explorer.blocks("drafter").place(row), nodes=n)
        svg = BeautifulSoup(html, "html.parser").svg
        assert len(svg.find_all("circle")) == n + 1
        assert len(svg.find_all("circle", class_="got")) == expected + 1
        labels = [text.get_text() for text in svg.find_all("text", class_="got")[1:]]
        words = [explorer.words.quoted(int(token)) for token in block.labels[:expected]]
        assert [label.split(" ")[0] for label in labels] == ["✓"] * expected
        for label, text in zip(labels, words, strict=True):
            assert text[: tree.LETTERS - 1].rstrip("…") in label
        assert f"{n} node{'s' * (n > 1)}: {expected} of {D} accepted" in svg["aria-label"]
    assert len(set(found)) > 1


def test_a_drawn_tree_has_no_two_nodes_in_one_place(explorer):
    for row in range(0, 40, 3):
        block = explorer.blocks("reference").block(row)
        svg = tree.draw(block, tree.grow(block, 64), explorer.words.quoted, 0)
        circles = BeautifulSoup(svg, "html.parser").find_all("circle")
        assert len({(c["cx"], c["cy"]) for c in circles}) == 65
        by_column: dict[str, int] = {}
        for circle in circles:
            by_column[circle["cx"]] = by_column.get(circle["cx"], 0) + 1
        assert len(by_column) == max(tree.grow(block, 64).tree.depth) + 1


def test_wide_letters_are_cut_by_the_room_that_they_take():
    assert tree._cut("'return'") == "'return'"
    assert tree._cut("x" * 40) == "x" * (tree.LETTERS - 1) + "…"
    assert tree._cells(tree._cut("単" * 40)) <= tree.LETTERS


# --- the walk -------------------------------------------------------------------------------------


def test_the_walk_says_where_decoding_stands(run, explorer):
    scores, kinds = run.scores("drafter"), set()
    for row in range(len(scores.anchor)):
        i = int(scores.prompt[row])
        visited = walk(scores, i)
        start = max(one for one in visited if one <= row)
        number = visited.index(start) + 1
        html = explorer.html("drafter", scores.prompt_ids[i], int(scores.anchor[row]))
        if start == row:
            said = f"Decoding starts round {number} of {len(visited)} at this anchor."
        else:
            said = f"Decoding jumps over this anchor: it is proposal {row - start} of the "
            said += f"{accepted(scores, start)} that round {number} accepts."
        assert said in html
        kinds.add(start == row)
        shown = rows_of(html, "around it")
        around = visited[max(0, number - 3) : number + 2]
        assert [one["anchor"] for one in shown] == [[str(scores.anchor[r])] for r in around]
        (here,) = [one for one in shown if one["here"] == ["▶"]]
        assert here["round"] == [str(number)]
        committed = [accepted(scores, r) for r in around]
        assert [one["accepted"] for one in shown] == [[f"{n} of {D}"] for n in committed]
    assert kinds == {True, False}


# --- filters and controls -------------------------------------------------------------------------


def test_controls_have_names_that_stay(controls):
    assert list(controls.menus) == [
        *("checkpoint", "beside", "blocks", "first miss", "token kind", "within"),
        *("prompt", "anchor", "order", "tree nodes"),
    ]
    assert all(menu.description == name for name, menu in controls.menus.items())
    buttons = ["worst", "median", "most surprising", "previous", "next"]
    assert [button.description for button in controls.buttons.values()] == buttons
    assert all(button.tooltip for button in controls.buttons.values())


def shown(controls: Controls) -> str:
    """What the view has to show for the menus as they are."""
    return controls.explorer.html(
        controls["checkpoint"],
        controls["prompt"],
        controls["anchor"],
        beside=controls["beside"],
        nodes=controls["tree nodes"],
    )


def test_it_opens_on_the_worst_round_of_decoding(run, controls, explorer):
    scores = run.scores("drafter")
    rounds = passing(explorer, "drafter", Filter())
    worst = min(
        rounds,
        key=lambda r: (
            accepted(scores, r),
            scores.label_logprob[r, min(accepted(scores, r), D - 1)],
        ),
    )
    assert controls.row == worst
    assert controls.shown.value == shown(controls)
    assert f"of {len(rounds)} that pass the filter" in controls.count.value


@pytest.mark.parametrize("miss", [ANY, NO_MISS, 1, 3])
def test_a_filter_leaves_the_blocks_that_pass_it(explorer, controls, miss):
    kinds = [value for _, value in controls.menus["token kind"].options]
    assert len(kinds) > 3
    for kind, decoded, within in itertools.product(kinds, (True, False), (False, True)):
        controls.menus["token kind"].value = kind
        controls.menus["blocks"].value = decoded
        controls.menus["within"].value = within
        controls.menus["first miss"].value = miss
        check_filter(explorer, controls, decoded, miss, kind, within)


def check_filter(explorer, controls, decoded, miss, kind, within):
    prompt = controls["prompt"]
    wanted = Filter(decoded, miss, kind, prompt if within else "")
    rows = passing(explorer, "drafter", wanted)
    blocks = explorer.blocks("drafter")
    offered = [value for _, value in controls.menus["anchor"].options]
    own = [a for p, a in map(blocks.place, rows) if p == controls["prompt"]]
    if rows:
        assert controls.row in rows
        assert offered == own
        at = rows.index(controls.row) + 1
        assert f"Block {at} of {len(rows)} that pass the filter" in controls.count.value
        assert controls.shown.value == shown(controls)
    else:
        assert offered == [NOWHERE]
        assert "There is no block to show" in controls.shown.value
        assert controls.count.value.startswith("0 blocks pass the filter")


def test_buttons_go_through_the_blocks_in_the_order_and_stop_at_its_ends(controls, explorer):
    controls.menus["first miss"].value = 2
    rows = passing(explorer, "drafter", Filter(miss=2))
    scores = explorer.run.scores("drafter")
    p = np.exp(scores.topk_logprobs[:, :, 0].astype(float))
    surprise = {r: -np.log(p[r, 0] * (1 - p[r, 1])) for r in rows}
    controls.menus["order"].value = "most surprising first"
    expected = sorted(rows, key=lambda r: -surprise[r])
    controls.buttons["most surprising"].click()
    assert controls.row == expected[0]
    seen = [controls.row]
    for _ in range(len(rows) + 1):
        controls.buttons["next"].click()
        assert controls.shown.value == shown(controls)
        seen.append(controls.row)
    assert seen == [*expected, expected[-1], expected[-1]]
    for _ in range(len(rows) + 1):
        controls.buttons["previous"].click()
    assert controls.row == expected[0]
    controls.buttons["median"].click()
    assert controls.row == sorted(rows, key=surprise.get)[(len(rows) - 1) // 2]
    controls.buttons["worst"].click()
    assert controls.row == min(rows, key=lambda r: scores.label_logprob[r, 1])


def test_prompt_and_anchor_are_chosen_by_menus_and_arrows(controls, explorer):
    first, second, *_ = explorer.blocks("drafter").prompts
    controls.menus["prompt"].value = second
    rows = passing(explorer, "drafter", Filter(prompt=second))
    assert controls.row == rows[0]
    box = next(b for b in controls.box.children if controls.menus["anchor"] in b.children)
    _, up, down = box.children
    down.click()
    assert controls.row == rows[1]
    assert controls.shown.value == shown(controls)
    up.click()
    up.click()
    assert controls.row == rows[0]
    controls.menus["prompt"].value = first
    assert controls.row == passing(explorer, "drafter", Filter(prompt=first))[0]


def test_another_checkpoint_shows_the_same_block_where_it_has_it(controls, explorer):
    controls.menus["blocks"].value = False
    controls.menus["prompt"].value = "p1"
    controls.menus["anchor"].index = 3
    place = controls["prompt"], controls["anchor"]
    controls.menus["checkpoint"].value = "reference"
    assert controls["beside"] == "drafter"
    assert (controls["prompt"], controls["anchor"]) == place
    expected = explorer.html("reference", *place, beside="drafter", nodes=16)
    assert controls.shown.value == expected
    controls.menus["beside"].value = ""
    assert controls.shown.value == explorer.html("reference", *place, nodes=16)
    controls.menus["checkpoint"].value = "drafter"
    assert controls["beside"] == ""  # nothing was wanted beside it
    controls.menus["tree nodes"].value = 64
    assert controls.shown.value == explorer.html("drafter", *place, nodes=64)


def test_where_no_block_passes_it_says_so_and_controls_stay_usable(controls, explorer):
    def narrowest():
        for prompt, kind in itertools.product(
            explorer.blocks("drafter").prompts, explorer.blocks("drafter").kinds
        ):
            for miss in range(1, D + 1):
                if not passing(explorer, "drafter", Filter(miss=miss, kind=kind, prompt=prompt)):
                    return prompt, kind, miss
        raise AssertionError

    prompt, kind, miss = narrowest()
    controls.menus["prompt"].value = prompt
    controls.menus["within"].value = True
    controls.menus["token kind"].value = kind
    controls.menus["first miss"].value = miss
    assert controls.row is None
    text = BeautifulSoup(controls.shown.value, "html.parser").get_text()
    assert f"with a first miss at k = {miss}" in text
    assert kind in text
    assert prompt in text
    before = controls.shown.value
    for name, button in controls.buttons.items():
        button.click()
        assert controls.shown.value == before, name
    for name in ("order", "tree nodes", "beside", "checkpoint"):
        controls.menus[name].index = 1
        controls.menus[name].index = 0
    controls.menus["first miss"].value = ANY
    controls.menus["token kind"].value = ""
    assert controls.row in passing(explorer, "drafter", Filter(prompt=prompt))
    assert controls.shown.value == shown(controls)


def test_a_prompt_without_a_passing_block_says_so_and_the_buttons_lead_out(controls, explorer):
    blocks = explorer.blocks("drafter")
    for miss, kind in itertools.product(range(1, D + 1), blocks.kinds):
        rows = passing(explorer, "drafter", Filter(miss=miss, kind=kind))
        lacking = [p for p in blocks.prompts if p not in {blocks.place(r)[0] for r in rows}]
        if rows and lacking:
            break
    controls.menus["token kind"].value = kind
    controls.menus["first miss"].value = miss
    controls.menus["prompt"].value = lacking[0]
    assert controls.row is None
    assert f"{len(rows)} blocks pass the filter, none of them" in controls.count.value
    controls.buttons["next"].click()
    assert controls.row == rows[0]


# --- work -----------------------------------------------------------------------------------------


def test_a_move_reads_nothing_anew_and_draws_once(run, controls, monkeypatch):
    counts = dict.fromkeys(("scores", "tokens", "positions", "html", "tree", "sent"), 0)

    def counted(owner, name, key):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            counts[key] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    counted(Run, "scores_on", "scores")
    counted(Capture, "tokens", "tokens")
    counted(Capture, "positions", "positions")
    counted(Explorer, "html", "html")
    counted(tree, "ddtree", "tree")
    controls.shown.observe(lambda _: counts.update(sent=counts["sent"] + 1), "value")
    drawn = {"html": 1, "tree": 2, "sent": 1}

    def move(change):
        for key in counts:
            counts[key] = 0
        change()
        return {key: n for key, n in counts.items() if n}

    controls.menus["blocks"].value = False
    for name in ("next", "next", "previous"):
        assert move(controls.buttons[name].click) == drawn, name
    anchor = controls.menus["anchor"]
    assert move(lambda: setattr(anchor, "index", (anchor.index + 5) % 15)) == drawn
    assert move(lambda: setattr(controls.menus["tree nodes"], "value", 64)) == drawn
    assert move(lambda: setattr(controls.menus["checkpoint"], "value", "reference")) == drawn
    alone = {**drawn, "tree": 1}
    assert move(lambda: setattr(controls.menus["beside"], "value", "")) == alone
    kinds = controls.menus["token kind"]
    assert move(lambda: setattr(kinds, "index", 1)).get("html", 0) <= 1
    controls.menus["token kind"].value = ""
    other = next(
        p for p in controls.explorer.blocks("reference").prompts if p != controls["prompt"]
    )
    read = {"tokens": 2, "positions": 1}  # another text: its ids, and what they are called
    assert move(lambda: setattr(controls.menus["prompt"], "value", other)) == {**alone, **read}
    assert move(controls.buttons["next"].click) == alone


# --- what may be lacking --------------------------------------------------------------------------


def test_hostile_text_stays_text(run):
    explorer = Explorer(run)
    explorer.words.__dict__["decode"] = lambda token: f"<script>{token}</script>"
    anchor = int(run.scores("drafter").anchor[0])
    for html in (
        explorer.html("drafter", HOSTILE, anchor, beside="reference"),
        explorer.static_html(),
        explorer.nothing(Filter(kind="<b>", prompt=HOSTILE), HOSTILE),
    ):
        assert HOSTILE not in html
        page = BeautifulSoup(html, "html.parser")
        assert not page.find_all(["script", "img"])
        assert "<script" not in html
    assert HOSTILE in page.get_text()


def test_one_drafter_is_enough(run, tmp_path):
    config = run.given.model_copy(update={"reference": "", "capture": str(run.capture.path)})
    config = config.model_copy(update={"out": str(tmp_path / "out"), "prompts": ""})
    config = config.model_copy(update={"max_new_tokens": 0})
    explorer = Explorer(Run.open(config))
    controls = Controls(explorer)
    assert [label for label, _ in controls.menus["beside"].options] == [
        "nothing (give --reference)"
    ]
    assert controls.shown.value == shown(controls)
    assert len(rows_of(controls.shown.value, "proposal by proposal")[0]["outcome"]) == 1
    assert explorer.static_html().count("<svg") == len(explorer.picks("drafter", Filter()))


def test_a_drafter_of_a_longer_block_has_none_where_the_text_ends(run, world, tmp_path):
    wide = tiny_world.write_drafter(tmp_path / "wide", seed=3, block_size=9)
    config = run.given.model_copy(update={"reference": str(wide), "prompts": ""})
    update = {"capture": str(run.capture.path), "max_new_tokens": 0, "out": str(tmp_path / "out")}
    explorer = Explorer(Run.open(config.model_copy(update=update)))
    scores = explorer.run.scores("drafter")
    last = int(scores.anchor[scores.prompt == 1][-1])
    html = explorer.html("drafter", "p1", last, beside="reference")
    assert "wide has no block here: not all of the 8 tokens" in html
    assert len(rows_of(html, "proposal by proposal")) == D
    html = explorer.html("drafter", "p1", last - 4, beside="reference")
    both = rows_of(html, "drafter beside wide")
    assert [one["k"] for one in both] == [[str(k)] for k in range(1, 9)]
    assert both[D]["drafter"] == ["—"]
    tokens = run.capture.tokens(1)[last - 4 + 1 :][:8].tolist()
    assert [one["target"] for one in both] == [[explorer.words.quoted(t)] for t in tokens]
    controls = Controls(explorer)
    controls.menus["checkpoint"].value = "reference"
    misses = [value for _, value in controls.menus["first miss"].options]
    assert misses == [ANY, *range(1, 9), NO_MISS]


def test_without_a_tokenizer_tokens_are_the_captures_texts_or_ids(run, tmp_path):
    config = RunConfig(
        capture=str(run.capture.path), drafter=run.config.drafter, out=str(tmp_path), draws=200
    )
    explorer = Explorer(Run.open(config))
    html = explorer.static_html()
    assert "Tokens that the capture has not are shown by their ids" in html
    assert re.search(r"\[\d+\]", BeautifulSoup(html, "html.parser").get_text())
    assert Controls(explorer).row is not None


def test_text_that_the_target_did_not_choose_is_called_that(run, monkeypatch):
    row = {"id": "p1", "n_tokens": 24, "n_equal": 9, "n_rounding": 0, "n_differ": 15}
    row |= {"first_differ": 3, "margin": 4.0, "gap": 4.0, "kind": "choice", "how": "ids"}
    row |= {"stopped_early": False, "finish_reason": "length"}
    server = {"url": "http://127.0.0.1", "dialect": "sglang", "model": "<b>m</b>"}
    server |= {"version": None, "precision": None, "tokens_by": ["ids"], "unusable": []}
    found = {"server": server, "rows": [row], "notes": []}
    monkeypatch.setattr(Run, "reference", lambda _: found)
    html = Explorer(run).static_html()
    assert re.search("A server wrote the text, and target.reference is (WARN|FAIL|INC)", html)
    assert "Accepted means equal to that text." in html
    monkeypatch.setattr(Run, "reference", lambda _: None)
    assert "A server wrote" not in Explorer(run).static_html()


def test_a_block_that_is_not_there_is_refused(explorer):
    with pytest.raises(BadInput, match="has no block at position 0 of 'p1'"):
        explorer.html("drafter", "p1", 0)
    with pytest.raises(BadInput, match="of 'p9'"):
        explorer.html("drafter", "p9", 20)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_capture_of_other_code_is_explored_as_far_as_it_goes(
    run, world, tmp_path, with_tokenizer
):
    capture = run.capture
    target = shutil.copytree(world / "target", tmp_path / "target")
    if not with_tokenizer:
        (target / "tokenizer.json").unlink()
    layers = list(run.convention("drafter").taps)
    dump = {
        "tokens": capture.tokens(1),
        "hidden_states": capture.states(1, layers).contiguous(),
        "layer_ids": torch.tensor(layers),
        "n_prompt_tokens": torch.tensor(capture.prompts[1].n_prompt_tokens),
    }
    save_file(dump, tmp_path / "other.safetensors")
    config = RunConfig(
        target=str(target),
        capture=str(tmp_path / "other.safetensors"),
        drafter=run.config.drafter,
        out=str(tmp_path / "out"),
        draws=200,
    )
    explorer = Explorer(Run.open(config))
    controls = Controls(explorer)
    text = BeautifulSoup(controls.shown.value, "html.parser").get_text()
    assert ("Tokens are shown by their ids" in text) is not with_tokenizer
    token = int(capture.tokens(1)[controls["anchor"]])
    word = Explorer(run).words.quoted(token) if with_tokenizer else f"[{token}]"
    assert f"anchor at position {controls['anchor']}: {word}" in text
    kinds = set(explorer.blocks("drafter").kinds)
    assert (kinds == {"no text"}) is not with_tokenizer
    controls.buttons["next"].click()
    assert controls.shown.value == shown(controls)


# --- the static twin ------------------------------------------------------------------------------


def test_the_static_twin_shows_three_telling_rounds_without_a_script(run, explorer):
    html = explorer.static_html()
    blocks = explorer.blocks("drafter")
    rounds = passing(explorer, "drafter", Filter())
    picks = explorer.picks("drafter", Filter())
    assert list(picks) == ["worst", "median", "most surprising"]
    assert set(picks.values()) <= set(rounds)
    told = rows_of(html, f"Three of the {len(rounds)} rounds")
    for one, (name, row) in zip(told, picks.items(), strict=True):
        prompt, anchor = blocks.place(row)
        assert (one["round"], one["prompt"], one["anchor"]) == ([name], [prompt], [str(anchor)])
        assert explorer.html("drafter", prompt, anchor, beside="reference") in html
    folds = BeautifulSoup(html, "html.parser").find_all("details")
    assert len(folds) == len(set(picks.values()))
    assert [fold.has_attr("open") for fold in folds] == [True] + [False] * (len(folds) - 1)
    assert not re.search(r"<script|https?:|url\(", html)
    assert len(html) < 200_000
    bundle = explorer._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/plain"} <= set(bundle)
    assert bundle["text/html"] == html


def test_nothing_is_said_by_colour_alone(run, explorer):
    place = explorer.blocks("drafter").place(explorer.picks("drafter", Filter())["median"])
    page = BeautifulSoup(explorer.html("drafter", *place, beside="reference"), "html.parser")
    for box in page.find(class_="lines").select(".got, .miss, .rest"):
        assert box.b.get_text() in "✓✗"
    for text in page.svg.find_all("text", class_="got")[1:]:
        assert text.get_text().startswith("✓")
    for cell in page.select("td.hit"):
        assert cell.find("small").get_text() == "target"


def test_where_nobody_can_move_a_control_the_static_twin_is_the_output(explorer, monkeypatch):
    import IPython

    class Kernel:
        _allow_stdin = False

    class Shell:
        kernel = Kernel()

    assert "application/vnd.jupyter.widget-view+json" in explorer._repr_mimebundle_()
    monkeypatch.setattr(IPython, "get_ipython", Shell)
    assert set(explorer._repr_mimebundle_()) == {"text/html", "text/plain"}
