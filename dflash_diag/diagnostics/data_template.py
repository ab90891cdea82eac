"""What the chat template is worth to the drafter."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic, interval, signed
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate, few_prompts_note
from dflash_diag.strata import excludes_zero


def judge(result: Result) -> Judgement:
    """A rendering that costs something explains a number, and is no fault of the drafter."""
    if result.params["n_prompts"] < 2:
        return Judgement(Verdict.INCONCLUSIVE, "a single prompt gives no interval")
    return Judgement(
        Verdict.PASS, "the price of a rendering explains numbers and is no fault of the drafter"
    )


@diagnostic(
    id="data.template",
    question="What does it cost to leave the chat template off, or to change the system prompt?",
    page="06_train_vs_eval",
    judge=judge,
)
def template(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Walked tau under every rendering of the same chat prompts, paired by prompt.

    Returns
    -------
    tuple
        Frame columns: rendering, name, n_prompts, tau, tau_lo, tau_hi, delta, delta_lo, delta_hi
        [tokens a round], p, certain; the first row is the prompts as they were given.
    """
    import pandas as pd

    found = inputs.renderings()
    rows = found["rows"]
    estimates = [
        {
            key: Estimate(**row[key], n=row["n_prompts"], unit="tokens")
            for key in ("tau", "tau_usual", "delta")
        }
        for row in rows
    ]
    usual = estimates[0]["tau_usual"]
    name = f"template of {found['target']}"
    if found["template"]:
        name += f" ({found['template']['dialect']})"
    frame = pd.DataFrame(
        [
            {"rendering": "given", "name": "as given", "n_prompts": usual.n, "certain": False}
            | _ends("tau", usual),
            *(
                {
                    "rendering": row["rendering"],
                    "name": row["name"],
                    "n_prompts": row["n_prompts"],
                    **_ends("tau", one["tau"]),
                    **_ends("delta", one["delta"]),
                    "p": row["p"],
                    "certain": excludes_zero(one["delta"]),
                }
                for row, one in zip(rows, estimates, strict=True)
            ),
        ]
    )
    prices = "; ".join(
        f"{row['name']} {signed(one['delta'])}" for row, one in zip(rows, estimates, strict=True)
    )
    n = int(usual.n or 0)
    few = few_prompts_note(n)
    who = inputs.name(inputs.roles[0])
    return (
        f"{who} gets {interval(usual)} tokens a round with the {name}; {n} pairs: {prices}.",
        frame,
        {
            "estimates": {
                "tau": usual,
                **{
                    f"delta {row['rendering']}": one["delta"]
                    for row, one in zip(rows, estimates, strict=True)
                },
            },
            "params": {
                "n_prompts": n,
                "template": name,
                "finding": f"What the {name} is worth",
                "prices": [[row["name"], row["delta"]] for row in rows],
            },
            "notes": [
                *(f"{name} could not be tried: {why}." for name, why in found["refused"].items()),
                *([few] if few else []),
            ],
        },
    )


def _ends(name: str, one: Estimate) -> dict[str, float | None]:
    return {name: one.value, f"{name}_lo": one.lo, f"{name}_hi": one.hi}
