"""From what the head reads to proposed tokens: the step in which drafters differ most.

A plain DFlash drafter proposes each slot's most probable token. Others walk through candidates with
a learned selector, or condition each slot on the one before. All of them stand behind `Proposal`,
so that scoring, decoding and probes never assume a per-slot argmax.

Shapes: M blocks, D proposed tokens, H hidden size, V vocabulary, W = min(64, V) stored candidates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_diag.conventions import Convention
from dflash_diag.errors import BadInput

STORED = 64
"""Candidates a slot that are kept: enough for every tree of up to 64 nodes."""
SLICE_BYTES = 64 * 2**20
"""Logits held at one time; the number of rows in a slice shrinks as the vocabulary grows."""


@dataclass(frozen=True, eq=False)
class Proposed:
    """What a drafter proposes for M blocks, and how it rates the target's own tokens."""

    ids: Tensor
    """[M, D] int64."""
    rank: Tensor
    """[M, D] int32: tokens rated above the label, 0 if it is the top choice; full rank in V."""
    label_logprob: Tensor
    """[M, D] float32, in nats."""
    topk_ids: Tensor
    """[M, D, W] int32, best first; equal ones by ascending id."""
    topk_logprobs: Tensor
    """[M, D, W] float32."""


class Proposal(Protocol):
    """The step from hidden states to proposed ids."""

    def ids(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Proposed ids [M, D] for ``hidden`` [M, D, H] and the anchors' tokens [M]."""

    def score(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Proposed:
        """The same with candidates, and the rating of ``labels`` [M, D]."""


class Argmax:
    """Every slot proposes its most probable token, whatever the others do.

    Parameters
    ----------
    head
        [V, H].
    convention
        Its ``logit_scale`` and ``softcap`` shape the distribution.
    slice_bytes
        Size of the logits held at one time, in bytes.
    """

    def __init__(
        self, head: Tensor, convention: Convention, *, slice_bytes: int = SLICE_BYTES
    ) -> None:
        self.head = head
        self.scale, self.softcap = convention.logit_scale, convention.softcap
        self.rows = max(1, slice_bytes // (4 * len(head)))

    def _logits(self, hidden: Tensor) -> Tensor:
        logits = (hidden @ self.head.T).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def ids(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        del anchors
        parts = [self._logits(part).argmax(-1) for part in hidden.flatten(0, -2).split(self.rows)]
        return torch.cat(parts).view(hidden.shape[:-1])

    def score(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Proposed:
        del anchors
        width = min(STORED, len(self.head))
        m, d = labels.shape
        device = hidden.device
        ids = torch.empty(m * d, width, dtype=torch.int32, device=device)
        logprobs = torch.empty(m * d, width, device=device)
        rank = torch.empty(m * d, dtype=torch.int32, device=device)
        label_logprob = torch.empty(m * d, device=device)
        flat, wanted = hidden.flatten(0, -2), labels.flatten()
        for start in range(0, m * d, self.rows):
            part = slice(start, start + self.rows)
            logits = self._logits(flat[part])
            label = wanted[part, None]
            own = logits.gather(-1, label)
            values, found = _ordered_top(logits, width)
            rank[part] = _rank(logits, own, label, found)
            # The last use of the logits, so in place.
            top = values[:, :1]
            norm = logits.sub_(top).exp_().sum(-1, keepdim=True).log_() + top
            ids[part], logprobs[part] = found.int(), values - norm
            label_logprob[part] = (own - norm)[:, 0]
        shape = (m, d, width)
        return Proposed(
            ids=ids[:, 0].long().view(m, d),
            rank=rank.view(m, d),
            label_logprob=label_logprob.view(m, d),
            topk_ids=ids.view(shape),
            topk_logprobs=logprobs.view(shape),
        )


def _ordered_top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` highest logits of each row and their ids; equal ones by ascending id."""
    values, ids = _top(logits, width)
    tied = (values[:, 1:] == values[:, :-1]).any(-1)
    if bool(tied.any()):
        by_id = ids[tied].argsort(dim=-1)
        by_value = values[tied].gather(-1, by_id).argsort(dim=-1, descending=True, stable=True)
        order = by_id.gather(-1, by_value)
        values[tied], ids[tied] = values[tied].gather(-1, order), ids[tied].gather(-1, order)
    return values, ids


def _top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`torch.topk` in two passes, which costs a third of one over a large vocabulary.

    The columns are dealt into groups; the ``width`` groups with the highest maxima hold the
    ``width`` highest logits, since each such maximum is itself a logit.
    """
    n, v = logits.shape
    size = math.isqrt(v // width)
    if size < 3:
        return logits.topk(width, dim=-1)
    count = v // size
    groups = logits[:, : size * count].view(n, size, count).amax(1).topk(width, sorted=False)
    members = torch.arange(size, device=logits.device) * count
    rest = torch.arange(size * count, v, device=logits.device).expand(n, -1)
    ids = torch.cat([(groups.indices[..., None] + members).flatten(1), rest], dim=-1)
    values, place = logits.gather(-1, ids).topk(width, dim=-1)
    return values, ids.gather(-1, place)


def _rank(logits: Tensor, own: Tensor, label: Tensor, top: Tensor) -> Tensor:
    """Rank of each row's label; only labels outside the stored candidates are counted in full."""
    at = top == label
    rank = at.int().argmax(-1)
    outside = ~at.any(-1)
    if bool(outside.any()):
        rows, own, label = logits[outside], own[outside], label[outside]
        above = (rows > own).sum(-1)
        before = torch.arange(rows.shape[-1], device=rows.device) < label
        rank[outside] = above + ((rows == own) & before).sum(-1)
    return rank.int()


PROPOSALS: dict[str, type[Argmax]] = {"argmax": Argmax}


def make_proposal(
    convention: Convention, head: Tensor, *, slice_bytes: int = SLICE_BYTES
) -> Proposal:
    """The proposal step that a convention names.

    Raises
    ------
    BadInput
        An unknown name, or a head or vocabulary map that no step here can follow.
    """
    if convention.proposal not in PROPOSALS:
        raise BadInput(f"proposal={convention.proposal}", f"one of {', '.join(PROPOSALS)}")
    if convention.head != "target" or convention.embedding != "target":
        raise BadInput("the drafter is read with its own embedding or head", "those of the target")
    if convention.vocabulary_map != "none":
        raise BadInput(
            f"vocabulary_map={convention.vocabulary_map}", "a drafter of the full vocabulary"
        )
    return PROPOSALS[convention.proposal](head, convention, slice_bytes=slice_bytes)
