"""Two captures of the same tokens, and of tokens that part."""

from __future__ import annotations

import pytest
import torch

from dflash_diag.bundle import Capture
from dflash_diag.capture import make_capture
from dflash_diag.errors import CaptureError
from dflash_diag.modules import Variant, computed_as
from dflash_diag.pairs import (
    capture_variant,
    layer_deviations,
    left_out,
    shared_prompts,
    target_flips,
)
from dflash_diag.prompts import Prompt
from dflash_diag.targets import wrap_target


@pytest.fixture(scope="module")
def target(hybrid_model):
    return wrap_target(hybrid_model, backend="torch")


def prompts(n=2, start=0):
    return [
        Prompt(id=f"p{i}", prompt_ids=tuple(range(start + i, start + i + 12))) for i in range(n)
    ]


@pytest.fixture(scope="module")
def own(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "capture"
    return make_capture(target, prompts(), folder, max_new_tokens=10, layers="all", silent=True)


def test_the_difference_is_that_of_the_states_at_the_kept_rows(target, own, tmp_path):
    low = Variant("torch", "bfloat16")
    with computed_as(target, low) as live:
        few = make_capture(
            live, [], tmp_path / "few", like=own, layers="all", keep_rows=3, silent=True
        )
    assert capture_variant(few) == low
    assert capture_variant(own) == Variant("torch", "float32")
    rows = {row["layer"]: row for row in layer_deviations(own, few)}
    assert sorted(rows) == [-1, 0, 1, 2, 3]
    for layer in rows:
        x = torch.cat([own.states(i, [layer])[few.rows(i), 0] for i in range(2)]).double()
        y = torch.cat([few.states(i, [layer])[:, 0] for i in range(2)]).double()
        assert rows[layer]["n_tokens"] == 6
        assert rows[layer]["rel_rms"] == pytest.approx(float((x - y).norm() / y.norm()), rel=1e-9)
    for flip in target_flips(own, few):
        i = own.index(flip["prompt"])
        ours = own.positions(i).set_index("position").loc[flip["position"]]
        theirs = few.positions(i).set_index("position").loc[flip["position"]]
        assert flip["flipped"] == (ours["top_ids"][0] != theirs["top_ids"][0])
        assert flip["margin_b"] == pytest.approx(theirs["margin"])


def test_continuations_may_part_and_are_compared_up_to_there(target, own, tmp_path, monkeypatch):
    """As greedy decoding parts at a near-tie on another machine."""
    other = make_capture(target, [], tmp_path / "like", like=own, layers="all", silent=True)
    changed = own.tokens(0).clone()
    changed[15] = (changed[15] + 1) % 320

    read = Capture.tokens

    def tokens(capture, i):
        return changed if capture is other and i == 0 else read(capture, i)

    monkeypatch.setattr(Capture, "tokens", tokens)
    pairs = shared_prompts(own, other)
    assert [(p.n_tokens, p.same) for p in pairs] == [(15, False), (22, True)]
    assert layer_deviations(own, other)[0]["n_tokens"] == 15 + 22
    positions = [f["position"] for f in target_flips(own, other) if f["prompt"] == "p0"]
    assert max(positions) == 14


def test_what_a_comparison_leaves_out_is_counted(target, own, tmp_path):
    def like(name, source, **options):
        return make_capture(target, [], tmp_path / name, like=source, silent=True, **options)

    assert left_out(own, like("all", own, layers="all")) == ""
    few = like("few", own, layers="all", keep_rows=3)
    assert left_out(own, few) == left_out(few, own).replace("6 and 44", "44 and 6")
    assert left_out(own, few) == "6 of 44 and 6 positions"
    taps = like("taps", own, layers="taps", taps=[0, 2])
    assert left_out(own, taps) == "layers without -1, 1, 3"
    assert left_out(taps, own) == ""
    one = make_capture(target, prompts(1), tmp_path / "one", max_new_tokens=4, silent=True)
    assert left_out(one, own) == "1 of 1 and 2 prompts, 16 of 16 and 44 positions"


def test_another_prompt_under_the_same_id_is_refused(target, own, tmp_path):
    other = make_capture(
        target, prompts(start=40), tmp_path / "other", max_new_tokens=10, silent=True
    )
    with pytest.raises(CaptureError, match=r"different tokens for prompt 'p0' .*--like"):
        layer_deviations(own, other)
    strange = [Prompt(id="q", prompt_ids=(1, 2, 3))]
    third = make_capture(target, strange, tmp_path / "third", max_new_tokens=10, silent=True)
    with pytest.raises(CaptureError, match="no prompt in common"):
        layer_deviations(own, third)
