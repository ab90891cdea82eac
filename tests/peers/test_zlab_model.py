"""Our drafter against z-lab's own (PyPI ``dflash``): the same tensors give the same logits."""

from __future__ import annotations

import json

import pytest
import torch
from dflash.model import DFlashDraftModel
from torch import Tensor
from transformers import Qwen3Config

from dflash_diag.checkpoints import (
    audit,
    drafter_shape,
    load_drafter,
    read_checkpoint,
    resolve_convention,
)
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter
from dflash_diag.masks import rules_of

HIDDEN, VOCAB, LAYER_IDS = 48, 97, [1, 3, 4]
BASE = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "num_target_layers": 8,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": LAYER_IDS},
}
MIXED = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
VARIANTS = {
    "full attention": {},
    "theta at the top level": {"rope_theta": 123_456.0},
    "theta in rope_parameters": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 54_321.0},
        "rope_theta": 1.0,
    },
    "a partial rotary factor, which it ignores": {"partial_rotary_factor": 0.25},
    "linear RoPE scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "YaRN": {
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "max_position_embeddings": 256,
    },
    "Llama 3 scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
    },
    "attention biases": {"attention_bias": True},
    "a block of 2": {"block_size": 2},
    "causal everywhere": {"is_causal": True},
    "sliding layers are causal by default": MIXED,
    "sliding and bidirectional": {**MIXED, "is_causal": False},
    "sliding, all causal": {**MIXED, "is_causal": True},
    "sliding without use_sliding_window": {**MIXED, "use_sliding_window": False},
    "sliding from max_window_layers on": {
        "sliding_window": 6,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
    "one tapped layer": {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [2]}},
    "default layer ids": {"dflash_config": {"mask_token_id": 5}},
}


def z_lab_model(overrides: dict, seed: int = 0) -> DFlashDraftModel:
    """Z-lab's model with random weights of realistic size, norms included."""
    config = Qwen3Config(**json.loads(json.dumps(BASE | overrides)))
    config.architectures = ["DFlashDraftModel"]
    model = DFlashDraftModel(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            wide = weight.ndim > 1
            weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5 if wide else noise * 0.1)
            if name.endswith("norm.weight"):
                weight.add_(1.0)
    return model


def ours_forward(
    drafter: Drafter, states: Tensor, noise: Tensor, anchor: int, implementation: str
) -> Tensor:
    """One block behind ``anchor`` context rows, by our drafter under its own masks."""
    convention: Convention = drafter.convention
    size = noise.shape[1]
    masks = [rule.serving(anchor)[None] for rule in rules_of(convention)]
    return drafter(
        noise,
        torch.arange(anchor, anchor + size)[None],
        drafter.features(states),
        torch.arange(anchor)[None],
        masks,
        implementation=implementation,
    )


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_same_logits_through_a_folder_that_z_lab_saved(name, tmp_path):
    model = z_lab_model(VARIANTS[name])
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert audit(checkpoint) == []
    convention = resolve_convention(checkpoint)
    if "ignores" in name:  # vLLM and SGLang honour the share, and so does the declared reading
        assert convention.rotary_width == 4
        convention = convention.override(["rotary_width=16"])
    assert convention.block_size == model.block_size
    assert list(convention.layer_ids) == list(model.target_layer_ids)
    assert convention.mask_token_id == model.mask_token_id
    drafter = load_drafter(checkpoint, convention, dtype=torch.float32)

    generator = torch.Generator().manual_seed(1)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    size, n_taps = convention.block_size, len(convention.layer_ids)
    for anchor in (1, 2, 5, 17, 60):
        states = torch.randn(1, anchor, n_taps, HIDDEN, generator=generator)
        noise = torch.randn(1, size, HIDDEN, generator=generator)
        theirs = model(
            target_hidden=states.flatten(-2),
            noise_embedding=noise,
            position_ids=torch.arange(anchor + size)[None],
        )
        for implementation in ("sdpa", "eager"):
            ours = ours_forward(drafter, states, noise, anchor, implementation)
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
            torch.testing.assert_close(
                ours @ head.T, model.compute_logits(theirs, lambda h: h @ head.T),
                rtol=2e-4, atol=2e-4,
            )  # fmt: skip
            assert torch.equal((ours @ head.T).argmax(-1), (theirs @ head.T).argmax(-1))


