"""What other readings of the weights say about how they were trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.causes import entry
from dflash_diag.diagnostics.base import Skip
from dflash_diag.errors import DiagError
from dflash_diag.findings import CAUSES_OF_READINGS

if TYPE_CHECKING:
    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run


def readings(run: Run) -> list[Entry]:
    """The entries of `findings`; none of them is tested where the weights cannot be scored."""
    try:
        found: list[Entry] = list(run.alignment()["findings"])
    except (Skip, DiagError) as why:
        return untested(f"the weights cannot be scored: {why}")
    return found


def untested(why: str) -> list[Entry]:
    """No reading was tried."""
    return [entry(cause, "not_tested", why) for cause in CAUSES_OF_READINGS]
