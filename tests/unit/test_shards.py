"""Prompts scored apart and put together are the table of one process, byte for byte."""

from __future__ import annotations

import filecmp
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag import scoring, shards
from dflash_diag.capture import make_capture
from dflash_diag.config import RunConfig
from dflash_diag.conventions import Convention
from dflash_diag.errors import BadInput
from dflash_diag.prompts import read_prompts
from dflash_diag.runs import Run


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tiny_world.write_world(tmp_path_factory.mktemp("world"))
    prompts = read_prompts(tiny_world.write_prompts(folder / "prompts.jsonl", n=5))
    make_capture(
        str(folder / "target"), prompts, folder / "capture",
        max_new_tokens=12, layers="taps", taps=[0, 2], silent=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def run(world, tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "silent")

    def make(name: str) -> Run:
        given = {name: str(world / name) for name in ("target", "drafter", "reference", "capture")}
        return Run.open(RunConfig(**given, out=str(tmp_path / name)))

    return make


@pytest.mark.parametrize("n", [2, 5, 9])
def test_parts_make_the_whole(run, n):
    whole, apart = run("whole"), run("apart")
    for part in reversed(range(n)):
        shards.score_part(run("apart"), part, n)
    shards.merge(apart, n)
    for role in whole.roles:
        whole.scores(role)
        one, other = (made.scores_folder(role) for made in (whole, apart))
        names = sorted(path.name for path in one.iterdir())
        assert names == sorted(path.name for path in other.iterdir())
        assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])
        assert [path.name for path in other.parent.glob(f"{other.name}*")] == [other.name]


def test_a_part_that_is_lacking_is_named(run):
    apart = run("apart")
    shards.score_part(apart, 0, 2)
    with pytest.raises(BadInput, match="2-of-2"):
        shards.merge(apart, 2)
    assert not apart.scores_folder("drafter").exists()


def cut(lengths: list[int], n: int) -> list[range]:
    """Runs of prompts with so many generated tokens; a block takes 4."""
    how = Convention(
        block_size=5, layer_ids=(0,), in_block=("bidirectional",), window=(None,),
        rope_theta=1e4, rotary_width=4, mask_token_id=1,
    )  # fmt: skip
    prompts = [SimpleNamespace(n_generated=length) for length in lengths]
    return scoring.shards(SimpleNamespace(prompts=prompts), how, n)


@pytest.mark.parametrize(
    ("lengths", "n", "ends"),
    [
        ([14] * 6, 3, [2, 4, 6]),
        ([14] * 6, 1, [6]),
        ([14] * 2, 5, [1, 2]),
        ([104, 14, 14, 14], 2, [1, 4]),
        # Prompts without a whole block go with the run before; a first one starts the first.
        ([4, 4, 14, 4, 14, 4], 2, [4, 6]),
        ([4, 4], 2, [2]),
    ],
)
def test_runs_of_prompts_hold_about_as_many_anchors(lengths, n, ends):
    found = cut(lengths, n)
    assert [one.stop for one in found] == ends
    assert [i for one in found for i in one] == list(range(len(lengths)))
    scorable = [any(lengths[i] > 4 for i in one) for one in found]
    assert all(scorable) or not any(scorable)
