"""SpecForge's own files: a raw ``training_state.pt`` beside the draft configuration.

Its exports are z-lab's layout. Its trainer reads causality from the layer types alone: sliding
layers are causal, full ones are not, whatever ``is_causal`` says.
"""

from __future__ import annotations

from dflash_diag.checkpoints.attention import causal_where_sliding
from dflash_diag.checkpoints.stacks.common import Reader, label_layout
from dflash_diag.checkpoints.stacks.zlab import FIELDS

READER = Reader(
    "specforge",
    "SpecForge",
    {
        **FIELDS,
        "in_block": causal_where_sliding,
        "label_layout": label_layout({"dspark": "next"}, "SpecForge"),
    },
)
