"""Reading drafters: exported folders and raw training files, mapped and never executed."""

from __future__ import annotations

from dflash_diag.checkpoints.auditing import TensorProblem, audit
from dflash_diag.checkpoints.facts import TargetFacts
from dflash_diag.checkpoints.loading import checkpoint_dtype, drafter_shape, load_drafter
from dflash_diag.checkpoints.pickles import UnsafePickle
from dflash_diag.checkpoints.reading import Checkpoint, read_checkpoint
from dflash_diag.checkpoints.target_check import check_against_target, target_contradictions
from dflash_diag.checkpoints.zlab import Contradiction, contradictions, resolve_convention

__all__ = [
    "Checkpoint",
    "Contradiction",
    "TargetFacts",
    "TensorProblem",
    "UnsafePickle",
    "audit",
    "check_against_target",
    "checkpoint_dtype",
    "contradictions",
    "drafter_shape",
    "load_drafter",
    "read_checkpoint",
    "resolve_convention",
    "target_contradictions",
]
