"""Ratings under a head that is never held whole, against the same from all logits at once."""

from __future__ import annotations

import pytest
import torch

from dflash_diag.rating import ordered_top, rate, top


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ratings_are_those_of_a_sorted_row(dtype):
    generator = torch.Generator().manual_seed(0)
    n, v, width = 40, 1_000, 16
    logits = torch.randn(n, v, generator=generator).mul(4).to(dtype)
    labels = torch.randint(v, (n,), generator=generator)
    labels[:10] = logits[:10].argmax(1)
    found = rate(logits, labels, width)
    logprobs = logits.float().log_softmax(1)
    order = logits.sort(dim=1, descending=True, stable=True).indices
    torch.testing.assert_close(found.label_logprob, logprobs.gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(found.logprobs, logprobs.gather(1, order[:, :width]))
    assert found.rank[:10].tolist() == [0] * 10
    where = (order == labels[:, None]).int().argmax(1)
    # Which of several equal logits are the last candidates is open; their order is not.
    assert (found.rank - where).abs().max() <= (0 if dtype is torch.float32 else 5)
    if dtype is torch.float32:
        assert found.ids.tolist() == order[:, :width].tolist()


def test_equal_logits_are_ordered_by_id():
    found = rate(torch.ones(3, 1_000), torch.tensor([0, 5, 700]), 8)
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
    equal = values[:, 1:] == values[:, :-1]
    assert (ids[:, 1:] > ids[:, :-1])[equal].all()
