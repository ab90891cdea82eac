"""Drafters that choose their tokens otherwise, or bring their own embedding, head or vocabulary."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from dflash_diag.additions import ConvolutionShape, MarkovShape, SelectorShape
from dflash_diag.capture import make_capture
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.errors import BadInput
from dflash_diag.metrics import score_json
from dflash_diag.prompts import Prompt
from dflash_diag.proposals import Head, make_proposal
from dflash_diag.scoring import Scores, proposer, score
from tests import slow_scoring
from tests.tiny_world import VOCABULARY, write_target

SHAPE = DrafterShape(
    hidden_size=32, n_taps=2, n_layers=2, n_heads=4, n_kv_heads=2, head_width=8, mlp_size=48
)
READING = Convention(
    block_size=5,
    layer_ids=(0, 2),
    in_block=("bidirectional", "causal"),
    window=(None, None),
    rope_theta=10_000.0,
    rotary_width=8,
    mask_token_id=319,
)
REDUCED = 100
CONVOLUTION = ConvolutionShape(taps=3, groups=4)
SELECTOR = SelectorShape(n_tokens=VOCABULARY, rank=6, n_candidates=7)


def markov(kind, n_biased=VOCABULARY):
    return MarkovShape(n_before=VOCABULARY, n_biased=n_biased, rank=5, kind=kind)


OWN_HEAD, MAPPED = {"head": "own"}, {"head_rows": REDUCED, "has_map": True}
DRAFTERS = {
    "plain": ({}, {}),
    "own embedding": ({"embedding_rows": VOCABULARY + 3}, {"embedding": "own"}),
    "own head": ({"head_rows": VOCABULARY}, OWN_HEAD),
    "own head of fewer tokens": ({"head_rows": REDUCED}, OWN_HEAD),
    "reduced, offset": (MAPPED, OWN_HEAD | {"vocabulary_map": "offset"}),
    "reduced, absolute": (MAPPED, OWN_HEAD | {"vocabulary_map": "absolute"}),
    "Markov": ({"markov": markov("vanilla")}, {"proposal": "markov"}),
    "Markov, gated": ({"markov": markov("gated")}, {"proposal": "markov"}),
    "Markov, recurrent": (
        {"markov": markov("rnn")},
        {"proposal": "markov", "label_layout": "next"},
    ),
    "Markov, reduced": (
        MAPPED | {"markov": markov("gated", REDUCED)},
        OWN_HEAD | {"proposal": "markov", "vocabulary_map": "absolute", "label_layout": "next"},
    ),
    "convolutions": ({"convolution": CONVOLUTION}, {}),
    "selector": ({"selector": SELECTOR}, {"proposal": "selector"}),
    "selector and convolutions": (
        {"selector": SELECTOR, "convolution": CONVOLUTION},
        {"proposal": "selector", "label_layout": "next"},
    ),
}


def make_drafter(name, **reading):
    shape, changes = DRAFTERS[name]
    how = dataclasses.replace(READING, **(changes | reading))
    torch.manual_seed(0)
    drafter = Drafter(dataclasses.replace(SHAPE, **shape), how)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    if drafter.d2t is not None:
        tokens = torch.randperm(VOCABULARY)[:REDUCED].sort().values
        offset = how.vocabulary_map == "offset"
        drafter.d2t.copy_(tokens - torch.arange(REDUCED) if offset else tokens)
    return drafter.eval()


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("proposals")
    prompts = [
        Prompt(id="first", prompt_ids=(5, 9, 200, 31)),
        Prompt(id="second", prompt_ids=(7, 7, 8, 100, 101, 3, 250)),
    ]
    target = write_target(folder / "target")
    return make_capture(
        str(target), prompts, folder / "capture", max_new_tokens=20, layers="all", silent=True
    )


def slow_ratings(drafter, capture, rows, anchor_token):
    """One block's slots as ``{token of the target: log-probability}``, by plain loops."""
    weights, how = drafter.state_dict(), drafter.convention
    head = weights["lm_head.weight"] if how.head == "own" else capture.head
    names = list(range(len(head)))
    if how.vocabulary_map == "absolute":
        names = weights["d2t"].tolist()
    if how.vocabulary_map == "offset":
        names = [i + offset for i, offset in enumerate(weights["d2t"].tolist())]
    if how.proposal == "selector":
        scored = slow_scoring.selector_rows(weights, rows, anchor_token, head, 7)
    else:
        logits = rows @ head.T
        if how.proposal == "markov":
            logits = slow_scoring.markov_rows(weights, rows, anchor_token, head, names)
        scored = [dict(zip(names, row.tolist(), strict=True)) for row in logits]
    rated = []
    for slot in scored:
        norm = torch.tensor(list(slot.values())).logsumexp(0).item()
        rated.append({token: value - norm for token, value in slot.items()})
    return rated


