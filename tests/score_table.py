"""Scores made by hand, for tests of what is counted in them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Scores:
    """The columns that metrics and definitions read; see `dflash_diag.scoring.Scores`."""

    prompt_ids: list
    prompt: np.ndarray
    anchor: np.ndarray
    labels: np.ndarray
    proposed: np.ndarray
    rank: np.ndarray
    topk_logprobs: np.ndarray
    block_size: int
    unscored: list = field(default_factory=list)
    valid: np.ndarray | None = None
    convention: dict = field(default_factory=dict)
    provenance: dict = field(default_factory=dict)
