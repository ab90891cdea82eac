"""The parts that DFlash2 and DSpark add: what they compute, and how they are loaded."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from dflash_diag.additions import (
    BlockConvolution,
    CandidateSelector,
    ConvolutionShape,
    MarkovHead,
    MarkovShape,
    SelectorShape,
)
from dflash_diag.checkpoints import load_drafter, read_checkpoint
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.errors import CheckpointError
from tests.tiny_world import BLOCK, MASK, VOCABULARY, write_drafter

SHAPE = DrafterShape(
    hidden_size=32, n_taps=2, n_layers=2, n_heads=2, n_kv_heads=1, head_width=16, mlp_size=64
)
READING = Convention(
    block_size=BLOCK,
    layer_ids=(0, 2),
    in_block=("bidirectional",) * 2,
    window=(None, None),
    rope_theta=10_000.0,
    rotary_width=16,
    mask_token_id=MASK,
)


@torch.inference_mode()
def test_a_convolution_by_hand():
    conv = BlockConvolution(ConvolutionShape(taps=2, groups=2), hidden_size=4, block_size=3)
    conv.base_kernel.copy_(torch.tensor([[[1.0] * 4, [10, 10, 20, 20]], [[2.0] * 4, [0.0] * 4]]))
    x = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    before, taps = conv.before(x)
    expected = [[1.0, 2, 3, 4], [15, 26, 67, 88], [59, 70, 151, 172]]
    assert before.tolist() == expected
    assert conv.after(x, taps).tolist() == (2 * x).tolist()
    # One computed tap: of the output, one slot back, the second group of channels.
    conv.kernel_projection.weight[2 * 2 + 2 + 1, 0] = 1.0
    after = conv.after(x, conv.before(x)[1])
    assert after.tolist() == [[2.0, 4, 6, 8], [10, 12, 14 + 5 * 3, 16 + 5 * 4], [18, 20, 85, 96]]


@torch.inference_mode()
def test_taps_stay_inside_their_block():
    torch.manual_seed(0)
    conv = BlockConvolution(ConvolutionShape(taps=4, groups=2), hidden_size=8, block_size=3)
    for weight in conv.parameters():
        torch.nn.init.normal_(weight)
    x = torch.randn(2, 9, 8)
    whole, taps = conv.before(x)
    parts = [conv.before(part) for part in x.split(3, dim=1)]
    torch.testing.assert_close(whole, torch.cat([part for part, _ in parts], dim=1))
    torch.testing.assert_close(taps, torch.cat([part for _, part in parts], dim=1))
    moved = x.clone()
    moved[:, 5] += 1.0
    changed = (conv.before(moved)[0] != whole).any(-1)
    assert changed.tolist() == [[False] * 5 + [True] + [False] * 3] * 2


@torch.inference_mode()
def test_fresh_convolutions_change_nothing():
    conv = BlockConvolution(ConvolutionShape(taps=2, groups=2), hidden_size=4, block_size=3)
    x = torch.randn(6, 4)
    before, taps = conv.before(x)
    assert torch.equal(before, x)
    assert torch.equal(conv.after(x, taps), x)


@torch.inference_mode()
def test_a_recurrent_head_carries_its_state():
    torch.manual_seed(0)
    head = MarkovHead(MarkovShape(n_before=9, n_biased=9, rank=3, kind="rnn"), hidden_size=4)
    hidden, previous = torch.randn(2, 4), torch.tensor([1, 2])
    state, first = head.step(head.start(2), previous, hidden)
    assert not torch.equal(head.step(state, previous, hidden)[1], first)
    assert (state != 0).all()


@torch.inference_mode()
def test_transitions_by_hand():
    selector = CandidateSelector(SelectorShape(n_tokens=3, rank=2, n_candidates=2), hidden_size=4)
    selector.predecessor_codebook.copy_(torch.tensor([[1.0, 2], [3, 4], [5, 6]]))
    selector.successor_codebook.copy_(torch.tensor([[1.0, 0], [0, 1], [1, 1]]))
    projected = torch.tensor([[10.0, 100]])
    liked = selector.transitions(torch.tensor([1]), projected, torch.tensor([[0, 2]]))
    assert liked.tolist() == [[30.0, 430.0]]


PARTS = {
    "Markov": (
        {"markov": MarkovShape(VOCABULARY, VOCABULARY, 5, "gated")},
        {"proposal": "markov"},
        {"markov_head_type": "gated"},
    ),
    "recurrent": (
        {"markov": MarkovShape(VOCABULARY, VOCABULARY, 5, "rnn")},
        {"proposal": "markov"},
        {},
    ),
    "DFlash2": (
        {
            "convolution": ConvolutionShape(2, 4),
            "selector": SelectorShape(VOCABULARY, 6, 9),
        },
        {"proposal": "selector"},
        {"selector_top_k": 9},
    ),
    "own": (
        {"embedding_rows": VOCABULARY, "head_rows": 40, "has_map": True},
        {"embedding": "own", "head": "own", "vocabulary_map": "offset"},
        {},
    ),
}


def write(folder, name, **changes):
    """A checkpoint of one kind, its reading and its tensors."""
    shape, reading, config = PARTS[name]
    how = dataclasses.replace(READING, **reading)
    torch.manual_seed(0)
    drafter = Drafter(dataclasses.replace(SHAPE, **shape), how)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter)
    tensors = {key: tensor.contiguous() for key, tensor in drafter.state_dict().items()}
    write_drafter(folder, **(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return how, tensors


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_saved_is_loaded(tmp_path, name, dtype):
    how, tensors = write(tmp_path, name)
    drafter = load_drafter(read_checkpoint(tmp_path), how, dtype=dtype, strict=False)
    assert drafter.shape == dataclasses.replace(SHAPE, **PARTS[name][0])
    loaded = drafter.state_dict()
    assert list(loaded) == list(tensors)
    for key, tensor in loaded.items():
        assert tensor.dtype == (torch.long if key == "d2t" else dtype)
        torch.testing.assert_close(tensor, tensors[key].to(tensor.dtype), atol=0, rtol=0)


def test_parts_that_the_reading_does_not_use_stay_in_the_file(tmp_path):
    write(tmp_path, "own")
    drafter = load_drafter(read_checkpoint(tmp_path), READING, strict=False)
    assert drafter.embed_tokens is drafter.lm_head is drafter.d2t is None


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("Markov", "markov_head.markov_w2"),
        ("Markov", "markov_head.gate_proj.bias"),
        ("DFlash2", "layers.0.attention_conv.base_kernel"),
        ("DFlash2", "layers.1.mlp_conv.kernel_projection.weight"),
        ("DFlash2", "candidate_selector.successor_codebook"),
        ("own", "embed_tokens.weight"),
        ("own", "lm_head.weight"),
        ("own", "d2t"),
    ],
)
def test_a_missing_part_is_named(tmp_path, name, missing):
    how, tensors = write(tmp_path, name)
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
        load_drafter(read_checkpoint(tmp_path), how, strict=False)


@pytest.mark.parametrize(
    ("name", "misshapen", "shape"),
    [
        ("Markov", "markov_head.markov_w2", (VOCABULARY, 4)),
        ("Markov", "markov_head.gate_proj.weight", (5, 32)),
        ("DFlash2", "layers.0.attention_conv.base_kernel", (2, 32)),
        ("DFlash2", "layers.0.attention_conv.kernel_projection.weight", (2 * 2 * 5, 32)),
        ("DFlash2", "layers.1.attention_conv.base_kernel", (2, 3, 32)),
        ("DFlash2", "candidate_selector.successor_codebook", (VOCABULARY, 7)),
        ("own", "lm_head.weight", (40, 16)),
        ("own", "d2t", (41,)),
    ],
)
def test_a_misshapen_part_is_named(tmp_path, name, misshapen, shape):
    how, tensors = write(tmp_path, name)
    tensors[misshapen] = torch.zeros(shape, dtype=tensors[misshapen].dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=misshapen.replace(".", r"\.")):
        load_drafter(read_checkpoint(tmp_path), how, strict=False)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Markov", {"markov_head_type": "rnn"}, "markov_head_type is 'rnn'.*the gated kind"),
        ("DFlash2", {"selector_top_k": 0}, "selector_top_k is 0"),
        ("DFlash2", {"selector_top_k": "many"}, "selector_top_k is 'many'"),
        ("DFlash2", {"selector_top_k": VOCABULARY + 1}, "selector_top_k is 321"),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(tmp_path, name, config, message):
    how, _ = write(tmp_path, name, **config)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(read_checkpoint(tmp_path), how, strict=False)


def test_candidates_by_default_and_from_the_nested_place(tmp_path):
    how, _ = write(tmp_path, "DFlash2", selector_top_k=None)
    drafter = load_drafter(read_checkpoint(tmp_path), how, strict=False)
    assert drafter.candidate_selector.shape.n_candidates == 16
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"]["selector_top_k"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = load_drafter(read_checkpoint(tmp_path), how, strict=False)
    assert drafter.candidate_selector.shape.n_candidates == 4


def test_a_map_that_is_no_whole_numbers(tmp_path):
    how, tensors = write(tmp_path, "own")
    tensors["d2t"] = tensors["d2t"].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"d2t .*float32"):
        load_drafter(read_checkpoint(tmp_path), how, strict=False)


def test_a_map_of_small_integers_is_read(tmp_path):
    how, tensors = write(tmp_path, "own")
    tensors["d2t"] = torch.arange(40, dtype=torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    drafter = load_drafter(read_checkpoint(tmp_path), how, strict=False)
    assert drafter.d2t.tolist() == list(range(40))
