"""All anchors at once give what one block at a time gives, under every reading."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from dflash_diag.bundle import Capture
from dflash_diag.capture import make_capture
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.errors import BadInput, CaptureError
from dflash_diag.metrics import score_json
from dflash_diag.prompts import Prompt
from dflash_diag.proposals import make_proposal
from dflash_diag.scoring import Scores, proposer, score
from tests import slow_scoring
from tests.tiny_world import write_drafter, write_target

SHAPE = DrafterShape(
    hidden_size=32, n_taps=2, n_layers=2, n_heads=4, n_kv_heads=2, head_width=8, mlp_size=48
)
READING = Convention(
    block_size=5,
    layer_ids=(0, 2),
    in_block=("bidirectional",) * 2,
    window=(None, None),
    rope_theta=10_000.0,
    rotary_width=8,
    mask_token_id=319,
)


def make_drafter(how=READING, seed=0):
    torch.manual_seed(seed)
    drafter = Drafter(SHAPE, how)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    return drafter.eval()


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoring")
    prompts = [
        Prompt(id="first", prompt_ids=(5, 9, 200, 31)),
        Prompt(id="second", prompt_ids=(7, 7, 8, 100, 101, 3, 250)),
        Prompt(id="one token", prompt_ids=(42,)),
    ]
    target = write_target(folder / "target")
    return make_capture(
        str(target), prompts, folder / "capture", max_new_tokens=20, layers="all", silent=True
    )


def test_a_thinned_capture_is_refused(capture, tmp_path):
    like = {"like": capture, "keep_rows": 5, "layers": "all", "silent": True}
    thin = make_capture(str(capture.path.parent / "target"), (), tmp_path / "thin", **like)
    with pytest.raises(CaptureError, match="some positions only .*capture again without keep_rows"):
        score(thin, make_drafter(), silent=True)


READINGS = {
    "declared": READING,
    "anchor in the context": dataclasses.replace(READING, context_bound="inclusive"),
    "causal block": dataclasses.replace(READING, in_block=("causal", "bidirectional")),
    "position + 1": dataclasses.replace(READING, position_offset=1),
    "next-token layout": dataclasses.replace(READING, label_layout="next"),
    "window by slot": dataclasses.replace(READING, window=(6, None)),
    "window by anchor": dataclasses.replace(READING, window=(6, 3), window_rule="anchor"),
    "ids name inputs": dataclasses.replace(READING, layer_ids=(1, 3), layer_id_rule="input"),
    "another theta": dataclasses.replace(READING, rope_theta=500.0),
}


@pytest.mark.parametrize("name", READINGS)
def test_equals_one_block_at_a_time(capture, name):
    how = READINGS[name]
    drafter = make_drafter(how)
    scores = score(capture, drafter, silent=True)
    weights = {k: v.detach() for k, v in drafter.state_dict().items()}
    row = 0
    for i, prompt in enumerate(capture.prompts):
        tokens, states = capture.tokens(i), capture.states(i, how.taps)
        first = prompt.n_prompt_tokens
        for anchor in range(first, first + prompt.n_generated - how.n_proposed):
            logprobs = slow_scoring.one_block(
                weights, how, tokens, states, anchor, capture.embedding, capture.head
            )
            labels = tokens[anchor + 1 : anchor + 1 + how.n_proposed]
            assert (scores.prompt[row], scores.anchor[row]) == (i, anchor)
            np.testing.assert_array_equal(scores.labels[row], labels)
            np.testing.assert_array_equal(scores.proposed[row], logprobs.argmax(-1))
            own = logprobs.gather(-1, labels[:, None])
            np.testing.assert_allclose(scores.label_logprob[row], own[:, 0], atol=2e-4)
            np.testing.assert_array_equal(scores.rank[row], (logprobs > own).sum(-1))
            values = logprobs.sort(-1, descending=True).values[:, :64]
            np.testing.assert_allclose(scores.topk_logprobs[row], values, atol=2e-4)
            row += 1
    assert row == len(scores.anchor)


def test_other_readings_give_other_numbers(capture):
    """The comparison above would pass on a scorer that ignores its convention."""
    found = {name: score(capture, make_drafter(how), silent=True) for name, how in READINGS.items()}
    declared = found.pop("declared")
    found.pop("ids name inputs")  # the same layers by their other names
    for name, other in found.items():
        if other.labels.shape == declared.labels.shape:
            assert not np.allclose(other.label_logprob, declared.label_logprob), name


def test_slices_and_anchor_batches_change_nothing(capture, monkeypatch):
    whole = score(capture, make_drafter(), silent=True)
    monkeypatch.setattr("dflash_diag.blocks.ANCHORS_AT_ONCE", 3)
    sliced = score(capture, make_drafter(), slice_bytes=4 * 320 * 7, silent=True)
    np.testing.assert_array_equal(whole.proposed, sliced.proposed)
    np.testing.assert_array_equal(whole.rank, sliced.rank)
    np.testing.assert_allclose(whole.label_logprob, sliced.label_logprob, atol=1e-5)


def test_a_prompt_a_thread_gives_the_bytes_of_one_thread(capture):
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append(score(capture, make_drafter(), silent=True))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for field in ("prompt", "anchor", "proposed", "rank", "topk_ids", "topk_logprobs"):
        np.testing.assert_array_equal(getattr(made[0], field), getattr(made[1], field))


def test_scoring_leaves_tensors_that_gradients_may_use(capture):
    fresh = Capture.load(capture.path)
    score(fresh, make_drafter(), silent=True)
    assert not fresh.embedding.is_inference()
    assert not fresh.head.is_inference()


def test_saved_scores_are_the_same(capture, tmp_path):
    made = score(capture, make_drafter(), provenance={"seed": 3}, silent=True)
    made.save(tmp_path / "scores")
    read = Scores.load(tmp_path / "scores")
    for field in dataclasses.fields(Scores):
        ours, theirs = getattr(made, field.name), getattr(read, field.name)
        if isinstance(ours, np.ndarray):
            np.testing.assert_array_equal(ours, theirs, err_msg=field.name)
        else:
            assert json.loads(json.dumps(ours)) == theirs, field.name
    assert score_json(read, seed=0, draws=200) == score_json(made, seed=0, draws=200)


def test_ended_prompts_are_listed(capture):
    wide = dataclasses.replace(READING, block_size=21)
    with pytest.raises(BadInput, match="none of 3 prompts has more than 20 generated tokens"):
        score(capture, make_drafter(wide), silent=True)


def test_a_layer_that_was_not_captured(capture):
    with pytest.raises(CaptureError, match="no states of layer 7"):
        score(capture, make_drafter(dataclasses.replace(READING, layer_ids=(0, 7))), silent=True)


def test_the_decoding_loop_proposes_the_same(capture):
    drafter = make_drafter()
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


def test_ties_go_to_the_lower_id():
    head = torch.tensor([[0.0], [1.0], [1.0], [0.5], [1.0]])
    hidden, labels = torch.ones(1, 3, 1), torch.tensor([[2, 4, 3]])
    made = make_proposal(READING, head).score(hidden, torch.zeros(1), labels)
    assert made.ids.tolist() == [[1, 1, 1]]
    assert made.topk_ids[0, 0].tolist() == [1, 2, 4, 3, 0]
    assert made.rank.tolist() == [[1, 2, 3]]


def test_rank_beyond_the_stored_candidates():
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(300, 8, generator=generator)
    hidden = torch.randn(4, 2, 8, generator=generator)
    labels = torch.randint(300, (4, 2), generator=generator)
    made = make_proposal(READING, head).score(hidden, torch.zeros(4), labels)
    logits = hidden @ head.T
    expected = (logits > logits.gather(-1, labels[..., None])).sum(-1)
    assert (expected > 64).any()
    np.testing.assert_array_equal(made.rank, expected)


def test_softcap_and_scale_shape_the_distribution():
    how = dataclasses.replace(READING, logit_scale=0.5, softcap=2.0)
    head, hidden = torch.randn(20, 4), torch.randn(2, 3, 4)
    labels = torch.zeros(2, 3, dtype=torch.long)
    made = make_proposal(how, head).score(hidden, torch.zeros(2), labels)
    logits = 2.0 * torch.tanh(0.5 * (hidden @ head.T) / 2.0)
    np.testing.assert_allclose(made.label_logprob, logits.log_softmax(-1)[..., 0], atol=1e-5)


WITHOUT_A_NETWORK = """
import socket, sys
class Refusing(socket.socket):
    def __init__(self, *args, **kwargs):
        raise OSError("no network")
socket.socket = Refusing
from dflash_diag import Capture, load_drafter, read_checkpoint, resolve_convention, score
checkpoint = read_checkpoint(sys.argv[2])
drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
scores = score(Capture.load(sys.argv[1]), drafter, silent=True)
print(len(scores.anchor), "transformers" in sys.modules)
"""


def test_scoring_needs_no_network_and_no_target(tmp_path):
    target = write_target(tmp_path / "target")
    prompts = [Prompt(id="one", prompt_ids=(5, 9, 200, 31))]
    made = make_capture(
        str(target), prompts, tmp_path / "capture", max_new_tokens=9, layers="all", silent=True
    )
    drafter = write_drafter(tmp_path / "drafter")
    shutil.rmtree(target)
    out = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_NETWORK, made.path, drafter],
        capture_output=True,
        text=True,
        check=True,
    )
    assert out.stdout.split() == ["5", "False"]
