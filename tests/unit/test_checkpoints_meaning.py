"""What a checkpoint says and whether it can be so: conventions, tensor audit, target, loading."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config

from dflash_diag.checkpoints import (
    TargetFacts,
    audit,
    check_against_target,
    checkpoint_dtype,
    contradictions,
    drafter_shape,
    load_drafter,
    read_checkpoint,
    resolve_convention,
    target_contradictions,
)
from dflash_diag.conventions import Convention
from dflash_diag.errors import CheckpointError

H, HEADS, KV, D, MLP, LAYERS, TAPS, VOCAB = 16, 4, 2, 8, 24, 2, 3, 50
FACTS = TargetFacts(hidden_size=H, vocab_size=VOCAB, n_layers=6)
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": H,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": D,
    "intermediate_size": MLP,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "num_target_layers": 6,
    "block_size": 4,
    "rope_theta": 10000.0,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 4]},
}


def tensors(n_layers: int = LAYERS, n_taps: int = TAPS, h: int = H) -> dict[str, torch.Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, n_taps * h), "hidden_norm.weight": (h,)}
    for i in range(n_layers):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"{attention}q_proj.weight": (HEADS * D, h),
            f"{attention}k_proj.weight": (KV * D, h),
            f"{attention}v_proj.weight": (KV * D, h),
            f"{attention}o_proj.weight": (h, HEADS * D),
            f"{attention}q_norm.weight": (D,),
            f"{attention}k_norm.weight": (D,),
            f"{mlp}gate_proj.weight": (MLP, h),
            f"{mlp}up_proj.weight": (MLP, h),
            f"{mlp}down_proj.weight": (h, MLP),
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
        }
    shapes["norm.weight"] = (h,)
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


@pytest.fixture
def make(tmp_path):
    """A checkpoint with some tensors and settings changed (None removes)."""

    def write(weights=None, *, raw=False, dflash_config=None, **config):
        settings = CONFIG | config
        settings["dflash_config"] = {
            k: v
            for k, v in {**CONFIG["dflash_config"], **(dflash_config or {})}.items()
            if v is not None
        }
        settings = {k: v for k, v in settings.items() if v is not None}
        held = {k: v for k, v in (tensors() | (weights or {})).items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        path = tmp_path / ("model.pt" if raw else "model.safetensors")
        if raw:
            torch.save(held, path)
        else:
            save_file(held, path)
        return read_checkpoint(path)

    return write


# --- the declared reading -----------------------------------------------------------------------


def test_the_plain_reading_and_where_every_value_came_from(make):
    convention = resolve_convention(make())
    assert convention == Convention(
        block_size=4,
        layer_ids=(1, 3, 4),
        in_block=("bidirectional",) * 2,
        window=(None, None),
        rope_theta=10000.0,
        rotary_width=D,
        mask_token_id=3,
    )
    assert convention.n_proposed == 3
    reported = convention.to_json()
    assert set(convention.sources) == set(reported)
    assert reported["block_size"]["source"] == "block_size"
    assert reported["mask_token_id"]["source"] == "dflash_config.mask_token_id"
    assert reported["rope_theta"] == {
        "value": 10000.0,
        "source": "rope_theta",
        "confidence": "declared",
    }
    assert reported["last_layer_normed"]["confidence"] == "default"
    json.dumps(reported)


@pytest.mark.parametrize(
    ("settings", "field", "value", "source"),
    [
        ({"dflash_config": {"block_size": 8}}, "block_size", 8, "dflash_config.block_size"),
        ({"block_size": None}, "block_size", 16, "z-lab's default"),
        (
            {"mask_token_id": 9, "dflash_config": {"mask_token_id": None}},
            "mask_token_id",
            9,
            "mask_token_id",
        ),
        (
            {"target_layer_ids": [2, 0], "dflash_config": {"target_layer_ids": None}},
            "layer_ids",
            (2, 0),
            "target_layer_ids",
        ),
        (
            {"dflash_config": {"target_layer_ids": None}},
            "layer_ids",
            (1, 3),
            "num_target_layers",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta",
            5e5,
            "rope_parameters.rope_theta",
        ),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta", 1e4, "rope_theta"),
        ({"rope_theta": None}, "rope_theta", 1e4, ""),
        ({"is_causal": True}, "in_block", ("causal",) * 2, "is_causal"),
        ({"output_multiplier": 0.5}, "logit_scale", 0.5, "output_multiplier"),
        ({"final_logit_softcapping": 30}, "softcap", 30.0, "final_logit_softcapping"),
        ({"final_logit_softcapping": 0}, "softcap", None, "final_logit_softcapping"),
        (
            {"dflash_config": {"input_embedding_scale": 4.0}},
            "embedding_scale",
            4.0,
            "dflash_config.input_embedding_scale",
        ),
        ({"partial_rotary_factor": 0.25}, "rotary_width", 2, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rotary_width",
            4,
            "rope_parameters.partial_rotary_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "default", "rope_dim": 6, "partial_rotary_factor": 0.5}},
            "rotary_width",
            6,
            "rope_scaling.rope_dim",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
            "rotary_width",
            D,
            "head_dim (the whole head)",
        ),
        ({"is_neox_style": False}, "rope_interleaved", True, "is_neox_style"),
        ({"rope_is_neox_style": True}, "rope_interleaved", False, "rope_is_neox_style"),
        ({"use_gemma_norm": True}, "norm_style", "one_plus", "use_gemma_norm"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7e5}}, "rope_theta": None},
            "rope_theta",
            7e5,
            "rope_parameters.full_attention.rope_theta",
        ),
        ({"head_dim": None}, "rotary_width", D, "head_dim (the whole head)"),
    ],
)
def test_where_each_value_is_looked_up(make, settings, field, value, source):
    convention = resolve_convention(make(**settings))
    assert getattr(convention, field) == value
    assert convention.sources[field].key == source


MIXED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32}


@pytest.mark.parametrize(
    ("settings", "in_block", "window"),
    [
        ({**MIXED, "use_sliding_window": True}, ("bidirectional", "causal"), (None, 32)),
        (MIXED, ("bidirectional", "causal"), (None, None)),
        (
            {**MIXED, "use_sliding_window": True, "is_causal": False},
            ("bidirectional", "bidirectional"),
            (None, 32),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
            ("bidirectional", "causal"),
            (None, 32),
        ),
        (
            {"use_sliding_window": True, "sliding_window": 32},
            ("bidirectional", "bidirectional"),
            (None, None),
        ),
    ],
)
def test_sliding_layers(make, settings, in_block, window):
    convention = resolve_convention(make(**settings))
    assert convention.in_block == in_block
    assert convention.window == window


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 8.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 9.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3.0}},
        {
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 5.0},
        },
    ],
)
def test_rope_as_transformers_resolves_it(make, rope):
    """The class under z-lab's model decides what a configuration means."""
    convention = resolve_convention(make(**{"rope_theta": None, **rope}))
    theirs = Qwen3Config(**json.loads(json.dumps(rope))).rope_parameters
    assert convention.rope_theta == theirs["rope_theta"]
    scaling = json.loads(convention.rope_scaling) if convention.rope_scaling else {}
    assert scaling.get("rope_type", "default") == theirs["rope_type"]
    assert scaling.get("factor") == theirs.get("factor")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"block_size": 1}, "block_size is 1; expected at least 2"),
        ({"dflash_config": {"block_size": 0}}, r"dflash_config\.block_size is 0"),
        ({"block_size": "16"}, "block_size is '16'"),
        ({"dflash_config": {"mask_token_id": None}}, "lacks mask_token_id.*--set mask_token_id"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id is -1"),
        ({"dflash_config": {"target_layer_ids": []}}, "target_layer_ids is"),
        ({"dflash_config": {"target_layer_ids": [1, "2"]}}, "expected a list of layer numbers"),
        (
            {"dflash_config": {"target_layer_ids": None}, "num_target_layers": None},
            "lacks the tapped layers, and num_target_layers.*--set layer_ids",
        ),
        ({"dflash_config": {"target_layer_ids": [1, 3, 1]}}, "lists layer 1 twice"),
        (
            {"dflash_config": {"target_layer_ids": [1, -2]}},
            r"lists -2; expected layers from -1 \(the",
        ),
        ({"is_causal": "no"}, "is_causal is 'no'; expected true or false"),
        ({"partial_rotary_factor": 0.1}, r"partial_rotary_factor \* head_dim is 0\.8"),
        ({"partial_rotary_factor": 0.4}, r"partial_rotary_factor \* head_dim is 3\.2"),
        ({"partial_rotary_factor": 1.5}, "expected an even number from 2 to 8"),
        ({"rope_parameters": {"rope_dim": 5}}, r"rope_parameters\.rope_dim is 5"),
        ({"rope_parameters": {"mrope_section": 4}}, r"mrope_section is 4; expected a list"),
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1; expected one type for each"),
        ({"layer_types": ["full_attention", "mamba"]}, "lists 'mamba'"),
        ({"sliding_window": -1, "use_sliding_window": True}, "sliding_window is -1"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_parameters": [1]}, "rope_parameters is"),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "differs between layer types",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling\.factor is None"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, r"rope_scaling\.factor is 0"),
        ({"output_multiplier": "x"}, "output_multiplier is 'x'"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type: a Domino drafter"),
        ({"speculators_model_type": "xpress"}, "speculators_model_type: an XPress drafter"),
    ],
)
def test_configurations_that_are_refused_in_one_line(make, settings, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        resolve_convention(make(**settings))
    assert "\n" not in str(caught.value)


def test_settings_supply_what_the_configuration_lacks(make):
    checkpoint = make(dflash_config={"mask_token_id": None, "target_layer_ids": None})
    convention = resolve_convention(checkpoint, settings=["mask_token_id=7", "layer_ids=0,2,4"])
    assert convention.mask_token_id == 7
    assert convention.layer_ids == (0, 2, 4)
    assert convention.sources["mask_token_id"].confidence == "override"
    assert audit(checkpoint, convention=convention) == []
    with pytest.raises(CheckpointError, match="field=value"):
        resolve_convention(checkpoint, settings=["mask_token_id=7", "layer_ids=0", "x=1"])


def test_contradictions_are_those_that_change_a_value(make):
    assert contradictions(make()) == []
    assert contradictions(make(mask_token_id=3)) == []
    found = contradictions(
        make(
            block_size=4,
            mask_token_id=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            dflash_config={"block_size": 8},
        )
    )
    assert [(c.field, c.used_value, c.other_value) for c in found] == [
        ("block_size", 8, 4),
        ("mask_token_id", 3, 4),
        ("rope_theta", 1e6, 1e4),
    ]
    assert "dflash_config.block_size is 8, block_size is 4; the first is used" in str(found[0])
    window = contradictions(make(**MIXED))
    assert [(c.field, c.used, c.other_value) for c in window] == [
        ("window", "layer_types, but no use_sliding_window", (None, 32))
    ]
    rotary = {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1]}
    found = contradictions(make(rope_parameters=rotary, partial_rotary_factor=0.25))
    assert [(c.field, c.used_value, c.other, c.other_value) for c in found] == [
        ("rotary_width", 4, "partial_rotary_factor", 2)
    ]