@pytest.mark.parametrize("name", DRAFTERS)
@torch.inference_mode()
def test_equals_one_block_at_a_time(capture, name):
    drafter = make_drafter(name)
    how, weights = drafter.convention, drafter.state_dict()
    embedding = weights["embed_tokens.weight"] if how.embedding == "own" else capture.embedding
    scores = score(capture, drafter, silent=True)
    row = 0
    for i, prompt in enumerate(capture.prompts):
        tokens, states = capture.tokens(i), capture.states(i, how.taps)
        first = prompt.n_prompt_tokens
        for anchor in range(first, first + prompt.n_generated - how.n_proposed):
            read = slow_scoring.block_states(weights, how, tokens, states, anchor, embedding)
            labels = tokens[anchor + 1 : anchor + 1 + how.n_proposed].tolist()
            rated = slow_ratings(drafter, capture, read, int(tokens[anchor]))
            assert (scores.prompt[row], scores.anchor[row]) == (i, anchor)
            for k, (slot, label) in enumerate(zip(rated, labels, strict=True)):
                best = sorted(slot, key=slot.__getitem__, reverse=True)
                assert scores.labels[row, k] == label
                assert scores.proposed[row, k] == best[0]
                assert scores.rank[row, k] == (best.index(label) if label in slot else VOCABULARY)
                own = slot.get(label, -math.inf)
                np.testing.assert_allclose(scores.label_logprob[row, k], own, atol=2e-4)
                kept = [slot[token] for token in scores.topk_ids[row, k].tolist()]
                np.testing.assert_allclose(scores.topk_logprobs[row, k], kept, atol=2e-4)
                np.testing.assert_allclose(kept, [slot[t] for t in best[:64]], atol=2e-4)
            row += 1
    assert row == len(scores.anchor)


@pytest.mark.parametrize("name", DRAFTERS)
def test_slices_change_nothing_and_bound_the_logits(capture, name, monkeypatch):
    whole = score(capture, make_drafter(name), silent=True)
    made = []

    class Watched(Head):
        def logits(self, hidden, **how):
            out = super().logits(hidden, **how)
            made.append(out.numel() * out.element_size())
            return out

    monkeypatch.setattr("dflash_diag.proposals.Head", Watched)
    monkeypatch.setattr("dflash_diag.blocks.ANCHORS_AT_ONCE", 3)
    few = 4 * VOCABULARY * 7
    sliced = score(capture, make_drafter(name), slice_bytes=few, silent=True)
    assert max(made) <= few
    for field in ("proposed", "rank", "topk_ids"):
        np.testing.assert_array_equal(getattr(whole, field), getattr(sliced, field), err_msg=field)
    np.testing.assert_allclose(whole.label_logprob, sliced.label_logprob, atol=1e-5)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_decoding_loop_proposes_the_same(capture, name):
    drafter = make_drafter(name)
    scores = score(capture, drafter, silent=True)
    served = proposer(capture, drafter)
    tokens, first = capture.tokens(1), capture.prompts[1].n_prompt_tokens
    states = capture.states(1, served.taps)
    rows = np.flatnonzero(scores.prompt == 1)
    with torch.inference_mode():
        served.begin()
        served.observe(states[:first])
        for row, anchor in zip(rows, range(first, first + len(rows)), strict=True):
            assert served.propose(int(tokens[anchor]), anchor) == scores.proposed[row].tolist()
            served.observe(states[anchor : anchor + 1])


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_number_follows_and_survives_the_disk(capture, name, tmp_path):
    made = score(capture, make_drafter(name), silent=True)
    assert (made.topk_ids[..., 0] == made.proposed).all()
    assert ((made.rank == 0) == (made.proposed == made.labels)).all()
    made.save(tmp_path)
    read = Scores.load(tmp_path)
    for field in ("rank", "label_logprob", "topk_ids", "topk_logprobs"):
        np.testing.assert_array_equal(getattr(read, field), getattr(made, field), err_msg=field)
        assert not np.isnan(getattr(read, field)).any()
    found = score_json(read, seed=0, draws=200)
    streak = found["streak"]["uniform"]["value"]
    assert found["topk_oracle"]["1"]["value"] == pytest.approx(streak)
    assert found["tau"]["uniform_micro"]["value"] == pytest.approx(1 + streak)
    for n in ("1", "4", "8"):
        assert found["ddtree_tau"][n]["value"] <= 1 + found["topk_oracle"][n]["value"] + 1e-9


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_same_twice(capture, name):
    once, again = (score(capture, make_drafter(name), silent=True) for _ in range(2))
    np.testing.assert_array_equal(once.proposed, again.proposed)
    np.testing.assert_array_equal(once.topk_logprobs, again.topk_logprobs)


