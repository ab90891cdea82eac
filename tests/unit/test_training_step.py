"""Which training step a checkpoint is of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from dflash_diag.checkpoints.training_step import step_in_name, training_step


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("run/step_3000", 3000),
        ("run/step-0003000.pt", 3000),
        ("run/checkpoint-3000", 3000),
        ("run/global_step3000", 3000),
        ("run/epoch_2_step_9000.pt", 9000),
        ("run/drafter.iter=30k.pt", 30_000),
        ("run/ckpt_12/draft_model", 12),
        ("step_1/ckpt_12/draft_model", 12),
        ("run/final", None),
        ("run/qwen3-8b", None),
        ("run/footstep7x", None),
    ],
)
def test_names(path, step):
    assert step_in_name(Path("/nowhere") / path) == step


def test_what_the_files_say_goes_before_the_name(tmp_path):
    folder = tmp_path / "step_5"
    folder.mkdir()
    bare = SimpleNamespace(extra={}, folder=folder, path=folder)
    assert training_step(bare) == 5
    (folder / "trainer_state.json").write_text("not JSON")
    assert training_step(bare) == 5
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 6}))
    assert training_step(bare) == 6
    assert training_step(SimpleNamespace(extra={"step": 7}, folder=folder, path=folder)) == 7
    assert training_step(SimpleNamespace(extra={"step": True}, folder=folder, path=folder)) == 6