# --- the audit ----------------------------------------------------------------------------------


def only(problems):
    assert len(problems) == 1, problems
    return problems[0]


def test_a_sound_checkpoint_has_no_problem(make):
    assert audit(make()) == []
    assert audit(make(), FACTS) == []
    assert audit(make(num_key_value_heads=None, intermediate_size=None, head_dim=None)) == []


@pytest.mark.parametrize(
    ("held", "reason"),
    [
        (6, "fc expects 6 taps, dflash_config.target_layer_ids lists 3"),
        (1, "fc expects 1 tap, dflash_config.target_layer_ids lists 3"),
    ],
)
def test_a_wrong_number_of_tapped_layers(make, held, reason):
    problem = only(audit(make({"fc.weight": torch.zeros(H, held * H)}), FACTS))
    assert (problem.name, problem.kind) == ("fc.weight", "misshapen")
    assert problem.found == f"[{H}, {held * H}]"
    assert problem.expected == f"[{H}, {TAPS * H}]"
    assert problem.reason == reason
    assert reason in str(problem)


def test_a_drafter_of_a_wider_target(make):
    facts = dataclasses.replace(FACTS, hidden_size=20)
    problem = only(audit(make(), facts))
    assert problem.reason == (
        "fc reads taps of width 16, the target's hidden size is 20: a drafter of another target"
    )
    problem = only(audit(make({"fc.weight": torch.zeros(H, TAPS * 20)}), FACTS))
    assert "fc reads taps of width 20" in problem.reason
    assert audit(make({"fc.weight": torch.zeros(H, TAPS * 20)}, target_hidden_size=20)) == []
    problem = only(audit(make({"fc.weight": torch.zeros(H, 7)}), FACTS))
    assert "no multiple" in problem.reason


