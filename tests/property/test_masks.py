"""A mask rule against its definition in words, and all its forms against each other."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from dflash_diag.masks import CHOICES, MaskRule


@st.composite
def rules(draw, **fixed):
    chosen = {name: draw(st.sampled_from(allowed)) for name, allowed in CHOICES.items()}
    window = draw(st.none() | st.integers(1, 9))
    return MaskRule(block_size=draw(st.integers(2, 4)), window=window, **{**chosen, **fixed})


@st.composite
def passes(draw, max_anchors=4):
    """Anchors [N, A], context rows and packed documents [N, P] (or none) of a training pass."""
    n, n_anchors = draw(st.integers(1, 2)), draw(st.integers(1, max_anchors))
    length = draw(st.integers(1, 12))
    n_context = draw(st.integers(0, length))
    anchors = [[draw(st.integers(0, length - 1)) for _ in range(n_anchors)] for _ in range(n)]
    documents = None
    if draw(st.booleans()):
        documents = torch.tensor([packed(draw, length) for _ in range(n)])
    return torch.tensor(anchors), n_context, documents


def packed(draw, length):
    """Documents one after the other, then padding."""
    ids, at = [], 0
    while len(ids) < length:
        ids += [at] * draw(st.integers(1, length))
        at += 1
    n_padding = draw(st.integers(0, length - 1))
    return ids[: length - n_padding] + [-1] * n_padding


def in_words(rule, anchors, n_context, documents, query, key):
    """Whether a query of one sequence sees a key, said as the documentation says it."""
    block, slot = divmod(query, rule.block_size)
    anchor, window = anchors[block], rule.window
    place = (lambda p: 0) if documents is None else documents.__getitem__
    if key < n_context:
        seen = key < anchor or (key == anchor and rule.context_bound == "inclusive")
        seen = seen and place(key) == place(anchor) != -1
        if window is None:
            return seen
        first = anchor + slot - window + 1 if rule.window_rule == "slot" else anchor - window
        return seen and key >= first
    other, other_slot = divmod(key - n_context, rule.block_size)
    if other == block:
        near = window is None or rule.window_rule == "anchor" or abs(slot - other_slot) < window
        return near and (rule.in_block == "bidirectional" or other_slot <= slot)
    if rule.other_blocks == "hidden" or not place(anchors[other]) == place(anchor) != -1:
        return False
    return rule.other_blocks == "all" or anchors[other] > anchor


@given(rules(), passes())
def test_the_dense_mask_is_the_definition(rule, given_pass):
    anchors, n_context, documents = given_pass
    found = rule.training(anchors, n_context, documents)
    slots = anchors.shape[1] * rule.block_size
    assert found.shape == (len(anchors), slots, n_context + slots)
    for i, row in enumerate(anchors.tolist()):
        ids = None if documents is None else documents[i].tolist()
        expected = [
            [in_words(rule, row, n_context, ids, q, key) for key in range(n_context + slots)]
            for q in range(slots)
        ]
        assert found[i].tolist() == expected


@given(rules(), passes())
def test_the_function_of_indices_is_the_dense_mask(rule, given_pass):
    anchors, n_context, documents = given_pass
    dense = rule.training(anchors, n_context, documents)
    n, queries, keys = dense.shape
    mod = rule.mask_mod(anchors, n_context, documents)
    assert torch.equal(create_mask(mod, n, 1, queries, keys, device="cpu")[:, 0], dense)


@given(rules(), passes(), st.sampled_from([1, 2, 4, 16]))
def test_the_block_sparse_mask_is_the_dense_mask(rule, given_pass, tile):
    """Tiles that it calls full are full, those that it leaves out are empty, no other differs."""
    anchors, n_context, documents = given_pass
    dense = rule.training(anchors, n_context, documents)
    sparse = rule.block_mask(anchors, n_context, documents, tile=tile)
    n, queries, keys = dense.shape
    padded = torch.nn.functional.pad(dense, (0, -keys % tile, 0, -queries % tile))
    tiles = padded.unflatten(2, (-1, tile)).unflatten(1, (-1, tile)).transpose(2, 3).flatten(3)
    partial = listed(sparse.kv_num_blocks, sparse.kv_indices)
    full = listed(sparse.full_kv_num_blocks, sparse.full_kv_indices)
    for place in product(*map(range, tiles.shape[:3])):
        assert (place in full) == bool(tiles[place].all()), place
        assert (place in partial) == bool(tiles[place].any() and not tiles[place].all()), place
    assert torch.equal(create_mask(sparse.mask_mod, n, 1, queries, keys, device="cpu")[:, 0], dense)


def listed(counts, indices):
    """(sequence, tile of queries, tile of keys) of a block-sparse mask's lists."""
    return {
        (i, q, key)
        for i, rows in enumerate(indices[:, 0].tolist())
        for q, keys in enumerate(rows)
        for key in keys[: int(counts[i, 0, q])]
    }


@given(rules(context_bound="strict", other_blocks="hidden"), passes())
def test_a_block_trained_among_others_sees_what_a_server_shows_it(rule, given_pass):
    """In its own document, whose tokens are all that a server knows of."""
    anchors, _, documents = given_pass
    n_context = int(anchors.max()) + 1
    size = rule.block_size
    trained = rule.training(anchors, n_context, documents)
    for i, row in enumerate(anchors.tolist()):
        for j, anchor in enumerate(row):
            start = 0
            if documents is not None:
                ids = documents[i].tolist()
                start = ids.index(ids[anchor]) if ids[anchor] >= 0 else anchor
            queries = slice(j * size, (j + 1) * size)
            rows = trained[i, queries, start:anchor]
            own = trained[i, queries, n_context + j * size : n_context + (j + 1) * size]
            assert torch.equal(torch.cat([rows, own], -1), rule.serving(anchor - start))
            assert int(trained[i, queries].sum()) == int(rows.sum() + own.sum())  # and no more


@given(rules(), passes())
def test_what_is_served_is_part_of_what_is_trained(rule, given_pass):
    trained, served = (one.training(*given_pass) for one in (rule, rule.served))
    assert not (served & ~trained).any()
    if rule == rule.served:
        assert torch.equal(served, trained)


@given(rules(), passes())
def test_one_row_stands_for_all_slots_only_where_they_agree(rule, given_pass):
    anchors, n_context, documents = given_pass
    rows = rule.rows(anchors, n_context, documents)
    slides = rule.window is not None and rule.window_rule == "slot"
    assert rows.shape[-2] == (rule.block_size if slides else 1)
    every = rows.expand(*anchors.shape, rule.block_size, n_context).flatten(1, 2)
    assert torch.equal(every, rule.training(*given_pass)[..., :n_context])