def test_the_variants_do_differ():
    """Each reading that changes the function must also change the outcome, or proves nothing."""
    states = torch.randn(1, 40, len(LAYER_IDS), HIDDEN, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(3))
    outputs = {}
    for name, overrides in VARIANTS.items():
        if name in ("attention biases", "a block of 2", "one tapped layer", "default layer ids"):
            continue
        with torch.no_grad():
            outputs[name] = z_lab_model(overrides)(
                target_hidden=states.flatten(-2),
                noise_embedding=noise,
                position_ids=torch.arange(48)[None],
            )
    same = {"full attention", "a partial rotary factor, which it ignores"}
    for name, output in outputs.items():
        close = torch.allclose(output, outputs["full attention"], atol=1e-3)
        assert close == (name in same), name


@torch.no_grad()
def test_far_positions_agree():
    """RoPE frequencies are computed alike: no drift over a long context."""
    model = z_lab_model({"rope_theta": 1e6})
    states = torch.randn(1, 6, len(LAYER_IDS), HIDDEN, generator=torch.Generator().manual_seed(2))
    noise = torch.randn(1, 8, HIDDEN, generator=torch.Generator().manual_seed(3))
    positions = torch.tensor([[0, 1, 5_000, 10_000, 19_998, 19_999, *range(20_000, 20_008)]])
    theirs = model(target_hidden=states.flatten(-2), noise_embedding=noise, position_ids=positions)
    convention = _convention(model)
    drafter = _our_copy(model, convention)
    visible = torch.ones(1, 8, 14, dtype=torch.bool)
    ours = drafter(noise, positions[:, 6:], drafter.features(states), positions[:, :6], visible)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _convention(model: DFlashDraftModel) -> Convention:
    n = model.config.num_hidden_layers
    return Convention(
        block_size=model.block_size,
        layer_ids=tuple(model.target_layer_ids),
        in_block=("bidirectional",) * n,
        window=(None,) * n,
        rope_theta=model.config.rope_parameters["rope_theta"],
        rotary_width=model.config.head_dim,
        mask_token_id=model.mask_token_id,
    )


def _our_copy(model: DFlashDraftModel, convention: Convention) -> Drafter:
    from dflash_diag.drafter import DrafterShape

    config = model.config
    drafter = Drafter(
        DrafterShape(
            hidden_size=config.hidden_size,
            n_taps=len(model.target_layer_ids),
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            mlp_size=config.intermediate_size,
            norm_eps=config.rms_norm_eps,
        ),
        convention,
    )
    drafter.load_state_dict(model.state_dict())
    return drafter.eval()


@pytest.mark.parametrize("n_target", range(4, 70, 7))
@pytest.mark.parametrize("n_draft", [1, 2, 3, 5, 8])
def test_default_layer_ids_are_theirs(n_target, n_draft):
    from dflash.model import build_target_layer_ids

    from dflash_diag.checkpoints.keys import default_layer_ids

    assert list(default_layer_ids(n_target, n_draft)) == build_target_layer_ids(n_target, n_draft)


def test_shape_comes_from_the_tensors(tmp_path):
    z_lab_model({}).save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    shape = drafter_shape(checkpoint, resolve_convention(checkpoint))
    assert (shape.hidden_size, shape.n_layers, shape.n_taps) == (HIDDEN, 3, 3)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_width, shape.mlp_size) == (6, 2, 16, 80)
    assert shape.norm_eps == 1e-5
    assert not shape.attention_bias
    assert shape.target_hidden_size is None
