"""What a checkpoint's files say without being scored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.causes import Status, entry
from dflash_diag.diagnostics.base import DRAFTER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run

CERTAIN = frozenset(
    {
        "checkpoint.missing_or_unused_tensors",
        "checkpoint.config_contradiction",
        "layers.last_layer_in_fc",
    }
)
"""Causes that files alone establish; a warning about another one says how some stack would read."""


def static(run: Run) -> list[Entry]:
    """One entry for each cause that the static audit looked for."""
    entries: list[Entry] = []
    for check in run.static(DRAFTER):
        for one in check["findings"]:
            certain = one["severity"] == "fail" or one["cause"] in CERTAIN
            if one["severity"] != "note":
                status: Status = "found" if certain else "not_identifiable"
                entries.append(entry(one["cause"], status, one["text"]))
    named = {one["cause"] for one in entries}
    entries += [
        entry(cause, "excluded", "The files show nothing of it.") for cause in CERTAIN - named
    ]
    return entries


def suspicious(run: Run, findings: Sequence[Entry]) -> list[str]:
    """Warnings of the files about causes that nothing has decided, in words."""
    left = {one["cause"] for one in findings if one["status"] in ("not_identifiable", "not_tested")}
    return [
        f"The files are suspicious: {one['text']}"
        for check in run.static(DRAFTER)
        for one in check["findings"]
        if one["severity"] == "warn" and one["cause"] in left
    ]
