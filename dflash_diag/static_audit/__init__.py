"""What can be said about a checkpoint without scoring it.

Each check looks at files, at the reading that was resolved from them, and at what is known of the
target, and returns what it found. A *finding* is something that costs acceptance in some stack, or
breaks the reading outright; a *note* is worth knowing and no fault. Where a check lacks what it
needs it says so: nothing is passed unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dflash_diag.static_audit.ablation import Sample, captured_sample
from dflash_diag.static_audit.layers import check_layers
from dflash_diag.static_audit.material import Checked, Material, StaticFinding, TokenizerFacts
from dflash_diag.static_audit.rope import check_rope
from dflash_diag.static_audit.settings import (
    beside,
    check_block,
    check_configuration,
    check_files,
    check_length,
    check_target,
)
from dflash_diag.static_audit.tensors import (
    check_effect,
    check_loaded,
    check_norms,
    check_tensors,
)
from dflash_diag.static_audit.tokens import check_mask_token, check_tables, check_vocabulary

CHECKS: tuple[Callable[[Material], Checked], ...] = (
    check_target,
    check_tensors,
    check_loaded,
    check_effect,
    check_norms,
    check_configuration,
    check_rope,
    check_layers,
    check_mask_token,
    check_vocabulary,
    check_tables,
    check_length,
    check_block,
    check_files,
)
"""In the order in which a reader wants to know."""


def audit_static(material: Material) -> list[Checked]:
    """Every check on what is at hand."""
    return [check(material) for check in CHECKS]


def findings(checked: Sequence[Checked]) -> list[StaticFinding]:
    """What was found, notes left out, what breaks the reading first."""
    found = [one for check in checked for one in check.findings if one.severity != "note"]
    return sorted(found, key=lambda one: one.severity != "fail")


__all__ = [
    "CHECKS",
    "Checked",
    "Material",
    "Sample",
    "StaticFinding",
    "TokenizerFacts",
    "audit_static",
    "beside",
    "captured_sample",
    "findings",
]
