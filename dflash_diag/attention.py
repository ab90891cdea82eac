"""Attention of block slots over a context that all blocks share and over their own slots.

How it is computed depends on where: on a CPU by two matrix products under small masks (`Masked`),
on a GPU by one block-sparse kernel (`Sparse`). Both are one softmax, in float32, over both parts.

Shapes use T context rows, A anchors, B block size, Q slots of a block that ask (B, or those that
the head reads), S = A*B slots, h heads, g key/value heads, d head width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_diag.masks import MaskRule

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128
"""Queries and keys in one tile of a block-sparse mask."""
HELD = 2**26
"""Elements of a mask that are looked at together."""

Pair = tuple[Tensor, Tensor]
"""Keys and values."""


class Attend(Protocol):
    """One layer's attention."""

    def __call__(self, q: Tensor, context: Pair, own: Pair) -> Tensor:
        """Queries [A, Q, h, d] over ``context`` [T, g, d] and ``own`` [A, B, g, d]."""


@dataclass(frozen=True, eq=False)
class Masked:
    """By two products, under masks [A, Q or 1, T] and [Q, B]."""

    rows: Tensor
    inside: Tensor

    @classmethod
    def of(cls, rule: MaskRule, anchors: Tensor, n_context: int, asking: slice) -> Masked:
        """For blocks at ``anchors`` [A], of which the slots ``asking`` are queries."""
        rows = rule.rows(anchors, n_context)
        rows = rows[:, asking] if rows.shape[1] > 1 else rows
        return cls(rows, rule.own(anchors.device)[asking])

    def __call__(self, q: Tensor, context: Pair, own: Pair) -> Tensor:
        return shared_attention(q, context, own, self.rows, self.inside)


@dataclass(frozen=True, eq=False)
class Sparse:
    """By flex attention: tiles of queries and keys that nothing sees are not computed."""

    mask: BlockMask

    @staticmethod
    def fits(values: Tensor) -> bool:
        """Whether the kernel takes such values [T, g, d] and is as exact as they are.

        In float32 it would round products to fewer digits than the plain form keeps.
        """
        width = values.shape[-1]
        half = values.dtype in (torch.bfloat16, torch.float16)
        return half and width >= 16 and width & (width - 1) == 0

    def __call__(self, q: Tensor, context: Pair, own: Pair) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        k, v = (
            torch.cat([shared, mine.flatten(0, 1)]).transpose(0, 1)[None]
            for shared, mine in zip(context, own, strict=True)
        )
        asked = q.flatten(0, 1).transpose(0, 1)[None].to(v.dtype)
        fused = q.is_cuda and not torch.compiler.is_compiling()
        flex = _compiled_flex() if fused else flex_attention
        out = flex(asked, k.to(v.dtype), v, block_mask=self.mask, enable_gqa=True)
        return out[0].transpose(0, 1).unflatten(0, q.shape[:2])


