"""A drafter's own embedding and head, and the map of a reduced vocabulary.

``d2t`` [V_d] leads from draft ids to target ids. Some stacks store the target id itself
(*absolute*), speculators and vLLM its distance from the draft id (*offset*); ``t2d`` [V] marks the
target ids that the drafter has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dflash_diag.checkpoints.keys import Value, declared, first, is_int, positive
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Source
from dflash_diag.errors import CheckpointError

Kind = Literal["offset", "absolute"]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def own(name: str) -> Callable[[Checkpoint], Value | None]:
    """A reader that takes the checkpoint's own tensor ``name`` where it carries one."""

    def read(checkpoint: Checkpoint) -> Value | None:
        return declared("own", name) if name in checkpoint.tensors else None

    return read


def draft_vocabulary(checkpoint: Checkpoint) -> tuple[int, str] | None:
    """V_d and its key, where the configuration states one."""
    value, key = first(checkpoint.config, "draft_vocab_size", "dflash_config.draft_vocab_size")
    if value is None:
        return None
    if not is_int(value) or value < 1:
        raise CheckpointError(f"{key} is {value!r}", "a number of tokens")
    return value, key


def offset_map(checkpoint: Checkpoint) -> Value | None:
    """How ``d2t`` is to be read, where the stack writes offsets; None without a reduced vocabulary.

    The tensors decide where they can: a map that only makes sense as target ids is read as such.
    """
    stated = draft_vocabulary(checkpoint)
    if "d2t" not in checkpoint.tensors:
        if stated and stated[0] != positive(checkpoint.body, "vocab_size"):
            raise CheckpointError(
                f"{stated[1]} is {stated[0]} of {checkpoint.body['vocab_size']} tokens, "
                "and the checkpoint has no d2t",
                "d2t, the map from draft ids to target ids",
            )
        return None
    kinds = possible_kinds(checkpoint)
    if kinds == ("absolute",):
        return Value("absolute", Source("d2t (its values are no offsets)", "implied"))
    if len(kinds) > 1:
        return Value("offset", Source("d2t (its values would fit as target ids too)", "implied"))
    return declared("offset", "d2t")


def possible_kinds(checkpoint: Checkpoint) -> tuple[Kind, ...]:
    """The kinds of map that ``d2t``, and ``t2d`` where it is there, can be.

    Raises
    ------
    CheckpointError
        It can be neither, or has another length than the configuration says.
    """
    d2t = _vector(checkpoint, "d2t").long()
    vocabulary = positive(checkpoint.body, "vocab_size")
    stated = draft_vocabulary(checkpoint)
    if stated and stated[0] != len(d2t):
        raise CheckpointError(f"d2t has {len(d2t)} entries", f"{stated[0]}, as {stated[1]} says")
    readings: dict[Kind, Tensor] = {"offset": torch.arange(len(d2t)) + d2t, "absolute": d2t}
    kept = _kept(checkpoint, vocabulary) if "t2d" in checkpoint.tensors else None
    found = tuple(
        kind
        for kind, ids in readings.items()
        if int(ids.min()) >= 0
        and int(ids.max()) < vocabulary
        and len(ids.unique()) == len(ids)
        and (kept is None or torch.equal(ids.sort().values, kept))
    )
    if not found:
        against = "the tokens that t2d marks" if kept is not None else "one target id each"
        raise CheckpointError(
            f"d2t maps {len(d2t)} draft ids neither as offsets nor as target ids",
            f"{against}, below {vocabulary}",
        )
    return found


def _vector(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensors[name]
    whole = not tensor.is_floating_point() and not tensor.is_complex()
    if tensor.ndim != 1 or not tensor.numel() or not whole:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is {kind} {list(tensor.shape)}", "one whole number a token")
    return tensor


def _kept(checkpoint: Checkpoint, vocabulary: int) -> Tensor:
    """Target ids that ``t2d`` marks, ascending."""
    t2d = _vector(checkpoint, "t2d").long()
    if len(t2d) != vocabulary or not bool(((t2d == 0) | (t2d == 1)).all()):
        raise CheckpointError(
            f"t2d has {len(t2d)} entries from {int(t2d.min())} to {int(t2d.max())}",
            f"a mark, 0 or 1, for each of the {vocabulary} target tokens",
        )
    return t2d.nonzero()[:, 0]
