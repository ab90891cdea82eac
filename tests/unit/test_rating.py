"""Ratings under a head that is never held whole, against the same from all logits at once."""

from __future__ import annotations

import pytest
import torch

from dflash_diag.rating import ordered_top, rate, top


@pytest.mark.parametrize("columns", [128, 256, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_the_vocabulary_give_what_all_of_it_gives(columns, dtype):
    generator = torch.Generator().manual_seed(0)
    n, v, width = 40, 1_000, 16
    hidden = torch.randn(n, 24, generator=generator).to(dtype)
    weight = torch.randn(v, 24, generator=generator).to(dtype)
    logits = (hidden @ weight.T).float()
    labels = torch.randint(v, (n,), generator=generator)
    labels[:10] = logits[:10].argmax(1)
    slice_bytes = columns * n * weight.element_size()
    found = rate(hidden, weight, labels, width=width, slice_bytes=slice_bytes)
    logprobs = logits.log_softmax(1)
    loose = {"atol": 1e-4, "rtol": 0} if dtype is torch.float32 else {"atol": 0.1, "rtol": 0}
    torch.testing.assert_close(
        found.label_logprob, logprobs.gather(1, labels[:, None])[:, 0], **loose
    )
    best = logits.sort(dim=1, descending=True, stable=True)
    torch.testing.assert_close(found.logprobs, logprobs.gather(1, best.indices[:, :width]), **loose)
    exact = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert found.rank[:10].tolist() == [0] * 10
    if dtype is torch.float32:
        assert found.ids.tolist() == best.indices[:, :width].tolist()
        assert found.rank.tolist() == exact.tolist()
    else:  # equal logits are common, and a label outside the candidates is counted up to rounding
        assert (found.rank - exact).abs().max() <= 30


def test_equal_logits_are_ordered_by_id_whatever_slice_they_are_in():
    weight = torch.ones(1_000, 4)
    found = rate(torch.ones(3, 4), weight, torch.tensor([0, 5, 700]), width=8, slice_bytes=4096)
    assert found.ids[:, 0].tolist() == sorted(found.ids[:, 0].tolist())
    for row in found.ids.tolist():
        assert row == sorted(row)
    assert found.label_logprob.tolist() == pytest.approx([-6.907755] * 3, abs=1e-5)


@pytest.mark.parametrize("v", [10, 64, 600, 5_003])
def test_two_passes_find_what_one_does(v):
    logits = torch.randn(7, v, generator=torch.Generator().manual_seed(v))
    width = min(8, v)
    assert top(logits, width)[0].tolist() == logits.topk(width).values.tolist()
    values, ids = ordered_top(logits.round(), width)
    assert (values[:, 1:] <= values[:, :-1]).all()
    assert all(
        a < b
        for row, at in zip(values.tolist(), ids.tolist(), strict=True)
        for (x, a), (y, b) in zip(
            list(zip(row, at, strict=True))[:-1], list(zip(row, at, strict=True))[1:], strict=True
        )
        if x == y
    )