VARIANTS = {
    "prefix_gru.weight_ih_l0": "Domino GRU head",
    "embed_proj.0.weight": "Domino GRU head",
    "in_proj.weight": "XPress refiner",
    "mlp_up.weight": "XPress refiner",
    "aux_hidden_norms.0.weight": "Laguna",
    "layers.0.self_attn.q_proj.weight_scale": "quantised",
    "layers.0.self_attn.q_proj.lora_A.weight": "LoRA",
    "layers.0.self_attn.q_proj.bias": "attention_bias is false",
    "layers.2.input_layernorm.weight": "num_hidden_layers is 2",
    "embed_tokens.weight": "copy of the target's embedding",
    "rotary_emb.inv_freq": "RoPE buffer",
    "d2t": "reduced vocabulary",
    "something.else": "no such tensor",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_unexpected_tensors_are_recognised(make, name):
    problem = only(audit(make({name: torch.zeros(3)})))
    assert (problem.name, problem.kind, problem.expected) == (name, "unexpected", None)
    assert VARIANTS[name] in problem.reason


def test_a_training_state_may_carry_copies_of_the_target(make):
    carried = ["embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq"]
    checkpoint = make({n: torch.zeros(3) for n in carried}, raw=True)
    assert audit(checkpoint) == []
    checkpoint = make({"readout.weight": torch.zeros(3)}, raw=True)
    assert only(audit(checkpoint)).kind == "unexpected"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fc.weight", "not a DFlash drafter, or its projection"),
        ("hidden_norm.weight", "a norm that was not saved"),
        ("layers.0.mlp.up_proj.weight", "incomplete save"),
    ],
)
def test_missing_tensors(make, name, reason):
    problem = only(audit(make({name: None})))
    assert (problem.name, problem.kind, problem.found) == (name, "missing", None)
    assert reason in problem.reason
    if name != "fc.weight":
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            checkpoint = make({name: None})
            load_drafter(checkpoint, resolve_convention(checkpoint))