def test_each_part_matters(capture):
    """The comparisons above would pass on a scorer that ignores a part."""
    same = {"head": "target", "embedding": "target", "vocabulary_map": "none", "proposal": "argmax"}
    for name in DRAFTERS:
        drafter = make_drafter(name)
        ours = score(capture, drafter, silent=True)
        without = drafter.under(dataclasses.replace(drafter.convention, **same))
        if name in ("convolutions", "selector and convolutions"):
            for layer in without.stack:
                layer.attention_conv = layer.mlp_conv = None
        plain = score(capture, without, silent=True)
        assert (name == "plain") == np.array_equal(ours.proposed, plain.proposed), name


def test_both_kinds_of_map_say_the_same(capture):
    offset, absolute = make_drafter("reduced, offset"), make_drafter("reduced, absolute")
    assert (offset.d2t != absolute.d2t).any()
    ours, theirs = (score(capture, one, silent=True) for one in (offset, absolute))
    np.testing.assert_array_equal(ours.proposed, theirs.proposed)
    np.testing.assert_array_equal(ours.topk_ids, theirs.topk_ids)
    assert set(ours.proposed.ravel()) <= set(absolute.d2t.tolist())


def test_a_label_that_cannot_be_proposed_is_ranked_behind_everything(capture):
    drafter = make_drafter("reduced, absolute")
    scores = score(capture, drafter, silent=True)
    outside = ~np.isin(scores.labels, drafter.d2t.numpy())
    assert 0 < outside.sum() < outside.size
    assert (scores.rank[outside] == VOCABULARY).all()
    assert (scores.rank[~outside] < REDUCED).all()
    assert np.isneginf(scores.label_logprob[outside]).all()
    assert np.isfinite(scores.label_logprob[~outside]).all()


def test_with_the_target_s_head_the_whole_head_is_used(capture):
    """What the stacks do that ignore ``d2t``."""
    drafter = make_drafter("reduced, offset")
    drafter = drafter.under(dataclasses.replace(drafter.convention, head="target"))
    hidden, anchors = torch.randn(3, 4, 32), torch.zeros(3, dtype=torch.long)
    labels = torch.randint(VOCABULARY, (3, 4))
    made = make_proposal(drafter.convention, capture.head, drafter)
    made = made.score(hidden, anchors, labels)
    logits = hidden @ capture.head.T
    assert torch.equal(made.ids, logits.argmax(-1))
    expected = (logits > logits.gather(-1, labels[..., None])).sum(-1)
    assert torch.equal(made.rank.long(), expected)


def test_softcap_and_scale_shape_the_logits_before_the_bias():
    drafter = make_drafter("Markov", logit_scale=0.5, softcap=2.0)
    head, hidden, anchors = torch.randn(VOCABULARY, 32), torch.randn(2, 1, 32), torch.tensor([3, 9])
    with torch.inference_mode():
        made = make_proposal(drafter.convention, head, drafter).score(
            hidden, anchors, torch.zeros(2, 1, dtype=torch.long)
        )
        bias = drafter.markov_head.markov_w1[anchors] @ drafter.markov_head.markov_w2.T
        logits = 2.0 * torch.tanh(0.5 * (hidden[:, 0] @ head.T) / 2.0) + bias
    np.testing.assert_allclose(made.label_logprob[:, 0], logits.log_softmax(-1)[:, 0], atol=1e-5)


