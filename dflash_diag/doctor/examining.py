"""From a run to its ranked causes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_diag.causes import HARMLESS
from dflash_diag.diagnostics.base import DRAFTER
from dflash_diag.doctor import backends, files, numbers, training, trust, weights
from dflash_diag.doctor.merging import FIRST, Entry, is_fault, merged, value_of
from dflash_diag.doctor.sentences import said, to_do
from dflash_diag.errors import DiagError
from dflash_diag.findings import HOPELESS
from dflash_diag.results import Verdict

if TYPE_CHECKING:
    from dflash_diag.runs import Run

SCHEMA = "dflash_diag.doctor/1"


@dataclass(frozen=True, eq=False)
class Examination:
    """What the doctor has to say of one drafter."""

    name: str
    verdict: Verdict
    said: str
    """What the drafter gets, and why."""
    to_do: str
    """What to do about it; empty where no fault was found."""
    tau_declared: Mapping[str, Any]
    """Walked tau as the drafter is read; ``{"value", "lo", "hi"}``."""
    tau_best: Mapping[str, Any]
    """The best tau over readings that serving can follow."""
    claims: Sequence[Mapping[str, Any]]
    findings: Sequence[Entry]
    """Every cause of the catalogue once, ranked."""
    cautions: Sequence[str] = ()
    """What to know before believing any of it."""

    @property
    def found(self) -> list[Entry]:
        """Faults that were found, worst first."""
        return [one for one in self.findings if is_fault(one)]

    @property
    def headline(self) -> str:
        """One sentence that a person can act on."""
        return " ".join(filter(None, (self.said, self.to_do)))

    def to_json(self) -> dict[str, Any]:
        """What ``doctor --json`` writes."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict.name,
            "headline": self.headline,
            "said": self.said,
            "to_do": self.to_do,
            "tau_declared": dict(self.tau_declared),
            "tau_best": dict(self.tau_best),
            "claims": [dict(one) for one in self.claims],
            "findings": [_plain(one) for one in self.findings],
            "cautions": list(self.cautions),
        }


def _plain(one: Entry) -> Entry:
    """Unknown effects are null."""
    unknown = value_of(one["delta"]) is None
    return {**one, "delta": None if unknown else one["delta"]}


def examine(run: Run) -> Examination:
    """Ask everything that can be asked of a run's drafter.

    Raises
    ------
    BadInput
        No drafter, or something given cannot be used.
    """
    trusted = [*trust.decoding(run), *trust.states(run), *trust.padding(run)]
    sound, cautions = run, []
    broken = next((one for one in trusted if one["cause"] == "hidden.rows"), None)
    if broken is not None and broken["status"] == "found":
        fresh = trust.on_fresh_states(run)
        if fresh is None:
            why = "the captured states are broken, and no target is at hand to compute others"
            left = [
                training.audited(run),
                weights.untested(why),
                files.static(run),
                backends.compared(run),
            ]
            return _concluded(run, trusted, left, [f"{why[0].upper()}{why[1:]}."])
        trusted[trusted.index(broken)] = trust.with_effect(broken, run, fresh)
        cautions = ["All but the captured states was looked at on states computed anew."]
        sound = fresh
    return _concluded(run, trusted, [*_of_weights(sound), backends.compared(sound)], cautions)


def _of_weights(run: Run) -> list[Sequence[Entry]]:
    """What readings, files and the training step say, each heard before the next."""
    step = training.audited(run)
    readings = training.decided(weights.readings(run), step)
    return [readings, step, files.static(run)]


def _concluded(
    run: Run,
    trusted: Sequence[Entry],
    looked_at: Sequence[Sequence[Entry]],
    cautions: Sequence[str],
) -> Examination:
    findings = merged(trusted, *looked_at, numbers.explained(run))
    declared = _declared(run)
    best = max(
        [declared, *(one["tau_own_reading"] for one in findings if _is_gain(one))],
        key=lambda tau: value_of(tau) or 0.0,
    )
    suspicious = files.suspicious(run, findings)
    verdict = _verdict(findings, declared)
    if suspicious and verdict is Verdict.PASS:
        verdict = Verdict.WARN
    name = run.name(DRAFTER)
    return Examination(
        name=name,
        verdict=verdict,
        said=said(name, findings, declared),
        to_do=to_do(findings),
        tau_declared=declared,
        tau_best=best,
        claims=numbers.claims(run),
        findings=findings,
        cautions=[*cautions, *suspicious, *numbers.contradictions(run)],
    )


def _declared(run: Run) -> Mapping[str, Any]:
    """Walked tau of the drafter as it is read; unknown where it cannot be scored."""
    try:
        found: Mapping[str, Any] = run.metrics(DRAFTER)["tau"]["walked_micro"]
    except DiagError:
        return {"value": None, "lo": None, "hi": None}
    return found


def _is_gain(one: Entry) -> bool:
    return one["status"] == "found" and one["recoverable"] is True


def _verdict(findings: Sequence[Entry], declared: Mapping[str, Any]) -> Verdict:
    """FAIL for a cause that costs something or breaks trust, WARN for one that may not."""
    faults = [one for one in findings if is_fault(one)]
    if any(_costs(one) for one in faults):
        return Verdict.FAIL
    if faults:
        return Verdict.WARN
    # A drafter that is as good as none is not sound because its cause was not found.
    hopeless = declared["hi"] is None or declared["hi"] < HOPELESS
    return Verdict.INCONCLUSIVE if hopeless else Verdict.PASS


def _costs(one: Entry) -> bool:
    """Whether a fault has an effect, or is damage whose effect nobody knows, or fakes the rest."""
    if one["cause"] in FIRST:
        return True
    delta = one["delta"]
    if value_of(delta) is None:
        return bool(one["kind"] == "damage")
    return delta["hi"] is None or bool(delta["hi"] >= HARMLESS)