def test_missing_layers_prefixes_and_biases(make):
    problems = audit(make(num_hidden_layers=3))
    assert {p.kind for p in problems} == {"missing"}
    assert {p.reason for p in problems} == {"the file holds 2 layers, num_hidden_layers is 3"}
    assert len(problems) == 11
    problems = audit(make({"norm.weight": None, "wrapper.norm.weight": torch.zeros(H)}))
    assert "wrapper.norm.weight, under a prefix" in problems[0].reason
    problems = audit(make(attention_bias=True))
    assert len(problems) == 8
    assert "attention_bias is true" in problems[0].reason


@pytest.mark.parametrize(
    ("settings", "names", "reason"),
    [
        ({"intermediate_size": 32}, ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"], "MLP size"),
        ({"num_attention_heads": 8}, ["q_proj", "o_proj"], "has 4 heads of 8, num_attention_heads"),
        ({"num_key_value_heads": 4}, ["k_proj", "v_proj"], "has 2 heads of 8, num_key_value_heads"),
        (
            {"head_dim": 4},
            ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"],
            "head_dim is 4",
        ),
    ],
)
def test_sizes_unlike_the_configuration(make, settings, names, reason):
    problems = audit(make(**settings))
    assert {p.kind for p in problems} == {"misshapen"}
    assert len(problems) == LAYERS * len(names)
    for problem in problems:
        assert any(n in problem.name for n in names)
        assert reason in problem.reason


def test_another_hidden_size_is_the_reason_everywhere(make):
    problems = audit(make(tensors(h=24)))
    assert all("hidden size is 24, hidden_size is 16" in p.reason for p in problems[1:])
    problem = only(audit(make({"layers.0.mlp.down_proj.weight": torch.zeros(MLP, H)})))
    assert problem.reason == "it is transposed"
    problem = only(audit(make({"norm.weight": torch.zeros(1, H)})))
    assert problem.reason == "it has 2 dimensions"


def test_quantised_weights_are_named(make):
    checkpoint = make({"fc.weight": torch.zeros(H, TAPS * H, dtype=torch.int8)})
    problem = only(audit(checkpoint))
    assert (problem.kind, problem.found) == ("misshapen", f"int8 [{H}, {TAPS * H}]")
    assert "quantised" in problem.reason


# --- the target ---------------------------------------------------------------------------------


def refuse_target(checkpoint, match, facts=FACTS, **changes):
    convention = dataclasses.replace(resolve_convention(checkpoint), **changes)
    with pytest.raises(CheckpointError, match=match) as caught:
        check_against_target(checkpoint, convention, facts)
    assert "\n" not in str(caught.value)
    return target_contradictions(checkpoint, convention, facts)


def test_a_checkpoint_of_this_target_passes(make):
    checkpoint = make()
    check_against_target(checkpoint, resolve_convention(checkpoint), FACTS)
    checkpoint = make(vocab_size=None, num_target_layers=None)
    check_against_target(checkpoint, resolve_convention(checkpoint), FACTS)


def test_declared_sizes_unlike_the_target_even_where_no_tensor_depends_on_them(make):
    refuse_target(make(vocab_size=51), r"vocab_size=51; expected 50, the rows")
    refuse_target(make(vocab_size=49), "vocab_size=49")
    refuse_target(make(vocab_size="50"), "vocab_size='50'")
    refuse_target(make(num_target_layers=7), "num_target_layers=7; expected 6")
    refuse_target(make(), "hidden_size=16; expected 20", dataclasses.replace(FACTS, hidden_size=20))
    refuse_target(make(target_hidden_size=20), "hidden_size=20; expected 16")


def test_a_reduced_vocabulary_needs_its_map(make):
    refuse_target(make(vocab_size=30), "vocab_size=30")
    for name, length in (("d2t", 30), ("t2d", VOCAB)):
        checkpoint = make({name: torch.zeros(length, dtype=torch.int64)}, vocab_size=30)
        check_against_target(checkpoint, resolve_convention(checkpoint), FACTS)
        checkpoint = make({name: torch.zeros(length - 1, dtype=torch.int64)}, vocab_size=30)
        refuse_target(checkpoint, "vocab_size=30")
    checkpoint = make({"d2t": torch.zeros(60, dtype=torch.int64)}, vocab_size=60)
    refuse_target(checkpoint, "vocab_size=60")


def test_layers_and_mask_token_out_of_range(make):
    checkpoint = make()
    for ids, rule in (((0, 5, 6), "output"), ((0, 99, 1), "output"), ((0, 7), "input")):
        refuse_target(checkpoint, "is out of range", layer_ids=ids, layer_id_rule=rule)
    refuse_target(checkpoint, "tapped layer -2 is out", layer_ids=(-2,))
    for ids, rule in (((-1, 5), "output"), ((0, 6), "input")):
        convention = dataclasses.replace(
            resolve_convention(checkpoint), layer_ids=ids, layer_id_rule=rule
        )
        assert target_contradictions(checkpoint, convention, FACTS) == []
    refuse_target(checkpoint, "mask_token_id 50 is outside", mask_token_id=50)
    found = refuse_target(make(vocab_size=1, num_target_layers=1), "vocab_size=1", mask_token_id=50)
    assert len(found) == 3


# --- loading ------------------------------------------------------------------------------------


def test_a_loaded_drafter_is_frozen_in_eval_mode_and_holds_the_tensors(make):
    checkpoint = make()
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    assert not drafter.training
    assert not any(p.requires_grad for p in drafter.parameters())
    assert checkpoint_dtype(checkpoint) == torch.float32
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, tensors()[name])
    half = load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.fc.weight, tensors()["fc.weight"].bfloat16())


