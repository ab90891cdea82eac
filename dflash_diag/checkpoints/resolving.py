"""From a checkpoint to the one reading that its files declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dflash_diag.checkpoints.keys import Value, body_key, head_width, n_draft_layers
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks.common import Reader
from dflash_diag.checkpoints.stacks.detecting import Stack, detect_stack
from dflash_diag.checkpoints.variants import refuse_unscorable
from dflash_diag.conventions import Convention, Source
from dflash_diag.errors import BadInput, CheckpointError

FIELDS = tuple(f.name for f in dataclasses.fields(Convention) if f.name != "sources")


def resolve_convention(checkpoint: Checkpoint, *, settings: Iterable[str] = ()) -> Convention:
    """The reading that a checkpoint declares, in the terms of the stack that wrote it.

    Parameters
    ----------
    settings
        ``field=value`` overrides. Given here rather than to `Convention.override`, they may also
        supply what the configuration lacks (``mask_token_id``, ``layer_ids``).

    Raises
    ------
    CheckpointError
        The checkpoint is of a kind that cannot be scored here; its configuration is no drafter's,
        lacks a value that has no default, or holds one that cannot be.
    """
    settings = list(settings)
    given = {s.partition("=")[0].strip() for s in settings}
    refuse_unscorable(checkpoint)
    if checkpoint.body.get("hidden_act") not in (None, "silu", "swish"):
        raise CheckpointError(
            f"{body_key(checkpoint, 'hidden_act')} is {checkpoint.body['hidden_act']!r}",
            "silu, as all DFlash drafters use",
        )
    stack = detect_stack(checkpoint)
    values = read_fields(checkpoint, stack.reader, given)
    for field, (key, do) in _REQUIRED.items():
        if field not in values and field not in given:
            raise CheckpointError(f"the configuration lacks {key}", _WANTED[field], do)
    try:
        convention = _built(checkpoint, values, stack).override(settings)
    except CheckpointError:
        raise
    except BadInput as error:
        raise CheckpointError(error.found, error.expected, error.do) from error
    if convention.rotary_width > (width := head_width(checkpoint)):
        raise CheckpointError(
            f"rotary_width is {convention.rotary_width}", f"at most {width}, the head's width"
        )
    return convention


_REQUIRED = {
    "mask_token_id": ("mask_token_id", "give it with --set mask_token_id=…"),
    "layer_ids": (
        "the tapped layers, and num_target_layers to compute them from",
        "give them with --set layer_ids=…",
    ),
}
_WANTED = {"mask_token_id": "the id of the mask token", "layer_ids": "a list of layer numbers"}


def read_fields(
    checkpoint: Checkpoint, reader: Reader, given: Collection[str] = ()
) -> dict[str, Value]:
    """What a stack's reader finds, field by field; fields that are ``given`` are not looked up."""
    found = {field: look(checkpoint) for field, look in reader.fields.items() if field not in given}
    return {field: value for field, value in found.items() if value is not None}


def _built(checkpoint: Checkpoint, values: Mapping[str, Value], stack: Stack) -> Convention:
    """The convention; a field that will be given has a value that stands in for it until then."""
    n_layers = n_draft_layers(checkpoint)
    stand_in: dict[str, Any] = {
        "block_size": 2,
        "layer_ids": (0,),
        "mask_token_id": 0,
        "in_block": ("bidirectional",) * n_layers,
        "window": (None,) * n_layers,
        "rope_theta": 1.0,
        "rotary_width": 2,
    }
    sources: dict[str, Source] = dict.fromkeys(FIELDS, stack.reader.code)
    sources |= {field: one.source for field, one in values.items()}
    fields = stand_in | {field: one.value for field, one in values.items()}
    return Convention(**fields, sources=sources)
