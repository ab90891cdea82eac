"""The same inputs, seed and device give the same bytes; where they need not, the gap is bounded."""

from __future__ import annotations

import shutil

import killing
import numpy as np
import pytest
import torch

from dflash_diag.bundle import Capture
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.scoring import score

BETWEEN_MACHINES = 1e-4
"""Nats by which log-probabilities may differ between numbers of threads and between devices in
float32; the README states it."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return killing.write_world(tmp_path_factory.mktemp("world"))


def test_processes_agree_byte_for_byte(world, tmp_path):
    """Whatever order sets come in. Threads are as many: even small sums depend on their number."""
    left = []
    for seed in ("0", "1"):
        found = killing.stages(world, tmp_path)
        left.append({})
        with killing.Spawner(PYTHONHASHSEED=seed) as spawner:
            for stage in (found["capture"], found["score"]):
                assert stage.start(spawner).wait() == 0, stage.said()
                left[-1] |= killing.kept(stage)
                shutil.rmtree(stage.out)
    assert len(left[0]) >= 20
    assert killing.differences(left[1], left[0]) == []


@pytest.fixture
def scored(world):
    def run(device="cpu", threads=1):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            checkpoint = read_checkpoint(world / "drafter")
            how = resolve_convention(checkpoint)
            drafter = load_drafter(checkpoint, how, dtype=torch.float32, device=device)
            return score(Capture.load(world / "capture"), drafter, silent=True)
        finally:
            torch.set_num_threads(before)

    return run


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_more_than_rounding(scored, threads):
    assert_alike(scored(), scored(threads=threads))


@pytest.mark.gpu
def test_devices_change_no_more_than_rounding(scored):
    assert_alike(scored(), scored(device="cuda"))


def assert_alike(one, other):
    """The same tokens but where two are tied within the bound; log-probabilities within it."""
    assert one.prompt_ids == other.prompt_ids
    assert np.abs(one.label_logprob - other.label_logprob).max() <= BETWEEN_MACHINES
    assert np.abs(one.topk_logprobs - other.topk_logprobs).max() <= BETWEEN_MACHINES
    gap = one.topk_logprobs[..., 0] - one.topk_logprobs[..., 1]
    differ = one.proposed != other.proposed
    assert (gap[differ] <= 2 * BETWEEN_MACHINES).all()
