"""The doctor on the example: two faults at once, and one that only the training step shows.

``tests/benchmarks/doctor.py`` has every case of `planted`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import planted

from dflash_diag.config import RunConfig
from dflash_diag.doctor import examine
from dflash_diag.doctor.merging import is_fault
from dflash_diag.results import Verdict
from dflash_diag.runs import Run

CASES = {one.name: one for one in (*planted.TRAINED, *planted.PAIRS)}
STEPS = Path(planted.HYBRID).parents[2] / "dflash_diag" / "zoo" / "steps.py"


@pytest.fixture
def examined(hybrid_capture, tmp_path):
    def run(name, **options):
        case = CASES[name]
        capture = hybrid_capture.path
        if case.states is not None:
            capture = planted.changed_capture(capture, tmp_path, case.states)
            options["target"] = str(planted.HYBRID / "target")
        values = {"drafter": str(planted.files_of(case, tmp_path)), "capture": str(capture)}
        values |= {"out": str(tmp_path / "out"), "lossless_prompts": 2, **options}
        return examine(Run.open(RunConfig.read(values), strict=False))

    return run


def faults(said):
    return [one["cause"] for one in said.findings if is_fault(one)]


def test_broken_states_do_not_hide_a_wrong_theta(examined):
    said = examined("states a row late and theta")
    assert faults(said) == ["hidden.rows", "rope.theta"]
    assert said.verdict is Verdict.FAIL
    rows, theta = said.findings[:2]
    # Fresh states give back what the shifted ones cost; the trained theta what is left.
    assert rows["delta"]["lo"] > 0
    assert rows["recoverable"]
    assert theta["settings"] == ["rope_theta=10000"]
    assert theta["tau_own_reading"]["value"] == pytest.approx(2.15, abs=0.005)
    assert said.tau_best == theta["tau_own_reading"]


def test_a_loss_that_is_not_the_objective_takes_the_step(examined):
    said = examined("soft_kl_loss", step=f"{STEPS}:soft_kl_loss")
    assert faults(said) == ["training.loss_mismatch"]
    (first, *_) = said.findings
    assert first["delta"]["value"] is None
    assert not first["recoverable"]
    assert "By the training step" in first["evidence"]
