"""Whether the weights learned to look at blocks that a server never shows."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

CAUSE = "mask.cross_block_leak"


def judge(result: Result) -> Judgement:
    """The cause decides, by its interval; the curve shows it."""
    if result.params["found"]:
        return Judgement(Verdict.FAIL, "accuracy rises with the number of blocks in sight")
    return Judgement(Verdict.PASS, "other blocks in sight gain nothing")


@diagnostic(
    id="mask.density",
    question="Do these weights gain from blocks that only training shows?",
    page="05_attention_mask",
    judge=judge,
)
def density(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Slot accuracy by the number of anchors in one pass, blocks seeing one another.

    Returns
    -------
    tuple
        Frame columns: other_blocks (hidden, later, all), anchors, accuracy [share of slots],
        tau_uniform [tokens a round], n_prompts.
    """
    import pandas as pd

    measured = inputs.alignment()
    frame = pd.DataFrame(measured["density"])
    entry = next(e for e in measured["findings"] if e["cause"] == CAUSE)
    alone = frame.loc[frame["other_blocks"] == "hidden", "accuracy"].iloc[0]
    shown = frame[frame["other_blocks"] != "hidden"]
    best = shown.loc[shown["accuracy"].idxmax()]
    found = entry["status"] == "found"
    words = "rises" if found else "does not rise"
    said = (
        f"One block a pass: {100 * alone:.0f}\u00a0% of the slots are right. With other blocks in "
        f"sight accuracy {words}: {100 * best['accuracy']:.0f}\u00a0% at most."
    )
    return (
        said,
        frame,
        {
            "params": {
                "found": found,
                "n_prompts": int(frame["n_prompts"].max()),
                "finding": f"Slot accuracy {words} with the blocks in sight",
            },
            "notes": [entry["evidence"]],
        },
    )
