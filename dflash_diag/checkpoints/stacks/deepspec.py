"""DeepSpec: every slot predicts the next token, also in what its recipes call DFlash.

The configuration is the target's with flat keys; layers are full and blocks bidirectional whatever
the target's layer types were. Layer -1 is the embedding output. The checkpoint carries copies of
the embedding and the head, which its code uses.
"""

from __future__ import annotations

from dflash_diag.checkpoints.keys import Value, architectures
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks.common import (
    SHARED,
    Reader,
    bidirectional,
    block_size,
    full_attention,
    label_layout,
    layer_ids,
    mask_token,
    nowhere,
)
from dflash_diag.checkpoints.vocabulary import EMBEDDING, HEAD, own
from dflash_diag.errors import CheckpointError

TITLE = "DeepSpec"
DEFAULT_BLOCK_SIZE = 7
"""All of it proposes: a block of 7 is 7 proposals."""
KINDS = ("plain", "dspark", "dflash2")


def listed(checkpoint: Checkpoint) -> Value | None:
    """The listed layers, which its code requires to ascend."""
    if any(name.startswith("Gemma4") for name in architectures(checkpoint.config)):
        raise CheckpointError(
            "the architecture is DeepSpec's for Gemma 4, whose layers have further norms",
            "a drafter with Qwen3's layers",
        )
    found = _LISTED(checkpoint)
    if found and list(found.value) != sorted(found.value):
        raise CheckpointError(
            f"{found.source.key} is {list(found.value)}", "ascending layers, as DeepSpec requires"
        )
    return found


_LISTED = layer_ids("target_layer_ids", lowest=-1, otherwise=nowhere)

READER = Reader(
    "deepspec",
    TITLE,
    {
        **SHARED,
        "block_size": block_size(DEFAULT_BLOCK_SIZE, TITLE, "block_size"),
        "layer_ids": listed,
        "mask_token_id": mask_token("mask_token_id"),
        "in_block": bidirectional(TITLE),
        "window": full_attention(TITLE),
        "label_layout": label_layout(dict.fromkeys(KINDS, "next"), TITLE),
        "embedding": own(EMBEDDING),
        "head": own(HEAD),
    },
)
