"""The recipe: its corpus, what each trainer sees, and the whole procedure at a tiny size."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from dflash_diag import storage
from dflash_diag.zoo import corpus, drafters, export, recipe, sequences, targets
from tests.conftest import ZOO


def test_text_shared_with_a_prompt_is_noticed():
    prompt = "def first_tide_after(times, minute):\n    low, high = 0, len(times)\n    return low"
    size = corpus.PROMPT_WINDOW
    windows = {prompt[i : i + size] for i in range(len(prompt) - size + 1)}
    assert corpus.shares_text("# header\n" + prompt + "\n", windows)
    assert not corpus.shares_text("def last_tide(times):\n    return times[-1]\n" * 9, windows)


def test_leading_licence_comments_go():
    assert corpus.strip_header("# Copyright\n# MIT\n\nimport os\n# kept\n") == "import os\n# kept\n"


@pytest.mark.parametrize("name", recipe.DRAFTERS)
def test_what_each_trainer_sees_differs_as_its_fault_says(name, world):
    plan = dataclasses.replace(recipe.DRAFTERS[name], batch=2, n_anchors=5)
    healthy = dataclasses.replace(recipe.HEALTHY, batch=2, n_anchors=5)
    batch = drafters.draw(world, plan, seed=7)
    seen, right = (drafters.view(world, batch, p, seed=3) for p in (plan, healthy))
    same = {
        "states": seen.states.equal(right.states),
        "positions": seen.positions.equal(right.positions),
        "mask": seen.mask.equal(right.mask),
        "labels": seen.labels.equal(right.labels),
    }
    expected = {
        "anchor_included": {"mask"},
        "cross_block_leak": {"mask"},
        "block_causal": {"mask"},
        "position_plus_one": {"positions"},
        "label_shift": {"labels"},
        "layer_offset": {"states"},
        "last_layer_in_fc": {"states"},
        "noise_on_target_logits": {"states", "labels"},
        "ignored_context": {"states"},
    }
    assert {k for k, equal in same.items() if not equal} == expected.get(name, set())
    assert (seen.teacher is not None) == (name == "soft_kl_loss")


@pytest.fixture(scope="module")
def world():
    """The hybrid target of the example on four of its sequences."""
    from safetensors.torch import load_file

    kept = load_file(ZOO / "hybrid" / "sequences" / "validation.safetensors")
    target = sequences.load_target(ZOO / "hybrid" / "target", "cpu")
    layers = drafters.needed_layers(list(recipe.DRAFTERS.values()), 16)
    tokens, prefix = kept["tokens"][:4].numpy(), kept["prefix"][:4].numpy()
    return drafters.observe(target, tokens, prefix, layers)


def test_the_whole_recipe_at_a_tiny_size(tmp_path, monkeypatch):
    """Targets, sequences, drafters, export; a stage that is cut off goes on where it was."""
    plan = recipe.tiny().restricted(recipe.TARGETS)
    plan = dataclasses.replace(
        plan,
        drafters={k: plan.drafters[k] for k in ("healthy", "soft_kl_loss", *recipe.FULL_DRAFTERS)},
    )
    work, out = tmp_path / "work", tmp_path / "zoo"
    work.mkdir()
    shutil.copy(ZOO / "hybrid" / "target" / "tokenizer.json", work / "tokenizer.json")
    rng = np.random.default_rng(0)
    for split in ("train", "validation"):
        np.save(work / f"{split}.npy", rng.integers(0, recipe.VOCAB_SIZE, 4000).astype(np.uint16))
    storage.write_json(work / "corpus.json", {"files": 0})
    for name, target in plan.targets.items():
        targets.build(work, name, target, device="cpu", compiled=False)
        sequences.build(work, name, plan.sequences[name], device="cpu")
    monkeypatch.setattr(drafters, "SAVE_EVERY_SECONDS", 0)
    stopped = drafters.Group.train_step
    calls = iter(range(100))

    def stop_at_second_step(self, active):
        if next(calls) == 1:
            raise KeyboardInterrupt
        stopped(self, active)

    monkeypatch.setattr(drafters.Group, "train_step", stop_at_second_step)
    arguments = (work, plan.drafters, "hybrid", plan.sequences["hybrid"])
    with pytest.raises(KeyboardInterrupt):
        drafters.build(*arguments, device="cpu", compiled=False)
    monkeypatch.setattr(drafters.Group, "train_step", stopped)
    drafters.build(*arguments, device="cpu", compiled=False)
    drafters.build(
        work, plan.drafters, "full", plan.sequences["full"], device="cpu", compiled=False
    )
    export.build(work, out, plan)
    assert (out / "hybrid" / "drafters" / "healthy" / "model.safetensors").is_file()
    assert (out / "training_checkpoint" / "checkpoint.pt").is_file()
    uninterrupted = drafters.Group(
        {k: p for k, p in plan.drafters.items() if p.target == "hybrid"},
        drafters.observe(
            sequences.load_target(work / "targets" / "hybrid", "cpu"),
            np.load(work / "sequences" / "hybrid.npz")["train"],
            np.load(work / "sequences" / "hybrid.npz")["train_prefix"],
            drafters.needed_layers([p for p in plan.drafters.values() if p.target == "hybrid"], 16),
        ),
        tmp_path / "none",
        compiled=False,
    )
    uninterrupted.train()
    resumed = export.Trained.read(work, "healthy").weights
    for key, value in uninterrupted.drafters["healthy"].state_dict().items():
        torch.testing.assert_close(resumed[key], value)