@cache
def _compiled_flex() -> Any:
    """As it is, flex attention computes every score."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def sparse_mask(
    rule: MaskRule, anchors: Tensor, n_context: int, asking: slice, tile: int = TILE
) -> BlockMask:
    """Which tiles of keys (context rows, then all slots) each tile of queries sees.

    Worked out from the rule's own masks some anchors at a time; nothing of the size [S, T + S] is
    ever held.

    Parameters
    ----------
    anchors
        [A] positions; with the slots that ask they fill whole tiles.
    n_context
        T, in whole tiles; rows at or after an anchor may be padding, unless the rule shows them.
    asking
        The slots of each block that are queries.
    """
    from torch.nn.attention.flex_attention import BlockMask

    size, device = rule.block_size, anchors.device
    first, stop, _ = asking.indices(size)
    q = stop - first
    n_queries, n_slots = len(anchors) * q, len(anchors) * size
    if n_queries % tile or n_context % tile or n_slots % tile:
        raise ValueError(f"{n_queries} queries, {n_context} rows and {n_slots} slots in tiles")
    some, every = [], []
    fill = tile // math.gcd(tile, q)  # anchors in the fewest whole tiles
    for part in anchors.split(max(1, HELD // (fill * q * n_context)) * fill):
        seen = rule.rows(part, n_context)
        seen = seen[:, first:stop] if seen.shape[1] > 1 else seen.expand(-1, q, -1)
        tiles = seen.flatten(0, 1).unflatten(0, (-1, tile)).unflatten(-1, (-1, tile))
        some.append(tiles.any(-1).any(1))
        every.append(tiles.all(-1).all(1))
    any_rows, all_rows = torch.cat(some), torch.cat(every)
    # A tile of queries sees the tiles that its own blocks lie in, and those only in part.
    starts = torch.arange(0, n_queries, tile, device=device)
    blocks = torch.stack([starts // q, (starts + tile - 1) // q])
    low, high = blocks[0] * size // tile, ((blocks[1] + 1) * size - 1) // tile
    at = torch.arange(n_slots // tile, device=device)
    near = (at >= low[:, None]) & (at <= high[:, None])
    partial = torch.cat([any_rows & ~all_rows, near], dim=1)
    full = torch.cat([all_rows, torch.zeros_like(near)], dim=1)
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(full),
        BLOCK_SIZE=tile,
        mask_mod=rule.asked(anchors, n_context, first, q),
        seq_lengths=(n_queries, n_context + n_slots),
        compute_q_blocks=False,
    )


def _listed(tiles: Tensor) -> Pair:
    """How many of [Q, K] are true in each row [1, 1, Q], and their places, first [1, 1, Q, K]."""
    order = tiles.int().argsort(dim=1, descending=True, stable=True)
    return tiles.sum(1).int()[None, None], order.int()[None, None]


def shared_attention(q: Tensor, context: Pair, own: Pair, rows: Tensor, inside: Tensor) -> Tensor:
    """Attention of blocks over a context that all share and over their own slots.

    One softmax over both parts, computed from two products: the context's needs no copy a block.

    Parameters
    ----------
    q
        [A, Q, h, d] of all slots of the blocks, or of some.
    context
        Keys and values [T, g, d].
    own
        Keys and values [A, B, g, d].
    rows
        [A, Q or 1, T] context rows that the slots see.
    inside
        [Q, B] slots of its own block that each sees.

    Returns
    -------
    Tensor
        [A, Q, h, d].
    """
    (k, v), (k_own, v_own) = context, own
    a, b, h, d = q.shape
    g, size = k.shape[1], k_own.shape[1]
    q = (q * d**-0.5).view(a, b, g, h // g, d)
    # [g, r*A*B, d] against the context, [A, g, r*B, d] against the own slots.
    over = torch.bmm(q.permute(2, 3, 0, 1, 4).reshape(g, -1, d), k.permute(1, 2, 0)).float()
    over = over.view(g, h // g, a, b, -1)
    # What all see needs no mask: most of a long context.
    whole = int(rows.flatten(0, 1).all(0).int().cumprod(0).sum())
    over[..., whole:].masked_fill_(~rows[..., whole:], float("-inf"))
    own_q = q.permute(0, 2, 3, 1, 4).reshape(a, g, -1, d)
    within = (own_q @ k_own.permute(0, 2, 3, 1)).float().view(a, g, h // g, b, size)
    within = within.masked_fill_(~inside, float("-inf")).permute(1, 2, 0, 3, 4)
    # The shift cancels in the quotient, hence also in its gradient.
    top = within.detach().amax(-1, keepdim=True)
    if over.shape[-1]:
        top = torch.maximum(top, over.detach().amax(-1, keepdim=True))
    over, within = over.sub_(top).exp_(), within.sub_(top).exp_()
    total = over.sum(-1, keepdim=True) + within.sum(-1, keepdim=True)
    out = torch.bmm(over.to(v.dtype).view(g, -1, over.shape[-1]), v.transpose(0, 1))
    out = out.view(g, h // g, a, b, d)
    within = within.to(v.dtype).permute(2, 0, 1, 3, 4).reshape(a, g, -1, size)
    near = (within @ v_own.transpose(1, 2)).view(a, g, h // g, b, d).permute(1, 2, 0, 3, 4)
    out = (out + near) / total.to(v.dtype)
    return out.permute(2, 3, 0, 1, 4).reshape(a, b, h, d)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of q [N, S, h, d] over k, v [N, U, g, d] under mask [N, S, U]: [N, S, h, d]."""
    repeat = q.shape[2] // k.shape[2]
    q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast the norms leave float32
    k, v = (x.transpose(1, 2).repeat_interleave(repeat, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask[:, None])
    return out.transpose(1, 2)


def eager_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """The same by explicit matrix products and a float32 softmax."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeat, dim=2) for x in (k, v))
    scores = torch.einsum("nshd,nuhd->nhsu", q, k).float() / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("nhsu,nuhd->nshd", scores.softmax(-1).to(q.dtype), v)
