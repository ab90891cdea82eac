"""What the audit of a training step says about causes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_diag.causes import CAUSES, Status, entry
from dflash_diag.diagnostics.base import Skip

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run

ONLY_BY_STEP: dict[str, Status] = {
    "training.noise_on_target_logits": "not_identifiable",
    "training.loss_mismatch": "not_identifiable",
    "training.leak": "not_tested",
}
"""Causes that nothing but a training step can show, and what they are without one."""
WITHOUT = "Weights keep no sure trace of it; the training step decides (--step FILE.py:FUNC)."


def audited(run: Run) -> list[Entry]:
    """One entry for each cause that the audit speaks of; open ones where no step was given."""
    try:
        properties = run.audit().to_json()["properties"]
    except Skip:
        return [entry(cause, status, WITHOUT) for cause, status in ONLY_BY_STEP.items()]
    known = (one for one in properties if one["id"] in CAUSES and one["status"] != "measured")
    return [_entry(one) for one in known]


def _entry(one: Mapping[str, Any]) -> Entry:
    """A property as an entry: what a step does is a fault of training, whatever the files say."""
    fields: dict[str, Any] = {}
    if one["status"] == "found":
        fields = {"kind": "training_fault", "recoverable": False, "remedy": one["remedy"]}
    return entry(one["id"], one["status"], f"By the training step: {one['evidence']}", **fields)


def decided(measured: Sequence[Entry], by_step: Sequence[Entry]) -> list[Entry]:
    """Measured entries, with what only the step can tell: whose fault an ambiguous one is."""
    steps = {one["cause"]: one for one in by_step}
    return [_decided(one, steps.get(one["cause"])) for one in measured]


def _decided(one: Entry, step: Entry | None) -> Entry:
    if step is None or one["status"] != "found" or one["kind"] != "ambiguous":
        return one
    if step["status"] == "found":
        return {**one, "kind": "training_fault", "recoverable": False, "remedy": step["remedy"]}
    if step["status"] == "excluded":
        return {**one, "kind": "reading_fault", "recoverable": True}
    return one
