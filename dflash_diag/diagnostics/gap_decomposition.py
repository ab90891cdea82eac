"""From what training printed to what serving gets, factor by factor."""

from __future__ import annotations

from typing import Any

from dflash_diag.causes import HARMLESS
from dflash_diag.diagnostics.base import Inputs, diagnostic, estimate
from dflash_diag.gap import READING, UNEXPLAINED, WITHOUT_TEXTS
from dflash_diag.gap_words import headline, sentence, signed, title
from dflash_diag.results import Judgement, Result, Verdict

COLUMNS = ["part", "factors", "before", "change", "lo", "hi", "lo_order", "hi_order", "after"]
COLUMNS += ["sentence"]


def judge(result: Result) -> Judgement:
    """A fault is what serving cannot show the drafter; what is not explained has to be found."""
    parts = result.estimates
    for name, one in parts.items():
        if READING in name and one.hi is not None and one.hi < -HARMLESS:
            why = f"being served otherwise than it was trained costs {signed(one.value or 0.0)}"
            return Judgement(Verdict.FAIL, why)
    if WITHOUT_TEXTS in parts:
        why = "without training texts nothing says what they do (--training-sequences)"
        return Judgement(Verdict.INCONCLUSIVE, why)
    for name, one in parts.items():
        if name == UNEXPLAINED and one.lo is not None and one.hi is not None:
            if one.hi < -HARMLESS or one.lo > HARMLESS:
                return Judgement(Verdict.WARN, f"{signed(one.value or 0.0)} is not explained")
            if one.lo < -0.5 or one.hi > 0.5:
                why = f"the unexplained part is known to {signed(one.lo)} to {signed(one.hi)} only"
                return Judgement(Verdict.INCONCLUSIVE, f"{why}; more training texts narrow it")
    return Judgement(Verdict.PASS, "data, anchors and counting explain the gap")


@diagnostic(
    id="gap.decomposition",
    question="Where do the tokens go between the training number and serving?",
    page="06_train_vs_eval",
    judge=judge,
)
def decomposition(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Shapley's parts of the gap over all feasible orders of changing factors.

    Returns
    -------
    tuple
        Frame columns: part, factors, before and after (the number as the waterfall has it), change
        with lo and hi, lo_order and hi_order (smallest and largest part over the orders), sentence
        [tokens]; parts that could not be measured come last, without numbers.
    """
    import pandas as pd

    gap = inputs.gap()
    start = gap["replayed"]["value"] if gap["claimed"] is None else gap["claimed"]
    rows, at = [], start
    for bar in gap["bars"]:
        numbers = {k: bar[k] for k in ("lo", "hi", "lo_order", "hi_order")}
        rows.append(
            {
                "part": title(bar["factors"]),
                "factors": " and ".join(bar["factors"]),
                "before": at,
                "change": bar["value"],
                **numbers,
                "after": at + bar["value"],
                "sentence": sentence(bar, gap),
            }
        )
        at += bar["value"]
    rows += [
        {"part": one["factor"], "factors": one["factor"], "sentence": one["reason"]}
        for one in gap["not_measured"]
    ]
    n = min(gap["sizes"].values())
    estimates = {" and ".join(bar["factors"]): estimate(bar, n, "tokens") for bar in gap["bars"]}
    served, n = gap["served"], gap["sizes"]["your prompts"]
    estimates["tau walked"] = estimate(served, n, "tokens")
    said = headline(gap)
    populations = ", ".join(f"{n} ({name})" for name, n in gap["sizes"].items())
    how = (
        f"Parts are means over {gap['n_orders']} orders of changing one factor after another. "
        f"Resampled, each on its own: {populations}."
    )
    return (
        said,
        pd.DataFrame(rows, columns=COLUMNS),
        {
            "estimates": estimates,
            "params": {
                "start": start,
                "end": served["value"],
                "claimed": gap["claimed"] is not None,
                "definition": gap["definition"],
                "step": gap["step"],
                "n_orders": gap["n_orders"],
                "n_prompts": n,
                "finding": said.partition(". ")[0].rstrip("."),
            },
            "notes": [how],
        },
    )
