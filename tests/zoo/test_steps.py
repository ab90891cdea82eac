"""The zoo's own trainer, audited: each planted fault is named, alone, and nothing on the others."""

from __future__ import annotations

import json
from functools import cache

import pytest
from safetensors.torch import load_file

from dflash_diag import cli, paths
from dflash_diag.targets import load_target
from dflash_diag.training_audit import Material, audit_step
from dflash_diag.zoo import recipe, steps

NOT_VISIBLE = ("healthy", "reference", "block_causal", "position_plus_one")
FAULTS = {
    **{name: [] for name in NOT_VISIBLE},
    "anchor_included": ["mask.anchor_included"],
    "cross_block_leak": ["mask.cross_block_leak"],
    "label_shift": ["label.shift"],
    "layer_offset": ["layers.offset"],
    "last_layer_in_fc": ["layers.last_layer_in_fc"],
    "noise_on_target_logits": ["training.noise_on_target_logits"],
    "soft_kl_loss": ["training.loss_mismatch"],
    "ignored_context": ["hidden.ignored_by_drafter"],
}


@pytest.fixture(scope="module")
def target():
    return load_target(paths.data_dir() / "zoo" / "hybrid" / "target", device="cpu")


@cache
def audited(target, name: str, row: int = 3):
    kept = load_file(paths.data_dir() / "zoo" / "hybrid" / "sequences" / "train.safetensors")
    step, taps = getattr(steps, name), recipe.DRAFTERS[name].layer_ids
    tokens = kept["tokens"][row].long()
    on = Material.of_target(target, tokens, int(kept["prefix"][row]), step.layers, taps, ahead=7)
    return audit_step(step, on, name)


def test_there_is_a_step_for_every_drafter():
    assert set(FAULTS) == set(recipe.DRAFTERS)


@pytest.mark.parametrize("name", FAULTS)
def test_exactly_the_planted_fault_is_named(target, name):
    audit = audited(target, name)
    assert [one.id for one in audit.faults] == FAULTS[name]
    assert audit.misreported == []
    gamma = recipe.DRAFTERS[name].loss_decay_gamma
    assert audit["loss.gamma"].found == pytest.approx(gamma, rel=1e-3)
    assert audit["head.tied"].status == "excluded"
    assert audit["step.trained"].found == 919168


def test_what_no_step_shows_is_said_to_be_so(target):
    for name, cause in (
        ("block_causal", "mask.block_causality"),
        ("position_plus_one", "position.block_offset"),
    ):
        one = audited(target, name)[cause]
        assert one.status == "not_tested"
        assert "weights" in one.evidence


def test_the_mixture_of_the_soft_loss(target):
    audit = audited(target, "soft_kl_loss")
    assert audit["loss.lambda"].found == pytest.approx(0.7, abs=1e-3)
    assert audit["loss.temperature"].found == 1.0
    assert audit["loss.residual"].found < 1e-3


def test_without_target_logits_the_share_is_not_identifiable(target):
    audit = audited(target, "healthy")
    assert audit["loss.lambda"].status == "not_identifiable"
    assert audit["training.loss_mismatch"].status == "excluded"


def test_the_labels_of_the_shifted_trainer(target):
    audit = audited(target, "label_shift")
    assert audit["loss.label_offset"].found == 1
    assert audit["training.leak"].status == "excluded"  # its mask is read where its labels are


def test_the_adapter_is_short():
    import inspect

    lines = inspect.getsource(steps._step).splitlines()
    body = lines[lines.index(") -> tuple[Any, ...]:") + 2 :]
    assert len(body) <= 20


def test_another_text_says_the_same(target):
    for name in ("healthy", "anchor_included"):
        assert [one.id for one in audited(target, name, row=40).faults] == FAULTS[name]


def test_the_verb_without_options_audits_the_example_s_own_step(tmp_path, capsys):
    file = tmp_path / "audit.json"
    assert cli.run(["audit", "--json", str(file), "--out", str(tmp_path / "out")]) == 0
    found = [p["id"] for p in json.loads(file.read_text())["properties"] if p["status"] == "found"]
    assert found == ["mask.anchor_included"]
    assert "the embedded example's train sequences" in capsys.readouterr().out
    assert not (tmp_path / "out" / "captures").exists()  # nothing else was computed
