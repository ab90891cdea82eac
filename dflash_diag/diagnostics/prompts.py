"""Which prompts are easy and which are hard, and whether there are enough of them."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import FEW_PROMPTS


def judge(result: Result) -> Judgement:
    """Enough prompts for honest intervals, and every prompt scored."""
    n, unscored = result.params["n_prompts"], len(result.params["unscored"])
    if n < FEW_PROMPTS:
        why = f"{n} prompts are scored; below {FEW_PROMPTS}, intervals run short"
        return Judgement(Verdict.WARN, why)
    if unscored:
        return Judgement(Verdict.WARN, f"{unscored} prompts have no complete block")
    return Judgement(Verdict.PASS, f"{n} prompts, all scored; {FEW_PROMPTS} are wanted")


@diagnostic(
    id="acceptance.prompts",
    question="How much does acceptance differ from prompt to prompt?",
    page="02_acceptance",
    judge=judge,
)
def prompts(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Walked tau and rounds of every prompt, bonus token included.

    Returns
    -------
    tuple
        Frame columns: id, role, drafter, tau_walked [tokens], rounds, longest [tokens].
    """
    import pandas as pd

    rows = [
        {
            "id": one["id"],
            "role": role,
            "drafter": inputs.name(role),
            "tau_walked": one["tau_walked"],
            "rounds": len(one["rounds"]),
            "longest": max(one["rounds"]),
        }
        for role in inputs.roles
        for one in inputs.metrics(role)["per_prompt"]
    ]
    frame = pd.DataFrame(rows)
    found = inputs.metrics(inputs.roles[0])
    ours = frame[frame["role"] == inputs.roles[0]].sort_values("tau_walked")
    low, high = ours.iloc[0], ours.iloc[-1]
    name, unscored = inputs.name(inputs.roles[0]), found["unscored"]
    said = (
        f"{name} ranges from {low['tau_walked']:.2f} tokens a round ({low['id']}) to "
        f"{high['tau_walked']:.2f} ({high['id']}) over {len(ours)} prompts."
    )
    return (
        said,
        frame,
        {
            "params": {
                "n_prompts": found["n_prompts"],
                "unscored": unscored,
                "finding": f"{name}: {low['tau_walked']:.2f} to {high['tau_walked']:.2f} "
                "tokens a round, by prompt",
            },
            "notes": [f"{one['id']} is not scored: {one['reason']}" for one in unscored],
        },
    )
