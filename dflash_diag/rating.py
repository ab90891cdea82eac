"""The highest logits of a row, and where a label stands among all of them.

A full-size head has 248,320 columns, so logits are never held for all rows. `rate` goes through the
vocabulary some columns at a time with all rows at once: the head's weights are then read once, and
a matrix product of many rows is as fast as the hardware allows.

Shapes: n rows, H hidden size, V vocabulary, W candidates that are kept.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rated(NamedTuple):
    """Ratings of n rows, in the order of `dflash_diag.proposals.Proposed`."""

    rank: Tensor
    """[n] int32 tokens rated above the label."""
    label_logprob: Tensor
    """[n] float32, in nats."""
    ids: Tensor
    """[n, W] int32, best first; equal ones by ascending id."""
    logprobs: Tensor
    """[n, W] float32."""


def rate(hidden: Tensor, weight: Tensor, labels: Tensor, *, width: int, slice_bytes: int) -> Rated:
    """Rate ``labels`` [n] under the logits of ``hidden`` [n, H] and a head's ``weight`` [V, H].

    A label among the candidates has its place there as its rank, so that rank 0 is exactly the
    proposal. Any other is counted against its own logit, computed apart, whose rounding can move
    that rank by as many tokens as are equal to it up to rounding.

    Parameters
    ----------
    slice_bytes
        Size of the logits held at one time, in bytes.
    """
    n, v = len(hidden), len(weight)
    columns = max(width, slice_bytes // (n * weight.element_size()) // 128 * 128)
    own = (hidden.float() * weight[labels].float()).sum(-1, keepdim=True).to(weight.dtype)
    over = _over(hidden.is_cuda)
    norms, above, values, ids = [], torch.zeros_like(labels), [], []
    for start in range(0, v, columns):
        logits = hidden @ weight[start : start + columns].T
        norm, count = over(logits, own, labels - start)
        norms.append(norm)
        above += count
        found = top(logits, min(width, logits.shape[1]))
        values.append(found[0])
        ids.append(found[1] + start)
    best, place = torch.cat(values, dim=1).topk(width, dim=1)
    order = torch.cat(ids, dim=1).gather(1, place)
    best, order = by_value_then_id(best, order)
    norm = torch.stack(norms).logsumexp(0)[:, None]
    at = order == labels[:, None]
    inside, rank = at.any(1), at.int().argmax(1)
    own = torch.where(inside[:, None], best.gather(1, rank[:, None]), own)
    rank = torch.where(inside, rank, above.clamp(min=width))
    return Rated(rank.int(), (own - norm)[:, 0], order.int(), best - norm)


@cache
def _over(compiled: bool) -> Any:
    """Sums over the columns of logits [n, C], in one pass where compiled."""

    def over(logits: Tensor, own: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Log of the sum of exponentials [n], and how many are above ``own`` [n, 1]."""
        column = torch.arange(logits.shape[1], device=logits.device)
        ahead = (logits > own) | ((logits == own) & (column < label[:, None]))
        return logits.float().logsumexp(1), (ahead & (column != label[:, None])).sum(1)

    return torch.compile(over) if compiled else over


def by_value_then_id(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, W] by descending value, equal ones by ascending id."""
    ids, order = ids.sort(dim=1)
    values, place = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, place)


def ordered_top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` highest logits of each row and their ids; equal ones by ascending id."""
    values, ids = top(logits, width)
    tied = (values[:, 1:] == values[:, :-1]).any(-1)
    if bool(tied.any()):
        values[tied], ids[tied] = by_value_then_id(values[tied], ids[tied])
    return values, ids


def top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
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


def rank_of(logits: Tensor, own: Tensor, label: Tensor, top: Tensor) -> Tensor:
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