def test_equal_scores_of_candidates_go_to_the_lower_id():
    drafter = make_drafter("selector")
    torch.nn.init.zeros_(drafter.candidate_selector.successor_codebook)
    head = torch.zeros(VOCABULARY, 32)
    head[[40, 30, 20, 10, 50, 60, 70], 0] = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 0.5, 0.5])
    hidden = torch.zeros(1, 2, 32)
    hidden[..., 0] = 1.0
    labels = torch.tensor([[20, 11]])
    made = make_proposal(drafter.convention, head, drafter).score(hidden, torch.tensor([1]), labels)
    assert made.topk_ids[0].tolist() == [[10, 30, 20, 40, 50, 60, 70]] * 2
    assert made.rank.tolist() == [[2, VOCABULARY]]


@pytest.mark.parametrize(
    ("name", "reading", "message"),
    [
        ("plain", {"proposal": "oracle"}, "proposal=oracle; expected one of argmax, markov"),
        ("plain", {"proposal": "markov"}, "a drafter with a Markov head"),
        ("plain", {"proposal": "selector"}, "a drafter with a candidate selector"),
        ("plain", {"head": "own"}, "a head of its own"),
        ("plain", {"embedding": "own"}, "a drafter with an embedding"),
        ("own head", {"vocabulary_map": "offset"}, "a drafter with a map"),
        ("Markov, reduced", {"head": "target"}, "markov_w2 has 100 rows; expected 320"),
        ("reduced, offset", {"proposal": "selector"}, "a drafter with a candidate selector"),
    ],
)
def test_what_does_not_fit_is_refused(capture, name, reading, message):
    drafter = make_drafter(name)
    drafter = drafter.under(dataclasses.replace(drafter.convention, **reading))
    with pytest.raises(BadInput, match=message):
        score(capture, drafter, silent=True)


@pytest.mark.parametrize(
    ("kind", "d2t", "message"),
    [
        ("absolute", [0, 0, 1, 1], "only 2 tokens; expected 4.*vocabulary_map=offset"),
        ("offset", [7, 8, 9, 10], "leads to token 11; .*below 11.*vocabulary_map=absolute"),
        ("absolute", [-1, 2, 3, 4], "leads to token -1"),
    ],
)
def test_a_map_of_the_other_kind_is_refused(kind, d2t, message):
    how = dataclasses.replace(READING, head="own", vocabulary_map=kind)
    drafter = Drafter(dataclasses.replace(SHAPE, head_rows=4, has_map=True), how)
    drafter.d2t.copy_(torch.tensor(d2t))
    with pytest.raises(BadInput, match=message):
        make_proposal(how, torch.zeros(11, 32), drafter)


@pytest.mark.parametrize(
    ("shape", "reading", "message"),
    [
        ({"head_rows": 12}, OWN_HEAD, "lm_head.weight has 12 rows; expected at most 11"),
        ({"selector": SelectorShape(11, 2, 12)}, {"proposal": "selector"}, "selector_top_k is 12"),
        ({"selector": SelectorShape(10, 2, 3)}, {"proposal": "selector"}, "codebooks: 10 rows"),
        (
            {"markov": MarkovShape(10, 11, 2, "vanilla")},
            {"proposal": "markov"},
            "markov_w1: 10 rows; expected at least 11",
        ),
    ],
)
def test_sizes_that_do_not_fit_the_target(shape, reading, message):
    how = dataclasses.replace(READING, **reading)
    drafter = Drafter(dataclasses.replace(SHAPE, **shape), how)
    with pytest.raises(BadInput, match=message):
        make_proposal(how, torch.zeros(11, 32), drafter)


def test_an_own_embedding_too_small_for_the_target(capture):
    how = dataclasses.replace(READING, embedding="own")
    drafter = Drafter(dataclasses.replace(SHAPE, embedding_rows=VOCABULARY - 1), how)
    with pytest.raises(BadInput, match="own embedding has 319 rows; expected at least 320"):
        score(capture, drafter, silent=True)
