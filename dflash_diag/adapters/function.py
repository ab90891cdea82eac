"""A drafter that is one function of the whole context, such as a reference implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_diag.adapters import DraftSpec, TargetBits


class Rows(NamedTuple):
    """The context as it was given."""

    features: Tensor
    """[T, K, H]."""
    positions: Tensor
    """[T]."""


class Function:
    """A plain callable; the context is kept as it is and handed over whole.

    Parameters
    ----------
    function
        ``function(features [T, K, H], positions [T], anchor_id, anchor_pos)`` returns logits
        [D, V]. It is given rows beyond the anchor too, and has to ignore or refuse them.
    spec, bits
        What the drafter is, and what it borrows.
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor, int, int], Tensor],
        spec: DraftSpec,
        bits: TargetBits,
    ) -> None:
        self.function, self._spec, self._bits = function, spec, bits

    def spec(self) -> DraftSpec:
        return self._spec

    def context(self, features: Tensor, positions: Tensor, state: Rows | None = None) -> Rows:
        if state is None:
            return Rows(features, positions)
        return Rows(torch.cat([state.features, features]), torch.cat([state.positions, positions]))

    def propose(self, state: Rows, anchor_id: int, anchor_pos: int) -> Tensor:
        return self.function(state.features, state.positions, anchor_id, anchor_pos)

    def truncate(self, state: Rows, length: int) -> Rows:
        return Rows(state.features[:length], state.positions[:length])

    def target_bits(self) -> TargetBits:
        return self._bits
