"""The verb audit: one text, one function, one file of properties."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag import cli
from dflash_diag.config import RunConfig
from dflash_diag.results import Verdict
from dflash_diag.runs import Run

STEP = """
import torch
from torch.nn import functional as F

print("imported")
D = 4
g = torch.Generator().manual_seed(0)
fc = (torch.randn(64, 32, generator=g) / 6).requires_grad_()
head = torch.randn({vocabulary}, 32, generator=g)


def step(tokens, states, anchors, loss_mask, data_seed, noise_seed):
    print("a step")
    x = states[:, :2].flatten(1) @ fc
    x = x * torch.linspace(1, 2, len(x))[:, None]
    read = torch.stack([x[: a + {bound}].mean(0) for a in anchors.tolist()])
    rows = anchors[:, None] + torch.arange(1, D + 1)
    logits = torch.tanh(read[:, None] + torch.arange(D)[:, None]) @ head.T
    labels, weights = tokens[rows], torch.exp(-torch.arange(D) / 3) * loss_mask[rows]
    ce = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (ce.view(labels.shape) * weights).sum(), logits, labels, weights, None


def random(*given):
    loss, logits, *rest = step(*given)
    return loss, logits + torch.rand(()), *rest
"""


def step_file(folder: Path, bound: int = 0) -> Path:
    path = folder / f"trainer{bound}.py"
    path.write_text(STEP.format(vocabulary=tiny_world.VOCABULARY, bound=bound))
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tiny_world.write_world(tmp_path_factory.mktemp("world"))
    rows = [{"tokens": [(7 * i + j * j) % 250 for j in range(80)], "prefix": 10} for i in range(3)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def options(world: Path, *more: str) -> list[str]:
    return [
        "audit",
        *("--target", str(world / "target"), "--drafter", str(world / "drafter")),
        *("--training-sequences", str(world / "train.jsonl"), "--out", str(world / "out")),
        *more,
    ]


def test_a_sound_step_on_training_texts(world, capsys, tmp_path):
    step = step_file(tmp_path)
    file = tmp_path / "audit.json"
    assert cli.run(options(world, "--step", f"{step}:step", "--json", str(file))) == 0
    found = json.loads(file.read_text())
    assert found["schema"] == "dflash_diag.audit/1"
    by_id = {one["id"]: one for one in found["properties"]}
    assert by_id["layers.offset"]["status"] == "excluded"
    assert by_id["loss.gamma"]["found"] == pytest.approx(3, rel=1e-3)
    assert [one["id"] for one in found["properties"] if one["status"] == "found"] == ["head.tied"]
    text = capsys.readouterr().out
    assert "trainer0.py:step on row00000" in text
    assert "✗ head.tied: no" in text


def test_fail_on_and_standard_output(world, capsys, tmp_path):
    """Whatever the step prints, standard output is JSON alone."""
    step = step_file(tmp_path, bound=1)
    more = ("--step", f"{step}:step", "--json", "-", "--fail-on", "fail")
    assert cli.run(options(world, *more)) == 1
    captured = capsys.readouterr()
    found = [
        one["id"] for one in json.loads(captured.out)["properties"] if one["status"] == "found"
    ]
    assert "mask.anchor_included" in found
    assert "--fail-on met: ✗ FAIL" in captured.err
    assert "a step" in captured.err


def test_a_random_step_is_a_verdict_not_an_error(world, capsys, tmp_path):
    step = step_file(tmp_path)
    assert cli.run(options(world, "--step", f"{step}:random")) == 0
    assert "✗ step.deterministic" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere.py:step", "FILE.py:FUNC"),
        ("{step}", "FILE.py:FUNC"),
        ("{step}:nothing", "no function nothing"),
        ("{broken}:step", "ZeroDivisionError"),
        ("", "give --step"),
    ],
)
def test_bad_input_is_one_line(world, capsys, tmp_path, spec, said):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0\n")
    given = spec.format(step=step_file(tmp_path), broken=broken)
    assert cli.run(options(world, *(["--step", given] if given else []))) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert said in err[-1]
    assert err[-1].startswith("error: ")


def test_layers_that_nothing_names_are_asked_for(world, capsys, tmp_path):
    step = step_file(tmp_path)
    given = options(world, "--step", f"{step}:step")
    at = given.index("--drafter")
    assert cli.run(given[:at] + given[at + 2 :]) == 2
    assert "step.layers" in capsys.readouterr().err


def test_texts_that_are_too_short_are_refused(world, capsys, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text(json.dumps({"tokens": list(range(12)), "prefix": 4}))
    given = options(world, "--step", f"{step_file(tmp_path)}:step")
    given[given.index("--training-sequences") + 1] = str(short)
    assert cli.run(given) == 2
    assert "room for two blocks" in capsys.readouterr().err


def test_a_run_audits_on_its_capture_once_and_again_when_the_file_changes(world, tmp_path):
    step = step_file(tmp_path)
    config = RunConfig(
        target=str(world / "target"),
        drafter=str(world / "drafter"),
        prompts=str(world / "prompts.jsonl"),
        max_new_tokens=40,
        step=f"{step}:step",
        draws=200,
        out=str(tmp_path / "out"),
    )
    found = Run.open(config).result("training.audit")
    assert found.verdict is Verdict.FAIL
    assert [one["id"] for one in found.params["faults"]] == ["head.tied"]
    (kept,) = (tmp_path / "out" / "audit").iterdir()
    again = Run.open(config).result("training.audit")
    assert again.to_json()["headline"] == found.headline
    assert [*(tmp_path / "out" / "audit").iterdir()] == [kept]
    step.write_text(step_file(tmp_path, bound=1).read_text())
    changed = Run.open(config).result("training.audit")
    assert "mask.anchor_included" in [one["id"] for one in changed.params["faults"]]


def test_without_a_step_it_is_skipped_with_how_to_write_one(world, tmp_path):
    config = RunConfig(
        target=str(world / "target"),
        drafter=str(world / "drafter"),
        prompts=str(world / "prompts.jsonl"),
        max_new_tokens=12,
        out=str(tmp_path / "out"),
    )
    found = Run.open(config).result("training.audit")
    assert found.verdict is Verdict.SKIPPED
    assert "def step(tokens, states, anchors" in found.headline
