"""The captures from a GPU that come with the example, and what was measured there."""

from __future__ import annotations

import re

import pytest

from dflash_diag.bundle import Capture
from dflash_diag.divergence import FACTOR, with_floor
from dflash_diag.modules import Variant
from dflash_diag.pairs import capture_variant, layer_deviations, layer_floor, target_flips
from dflash_diag.results import Result, Verdict
from tests.conftest import ZOO

FOLDER = ZOO / "captures"
NAMES = {
    "h200-fla-bfloat16": "fla+causal-conv1d/bfloat16",
    "h200-fla-float32": "fla+causal-conv1d/float32",
    "h200-fla-torch-conv-bfloat16": "fla+torch-conv/bfloat16",
    "h200-torch-bfloat16": "torch/bfloat16",
    "h200-torch-float32": "torch/float32",
}


@pytest.fixture(scope="module")
def floor(hybrid_capture):
    from dflash_diag.targets import load_target

    target = load_target(ZOO / "hybrid" / "target", device="cpu", backend="torch")
    tokens = [hybrid_capture.tokens(i).tolist() for i in range(3)]
    pair = Variant("torch", "bfloat16"), Variant("torch", "float32")
    return layer_floor(target, pair, tokens)


def test_they_name_no_folder_of_the_machine_that_made_them():
    for file in FOLDER.rglob("*.json"):
        assert not re.search(r'"/\w', file.read_text()), file


def test_they_are_small_and_all_there():
    files = [f for f in FOLDER.rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 1.5e6
    assert {f.name for f in FOLDER.iterdir()} == {*NAMES, "results"}


@pytest.mark.parametrize("name", NAMES)
def test_a_capture_says_how_and_on_what_it_was_made(name):
    capture = Capture.load(FOLDER / name)
    assert str(capture_variant(capture)) == NAMES[name]
    assert capture.thinned
    assert len(capture) == 10
    assert len(capture.layers(0)) == 17
    content = capture.facts["provenance"]["content"]
    assert content["device"]["name"] == "NVIDIA H200"
    assert content["device"]["driver"]
    assert content["versions"]["flash-linear-attention"]
    ran = capture.target_facts["backend"]["ran"]
    assert any(path.startswith("fla.") for path in ran) == ("fla" in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_on_this_machine_is_within_the_noise_of_it(name, hybrid_capture, floor):
    capture = Capture.load(FOLDER / name)
    rows = with_floor(layer_deviations(capture, hybrid_capture), floor)
    assert max(row["times_floor"] for row in rows) < FACTOR
    assert not any(row["above"] for row in rows)
    if "float32" in name:
        assert max(row["rel_rms"] for row in rows) < 2e-3  # Triton multiplies float32 as tf32
    flips = target_flips(capture, hybrid_capture)
    assert sum(f["decisive"] for f in flips) == 0


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*")), ids=lambda p: p.name)
def test_what_was_measured_there(path):
    result = Result.load(path)
    assert result.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
    if result.id == "hidden.modules":
        assert result.frame.groupby("side").size().min() > 200
        assert not result.frame["above"].any()
