"""Inputs on which an adapter is tried, and how much its answers move when nothing is wrong.

Symbols: T rows, K tapped layers, H hidden size, D proposed tokens, V vocabulary.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dflash_diag.adapters import REFUSED, DraftAdapter
from dflash_diag.adapters.checking import Checked
from dflash_diag.errors import BadInput

ROUNDINGS = 10.0
"""What is more than this many times the effect of one rounding is no rounding: a forward pass of a
few layers rounds every value about a hundred times, and a hundred independent errors add up to ten
times one."""
FACTOR = 2.0
"""A change above this many times the largest of a few repetitions is none of chance."""
DRAWS = 3


def change(before: Tensor, after: Tensor) -> Tensor:
    """Relative change of logits [..., V] for every slot [...]; what all tokens share cancels out.

    Only tokens that both rate are compared; infinite where they rate different ones.
    """
    x, y = before.detach().double(), after.detach().double()
    rated = x.isfinite() & y.isfinite()
    n = rated.sum(-1, keepdim=True)
    difference = torch.where(rated, y - x, 0.0)
    x = torch.where(rated, x, 0.0)
    x = torch.where(rated, x - x.sum(-1, keepdim=True) / n, 0.0)
    size = x.square().sum(-1).clamp(min=torch.finfo(x.dtype).tiny)
    moved = (difference.square().sum(-1) / size).sqrt()
    same_tokens = (before.isfinite() == after.isfinite()).all(-1)
    return torch.where(same_tokens, moved, math.inf).cpu()


def repeated(x: Tensor, rows: int) -> Tensor:
    """``x`` [T, ...] again and again until there are ``rows``."""
    return x.repeat(-(-rows // len(x)), *[1] * (x.ndim - 1))[:rows]


@dataclass(frozen=True, eq=False)
class Bench:
    """An adapter with one text to try it on. Made by `Bench.of`."""

    drafter: Checked
    features: Tensor
    """[T, K, H] tapped states."""
    tokens: Tensor
    """[T]."""
    anchors: tuple[int, ...]
    seed: int
    kept: list[tuple[Callable[[], Tensor], Tensor]] = field(default_factory=list)
    """Calls that others are compared with, and their answers."""

    @classmethod
    def of(
        cls,
        adapter: DraftAdapter,
        features: Tensor,
        tokens: Tensor,
        anchors: Sequence[int],
        seed: int = 0,
    ) -> Bench:
        """Check that the inputs fit each other and the adapter.

        Raises
        ------
        BadInput
            They do not; `AdapterError` where the adapter's own answers cannot be.
        """
        drafter = Checked(adapter)
        spec = drafter.spec
        features, tokens = _tensor("features", features), _tensor("tokens", tokens)
        if features.ndim != 3 or features.shape[1] != len(spec.layer_ids):
            raise BadInput(
                f"features {[*features.shape]}",
                f"[T, K, H] with the K = {len(spec.layer_ids)} layers {[*spec.layer_ids]}",
            )
        if not features.is_floating_point() or not bool(features.isfinite().all()):
            raise BadInput("features that are not finite or not floating-point", "finite states")
        if tokens.shape != (len(features),):
            raise BadInput(f"tokens {[*tokens.shape]}", f"[{len(features)}], one for each state")
        if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise BadInput(f"tokens of {tokens.dtype}", "token ids, whole numbers")
        if int(tokens.min()) < 0 or int(tokens.max()) >= drafter.vocabulary:
            raise BadInput(
                f"tokens {int(tokens.min())} to {int(tokens.max())}",
                f"ids below {drafter.vocabulary}",
            )
        try:
            places = tuple(sorted({operator.index(a) for a in anchors}))
        except TypeError:
            raise BadInput(f"anchors {anchors!r}", "a list of positions, whole numbers") from None
        if not places or places[0] < 2 or places[-1] >= len(tokens):
            raise BadInput(
                f"anchors {[*places]}", f"positions from 2 to {len(tokens) - 1}, the last token"
            )
        if spec.max_context is not None and len(tokens) + spec.block_size > spec.max_context:
            raise BadInput(
                f"{len(tokens)} tokens and a block of {spec.block_size}",
                f"at most max_context = {spec.max_context} positions",
            )
        there = features.to(spec.device, spec.dtype)
        return cls(drafter, there, tokens.to(spec.device), places, seed)

    @cached_property
    def others(self) -> Tensor:
        """[T, K, H] other states, each about as far from the true one as that is from zero."""
        largest = float(self.features.abs().max())
        return (self.features + self._noise_like(self.features)).clamp(-largest, largest)

    def _noise_like(self, x: Tensor) -> Tensor:
        """Noise with the size of each vector of ``x``."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(x.shape, generator=generator).to(x.device)
        size = x.float().square().mean(-1, keepdim=True).sqrt()
        size = torch.where(size > 0, size, size.mean().clamp(min=torch.finfo(torch.float32).eps))
        return (noise * size).to(x.dtype)

    def moved_slot(self, block: Tensor, slot: int) -> Tensor:
        """A block [B, H] with other values in one slot."""
        other = block.clone()
        other[slot] += self._noise_like(block)[slot]
        return other

    def other_token(self, token: int) -> int:
        """Some token that is neither this one nor the mask token."""
        mask = self.drafter.spec.mask_token_id
        step = max(1, self.drafter.vocabulary // 3)
        return next(
            t
            for t in ((token + i * step + i) % self.drafter.vocabulary for i in range(1, 9))
            if t not in (token, mask)
        )

    # --- answers --------------------------------------------------------------------------------

    def context(self, rows: int, features: Tensor | None = None, *, shift: int = 0) -> Any:
        """A state of the first ``rows`` rows, built in one call."""
        x = self.features if features is None else features
        positions = torch.arange(rows, device=x.device) + shift
        return self.drafter.context(x[:rows], positions)

    def logits(
        self,
        anchor: int,
        features: Tensor | None = None,
        *,
        rows: int | None = None,
        token: int | None = None,
        shift: int = 0,
    ) -> Tensor:
        """[D, V] of one block over a context of its own.

        Parameters
        ----------
        features
            In place of the true ones; may be longer.
        rows
            Rows of context; by default those before the anchor.
        token
            In place of the anchor's.
        shift
            Added to all positions.
        """
        state = self.context(anchor if rows is None else rows, features, shift=shift)
        return self.drafter.propose(state, self.token(anchor, token), anchor + shift)

    def token(self, anchor: int, other: int | None = None) -> int:
        """The anchor's token, or another."""
        return int(self.tokens[anchor % len(self.tokens)]) if other is None else other

    @cached_property
    def refusal(self) -> str | None:
        """Why the adapter takes no rows at the anchor and beyond; None where it takes them."""
        anchor = self.anchors[0]
        try:
            self.logits(anchor, rows=self._ahead_of(anchor))
        except REFUSED as refused:
            return str(refused) or type(refused).__name__
        return None

    def rows(self, anchor: int) -> int:
        """Rows that a context for an anchor may hold: some beyond it, unless that is refused."""
        return anchor if self.refusal is not None else self._ahead_of(anchor)

    def _ahead_of(self, anchor: int) -> int:
        return min(len(self.tokens), anchor + self.drafter.spec.block_size)

    def keep(self, call: Callable[[], Tensor]) -> Tensor:
        """The answer of a call, which is made again at the end (`drift`)."""
        answer = call()
        self.kept.append((call, answer))
        return answer

    # --- noise ----------------------------------------------------------------------------------

    @cached_property
    def repeated(self) -> float:
        """Largest relative change of a slot when the same call is made again, and after others."""
        anchor, early = self.anchors[-1], self.anchors[0]
        first = self.keep(lambda: self.logits(anchor))
        moved = []
        for others in range(DRAWS):
            # One more each time: what alternates from call to call is not always met alike.
            for _ in range(others):
                self.logits(early, self.others, token=self.other_token(self.token(early)))
            moved.append(float(change(first, self.logits(anchor)).max()))
        return max(moved)

    def drift(self) -> float:
        """Largest relative change of a slot when the calls that were kept are made again."""
        return max(float(change(answer, call()).max()) for call, answer in self.kept)

    @property
    def still(self) -> float:
        """Change up to which a slot counts as unmoved: 0 where answers repeat bit for bit."""
        return FACTOR * self.repeated

    @property
    def unit(self) -> float:
        """Unit roundoff of the drafter's type."""
        return torch.finfo(self.drafter.spec.dtype).eps / 2

    @property
    def rounding(self) -> float:
        """Largest relative change of a slot that rounding explains."""
        return ROUNDINGS * max(self.rounded_once, self.repeated)

    @cached_property
    def rounded_once(self) -> float:
        """Largest relative change of a slot when every state is rounded once more."""
        anchor, generator = self.anchors[-1], torch.Generator().manual_seed(self.seed + 1)
        first, largest = self.logits(anchor), self.unit
        for _ in range(DRAWS):
            sign = torch.rand(self.features.shape, generator=generator) * 2 - 1
            # In float64, and up or down by a whole unit: nothing is lost to the type itself.
            moved = self.features.double() * (1 + 2 * self.unit * sign.to(self.features.device))
            after = self.logits(anchor, moved.to(self.features.dtype))
            largest = max(largest, float(change(first, after).max()))
        return largest


def _tensor(name: str, given: Any) -> Tensor:
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"{name} as {type(given).__name__}", "a tensor") from None
