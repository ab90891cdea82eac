"""An adapter whose answers are checked: what breaks the contract is named, never passed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash_diag.adapters import AdapterError, DraftAdapter, DraftSpec, TargetBits

DEEPEST = 8
"""Levels of a state that are looked into."""


class Checked:
    """An adapter, its spec and its target's parts.

    Raises
    ------
    AdapterError
        ``spec`` or ``target_bits`` returns what cannot be, or they do not fit together.
    """

    def __init__(self, adapter: DraftAdapter) -> None:
        self.adapter, self.name = adapter, type(adapter).__name__
        self.spec = adapter.spec()
        if not isinstance(self.spec, DraftSpec):
            raise AdapterError(f"{self.name}.spec() returns {_shown(self.spec)}", "a DraftSpec")
        self.bits = self._bits(adapter.target_bits())
        self.vocabulary = len(self.bits.head)
        """V."""
        ids = [] if self.spec.mask_token_id is None else [self.spec.mask_token_id]
        if self.spec.vocabulary_map is not None:
            ids.append(int(self.spec.vocabulary_map.max()))
        if any(one >= self.vocabulary for one in ids):
            raise AdapterError(
                f"{self.name}.spec() names token {max(ids)}",
                f"ids below {self.vocabulary}, the rows of the head",
            )

    def _bits(self, found: Any) -> TargetBits:
        what = f"{self.name}.target_bits()"
        if not isinstance(found, tuple) or len(found) != len(TargetBits._fields):
            raise AdapterError(f"{what} returns {_shown(found)}", "(embedding, head)")
        for name, tensor in zip(TargetBits._fields, found, strict=True):
            if not isinstance(tensor, Tensor) or tensor.ndim != 2:
                raise AdapterError(f"{what} has {name} {_shown(tensor)}", "a tensor [V, H]")
            if not bool(tensor.isfinite().all()):
                raise AdapterError(f"{what} has values in {name} that are not finite")
        return TargetBits(*found)

    def has(self, *functions: str) -> bool:
        """Whether the adapter has optional functions."""
        return all(callable(getattr(self.adapter, name, None)) for name in functions)

    def context(self, features: Tensor, positions: Tensor, state: Any = None) -> Any:
        if state is None:
            return self.adapter.context(features, positions)
        return self.adapter.context(features, positions, state)

    def truncate(self, state: Any, length: int) -> Any:
        return self.adapter.truncate(state, length)

    def propose(self, state: Any, anchor_id: int, anchor_pos: int) -> Tensor:
        found = self.adapter.propose(state, anchor_id, anchor_pos)
        return self._logits("propose", found, ())

    def block(self, anchor_id: int) -> Tensor:
        found = self.adapter.block(anchor_id)  # type: ignore[attr-defined] # has() says so
        expected = (self.spec.block_size, self.bits.embedding.shape[1])
        if not isinstance(found, Tensor) or tuple(found.shape) != expected:
            raise AdapterError(f"{self.name}.block() returns {_shown(found)}", f"{[*expected]}")
        return found.detach()

    def propose_block(self, state: Any, block: Tensor, anchor_pos: int) -> Tensor:
        found = self.adapter.propose_block(  # type: ignore[attr-defined] # has() says so
            state, block, anchor_pos
        )
        return self._logits("propose_block", found, ())

    def forward_train(
        self, features: Tensor, positions: Tensor, anchors: Tensor, anchor_ids: Tensor
    ) -> Tensor:
        found = self.adapter.forward_train(  # type: ignore[attr-defined] # has() says so
            features, positions, anchors, anchor_ids
        )
        return self._logits("forward_train", found, (len(anchors),))

    def _logits(self, function: str, found: Any, before: tuple[int, ...]) -> Tensor:
        expected = (*before, self.spec.n_proposed, self.vocabulary)
        what = f"{self.name}.{function}()"
        if not isinstance(found, Tensor) or tuple(found.shape) != expected:
            raise AdapterError(
                f"{what} returns {_shown(found)}", f"logits {[*expected]}: proposals x vocabulary"
            )
        if not found.is_floating_point():
            raise AdapterError(f"{what} returns {found.dtype} values", "logits, not token ids")
        shown = found.detach()
        if bool(shown.isnan().any()) or bool((shown == float("inf")).any()):
            slot = int((shown.isnan() | (shown == float("inf"))).any(-1).nonzero()[0, -1])
            raise AdapterError(
                f"{what} returns logits that are NaN or infinite, first in row {slot}",
                "numbers, or -inf for tokens outside the drafter's vocabulary",
            )
        possible = shown.isfinite()
        if bool((possible.sum(-1) < 2).any()):
            raise AdapterError(f"{what} leaves a slot no choice of tokens", "two or more")
        if self.spec.vocabulary_map is not None:
            outside = torch.ones(self.vocabulary, dtype=torch.bool, device=shown.device)
            outside[self.spec.vocabulary_map.to(shown.device)] = False
            if bool((possible & outside).any()):
                raise AdapterError(
                    f"{what} rates tokens that its vocabulary_map does not name",
                    "-inf there, in the target's vocabulary",
                )
        return found.float()


def snapshot(state: Any) -> dict[str, Any]:
    """Values in a state by their path, copied: what can be compared after a call."""
    return {
        path: value.detach().clone() if isinstance(value, Tensor) else value
        for path, value in _values(state, "state", 0)
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Paths of the values that are not as they were."""
    paths = [*before, *(path for path in after if path not in before)]
    return [p for p in paths if not _same(before.get(p), after.get(p))]


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())
    return type(x) is type(y) and bool(x == y)


def _values(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Tensors, numbers and texts inside a state. Modules are left out: they are no state."""
    if isinstance(value, Tensor | bool | int | float | str):
        yield path, value
    elif depth == DEEPEST or isinstance(value, nn.Module):
        return
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _values(one, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for i, one in enumerate(value):
            yield from _values(one, f"{path}[{i}]", depth + 1)
    elif hasattr(value, "__dict__"):
        for key, one in vars(value).items():
            yield from _values(one, f"{path}.{key}", depth + 1)


def _shown(value: Any) -> str:
    """What a value is, in few words."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
