"""How many tokens a DFlash drafter really gets accepted, and why it is fewer than claimed.

The public names below are imported from their modules on first use, so that ``import dflash_diag``
costs next to nothing: no torch, no pandas, no matplotlib.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_diag.conventions import Convention
    from dflash_diag.errors import BadInput, DiagError
    from dflash_diag.prompts import Prompt, read_prompts

_HOME = {
    "BadInput": "errors",
    "Convention": "conventions",
    "DiagError": "errors",
    "Prompt": "prompts",
    "read_prompts": "prompts",
}

__all__ = ["BadInput", "Convention", "DiagError", "Prompt", "read_prompts"]


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
