"""The drafter's many acceptance numbers side by side, each under the names that stacks print."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import DRAFTER, Inputs, Skip, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

HEADLINE = (
    "streak walked",
    "tau walked",
    "tau walked macro",
    "streak uniform",
    "eal_product uniform",
    "topk_oracle@8 + 1 uniform",
)
"""Definitions whose values the headline spans: each is somewhere called the accepted length."""
NO_LABEL_LEFT_OUT = (
    "Every slot has a label here, so that the definitions called passing equal those that are not."
)


def judge(result: Result) -> Judgement:
    """A dictionary is not good or bad."""
    known = result.params["n_definitions"]
    return Judgement(Verdict.PASS, f"{known} definitions were computed, none is judged")


@diagnostic(
    id="claims.dictionary",
    question="How many acceptance lengths has this one drafter, and what does each stack call its?",
    page="06_train_vs_eval",
    judge=judge,
)
def dictionary(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every definition of `dflash_diag.definitions` on the drafter's scores.

    Returns
    -------
    tuple
        Frame columns: definition, kind, number (slot, candidates or nodes), bonus, population,
        average, value, lo, hi, unit (tokens or share), stacks (who prints it, and as what), means.
    """
    if DRAFTER not in inputs.roles:
        raise Skip("No drafter was given (--drafter), so no number can be computed.")
    import pandas as pd

    from dflash_diag import definitions
    from dflash_diag.stats import few_prompts_note

    scores, name = inputs.scores(DRAFTER), inputs.name(DRAFTER)
    found = definitions.measure(scores, seed=inputs.seed, draws=inputs.draws)
    known = definitions.definitions(scores.labels.shape[1])
    frame = pd.DataFrame(
        [
            {
                "definition": one.name,
                "kind": one.kind,
                "number": one.number,
                "bonus": one.bonus,
                "population": one.population,
                "average": one.average,
                **found[one.name].to_json(),
                "unit": one.unit,
                "stacks": "; ".join(f"{who}: {what}" for who, what in one.stacks.items()),
                "means": one.means,
            }
            for one in known.values()
            if one.name in found
        ]
    ).astype({"number": "Int64", "value": float, "lo": float, "hi": float})
    shown = {key: found[key] for key in found if key in definitions.DEFINITIONS}
    values = {key: found[key].value for key in HEADLINE if key in found}
    known_values = {key: value for key, value in values.items() if value is not None}
    low = min(known_values, key=lambda key: known_values[key])
    high = max(known_values, key=lambda key: known_values[key])
    ends = f"{known_values[low]:.2f} ({low}) to {known_values[high]:.2f} ({high})"
    n = len({*scores.prompt.tolist()})
    few = few_prompts_note(n)
    said = f"On the same {n} prompts {name} has accepted lengths from {ends}, by what is counted."
    return (
        said,
        frame,
        {
            "estimates": shown,
            "params": {
                "n_prompts": n,
                "n_definitions": len(found),
                "finding": f"{name}: accepted lengths from {known_values[low]:.2f} to "
                f"{known_values[high]:.2f} on one text",
            },
            "notes": [NO_LABEL_LEFT_OUT, *([few] if few else [])],
        },
    )
