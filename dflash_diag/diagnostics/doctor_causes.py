"""What is wrong with this drafter, by everything that was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.alignment_causes import STATUS
from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate, few_prompts_note

if TYPE_CHECKING:
    from collections.abc import Mapping

UNIT = "tokens a round"


def judge(result: Result) -> Judgement:
    """The doctor has judged: by what the causes that were found cost."""
    return Judgement(Verdict[result.params["verdict"]], result.params["why"])


@diagnostic(
    id="doctor.causes",
    question="What is wrong with this drafter, and what is to be done?",
    page="00_overview",
    judge=judge,
)
def causes(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every cause once, ranked: those found worst first, then what stays open.

    Returns
    -------
    tuple
        Frame columns: cause, status, kind, tau (under its own reading), delta, lo, hi [tokens a
        round], evidence, remedy.
    """
    import pandas as pd

    found = inputs.doctor()
    entries = found["findings"]
    n = inputs.metrics(inputs.roles[0])["n_prompts"] if found["tau_declared"]["value"] else 0
    named = [one["cause"] for one in entries if one["status"] == "found"]
    estimates = {"tau_declared": _estimate(found["tau_declared"], n)}
    estimates["tau_best"] = _estimate(found["tau_best"], n)
    notes = [*found["cautions"], few_prompts_note(n) if n else None]
    return (
        found["headline"],
        pd.DataFrame([_row(one) for one in entries]),
        {
            "estimates": estimates,
            "params": {
                "verdict": found["verdict"],
                "why": f"found: {', '.join(named)}" if named else "no cause was found",
                "found": named,
                "said": found["said"],
                "to_do": found["to_do"],
                "n_prompts": n,
                "finding": f"Found: {', '.join(named)}" if named else "No cause was found",
            },
            "notes": [one for one in notes if one],
        },
    )


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    delta = one["delta"] or {"value": None, "lo": None, "hi": None}
    return {
        "cause": one["cause"],
        "status": STATUS[one["status"]],
        "kind": one["kind"].replace("_", " ") if one["status"] == "found" else "",
        "tau": one["tau_own_reading"]["value"],
        "delta": delta["value"],
        "lo": delta["lo"],
        "hi": delta["hi"],
        "evidence": one["evidence"],
        "remedy": one["remedy"],
    }


def _estimate(numbers: Mapping[str, Any], n: int) -> Estimate:
    return Estimate(numbers["value"], numbers["lo"], numbers["hi"], n, UNIT)
