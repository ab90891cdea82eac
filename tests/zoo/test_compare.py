"""The example's trained drafters side by side."""

from __future__ import annotations

import json
from itertools import combinations

import pytest

from dflash_diag import cli
from dflash_diag.paths import data_dir

NAMES = ("healthy", "block_causal", "anchor_included", "reference")


@pytest.fixture(scope="module")
def found(hybrid_capture, tmp_path_factory) -> dict:
    """All pairs of four drafters, as ``compare --json`` writes them."""
    folder = tmp_path_factory.mktemp("compare")
    paths = [str(data_dir() / "zoo" / "hybrid" / "drafters" / name) for name in NAMES]
    arguments = ["compare", *paths[:3], "--reference", paths[3], "--capture"]
    arguments += [str(hybrid_capture.path), "--out", str(folder), "--json", str(folder / "c.json")]
    assert cli.run(arguments) == 0
    return json.loads((folder / "c.json").read_text())


def test_the_faults_cost_what_they_cost(found):
    verdicts = {(one["a"], one["b"]): one for one in found["pairs"]}
    assert list(verdicts) == list(combinations(NAMES, 2))
    assert verdicts["healthy", "anchor_included"]["verdict"] == "yes"
    assert verdicts["block_causal", "anchor_included"]["verdict"] == "yes"
    for name in NAMES[:3]:
        pair = verdicts[name, "reference"]
        assert (pair["verdict"], pair["better"]) == ("no", "reference")
    assert found["differs"] == []


def test_differences_are_those_of_the_taus(found):
    taus = {one["name"]: one["tau"]["value"] for one in found["drafters"]}
    for one in found["pairs"]:
        assert one["delta_tau"]["value"] == pytest.approx(taus[one["a"]] - taus[one["b"]])


def test_pairing_settles_what_single_intervals_leave_open(found):
    taus = {one["name"]: one["tau"] for one in found["drafters"]}
    assert taus["healthy"]["lo"] < taus["block_causal"]["hi"]  # they overlap
    (pair,) = (one for one in found["pairs"] if one["b"] == "block_causal")
    assert pair["delta_tau"]["lo"] > 0
    assert pair["p"] < 0.05
    width = pair["delta_tau"]["hi"] - pair["delta_tau"]["lo"]
    assert width < min(one["hi"] - one["lo"] for one in taus.values())
