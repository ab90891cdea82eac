"""Model-Optimizer: z-lab's keys, one window for all layers, blocks always bidirectional.

The window stands in ``dflash_config.use_swa`` and ``swa_window_size`` while ``layer_types`` stays
full. Training reads the target through transformers, so a tapped last layer comes after the norm.
"""

from __future__ import annotations

from dflash_diag.checkpoints.attention import causality, swa_window, windows
from dflash_diag.checkpoints.keys import Value, first, is_int, n_target_layers
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks.common import Reader, bidirectional, label_layout
from dflash_diag.checkpoints.stacks.zlab import FIELDS, IDS
from dflash_diag.conventions import Source


def window(checkpoint: Checkpoint) -> Value:
    """``use_swa`` for every layer, else the layer types."""
    return swa_window(checkpoint) or windows(checkpoint)


def last_layer_normed(checkpoint: Checkpoint) -> Value:
    """True where the last layer is among the listed ones."""
    target, ids = n_target_layers(checkpoint), first(checkpoint.config, *IDS)[0]
    if target and isinstance(ids, list | tuple) and target[0] - 1 in filter(is_int, ids):
        return Value(True, READER.code)
    return Value(False, Source("", "default"))


READER = Reader(
    "modelopt",
    "Model-Optimizer",
    {
        **FIELDS,
        "in_block": causality(
            "dflash_config.causal", "is_causal", otherwise=bidirectional("Model-Optimizer")
        ),
        "window": window,
        "label_layout": label_layout({"dspark": "next"}, "Model-Optimizer"),
        "last_layer_normed": last_layer_normed,
    },
)
