"""Which files can hold a drafter's weights, by their names alone."""

from __future__ import annotations

from pathlib import Path

EXPORTED = (".safetensors",)
RAW = (".pt", ".pth", ".bin")
SUFFIXES = EXPORTED + RAW
INDEX = "model.safetensors.index.json"
MAKE_A_FOLDER = ("model.safetensors", INDEX)
"""Names that make the folder, rather than a file in it, the checkpoint."""
_OTHER = (
    "optimizer",
    "scheduler",
    "rng_state",
    "scaler",
    "training_args",
    "random_states",
    "mask_embedding",
    "training_state_rank",
    "training_state.rank",
)


def is_other_state(path: Path) -> bool:
    """Whether a file is called like an optimizer's state, a scheduler's, or the like."""
    return path.name.startswith(_OTHER)
