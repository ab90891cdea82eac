"""Mask rules by hand, under attention, as a table, as a picture, and judged."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch.nn.attention.flex_attention import flex_attention

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fakes import FakeInputs, simulated_scores

from dflash_diag import diagnostics, plotting
from dflash_diag.conventions import Convention, Source
from dflash_diag.diagnostics.base import Continuation
from dflash_diag.drafter import sdpa_attention
from dflash_diag.errors import BadInput
from dflash_diag.masks import MaskRule, rules_of, visibility_frame
from dflash_diag.plotting.masks import MARKS, draw_visibility
from dflash_diag.results import Result, Verdict


def rule(size=2, **changes) -> MaskRule:
    return MaskRule(block_size=size, **changes)


def rows(anchor, n_context, **changes):
    return rule(**changes).rows(torch.tensor([anchor]), n_context)[0].int().tolist()


def test_context_by_hand():
    assert rows(2, 4) == [[1, 1, 0, 0]]
    assert rows(2, 4, context_bound="inclusive") == [[1, 1, 1, 0]]
    assert rows(3, 4, window=3) == [[0, 1, 1, 0], [0, 0, 1, 0]]
    assert rows(3, 4, window=2, window_rule="anchor") == [[0, 1, 1, 0]]
    documents = torch.tensor([0, 0, 1, 1, 1, -1, -1])
    seen = rule().rows(torch.tensor([1, 3, 6]), 7, documents)[:, 0].int().tolist()
    assert seen == [[1, 0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]]


def test_slots_by_hand():
    assert rule(3, in_block="causal").own().int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert rule(3, window=2).own().int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    assert rule(3, window=2, window_rule="anchor").own().all()
    anchors = torch.tensor([[1, 2]])
    later = rule(other_blocks="later").training(anchors, 0)[0].int().tolist()
    assert later == [[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]
    apart = torch.tensor([[0, 0, 1]])
    hidden = rule(other_blocks="later").training(anchors, 0, apart)
    assert torch.equal(hidden, rule().training(anchors, 0, apart))


def test_a_server_has_no_row_of_the_anchor_and_no_other_block():
    leaky = rule(3, context_bound="inclusive", other_blocks="all")
    assert leaky.serving(4).all()
    assert leaky.serving(4).shape == (3, 7)
    assert leaky.served == rule(3)


def test_a_value_that_no_rule_has_is_refused():
    with pytest.raises(BadInput, match="context_bound=loose.*strict, inclusive"):
        rule(context_bound="loose")


def reading(**changes) -> Convention:
    fields = {
        "block_size": 4,
        "layer_ids": (0, 1),
        "in_block": ("bidirectional", "bidirectional"),
        "window": (None, None),
        "rope_theta": 1e4,
        "rotary_width": 8,
        "mask_token_id": 3,
    }
    return Convention(**(fields | changes))


def test_a_reading_gives_a_rule_for_each_layer():
    common = {"context_bound": "inclusive", "other_blocks": "later", "window_rule": "anchor"}
    one = reading(in_block=("bidirectional", "causal"), window=(None, 7), **common)
    assert rules_of(one) == (
        rule(4, **common),
        rule(4, in_block="causal", window=7, **common),
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"context_bound": "inclusive", "other_blocks": "later"},
        {"in_block": "causal", "window": 6},
        {"window": 6, "window_rule": "anchor"},
    ],
)
def test_flex_attention_under_the_sparse_mask_is_attention_under_the_dense_one(changes):
    torch.manual_seed(0)
    one = rule(4, **changes)
    anchors = torch.tensor([[3, 9, 20], [8, 14, 30]])
    documents = torch.tensor([[0] * 12 + [1] * 20, [0] * 12 + [1] * 20])
    n_context = 32
    sparse = one.block_mask(anchors, n_context, documents, tile=8)
    dense = one.training(anchors, n_context, documents)
    n, queries, keys = dense.shape
    q, k, v = torch.randn(n, queries, 4, 16), *torch.randn(2, n, keys, 2, 16)
    expected = sdpa_attention(q, k, v, dense)
    found = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), block_mask=sparse, enable_gqa=True
    )
    torch.testing.assert_close(found.transpose(1, 2), expected, rtol=1e-5, atol=1e-5)
    everything = sdpa_attention(q, k, v, torch.ones_like(dense))
    assert not torch.allclose(expected, everything, atol=1e-2)


def test_a_sparse_mask_leaves_most_of_a_long_pass_out():
    anchors = torch.arange(0, 1024, 16)[None]
    sparse = rule(8).block_mask(anchors, 1024)
    assert sparse.shape == (1, 1, 512, 1536)
    assert sparse.sparsity() > 40


# --- as a table -----------------------------------------------------------------------------------


def test_the_table_holds_every_key_near_a_change():
    leaky = rule(4, context_bound="inclusive")
    frame = visibility_frame([leaky], [leaky.served], [40], 60, near=3)
    context = frame[frame["kind"] == "context"]
    assert sorted(context["key"].unique()) == [*range(37, 44)]
    assert context["key_anchor"].isna().all()
    leaks = frame[frame["training"] & ~frame["serving"]]
    assert set(leaks["key"]) == {40}
    assert sorted(leaks["slot"]) == [0, 1, 2, 3]
    own = frame[frame["kind"] == "own"]
    assert set(own["key"]) == {40, 41, 42, 43}
    assert set(own["key_anchor"]) == {40}
    assert own["training"].all()
    assert own["serving"].all()
    assert len(frame) == 4 * (7 + 4)


def test_the_table_follows_a_window_to_its_far_end():
    sliding = rule(4, window=20, window_rule="anchor")
    engines = rule(4, window=20)
    frame = visibility_frame([sliding], [engines], [40], 44, near=2)
    edge = frame[frame["training"] & ~frame["serving"]]
    assert edge.groupby("slot")["key"].agg(list).to_dict() == {
        0: [20],
        1: [20, 21],
        2: [20, 21, 22],
        3: [20, 21, 22, 23],
    }
    assert set(range(26, 38)).isdisjoint(frame["key"])


def test_the_table_lists_some_blocks_against_the_slots_of_all():
    leaky = rule(2, other_blocks="later")
    frame = visibility_frame([leaky] * 2, [leaky.served] * 2, [10, 12, 14], 20, blocks=[1])
    assert set(frame["anchor"]) == {12}
    assert set(frame["layers"]) == {"all"}
    other = frame[frame["kind"] == "other"]
    assert set(other["key_anchor"]) == {10, 14}
    assert set(other[other["training"]]["key"]) == {14, 15}
    assert not other["serving"].any()


def test_the_table_keeps_each_rule_once_and_documents_apart():
    full, sliding = rule(2), rule(2, in_block="causal", window=3)
    documents = [0] * 8 + [1] * 8
    frame = visibility_frame(
        [full, sliding, full], [full, sliding, full], [10], 16, documents=documents, near=9
    )
    assert list(dict.fromkeys(frame["layers"])) == ["0, 2", "1"]
    seen = frame[(frame["kind"] == "context") & frame["training"] & (frame["slot"] == 0)]
    assert seen.groupby("layers")["key"].agg(list).to_dict() == {"0, 2": [8, 9], "1": [8, 9]}
    assert list(visibility_frame([full], [full], [0], 0)["kind"].unique()) == ["own"]


# --- as a picture ---------------------------------------------------------------------------------


def drawn(ax) -> dict[str, set[tuple[float, float]]]:
    """Marks by their shape."""
    found: dict[str, set[tuple[float, float]]] = {}
    for line in ax.lines:
        points = zip(line.get_xdata(), line.get_ydata(), strict=True)
        found.setdefault(line.get_marker(), set()).update(points)
    return found


def heads(ax) -> list[str]:
    """What stands above the columns, from left to right."""
    return [text.get_text() for text in sorted(ax.texts, key=lambda text: text.xy[0])]


def test_the_picture_has_one_mark_for_each_slot_and_key():
    leaky = rule(4, context_bound="inclusive", other_blocks="later", in_block="causal")
    engine = replace(leaky.served, in_block="bidirectional")
    frame = visibility_frame([leaky], [engine], [38, 40, 42], 60, blocks=[1])
    ax = Figure().subplots()
    draw_visibility(frame, ax, {40: " if", 39: "\n"})
    found = drawn(ax)
    counts = frame.groupby(["training", "serving"]).size()
    assert len({mark.marker for mark in MARKS}) == 4  # told apart without colour
    for mark in MARKS:
        assert len(found[mark.marker]) == counts[mark.training, mark.serving] > 0
    assert sum(map(len, found.values())) == len(frame)
    assert heads(ax) == ["target states", "own block", "block at 38", "block at 42"]
    names = [tick.get_text() for tick in ax.get_xticklabels()]
    assert names[3:5] == ["↵", "␣if"]
    assert names.count("␣if") == 2  # its context row, and the slot that holds it
    words = [text.get_text() for text in ax.get_legend().get_texts()]
    assert words == [mark.words for mark in MARKS]


def test_the_picture_of_a_whole_pass_names_blocks_and_layers():
    full, sliding = rule(3), rule(3, window=2)
    frame = visibility_frame([full, full, sliding], [full, full, sliding], [10, 14], 20)
    ax = Figure().subplots()
    draw_visibility(frame, ax)
    assert heads(ax) == ["target states", "block at 10", "block at 14"]
    rows = [tick.get_text() for tick in ax.get_yticklabels() if "\n" in tick.get_text()]
    assert [row.splitlines()[0] for row in rows] == [
        "block at 10, layers 0, 1",
        "block at 14, layers 0, 1",
        "block at 10, layer 2",
        "block at 14, layer 2",
    ]
    assert len(ax.get_legend().get_texts()) == 2  # only what occurs


# --- judged ---------------------------------------------------------------------------------------


def judged(*, pieces=None, **changes) -> Result:
    """The diagnostic on simulated scores; the deepest anchor is in the second prompt, at 38."""
    scores = simulated_scores(skill=0.5, n_prompts=2, generated=20, proposed=3)
    scores.anchor[scores.prompt == 1] += 2
    texts = [Continuation("p00", 20, range(20)), Continuation("p01", 22, range(20), None, pieces)]
    inputs = FakeInputs({"drafter": scores}, {"drafter": "mine"})
    inputs.conventions, inputs.made_continuations = {"drafter": reading(**changes)}, texts
    return diagnostics.get("mask.visibility")(inputs)


def test_the_block_is_real_and_the_one_with_the_most_context():
    found = judged()
    assert found.verdict is Verdict.PASS
    assert found.params["prompt"] == "p01"
    assert found.params["anchor"] == 38
    assert set(found.frame["anchor"]) == {38}
    assert set(found.frame["key_anchor"].dropna()) == {36, 38, 40}
    assert found.params["labels"]["38"] == "16"
    assert judged(pieces=[f"w{i}" for i in range(20)]).params["labels"]["38"] == "w16"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_bound": "inclusive"}, "target state of their own anchor"),
        ({"other_blocks": "later"}, "slots of later blocks"),
        ({"other_blocks": "all"}, "slots of other blocks"),
    ],
)
def test_what_no_server_has_fails(changes, words):
    found = judged(**changes)
    assert found.verdict is Verdict.FAIL
    assert words in found.headline
    assert words in found.params["judged"]
    assert "X" in drawn(plotting.figure(found).axes[0])


CAUSAL = {"in_block": ("bidirectional", "causal")}


def test_a_window_that_engines_end_elsewhere_is_a_warning_where_it_shows():
    files = {
        "in_block": Source("layer_types", "implied"),
        "window": Source("layer_types", "declared"),
    }
    anchored = {**CAUSAL, "window_rule": "anchor", "sources": files}
    short = judged(window=(None, 6), **anchored)
    assert short.verdict is Verdict.WARN
    assert "up to 4 rows" in short.headline
    assert judged(window=(None, 36), **anchored).verdict is Verdict.WARN
    assert judged(window=(None, 99), **anchored).verdict is Verdict.PASS
    assert judged(window=(None, 6), **(anchored | {"window_rule": "slot"})).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("changes", "keys", "verdict", "words"),
    [
        # What servers assume of sliding layers without being told.
        ({**CAUSAL, "window": (None, 99)}, ("", "layer_types"), Verdict.PASS, ""),
        # Bidirectional sliding layers have to be declared where every server reads it.
        ({"window": (None, 99)}, ("is_causal", "layer_types"), Verdict.PASS, ""),
        ({"window": (None, 99)}, ("dflash_config.causal", "layer_types"), Verdict.WARN, "slots"),
        ({"window": (None, 99)}, ("", "layer_types"), Verdict.WARN, "no file"),
        ({"in_block": ("causal",) * 2}, ("is_causal", ""), Verdict.PASS, ""),
        ({"in_block": ("causal",) * 2}, ("--set in_block", ""), Verdict.WARN, "--set in_block"),
        ({**CAUSAL, "window": (None, 99)}, ("", "dflash_config.use_swa"), Verdict.WARN, "use_swa"),
    ],
)
def test_keys_that_not_every_server_reads_are_a_warning(changes, keys, verdict, words):
    sources = {
        field: Source(key, "declared")
        for field, key in zip(("in_block", "window"), keys, strict=True)
        if key
    }
    found = judged(**changes, sources=sources)
    assert found.verdict is verdict
    assert words in found.headline
