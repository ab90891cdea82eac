"""z-lab's ``DFlashDraftModel`` (PyPI ``dflash``), fed and cropped as its own loop does.

The model itself has no bound on its context: it sees every row that is in its cache. So the caller
must crop, and this adapter does so before it drafts.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from dflash_diag.adapters import DraftSpec, Refused, TargetBits


class Cached(NamedTuple):
    """The drafter's cache of a context, and where its rows are."""

    cache: Any
    positions: Tensor
    """[T], ascending."""


class ZLab:
    """A ``DFlashDraftModel`` with the embedding and head [V, H] of its target."""

    def __init__(self, model: Any, embedding: Tensor, head: Tensor) -> None:
        weight = model.fc.weight
        self.model = model.eval()
        self.embedding = embedding.to(weight.device, weight.dtype)
        self.head = head.to(weight.device, weight.dtype)

    def spec(self) -> DraftSpec:
        model = self.model
        return DraftSpec(
            block_size=model.block_size,
            n_proposed=model.block_size - 1,
            layer_ids=tuple(model.target_layer_ids),
            last_layer_normed=True,
            mask_token_id=model.mask_token_id,
            dtype=model.fc.weight.dtype,
            device=model.fc.weight.device,
        )

    def context(self, features: Tensor, positions: Tensor, state: Cached | None = None) -> Cached:
        cache = self._new_cache() if state is None else _copied(state.cache)
        before = positions[:0] if state is None else state.positions
        # Context enters the cache beside a block, which is cropped off again.
        last = int(positions[-1])
        self._forward(cache, features, positions, self.block(0), last + 1)
        cache.crop(-self.model.block_size)
        return Cached(cache, torch.cat([before, positions]))

    def propose(self, state: Cached, anchor_id: int, anchor_pos: int) -> Tensor:
        return self.propose_block(state, self.block(anchor_id), anchor_pos)

    def truncate(self, state: Cached, length: int) -> Cached:
        surplus = len(state.positions) - length
        if surplus <= 0:
            return state
        cache = _copied(state.cache)
        for layer in cache.layers:
            # Such a layer keeps no more rows than its window; older ones do not come back.
            if layer.is_sliding and layer.get_seq_length() >= layer.sliding_window:
                raise Refused("a sliding layer has dropped rows that the shorter context needs")
        cache.crop(-surplus)
        return Cached(cache, state.positions[:length])

    def target_bits(self) -> TargetBits:
        return TargetBits(self.embedding, self.head)

    def block(self, anchor_id: int) -> Tensor:
        ids = [anchor_id] + [self.model.mask_token_id] * (self.model.block_size - 1)
        return self.embedding[ids] * float(self._setting("input_embedding_scale", 1.0))

    def propose_block(self, state: Cached, block: Tensor, anchor_pos: int) -> Tensor:
        kept = self.truncate(state, int((state.positions < anchor_pos).sum()))
        nothing = block.new_zeros(0, len(self.model.target_layer_ids), block.shape[-1])
        cache = _copied(kept.cache)
        hidden = self._forward(cache, nothing, kept.positions[:0], block, anchor_pos)
        logits: Tensor = self.model.compute_logits(
            hidden[1:], lambda given: F.linear(given, self.head)
        )
        return logits.float()

    def _forward(
        self, cache: Any, features: Tensor, positions: Tensor, block: Tensor, anchor_pos: int
    ) -> Tensor:
        slots = torch.arange(anchor_pos, anchor_pos + len(block), device=positions.device)
        hidden: Tensor = self.model(
            target_hidden=features.flatten(1)[None],
            noise_embedding=block[None],
            position_ids=torch.cat([positions, slots])[None],
            past_key_values=cache,
            use_cache=True,
        )
        return hidden[0]

    def _new_cache(self) -> Any:
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()
        return cache

    def _setting(self, name: str, default: Any) -> Any:
        nested = getattr(self.model.config, "dflash_config", {})
        return nested.get(name, getattr(self.model.config, name, default))


def _copied(cache: Any) -> Any:
    """A cache of its own over the same tensors, which an update replaces rather than changes."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
