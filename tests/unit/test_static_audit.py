"""Static checks: every bad input alone is found and named, and a sound checkpoint is left alone."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from dflash_diag.capture import make_capture
from dflash_diag.causes import CAUSES
from dflash_diag.checkpoints import audit, load_drafter, read_checkpoint, resolve_convention
from dflash_diag.config import RunConfig
from dflash_diag.drafter import rope_frequencies
from dflash_diag.prompts import Prompt
from dflash_diag.results import Verdict
from dflash_diag.runs import Run
from dflash_diag.static_audit import (
    CHECKS,
    Material,
    TokenizerFacts,
    audit_static,
    captured_sample,
    findings,
)
from dflash_diag.static_audit.ablation import effects, random_sample
from dflash_diag.static_audit.ownership import compare, spectral_edge
from dflash_diag.static_audit.tensors import check_effect, check_loaded, check_norms
from dflash_diag.static_audit.tokens import check_tables, check_vocabulary
from tests.conftest import ZOO

H, HEADS, KV, D, MLP, LAYERS, V, N = 16, 4, 2, 8, 24, 2, 64, 8
MASK, EOS = 60, 0
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
    "vocab_size": V,
    "max_position_embeddings": 256,
    "num_target_layers": N,
    "block_size": 4,
    "rope_theta": 10000.0,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 3, 5]},
}
TARGET = {
    "hidden_size": H,
    "vocab_size": V,
    "n_layers": N,
    "max_positions": 256,
    "eos_token_ids": [EOS],
}
TOKENIZER = TokenizerFacts(size=V, special={"eos": EOS, "bos": 1, "pad": 2, "mask": MASK})


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def table(seed: int = 0) -> torch.Tensor:
    """Rows that share directions, as those of a trained model do."""
    shared = torch.randn(2, H, generator=drawn(seed)) * 3
    mix = torch.randn(V, 2, generator=drawn(seed + 1))
    return mix @ shared + torch.randn(V, H, generator=drawn(seed + 2))


EMBEDDING = table()
TEXTS = (torch.arange(3, 50), torch.arange(5, 40))


def tensors() -> dict[str, torch.Tensor]:
    """Random matrices, and factors in the norms."""
    rng = drawn()
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,)}
    for i in range(LAYERS):
        attention, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {
            f"{attention}q_proj.weight": (HEADS * D, H),
            f"{attention}k_proj.weight": (KV * D, H),
            f"{attention}v_proj.weight": (KV * D, H),
            f"{attention}o_proj.weight": (H, HEADS * D),
            f"{attention}q_norm.weight": (D,),
            f"{attention}k_norm.weight": (D,),
            f"{mlp}gate_proj.weight": (MLP, H),
            f"{mlp}up_proj.weight": (MLP, H),
            f"{mlp}down_proj.weight": (H, MLP),
            f"layers.{i}.input_layernorm.weight": (H,),
            f"layers.{i}.post_attention_layernorm.weight": (H,),
        }
    shapes["norm.weight"] = (H,)
    return {
        name: 0.5 + torch.rand(shape, generator=rng)
        if len(shape) == 1
        else torch.randn(shape, generator=rng)
        for name, shape in shapes.items()
    }


NAMES = sorted(tensors())
NORMS = [name for name in NAMES if "norm" in name]


@pytest.fixture
def make(tmp_path):
    """What is at hand for a checkpoint with some tensors and settings changed; None removes."""

    def write(weights=None, *, settings=(), args=None, files=(), at_hand=None, **config):
        nested = {**CONFIG["dflash_config"], **config.pop("dflash_config", {})}
        kept = {**CONFIG, **config, "dflash_config": nested}
        kept["dflash_config"] = {k: v for k, v in nested.items() if v is not None}
        kept = {k: v for k, v in kept.items() if v is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        held = {k: v for k, v in {**tensors(), **(weights or {})}.items() if v is not None}
        save_file(held, tmp_path / "model.safetensors")
        if args:
            (tmp_path / "training_args.json").write_text(json.dumps(args))
        for name in files:
            (tmp_path / name).write_bytes(b"x")
        return material(tmp_path, settings=settings, **(at_hand or {}))

    return write


def material(folder, *, settings=(), **at_hand) -> Material:
    checkpoint = read_checkpoint(folder)
    how = resolve_convention(checkpoint, settings=settings)
    problems = audit(checkpoint, convention=how)
    standing_in = [p for p in problems if p.kind != "unexpected" and "norm" not in p.name]
    drafter = None if standing_in else load_drafter(checkpoint, how, strict=False)
    known = {
        "checkpoint": checkpoint,
        "convention": how,
        "problems": problems,
        "drafter": drafter,
        "target": TARGET,
        "embedding": EMBEDDING,
        "head": EMBEDDING,
        "tokenizer": TOKENIZER,
        "texts": TEXTS,
    }
    return Material(**{**known, **at_hand})


def found(m: Material) -> list[tuple[str, str]]:
    return [(one.cause, one.severity) for one in findings(audit_static(m))]


def notes(m: Material) -> list[str]:
    every = [one for check in audit_static(m) for one in check.findings]
    return [one.cause for one in every if one.severity == "note"]


def text_of(m: Material) -> str:
    return " ".join(one.text for one in findings(audit_static(m)))


# --- sound ----------------------------------------------------------------------------------------


def test_a_sound_checkpoint_has_no_finding_no_note_and_nothing_untested(make):
    m = make(args={"block_size": 4, "target_layer_ids": [1, 3, 5]}, files=["training_log.jsonl"])
    checked = audit_static(m)
    assert len(checked) == len(CHECKS)
    for one in checked:
        assert not one.findings, one
        assert not one.untested, one
        assert one.found
        assert one.expected
    json.dumps([one.to_json() for one in checked])


def test_with_the_checkpoint_alone_checks_say_what_they_lack(make):
    whole = make()
    alone = Material(checkpoint=whole.checkpoint, convention=whole.convention, unloadable="no RAM")
    checked = {one.check: one for one in audit_static(alone)}
    assert not findings(list(checked.values()))
    for name in ("target", "loaded weights", "effect", "mask token", "vocabulary", "length"):
        assert checked[name].untested, name
    assert "no RAM" in checked["effect"].untested[0]


ROPES = {
    "old schema": {},
    "new schema": {"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0}},
    "both, equal": {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},
    "nested, equal": {
        "rope_parameters": {
            "full_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        }
    },
    "nested, a type that no layer has": {
        "layer_types": ["full_attention"] * LAYERS,
        "rope_parameters": {"full_attention": {"rope_theta": 10000.0}},
    },
    "type under both names": {
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "whole head": {"partial_rotary_factor": 1.0},
    "halves, as ever": {"is_neox_style": True},
}


@pytest.mark.parametrize("config", ROPES.values(), ids=ROPES)
def test_every_way_of_saying_the_same_rope_is_sound(make, config):
    m = make(**config)
    assert found(m) == []
    assert notes(m) == []


def test_one_schema_alone_is_a_note_where_a_default_would_differ(make):
    only_old = make(rope_theta=1e6)
    assert found(only_old) == []
    assert notes(only_old) == ["rope.theta"]
    only_new = make(rope_theta=None, rope_parameters={"rope_theta": 1e6})
    assert found(only_new) == []
    assert notes(only_new) == ["rope.theta"]
    scaled = make(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert found(scaled) == []
    assert notes(scaled) == ["rope.scaling"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"dflash_config": {"target_layer_ids": [5, 1, 3]}}, "layers.order"),
        ({"max_position_embeddings": 128}, "rope.scaling"),
        ({"weights": {"embed_tokens.weight": EMBEDDING}}, "head.tying_or_vocab"),
        ({"weights": {"lm_head.weight": EMBEDDING.bfloat16()}}, "head.tying_or_vocab"),
        ({"files": ["hf_quant_config.json"]}, "hidden.dtype"),
        (
            {"at_hand": {"tokenizer": TokenizerFacts(size=V - 3, special={})}},
            "head.tying_or_vocab",
        ),
        (
            {"vocab_size": V - 2, "at_hand": {"tokenizer": TokenizerFacts(size=V - 2, special={})}},
            "head.tying_or_vocab",
        ),
        (
            {"at_hand": {"tokenizer": TokenizerFacts(size=MASK, special={})}},
            "mask_token.id",
        ),
    ],
    ids=(
        "unsorted",
        "shorter than the target",
        "own embedding",
        "own head in bfloat16",
        "quantised",
        "padding",
        "declared without padding",
        "mask token in the padding",
    ),
)
def test_what_is_no_fault_is_a_note(make, changes, cause):
    m = make(**changes)
    assert found(m) == []
    assert cause in notes(m)


# --- one bad input at a time ----------------------------------------------------------------------

UNUSED = "checkpoint.missing_or_unused_tensors"
TWO = "checkpoint.config_contradiction"
FLAT = {name: torch.ones_like(tensors()[name]) for name in NORMS}
BAD = {
    "another target's depth": ({"at_hand": {"target": {**TARGET, "n_layers": 9}}},
                               [("checkpoint.wrong_target", "fail")]),
    "another target's size": (
        {"at_hand": {"target": {**TARGET, "hidden_size": 24}, "embedding": None, "head": None}},
        [("checkpoint.wrong_target", "fail")]),
    "a norm is missing": ({"weights": {"norm.weight": None}}, [(UNUSED, "fail")]),
    "a matrix is missing": ({"weights": {"layers.1.mlp.up_proj.weight": None}}, [(UNUSED, "fail")]),
    "a tensor that no drafter has": (
        {"weights": {"layers.0.gate.weight": torch.ones(2, 2)}}, [(UNUSED, "fail")]),
    "a matrix of zeros": ({"weights": {"layers.0.mlp.gate_proj.weight": torch.zeros(MLP, H)}},
                          [(UNUSED, "warn"), (UNUSED, "warn")]),
    "norms around 0": ({"weights": {n: tensors()[n] - 1 for n in NORMS}},
                       [("norm.missing_or_doubled", "fail")]),
    "norms around 1, read as 1 + w": ({"settings": ["norm_style=one_plus"]},
                                      [("norm.missing_or_doubled", "fail")]),
    "one norm as it was made": ({"weights": {"norm.weight": torch.ones(H)}},
                                [("norm.missing_or_doubled", "warn")]),
    "all norms as they were made": ({"weights": {n: FLAT[n] for n in NORMS if n[0] != "h"}},
                                    [("norm.missing_or_doubled", "warn")]),
    "states that training never read": (
        {"weights": {"hidden_norm.weight": torch.ones(H)}},
        [("hidden.ignored_by_drafter", "warn")]),
    "two block sizes": ({"dflash_config": {"block_size": 8}}, [(TWO, "warn")]),
    "two mask tokens": ({"mask_token_id": 61}, [(TWO, "warn")]),
    "no theta": ({"rope_theta": None}, [("rope.theta", "warn")]),
    "two thetas": ({"rope_parameters": {"rope_theta": 1e6}}, [(TWO, "warn")]),
    "two scalings": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0},
                      "rope_parameters": {"rope_type": "linear", "factor": 4.0}}, [(TWO, "warn")]),
    "scaled in one schema, not in the other": (
        {"rope_scaling": {"type": "linear", "factor": 2.0},
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, [(TWO, "warn")]),
    "part of a head": ({"partial_rotary_factor": 0.25}, [("rope.rotary_width", "warn")]),
    "part of a head, in the new schema": (
        {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        [("rope.rotary_width", "warn")]),
    "positions of a picture": (
        {"rope_parameters": {"rope_theta": 10000.0, "mrope_section": [2, 1, 1]}},
        [("rope.scaling", "warn")]),
    "neighbouring dimensions": ({"is_neox_style": False}, [("rope.interleaving", "warn")]),
    "frequencies of another theta": (
        {"weights": {"rotary_emb.inv_freq": rope_frequencies(1e6, D, None)[0]}},
        [("rope.theta", "fail")]),
    "frequencies that were never made": (
        {"weights": {"rotary_emb.inv_freq": torch.zeros(D // 2)}}, [("rope.theta", "fail")]),
    "frequencies of half a head": (
        {"weights": {"layers.0.self_attn.rotary_emb.inv_freq": rope_frequencies(1e4, 4, None)[0]}},
        [("rope.rotary_width", "fail")]),
    "no layers": ({"dflash_config": {"target_layer_ids": None},
                   "weights": {"fc.weight": torch.randn(H, LAYERS * H, generator=drawn())}},
                  [("layers.missing_or_default", "warn")]),
    "fewer layers than fc reads": ({"dflash_config": {"target_layer_ids": [1, 3]}},
                                   [("layers.missing_or_default", "fail")]),
    "a layer too far": ({"dflash_config": {"target_layer_ids": [1, 3, N]}},
                        [("layers.offset", "fail")]),
    "a negative layer": ({"settings": ["layer_ids=-2,1,3"]}, [("layers.offset", "fail")]),
    "the embedding, or the last layer": ({"dflash_config": {"target_layer_ids": [-1, 1, 3]}},
                                         [("layers.offset", "warn")]),
    "the last layer": ({"dflash_config": {"target_layer_ids": [1, 3, N - 1]}},
                       [("layers.last_layer_in_fc", "warn")]),
    "layers trained one further": ({"args": {"target_layer_ids": [2, 4, 6]}},
                                   [("layers.offset", "warn")]),
    "layers trained in another order": ({"args": {"target_layer_ids": [5, 1, 3]}},
                                        [("layers.order", "warn")]),
    "layers listed twice, differently": ({"target_layer_ids": [1, 3, 6]}, [(TWO, "warn")]),
    "trained with another mask token": ({"args": {"mask_token_id": 7}},
        [("mask_token.id", "warn")]),
    "trained with another block": ({"args": {"block_size": 8}}, [("block.width", "warn")]),
    "mask token outside": ({"at_hand": {"target": {**TARGET, "vocab_size": MASK},
                                        "embedding": EMBEDDING[:MASK], "head": EMBEDDING[:MASK],
                                        "tokenizer": TokenizerFacts(size=MASK, special={})},
                            "vocab_size": MASK}, [("mask_token.id", "fail")]),
    "mask token ends a text": ({"dflash_config": {"mask_token_id": EOS}},
        [("mask_token.id", "fail")]),
    "mask token begins a text": (
        {"at_hand": {"tokenizer": TokenizerFacts(size=V, special={"bos": MASK})}},
        [("mask_token.id", "fail")]),
    "mask token pads": ({"at_hand": {"tokenizer": TokenizerFacts(size=V, special={"pad": MASK})}},
                        [("mask_token.id", "warn")]),
    "mask token is another's": (
        {"at_hand": {"tokenizer": TokenizerFacts(size=V, special={"mask": 61})}},
        [("mask_token.id", "warn")]),
    "mask token is a word": ({"at_hand": {"texts": (torch.tensor([3, MASK, 4]),)}},
                             [("mask_token.id", "warn")]),
    "mask token without a row": (
        {"at_hand": {"embedding": EMBEDDING.index_fill(0, torch.tensor([MASK]), 0)}},
        [("mask_token.id", "warn")]),
    "more tokens than rows": (
        {"at_hand": {"tokenizer": TokenizerFacts(size=V + 1, special={"mask": MASK})}},
        [("head.tying_or_vocab", "fail")]),
    "another vocabulary": ({"vocab_size": V // 2}, [("head.tying_or_vocab", "fail")]),
    "a random head": ({"weights": {"lm_head.weight": torch.randn(V, H, generator=drawn(9))}},
                      [("head.tying_or_vocab", "fail")]),
    "a head of zeros": ({"weights": {"lm_head.weight": torch.zeros(V, H)}},
                        [("head.tying_or_vocab", "fail")]),
    "a head that was trained": ({"weights": {"lm_head.weight": EMBEDDING + 0.2 * table(7)}},
                                [("head.tying_or_vocab", "warn")]),
    "another target's embedding": ({"weights": {"embed_tokens.weight": table(20)}},
                                   [("head.tying_or_vocab", "warn")]),
    "two tables, declared as one": (
        {"tie_word_embeddings": True,
         "weights": {"embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING.flip(0)}},
        [("head.tying_or_vocab", "warn"), ("head.tying_or_vocab", "warn")]),
    "texts beyond the last position": ({"max_position_embeddings": 40}, [("rope.scaling", "warn")]),
    "no block size": ({"block_size": None}, [("block.width", "warn")]),
    "another block is asked for": ({"settings": ["block_size=8"]}, [("block.width", "warn")]),
    "the anchor counted as a proposal": (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 4}]}},
        [("block.width", "warn")]),
    "the mask token's vector apart": ({"files": ["mask_embedding.pt"]},
        [("mask_token.id", "warn")]),
    "an adapter apart": ({"files": ["adapter_model.bin"]}, [(UNUSED, "warn")]),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), BAD.values(), ids=BAD)
def test_one_bad_input_is_found_and_nothing_else(make, changes, expected):
    assert found(make(**changes)) == expected
    assert {cause for cause, _ in expected} <= set(CAUSES)


def test_words_that_a_person_needs(make):
    assert "random numbers" in text_of(
        make({"lm_head.weight": torch.randn(V, H, generator=drawn(9))})
    )
    assert "about theta 1e+06" in text_of(
        make({"rotary_emb.inv_freq": rope_frequencies(1e6, D, None)[0].bfloat16()})
    )
    assert "This reading rotates" in text_of(make(partial_rotary_factor=0.25))
    one = findings(audit_static(make(dflash_config={"target_layer_ids": [1, 3, N - 1]})))[0]
    assert one.evidence["delta"] is None


def test_a_buffer_of_the_reading_is_sound_also_in_bfloat16(make):
    ours = rope_frequencies(10000.0, D, None)[0]
    assert found(make({"rotary_emb.inv_freq": ours.bfloat16()})) == []


def test_a_setting_made_by_hand_is_no_contradiction(make):
    m = make(settings=["layer_ids=2,4,6"])
    assert found(m) == []
    assert notes(m) == ["layers.offset"]
    assert found(make(settings=["rope_theta=1e4"], rope_theta=None)) == []


# --- tensors that do nothing ----------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_zeros_is_told_from_all_others(make, name):
    checked = check_effect(make({name: torch.zeros_like(tensors()[name])}))
    assert name in checked.findings[0].evidence["tensors"]
    assert checked.findings[0].text.startswith("Nothing but zeros")
    assert checked.measured["effects"][name] == 0


def test_effects_are_those_of_a_file_with_zeros(make):
    whole = make()
    sample = random_sample(whole.drafter, EMBEDDING)
    measured = effects(whole.drafter, sample)
    assert set(measured) == set(NAMES)
    assert min(measured.values()) > 1e-3
    name = "layers.1.self_attn.v_proj.weight"
    emptied = make({name: torch.zeros_like(tensors()[name])})

    def output(drafter):
        from dflash_diag.blocks import draft_blocks

        features = drafter.features(sample.states)
        return draft_blocks(drafter, EMBEDDING, sample.tokens, sample.anchors, features)

    plain = output(whole.drafter)
    expected = (output(emptied.drafter) - plain).norm() / plain.norm()
    assert measured[name] == pytest.approx(float(expected), rel=1e-5)


def test_silencing_leaves_the_drafter_as_it_was(make):
    drafter = make().drafter
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    effects(drafter, random_sample(drafter))
    after = drafter.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_norm_that_the_reading_skips_has_no_effect(make):
    m = make(settings=["final_norm=skipped"])
    assert found(m) == [(UNUSED, "warn")]
    assert "norm.weight" in text_of(m)
    assert "skips" in text_of(m)


def test_a_norm_of_one_plus_zero_does_something(make):
    zero = {name: torch.zeros_like(tensors()[name]) for name in ("norm.weight",)}
    centred = {name: tensors()[name] - 1 for name in NORMS} | zero
    m = make(centred, settings=["norm_style=one_plus"])
    assert check_effect(m).findings == []
    assert [one.severity for one in check_norms(m).findings] == ["warn"]  # exactly 0: never trained


def test_parameters_that_are_not_the_files_are_found(make):
    m = make()
    with torch.no_grad():
        m.drafter.fc.weight = torch.nn.Parameter(m.drafter.fc.weight * 2)
    (one,) = check_loaded(m).findings
    assert (one.cause, one.severity) == (UNUSED, "fail")
    assert "fc.weight" in one.text


# --- whose table ----------------------------------------------------------------------------------


def test_what_a_table_is():
    theirs = EMBEDDING
    assert compare(theirs.clone(), theirs).kind == "copy"
    assert compare(theirs.bfloat16(), theirs).kind == "copy"
    assert compare(theirs[: V - 4], theirs).kind == "copy"
    assert compare(theirs + 0.2 * table(7), theirs).kind == "trained"
    assert compare(table(20), theirs).kind == "other"
    assert compare(torch.rand(V, H, generator=drawn()) - 0.5, theirs).kind == "random"
    assert compare(torch.zeros(V, H), theirs).kind == "constant"
    assert compare(theirs.index_fill(0, torch.tensor([3]), torch.nan), theirs).kind == "not finite"
    assert compare(theirs, None).kind == "unknown"
    assert compare(torch.randn(V, 2 * H, generator=drawn()), theirs).kind == "random"
    assert compare(theirs.repeat(1, 2), theirs).kind == "other"
    kept = torch.arange(1, V, 3)
    assert compare(theirs[kept], theirs, kept).kind == "copy"
    assert compare(theirs[kept], theirs).kind != "copy"


@pytest.mark.parametrize("shape", [(64, 64), (400, 32), (5000, 48)])
def test_the_spectrum_of_random_numbers_ends_where_theory_says(shape):
    normal = torch.randn(shape, generator=drawn())
    assert spectral_edge(normal) == pytest.approx(1, abs=0.12)
    assert spectral_edge(17 * (torch.rand(shape, generator=drawn()) - 0.5)) == pytest.approx(
        1, abs=0.12
    )
    trained = load_file(ZOO / "full" / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert spectral_edge(trained) > 10


@pytest.mark.parametrize(
    ("stored", "how", "bad"),
    [
        ("offset", "offset", False),
        ("absolute", "absolute", False),
        ("absolute", "offset", True),
        ("offset", "absolute", True),
    ],
)
@pytest.mark.parametrize("with_t2d", [True, False])
def test_a_map_of_the_vocabulary_leads_to_the_tokens_it_keeps(make, stored, how, bad, with_t2d):
    kept = torch.tensor([2, 5, 9, 30, 41, 63])
    d2t = kept if stored == "absolute" else kept - torch.arange(len(kept))
    weights = {"d2t": d2t, "lm_head.weight": EMBEDDING[kept]}
    if with_t2d:
        weights["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, kept, value=True)
    m = make(weights)
    m = dataclasses.replace(m, convention=dataclasses.replace(m.convention, vocabulary_map=how))
    checked = check_vocabulary(m)
    reads_wrong = bad and (with_t2d or stored == "absolute")
    assert [one.severity for one in checked.findings] == ["fail"] * reads_wrong
    if not bad:
        assert check_tables(m).measured["lm_head.weight"]["kind"] == "copy"


# --- properties -----------------------------------------------------------------------------------


PLAIN = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    unknown=st.dictionaries(st.text(min_size=1).map(lambda k: f"x_{k}"), PLAIN, max_size=4),
    case=st.sampled_from(["healthy", "two thetas", "the last layer", "two mask tokens"]),
)
def test_order_and_unknown_keys_of_the_configuration_change_nothing(
    tmp_path_factory, seed, unknown, case
):
    changes = {} if case == "healthy" else dict(BAD[case][0])
    nested = CONFIG["dflash_config"] | changes.pop("dflash_config", {})
    config = {**CONFIG, **changes, "dflash_config": nested}
    folder = tmp_path_factory.getbasetemp() / "property"
    folder.mkdir(exist_ok=True)
    if not (folder / "model.safetensors").exists():
        save_file(tensors(), folder / "model.safetensors")

    def report(settings):
        (folder / "config.json").write_text(json.dumps(settings))
        m = dataclasses.replace(material(folder), drafter=None)
        return [one.to_json() for one in audit_static(m)]

    shuffled = list((config | unknown).items())
    random.Random(seed).shuffle(shuffled)
    shuffled = dict(shuffled)
    shuffled["dflash_config"] = dict(reversed((nested | unknown).items()))
    assert report(shuffled) == report(config)


# --- the example ----------------------------------------------------------------------------------

STATIC = {
    "last_layer_in_fc": ["layers.last_layer_in_fc"],
    "ignored_context": ["hidden.ignored_by_drafter"],
}
"""What files alone show of the example's faults; all others take measuring."""


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    return make_capture(
        ZOO / "hybrid" / "target",
        [Prompt(id="p0", text="def add(a, b):\n"), Prompt(id="p1", text="The river")],
        tmp_path_factory.mktemp("capture") / "made",
        max_new_tokens=12,
        layers="all",
        silent=True,
    )


