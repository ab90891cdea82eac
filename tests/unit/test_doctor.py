"""The doctor: every cause once, in the right order, and a verdict that the evidence supports."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import planted
import text_world
import tiny_world
from safetensors.torch import load_file, save_file

from dflash_diag import cli, results
from dflash_diag.causes import CAUSES, entry
from dflash_diag.config import RunConfig
from dflash_diag.doctor import examine
from dflash_diag.doctor.examining import _verdict
from dflash_diag.doctor.merging import merged
from dflash_diag.doctor.sentences import said, to_do
from dflash_diag.doctor.training import decided
from dflash_diag.doctor.trust import by_verdict
from dflash_diag.doctor.weights import WRONG_TARGET, beside_training
from dflash_diag.results import Verdict
from dflash_diag.runs import Run
from dflash_diag.strata import Blocks

TAU = {"value": 1.64, "lo": 1.53, "hi": 1.78}


def delta(value, lo=None, hi=None):
    return {"value": value, "lo": lo, "hi": hi}


def found(cause, gain=None, **fields):
    own = {} if gain is None else {"delta": gain}
    return entry(cause, "found", f"{cause} was seen.", **own, **fields)


def named(entries, status="found"):
    return [one["cause"] for one in entries if one["status"] == status]


def test_every_cause_stands_once():
    entries = merged([found("rope.theta")], [found("rope.theta"), found("label.shift")])
    assert sorted(one["cause"] for one in entries) == sorted(CAUSES)
    assert sorted(named(entries)) == ["label.shift", "rope.theta"]


def test_worst_first_and_what_fakes_the_rest_before_all():
    entries = merged(
        [
            found("layers.last_layer_in_fc"),
            found("metric.population", delta(9.0)),
            found("rope.theta", delta(0.4, 0.3, 0.5)),
            found("mask.anchor_included", delta(1.1, 1.0, 1.2)),
            found("hidden.rows", delta(0.1, 0.0, 0.2)),
            found("target.not_lossless"),
        ]
    )
    assert named(entries) == [
        "target.not_lossless",
        "hidden.rows",
        "mask.anchor_included",
        "rope.theta",
        "layers.last_layer_in_fc",
        "metric.population",
    ]


def test_what_was_decided_first_stands():
    measured = entry("rope.theta", "excluded", "No theta gains.")
    by_files = entry("rope.theta", "found", "No key states a theta.")
    (one,) = [e for e in merged([measured], [by_files]) if e["cause"] == "rope.theta"]
    assert one["status"] == "excluded"
    assert one["evidence"] == "No theta gains. No key states a theta."


def test_what_was_open_is_decided_by_others():
    untested = entry("label.shift", "not_tested", "cannot be scored")
    open_ = entry("label.shift", "not_identifiable", "Too few prompts.")
    decided = found("label.shift", kind="training_fault", recoverable=False)
    (one,) = [e for e in merged([untested], [open_], [decided]) if e["cause"] == "label.shift"]
    assert (one["status"], one["kind"]) == ("found", "training_fault")
    assert "Too few prompts." in one["evidence"]
    assert "cannot be scored" not in one["evidence"]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([], Verdict.PASS),
        ([found("metric.population", delta(2.0, 1.9, 2.1))], Verdict.PASS),
        ([found("layers.last_layer_in_fc")], Verdict.WARN),
        ([found("rope.theta", delta(0.01, 0.0, 0.02))], Verdict.WARN),
        ([found("rope.theta", delta(0.2, 0.1, 0.3))], Verdict.FAIL),
        ([found("hidden.rows")], Verdict.FAIL),
    ],
)
def test_verdict(entries, expected):
    assert _verdict(merged(entries), TAU) is expected


def test_a_check_that_breaks_excludes_nothing():
    good = results.skipped("a", "Is it?", "ok")
    checks = [replace(good, verdict=Verdict.PASS), results.failed("b", "And this?", OSError("no"))]
    one = by_verdict("hidden.rows", checks)
    assert one["status"] == "not_tested"
    assert "no" in one["evidence"]
    assert by_verdict("hidden.rows", checks[:1])["status"] == "excluded"


def test_a_drafter_that_cannot_be_scored_is_no_pass():
    unknown = {"value": None, "lo": None, "hi": None}
    assert _verdict(merged([]), unknown) is Verdict.INCONCLUSIVE


def test_a_drafter_as_good_as_none_is_no_pass():
    assert _verdict(merged([]), {"value": 1.02, "lo": 1.0, "hi": 1.05}) is Verdict.INCONCLUSIVE


def test_sentence_of_a_fault_that_serving_cannot_undo():
    own = {"value": 2.77, "lo": 2.5, "hi": 3.0}
    cause = found("mask.anchor_included", delta(1.13, 1.0, 1.26), tau_own_reading=own)
    text = said("step_8000", merged([cause]), TAU)
    assert text.startswith("step_8000 is accepted 1.64 [1.53, 1.78] tokens a round; the weights")
    assert text.endswith("would get 2.77, which serving cannot give it.")
    assert to_do(merged([cause])) == CAUSES["mask.anchor_included"].remedy


def test_sentence_of_a_gain_and_of_more_causes():
    own = {"value": 2.15, "lo": 2.0, "hi": 2.3}
    causes = [
        found("rope.theta", delta(0.5, 0.4, 0.6), tau_own_reading=own),
        found("layers.last_layer_in_fc"),
    ]
    assert said("x", merged(causes), TAU).endswith("read that way it gets 2.15.")
    assert to_do(merged(causes)).endswith("Also found: layers.last_layer_in_fc.")


def test_sentence_of_nothing_counts_what_is_open():
    entries = merged([entry("rope.theta", "excluded", ""), entry("label.shift", "excluded", "")])
    text = said("x", entries, TAU)
    assert "no cause was found, 2 are excluded" in text
    assert f"{len(CAUSES) - 2} were not tested" in text
    assert not to_do(entries)


# --- on a tiny target -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world.write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def capture(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("capture") / "made"
    arguments = ["--target", world / "target", "--prompts", world / "prompts.jsonl"]
    arguments += ["--max-new-tokens", 16, "--layers", "all", "--out", out]
    assert cli.run(["capture", *map(str, arguments)]) == 0
    return out


@pytest.fixture
def examined(world, tmp_path):
    def run(**options):
        values = {"drafter": str(world / "drafter"), "out": str(tmp_path / "out")} | options
        given = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        opened = Run.open(RunConfig.read(given), strict=False)
        return examine(opened)

    return run


def test_json_is_what_the_verb_promises(world, capture, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    arguments = ["doctor", "--capture", capture, "--drafter", world / "drafter"]
    arguments += ["--out", tmp_path / "out", "--json", file]
    assert cli.run([str(one) for one in arguments]) == 0
    said = json.loads(file.read_text())
    assert said["schema"] == "dflash_diag.doctor/1"
    assert said["verdict"] in Verdict.__members__
    assert set(said["tau_declared"]) == {"value", "lo", "hi"} == set(said["tau_best"])
    assert sorted(one["cause"] for one in said["findings"]) == sorted(CAUSES)
    for one in said["findings"]:
        assert one["status"] in ("found", "excluded", "not_identifiable", "not_tested")
        assert one["evidence"]
        assert bool(one["remedy"]) == (one["status"] == "found")
        assert one["delta"] is None or one["delta"]["value"] is not None
    assert said["headline"] in capsys.readouterr().out


def test_broken_states_are_named_first_and_the_rest_is_asked_of_fresh_ones(
    world, capture, tmp_path, examined
):
    broken = planted.changed_capture(capture, tmp_path, planted.each(planted.one_row_late))
    sound, damaged = (examined(capture=c, target=world / "target") for c in (capture, broken))
    first = damaged.findings[0]
    assert (first["cause"], first["status"]) == ("hidden.rows", "found")
    assert first["tau_own_reading"]["value"] == pytest.approx(sound.tau_declared["value"])
    assert damaged.verdict is Verdict.FAIL
    # The states computed anew are the sound ones, so all else is said as of them.
    mine, theirs = ({e["cause"]: e["status"] for e in x.findings} for x in (damaged, sound))
    del mine["hidden.rows"], theirs["hidden.rows"]
    assert mine == theirs
    assert any("computed anew" in one for one in damaged.cautions)


def test_broken_states_without_their_target_leave_the_readings_untested(
    capture, tmp_path, examined
):
    broken = planted.changed_capture(capture, tmp_path, planted.each(planted.first_half_lost))
    said = examined(capture=broken)
    assert said.findings[0]["cause"] == "hidden.rows"
    assert "mask.anchor_included" in named(said.findings, "not_tested")


def test_broken_layers_that_are_not_tapped_do_not_count(world, capture, tmp_path, examined):
    drafter = tmp_path / "few"
    tiny_world.write_drafter(drafter)
    taps = set(
        json.loads((drafter / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    )

    def elsewhere(layer, states):
        return states if layer in taps else states * 0

    broken = planted.changed_capture(capture, tmp_path, planted.each(elsewhere))
    said = examined(capture=broken, drafter=drafter)
    assert "hidden.rows" not in named(said.findings)


def test_a_missing_tensor_is_reported_not_refused(world, capture, tmp_path, examined):
    drafter = tiny_world.write_drafter(tmp_path / "lacking")
    weights = load_file(drafter / "model.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, drafter / "model.safetensors")
    said = examined(capture=capture, drafter=drafter)
    assert said.verdict is Verdict.FAIL
    assert named(said.findings)[0] == "checkpoint.missing_or_unused_tensors"
    assert "up_proj" in said.findings[0]["evidence"]


def test_fail_on_looks_at_the_doctors_verdict(world, capture, tmp_path):
    drafter = tiny_world.write_drafter(tmp_path / "lacking")
    weights = load_file(drafter / "model.safetensors")
    del weights["layers.0.mlp.up_proj.weight"]
    save_file(weights, drafter / "model.safetensors")
    arguments = ["doctor", "--capture", capture, "--drafter", drafter, "--fail-on", "fail"]
    assert cli.run([str(x) for x in [*arguments, "--out", tmp_path / "out"]]) == 1


def test_no_drafter_is_one_line(capture, capsys):
    assert cli.run(["doctor", "--capture", str(capture)]) == 2
    assert "--drafter" in capsys.readouterr().err


def test_claims_are_read_and_explained(world, capture, tmp_path):
    file = tmp_path / "doctor.json"
    arguments = ["doctor", "--capture", capture, "--drafter", world / "drafter", "--json", file]
    arguments += ["--claim", "streak=1.24", "--claim", "dds4=2.78", "--out", tmp_path / "out"]
    assert cli.run([str(one) for one in arguments]) == 0
    said = json.loads(file.read_text())
    by_cause = {one["cause"]: one for one in said["findings"]}
    assert [one["name"] for one in said["claims"]] == ["streak", "dds4"]
    assert "topk_oracle@4 uniform" in said["claims"][1]["fits"]
    # A streak leaves out the bonus whatever else it counts; dds4 may be a tree, or not even that.
    assert by_cause["metric.bonus"]["status"] == "found"
    assert by_cause["metric.bonus"]["evidence"].startswith("Without the bonus token, certainly: st")
    assert by_cause["metric.tree_definition"]["status"] == "found"
    assert by_cause["metric.aggregation"]["status"] != "found"
    # They explain numbers: the verdict does not depend on them.
    faults = [one for one in named(said["findings"]) if not one.startswith(("metric.", "data."))]
    assert (said["verdict"] in ("FAIL", "WARN")) == bool(faults)


def test_claims_of_any_width_and_of_no_sense(capture, examined):
    said = examined(capture=capture, claims=["dds5=2.0", "dds12=1.0", "ddtree64=2.5"])
    assert len(said.claims) == 3
    assert any("dds5 = 2 contradicts" in one for one in said.cautions)


def test_the_step_decides_what_weights_leave_open():
    ambiguous = found("label.shift", delta(0.5, 0.4, 0.6))
    shifted = found("label.shift", kind="training_fault", recoverable=False, remedy="Mend it.")
    straight = entry("label.shift", "excluded", "Labels are where they belong.")
    (by_fault,) = decided([ambiguous], [shifted])
    (by_layout,) = decided([ambiguous], [straight])
    (alone,) = decided([ambiguous], [])
    assert (by_fault["kind"], by_fault["recoverable"]) == ("training_fault", False)
    assert (by_layout["kind"], by_layout["recoverable"]) == ("reading_fault", True)
    assert (alone["kind"], alone["recoverable"]) == ("ambiguous", None)


def test_without_a_step_training_faults_are_not_identifiable(capture, examined):
    statuses = {one["cause"]: one["status"] for one in examined(capture=capture).findings}
    assert statuses["training.noise_on_target_logits"] == "not_identifiable"
    assert statuses["training.loss_mismatch"] == "not_identifiable"
    assert statuses["training.leak"] == "not_tested"
    # Nor do three prompts tell a drafter of random weights from one of another target.
    assert statuses["checkpoint.wrong_target"] == "not_identifiable"


def test_text_like_that_of_training_stands_beside_the_prompts(world, capture, tmp_path, examined):
    rows = torch.randint(3, 300, (6, 40), generator=torch.Generator().manual_seed(0)).tolist()
    lines = [json.dumps({"tokens": row, "prefix": 10}) for row in rows]
    (tmp_path / "validation.jsonl").write_text("\n".join(lines))
    said = examined(capture=capture, target=world / "target", training_sequences=tmp_path)
    entries = {one["cause"]: one for one in said.findings}
    assert "(text like that of training 6, prompts 3)" in entries["data.domain"]["evidence"]
    # Weights of chance are accepted nowhere, so this decides nothing.
    assert entries[WRONG_TARGET]["status"] == "not_identifiable"
    assert "On text like that of training it gets 1" in entries[WRONG_TARGET]["evidence"]


@pytest.mark.parametrize("status", ["found", "not_identifiable"])
@pytest.mark.parametrize(("sure", "decided"), [(0.95, True), (0.05, False)])
def test_a_drafter_that_is_accepted_on_training_text_is_of_this_target(status, sure, decided):
    scores, texts = text_world.world(12)
    rng = np.random.default_rng(0)
    right = rng.random(scores.labels.shape) < sure
    scores.proposed = np.where(right, scores.labels, -1)
    run = SimpleNamespace(
        config=RunConfig(target="t", training_sequences="s"),
        training=SimpleNamespace(beside=("text like that of training", Blocks.of(scores, texts))),
        seed=0,
        draws=500,
    )
    one = beside_training(run, entry(WRONG_TARGET, status, "Near nothing."))
    assert one["status"] == ("excluded" if decided else status)
    assert one["evidence"].startswith("Near nothing. On text like that of training it gets")
