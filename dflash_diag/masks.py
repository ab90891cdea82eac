"""Which rows and slots a slot may see: one rule, and every form in which it is needed.

A block's queries are its B slots, slot k at position a+k behind the anchor a. Its keys are T
context rows (tapped target states, one a token) and, in a training pass, the slots of every block
of the sequence. Packed sequences carry a document id for every position; `PADDING` is in none.

Shapes use N sequences, A anchors, B block size, T context rows, S = A*B slots, flattened block by
block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_diag.conventions import Convention
from dflash_diag.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd
    from torch.nn.attention.flex_attention import BlockMask

PADDING = -1
"""Document id of positions that are in no document: nothing but their own block is seen there."""
CHOICES = {
    "context_bound": ("strict", "inclusive"),
    "in_block": ("bidirectional", "causal"),
    "other_blocks": ("hidden", "later", "all"),
    "window_rule": ("slot", "anchor"),
}
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From sequence, head, query and key indices to whether the query sees the key."""


@dataclass(frozen=True, kw_only=True)
class MaskRule:
    """What one attention layer of a drafter lets the slots of a block see.

    The fields mean what they mean in `Convention`, for one layer. Nothing but `_row`, `_slot` and
    `_block` decides what is visible; the methods evaluate these on different grids.
    """

    block_size: int
    context_bound: str = "strict"
    """``strict``: rows p < a, all that a server has. ``inclusive``: also the anchor's own."""
    in_block: str = "bidirectional"
    """``causal``: a slot sees the slots of its block up to itself."""
    other_blocks: str = "hidden"
    """Anything else is a fault seen in trainers. ``later``: a slot also sees every slot of the
    blocks whose anchor comes later, whose clean anchor tokens are its labels. ``all``: of every
    block. Never across documents."""
    window: int | None = None
    """W, in tokens; None is full attention."""
    window_rule: str = "slot"
    """``slot``: a key is visible less than W positions from the slot, in the context and in the
    block. ``anchor``: every slot sees the last W rows below the anchor and all of its block."""

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadInput(f"{name}={getattr(self, name)}", f"one of {', '.join(allowed)}")

    # --- the definition, element by element; every argument may be a number or broadcast ---

    def _row(self, anchor: Tensor, slot: Tensor, row: Tensor) -> Tensor:
        """Whether ``slot`` of the block at ``anchor`` sees context row ``row``."""
        visible = row < anchor if self.context_bound == "strict" else row <= anchor
        if self.window is not None and self.window_rule == "slot":
            visible = visible & (anchor + slot - row < self.window)
        elif self.window is not None:
            visible = visible & (anchor - row <= self.window)
        return visible

    def _slot(self, slot: Tensor, other: Tensor) -> Tensor:
        """Whether ``slot`` sees slot ``other`` of its own block."""
        ahead = slot - other
        visible = torch.ones_like(ahead, dtype=torch.bool)
        if self.in_block == "causal":
            visible = visible & (ahead >= 0)
        if self.window is not None and self.window_rule == "slot":
            visible = visible & (ahead.abs() < self.window)
        return visible

    def _block(self, anchor: Tensor, other: Tensor) -> Tensor:
        """Whether the slots of the block at ``anchor`` see those of another, at ``other``."""
        if self.other_blocks == "later":
            return other > anchor
        return torch.full_like(other, self.other_blocks == "all", dtype=torch.bool)

    # --- its forms ---

    def rows(self, anchors: Tensor, n_context: int, documents: Tensor | None = None) -> Tensor:
        """Context rows that each slot sees.

        Parameters
        ----------
        anchors
            [..., A] positions.
        documents
            [..., P] the document of each position, P above every anchor and at least T; without
            them a sequence is one document.

        Returns
        -------
        Tensor
            [..., A, B, T] bool, or [..., A, 1, T] where all slots of a block see the same rows.
        """
        slots = torch.arange(self.block_size, device=anchors.device)[:, None]
        rows = torch.arange(n_context, device=anchors.device)
        visible = self._row(anchors[..., None, None], slots, rows)
        if documents is not None:
            own = documents.gather(-1, anchors)[..., None, None]
            visible = visible & _same(own, documents[..., None, None, :n_context])
        return visible

    def own(self, device: torch.device | None = None) -> Tensor:
        """Slots of its own block that each slot sees: [B, B] bool."""
        slots = torch.arange(self.block_size, device=device)
        return self._slot(slots[:, None], slots)

    @property
    def served(self) -> MaskRule:
        """The same rule as a server can follow it: rows below the anchor, one block a pass."""
        return replace(self, context_bound="strict", other_blocks="hidden")

    def serving(self, anchor: int, device: torch.device | None = None) -> Tensor:
        """What a server's one block sees: [B, a + B] bool, keys being rows 0..a-1 and its slots.

        The server has no other rows and no other block, whatever the rule would let it see.
        """
        rows = self.rows(torch.tensor([anchor], device=device), anchor)[0]
        return torch.cat([rows.expand(self.block_size, -1), self.own(device)], dim=-1)

    def training(self, anchors: Tensor, n_context: int, documents: Tensor | None = None) -> Tensor:
        """Dense visibility of many blocks in one pass.

        Parameters
        ----------
        anchors
            [N, A] positions.
        documents
            [N, P], as for `rows`.

        Returns
        -------
        Tensor
            [N, S, T + S] bool, keys being the context rows and then all slots.
        """
        n, n_anchors = anchors.shape
        size = self.block_size
        rows = self.rows(anchors, n_context, documents).expand(n, n_anchors, size, n_context)
        same_block = torch.eye(n_anchors, dtype=torch.bool, device=anchors.device)
        slots = same_block[:, None, :, None] & self.own(anchors.device)[None, :, None, :]
        slots = slots.expand(n, n_anchors, size, n_anchors, size)
        if self.other_blocks != "hidden":
            shown = self._block(anchors[:, :, None], anchors[:, None, :]) & ~same_block
            if documents is not None:
                of = documents.gather(-1, anchors)
                shown = shown & _same(of[:, :, None], of[:, None, :])
            slots = slots | shown[:, :, None, :, None]
        return torch.cat([rows.flatten(1, 2), slots.flatten(3).flatten(1, 2)], dim=-1)

    def mask_mod(self, anchors: Tensor, n_context: int, documents: Tensor | None = None) -> MaskMod:
        """The mask of `training` as a function of indices, for flex attention.

        Parameters are those of `training`. Heads do not differ.
        """
        size = self.block_size

        def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
            block, slot = q // size, q % size
            key = (kv - n_context).clamp(min=0)
            other, of = key // size, anchors[b, block]
            row, elsewhere = self._row(of, slot, kv), self._block(of, anchors[b, other])
            if documents is not None:
                document, last = documents[b, of], documents.shape[1] - 1
                row = row & _same(document, documents[b, kv.clamp(max=last)])
                elsewhere = elsewhere & _same(document, documents[b, anchors[b, other]])
            slots = torch.where(block == other, self._slot(slot, key % size), elsewhere)
            return torch.where(kv < n_context, row, slots)

        return sees

    def asked(self, anchors: Tensor, n_context: int, first: int, count: int) -> MaskMod:
        """The same for blocks [A] that a server runs, asked for ``count`` slots each.

        Queries are the slots ``first`` .. ``first + count - 1``, block by block; keys are context
        rows and then all slots.
        """
        size = self.block_size

        def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
            block, slot = q // count, q % count + first
            key = (kv - n_context).clamp(min=0)
            own = (key // size == block) & self._slot(slot, key % size)
            return torch.where(kv < n_context, self._row(anchors[block], slot, kv), own)

        return sees

    def block_mask(
        self, anchors: Tensor, n_context: int, documents: Tensor | None = None, *, tile: int = 128
    ) -> BlockMask:
        """The mask of `training` block-sparse, for `flex_attention`.

        Parameters are those of `training`.

        Parameters
        ----------
        tile
            Queries and keys in one block of the mask.
        """
        from torch.nn.attention.flex_attention import create_block_mask

        n, n_anchors = anchors.shape
        slots = n_anchors * self.block_size
        return create_block_mask(
            self.mask_mod(anchors, n_context, documents),
            B=n,
            H=None,
            Q_LEN=slots,
            KV_LEN=n_context + slots,
            device=anchors.device,
            BLOCK_SIZE=tile,
        )


def _same(document: Tensor, other: Tensor) -> Tensor:
    return (document == other) & (document != PADDING)


def rules_of(convention: Convention) -> tuple[MaskRule, ...]:
    """The rule of each draft layer under a reading."""
    return tuple(
        MaskRule(
            block_size=convention.block_size,
            context_bound=convention.context_bound,
            in_block=in_block,
            other_blocks=convention.other_blocks,
            window=window,
            window_rule=convention.window_rule,
        )
        for in_block, window in zip(convention.in_block, convention.window, strict=True)
    )


# --- as a table -----------------------------------------------------------------------------------


def visibility_frame(
    training: Sequence[MaskRule],
    serving: Sequence[MaskRule],
    anchors: Sequence[int],
    n_context: int,
    *,
    documents: Sequence[int] | None = None,
    blocks: Sequence[int] | None = None,
    near: int = 4,
) -> pd.DataFrame:
    """What slots see in one pass under two sets of rules, near the places where that changes.

    Parameters
    ----------
    training, serving
        One rule a draft layer each. Layers with the same pair of rules are kept once.
    anchors
        Positions of the blocks of the pass.
    documents
        The document of each position, as for `MaskRule.rows`.
    blocks
        Indices of the blocks whose slots are listed; all if None.
    near
        Context rows that are kept on each side of a change in visibility.

    Returns
    -------
    pandas.DataFrame
        One row for each slot and key: layers (text), anchor, slot, kind (``context``, ``own`` or
        ``other``: of another block), key_anchor (of the block that the key is in, missing for
        context rows), key (its position), training, serving (whether it is visible).
    """
    import numpy as np
    import pandas as pd

    size = training[0].block_size
    listed: Sequence[int] = range(len(anchors)) if blocks is None else blocks
    placed = torch.tensor([list(anchors)])
    ids = None if documents is None else torch.tensor([list(documents)])
    seen = [
        (layers, [rule.training(placed, n_context, ids)[0].numpy() for rule in pair])
        for layers, pair in _layers_by_rule(training, serving)
    ]
    queries = np.concatenate([np.arange(size) + size * i for i in listed])
    context = np.zeros(n_context, dtype=bool)
    edges = {anchors[i] for i in listed}
    for mask in (one for _, pair in seen for one in pair):
        rows = mask[queries, :n_context]
        edges |= set((np.flatnonzero((rows[:, 1:] != rows[:, :-1]).any(0)) + 1).tolist())
    for edge in edges:
        context[max(0, edge - near) : edge + near] = True
    keys = np.concatenate([np.flatnonzero(context), np.arange(size * len(anchors)) + n_context])

    query, key = (grid.ravel() for grid in np.meshgrid(queries, keys, indexing="ij"))
    in_context, key_slot = key < n_context, key - n_context
    positions = np.array(anchors)
    of, other = query // size, np.where(in_context, 0, key_slot) // size
    kinds = np.where(in_context, "context", np.where(of == other, "own", "other"))
    common: dict[str, Any] = {
        "anchor": positions[of],
        "slot": query % size,
        "kind": kinds,
        "key_anchor": pd.array(np.where(in_context, pd.NA, positions[other]), dtype="Int64"),
        "key": np.where(in_context, key, positions[other] + key_slot % size),
    }
    return pd.concat(
        [
            pd.DataFrame(
                {"layers": layers, **common, "training": t[query, key], "serving": s[query, key]}
            )
            for layers, (t, s) in seen
        ],
        ignore_index=True,
    )


def _layers_by_rule(
    training: Sequence[MaskRule], serving: Sequence[MaskRule]
) -> Iterator[tuple[str, tuple[MaskRule, MaskRule]]]:
    """Every distinct pair of rules with the layers that have it: ``all`` or their numbers."""
    pairs = list(zip(training, serving, strict=True))
    for pair in dict.fromkeys(pairs):
        layers = [str(i) for i, one in enumerate(pairs) if one == pair]
        yield "all" if len(layers) == len(pairs) else ", ".join(layers), pair
