"""Every drafter of the example: scored as the command line does, and by slow recomputation."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.metrics import measure, score_json
from dflash_diag.scoring import Scores, score
from tests import slow_scoring
from tests.conftest import ZOO

DRAFTERS = sorted(p.name for p in (ZOO / "hybrid" / "drafters").glob("*"))
SLOW_PROMPTS = 2
ROWS = ("prompt", "anchor", "labels", "proposed", "rank", "label_logprob")
COLUMNS = (*ROWS, "topk_ids", "topk_logprobs")


def scores_of(capture, name, *settings) -> Scores:
    checkpoint = read_checkpoint(ZOO / "hybrid" / "drafters" / name)
    convention = resolve_convention(checkpoint, settings=settings)
    return score(capture, load_drafter(checkpoint, convention, dtype=torch.float32), silent=True)


def only_first(scores: Scores, n: int) -> Scores:
    """The rows of the first ``n`` prompts."""
    kept = scores.prompt < n
    rows = {
        name: getattr(scores, name)[kept]
        for name in (
            "prompt",
            "anchor",
            "labels",
            "proposed",
            "rank",
            "label_logprob",
            "topk_ids",
            "topk_logprobs",
        )
    }
    return Scores(
        prompt_ids=scores.prompt_ids[:n],
        n_prompt_tokens=scores.n_prompt_tokens[:n],
        n_generated=scores.n_generated[:n],
        unscored=[],
        block_size=scores.block_size,
        convention=scores.convention,
        provenance={},
        **rows,
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_numbers_are_those_of_slow_recomputation(hybrid_capture, name):
    scores = only_first(scores_of(hybrid_capture, name), SLOW_PROMPTS)
    found = json.loads(json.dumps(score_json(scores, seed=0, draws=100)))
    folder = ZOO / "hybrid" / "drafters" / name
    how = resolve_convention(read_checkpoint(folder))
    weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
    embedding, head = hybrid_capture.embedding.float(), hybrid_capture.head.float()
    blocks, prompts = {}, {}
    for i, prompt in enumerate(hybrid_capture.prompts[:SLOW_PROMPTS]):
        tokens, states = hybrid_capture.tokens(i), hybrid_capture.states(i, how.taps).float()
        first = prompt.n_prompt_tokens
        last = first + prompt.n_generated - 1 - how.n_proposed
        prompts[prompt.id] = (first, last)
        with torch.no_grad():
            blocks[prompt.id] = {
                anchor: (
                    slow_scoring.one_block(
                        weights, how, tokens, states, anchor, embedding, head
                    ).tolist(),
                    tokens[anchor + 1 : anchor + 1 + how.n_proposed].tolist(),
                )
                for anchor in range(first, last + 1)
            }
    slow = slow_scoring.summary(blocks, prompts, how.n_proposed)
    assert found["n_anchors"] == slow["n_anchors"]
    assert found["n_rounds"] == slow["n_rounds"]
    assert {row["id"]: row["rounds"] for row in found["per_prompt"]} == slow["rounds"]
    for group in ("tau", "streak", "topk_oracle", "ddtree_tau"):
        for key, value in slow[group].items():
            assert found[group][key]["value"] == pytest.approx(value, abs=1e-9), (group, key)
    for column in ("marginal", "survival", "conditional"):
        ours = [row[column] for row in found["by_position"]]
        assert ours == pytest.approx(slow[column], abs=1e-9), column


OWN_READING = {
    "anchor_included": ("context_bound=inclusive",),
    "block_causal": ("in_block=causal",),
    "position_plus_one": ("position_offset=1",),
    "layer_offset": ("layer_ids=0,3,6,9,12",),
}


@pytest.mark.parametrize("name", OWN_READING)
def test_reading_faults_are_undone_by_their_own_reading(hybrid_capture, name):
    """Slot accuracy, which is the stronger statistic, on the same anchors."""
    declared = scores_of(hybrid_capture, name)
    own = scores_of(hybrid_capture, name, *OWN_READING[name])
    assert (own.rank == 0).mean() > (declared.rank == 0).mean()


def test_shifted_labels_are_found_one_token_later(hybrid_capture):
    scores = scores_of(hybrid_capture, "label_shift")
    first_as_declared = (scores.proposed[:, 0] == scores.labels[:, 0]).mean()
    first_one_later = (scores.proposed[:, 0] == scores.labels[:, 1]).mean()
    assert first_one_later > 3 * first_as_declared


@cache
def tau(capture, name):
    found = measure(scores_of(capture, name), seed=0, draws=100)
    return found["tau_walked_micro"].value


def test_the_reference_is_better_than_the_healthy_and_that_than_the_collapsed(hybrid_capture):
    assert tau(hybrid_capture, "reference") > tau(hybrid_capture, "healthy")
    for name in ("anchor_included", "label_shift", "ignored_context", "position_plus_one"):
        assert tau(hybrid_capture, "healthy") > tau(hybrid_capture, name), name
