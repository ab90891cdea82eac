"""Faults are found in trained weights, named, and told apart from what only resembles them.

Reading faults are planted by rewriting a configuration, training faults and damage are in weights.
``tests/benchmarks/alignment.py`` sweeps every case over all causes; here most look among the causes
that stand near them.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from planted_pair import for_another_basis
from safetensors.torch import load_file, save_file

from dflash_diag.alignment import NO_CONTEXT, Aligner, Alignment, Round, align, surroundings
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.findings import findings
from dflash_diag.paths import data_dir
from dflash_diag.sweeps import Hits, Sweep

DRAFTERS = data_dir() / "zoo" / "hybrid" / "drafters"
MASKS = ("mask.anchor_included", "mask.cross_block_leak", "mask.block_causality", "mask.window")
LEAK = (*MASKS, "norm.missing_or_doubled")
ROPE = ("rope.theta", "rope.rotary_width", "rope.interleaving")
POSITION = ("position.block_offset", "rope.interleaving")
LAYERS = ("layers.offset", "layers.order", "layers.missing_or_default")
PLACES = ("label.shift", "block.width", "hidden.ignored_by_drafter")
PARTS = ("mask_token.id", "norm.missing_or_doubled", "embedding.scale", "head.tying_or_vocab")


def look(capture, folder, *, settings=(), causes=None, prompts=None):
    """What aligning a checkpoint finds: causes that are found, and all entries by cause."""
    checkpoint = read_checkpoint(folder)
    how = resolve_convention(checkpoint, settings=settings)
    drafter = load_drafter(checkpoint, how, dtype=torch.float32)
    sweep = Sweep(capture, drafter, prompts=prompts)
    around = surroundings(capture, checkpoint, drafter, special_ids=[0, 1])
    entries = findings(align(sweep, around, seed=0, draws=20_000, causes=causes))
    return [e["cause"] for e in entries if e["status"] == "found"], {e["cause"]: e for e in entries}


def rewritten(tmp_path, name="healthy", *, nested=None, **changes):
    """A drafter of the example under another configuration."""
    folder = tmp_path / name
    shutil.copytree(DRAFTERS / name, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    config["dflash_config"] |= nested or {}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


READING_FAULTS = {
    "theta off by 100": ({"rope_theta": 1e6}, {}, "rope.theta", ROPE),
    "a quarter of the head": ({"partial_rotary_factor": 0.25}, {}, "rope.rotary_width", ROPE),
    "mask id is eos": ({}, {"mask_token_id": 0}, "mask_token.id", PARTS),
    "permuted taps": ({}, {"target_layer_ids": [4, 10, 1, 7, 13]}, "layers.order", LAYERS),
    "layers one too early": ({}, {"target_layer_ids": [0, 3, 6, 9, 12]}, "layers.offset", LAYERS),
    "layers one too late": ({}, {"target_layer_ids": [2, 5, 8, 11, 14]}, "layers.offset", LAYERS),
    "causal": ({"is_causal": True}, {}, "mask.block_causality", MASKS),
    "a window": (
        {
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 16,
            "use_sliding_window": True,
            "is_causal": False,
        },
        {},
        "mask.window",
        MASKS,
    ),
}


@pytest.mark.parametrize("name", READING_FAULTS)
def test_a_wrong_declaration_is_named_and_the_right_reading_restores(
    name, hybrid_capture, tmp_path
):
    changes, nested, cause, causes = READING_FAULTS[name]
    folder = rewritten(tmp_path, nested=nested, **changes)
    found, entries = look(hybrid_capture, folder, causes=causes)
    assert found == [cause]
    entry = entries[cause]
    assert (entry["kind"], entry["recoverable"]) == ("reading_fault", True)
    declared = resolve_convention(read_checkpoint(folder))
    right = resolve_convention(read_checkpoint(DRAFTERS / "healthy"))
    assert declared != right
    assert declared.override(entry["settings"]) == right
    assert entry["delta"]["lo"] > 0
    assert entry["remedy"]


@pytest.mark.parametrize(
    ("setting", "back"),
    [
        ("final_norm=skipped", "final_norm=once"),
        ("feature_norm=skipped", "feature_norm=once"),
        ("norm_style=one_plus", "norm_style=plain"),
        ("position_offset=-1", "position_offset=0"),
        ("position_offset=6", "position_offset=0"),  # beyond the shifts that are tried at first
    ],
)
def test_a_reading_given_by_hand_is_corrected(setting, back, hybrid_capture):
    causes = POSITION if setting.startswith("position") else PARTS
    found, entries = look(hybrid_capture, DRAFTERS / "healthy", settings=[setting], causes=causes)
    assert len(found) == 1
    assert entries[found[0]]["settings"] == [back]
    assert entries[found[0]]["recoverable"] is True


def test_two_faults_at_once_are_both_named(hybrid_capture, tmp_path):
    folder = rewritten(tmp_path, nested={"mask_token_id": 0}, rope_theta=1e6)
    found, entries = look(hybrid_capture, folder, causes=(*PARTS[:2], *ROPE[:2]))
    assert sorted(found) == ["mask_token.id", "rope.theta"]
    assert "on top of" in entries[found[1]]["evidence"]


def test_the_anchor_in_the_context_is_named_among_all_causes(hybrid_capture):
    found, entries = look(hybrid_capture, DRAFTERS / "anchor_included")
    assert found == ["mask.anchor_included"]
    entry = entries[found[0]]
    assert (entry["kind"], entry["recoverable"]) == ("training_fault", False)
    assert entry["delta"]["lo"] > 0.9
    # Narrower blocks gain too, until the anchor's own state is shown.
    assert "block.width" in entry["aliases"]
    assert entries["block.width"]["status"] == "excluded"


@pytest.mark.parametrize(
    ("name", "cause", "kind", "recoverable", "causes"),
    [
        ("cross_block_leak", "mask.cross_block_leak", "training_fault", False, LEAK),
        ("label_shift", "label.shift", "ambiguous", None, PLACES),
        ("ignored_context", "hidden.ignored_by_drafter", "training_fault", False, PLACES),
    ],
)
def test_a_training_fault_is_named_and_promises_nothing(
    name, cause, kind, recoverable, causes, hybrid_capture
):
    found, entries = look(hybrid_capture, DRAFTERS / name, causes=causes)
    assert found[0] == cause
    assert entries[cause]["kind"] == kind
    assert entries[cause]["recoverable"] is recoverable
    assert [entries[c]["recoverable"] for c in found[1:]] == []


@pytest.mark.parametrize(
    ("name", "cause", "settings", "causes"),
    [
        ("position_plus_one", "position.block_offset", ["position_offset=1"], POSITION),
        ("layer_offset", "layers.offset", ["layer_ids=0,3,6,9,12"], LAYERS),
        ("block_causal", "mask.block_causality", ["in_block=causal"], MASKS),
    ],
)
def test_what_costs_a_few_per_cent_is_found_with_fifty_prompts(
    name, cause, settings, causes, wide_capture
):
    found, entries = look(wide_capture, DRAFTERS / name, causes=causes)
    assert found == [cause]
    assert entries[cause]["settings"] == settings
    assert entries[cause]["recoverable"] is True


def test_too_few_prompts_say_how_many_would_do(wide_capture):
    few = [p.id for p in wide_capture.prompts[:12]]
    found, entries = look(wide_capture, DRAFTERS / "layer_offset", causes=LAYERS, prompts=few)
    assert found == []
    entry = entries["layers.offset"]
    assert entry["status"] == "not_identifiable"
    assert "prompts" in entry["evidence"]


def test_a_random_head_of_its_own_is_damage(hybrid_capture, tmp_path):
    checkpoint = read_checkpoint(DRAFTERS / "healthy")
    state = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    torch.manual_seed(0)
    state["lm_head.weight"] = torch.randn(3072, 256).to(torch.bfloat16) / 16
    torch.save(state, tmp_path / "raw.pt")
    shutil.copy(DRAFTERS / "healthy" / "config.json", tmp_path)
    found, entries = look(hybrid_capture, tmp_path / "raw.pt", settings=["head=own"], causes=PARTS)
    assert found == ["head.tying_or_vocab"]
    assert entries[found[0]]["kind"] == "damage"
    assert entries[found[0]]["recoverable"] is False


def test_a_drafter_of_another_target_of_the_same_width_is_named(hybrid_capture, tmp_path):
    folder = rewritten(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file(for_another_basis(weights), folder / "model.safetensors")
    names = [p.id for p in hybrid_capture.prompts[:12]]
    causes = ("hidden.ignored_by_drafter", "checkpoint.wrong_target")
    found, entries = look(hybrid_capture, folder, causes=causes, prompts=names)
    assert found == ["checkpoint.wrong_target"]
    assert entries[found[0]]["tau_own_reading"]["hi"] < 1.15


@pytest.mark.parametrize(("own_states", "status"), [(0.0, "found"), (0.03, "not_identifiable")])
def test_text_unlike_that_of_training_is_not_another_target(own_states, status, hybrid_capture):
    """Weights that read the target's states are of this target, however little is accepted."""
    names = [p.id for p in hybrid_capture.prompts]
    rng = np.random.default_rng(0)

    def round_of(share):
        right = tuple(rng.random((40, 7)) < share for _ in names)
        return Hits(tuple(names), right, complete=True)

    base, other = round_of(0.01 + own_states), round_of(0.01)
    checkpoint = read_checkpoint(DRAFTERS / "healthy")
    how = resolve_convention(checkpoint)
    drafter = load_drafter(checkpoint, how)
    around = surroundings(hybrid_capture, checkpoint, drafter)
    aligner = Aligner(Sweep(hybrid_capture, drafter), around, seed=0, draws=2000)
    declared = Round(how, "own", (), base, aligner._tau({0: base})[0])
    (shuffled,) = aligner._compared({NO_CONTEXT: other}, base, tested=True)
    made = Alignment([declared], [], [], None, shuffled, [], len(names))
    entry = next(e for e in findings(made) if e["cause"] == "checkpoint.wrong_target")
    assert declared.tau.hi < 1.15
    assert entry["status"] == status


@pytest.mark.parametrize("name", ["healthy", "reference"])
@pytest.mark.parametrize("kind", ["coding", "general"])
def test_sound_drafters_come_back_clean_on_either_kind_of_prompt(name, kind, wide_capture):
    names = [p.id for p in wide_capture.prompts if p.id.startswith(kind)][:24]
    assert len(names) >= 10
    found, entries = look(wide_capture, DRAFTERS / name, prompts=names)
    assert found == []
    assert {e["status"] for e in entries.values()} <= {
        "excluded",
        "not_identifiable",
        "not_tested",
    }
