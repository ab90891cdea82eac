"""What other readings of the weights say about how they were trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.causes import entry
from dflash_diag.diagnostics.base import Skip
from dflash_diag.doctor.numbers import trained_on
from dflash_diag.errors import DiagError
from dflash_diag.findings import CAUSES_OF_READINGS, HOPELESS

if TYPE_CHECKING:
    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run

WRONG_TARGET = "checkpoint.wrong_target"


def readings(run: Run) -> list[Entry]:
    """The entries of `findings`; none of them is tested where the weights cannot be scored."""
    try:
        found: list[Entry] = list(run.alignment()["findings"])
    except (Skip, DiagError) as why:
        return untested(f"the weights cannot be scored: {why}")
    return [beside_training(run, one) if one["cause"] == WRONG_TARGET else one for one in found]


def beside_training(run: Run, one: Entry) -> Entry:
    """A drafter that is accepted on text like that of training belongs to this target."""
    from dflash_diag.stats import estimates

    if one["status"] == "excluded" or (trained := trained_on(run)) is None:
        return one
    sums = trained[1].sums()["tau_walked"]
    (tau,) = estimates({0: sums}, seed=run.seed, draws=run.draws).values()
    text = f"{one['evidence']} On {trained[0]} it gets {tau} ({tau.n} texts)."
    if tau.lo is None or tau.lo < HOPELESS:
        return {**one, "evidence": text}
    return entry(WRONG_TARGET, "excluded", f"{text} So it belongs to this target.")


def untested(why: str) -> list[Entry]:
    """No reading was tried."""
    return [entry(cause, "not_tested", why) for cause in CAUSES_OF_READINGS]
