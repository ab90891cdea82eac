"""A drafter of the example in every stack's layout: the reading, the audit, the same numbers."""

from __future__ import annotations

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_diag.checkpoints import (
    TargetFacts,
    absent_keys,
    ambiguities,
    audit,
    check_against_target,
    contradictions,
    detect_stack,
    load_drafter,
    read_checkpoint,
    resolve_convention,
)
from dflash_diag.checkpoints.names import clean_name
from dflash_diag.checkpoints.vocabulary import possible_kinds
from dflash_diag.conventions import Convention
from dflash_diag.errors import CheckpointError
from dflash_diag.scoring import score
from tests.conftest import ZOO

HEALTHY = ZOO / "hybrid" / "drafters" / "healthy"
FACTS = TargetFacts(hidden_size=256, vocab_size=3072, n_layers=16)
CONFIG = json.loads((HEALTHY / "config.json").read_text())
BODY = {
    key: value
    for key, value in CONFIG.items()
    if key not in ("architectures", "num_target_layers", "block_size", "dflash_config")
}
"""What every stack keeps of the transformer."""
IDS, MASK, B, H, V = [1, 4, 7, 10, 13], 1, 8, 256, 3072
RAW_IDS = [i + 1 for i in IDS]
PLAIN = Convention(
    block_size=B,
    layer_ids=tuple(IDS),
    in_block=("bidirectional",) * 2,
    window=(None, None),
    rope_theta=10_000.0,
    rotary_width=32,
    mask_token_id=MASK,
)
"""z-lab's reading of the drafter."""
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 48,
    "use_sliding_window": True,
}


@cache
def weights() -> dict[str, torch.Tensor]:
    return load_file(HEALTHY / "model.safetensors")


@cache
def target_parts() -> dict[str, torch.Tensor]:
    """Copies of the target's embedding, which is also its head."""
    held = load_file(ZOO / "hybrid" / "target" / "model.safetensors")
    (name,) = (n for n in held if n.endswith("embed_tokens.weight"))
    return {"embed_tokens.weight": held[name], "lm_head.weight": held[name].clone()}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


@pytest.fixture
def write(tmp_path):
    """A folder as a trainer leaves it; None removes a key."""

    def make(config, extra=None, *, rename=lambda name: name, files=(), raw=None):
        held = {rename(n): t for n, t in {**weights(), **(extra or {})}.items() if t is not None}
        config = {k: v for k, v in config.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if raw is None:
            save_file(held, tmp_path / "model.safetensors")
        else:
            torch.save(raw(held), tmp_path / "training_state.pt")
        for name in files:
            (tmp_path / name).write_bytes(b"PK\x03\x04 not opened")
        return read_checkpoint(tmp_path)

    return make


# --- layouts --------------------------------------------------------------------------------------


ZLAB_OLD = {**BODY, "architectures": ["DFlashDraftModel"], "num_target_layers": 16}
ZLAB_OLD |= {"block_size": B, "target_layer_ids": IDS, "mask_token_id": MASK}
NESTED = {"mask_token_id": MASK, "target_layer_ids": IDS, "block_size": B}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "transformer_layer_config": BODY,
    "draft_vocab_size": V,
    "block_size": B,
    "aux_hidden_state_layer_ids": RAW_IDS,
    "mask_token_id": MASK,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": B - 1}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "target", "architectures": ["Qwen3_5ForCausalLM"]},
    },
}
DEEPSPEC = {
    **BODY,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": B,
    "mask_token_id": MASK,
    "target_layer_ids": IDS,
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
}
AUTOMODEL = {**CONFIG, "architectures": ["Qwen3DFlashDraftModel"], "is_causal": False}
MODELOPT = {
    **CONFIG,
    "rope_scaling": None,
    "dflash_config": {
        **CONFIG["dflash_config"], "use_swa": True, "swa_window_size": 48, "causal": False
    },
}  # fmt: skip
SPECO = {
    **BODY,
    "model_type": "dflash",
    "block_size": B,
    "target_layer_ids": IDS,
    "mask_token_id": MASK,
    "num_context_layers": 5,
    "target_num_hidden_layers": 16,
}
VLLM = {**CONFIG, "eagle_aux_hidden_state_layer_ids": RAW_IDS}
RAW = {**PLAIN.__dict__, "layer_ids": tuple(RAW_IDS), "layer_id_rule": "input"}


def raw_state(held):
    return {
        "draft_state_dict": held,
        "global_step": 200,
        "epoch": 0,
        "strategy": "dflash",
        "run_id": "r",
        "world_size": 1,
    }


