"""The training step of a checkpoint: as its files say, else as it is called."""

from __future__ import annotations

import re
from pathlib import Path

from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.errors import BadInput
from dflash_diag.storage import read_json

KEYS = ("global_step", "step", "iteration", "iter")
"""Under which raw training files keep it."""
_NAMED = re.compile(
    r"(?:^|[^a-z])(?:global_?step|step|iteration|iter|checkpoint|ckpt)s?[-_=. ]?"
    r"(\d+)(k?)(?![a-z\d])",
    re.IGNORECASE,
)


def training_step(checkpoint: Checkpoint) -> int | None:
    """The step, or None where nothing tells.

    Asked in this order: the raw file's own entry, ``trainer_state.json`` beside the weights, and
    the name (``step_3000``, ``checkpoint-3000``, ``iter=30k``) of the file or of its folder.
    """
    for key in KEYS:
        value = checkpoint.extra.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    state = checkpoint.folder / "trainer_state.json"
    if state.is_file():
        try:
            value = read_json(state).get("global_step")
        except (BadInput, AttributeError):  # it is the trainer's file, not ours to check
            value = None
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return step_in_name(checkpoint.path)


def step_in_name(path: Path) -> int | None:
    """The last step that a path's own name, or its folder's, speaks of."""
    for name in (path.name, path.absolute().parent.name):
        found = _NAMED.findall(name)
        if found:
            digits, thousands = found[-1]
            return int(digits) * (1000 if thousands else 1)
    return None
