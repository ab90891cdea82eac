"""Drafter against reference, prompt by prompt."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import (
    DRAFTER,
    REFERENCE,
    Inputs,
    Skip,
    Threshold,
    diagnostic,
    signed,
)
from dflash_diag.stats import Estimate, few_prompts_note

NOT_WORSE = Threshold(
    estimate="delta_tau",
    at_least=-0.05,
    what="drafter less reference, in tau while decoding",
    source="a difference below 0.05 tokens a round is taken as none",
)


@diagnostic(
    id="acceptance.comparison",
    question="Is the drafter as good as the reference on the same prompts?",
    page="02_acceptance",
    thresholds=[NOT_WORSE],
)
def comparison(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Paired difference of walked tau: pooled, mean over prompts, and a sign-flip test.

    Returns
    -------
    tuple
        Frame columns: id, drafter, reference, delta [tokens per round].
    """
    if REFERENCE not in inputs.roles:
        raise Skip("No reference drafter was given (--reference), so nothing can be compared.")
    import pandas as pd

    from dflash_diag import metrics, stats

    pairs = metrics.paired(inputs.scores(DRAFTER), inputs.scores(REFERENCE))
    ours, theirs = pairs["tau_walked_micro"]
    found = stats.differences(
        {key: pairs[f"tau_walked_{key}"] for key in ("micro", "macro")}
        | {"uniform": pairs["tau_uniform_micro"]},
        seed=inputs.seed,
        draws=inputs.draws,
    )
    ids = [
        one
        for one in metrics.scored_prompts(inputs.scores(DRAFTER))
        if one in set(metrics.scored_prompts(inputs.scores(REFERENCE)))
    ]
    frame = pd.DataFrame(
        {"id": ids, "drafter": ours.per_prompt(), "reference": theirs.per_prompt()}
    )
    frame["delta"] = frame["drafter"] - frame["reference"]
    p = stats.sign_flip(frame["delta"], seed=inputs.seed, draws=inputs.draws)
    delta, n = found["micro"], len(frame)
    name, other = inputs.name(DRAFTER), inputs.name(REFERENCE)
    worse = int((frame["delta"] < 0).sum())
    few = few_prompts_note(n)
    said = (
        f"{name} less {other}: {signed(delta)} tokens a round, paired over {n} prompts "
        f"(sign-flip {p_words(p)})."
    )
    return (
        said,
        frame,
        {
            "estimates": {
                "delta_tau": delta,
                "delta_tau_macro": found["macro"],
                "delta_tau_uniform": found["uniform"],
                "sign_flip_p": Estimate(p, n=n),
            },
            "params": {
                "n_prompts": n,
                "drafters": [name, other],
                "finding": f"{name} is worse than {other} on {worse} of {n} prompts",
            },
            "notes": [note for note in (_power_note(n), few) if note],
        },
    )


def p_words(p: float) -> str:
    """A p-value in words."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def _power_note(n: int) -> str | None:
    from dflash_diag.stats import smallest_p

    least = smallest_p(n)
    return None if least < 0.05 else f"With {n} prompts no p-value below {least:.2g} can occur."
