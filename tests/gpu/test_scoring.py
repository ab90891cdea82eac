"""Scoring on a GPU: block-sparse tiles and compiled ratings against the plain forms."""

from __future__ import annotations

import pytest
import torch

from dflash_diag import blocks
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.proposals import Argmax, Head

pytestmark = pytest.mark.gpu

SHAPE = DrafterShape(
    hidden_size=256, n_taps=3, n_layers=3, n_heads=8, n_kv_heads=2, head_width=64, mlp_size=512
)
T, VOCABULARY = 700, 30_000


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in ((VOCABULARY, 256), (T, 3, 256))]


def drafter(dtype, **change):
    torch.manual_seed(1)
    how = Convention(
        block_size=10,
        layer_ids=(0, 1, 2),
        in_block=("bidirectional", "causal", "bidirectional"),
        window=(None, 40, None),
        rope_theta=10_000.0,
        rotary_width=64,
        mask_token_id=3,
        **change,
    )
    made = Drafter(SHAPE, how)
    for one in made.parameters():
        torch.nn.init.normal_(one, mean=float(one.ndim == 1), std=0.08)
    return made.to("cuda", dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", [{}, {"window_rule": "anchor"}, {"context_bound": "inclusive"}])
@torch.inference_mode()
def test_tiles_agree_with_masks_up_to_rounding(weights, change, compiled):
    head, states = (one.cuda() for one in weights)
    tokens = torch.arange(T + 10, device="cuda") % VOCABULARY
    anchors = torch.arange(300, 691, device="cuda")
    exact, low = drafter(torch.float32, **change), drafter(torch.bfloat16, **change)
    true = blocks.draft_blocks(exact, head, tokens, anchors, exact.features(states))
    features = low.features(states.bfloat16())
    context = low.context(features, torch.arange(T, device="cuda"))
    plain = blocks._apart(low, head.bfloat16(), tokens, anchors, context)
    tiled = blocks._tiled(
        low, head.bfloat16(), tokens, anchors, context, compiled=compiled, most=128
    )
    noise = (plain.float() - true).square().mean().sqrt()
    assert (tiled.float() - true).square().mean().sqrt() < 1.3 * noise
    assert noise < 0.05 * true.square().mean().sqrt()


@torch.inference_mode()
def test_ratings_agree_with_those_of_whole_rows(weights):
    head = weights[0].cuda().bfloat16()
    hidden = torch.randn(40, 9, 256, device="cuda").bfloat16()
    labels = torch.randint(VOCABULARY, (40, 9), device="cuda")
    labels[:20] = (hidden[:20] @ head.T).argmax(-1)
    how = drafter(torch.bfloat16).convention
    made = Argmax(Head(head, how, slice_bytes=2 * VOCABULARY * 50)).score(
        hidden, labels[:, 0], labels
    )
    logits = (hidden @ head.T).float()
    logprobs = logits.log_softmax(-1)
    own = logits.gather(-1, labels[..., None])
    torch.testing.assert_close(
        made.label_logprob, logprobs.gather(-1, labels[..., None])[..., 0], atol=0.3, rtol=1e-3
    )
    above = (logits > own).sum(-1)
    assert (made.rank >= above - 40).all()
    assert (made.rank[:20] == 0).float().mean() > 0.99
    best = logprobs.topk(64, dim=-1).values
    torch.testing.assert_close(made.topk_logprobs, best, atol=0.3, rtol=1e-3)