LAYOUTS = {
    "z-lab": ("zlab", {"config": CONFIG}, {}),
    "z-lab, old places": ("zlab", {"config": ZLAB_OLD}, {}),
    "z-lab, all nested": (
        "zlab",
        {"config": {**BODY, "dflash_config": NESTED, "num_target_layers": 16}},
        {},
    ),
    "z-lab, default layers": (
        "zlab",
        {"config": {**CONFIG, "dflash_config": {"mask_token_id": MASK}},
             "extra": {"fc.weight": random(H, 2 * H)}},
        {"layer_ids": (1, 13)},
    ),
    "SpecForge's state": (
        "specforge",
        {"config": CONFIG, "raw": raw_state, "files": ("training_state_rank0.pt",)},
        {},
    ),
    "SpecForge's state, sliding": (
        "specforge",
        {"config": {**CONFIG, **SLIDING, "is_causal": False}, "raw": raw_state},
        {"in_block": ("bidirectional", "causal"), "window": (None, 48)},
    ),
    "speculators": (
        "speculators",
        {"config": SPECULATORS, "files": ("optimizer_state_dict.pt",)},
        {"layer_ids": tuple(RAW_IDS), "layer_id_rule": "input", "window_rule": "anchor"},
    ),
    "speculators, sliding, with copies": (
        "speculators",
        {"config": {**SPECULATORS, "transformer_layer_config": {**BODY, **SLIDING}},
             "extra": "copies"},
        {
            "layer_ids": tuple(RAW_IDS),
            "layer_id_rule": "input",
            "window_rule": "anchor",
            "in_block": ("bidirectional", "causal"),
            "window": (None, 48),
            "embedding": "own",
            "head": "own",
        },
    ),
    "speculators, sliding and free, from the anchor": (
        "speculators",
        {"config": {**SPECULATORS, "transformer_layer_config": {**BODY, **SLIDING},
                     "sliding_window_non_causal": True, "sample_from_anchor": True,
                     "speculators_config": None}},
        {
            "layer_ids": tuple(RAW_IDS),
            "layer_id_rule": "input",
            "window_rule": "anchor",
            "window": (None, 48),
            "label_layout": "next",
        },
    ),
    "DeepSpec": (
        "deepspec",
        {"config": DEEPSPEC, "extra": "copies",
             "files": ("train_config.py", "training_state.rank0.pt")},
        {"label_layout": "next", "embedding": "own", "head": "own"},
    ),
    "DeepSpec, relabelled, with the embedding tapped": (
        "deepspec",
        {"config": {**DEEPSPEC, "architectures": ["DFlashDraftModel"],
                     "target_layer_ids": [-1, 4, 7, 10, 13]}, "extra": "copies"},
        {
            "label_layout": "next",
            "embedding": "own",
            "head": "own",
            "layer_ids": (-1, 4, 7, 10, 13),
        },
    ),
    "Automodel": ("automodel", {"config": AUTOMODEL}, {}),
    "Automodel, sliding": (
        "automodel", {"config": {**AUTOMODEL, **SLIDING}}, {"window": (None, 48)},
    ),
    "Automodel's JetSpec": (
        "automodel",
        {"config": {**AUTOMODEL, "dflash_config": {**CONFIG["dflash_config"], "causal": True}}},
        {"in_block": ("causal", "causal")},
    ),
    "Model-Optimizer": ("modelopt", {"config": MODELOPT}, {"window": (48, 48)}),
    "Model-Optimizer, raw, the last layer tapped": (
        "modelopt",
        {"config": {**CONFIG, "dflash_config": {"mask_token_id": MASK,
                                                 "target_layer_ids": [1, 4, 7, 10, 15]}},
             "rename": "dflash_module.{}".format},
        {"layer_ids": (1, 4, 7, 10, 15), "last_layer_normed": True},
    ),
    "verl-SpeCo": (
        "speco",
        {"config": SPECO, "extra": "embedding", "files": ("metadata.json",)},
        {"embedding": "own"},
    ),
    "verl-SpeCo, all by default": (
        "speco",
        {"config": {**SPECO, **SLIDING, "mask_token_id": None, "target_layer_ids": None,
                     "rope_theta": None, "is_causal": True,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
             "rename": "_orig_mod.draft_model.{}".format},
        {"mask_token_id": V - 1},
    ),
    "vLLM's form": (
        "vllm", {"config": VLLM}, {"layer_ids": tuple(RAW_IDS), "layer_id_rule": "input"},
    ),
}  # fmt: skip
EXTRA = {
    "copies": lambda: target_parts(),
    "embedding": lambda: {"embed_tokens.weight": target_parts()["embed_tokens.weight"]},
}


def written(write, how):
    return write(**{**how, "extra": EXTRA.get(how.get("extra"), lambda: how.get("extra"))()}
                 if isinstance(how.get("extra"), str) else how)  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_field_of_every_layout(name, write):
    stack, how, changes = LAYOUTS[name]
    checkpoint = written(write, how)
    found = detect_stack(checkpoint)
    assert found.name == stack, found
    assert found.evidence
    convention = resolve_convention(checkpoint)
    expected = dataclasses.replace(PLAIN, **changes)
    for spec in dataclasses.fields(Convention):
        if spec.name != "sources":
            assert getattr(convention, spec.name) == getattr(expected, spec.name), spec.name
            source = convention.sources[spec.name]
            assert source.key or source.confidence == "default", spec.name
    assert audit(checkpoint, FACTS) == []
    check_against_target(checkpoint, convention, FACTS)
    for finding in (*ambiguities(checkpoint), *absent_keys(checkpoint)):
        assert "\n" not in str(finding)


EVIDENCE = {
    "z-lab": "architecture is DFlashDraftModel",
    "z-lab, all nested": "has dflash_config",
    "SpecForge's state": "draft_state_dict and strategy",
    "speculators": "has speculators_model_type; optimizer_state_dict.pt beside",
    "DeepSpec": "train_config.py beside the weights; training_state.rank0.pt",
    "DeepSpec, relabelled, with the embedding tapped": "target_layer_ids and num_anchors",
    "Automodel": "architecture is Qwen3DFlashDraftModel",
    "Model-Optimizer": "dflash_config has use_swa, swa_window_size, causal",
    "Model-Optimizer, raw, the last layer tapped": "named dflash_module",
    "verl-SpeCo": "metadata.json, and model_type is dflash",
    "vLLM's form": "has eagle_aux_hidden_state_layer_ids",
}


@pytest.mark.parametrize("name", EVIDENCE)
def test_the_evidence_is_what_the_files_show(name, write):
    assert EVIDENCE[name] in str(detect_stack(written(write, LAYOUTS[name][1])))


def test_signs_of_another_stack_are_not_lost(write):
    both = detect_stack(write({**SPECULATORS, "architectures": ["Qwen3DFlashDraftModel"]}))
    assert both.name == "speculators"
    assert both.against == ("Automodel: the architecture is Qwen3DFlashDraftModel",)
    jet = detect_stack(written(write, LAYOUTS["Automodel's JetSpec"][1]))
    assert jet.against == ("Model-Optimizer: dflash_config has causal",)


# --- the same function gives the same numbers -----------------------------------------------------


SAME = {
    "z-lab, old places": {},
    "z-lab, all nested": {},
    "SpecForge's state": {},
    "SpecForge's state, sliding": {"in_block": ("bidirectional", "causal"), "window": (None, 48)},
    "speculators": {},
    "DeepSpec": {"label_layout": "next"},
    "Automodel": {},
    "Automodel's JetSpec": {"in_block": ("causal", "causal")},
    "Model-Optimizer": {"window": (48, 48)},
    "verl-SpeCo": {},
    "vLLM's form": {},
}
"""Layouts, and what differs in the reading of the original that gives the same function."""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    from dflash_diag.capture import make_capture
    from dflash_diag.example import EXAMPLE

    return make_capture(
        str(ZOO / "hybrid" / "target"),
        EXAMPLE.read_prompts()[:2],
        tmp_path_factory.mktemp("small") / "capture",
        max_new_tokens=24,
        layers="all",
        silent=True,
    )


@pytest.mark.parametrize("name", SAME)
def test_scores_are_those_of_the_original(name, write, small):
    checkpoint = written(write, LAYOUTS[name][1])
    convention = resolve_convention(checkpoint)
    theirs = score(small, load_drafter(checkpoint, convention, dtype=torch.float32), silent=True)
    original = read_checkpoint(HEALTHY)
    reading = dataclasses.replace(resolve_convention(original), **SAME[name])
    ours = score(small, load_drafter(original, reading, dtype=torch.float32), silent=True)
    assert len(ours.anchor) > 10
    for column in ("proposed", "labels", "topk_ids", "label_logprob"):
        assert np.array_equal(getattr(theirs, column), getattr(ours, column)), column


def test_norm_epsilon_is_found_where_speculators_nests_it(write):
    body = {**BODY, "rms_norm_eps": 1e-2}
    checkpoint = write({**SPECULATORS, "transformer_layer_config": body})
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint))
    assert drafter.shape.norm_eps == 1e-2


