"""What a draft tree would add, and how near the right token is where the top choice is wrong."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Threshold, diagnostic, estimate
from dflash_diag.results import Judgement, Result, Verdict

BUDGET = 16
GAIN = Threshold(
    estimate="tree_gain",
    at_least=0.0,
    what=f"what a tree of {BUDGET} nodes adds to the chain",
    source=(
        "published DDTree results at 16 nodes add 0.6 to 1.1 tokens to DFlash on average; a tree "
        "that adds nothing says that probabilities carry no information beyond the top choice"
    ),
)

COST = (
    "Drafters are trained for the chain, and an engine that runs trees pays for every node that it "
    "verifies: more tokens a round need not mean more tokens a second."
)


def judge(result: Result) -> Judgement:
    """A tree that loses to the chain is worth a warning, not a failure: the chain still works."""
    verdict, reason = GAIN.judge(result)
    return Judgement(Verdict.WARN if verdict is Verdict.FAIL else verdict, reason)


@diagnostic(
    id="acceptance.trees",
    question="Would a draft tree accept more?",
    page="02_acceptance",
    judge=judge,
    thresholds=[GAIN],
)
def trees(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """ddtree_tau@n (bonus included) and topk_oracle@k (bonus excluded).

    Returns
    -------
    tuple
        Frame columns: role, drafter, population, kind, n (nodes or k), value, lo, hi [tokens].
    """
    import pandas as pd

    from dflash_diag import metrics, stats

    rows, estimates = [], {}
    for role in inputs.roles:
        found, name = inputs.metrics(role), inputs.name(role)
        for kind in ("ddtree_tau", "topk_oracle"):
            for population, suffix in (("uniform", ""), ("walked", "_walked")):
                for n, numbers in found[f"{kind}{suffix}"].items():
                    rows.append(
                        {
                            "role": role,
                            "drafter": name,
                            "population": population,
                            "kind": kind,
                            "n": int(n),
                            **{key: numbers[key] for key in ("value", "lo", "hi")},
                        }
                    )
        chain = found["tau"]["uniform_micro"]
        estimates[f"{role}_chain"] = estimate(chain, found["n_prompts"], "tokens")
    frame = pd.DataFrame(rows).astype({"value": float, "lo": float, "hi": float})
    role = inputs.roles[0]
    sums = metrics.ratios(inputs.scores(role))
    pair = (sums[f"ddtree_tau@{BUDGET}"], sums["tau_uniform_micro"])
    gain = stats.differences({"gain": pair}, seed=inputs.seed, draws=inputs.draws)["gain"]
    found, name = inputs.metrics(role), inputs.name(role)
    at = found["ddtree_tau"][str(BUDGET)]["value"]
    chain = found["tau"]["uniform_micro"]["value"]
    said = (
        f"{name}: a tree of {BUDGET} nodes gets {at:.2f} tokens a round where the chain of "
        f"{found['n_proposed']} gets {chain:.2f}, both over all anchors."
    )
    return (
        said,
        frame,
        {
            "estimates": {"tree_gain": gain, **estimates},
            "params": {
                "n_prompts": found["n_prompts"],
                "budget": BUDGET,
                "finding": f"{name}: {at:.2f} tokens with a tree of {BUDGET}, "
                f"{chain:.2f} with the chain",
            },
            "notes": [COST],
        },
    )