def test_mixed_types_are_loaded_in_that_of_fc(make):
    checkpoint = make({"fc.weight": torch.zeros(H, TAPS * H, dtype=torch.bfloat16)})
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    assert {p.dtype for p in drafter.parameters()} == {torch.bfloat16}


def test_loading_refuses_whatever_the_audit_reports_unless_told_otherwise(make):
    checkpoint = make({"extra": torch.zeros(1), "hidden_norm.weight": None})
    convention = resolve_convention(checkpoint)
    with pytest.raises(CheckpointError, match=r"hidden_norm\.weight is missing.*and 1 more"):
        load_drafter(checkpoint, convention)
    drafter = load_drafter(checkpoint, convention, strict=False)
    assert torch.equal(drafter.hidden_norm.weight, torch.ones(H))
    gemma = dataclasses.replace(convention, norm_style="one_plus")
    drafter = load_drafter(checkpoint, gemma, strict=False)
    assert torch.equal(drafter.hidden_norm.weight, torch.zeros(H))
    checkpoint = make({"fc.weight": torch.zeros(H, 2 * H)})
    with pytest.raises(CheckpointError, match="fc expects 2 taps"):
        load_drafter(checkpoint, resolve_convention(checkpoint), strict=False)


def test_values_that_are_not_finite_are_named(make):
    bad = tensors()["norm.weight"]
    bad[3] = float("nan")
    checkpoint = make({"norm.weight": bad})
    with pytest.raises(CheckpointError, match=r"norm\.weight has values that are not finite;"):
        load_drafter(checkpoint, resolve_convention(checkpoint))
    checkpoint = make({"norm.weight": torch.full((H,), 1e6)})
    with pytest.raises(CheckpointError, match="not finite in float16.*use another type"):
        load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.float16)