# --- kinds of drafters ----------------------------------------------------------------------------


def dflash2(suffix: str = "", rank: int = 4) -> dict[str, torch.Tensor]:
    out = {
        f"candidate_selector.predecessor_codebook{suffix}": random(V, rank),
        f"candidate_selector.successor_codebook{suffix}": random(V, rank),
        "candidate_selector.hidden_projection.weight": random(rank, H),
    }
    for layer in range(2):
        for part in ("attention_conv", "mlp_conv"):
            out[f"layers.{layer}.{part}.base_kernel"] = random(2, 2, H)
            out[f"layers.{layer}.{part}.kernel_projection.weight"] = random(2 * 2 * H // 16, H)
    return out


def dspark(
    head: str = "vanilla", rank: int = 4, prefix: str = "markov_head.", dot: str = ".weight"
):
    out = {f"{prefix}markov_w1{dot}": random(V, rank), f"{prefix}markov_w2{dot}": random(V, rank)}
    if head == "gated":
        out[f"{prefix}gate_proj.weight"] = random(rank, H + rank)
        out[f"{prefix}gate_proj.bias"] = random(rank)
    if head == "rnn":
        out[f"{prefix}joint_proj.weight"] = random(3 * rank, 2 * rank + H)
        out[f"{prefix}joint_proj.bias"] = random(3 * rank)
    return out


SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 4, "selector_top_k": 16}
CONFIDENCE = {
    "confidence_head.proj.weight": random(1, H + 4),
    "confidence_head.proj.bias": random(1),
}
KINDS = {
    "z-lab's DFlash2": (
        {"config": {**CONFIG, **SLIDING, "architectures": ["DFlash2DraftModel"],
                     "is_causal": False,
                     "dflash_config": {**CONFIG["dflash_config"], **SELECTOR}},
             "extra": dflash2(".weight")},
        {"proposal": "selector", "window": (None, 48)},
    ),
    "Automodel's DFlash2": (
        {"config": {**AUTOMODEL, **SELECTOR, "architectures": ["Qwen3DFlash2DraftModel"]},
             "extra": dflash2(".weight")},
        {"proposal": "selector"},
    ),
    "speculators' DFlash2": (
        {"config": {**SPECULATORS, **SELECTOR, "speculators_model_type": "dflash2",
                     "architectures": ["DFlash2DraftModel"],
                     "sliding_window_non_causal": None,
                     "transformer_layer_config": {**BODY, **SLIDING}},
             "extra": dflash2()},
        {"proposal": "selector", "window": (None, 48), "layer_ids": tuple(RAW_IDS),
         "layer_id_rule": "input", "window_rule": "anchor"},
    ),
    "DFlash2 told by its tensors": (
        {"config": CONFIG, "extra": dflash2()}, {"proposal": "selector"},
    ),
    "DeepSpec's DSpark": (
        {"config": {**DEEPSPEC, "markov_rank": 4, "markov_head_type": "gated",
                     "enable_confidence_head": True}, "extra": {**dspark("gated"), **CONFIDENCE}},
        {"proposal": "markov", "label_layout": "next"},
    ),
    "SpecForge's DSpark, early names": (
        {"config": {**CONFIG, "architectures": ["DSparkDraftModel"],
                     "dflash_config": {**CONFIG["dflash_config"], "projector_type": "dspark",
                                       "markov_rank": 4}},
             "extra": dspark(prefix="logit_head.markov_head."), "raw": raw_state},
        {"proposal": "markov", "label_layout": "next"},
    ),
    "Model-Optimizer's DSpark, bare names": (
        {"config": {**CONFIG, "dflash_config": {
            **CONFIG["dflash_config"], "projector_type": "dspark", "markov_rank": 4,
            "use_confidence_head": True, "shift_label": True}},
             "extra": {**dspark("rnn", prefix="", dot=""), "confidence_proj.weight": random(1, H),
                    "confidence_proj.bias": random(1)}},
        {"proposal": "markov", "label_layout": "next"},
    ),
    "speculators' DSpark, bonus anchor": (
        {"config": {**SPECULATORS, "speculators_model_type": "dspark",
                     "architectures": ["DSparkSpeculator"], "markov_rank": 4},
             "extra": {**dspark(), **CONFIDENCE}},
        {"proposal": "markov", "layer_ids": tuple(RAW_IDS), "layer_id_rule": "input",
         "window_rule": "anchor"},
    ),
    "DSpark without a Markov head": (
        {"config": {**DEEPSPEC, "markov_rank": 0, "enable_confidence_head": True},
             "extra": {"confidence_head.proj.weight": random(1, H)}},
        {"label_layout": "next"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_told_by_their_tensors_and_audited(name, write):
    how, changes = KINDS[name]
    checkpoint = write(**how)
    assert resolve_convention(checkpoint) == dataclasses.replace(PLAIN, **changes)
    assert audit(checkpoint, FACTS) == []
    lost = next((n for n in checkpoint.tensors if "w2" in n or "successor" in n), None)
    if lost:
        stored = checkpoint.tensors.stored_names[lost]
        without = write(**{**how, "extra": {n: t for n, t in how["extra"].items() if n != stored}})
        assert [(p.name, p.kind) for p in audit(without, FACTS)] == [(lost, "missing")]
        wrong = write(**{**how, "extra": {**how["extra"], stored: random(V, 7)}})
        assert [(p.name, p.kind) for p in audit(wrong, FACTS)] == [(lost, "misshapen")]


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        (
            {"logit_head.prefix_gru.weight_ih_l0": random(4, 4), "embed_proj.0.weight": random(4)},
            r"embed_proj\.0\.weight, prefix_gru\.weight_ih_l0: a Domino drafter: its GRU",
        ),
        (
            {f"refiner_head.{n}": random(4) for n in ("down_h.weight", "mix_l", "readout.weight")},
            r"refiner_head\.down_h\.weight, refiner_head\.mix_l and 1 more: an XPress drafter",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_by_its_tensors(extra, match, write):
    checkpoint = write(CONFIG, extra)
    with pytest.raises(CheckpointError, match=f"{match}.*no server runs"):
        resolve_convention(checkpoint)


def test_a_label_key_decides_over_the_kind(write):
    nested = {**CONFIG["dflash_config"], "projector_type": "dspark", "markov_rank": 4}
    for key, value, layout in (
        ("shift_label", False, "same"),
        ("dspark_bonus_anchor", True, "same"),
        ("sample_from_anchor", True, "next"),
    ):
        checkpoint = write({**CONFIG, "dflash_config": {**nested, key: value}}, dspark())
        convention = resolve_convention(checkpoint)
        assert convention.label_layout == layout
        assert convention.sources["label_layout"].key == f"dflash_config.{key}"
    checkpoint = write({**SPECULATORS, "speculators_model_type": "dspark", "markov_rank": 4,
                        "sample_from_anchor": None, "speculators_config": None},
                       dspark())  # fmt: skip
    assert resolve_convention(checkpoint).label_layout == "next"
    (absent,) = (one for one in absent_keys(checkpoint) if one.field == "label_layout")
    assert absent.assumed["SGLang"] == "next"
    assert absent.assumed["vLLM's adapter of speculators"] == "same"


# --- a reduced vocabulary -------------------------------------------------------------------------


def reduced(kept: torch.Tensor, kind: str, *, marked: bool = True) -> dict[str, torch.Tensor]:
    d2t = kept - torch.arange(len(kept)) if kind == "offset" else kept
    extra = {"d2t": d2t, "lm_head.weight": target_parts()["lm_head.weight"][kept]}
    if marked:
        t2d = torch.zeros(V, dtype=torch.bool)
        t2d[kept] = True
        extra["t2d"] = t2d
    return extra


KEPT = torch.arange(0, 2000, 2)


@pytest.mark.parametrize("marked", [True, False])
def test_offsets_are_read_as_offsets(marked, write):
    config = {**SPECULATORS, "draft_vocab_size": len(KEPT)}
    checkpoint = write(config, reduced(KEPT, "offset", marked=marked))
    convention = resolve_convention(checkpoint)
    assert (convention.vocabulary_map, convention.head) == ("offset", "own")
    assert convention.embedding == "target"
    assert audit(checkpoint, FACTS) == []
    check_against_target(checkpoint, convention, FACTS)
    assert contradictions(checkpoint) == []


def test_target_ids_in_a_stack_of_offsets_are_read_as_such_and_reported(write):
    config = {**SPECULATORS, "draft_vocab_size": len(KEPT)}
    checkpoint = write(config, reduced(KEPT, "absolute"))
    assert resolve_convention(checkpoint).vocabulary_map == "absolute"
    (found,) = contradictions(checkpoint)
    assert (found.field, found.used_value, found.other_value) == (
        "vocabulary_map", "absolute", "offset"
    )  # fmt: skip
    # Without marks both fit: the stack's own rule counts, and that is said.
    checkpoint = write(config, reduced(KEPT, "absolute", marked=False))
    assert possible_kinds(checkpoint) == ("offset", "absolute")
    assert resolve_convention(checkpoint).vocabulary_map == "offset"
    assert any(one.other == "absolute" for one in ambiguities(checkpoint))
    # Ids so high that they are no offsets prove themselves.
    high = torch.arange(V - len(KEPT), V)
    checkpoint = write(config, reduced(high, "absolute", marked=False))
    assert resolve_convention(checkpoint).vocabulary_map == "absolute"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda e: e | {"d2t": e["d2t"].float()}, "d2t is float32"),
        (lambda e: e | {"d2t": e["d2t"][:, None]}, r"d2t is int64 \[1000, 1\]"),
        (
            lambda e: e | {"d2t": e["d2t"][:-1]},
            "d2t has 999 entries; expected 1000, as draft_vocab",
        ),
        (lambda e: e | {"d2t": e["d2t"] + 1}, "neither as offsets nor as target ids.*t2d marks"),
        (lambda e: e | {"d2t": e["d2t"] - 9000}, "neither as offsets"),
        (lambda e: e | {"t2d": e["t2d"][:-1]}, "t2d has 3071 entries from 0 to 1"),
        (lambda e: {n: t for n, t in e.items() if n != "d2t"}, "has no d2t"),
    ],
)
def test_a_map_of_the_wrong_kind(change, match, write):
    config = {**SPECULATORS, "draft_vocab_size": len(KEPT)}
    checkpoint = write(config, change(reduced(KEPT, "offset")))
    with pytest.raises(CheckpointError, match=match):
        resolve_convention(checkpoint)


def test_a_reduced_vocabulary_needs_its_own_head(write):
    extra = reduced(KEPT, "offset")
    del extra["lm_head.weight"]
    (problem,) = audit(write({**SPECULATORS, "draft_vocab_size": len(KEPT)}, extra), FACTS)
    assert (problem.name, problem.kind, problem.expected) == (
        "lm_head.weight", "missing", "[1000, 256]"
    )  # fmt: skip


# --- bad input, contradictions, absences ----------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**BODY, "architectures": ["LlamaForCausalLM"]}, "architecture is LlamaForCausalLM, and"),
        ({**DEEPSPEC, "target_layer_ids": [4, 1, 7, 10, 13]}, "expected ascending layers"),
        ({**DEEPSPEC, "architectures": ["Gemma4DSparkModel"]}, "Gemma 4"),
        ({**DEEPSPEC, "mask_token_id": None}, "lacks mask_token_id"),
        ({**SPECO, "target_layer_ids": [1, -1]}, "lists -1, the last layer to verl"),
        (
            {**SPECULATORS, "aux_hidden_state_layer_ids": [-1, 2]},
            "lists -1; expected layers from 0",
        ),
        ({**SPECULATORS, "aux_hidden_state_layer_ids": None}, "lacks the tapped layers"),
        ({**SPECULATORS, "sample_from_anchor": "no"}, "sample_from_anchor is 'no'"),
        ({**VLLM, "eagle_aux_hidden_state_layer_ids": [2, 2]}, "lists layer 2 twice"),
        (
            {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], "use_swa": True}},
            "swa_window_size is None",
        ),
        ({**DEEPSPEC, "markov_rank": -1}, "markov_rank is -1"),
        ({**CONFIG, "use_sliding_window": "false", "sliding_window": 16}, "true or false"),
        ({**CONFIG, "use_sliding_window": 1, "sliding_window": 16}, "true or false"),
        ({**CONFIG, "is_causal": "false"}, "true or false"),
        ({**CONFIG, "architectures": ["DominoDraftModel"]}, "a Domino drafter"),
        (
            {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], "projector_type": "magic"}},
            "projector_type is 'magic'",
        ),
        (
            {**CONFIG, "dflash_config": {**CONFIG["dflash_config"], "use_swa": "false"}},
            "true or false",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(config, match, write):
    checkpoint = write(config)
    with pytest.raises(CheckpointError, match=match) as caught:
        resolve_convention(checkpoint)
    assert "\n" not in str(caught.value)


def test_fc_of_a_width_that_fits_no_count(write):
    (problem,) = audit(write(SPECULATORS, {"fc.weight": random(H, 4 * H)}), FACTS)
    assert problem.reason == "fc expects 4 taps, aux_hidden_state_layer_ids lists 5"
    (problem,) = audit(write(SPECULATORS, {"fc.weight": random(H, 4 * H + 2)}), FACTS)
    assert "no multiple of the target's hidden size 256" in problem.reason


NEST = CONFIG["dflash_config"]
DISAGREEMENTS = {
    "block size": (
        {**CONFIG, "dflash_config": {**NEST, "block_size": 16}},
        ("block_size", 16, "block_size", 8),
    ),
    "block size and proposals": (
        {**SPECULATORS, "block_size": 16},
        ("block_size", 16, "speculators_config.proposal_methods.speculative_tokens", 8),
    ),
    "raw ids and ids": (
        {**VLLM, "eagle_aux_hidden_state_layer_ids": IDS},
        ("layer_ids", (0, 3, 6, 9, 12), "dflash_config.target_layer_ids", tuple(IDS)),
    ),
    "causality of JetSpec": (
        LAYOUTS["Automodel's JetSpec"][1]["config"],
        ("in_block", "causal", "is_causal", "bidirectional"),
    ),
    "causality that SpecForge ignores": (
        {**CONFIG, "is_causal": True, "dflash_config": {**NEST, "causal": False}},
        ("in_block", "bidirectional", "is_causal", "causal"),
    ),
    "a window without its switch": (
        {**CONFIG, "layer_types": SLIDING["layer_types"], "sliding_window": 48},
        ("window", None, "sliding_window", (None, 48)),
    ),
    "a window's size without its switch": (
        {**CONFIG, "dflash_config": {**NEST, "swa_window_size": 48}},
        ("window", None, "dflash_config.swa_window_size", 48),
    ),
    "RoPE's base": (
        {**CONFIG, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        ("rope_theta", 1e6, "rope_theta", 10_000.0),
    ),
    "a base that verl-SpeCo does not read": (
        {**SPECO, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
        ("rope_theta", 10_000.0, "rope_parameters.rope_theta", 5e6),
    ),
    "RoPE's scaling": (
        {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "default"}, "max_position_embeddings": None},
        ("rope_scaling", '{"factor": 2.0, "rope_type": "linear"}', "rope_parameters", None),
    ),
    "the share that is rotated": (
        {**CONFIG, "rope_parameters": {"partial_rotary_factor": 0.5}, "partial_rotary_factor": 1.0},
        ("rotary_width", 16, "partial_rotary_factor", 32),
    ),
    "sections of another width": (
        {**CONFIG, "rope_parameters": {"mrope_section": [2, 1, 1]}},
        ("rotary_width", 32, "rope_parameters.mrope_section", 8),
    ),
    "the pairing": (
        {**CONFIG, "rope_is_neox_style": True, "is_neox_style": False},
        ("rope_interleaved", False, "is_neox_style", True),
    ),
    "the layout": (
        {**CONFIG, "sample_from_anchor": False, "dflash_config": {**NEST, "shift_label": True}},
        ("label_layout", "same", "dflash_config.shift_label", "next"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_a_disagreement_is_found_and_named(name, write):
    config, expected = DISAGREEMENTS[name]
    checkpoint = write(config)
    (found,) = contradictions(checkpoint)
    assert (found.field, found.used_value, found.other, found.other_value) == expected
    used = getattr(resolve_convention(checkpoint), found.field)
    if found.field != "layer_ids":
        assert found.used_value in (used, used[0] if isinstance(used, tuple) else used)


AGREEMENTS = {
    "all layouts": [how["config"] for stack, how, _ in LAYOUTS.values()
                    if stack != "specforge" and "default" not in how],
    "mirrored RoPE": [{**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                       "rope_parameters": {"rope_type": "linear", "factor": 2.0,
                                           "rope_theta": 1e4}}],
    "two places, one value": [{**CONFIG, "mask_token_id": MASK, "target_layer_ids": IDS}],
    "both kinds of ids": [VLLM],
}  # fmt: skip


@pytest.mark.parametrize("name", AGREEMENTS)
def test_what_agrees_is_no_contradiction(name, write):
    tolerated = [LAYOUTS["Automodel's JetSpec"][1]["config"],
                 LAYOUTS["verl-SpeCo, all by default"][1]["config"]]  # fmt: skip
    for config in AGREEMENTS[name]:
        if config not in tolerated:
            assert contradictions(write(config)) == []


def test_a_partial_rotary_width_is_honoured_and_said_to_be_ambiguous(write):
    checkpoint = write({**CONFIG, "rope_parameters": {"rope_theta": 1e4,
                                                      "partial_rotary_factor": 0.25}})  # fmt: skip
    convention = resolve_convention(checkpoint)
    assert convention.rotary_width == 8
    assert convention.sources["rotary_width"].key == "rope_parameters.partial_rotary_factor"
    (found,) = ambiguities(checkpoint)
    assert (found.field, found.used, found.other) == ("rotary_width", 8, 32)
    assert "transformers' Qwen3 class" in found.readers


def test_absent_keys_say_what_each_stack_would_assume(write):
    complete = absent_keys(write({**CONFIG, "sample_from_anchor": False}))
    assert complete == []
    bare = write({**CONFIG, **SLIDING, "block_size": None, "rope_theta": None,
                  "dflash_config": {}})  # fmt: skip
    found = {one.field: one for one in absent_keys(bare)}
    assert list(found) == ["block_size", "layer_ids", "mask_token_id", "rope_theta", "in_block",
                           "label_layout"]  # fmt: skip
    assert found["block_size"].used == 16
    assert {k: found["block_size"].assumed[k] for k in ("speculators", "DeepSpec", "SGLang")} == {
        "speculators": 8, "DeepSpec": 7, "SGLang": 16
    }  # fmt: skip
    assert found["layer_ids"].used == (1, 13)
    assert found["layer_ids"].assumed["verl-SpeCo"] == (1, 4, 7, 10, 13)
    assert found["layer_ids"].assumed["vLLM serving"] == (1, 7, 12)
    assert found["layer_ids"].assumed["DeepSpec"] is None
    assert found["mask_token_id"].used is None
    assert found["mask_token_id"].assumed["verl-SpeCo"] == V - 1
    assert found["rope_theta"].assumed["vLLM serving"] == 1e6
    assert found["in_block"].used == ("bidirectional", "causal")
    assert found["in_block"].assumed["Automodel"] == "bidirectional"
    assert "DeepSpec: next" in str(found["label_layout"])
    assert "it has to be given" in str(found["mask_token_id"])


def test_a_mask_embedding_beside_the_weights_is_not_overlooked(write):
    checkpoint = write(CONFIG, files=("mask_embedding.pt",))
    (found,) = ambiguities(checkpoint)
    assert (found.field, found.other) == ("mask_token_id", "mask_embedding.pt")


AMBIGUOUS = {
    "unsorted layers": ({**CONFIG, "dflash_config": {**NEST, "target_layer_ids": [4, 1, 7]}},
                        "layer_ids", [1, 4, 7]),
    "the last layer": ({**CONFIG, "dflash_config": {**NEST, "target_layer_ids": [1, 4, 7, 10, 15]}},
                       "last_layer_normed", True),
    "the embedding": ({**CONFIG, "dflash_config": {**NEST, "target_layer_ids": [-1, 1, 4, 7, 10]}},
                      "layer_ids", "the last layer"),
    "a window for all layers": (MODELOPT, "window", None),
    "a window from the anchor": ({**SPECULATORS, "transformer_layer_config": {**BODY, **SLIDING}},
                                 "window_rule", "slot"),
    "full layers served causal": ({**SPECULATORS, "transformer_layer_config": {**BODY, **SLIDING}},
                                  "in_block", "causal"),
    "causality in a nested key": ({**CONFIG, "dflash_config": {**NEST, "causal": True}},
                                  "in_block", "bidirectional"),
    "pairing": ({**CONFIG, "is_neox_style": False}, "rope_interleaved", False),
    "a scale": ({**CONFIG, "input_embedding_scale": 16.0}, "embedding_scale", 1.0),
    "vLLM's scale": ({**CONFIG, "logit_scale": 0.5}, "logit_scale", 0.5),
    "an architecture of nobody": ({**CONFIG, "architectures": ["My"]}, "proposal", "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_statements_that_readers_take_differently(name, write):
    config, field, other = AMBIGUOUS[name]
    found = [(one.field, one.other) for one in ambiguities(write(config))]
    assert (field, other) in found


WEIRD = ["x", -1, 0, 10**30, 1.5, True, [], {"a": {}}, float("nan"), ["x", None]]
FUZZED = {
    "speculators, sliding, with copies": ("transformer_layer_config",),
    "DeepSpec": (),
    "Model-Optimizer": ("dflash_config",),
    "verl-SpeCo": (),
    "vLLM's form": ("dflash_config",),
}


@pytest.mark.parametrize("name", FUZZED)
def test_no_value_of_a_configuration_ends_in_a_traceback(name, write):
    checkpoint = written(write, LAYOUTS[name][1])
    reading, messages = resolve_convention(checkpoint), []
    keys = [(key,) for key in checkpoint.config]
    keys += [(place, key) for place in FUZZED[name] for key in checkpoint.config[place]]
    for *place, key in keys:
        for value in WEIRD:
            config = json.loads(json.dumps(checkpoint.config))
            (config[place[0]] if place else config)[key] = value
            changed = dataclasses.replace(checkpoint, config=config)
            for step in (
                resolve_convention,
                detect_stack,
                lambda c: audit(c, FACTS),
                lambda c: audit(c, convention=reading),
                contradictions,
                absent_keys,
                ambiguities,
                lambda c: check_against_target(c, reading, FACTS),
            ):
                try:
                    step(changed)
                except CheckpointError as error:
                    messages.append(str(error))
    assert len(messages) > 100
    assert not any("\n" in message or len(message) > 300 for message in messages)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (2, 3, 4)])
def test_no_shape_of_an_added_tensor_ends_in_a_traceback(shape, write):
    for config, kind in ((SELECTOR, dflash2()), ({"markov_rank": 4}, dspark("gated"))):
        whole = {**kind, **target_parts()}
        for name in whole:
            checkpoint = write({**SPECULATORS, **config}, {**whole, name: torch.zeros(shape)})
            (problem,) = audit(checkpoint, FACTS)
            assert (problem.name, problem.kind) == (clean_name(name), "misshapen")
