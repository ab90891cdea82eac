"""Which rows a slot may see: one definition, from which dense masks are built.

A block's queries are its B slots at positions a..a+B-1. Its keys are T context rows (tapped target
states, one a token) and, in training, the slots of every block of the sequence.

Shapes use A anchors, B block size, T context rows, S = A*B slots, flattened block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor


def context_visible(
    anchors: Tensor,
    n_context: int,
    block_size: int,
    *,
    bound: str = "strict",
    window: int | None = None,
    window_rule: str = "slot",
) -> Tensor:
    """Context rows that each slot sees.

    Parameters
    ----------
    anchors
        [..., A] anchor positions.

    Returns
    -------
    Tensor
        [..., A, B, T] bool. ``strict`` shows rows p < a, ``inclusive`` p <= a.
    """
    rows = torch.arange(n_context, device=anchors.device)
    last = anchors[..., None, None] - (1 if bound == "strict" else 0)
    visible = (rows <= last).expand(*anchors.shape, block_size, n_context)
    if window is not None:
        slots = torch.arange(block_size, device=anchors.device)[:, None]
        offset = slots if window_rule == "slot" else slots * 0 - 1
        visible = visible & (anchors[..., None, None] + offset - rows < window)
    return visible


def block_visible(
    block_size: int,
    *,
    in_block: str = "bidirectional",
    window: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Slots of its own block that each slot sees: [B, B] bool."""
    slots = torch.arange(block_size, device=device)
    distance = slots[:, None] - slots[None, :]
    visible = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if in_block == "causal":
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    return visible


def training_mask(
    anchors: Tensor,
    n_context: int,
    block_size: int,
    *,
    bound: str = "strict",
    in_block: str = "bidirectional",
    other_blocks: str = "hidden",
    window: int | None = None,
    window_rule: str = "slot",
) -> Tensor:
    """Dense visibility of many blocks in one pass.

    Parameters
    ----------
    anchors
        [N, A] anchor positions of N sequences.
    other_blocks
        Anything but ``hidden`` is a fault seen in trainers. ``later``: a slot of block i also sees
        every slot of the blocks whose anchor comes later, whose clean anchor tokens are labels of
        block i. ``all``: of every block.

    Returns
    -------
    Tensor
        [N, S, T + S] bool, keys being the context rows and then all slots.
    """
    n, n_anchors = anchors.shape
    slots = n_anchors * block_size
    context = context_visible(
        anchors, n_context, block_size, bound=bound, window=window, window_rule=window_rule
    ).reshape(n, slots, n_context)
    own = block_visible(block_size, in_block=in_block, window=window, device=anchors.device)
    same_block = torch.eye(n_anchors, dtype=torch.bool, device=anchors.device)
    blocks = (same_block[:, None, :, None] & own[None, :, None, :]).expand(
        n, n_anchors, block_size, n_anchors, block_size
    )
    if other_blocks != "hidden":
        later = anchors[:, :, None] < anchors[:, None, :]
        shown = later if other_blocks == "later" else later | later.mT
        blocks = blocks | shown[:, :, None, :, None]
    return torch.cat([context, blocks.reshape(n, slots, slots)], dim=-1)
