"""On which prompts drafters differ, and on how many of them a lead hangs."""

from __future__ import annotations

from typing import Any

from dflash_diag.compare_words import elided, first_pairs
from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate

MOST = 2
"""Drafters that the headline speaks of."""
FEW = 0.1
"""Share of the prompts: a lead that is gone without so few hangs on them."""


def judge(result: Result) -> Judgement:
    """WARN where a lead that is sure hangs on a tenth of the prompts or fewer."""
    sure = [one for one in result.params["leads"] if one["better"]]
    if not sure:
        return Judgement(Verdict.PASS, "no lead is sure, so none hangs on anything")
    hangs = [one for one in sure if one["n_hangs"] and one["n_hangs"] <= FEW * one["n_prompts"]]
    if hangs:
        said = "; ".join(f"that of {one['better']} on {one['n_hangs']}" for one in hangs)
        return Judgement(Verdict.WARN, f"a sure lead hangs on few prompts: {said}")
    return Judgement(Verdict.PASS, "no sure lead hangs on a tenth of the prompts or fewer")


@diagnostic(
    id="compare.prompts",
    question="On which prompts do they differ, and does a lead hang on a few of them?",
    page="08_compare",
    judge=judge,
)
def compare_prompts(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Walked tau of each prompt on both sides, from the greatest gain to the greatest loss.

    Returns
    -------
    tuple
        Frame columns: a, b, id, tau_a, tau_b, delta [tokens a round].
    """
    import pandas as pd

    found = inputs.compared()
    frame = pd.DataFrame(
        [{"a": one["a"], "b": one["b"], **row} for one in found["prompts"] for row in one["rows"]]
    )
    leads = [
        {
            key: one[key] for key in ("a", "b", "n_better", "n_worse", "n_hangs")
        } | {"better": pair["better"], "n_prompts": len(one["rows"])}
        for one, pair in zip(found["prompts"], first_pairs(found), strict=True)
    ]  # fmt: skip
    estimates = {
        f"prompts won against {one['b']}": Estimate(
            one["n_better"] / one["n_prompts"], n=one["n_prompts"], unit="share"
        )
        for one in leads
    }
    params = {
        "n_prompts": leads[0]["n_prompts"],
        "leads": leads,
        "finding": f"{elided(leads[0]['a'])} gets more than {elided(leads[0]['b'])} on "
        f"{leads[0]['n_better']} of {leads[0]['n_prompts']} prompts",
        "drafters": found["drafters"],
    }
    said = " ".join(_said(one) for one in leads[:MOST])
    return said, frame, {"estimates": estimates, "params": params}


def _said(one: dict[str, Any]) -> str:
    n, hangs = one["n_prompts"], one["n_hangs"]
    counts = (
        f"{one['a']} gets more than {one['b']} on {one['n_better']} of {n} prompts and less on "
        f"{one['n_worse']}"
    )
    if not one["n_better"] + one["n_worse"]:
        return f"{one['a']} and {one['b']} get the same on all {n} prompts."
    if hangs is None:
        return f"{counts}; whichever prompts are left out, the lead stays."
    if not hangs:
        return f"{counts}; neither leads."
    which = "one that counts" if hangs == 1 else f"{hangs} that count"
    return f"{counts}; without the {which} most the lead is gone."
