"""verl-SpeCo: flat keys with defaults for nearly all of them, full attention, an own embedding.

Its code reads RoPE's base from the flat ``rope_theta`` only and ignores scaling, layer types,
windows and ``is_causal``, wherever the configuration got them from.
"""

from __future__ import annotations

from dflash_diag.checkpoints.keys import (
    Value,
    declared,
    default_layer_ids,
    first,
    positive,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.rope import DEFAULT_THETA, positive_number
from dflash_diag.checkpoints.stacks.common import (
    SHARED,
    Reader,
    always,
    bidirectional,
    block_size,
    full_attention,
    label_layout,
    layer_ids,
    mask_token,
)
from dflash_diag.checkpoints.stacks.zlab import DEFAULT_BLOCK_SIZE
from dflash_diag.checkpoints.vocabulary import EMBEDDING, own
from dflash_diag.conventions import Source
from dflash_diag.errors import CheckpointError

TITLE = "verl-SpeCo"
DEFAULT_CONTEXT_LAYERS = 5


def evenly_spread(checkpoint: Checkpoint) -> Value | None:
    """z-lab's formula with ``num_context_layers`` in place of the drafter's layers."""
    config = checkpoint.config
    n_target, key = first(config, "target_num_hidden_layers", "num_target_layers")
    if n_target is None:
        return None
    taps, taps_key = DEFAULT_CONTEXT_LAYERS, f"{DEFAULT_CONTEXT_LAYERS} context layers"
    if config.get("num_context_layers") is not None:
        taps, taps_key = positive(config, "num_context_layers", most=1000), "num_context_layers"
    ids = default_layer_ids(positive(config, key), taps)
    return Value(ids, Source(f"{key}, {taps_key}", "default"))


def listed(checkpoint: Checkpoint) -> Value | None:
    """The listed layers; -1 has two meanings in this stack and is refused."""
    value, key = first(checkpoint.config, "target_layer_ids")
    if isinstance(value, list | tuple) and -1 in value:
        raise CheckpointError(
            f"{key} lists -1, the last layer to verl-SpeCo's code and the embedding to its guide",
            "layers from 0 on",
            "give the layers that were trained with --set layer_ids=…",
        )
    return _LISTED(checkpoint)


_LISTED = layer_ids("target_layer_ids", lowest=0, otherwise=evenly_spread)
_MASK = mask_token("mask_token_id")


def mask(checkpoint: Checkpoint) -> Value:
    """The stated mask token, else the vocabulary's last."""
    last = positive(checkpoint.config, "vocab_size") - 1
    return _MASK(checkpoint) or Value(last, Source("vocab_size - 1", "default"))


def theta(checkpoint: Checkpoint) -> Value:
    """The flat key alone; a base inside ``rope_parameters`` is never read."""
    value = checkpoint.config.get("rope_theta")
    if value is None:
        return Value(DEFAULT_THETA, Source("", "default"))
    return declared(positive_number(value, "rope_theta"), "rope_theta")


READER = Reader(
    "speco",
    TITLE,
    {
        **SHARED,
        "block_size": block_size(DEFAULT_BLOCK_SIZE, "z-lab", "block_size"),
        "layer_ids": listed,
        "mask_token_id": mask,
        "in_block": bidirectional(TITLE),
        "window": full_attention(TITLE),
        "label_layout": label_layout({}, TITLE),
        "rope_theta": theta,
        "rope_scaling": always(None, f"{TITLE}'s code"),
        "embedding": own(EMBEDDING),
    },
)
