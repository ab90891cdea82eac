"""The drafter's forms agree with each other, and its knobs do what they say."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from dflash_diag import blocks
from dflash_diag.additions import ConvolutionShape
from dflash_diag.attention import Masked
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape, RMSNorm, Rotary
from dflash_diag.errors import BadInput
from dflash_diag.masks import rules_of

SHAPE = DrafterShape(
    hidden_size=32, n_taps=3, n_layers=2, n_heads=4, n_kv_heads=2, head_width=8, mlp_size=48
)
READING = Convention(
    block_size=6,
    layer_ids=(0, 1, 2),
    in_block=("bidirectional", "causal"),
    window=(None, 7),
    rope_theta=10_000.0,
    rotary_width=8,
    mask_token_id=1,
)
ROWS, ANCHORS = 30, torch.tensor([0, 2, 3, 11, 29])


def make(how=READING, convolution=None):
    torch.manual_seed(0)
    drafter = Drafter(dataclasses.replace(SHAPE, convolution=convolution), how)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return drafter.eval()


def inputs():
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, 3, 32, generator=generator)
    return states, torch.randn(len(ANCHORS), READING.block_size, 32, generator=generator)


def dense(drafter, implementation, *, moved=0, dtype=torch.float32):
    how, (states, noise) = drafter.convention, inputs()
    masks = [rule.training(ANCHORS[None], ROWS) for rule in rules_of(how)]
    positions = (ANCHORS[:, None] + torch.arange(how.block_size) + how.position_offset).flatten()
    hidden = drafter(
        noise.to(dtype).flatten(0, 1)[None],
        positions[None] + moved,
        drafter.features(states.to(dtype))[None],
        torch.arange(ROWS)[None] + moved,
        masks,
        implementation=implementation,
    )
    return hidden.view(len(ANCHORS), how.block_size, -1)


def shared(drafter):
    how, (states, noise) = drafter.convention, inputs()
    return drafter.blocks(
        noise.flatten(0, 1),
        torch.arange(noise[..., 0].numel()).view(noise.shape[:2]),
        ANCHORS[:, None] + torch.arange(how.block_size) + how.position_offset,
        drafter.context(drafter.features(states), torch.arange(ROWS)),
        [Masked.of(rule, ANCHORS, ROWS, slice(None)) for rule in rules_of(how)],
    )


CHANGES = (
    {},
    {"context_bound": "inclusive"},
    {"window_rule": "anchor"},
    {"in_block": ("causal", "causal"), "window": (3, 3)},
    {"position_offset": -1},
    {"rope_interleaved": True},
    {"rotary_width": 4},
    {"norm_style": "one_plus"},
)


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("convolution", [None, ConvolutionShape(taps=3, groups=8)])
@torch.inference_mode()
def test_eager_sdpa_and_the_scoring_form_agree(change, convolution):
    drafter = make(dataclasses.replace(READING, **change), convolution)
    eager = dense(drafter, "eager")
    torch.testing.assert_close(dense(drafter, "sdpa"), eager, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(shared(drafter), eager, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("change", CHANGES, ids=str)
@pytest.mark.parametrize("convolution", [None, ConvolutionShape(taps=3, groups=8)])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@torch.inference_mode()
def test_block_sparse_tiles_are_the_same_function(change, convolution):
    drafter = make(dataclasses.replace(READING, **change), convolution)
    states, _ = inputs()
    tokens, embedding = torch.arange(ROWS + 8) % 5, torch.randn(7, 32)
    context = drafter.context(drafter.features(states), torch.arange(ROWS))
    whole = blocks._apart(drafter, embedding, tokens, ANCHORS, context)
    for most in (64, 8):  # in one part, and in several whose last is filled up
        tiled = blocks._tiled(drafter, embedding, tokens, ANCHORS, context, tile=8, most=most)
        torch.testing.assert_close(tiled, whole, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_uniform_shift_of_all_positions_changes_nothing():
    torch.testing.assert_close(
        dense(make(), "eager", moved=500), dense(make(), "eager"), atol=2e-4, rtol=1e-3
    )


@torch.inference_mode()
def test_frequencies_stay_in_float32_when_the_weights_do_not():
    drafter = make().to(torch.bfloat16)
    assert drafter.rotary.inv_freq.dtype == torch.float32
    assert dense(drafter, "sdpa", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_interleaved_pairs_neighbours_where_the_other_pairs_halves():
    halves = Rotary(theta=100.0, width=8, interleaved=False, scaling=None)
    neighbours = Rotary(theta=100.0, width=8, interleaved=True, scaling=None)
    x, positions = torch.randn(5, 8), torch.arange(5)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
    expected = halves.rotate(x, halves.table(positions))[:, order]
    found = neighbours.rotate(x[:, order], neighbours.table(positions))
    torch.testing.assert_close(found, expected)


def test_norms_by_hand():
    x = torch.tensor([[3.0, 4.0]])
    plain, one_plus = RMSNorm(2, 0.0), RMSNorm(2, 0.0, one_plus=True)
    root = (12.5) ** 0.5
    torch.testing.assert_close(plain(x), torch.tensor([[3.0, 4.0]]) / root)
    one_plus.weight.data = torch.tensor([1.0, 0.0])
    torch.testing.assert_close(one_plus(x), torch.tensor([[6.0, 4.0]]) / root)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("in_block=diagonal", "one of bidirectional, causal"),
        ("windows=3", "field=value with a field of"),
        ("position_offset=half", "a value of type int"),
        ("window=1,2,3", "1 or 2"),
        ("block_size=1", "at least 2"),
    ],
)
def test_settings_that_cannot_be(setting, message):
    with pytest.raises(BadInput, match=message):
        READING.override([setting])


def test_settings_are_applied_and_remembered():
    how = READING.override(
        ["in_block=causal", "window=none,5", "layer_ids=1,2,3", "context_bound=inclusive"]
    )
    assert how.in_block == ("causal", "causal")
    assert how.window == (None, 5)
    assert how.taps == (1, 2, 3)
    assert how.to_json()["context_bound"] == {
        "value": "inclusive",
        "source": "--set context_bound",
        "confidence": "override",
    }
