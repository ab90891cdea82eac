"""The built-in drafter behind the five functions: what scoring runs, masks included."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_diag.adapters import DraftSpec, Refused, TargetBits
from dflash_diag.blocks import Context, draft_blocks
from dflash_diag.bundle import Capture
from dflash_diag.drafter import Drafter
from dflash_diag.proposals import Head
from dflash_diag.scoring import Borrowed


class Rows(NamedTuple):
    """A context: its projected features, and what every layer makes of them."""

    start: int
    """Position of the first row; the others follow one by one."""
    features: Tensor
    """[T, H]."""
    layers: Context


class Builtin:
    """A `Drafter` under its convention.

    Its logits are the head's. What a Markov head or a selector makes of them depends on the tokens
    chosen before, and through nothing else on the context.

    Parameters
    ----------
    embedding
        [V, H].
    head
        [V, H] of the target, or the drafter's own.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor | Head) -> None:
        weight = drafter.fc.weight
        self.drafter = drafter
        self.embedding = embedding.to(weight.device, weight.dtype)
        if isinstance(head, Tensor):
            head = Head(head.to(weight.device, weight.dtype), drafter.convention)
        self.head = head
        self.ids: Tensor | None = None
        """[V_d] the target's ids of the tokens that it can propose, where those are not all."""
        if head.target_ids is not None or len(head.weight) < head.n_target:
            self.ids = head.in_target(torch.arange(len(head.weight), device=weight.device))

    @classmethod
    def of_capture(cls, capture: Capture, drafter: Drafter) -> Builtin:
        """With the embedding and the head that scoring takes: a capture's, or the drafter's own.

        Raises
        ------
        BadInput
            The drafter lacks what its convention says is its own, or it does not fit.
        CaptureError
            The capture lacks them.
        """
        borrowed = Borrowed.of(capture, drafter)
        return cls(drafter, borrowed.embedding, borrowed.proposal.head)

    def spec(self) -> DraftSpec:
        how, weight = self.drafter.convention, self.drafter.fc.weight
        of_target = how.mask_token_id < self.head.n_target
        return DraftSpec(
            block_size=how.block_size,
            n_proposed=how.n_proposed,
            layer_ids=how.taps,
            last_layer_normed=how.last_layer_normed,
            mask_token_id=how.mask_token_id if of_target else None,
            layout=how.label_layout,
            vocabulary_map=self.ids,
            dtype=weight.dtype,
            device=weight.device,
        )

    def context(self, features: Tensor, positions: Tensor, state: Rows | None = None) -> Rows:
        start = int(positions[0]) if state is None else state.start
        first = start if state is None else start + len(state.features)
        if not torch.equal(positions.cpu(), torch.arange(first, first + len(positions))):
            raise Refused(f"positions that do not follow one by one from {first}")
        if start and self.drafter.convention.other_blocks != "hidden":
            raise Refused("blocks that see one another are drafted over positions from 0 on")
        new = self.drafter.features(features)
        layers = self.drafter.context(new, positions)
        if state is None:
            return Rows(start, new, layers)
        joined = [
            (torch.cat([k, k_new]), torch.cat([v, v_new]))
            for (k, v), (k_new, v_new) in zip(state.layers, layers, strict=True)
        ]
        return Rows(start, torch.cat([state.features, new]), joined)

    def propose(self, state: Rows, anchor_id: int, anchor_pos: int) -> Tensor:
        return self._propose(state, anchor_id, anchor_pos, None)

    def truncate(self, state: Rows, length: int) -> Rows:
        kept = [(k[:length], v[:length]) for k, v in state.layers]
        return Rows(state.start, state.features[:length], kept)

    def target_bits(self) -> TargetBits:
        return TargetBits(self.embedding, self._in_target(self.head.weight.T, 0.0).T)

    def block(self, anchor_id: int) -> Tensor:
        how = self.drafter.convention
        ids = [anchor_id] + [how.mask_token_id] * (how.block_size - 1)
        return self.embedding[ids] * how.embedding_scale

    def propose_block(self, state: Rows, block: Tensor, anchor_pos: int) -> Tensor:
        return self._propose(state, 0, anchor_pos, block)

    def forward_train(
        self, features: Tensor, positions: Tensor, anchors: Tensor, anchor_ids: Tensor
    ) -> Tensor:
        state = self.context(features, positions)
        places = anchors - state.start
        tokens = anchors.new_zeros(int(places.max()) + 1).index_put((places,), anchor_ids)
        return self._logits(self._draft(state, tokens, places, None))

    def _propose(
        self, state: Rows, anchor_id: int, anchor_pos: int, block: Tensor | None
    ) -> Tensor:
        place = anchor_pos - state.start
        device = self.embedding.device
        tokens = torch.full((place + 1,), anchor_id, device=device)
        return self._logits(
            self._draft(state, tokens, torch.tensor([place], device=device), block)
        )[0]

    def _draft(self, state: Rows, tokens: Tensor, places: Tensor, block: Tensor | None) -> Tensor:
        """Hidden states [A, D, H] of blocks whose anchors are rows ``places`` of the context."""
        how = self.drafter.convention
        drafter = _Fed.of(self.drafter, block)
        drafter.convention = dataclasses.replace(
            how, position_offset=how.position_offset + state.start
        )
        return draft_blocks(drafter, self.embedding, tokens, places, state.features, state.layers)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._in_target(self.head.logits(hidden), -math.inf)

    def _in_target(self, values: Tensor, missing: float) -> Tensor:
        """Values [..., V_d] of the drafter's tokens as [..., V], ``missing`` for all others."""
        if self.ids is None:
            return values
        room = values.new_full((*values.shape[:-1], self.head.n_target), missing)
        return room.index_copy(-1, self.ids, values)


class _Fed(Drafter):
    """A drafter over the same weights, whose one block holds given embeddings."""

    block: Tensor | None

    @classmethod
    def of(cls, drafter: Drafter, block: Tensor | None) -> _Fed:
        twin = cls.__new__(cls)
        twin.__dict__ = copy.copy(drafter.__dict__)
        twin.__dict__["block"] = block
        return twin

    def forward(self, noise: Tensor, *rest: Any, **options: Any) -> Tensor:
        given = noise if self.block is None else self.block[None]
        return super().forward(given, *rest, **options)

    def blocks(self, noise: Tensor, slots: Tensor, *rest: Any, **options: Any) -> Tensor:
        if self.block is not None:
            noise, slots = self.block, torch.arange(len(self.block), device=slots.device)[None]
        return super().blocks(noise, slots, *rest, **options)
