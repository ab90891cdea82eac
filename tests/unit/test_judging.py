"""Which proposals are right, without the logits of a whole vocabulary for every slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflash_diag.judging import Judge
from dflash_diag.proposals import Argmax, Head
from tests.unit.test_proposals import READING

V, H, A, D = 2000, 16, 30, 4
TEXTS = 3


class Counted(Argmax):
    """Knows how many slots it was asked about."""

    def __init__(self, head):
        super().__init__(head)
        self.asked = 0

    def ids(self, hidden, anchors):
        self.asked += hidden[..., 0].numel()
        return super().ids(hidden, anchors)


@pytest.fixture
def drawn():
    """A head, and by text what it reads, anchors, and labels of which a third are right."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(V, H, generator=generator)
    texts = []
    for _ in range(TEXTS):
        hidden = torch.randn(A, D, H, generator=generator)
        best = (hidden @ weight.T).argmax(-1)
        other = torch.randint(0, V, best.shape, generator=generator)
        labels = torch.where(torch.rand(best.shape, generator=generator) < 1 / 3, best, other)
        texts.append((hidden, torch.zeros(A, dtype=torch.long), labels))
    return weight, texts


@pytest.mark.parametrize("slice_bytes", [None, 4 * V * 50])  # one product, or one every 50 slots
def test_it_says_what_all_logits_say_and_asks_for_few_of_them(drawn, slice_bytes):
    weight, texts = drawn
    proposal = Counted(Head(weight, READING, slice_bytes=slice_bytes))
    judge = Judge(proposal, torch.arange(0, V, 5))
    found = [judge.right(*text) for text in texts]
    judge.finish()
    right = sum(int(one.sum()) for one in found)
    assert right <= proposal.asked < 1.5 * right
    for one, (hidden, anchors, labels) in zip(found, texts, strict=True):
        assert torch.equal(one, Argmax.ids(proposal, hidden, anchors) == labels)


def test_equal_logits_and_what_is_no_number_are_left_to_the_proposal(drawn):
    weight, texts = drawn
    hidden, anchors, _ = texts[0]
    weight = torch.cat([weight, weight[:1]])  # the last token is the first one's twin
    hidden = weight[:1].expand_as(hidden).clone()
    hidden[0] = torch.nan
    labels = torch.full((A, D), V)
    labels[:, 0] = 0
    proposal = Argmax(Head(weight, READING))
    judge = Judge(proposal, torch.arange(0, 100))
    found = judge.right(hidden, anchors, labels)
    judge.finish()
    assert torch.equal(found, proposal.ids(hidden, anchors) == labels)
    assert found[1:, 0].all()
    assert not found[1:, 1:].any()


def test_other_heads_are_asked_for_everything(drawn):
    weight, texts = drawn
    for head in (
        Head(weight, replace(READING, softcap=30.0)),
        Head(weight, READING, n_target=V, target_ids=torch.arange(V).flip(0)),
        Head(weight.bfloat16(), READING),
    ):
        proposal = Counted(head)
        judge = Judge(proposal, torch.arange(0, 100))
        hidden, anchors, labels = texts[0]
        hidden = hidden.to(head.weight.dtype)
        found = judge.right(hidden, anchors, labels)
        assert proposal.asked == A * D
        assert torch.equal(found, Argmax.ids(proposal, hidden, anchors) == labels)
