"""Diagnostics: one question a file. The list below is the registry's order, and all there is."""

from __future__ import annotations

from importlib import import_module

from dflash_diag.diagnostics.base import Diagnostic, Inputs, Skip, Threshold
from dflash_diag.errors import BadInput

MODULES = (
    "doctor_causes",
    "checkpoint_facts",
    "checkpoint_tensors",
    "checkpoint_stack",
    "checkpoint_convention",
    "checkpoint_static",
    "lossless",
    "reference",
    "headline",
    "by_position",
    "comparison",
    "prompts",
    "rounds",
    "trees",
    "repetition",
    "alignment_causes",
    "position_alignment",
    "alignment_readings",
    "mask_density",
    "divergence",
    "effect",
    "modules",
    "captured_states",
    "state_identity",
    "target_states",
    "mask_visibility",
    "mask_influence",
    "claims_dictionary",
    "claims_fit",
    "training_replay",
    "gap_decomposition",
    "data_strata",
    "data_entropy",
    "data_template",
    "training_audit",
    "compare_pairs",
    "compare_slots",
    "compare_prompts",
    "compare_trend",
)


def catalogue() -> dict[str, Diagnostic]:
    """Every diagnostic by id, in order."""
    modules = [import_module(f"{__name__}.{name}") for name in MODULES]
    order = [one for module in modules for one in vars(module).values()]
    return {one.id: one for one in order if isinstance(one, Diagnostic)}


def get(id: str) -> Diagnostic:  # noqa: A002 - it is the id
    """The diagnostic ``id``.

    Raises
    ------
    BadInput
        There is none of that name.
    """
    known = catalogue()
    if id not in known:
        raise BadInput(f"no diagnostic {id!r}", f"one of {', '.join(known)}")
    return known[id]


__all__ = ["MODULES", "Diagnostic", "Inputs", "Skip", "Threshold", "catalogue", "get"]
