"""vLLM's speculators: raw layer ids, a nested transformer, a vocabulary that may be reduced.

Id i is the *input* of decoder layer i, so that 0 is the embedding output. Sliding windows are
counted from the anchor, and sliding layers are causal unless ``sliding_window_non_causal``.
"""

from __future__ import annotations

from functools import partial

from dflash_diag.checkpoints import rope
from dflash_diag.checkpoints.attention import FULL, SLIDING, layer_types, windows
from dflash_diag.checkpoints.keys import Value, declared, flag
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks.common import (
    SHARED,
    Reader,
    always,
    block_size,
    label_layout,
    layer_ids,
    mask_token,
    nowhere,
)
from dflash_diag.checkpoints.variants import variant
from dflash_diag.checkpoints.vocabulary import EMBEDDING, HEAD, offset_map, own
from dflash_diag.conventions import Source

TITLE = "speculators"
DEFAULT_BLOCK_SIZE = 8
IDS = "aux_hidden_state_layer_ids"


def in_block(checkpoint: Checkpoint) -> Value:
    """Full layers are bidirectional; sliding ones too if the key says so, or without a window."""
    types, key = layer_types(checkpoint)
    tokens = windows(checkpoint).value
    stated = checkpoint.config.get("sliding_window_non_causal")
    free = variant(checkpoint).name == "dflash2"
    if stated is not None:
        free = flag(stated, "sliding_window_non_causal")
    slides = [t == SLIDING and w is not None for t, w in zip(types, tokens, strict=True)]
    kinds = tuple("causal" if s and not free else "bidirectional" for s in slides)
    if not any(slides):
        return Value(kinds, Source(key, "declared" if FULL in types else "implied"))
    if stated is None:
        return Value(kinds, Source(f"{TITLE}'s default", "default"))
    return declared(kinds, "sliding_window_non_causal")


READER = Reader(
    "speculators",
    TITLE,
    {
        **SHARED,
        "block_size": block_size(DEFAULT_BLOCK_SIZE, TITLE, "block_size"),
        "layer_ids": layer_ids(IDS, lowest=0, otherwise=nowhere),
        "layer_id_rule": always("input", IDS),
        "mask_token_id": mask_token("mask_token_id"),
        "in_block": in_block,
        "window": windows,
        "window_rule": always("anchor", f"{TITLE}'s code"),
        "label_layout": label_layout({"dspark": "next"}, TITLE, is_default=True),
        "rope_theta": partial(rope.theta, prefer=SLIDING),
        "rope_scaling": partial(rope.scaling, prefer=SLIDING),
        "rotary_width": partial(rope.width, prefer=SLIDING),
        "embedding": own(EMBEDDING),
        "head": own(HEAD),
        "vocabulary_map": offset_map,
    },
    rope_of=SLIDING,
)