def run_of(folder, capture, out):
    return Run.open(
        RunConfig(
            target=str(ZOO / "hybrid" / "target"),
            drafter=str(folder),
            capture=str(capture.path),
            out=str(out),
            draws=200,
        ),
        strict=False,
    )


@pytest.mark.parametrize(
    "name", sorted(path.name for path in (ZOO / "hybrid" / "drafters").iterdir())
)
def test_the_examples_drafters(name, capture, tmp_path):
    result = run_of(ZOO / "hybrid" / "drafters" / name, capture, tmp_path).result(
        "checkpoint.static"
    )
    rows = result.frame[result.frame["status"] == "finding"]
    assert rows["cause"].tolist() == STATIC.get(name, [])
    assert result.verdict is (Verdict.WARN if name in STATIC else Verdict.PASS)
    assert not (result.frame["status"] == "not testable").any()
    notes = result.frame[result.frame["status"] == "note"]["cause"].tolist()
    assert notes == (["layers.last_layer_norm"] if name == "last_layer_in_fc" else [])


def test_the_sample_is_the_captures_own(capture):
    m = material(ZOO / "hybrid" / "drafters" / "healthy")
    sample = captured_sample(capture, m.convention)
    start = capture.prompts[0].n_prompt_tokens
    assert sample.anchors.tolist() == list(range(start, start + 4))
    assert torch.equal(sample.tokens, capture.tokens(0)[: start + 4])
    assert sample.states.shape == (start + 4, 5, 256)


def test_results_are_kept_until_a_file_changes(capture, tmp_path):
    folder = tmp_path / "drafter"
    folder.mkdir()
    for file in (ZOO / "hybrid" / "drafters" / "healthy").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out"

    def verdict():
        return run_of(folder, capture, out).result("checkpoint.static").verdict

    assert verdict() is Verdict.PASS
    (kept,) = (out / "static").iterdir()
    before = kept.stat().st_mtime_ns
    assert verdict() is Verdict.PASS
    assert kept.stat().st_mtime_ns == before
    (folder / "mask_embedding.pt").write_bytes(b"x")
    assert verdict() is Verdict.WARN
    (folder / "mask_embedding.pt").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    result = run_of(folder, capture, out).result("checkpoint.static")
    assert result.verdict is Verdict.FAIL
    assert "ends a text" in result.headline
