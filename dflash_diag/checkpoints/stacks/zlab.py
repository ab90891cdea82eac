"""z-lab's layout, which SpecForge and Model-Optimizer export too.

Values are looked up in ``dflash_config`` first and at the top level second; what is absent takes
the default that PyPI ``dflash`` 0.1.0, or the transformers class under it, would take.
"""

from __future__ import annotations

from dflash_diag.checkpoints.attention import causal_where_sliding, causality, windows
from dflash_diag.checkpoints.keys import (
    Value,
    default_layer_ids,
    n_draft_layers,
    n_target_layers,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks.common import (
    SHARED,
    Look,
    Reader,
    block_size,
    label_layout,
    layer_ids,
    mask_token,
)
from dflash_diag.conventions import Source

DEFAULT_BLOCK_SIZE = 16


def nested(name: str) -> tuple[str, str]:
    """The two places of a key: new checkpoints nest it, old ones do not."""
    return f"dflash_config.{name}", name


def evenly_spread(checkpoint: Checkpoint) -> Value | None:
    """Where no layers are listed, z-lab's code spreads one a draft layer over the target."""
    target = n_target_layers(checkpoint)
    if target is None:
        return None
    ids = default_layer_ids(target[0], n_draft_layers(checkpoint))
    return Value(ids, Source(target[1], "default"))


IDS = nested("target_layer_ids")
FIELDS: dict[str, Look] = {
    **SHARED,
    "block_size": block_size(DEFAULT_BLOCK_SIZE, "z-lab", *nested("block_size")),
    "layer_ids": layer_ids(*IDS, lowest=-1, otherwise=evenly_spread),
    "mask_token_id": mask_token(*nested("mask_token_id")),
    "in_block": causality("is_causal", otherwise=causal_where_sliding),
    "window": windows,
    "label_layout": label_layout({"dspark": "next"}, "z-lab"),
}
READER = Reader("zlab", "z-lab", FIELDS)
