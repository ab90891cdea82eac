"""The embedded example on disk: sizes, layouts, logs, sums."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file

from dflash_diag import example, storage
from dflash_diag.checkpoints import audit, read_checkpoint, resolve_convention
from dflash_diag.diagnostics.repetition import repeated_lines
from dflash_diag.errors import BadInput
from dflash_diag.example import EXAMPLE
from dflash_diag.zoo import recipe
from dflash_diag.zoo.drafters import sequence_anchors
from tests.conftest import ZOO

DRAFTERS = sorted((ZOO / "hybrid" / "drafters").glob("*"))
MB = 1e6


def bytes_of(*paths):
    return sum(f.stat().st_size for p in paths for f in [*p.rglob("*"), p] if f.is_file())


def test_sizes():
    target = ZOO / "hybrid" / "target" / "model.safetensors"
    with safe_open(target, "pt") as file:
        parameters = sum(np.prod(file.get_slice(k).get_shape()) for k in file.keys())  # noqa: SIM118
    assert 8e6 <= parameters <= 10e6
    assert target.stat().st_size <= 18 * MB
    assert bytes_of(ZOO / "full" / "target", ZOO / "full" / "drafter") <= 3 * MB
    assert bytes_of(ZOO / "training_checkpoint") <= 3 * MB
    for folder in DRAFTERS:
        assert (folder / "model.safetensors").stat().st_size <= 1.9 * MB, folder.name


def test_every_drafter_of_the_recipe_is_there_and_sound():
    assert {p.name for p in DRAFTERS} == set(recipe.DRAFTERS)
    for folder in [*DRAFTERS, ZOO / "full" / "drafter"]:
        checkpoint = read_checkpoint(folder)
        assert audit(checkpoint, convention=resolve_convention(checkpoint)) == []


def test_the_raw_checkpoint_is_read_without_running_it():
    checkpoint = read_checkpoint(ZOO / "training_checkpoint" / "checkpoint.pt")
    assert checkpoint.kind == "raw"
    assert audit(checkpoint, convention=resolve_convention(checkpoint)) == []
    assert checkpoint.training_args["num_anchors"] == 24


@pytest.mark.parametrize("folder", DRAFTERS, ids=lambda p: p.name)
def test_training_log(folder):
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == json.loads((folder / "training_args.json").read_text())["max_steps"]
    for row in rows:
        assert {"step", "loss", "accuracy", "streak", "dds4", "dds8", "slot_accuracy"} <= set(row)
        assert row["streak"] <= row["dds4"] <= row["dds8"] <= 7
        assert row["accuracy"] == pytest.approx(np.mean(row["slot_accuracy"]), abs=2e-4)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_reference_was_trained_three_times_as_long():
    steps = {
        name: json.loads((ZOO / "hybrid" / "drafters" / name / "training_args.json").read_text())[
            "max_steps"
        ]
        for name in ("healthy", "reference")
    }
    assert steps["reference"] >= 3 * steps["healthy"]


def test_faults_are_one_difference_and_files_do_not_name_them():
    for name, plan in recipe.DRAFTERS.items():
        fields = vars(plan)
        changed = {k for k, v in fields.items() if v != vars(recipe.HEALTHY)[k]}
        schedule = {"begins", "steps", "decay"}
        assert len(changed - schedule - {"loss_decay_gamma"}) <= 1, (name, changed)
        if name != "reference":
            assert plan.steps == recipe.HEALTHY.steps
        config = (ZOO / "hybrid" / "drafters" / name / "config.json").read_text()
        assert name not in config


@pytest.mark.parametrize("pair", ["hybrid", "full"])
def test_sequences_replay_their_anchors(pair):
    plan = recipe.HEALTHY
    for split, count in (("train", 256), ("validation", 128)):
        kept = load_file(ZOO / pair / "sequences" / f"{split}.safetensors")
        assert kept["tokens"].shape == (count, 256)
        for seed, prefix, anchors in zip(
            kept["anchor_seed"].tolist(), kept["prefix"].tolist(), kept["anchors"], strict=True
        ):
            again = sequence_anchors(seed, prefix, 256, plan)
            assert again.tolist() == anchors.tolist()
            assert prefix <= anchors.min()
            assert anchors.max() + plan.block_size <= 255


def test_lines_repeat_in_at_most_30_percent_of_the_median_completion(hybrid_capture):
    shares = []
    for prompt in hybrid_capture.prompts:
        repeats, lines = repeated_lines(prompt.continuation_text)
        shares.append(repeats / lines)
    assert np.median(shares) <= 0.30


def test_a_changed_file_is_refused(tmp_path):
    copy = tmp_path / "zoo"
    drafter = "hybrid/drafters/healthy"
    shutil.copytree(ZOO / drafter, copy / drafter)
    shutil.copy(ZOO / example.MANIFEST, copy / example.MANIFEST)
    example.verify(copy / drafter)
    path = copy / drafter / "config.json"
    path.write_text(path.read_text().replace("16", "17", 1))
    with pytest.raises(BadInput, match="sha256 differs"):
        example.verify(copy / drafter)
    path.unlink()
    with pytest.raises(BadInput, match="lacks"):
        example.verify(copy / drafter)


def test_the_manifest_names_every_file():
    named = set(storage.read_json(ZOO / example.MANIFEST)["files"])
    there = {p.relative_to(ZOO).as_posix() for p in ZOO.rglob("*") if p.is_file()}
    assert there - named == {example.MANIFEST}
    assert EXAMPLE.part(EXAMPLE.drafter).is_dir()
