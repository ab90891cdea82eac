"""How many tokens a DFlash drafter really gets accepted, and why it is fewer than claimed.

The public names below are imported from their modules on first use, so that ``import dflash_diag``
costs next to nothing: no torch, no pandas, no matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_diag.adapters import DraftSpec, TargetBits
    from dflash_diag.bundle import Capture
    from dflash_diag.capture import make_capture
    from dflash_diag.checkpoints import (
        Checkpoint,
        audit,
        load_drafter,
        read_checkpoint,
        resolve_convention,
    )
    from dflash_diag.conventions import Convention
    from dflash_diag.errors import BadInput, DiagError
    from dflash_diag.influence import Influence, probe
    from dflash_diag.metrics import score_json
    from dflash_diag.prompts import Prompt, read_prompts
    from dflash_diag.results import Result, Verdict
    from dflash_diag.scoring import Scores, score
    from dflash_diag.stats import Estimate

_HOME = {
    "BadInput": "errors",
    "Capture": "bundle",
    "Checkpoint": "checkpoints",
    "Convention": "conventions",
    "DiagError": "errors",
    "DraftSpec": "adapters",
    "Estimate": "stats",
    "Influence": "influence",
    "Prompt": "prompts",
    "Result": "results",
    "Scores": "scoring",
    "TargetBits": "adapters",
    "Verdict": "results",
    "audit": "checkpoints",
    "load_drafter": "checkpoints",
    "make_capture": "capture",
    "probe": "influence",
    "read_checkpoint": "checkpoints",
    "read_prompts": "prompts",
    "resolve_convention": "checkpoints",
    "score": "scoring",
    "score_json": "metrics",
}

__all__ = [
    "BadInput",
    "Capture",
    "Checkpoint",
    "Convention",
    "DiagError",
    "DraftSpec",
    "Estimate",
    "Influence",
    "Prompt",
    "Result",
    "Scores",
    "TargetBits",
    "Verdict",
    "audit",
    "load_drafter",
    "make_capture",
    "probe",
    "read_checkpoint",
    "read_prompts",
    "resolve_convention",
    "score",
    "score_json",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("dflash-diag")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
