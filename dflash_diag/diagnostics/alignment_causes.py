"""Which convention the weights were trained for, and what the declared one costs."""

from __future__ import annotations

from typing import Any

from dflash_diag.causes import CAUSES, HARMLESS
from dflash_diag.diagnostics.base import Inputs, diagnostic, signed
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate, few_prompts_note

STATUS = {
    "found": "found",
    "excluded": "excluded",
    "not_identifiable": "not identifiable",
    "not_tested": "not tested",
}


def judge(result: Result) -> Judgement:
    """A cause that is found fails, unless it certainly costs next to nothing."""
    found = result.params["found"]
    if not found:
        n = result.params["n_readings"]
        return Judgement(Verdict.PASS, f"none of {n} other readings is better")
    first, readings = result.estimates["delta"], result.params["n_better"]
    if readings and first.hi is not None and first.hi < HARMLESS:
        return Judgement(Verdict.WARN, f"{found[0]} is found, and costs next to nothing")
    return Judgement(Verdict.FAIL, f"found: {', '.join(found)}")


@diagnostic(
    id="alignment.causes",
    question="Were these weights trained for the convention that they are read with?",
    page="04_position_alignment",
    judge=judge,
)
def causes(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every cause that other readings can speak about, with what decides it.

    Returns
    -------
    tuple
        Frame columns: cause, status, kind, reading, tau, delta, lo, hi [tokens a round], evidence,
        remedy.
    """
    import pandas as pd

    measured = inputs.alignment()
    entries = measured["findings"]
    frame = pd.DataFrame([_row(entry) for entry in entries])
    found = [entry for entry in entries if entry["status"] == "found"]
    n_readings = sum(len(made["tried"]) for made in measured["rounds"][:1])
    declared = measured["rounds"][0]["tau"]
    estimates = {"tau_declared": _estimate(declared, measured)}
    if found:
        estimates |= {
            "tau_own_reading": _estimate(found[0]["tau_own_reading"], measured),
            "delta": _estimate(found[0]["delta"], measured),
        }
    name = inputs.name(inputs.roles[0])
    return (
        _said(name, declared, found, estimates),
        frame,
        {
            "estimates": estimates,
            "params": {
                "found": [entry["cause"] for entry in found],
                "remedies": [entry["remedy"] for entry in found],
                "n_better": sum(bool(entry["settings"]) for entry in found),
                "n_readings": n_readings,
                "n_prompts": measured["n_prompts"],
                "finding": _finding(found),
            },
            "notes": [
                note
                for note in (
                    *(f"{entry['cause']}: {entry['remedy']}" for entry in found),
                    few_prompts_note(measured["n_prompts"]),
                )
                if note
            ],
        },
    )


def _said(
    name: str, declared: dict[str, Any], found: list[dict[str, Any]], estimates: dict[str, Estimate]
) -> str:
    if not found:
        return (
            f"{name} drafts best as it is read: no other reading of its weights is accepted more "
            f"than {declared['value']:.2f} tokens a round."
        )

    first = found[0]
    own, delta = first["tau_own_reading"]["value"], estimates["delta"]
    means = CAUSES[first["cause"]].means
    text = f"{name} is accepted {declared['value']:.2f} tokens a round; {means}"
    if first["recoverable"]:
        text += f": read that way it gets {own:.2f} ({signed(delta)})"
    elif delta.value:
        text += f": read that way it would get {own:.2f}, which serving cannot give it"
    others = [entry["cause"] for entry in found[1:]]
    return text + (f"; also {', '.join(others)}." if others else ".")


def _finding(found: list[dict[str, Any]]) -> str:
    if not found:
        return "No other reading of the weights is better than the declared one"
    return f"The weights fit another reading: {', '.join(entry['cause'] for entry in found)}"


def _row(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "cause": entry["cause"],
        "status": STATUS[entry["status"]],
        "kind": entry["kind"].replace("_", " ") if entry["status"] == "found" else "",
        "reading": ", ".join(entry["settings"]),
        "tau": entry["tau_own_reading"]["value"],
        "delta": entry["delta"]["value"],
        "lo": entry["delta"]["lo"],
        "hi": entry["delta"]["hi"],
        "evidence": entry["evidence"],
        "remedy": entry["remedy"],
    }


def _estimate(numbers: dict[str, Any], measured: Any) -> Estimate:
    return Estimate(
        numbers["value"], numbers["lo"], numbers["hi"], measured["n_prompts"], "tokens a round"
    )
