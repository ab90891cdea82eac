"""vLLM's normal form, into which it turns other stacks' configurations before serving.

Raw ids under ``eagle_aux_hidden_state_layer_ids`` come before any other list; causality is
``is_causal``, else ``dflash_config.causal``, else causal in sliding layers.
"""

from __future__ import annotations

from dflash_diag.checkpoints.attention import (
    causal_where_sliding,
    causality,
    swa_window,
    windows,
)
from dflash_diag.checkpoints.keys import Value, declared, first
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks.common import (
    SHARED,
    Reader,
    block_size,
    checked_ids,
    label_layout,
    mask_token,
)
from dflash_diag.checkpoints.stacks.zlab import DEFAULT_BLOCK_SIZE, nested
from dflash_diag.checkpoints.vocabulary import EMBEDDING, HEAD, offset_map, own

TITLE = "vLLM"
AUX = "eagle_aux_hidden_state_layer_ids"
IDS = {
    AUX: "input",
    "dflash_config.target_layer_ids": "output",
    "dspark_target_layer_ids": "output",
    "target_layer_ids": "output",
    "layer_ids": "input",
}
"""Lists of layers in the order in which vLLM looks for them, and what an id means in each."""


def listed(checkpoint: Checkpoint) -> Value | None:
    """The first list that is there."""
    value, key = first(checkpoint.config, *IDS)
    if value is None:
        return None
    return declared(checked_ids(value, key, 0 if IDS[key] == "input" else -1), key)


def rule(checkpoint: Checkpoint) -> Value:
    """Raw or not, by the list that is used."""
    value, key = first(checkpoint.config, *IDS)
    return declared(IDS[key] if value is not None else "output", key)


def window(checkpoint: Checkpoint) -> Value:
    """``use_swa`` for every layer, else the layer types."""
    return swa_window(checkpoint) or windows(checkpoint)


READER = Reader(
    "vllm",
    TITLE,
    {
        **SHARED,
        "block_size": block_size(DEFAULT_BLOCK_SIZE, "z-lab", *nested("block_size")),
        "layer_ids": listed,
        "layer_id_rule": rule,
        "mask_token_id": mask_token(
            *nested("mask_token_id"), "dspark_noise_token_id", "pard_token"
        ),
        "in_block": causality("is_causal", "dflash_config.causal", otherwise=causal_where_sliding),
        "window": window,
        "label_layout": label_layout({"dspark": "next"}, TITLE, is_default=True),
        "embedding": own(EMBEDDING),
        "head": own(HEAD),
        "vocabulary_map": offset_map,
    },
)
