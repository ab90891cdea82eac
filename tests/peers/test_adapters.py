"""z-lab's own model behind the five functions: the logits of ours, and nothing that it should not
read."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from dflash_diag.adapters.bench import Bench, change
from dflash_diag.adapters.builtin import Builtin
from dflash_diag.adapters.zlab import ZLab
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.influence import probe

sys.path.insert(0, str(Path(__file__).parent))
from test_zlab_model import HIDDEN, LAYER_IDS, MIXED, VOCAB, z_lab_model

pytestmark = [
    # It still uses the cache under its former name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]
VARIANTS = {
    "full and bidirectional": {},
    "causal": {"is_causal": True},
    "full and sliding": MIXED,
    "all sliding": {**MIXED, "layer_types": ["sliding_attention"] * 3},
    "scaled": {"input_embedding_scale": 3.0, "output_multiplier": 0.5},
}
N, ANCHORS = 30, (12, 21)


def inputs():
    generator = torch.Generator().manual_seed(4)
    features = torch.randn(N, len(LAYER_IDS), HIDDEN, generator=generator)
    tokens = torch.randint(6, VOCAB, (N,), generator=generator)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    head[5] = 0  # the mask token
    return features, tokens, embedding, head


def both(overrides, folder):
    """Their model and ours, read from the folder that theirs was saved to."""
    model = z_lab_model(overrides).requires_grad_(False)
    model.save_pretrained(folder)
    checkpoint = read_checkpoint(folder)
    how = resolve_convention(checkpoint)
    ours = load_drafter(checkpoint, how, dtype=torch.float32)
    _, _, embedding, head = inputs()
    return ZLab(model, embedding, head), Builtin(ours, embedding, head), how


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_the_same_logits_through_its_cache(name, tmp_path):
    theirs, ours, how = both(VARIANTS[name], tmp_path)
    features, tokens, _, _ = inputs()
    spec, other = theirs.spec(), ours.spec()
    for field in ("block_size", "n_proposed", "layer_ids", "mask_token_id", "layout"):
        assert getattr(spec, field) == getattr(other, field)
    for anchor in (2, 7, 12, 21):
        one, two = (
            Bench.of(adapter, features, tokens, (anchor,)).logits(anchor)
            for adapter in (theirs, ours)
        )
        assert change(one, two).max() < 1e-4
        assert torch.equal(one.argmax(-1), two.argmax(-1))
    assert list(how.window) == [layer.self_attn.sliding_window for layer in theirs.model.layers]


@pytest.mark.parametrize("name", VARIANTS)
def test_it_reads_what_its_convention_says(name, tmp_path):
    theirs, ours, how = both(VARIANTS[name], tmp_path)
    features, tokens, _, _ = inputs()
    found = probe(theirs, features, tokens, ANCHORS, how)
    assert found.clean, (found.found, found.differing)
    same = probe(ours, features, tokens, ANCHORS, how)
    columns = ["kind", "anchor", "slot", "first"]
    one, two = (each.frame[lambda f: f["kind"].isin(["row", "slot"])] for each in (found, same))
    both_ways = one.merge(two, on=columns, suffixes=("", "_ours"))
    # Theirs refuses rows beyond the anchor where a sliding layer could not drop them again.
    assert len(both_ways) == len(one) > 100
    torch.testing.assert_close(
        *(torch.tensor(both_ways[name].to_numpy()) for name in ("influence", "influence_ours")),
        rtol=1e-2,
        atol=1e-4,
    )


def test_what_a_sliding_cache_has_dropped_is_not_given_back(tmp_path):
    theirs, _, how = both(VARIANTS["all sliding"], tmp_path)
    features, tokens, _, _ = inputs()
    found = probe(theirs, features, tokens, ANCHORS, how)
    row = next(one for one in found.checks if one["check"] == "truncated")
    assert row["status"] == "not testable"
    assert "has dropped rows" in row["reason"]


def test_a_reading_that_it_does_not_follow_is_named(tmp_path):
    theirs, _, how = both({"is_causal": True}, tmp_path)
    features, tokens, _, _ = inputs()
    wrong = dataclasses.replace(how, in_block=("bidirectional",) * 3)
    found = probe(theirs, features, tokens, ANCHORS, wrong)
    assert [one["cause"] for one in found.found] == ["mask.block_causality"]


def test_its_model_without_a_crop_reads_whatever_it_is_given(tmp_path):
    """The bound on the context is the caller's to keep: the model has none."""

    class Uncropped(ZLab):
        def propose_block(self, state, block, anchor_pos):
            everything = state._replace(positions=torch.full_like(state.positions, -1))
            return super().propose_block(everything, block, anchor_pos)

    theirs, _, how = both({}, tmp_path)
    features, tokens, _, _ = inputs()
    found = probe(
        Uncropped(theirs.model, theirs.embedding, theirs.head), features, tokens, ANCHORS, how
    )
    assert {"mask.anchor_included", "mask.future_included"} <= {one["cause"] for one in found.found}