def test_shapes_that_do_not_fit_together(make):
    checkpoint = make({f"layers.0.{n[9:]}": None for n in tensors() if n.startswith("layers.0.")})
    with pytest.raises(CheckpointError, match=r"holds layers \[1\]"):
        drafter_shape(checkpoint, resolve_convention(checkpoint))
    checkpoint = make({"fc.weight": torch.zeros(H, 7)})
    with pytest.raises(CheckpointError, match="7 columns; expected a multiple of 3"):
        drafter_shape(checkpoint, resolve_convention(checkpoint))
    with pytest.raises(CheckpointError, match="rms_norm_eps=-1"):
        drafter_shape(make(rms_norm_eps=-1), resolve_convention(make()))


def test_a_scaled_rope_loads_with_real_frequencies(make):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    checkpoint = make(rope_scaling=scaling, max_position_embeddings=256)
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    assert drafter.rotary.inv_freq.device.type == "cpu"
    assert torch.isfinite(drafter.rotary.inv_freq).all()


def test_no_value_of_a_configuration_ends_in_a_traceback(make):
    """Whatever stands in a configuration: it is read, or refused as bad input."""
    checkpoint = make(
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
        target_hidden_size=H,
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        is_causal=False,
        max_window_layers=1,
    )
    weird = ["x", "", -1, 0, 1, 10**30, 1.5, True, None, [], {}, [1], {"a": {}}, float("nan")]
    weird += [float("inf"), ["x", None], {"rope_theta": "x"}, {"rope_type": 3}, {"rope_type": []}]
    nested = ["mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa"]
    convention, messages = resolve_convention(checkpoint), []
    for key in [*checkpoint.config, "rope_scaling", "max_position_embeddings", *nested]:
        for value in weird:
            config = json.loads(json.dumps(checkpoint.config))
            place = config["dflash_config"] if key in nested else config
            place[key] = value
            changed = dataclasses.replace(checkpoint, config=config)
            for step in (
                lambda c: resolve_convention(c),
                lambda c: audit(c, FACTS),
                lambda c: audit(c, convention=convention),
                lambda c: contradictions(c),
                lambda c: drafter_shape(c, convention),
                lambda c: target_contradictions(c, convention, FACTS),
            ):
                try:
                    step(changed)
                except CheckpointError as error:
                    messages.append(str(error))
    assert len(messages) > 200
    assert not any("\n" in message or len(message) > 300 for message in messages)


def test_reading_imports_neither_transformers_nor_matplotlib():
    code = (
        "import sys; import dflash_diag.checkpoints; "
        "print({'transformers', 'matplotlib'} & {m.split('.')[0] for m in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
