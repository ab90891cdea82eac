"""Replaying the example's training measurements gives what its trainer measured."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dflash_diag.capture import make_capture
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.metrics import leading
from dflash_diag.replay import Passage, replay
from dflash_diag.training_sequences import (
    VALIDATION,
    Texts,
    draw_anchors,
    read_training_sequences,
    rule_of,
)
from dflash_diag.zoo import recipe
from dflash_diag.zoo.drafters import held_out_metrics, needed_layers, observe
from dflash_diag.zoo.sequences import load_target
from tests.conftest import ZOO

SEQUENCES = 6
FOLDER = ZOO / "hybrid"
OWN = {
    "reference": [],
    "anchor_included": ["context_bound=inclusive"],
    "cross_block_leak": ["other_blocks=later"],
    "label_shift": ["label_offset=1"],
    "layer_offset": ["layer_ids=0,3,6,9,12"],
}
"""How each drafter was trained."""


@pytest.fixture(scope="module")
def texts():
    return read_training_sequences(FOLDER / "sequences")[VALIDATION][:SEQUENCES]


@pytest.fixture(scope="module")
def passages(texts, tmp_path_factory):
    capture = make_capture(
        str(FOLDER / "target"),
        [],
        tmp_path_factory.mktemp("replay") / "capture",
        like=Texts.of([(t.id, t.tokens.tolist(), t.prefix) for t in texts], "training text"),
        layers="around",
        taps=recipe.HEALTHY.layer_ids,
        dtype="float32",
        silent=True,
    )
    drawn = draw_anchors(texts, rule_of("zlab", 8, 24), 8, seed=0)
    pairs = enumerate(zip(texts, drawn, strict=True))
    return [Passage(capture, i, t.learned, t.written, a) for i, (t, a) in pairs]


@pytest.fixture(scope="module")
def world(texts):
    plans = [recipe.DRAFTERS[name] for name in OWN]
    return observe(
        load_target(FOLDER / "target", "cpu"),
        np.stack([t.tokens for t in texts]),
        np.array([t.prefix for t in texts]),
        needed_layers(plans, recipe.HYBRID.config["num_hidden_layers"]),
    )


def loaded(name, settings):
    checkpoint = read_checkpoint(FOLDER / "drafters" / name)
    how = resolve_convention(checkpoint, settings=settings)
    return load_drafter(checkpoint, how, dtype=torch.float32)


def shown(scores):
    """What the trainer's dashboard shows."""
    right = scores.proposed == scores.labels
    return {
        "accuracy": right.mean(),
        "streak": leading(right).mean(),
        "dds4": leading(scores.rank < 4).mean(),
        "dds8": leading(scores.rank < 8).mean(),
        "slot_accuracy": right.mean(axis=0).tolist(),
    }


@pytest.mark.parametrize("name", OWN)
def test_it_is_what_the_trainer_measures_itself(name, passages, world):
    """Under each trainer's own reading; the two share no code but the drafter and the mask."""
    found = shown(replay(loaded(name, OWN[name]), passages).scores)
    expected = held_out_metrics(loaded(name, []), world, recipe.DRAFTERS[name])
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=1e-4), key


def test_anchors_are_those_that_the_trainer_keeps(texts):
    kept = load_file(FOLDER / "sequences" / "validation.safetensors")["anchors"][:SEQUENCES]
    drawn = draw_anchors(texts, rule_of("zlab", 8, 24), 8, seed=0)
    np.testing.assert_array_equal(np.stack(drawn), kept)


def test_noise_and_a_context_of_zeros_reach_the_drafter(passages):
    drafter = loaded("reference", [])
    clean, noisy, again, empty = (
        replay(drafter, passages[:2], **how).scores
        for how in ({}, {"noise": 0.5}, {"noise": 0.5}, {"context": "zero"})
    )
    assert (noisy.proposed != clean.proposed).mean() > 0.05
    np.testing.assert_array_equal(noisy.proposed, again.proposed)
    assert leading(empty.proposed == empty.labels).mean() < 0.5


def test_labels_of_the_target_are_its_choices(passages):
    """Where the text is the target's own they are the text, up to ties."""
    drafter = loaded("reference", [])
    text, said = (replay(drafter, passages, labels=w).scores for w in ("tokens", "target"))
    same = (text.labels == said.labels).mean(axis=1)
    by_text = [same[text.prompt == i].mean() for i in range(len(passages))]
    gaps = [p.prompt.decode_gap for p in passages]
    assert [one > 0.97 for one in by_text] == [gap < 0.1 for gap in gaps]
    assert 0.3 < min(by_text) < 0.95
