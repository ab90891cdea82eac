"""NeMo Automodel: z-lab's keys, and bidirectional blocks in sliding layers too.

It stamps ``is_causal: false`` on every export; JetSpec, which trains causal blocks, adds
``dflash_config.causal: true`` and leaves the stamp, so the nested key is the one that was meant.
"""

from __future__ import annotations

from dflash_diag.checkpoints.attention import causality
from dflash_diag.checkpoints.stacks.common import Reader, bidirectional, label_layout
from dflash_diag.checkpoints.stacks.zlab import FIELDS

READER = Reader(
    "automodel",
    "Automodel",
    {
        **FIELDS,
        "in_block": causality(
            "dflash_config.causal", "is_causal", otherwise=bidirectional("Automodel")
        ),
        "label_layout": label_layout({}, "Automodel"),
    },
)
