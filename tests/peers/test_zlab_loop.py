"""Acceptance against z-lab's own decoding loop (PyPI ``dflash``), and where that loop is valid."""

from __future__ import annotations

import os
import time

import pytest
import torch
from dflash import model as zlab
from transformers import AutoModelForCausalLM

from dflash_diag.capture import make_capture
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.decoding import check_lossless, expect_as_captured
from dflash_diag.errors import BadInput
from dflash_diag.example import EXAMPLE, SMOLLM2
from dflash_diag.metrics import per_prompt
from dflash_diag.scoring import proposer, score
from dflash_diag.targets import load_target
from tests.conftest import ZOO

pytestmark = [
    # It still uses the cache under its former name.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
]
GENERATED = EXAMPLE.max_new_tokens


@pytest.fixture(autouse=True)
def no_cuda_timer(monkeypatch):
    """Its timer waits for a GPU."""
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)


def load_pair(target, drafter):
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return model, zlab_drafter(drafter)


def zlab_drafter(folder):
    return zlab.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()


def generate(pair, ids, block_size, generated=GENERATED):
    target, drafter = pair
    return zlab.dflash_generate(
        drafter,
        target,
        torch.tensor([ids]),
        # One more than captured: it cuts the bonus token off that would lie beyond the end.
        generated + 1,
        [target.config.eos_token_id],
        block_size=block_size,
        return_stats=True,
    )


def our_rounds(capture, checkpoint, settings=()):
    convention = resolve_convention(checkpoint, settings=settings)
    drafter = load_drafter(checkpoint, convention, dtype=torch.float32)
    scores = score(capture, drafter, silent=True)
    return {row["id"]: row["rounds"] for row in per_prompt(scores)}


@pytest.mark.parametrize("block_size", [8, 5])
def test_rounds_are_those_of_its_loop(full_capture, block_size):
    """On full attention its loop is right; every complete block must be accepted alike."""
    folder = ZOO / "full" / "drafter"
    pair = load_pair(ZOO / "full" / "target", folder)
    ours = our_rounds(full_capture, read_checkpoint(folder), [f"block_size={block_size}"])
    assert len(ours) >= 20
    lengths = set()
    for i, prompt in enumerate(full_capture.prompts):
        if prompt.id not in ours:
            continue
        ids = full_capture.tokens(i)[: prompt.n_prompt_tokens].tolist()
        theirs = generate(pair, ids, block_size)
        rounds = ours[prompt.id]
        assert rounds == theirs.acceptance_lengths[: len(rounds)], prompt.id
        made = theirs.output_ids[0, len(ids) :][:GENERATED].tolist()
        assert made == full_capture.continuation(i).tolist(), prompt.id
        lengths |= set(rounds)
    assert len(lengths) >= 5


def test_its_loop_is_not_lossless_on_the_hybrid_target(hybrid_capture):
    """Rejected drafts stay in the recurrent state: its output is not the target's."""
    pair = load_pair(ZOO / "hybrid" / "target", ZOO / "hybrid" / "drafters" / "reference")
    same = []
    for i, prompt in enumerate(hybrid_capture.prompts[:6]):
        ids = hybrid_capture.tokens(i)[: prompt.n_prompt_tokens].tolist()
        made = generate(pair, ids, 8).output_ids[0, len(ids) :][:GENERATED].tolist()
        same.append(made == hybrid_capture.continuation(i).tolist())
    assert not all(same)


EVERY = bool(os.environ.get("EVERY_PROMPT"))
"""Whether all prompts are drafted, which takes minutes, or some."""


def test_rounds_are_those_of_its_loop_on_a_public_chat_model(tmp_path):
    """Nobody here trained the target: its own tokens come from transformers, one after another."""
    try:
        file = SMOLLM2.part(SMOLLM2.target)
    except BadInput as why:
        pytest.skip(str(why))
    prompts, length = SMOLLM2.read_prompts(), SMOLLM2.max_new_tokens
    if not EVERY:
        prompts, length = prompts[::12], length // 2
    target = load_target(file, dtype="float32", device="cpu")
    folder = SMOLLM2.part(SMOLLM2.drafter)
    checkpoint = read_checkpoint(folder)
    taps = resolve_convention(checkpoint).taps
    capture = make_capture(
        target, prompts, tmp_path / "capture", max_new_tokens=length, taps=taps, silent=True
    )
    ours = our_rounds(capture, checkpoint)
    pair = target.model, zlab_drafter(folder)
    assert len(ours) == len(prompts)
    for i, prompt in enumerate(capture.prompts):
        ids, own = capture.tokens(i)[: prompt.n_prompt_tokens], capture.continuation(i).tolist()
        theirs = generate(pair, ids.tolist(), 8, length)
        rounds = ours[prompt.id]
        assert rounds == theirs.acceptance_lengths[: len(rounds)], prompt.id
        assert theirs.output_ids[0, len(ids) :][:length].tolist() == own, prompt.id
        if EVERY or i == 0:
            plain = target.model.generate(ids[None], max_new_tokens=length, do_sample=False)
            assert plain[0, len(ids) :].tolist() == own, prompt.id


PARTS = 5
"""Equal shares of the 50 prompts, so that no single test is long; the usual run takes one."""


@pytest.mark.parametrize("part", range(PARTS if EVERY else 1))
def test_ours_is_lossless_on_the_prompts_of_the_hybrid_target(part, wide_capture):
    target = load_target(str(ZOO / "hybrid" / "target"), dtype="float32", device="cpu")
    checkpoint = read_checkpoint(ZOO / "hybrid" / "drafters" / "reference")
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.float32)
    known = expect_as_captured(target, wide_capture)
    assert len(known) == 50
    known = known[part::PARTS]
    found = check_lossless(target, proposer(wide_capture, drafter), known, GENERATED)
    assert (found.checked, found.ok, found.exact, found.mismatches) == (10, 10, 10, [])
    walked = {
        row["id"]: row["rounds"] for row in per_prompt(score(wide_capture, drafter, silent=True))
    }
    scored = walked.keys() & found.rounds.keys()
    assert len(scored) >= 8
    assert {name: found.rounds[name] for name in scored} == {name: walked[name] for name in scored}
