"""Draft blocks at many anchors of one sequence, under a drafter's convention.

What is done here is the same whether a block is scored, swept over readings, or shown: place the
anchors' tokens and mask tokens, choose what each slot may see, and run the drafter once.

Symbols: T tokens, A anchors, B block size, D proposed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_diag.attention import TILE, Attend, Masked, Sparse, sparse_mask
from dflash_diag.drafter import Drafter
from dflash_diag.masks import MaskRule, rules_of

ANCHORS_AT_ONCE = 256
"""Blocks in one pass on a CPU: bounds the attention scores that are held."""
ANCHORS_ON_GPU = 1024
"""Blocks in one pass on a GPU, which holds no scores: bounds the widest layer's activations."""

Context = list[tuple[Tensor, Tensor]]
"""Keys and values [T, g, d] of every layer."""


def draft_blocks(
    drafter: Drafter,
    embedding: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    features: Tensor,
    context: Context | None = None,
    *,
    compiled: bool = False,
) -> Tensor:
    """What the head reads of every proposal: [A, D, H].

    Parameters
    ----------
    embedding
        [V, H] that the block's tokens are embedded with.
    tokens
        [T] tokens of the sequence; those at the anchors enter the blocks.
    anchors
        [A] positions. Under ``other_blocks`` they are seen by one another.
    features
        [n, H] from `Drafter.features`, for the first n positions. Rows that a block may not see are
        masked, so that n only has to reach far enough.
    context
        `Drafter.context` of those features, if it was computed already.
    compiled
        On a GPU, compile the layers: half a minute at first, then a tenth faster.
    """
    how = drafter.convention
    if how.other_blocks != "hidden":
        hidden = _together(drafter, embedding, tokens, anchors, features)[:, _read(drafter)]
    else:
        if context is None:
            rows = torch.arange(len(features), device=features.device)
            context = drafter.context(features, rows)
        if anchors.is_cuda and Sparse.fits(context[0][1]):
            return _tiled(drafter, embedding, tokens, anchors, context, compiled=compiled)
        parts = anchors.split(ANCHORS_AT_ONCE)
        hidden = torch.cat([_apart(drafter, embedding, tokens, part, context) for part in parts])
    return hidden


def _apart(
    drafter: Drafter, embedding: Tensor, tokens: Tensor, anchors: Tensor, context: Context
) -> Tensor:
    """[A, D, H]: every block sees the context and itself, as a server runs it."""
    read = _read(drafter)
    attend = _each(drafter, lambda rule, asked: Masked.of(rule, anchors, len(context[0][0]), asked))
    slots = _slots(drafter, embedding, tokens, anchors)
    return drafter.blocks(*slots, context, attend, read)


def _tiled(
    drafter: Drafter,
    embedding: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    context: Context,
    *,
    tile: int = TILE,
    most: int = ANCHORS_ON_GPU,
    compiled: bool = False,
) -> Tensor:
    """[A, D, H]: the same under block-sparse masks, in parts of one size that fill whole tiles."""
    read, how = _read(drafter), drafter.convention
    fill = math.lcm(tile // math.gcd(tile, how.block_size), tile // math.gcd(tile, how.n_proposed))
    n_parts = -(-len(anchors) // max(fill, most // fill * fill))
    size = -(-len(anchors) // (n_parts * fill)) * fill
    rows = -(-len(context[0][0]) // tile) * tile
    padding = rows - len(context[0][0])
    if padding:
        context = [(_padded(k, padding), _padded(v, padding)) for k, v in context]
    found = []
    for part in anchors.split(size):
        # The last block stands in for those that the last part lacks.
        at = torch.cat([part, part[-1:].expand(size - len(part))])

        def sparse(rule: MaskRule, asked: slice, at: Tensor = at) -> Attend:
            return Sparse(sparse_mask(rule, at, rows, asked, tile))

        attend = _each(drafter, sparse)
        run = _compiled_blocks() if compiled else Drafter.blocks
        made = run(drafter, *_slots(drafter, embedding, tokens, at), context, attend, read)
        found.append(made[: len(part)])
    return torch.cat(found)


def _padded(rows: Tensor, n: int) -> Tensor:
    """[T, g, d] with ``n`` more rows, which nothing sees."""
    return F.pad(rows, (0, 0, 0, 0, 0, n))


@cache
def _compiled_blocks() -> Callable[..., Tensor]:
    made: Callable[..., Tensor] = torch.compile(Drafter.blocks)
    return made


def _each(drafter: Drafter, make: Callable[[MaskRule, slice], Attend]) -> list[Attend]:
    """The attention of each layer; layers of one rule share theirs."""
    layers = list(zip(rules_of(drafter.convention), drafter.asked(_read(drafter)), strict=True))
    made: list[Attend] = []
    for index, one in enumerate(layers):
        same = layers.index(one)
        made.append(made[same] if same < index else make(*one))
    return made


def _read(drafter: Drafter) -> slice:
    """Slots that propose."""
    how = drafter.convention
    return slice(how.first_slot, how.first_slot + how.n_proposed)


def _together(
    drafter: Drafter, embedding: Tensor, tokens: Tensor, anchors: Tensor, features: Tensor
) -> Tensor:
    """[A, B, H]: all blocks in one pass, where they see one another."""
    how = drafter.convention
    noise, rows, positions = _slots(drafter, embedding, tokens, anchors)
    rules = rules_of(how)
    masks = {rule: rule.training(anchors[None], len(features)) for rule in set(rules)}
    at = torch.arange(len(features), device=features.device)
    hidden = drafter(
        noise[rows.flatten()][None],
        positions.flatten()[None],
        features[None],
        at[None],
        [masks[rule] for rule in rules],
    )
    return hidden[0].unflatten(0, rows.shape)


def _slots(
    drafter: Drafter, embedding: Tensor, tokens: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct embeddings [A+1, H], the one of each slot [A, B], and its position [A, B]."""
    how = drafter.convention
    # The anchors' tokens, each in its own row, and last the mask token for all other slots.
    noise = embedding[F.pad(tokens[anchors], (0, 1), value=how.mask_token_id)]
    if how.embedding_scale != 1.0:
        noise = noise * how.embedding_scale
    rows = torch.full((len(anchors), how.block_size), len(anchors), device=anchors.device)
    rows[:, 0] = torch.arange(len(anchors), device=anchors.device)
    slots = torch.arange(how.block_size, device=anchors.device)
    return noise, rows, anchors[:, None] + slots + how.position_offset


def context_rows(bound: str, last_anchor: int) -> int:
    """Positions whose states some anchor up to ``last_anchor`` may see."""
    return last_anchor + (1 if bound == "inclusive" else 0)
