"""Whether proposals are their labels, at a fraction of what knowing all of them costs.

A slot in which some token is clearly above the label is wrong, whatever else is in the vocabulary;
and what drafters propose wrongly are mostly words of the text. So the words of the text are looked
at first, and the whole of a large vocabulary only for the slots that these leave open: for several
texts in one product, since a product of few rows waits for the head's weights.

Shapes: A anchors, D proposed tokens, H hidden size, V vocabulary, n slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dflash_diag.proposals import Argmax, Proposal

CLEARLY = 1e-4
"""Share of a logit, plus one, that is far above what rounding in float32 does to it."""
FEW = 4
"""A vocabulary this many times as large as the likely tokens is worth looking at later."""


class _Open(NamedTuple):
    """Slots that the likely tokens leave open, and where the answer belongs."""

    hidden: Tensor
    """[n, H]."""
    labels: Tensor
    """[n]."""
    right: Tensor
    """[A * D], written later."""
    at: Tensor
    """[n] places in ``right``."""


class Judge:
    """Compares the proposals of several texts with their labels.

    Parameters
    ----------
    likely
        Tokens of the target that are looked at first.
    """

    def __init__(self, proposal: Proposal, likely: Tensor) -> None:
        self.proposal = proposal
        self._open: list[_Open] = []
        self._few: Tensor | None = None
        head = proposal.head
        cheap = isinstance(proposal, Argmax) and head.is_plain
        if cheap and head.weight.dtype == torch.float32 and FEW * len(likely) < len(head.weight):
            self._few = head.weight[likely]

    def right(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Tensor:
        """Whether each slot proposes its label [A, D]; complete after `finish`.

        Parameters
        ----------
        hidden
            [A, D, H].
        anchors
            [A] tokens.
        labels
            [A, D].
        """
        if self._few is None:
            return self.proposal.ids(hidden, anchors) == labels
        flat, wanted = hidden.flatten(0, 1), labels.flatten()
        own = (flat * self.proposal.head.weight[wanted]).sum(-1)
        above = (flat @ self._few.T).amax(-1) > own + CLEARLY * (1 + own.abs())
        right = torch.zeros_like(above)
        at = (~above).nonzero()[:, 0]  # what is no number is above nothing
        self._open.append(_Open(flat[at], wanted[at], right, at))
        if sum(len(one.at) for one in self._open) >= self.proposal.head.rows:
            self.finish()
        return right.view(labels.shape)

    def finish(self) -> None:
        """Decide what is open."""
        if not self._open:
            return
        hidden = torch.cat([one.hidden for one in self._open])
        labels = torch.cat([one.labels for one in self._open])
        ids = self.proposal.ids(hidden[:, None], labels)[:, 0]
        right = (ids == labels).split([len(one.at) for one in self._open])
        for one, found in zip(self._open, right, strict=True):
            one.right[one.at] = found
        self._open = []
