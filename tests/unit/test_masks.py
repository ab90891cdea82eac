"""Mask rules by hand, under attention, and as a table."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from dflash_diag.conventions import Convention
from dflash_diag.drafter import sdpa_attention
from dflash_diag.errors import BadInput
from dflash_diag.masks import MaskRule, rules_of, visibility_frame


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


def test_a_reading_gives_a_rule_for_each_layer():
    reading = Convention(
        block_size=4,
        layer_ids=(0, 1),
        context_bound="inclusive",
        in_block=("bidirectional", "causal"),
        other_blocks="later",
        window=(None, 7),
        window_rule="anchor",
        rope_theta=1e4,
        rotary_width=8,
        mask_token_id=3,
    )
    common = {"context_bound": "inclusive", "other_blocks": "later", "window_rule": "anchor"}
    full, sliding = rules_of(reading)
    assert full == rule(4, **common)
    assert sliding == rule(4, in_block="causal", window=7, **common)


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
