"""Draft blocks at many anchors of one sequence, under a drafter's convention.

What is done here is the same whether a block is scored, swept over readings, or shown: place the
anchors' tokens and mask tokens, choose what each slot may see, and run the drafter once.

Symbols: T tokens, A anchors, B block size, D proposed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_diag.drafter import Drafter
from dflash_diag.masks import rules_of

ANCHORS_AT_ONCE = 256
"""Blocks in one pass: bounds the attention scores that are held."""

Context = list[tuple[Tensor, Tensor]]
"""Keys and values [T, g, d] of every layer."""


def draft_blocks(
    drafter: Drafter,
    embedding: Tensor,
    tokens: Tensor,
    anchors: Tensor,
    features: Tensor,
    context: Context | None = None,
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
    """
    how = drafter.convention
    if how.other_blocks != "hidden":
        hidden = _together(drafter, embedding, tokens, anchors, features)
    else:
        if context is None:
            rows = torch.arange(len(features), device=features.device)
            context = drafter.context(features, rows)
        parts = anchors.split(ANCHORS_AT_ONCE)
        hidden = torch.cat([_apart(drafter, embedding, tokens, part, context) for part in parts])
    return hidden[:, how.first_slot : how.first_slot + how.n_proposed]


def _apart(
    drafter: Drafter, embedding: Tensor, tokens: Tensor, anchors: Tensor, context: Context
) -> Tensor:
    """[A, B, H]: every block sees the context and itself, as a server runs it."""
    how = drafter.convention
    noise, rows, positions = _slots(drafter, embedding, tokens, anchors)
    rules = rules_of(how)
    seen = {rule: rule.rows(anchors, len(context[0][0])) for rule in set(rules)}
    inside = [rule.own(anchors.device) for rule in rules]
    return drafter.blocks(noise, rows, positions, context, [seen[rule] for rule in rules], inside)


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
