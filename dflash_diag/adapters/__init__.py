"""Anybody's drafter behind five functions, so that it can be probed as it runs.

An adapter is any object with the functions of `DraftAdapter`; nothing has to be inherited. A state
is whatever the adapter likes: nobody looks into it but to see whether it was changed. A proposal
depends on its arguments alone, not on earlier calls.

::

    class Mine:
        def __init__(self, model, embedding, head):
            self.model, self.bits = model, TargetBits(embedding, head)

        def spec(self):
            return DraftSpec(block_size=8, n_proposed=7, layer_ids=(1, 4, 7), mask_token_id=1)

        def context(self, features, positions, state=None):
            cache = self.model.new_cache() if state is None else state
            return cache.with_rows(features.flatten(1), positions)

        def propose(self, state, anchor_id, anchor_pos):
            return self.model.draft(state.before(anchor_pos), anchor_id, anchor_pos)

        def truncate(self, state, length):
            return state.first(length)

        def target_bits(self):
            return self.bits

Further abilities are optional, and what they would show is "not testable" without them:

``block(anchor_id) -> [B, H]`` and ``propose_block(state, block, anchor_pos) -> [D, V]``
    The embeddings of a block's slots, and a proposal from such embeddings: influence of own slots.
``forward_train(features, positions, anchors, anchor_ids) -> [A, D, V]``
    Many blocks in one pass, as a trainer runs them: influence of other blocks.

Symbols: T context rows, K tapped layers, H hidden size, B block size, D proposed tokens,
A anchors, V the target's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from dflash_diag.errors import BadInput


class AdapterError(BadInput):
    """An adapter breaks its contract: an exception, a wrong shape, no numbers, no possible size."""


class Refused(ValueError):
    """Raised by an adapter that cannot do what was asked, such as taking rows beyond the anchor.

    Any ValueError and NotImplementedError says the same.
    """

    function = ""
    """Which function of the adapter refused."""


REFUSED = (ValueError, NotImplementedError)


@dataclass(frozen=True, kw_only=True)
class DraftSpec:
    """What a drafter is.

    Raises
    ------
    AdapterError
        Values that no drafter can have.
    """

    block_size: int
    """B: slots in a block, the anchor's included."""
    n_proposed: int
    """D: rows of logits that a block gives."""
    layer_ids: tuple[int, ...]
    """Tapped layers in the order of ``features``: i is the raw output of decoder layer i, -1 the
    embedding output."""
    last_layer_normed: bool = False
    """Whether the target's last layer is wanted after the final norm."""
    mask_token_id: int | None = None
    """None where the mask token is no token of the target."""
    layout: Literal["same", "next"] = "same"
    """``same``: slot k predicts the token at a+k. ``next``: at a+k+1."""
    max_context: int | None = None
    """Positions that it can handle; None where there is no limit."""
    vocabulary_map: Tensor | None = None
    """[draft vocabulary] target id of every draft id, where the vocabulary is reduced."""
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        def refuse(name: str, expected: str) -> NoReturn:
            raise AdapterError(f"spec() has {name}={getattr(self, name)!r}", expected)

        if not _whole(self.block_size, 2):
            refuse("block_size", "a whole number from 2 on (an anchor and a slot)")
        if self.layout not in ("same", "next"):
            refuse("layout", "'same' or 'next'")
        most = self.block_size - self.first_slot
        if not _whole(self.n_proposed, 1) or self.n_proposed > most:
            refuse("n_proposed", f"1 to {most}, the slots that predict in layout {self.layout!r}")
        ids = self.layer_ids
        if (
            not isinstance(ids, tuple | list)
            or not ids
            or not all(_whole(i, -1) for i in ids)
            or len(set(ids)) != len(ids)
        ):
            refuse(
                "layer_ids",
                "a tuple of different layers, counted from 0; -1 is the embedding output",
            )
        if not isinstance(self.last_layer_normed, bool):
            refuse("last_layer_normed", "True or False")
        if self.mask_token_id is not None and not _whole(self.mask_token_id, 0):
            refuse("mask_token_id", "a token id, or None")
        if self.max_context is not None and not _whole(self.max_context, 1):
            refuse("max_context", "a whole number from 1 on, or None")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            refuse("dtype", "a floating-point type of torch")
        mapped = self.vocabulary_map
        if mapped is not None and (
            not isinstance(mapped, Tensor)
            or mapped.ndim != 1
            or mapped.dtype not in (torch.int32, torch.int64)
            or len(mapped) == 0
            or bool((mapped < 0).any())
            or len(mapped.unique()) != len(mapped)
        ):
            refuse("vocabulary_map", "a tensor with a different target id for every draft id")
        try:
            torch.empty(0, device=self.device)
        except (TypeError, RuntimeError, AssertionError):
            refuse("device", "a device that torch has here")

    @property
    def first_slot(self) -> int:
        """The first slot whose output is a proposal."""
        return 1 if self.layout == "same" else 0


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


class TargetBits(NamedTuple):
    """What a drafter borrows from its target, or its own where it has them."""

    embedding: Tensor
    """[V, H]."""
    head: Tensor
    """[V, H]."""


class DraftAdapter(Protocol):
    """The five functions."""

    def spec(self) -> DraftSpec:
        """What the drafter is."""

    def context(self, features: Tensor, positions: Tensor, state: Any = None) -> Any:
        """A state of tapped ``features`` [T, K, H] at ``positions`` [T], or ``state`` with them.

        Features come as `DraftSpec.layer_ids` orders them. Extending may use ``state`` up.
        """

    def propose(self, state: Any, anchor_id: int, anchor_pos: int) -> Tensor:
        """Logits [D, V] of one block, whose row j is about the token at ``anchor_pos + 1 + j``.

        In the target's vocabulary, -inf for tokens that the drafter cannot propose. The state stays
        as it is. Rows at ``anchor_pos`` and beyond are to be ignored or refused (`Refused`).
        """

    def truncate(self, state: Any, length: int) -> Any:
        """The state with its first ``length`` rows only, as after a rejected draft."""

    def target_bits(self) -> TargetBits:
        """Embedding and head."""


__all__ = ["REFUSED", "AdapterError", "DraftAdapter", "DraftSpec", "Refused", "TargetBits"]
