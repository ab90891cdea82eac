"""An adapter whose answers are checked: what breaks the contract is named, never passed on.

Every call of an adapter goes through `Checked`. It is given tensors of its own, so that it may
change them, and what it returns is copied, so that it may use its buffers again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dflash_diag.adapters import (
    REFUSED,
    AdapterError,
    DraftAdapter,
    DraftSpec,
    Refused,
    TargetBits,
)
from dflash_diag.errors import DiagError

CONTRACT = {
    "spec": "spec() to return a DraftSpec",
    "context": "context(features, positions, state=None) to return a state, or `state` with rows",
    "propose": "propose(state, anchor_id, anchor_pos) to return logits",
    "truncate": "truncate(state, length) to return the state with its first rows",
    "target_bits": "target_bits() to return (embedding, head)",
}
"""What every adapter has, and how it is called."""
OPTIONAL = {
    "block": "block(anchor_id) to return the embeddings of the slots",
    "propose_block": "propose_block(state, block, anchor_pos) to return logits",
    "forward_train": "forward_train(features, positions, anchors, anchor_ids) to return logits",
}
DEEPEST = 8
"""Levels of a state that are looked into."""


class Checked:
    """An adapter, its spec and its target's parts.

    Raises
    ------
    AdapterError
        A function is missing, ``spec`` or ``target_bits`` returns what cannot be, or they do not
        fit together. Any function raises it where the adapter's own raises an exception or
        returns what cannot be, and `Refused` where the adapter refuses.
    """

    def __init__(self, adapter: DraftAdapter) -> None:
        self.adapter, self.name = adapter, type(adapter).__name__
        if isinstance(adapter, type):
            raise AdapterError(f"the class {adapter.__name__}", "an adapter made of it")
        missing = [name for name in CONTRACT if not self.has(name)]
        if missing:
            raise AdapterError(
                f"{self.name} has no function {', '.join(missing)}",
                f"an adapter with {', '.join(CONTRACT)}",
            )
        self.spec = self._call("spec")
        if not isinstance(self.spec, DraftSpec):
            raise AdapterError(f"{self.name}.spec() returns {_shown(self.spec)}", "a DraftSpec")
        self.bits = self._bits(self._call("target_bits"))
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

    def _call(self, function: str, *given: Any) -> Any:
        """What a function of the adapter returns."""
        try:
            return getattr(self.adapter, function)(*given)
        except DiagError:
            raise
        except REFUSED as error:
            refused = Refused(_said(error))
            refused.function = function
            raise refused from error
        except Exception as error:
            raise AdapterError(
                f"{self.name}.{function}() raises {type(error).__name__}: {_said(error)}",
                (CONTRACT | OPTIONAL)[function],
            ) from error

    def _state(self, function: str, *given: Any) -> Any:
        found = self._call(function, *given)
        if found is None:
            raise AdapterError(
                f"{self.name}.{function}() returns None",
                f"{CONTRACT[function]}, also where that is changed in place",
            )
        return found

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
        given = features.clone(), positions.clone()
        return self._state("context", *given, *([] if state is None else [state]))

    def truncate(self, state: Any, length: int) -> Any:
        return self._state("truncate", state, length)

    def propose(self, state: Any, anchor_id: int, anchor_pos: int) -> Tensor:
        found = self._call("propose", state, anchor_id, anchor_pos)
        return self._logits("propose", found, ())

    def block(self, anchor_id: int) -> Tensor:
        found = self._call("block", anchor_id)
        expected = (self.spec.block_size, self.bits.embedding.shape[1])
        if not isinstance(found, Tensor) or tuple(found.shape) != expected:
            raise AdapterError(f"{self.name}.block() returns {_shown(found)}", f"{[*expected]}")
        if not found.is_floating_point() or not bool(found.isfinite().all()):
            raise AdapterError(f"{self.name}.block() returns no finite numbers", "embeddings")
        return found.detach().clone()

    def propose_block(self, state: Any, block: Tensor, anchor_pos: int) -> Tensor:
        found = self._call("propose_block", state, block.clone(), anchor_pos)
        return self._logits("propose_block", found, ())

    def forward_train(
        self, features: Tensor, positions: Tensor, anchors: Tensor, anchor_ids: Tensor
    ) -> Tensor:
        given = (one.clone() for one in (features, positions, anchors, anchor_ids))
        found = self._call("forward_train", *given)
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
        return found.to(torch.float32, copy=True)


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


def _said(error: Exception) -> str:
    """The first line of what an exception says."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _shown(value: Any) -> str:
    """What a value is, in few words."""
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
