"""The embedded example's target on a GPU: which code runs, and that its states do not depend on
what they must not depend on."""

from __future__ import annotations

import pytest
import torch

from dflash_diag.example import EXAMPLE
from dflash_diag.modules import Variant, computed_as
from dflash_diag.pairs import layer_floor
from dflash_diag.state_checks import TARGET_CHECKS, TargetRunner, Unsupported, floor_of

pytestmark = pytest.mark.gpu
LINEAR_LAYERS = 12


@pytest.fixture(scope="module")
def target():
    from dflash_diag.targets import load_target

    return load_target(EXAMPLE.part(EXAMPLE.target), device="cuda", dtype="float32")


@pytest.fixture(scope="module")
def ids(target):
    return target.encode(EXAMPLE.read_prompts()[0])[:96]


def test_auto_takes_the_kernels_and_proves_that_they_ran(target):
    pytest.importorskip("fla")
    assert target.backend.linear == "fla"
    kernels = {path: n for path, n in target.backend.ran.items() if path.startswith("fla.")}
    assert sum(kernels.values()) == 2 * LINEAR_LAYERS
    assert len(kernels) == 2  # chunked, and recurrent


@pytest.mark.parametrize("backend", ["fla", "torch", "fla+recurrent", "torch+recurrent"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backends_agree_up_to_rounding(backend, dtype, target, ids):
    if "fla" in backend:
        pytest.importorskip("fla")
    exact = Variant("torch", "float32")
    floor = floor_of(layer_floor(target, (Variant("torch", "bfloat16"), exact), [ids]))
    numbers = layer_floor(target, (Variant(backend, dtype), exact), [ids])
    for (layer, _), row in numbers.items():
        assert row["nan_rows"] == row["inf_rows"] == 0
        assert row["rel_rms"] <= 2 * floor(layer)


@pytest.mark.parametrize("backend", ["fla", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("check", TARGET_CHECKS)
def test_states_depend_on_nothing_else(check, backend, dtype, target, ids):
    if backend == "fla":
        pytest.importorskip("fla")
    pair = Variant("torch", "bfloat16"), Variant("torch", "float32")
    floor = floor_of(layer_floor(target, pair, [ids]))
    with computed_as(target, Variant(backend, dtype)) as live:
        try:
            rows = TARGET_CHECKS[check](TargetRunner(live), ids, floor)
        except Unsupported as error:
            pytest.skip(str(error))
    worst = max(rows, key=lambda row: row["times_floor"])
    assert worst["times_floor"] <= 2, worst


def test_ignored_boundaries_are_seen(target, ids):
    """What packing by positions alone would give on this backend."""
    pytest.importorskip("fla")

    class Ignoring(TargetRunner):
        def packed(self, documents):
            return self.plain(torch.tensor([[i for d in documents for i in d]]))

    pair = Variant("torch", "bfloat16"), Variant("torch", "float32")
    floor = floor_of(layer_floor(target, pair, [ids]))
    rows = TARGET_CHECKS["hidden.packing"](Ignoring(target), ids, floor)
    assert max(row["times_floor"] for row in rows) > 2
