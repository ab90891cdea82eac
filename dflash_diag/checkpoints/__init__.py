"""Reading drafters: exported folders and raw training files, mapped and never executed."""

from __future__ import annotations

from dflash_diag.checkpoints.absent_keys import AbsentKey, absent_keys, as_read_by
from dflash_diag.checkpoints.ambiguities import Ambiguity, ambiguities
from dflash_diag.checkpoints.auditing import TensorProblem, audit
from dflash_diag.checkpoints.contradictions import Contradiction, contradictions
from dflash_diag.checkpoints.facts import TargetFacts
from dflash_diag.checkpoints.loading import checkpoint_dtype, drafter_shape, load_drafter
from dflash_diag.checkpoints.pickles import UnsafePickle
from dflash_diag.checkpoints.reading import Checkpoint, read_checkpoint
from dflash_diag.checkpoints.resolving import resolve_convention
from dflash_diag.checkpoints.stacks.detecting import READERS, Stack, detect_stack
from dflash_diag.checkpoints.target_check import check_against_target, target_contradictions
from dflash_diag.checkpoints.training_step import training_step

__all__ = [
    "READERS",
    "AbsentKey",
    "Ambiguity",
    "Checkpoint",
    "Contradiction",
    "Stack",
    "TargetFacts",
    "TensorProblem",
    "UnsafePickle",
    "absent_keys",
    "ambiguities",
    "as_read_by",
    "audit",
    "check_against_target",
    "checkpoint_dtype",
    "contradictions",
    "detect_stack",
    "drafter_shape",
    "load_drafter",
    "read_checkpoint",
    "resolve_convention",
    "target_contradictions",
    "training_step",
]
