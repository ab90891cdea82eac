"""Our masks against other people's: speculators' training mask and z-lab's serving mask."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest
import torch
from dflash.model import _attention_mask
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from dflash_diag.masks import MaskRule


def speculators_file(path: str):
    """One file of the installed package, run by itself: importing the package takes all of it."""
    try:
        place = metadata.distribution("speculators").locate_file(f"speculators/{path}")
    except metadata.PackageNotFoundError:
        pytest.skip("speculators is not installed: pip install --no-deps speculators==0.9.0")
    spec = importlib.util.spec_from_file_location("speculators_file", str(place))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def theirs():
    """``create_anchor_block_mask_mod`` as a dense mask."""
    build = speculators_file("models/dflash/attention.py").create_anchor_block_mask_mod

    def dense(documents, anchors, block_size, window, non_causal):
        mod, queries, keys = build(
            document_ids=documents,
            total_seq_len=len(documents),
            anchor_positions=anchors,
            block_size=block_size,
            sliding_window=window,
            sliding_window_non_causal=non_causal,
        )
        return create_mask(mod, 1, 1, queries, keys, device="cpu")[0, 0]

    return dense


def packed(lengths: list[int], n_padding: int) -> torch.Tensor:
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.cat([ids, torch.full((n_padding,), -1)])


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    n_padding=st.integers(0, 5),
    places=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    block_size=st.integers(2, 5),
    window=st.none() | st.integers(1, 12),
    non_causal=st.booleans(),
)
def test_the_training_mask_of_speculators_element_by_element(
    theirs, lengths, n_padding, places, block_size, window, non_causal
):
    """Also where blocks run past their document's end, and where anchors repeat or are padding."""
    documents = packed(lengths, n_padding)
    anchors = torch.tensor([place % len(documents) for place in places])
    rule = MaskRule(
        block_size=block_size,
        in_block="bidirectional" if window is None or non_causal else "causal",
        window=window,
        window_rule="anchor",
    )
    ours = rule.training(anchors[None], len(documents), documents[None])[0]
    assert torch.equal(theirs(documents, anchors, block_size, window, non_causal), ours)


def test_how_speculators_windows_differ_from_an_engines(theirs):
    """Trained: W rows below the anchor for every slot. Served: slot k has moved k+1 rows on."""
    anchor, size, window = 30, 5, 8
    trained = theirs(packed([40], 0), torch.tensor([anchor]), size, window, True)
    served = MaskRule(block_size=size, window=window).serving(anchor)
    more = trained[:, :anchor] & ~served[:, :anchor]
    assert not (served[:, :anchor] & ~trained[:, :anchor]).any()
    assert [row.nonzero().flatten().tolist() for row in more] == [
        list(range(anchor - window, anchor - window + k + 1)) for k in range(size)
    ]


def test_anchors_of_speculators_keep_a_block_in_the_text_but_not_in_its_document():
    """So a block's labels can come from the next document; its mask does not reach there."""
    select = speculators_file("models/dflash/utils.py").select_anchors
    documents = packed([6, 6], 0)
    torch.manual_seed(0)
    anchors, valid = select(torch.ones(1, 12), 12, 4)
    assert sorted(anchors[valid].tolist()) == [*range(8)]
    rule = MaskRule(block_size=4)
    over_the_end = rule.training(torch.tensor([[5]]), 12, documents[None])[0]
    assert over_the_end[:, :12].int().tolist() == [[1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]] * 4
    assert over_the_end[:, 12:].all()


@given(
    anchor=st.integers(0, 30),
    block_size=st.integers(2, 8),
    window=st.none() | st.integers(1, 20),
    is_causal=st.booleans(),
)
def test_the_serving_mask_of_z_lab_element_by_element(anchor, block_size, window, is_causal):
    """Their windows are counted from the slot, in the context and in the block."""
    query, key = torch.empty(1, 1, block_size, 4), torch.empty(1, 1, anchor + block_size, 4)
    theirs = _attention_mask(query, key, is_causal=is_causal, sliding_window=window)[0, 0]
    kind = "causal" if is_causal else "bidirectional"
    rule = MaskRule(block_size=block_size, in_block=kind, window=window)
    assert torch.equal(rule.serving(anchor), theirs)
