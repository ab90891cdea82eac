"""How many tokens one pass of the target really yields, beside what a dashboard would show."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Threshold, diagnostic, estimate, interval
from dflash_diag.results import Judgement, Result
from dflash_diag.stats import few_prompts_note

UNIT = "tokens"
POPULATIONS = ("walked", "uniform")
AVERAGES = ("micro", "macro")

USEFUL = Threshold(
    estimate="tau_walked",
    at_least=2.0,
    what="tau while decoding",
    source=(
        "2 tokens a round halve the target's passes. Of 19 published DFlash-family curves all but "
        "one lie above (lowest usable 2.63, a checkpoint called weak 1.77)"
    ),
)


def judge(result: Result) -> Judgement:
    """The interval of walked tau against `USEFUL`."""
    return USEFUL.judge(result)


@diagnostic(
    id="acceptance.headline",
    question="How many tokens does decoding get from one pass of the target?",
    page="00_overview",
    judge=judge,
    thresholds=[USEFUL],
)
def headline(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Tau over walked and uniform anchors, pooled and per prompt, bonus token included.

    Returns
    -------
    tuple
        Frame columns: role, drafter, population, aggregation, tau, lo, hi [tokens], n_prompts.
    """
    import pandas as pd

    rows, estimates = [], {}
    for role in inputs.roles:
        found, name = inputs.metrics(role), inputs.name(role)
        n = found["n_prompts"]
        prefix = "" if role == inputs.roles[0] else f"{role}_"
        for population in POPULATIONS:
            for average in AVERAGES:
                numbers = found["tau"][f"{population}_{average}"]
                suffix = "" if average == "micro" else f"_{average}"
                estimates[f"{prefix}tau_{population}{suffix}"] = estimate(numbers, n, UNIT)
                rows.append(
                    {
                        "role": role,
                        "drafter": name,
                        "population": population,
                        "aggregation": average,
                        "tau": numbers["value"],
                        "lo": numbers["lo"],
                        "hi": numbers["hi"],
                        "n_prompts": n,
                    }
                )
            estimates[f"{prefix}streak_{population}"] = estimate(
                found["streak"][population], n, UNIT
            )
    found = inputs.metrics(inputs.roles[0])
    tau, everywhere = estimates["tau_walked"], estimates["tau_uniform"]
    name = inputs.name(inputs.roles[0])
    said = f"{name} gets {interval(tau)} tokens a round"
    finding = f"{name}: {_two(tau.value)} tokens a round while decoding"
    if len(inputs.roles) > 1:
        other, beside = inputs.name(inputs.roles[1]), estimates[f"{inputs.roles[1]}_tau_walked"]
        said += f"; {other} gets {interval(beside)} on the same prompts"
        finding += f", {other}: {_two(beside.value)}"
    notes = [_gap_note(tau.value, everywhere.value)]
    few = few_prompts_note(found["n_prompts"])
    return (
        f"{said}.",
        pd.DataFrame(rows),
        {
            "estimates": estimates,
            "params": {
                "n_prompts": found["n_prompts"],
                "n_rounds": found["n_rounds"],
                "n_anchors": found["n_anchors"],
                "bound": USEFUL.at_least,
                "finding": finding,
            },
            "notes": [note for note in (*notes, few) if note],
        },
    )


def _gap_note(walked: float | None, uniform: float | None) -> str | None:
    """What the choice of anchors alone does to the number."""
    if walked is None or uniform is None:
        return None
    times = uniform / walked
    said = f"Over all anchors the same blocks read {uniform:.2f} tokens, {times:.2f} times as much"
    if times < NO_GAP:
        return f"{said}: on this text the choice of anchors hardly matters."
    return (
        f"{said}: long easy stretches are counted at each of their tokens, while decoding jumps "
        "over them. Most training dashboards show that number; a server cannot reach it."
    )


NO_GAP = 1.1
"""Ratio of uniform to walked tau below which no gap is spoken of."""


def _two(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
