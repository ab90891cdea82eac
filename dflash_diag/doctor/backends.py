"""What another way of computing the target's states costs the drafter, or gains it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.causes import HARMLESS, Status, entry
from dflash_diag.diagnostics.base import NOTHING, Skip, signed
from dflash_diag.diagnostics.effect import delta_tau
from dflash_diag.stats import Estimate

if TYPE_CHECKING:
    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run

BACKEND, DTYPE = "hidden.backend", "hidden.dtype"
_OWN = ("cause", "kind", "recoverable", "remedy")
"""Fields of an entry that are the cause's own."""


def compared(run: Run) -> list[Entry]:
    """One entry each for the implementation and the precision of the target's states.

    Found is a side whose states certainly gain or cost more than `HARMLESS` tokens a round. Of two
    computations nobody knows which is that of training: it is the one that the weights do better
    on.
    """
    if not run.sides():
        return [entry(cause, "not_tested", NOTHING) for cause in (BACKEND, DTYPE)]
    entries: dict[str, Entry] = {}
    for name in run.sides():
        found = _side(run, name)
        for cause in _causes(run, name):
            one = {**found, **{key: entry(cause, found["status"], "")[key] for key in _OWN}}
            if cause not in entries or _order(one) < _order(entries[cause]):
                entries[cause] = one
    lacking = {BACKEND, DTYPE} - set(entries)
    why = "nothing that was compared differs in it alone or beside another"
    return [*entries.values(), *(entry(cause, "not_tested", why) for cause in sorted(lacking))]


def _order(one: Entry) -> tuple[int, float]:
    order = ("found", "not_identifiable", "excluded", "not_tested")
    return order.index(one["status"]), -abs(one["delta"]["value"] or 0.0)


def _causes(run: Run, name: str) -> list[str]:
    """In what the side was computed otherwise than the run's capture, as far as both say so."""
    own, other = run.states.variant(), run.states.variant(name)
    if own is None or other is None:
        return [BACKEND, DTYPE]
    causes = [BACKEND] if own.backend != other.backend else []
    causes += [DTYPE] if own.dtype != other.dtype else []
    return causes or [BACKEND]  # two machines, or files that do not say the truth


def _side(run: Run, name: str) -> Entry:
    """What the states of one side cost; the same for every cause that it may have."""
    try:
        change = delta_tau(run, name)  # from the side to the run's capture
    except Skip as why:
        return entry(BACKEND, "not_tested", f"{name}: {why}")
    if change.value is None or change.lo is None or change.hi is None:
        return entry(BACKEND, "not_tested", f"{name}: one prompt gives no interval")
    better = change.value >= 0
    delta = change if better else Estimate(-change.value, -change.hi, -change.lo, change.n)
    text = f"From the states of {name} to the run's own, tau changes by {signed(change)}."
    status = _status(change.lo, change.hi)
    if status == "found":
        which = "the run's" if better else "those"
        text += f" The weights fit {which} better."
    return entry(BACKEND, status, text, delta=delta.to_json())


def _status(lo: float, hi: float) -> Status:
    if lo > HARMLESS or hi < -HARMLESS:
        return "found"
    return "excluded" if lo >= -HARMLESS and hi <= HARMLESS else "not_identifiable"
