"""The highest logits of a row, and where a label stands among all of them.

A full-size head has 248,320 columns, so logits are held for some rows at a time, in the weights'
own precision; on a GPU, what reads them all is compiled into as few passes as there can be.

Shapes: n rows, V vocabulary, W candidates that are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ROWS = 128
"""Rows of logits whose highest a CPU looks for together: what is held then fits its cache."""


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


def rate(logits: Tensor, labels: Tensor, width: int) -> Rated:
    """Rate ``labels`` [n] under ``logits`` [n, V] of any precision, with sums in float32.

    The logits are read and neither copied nor changed.
    """
    own = logits.gather(1, labels[:, None])
    values, ids = by_value_then_id(*top(logits, width))
    total, above = _fused(_sums)(logits, values[:, :1], own, labels[:, None])
    norm = total.log()[:, None] + values[:, :1].float()
    at = ids == labels[:, None]
    # Among the candidates equal logits are in order; behind them a label is counted in full.
    rank = torch.where(at.any(1), at.int().argmax(1), above)
    return Rated(rank.int(), (own - norm)[:, 0], ids.int(), values - norm)


def _sums(logits: Tensor, peak: Tensor, own: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of exponentials below ``peak``, and how many come before the label: both [n]."""
    column = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (column < label))
    total = (logits.float() - peak.float()).exp().sum(1)
    return total, before.sum(1, dtype=torch.int32)


def _maxima(logits: Tensor, size: int, count: int) -> Tensor:
    """[n, count] of groups whose members lie ``count`` columns apart."""
    return logits[:, : size * count].view(len(logits), size, count).amax(1)


def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """As one pass over its input on a GPU; as it is elsewhere."""
    return lambda logits, *more: (_compiled(function) if logits.is_cuda else function)(
        logits, *more
    )


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


def by_value_then_id(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, W] by descending value, equal ones by ascending id."""
    ids, order = ids.sort(dim=1)
    values, place = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, place)


def ordered_top(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The ``width`` highest logits of each row and their ids; equal ones by ascending id."""
    if logits.dtype == torch.float32 and logits.device.type == "cpu":
        found = [_top_by_keys(rows, width) for rows in logits.split(ROWS)]
        values, ids = (torch.cat(part) for part in zip(*found, strict=True))
        return values, ids
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
    groups = _fused(_maxima)(logits, size, count).topk(width, sorted=False)
    members = torch.arange(size, device=logits.device) * count
    rest = torch.arange(size * count, v, device=logits.device).expand(n, -1)
    ids = torch.cat([(groups.indices[..., None] + members).flatten(1), rest], dim=-1)
    values, place = logits.gather(-1, ids).topk(width, dim=-1)
    return values, ids.gather(-1, place)


def _top_by_keys(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """`ordered_top` on a CPU, where numpy selects whole numbers several times as fast.

    In the two passes of `top`. A key holds a logit and, below it, how far its id is from the end.
    """
    n, v = logits.shape
    size = max(1, math.isqrt(v // width))
    count = v // size
    every = torch.arange(v)
    if size == 1:
        ids = every.expand(n, -1)
    else:
        groups = _ids_of(_highest(_keys(_maxima(logits, size, count), every[:count]), width))
        members = (groups[..., None] + every[:size] * count).flatten(1)
        ids = torch.cat([members, every[size * count :].expand(n, -1)], dim=1)
    found = _highest(_keys(logits.gather(1, ids), ids), width)
    ids = _ids_of(torch.from_numpy(np.sort(found.numpy(), axis=1)).flip(1))
    return logits.gather(1, ids), ids


_IDS = 2**31 - 1


def _keys(values: Tensor, ids: Tensor) -> Tensor:
    """int64 in the order of float32 ``values``; of equal ones the lowest id is the highest."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 is 0.0
    keys = bits.bitwise_xor_((bits >> 31).bitwise_and_(_IDS)).long()
    return keys.bitwise_left_shift_(32).bitwise_or_(_IDS - ids)


def _ids_of(keys: Tensor) -> Tensor:
    return _IDS - (keys & _IDS)


def _highest(keys: Tensor, width: int) -> Tensor:
    """The ``width`` highest of each row, in any order."""
    return torch.from_numpy(np.partition(keys.numpy(), -width, axis=1)[:, -width:])


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
