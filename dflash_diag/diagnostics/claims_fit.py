"""Numbers that somebody claimed: which definitions can have printed them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from dflash_diag import claims
from dflash_diag.claim_words import finding, headline
from dflash_diag.claims import Fit
from dflash_diag.diagnostics.base import DRAFTER, Inputs, Skip, diagnostic
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate

NOTHING = (
    "Nothing was claimed (--claim dds8=3.58, --training-log FILE), so there is no number to place."
)
HOW = (
    "A definition is excluded only where no blocks at all could have printed the line's numbers "
    "under it. Such bounds cannot tell anchors that were all counted from those that decoding "
    "visits, nor pooled from averaged numbers: a training line is taken to pool all anchors."
)
TRAINING, PROMPTS = "the trainer's texts", "your prompts"
OTHER_TEXT = (
    "Values measured on your prompts are on other text than what was claimed for: a hint, no proof."
)


def judge(result: Result) -> Judgement:
    """Claims that cannot be true are worth a warning; one reading each is what is wanted."""
    said = result.params
    if said["contradicting"] or said["unfit"]:
        names = ", ".join([*said["contradicting"], *said["unfit"]])
        return Judgement(Verdict.WARN, f"no reading makes true what is claimed: {names}")
    if said["ambiguous"]:
        names = ", ".join(said["ambiguous"])
        return Judgement(Verdict.INCONCLUSIVE, f"the numbers leave several readings of {names}")
    return Judgement(Verdict.PASS, "every claim has one reading")


@diagnostic(
    id="claims.fit",
    question="What can the claimed numbers have counted?",
    page="06_train_vs_eval",
    judge=judge,
)
def fit(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every claim against every definition that its name can mean.

    Returns
    -------
    tuple
        Frame columns: line, claim, claimed, definition, fits (bool), why (it does not), measured,
        lo, hi [tokens or share], within (whether the claim lies in the interval), text (on which it
        was measured).
    """
    lines = inputs.claimed()
    if not lines:
        raise Skip(NOTHING)
    import pandas as pd

    trained = _replayed(inputs)
    found = claims.judge(
        lines, n_proposed=_slots(inputs), training=trained, prompts=_measured(inputs)
    )
    frame = pd.DataFrame([row for one in found for row in _rows(one, trained)])
    frame = frame.astype({"measured": float, "lo": float, "hi": float})
    several = [one for one in found if len(one.fits) > 1]
    contradicting = [one for one in found if one.contradicts]
    unfit = [one for one in found if not one.fits and not one.contradicts]
    notes = [HOW, *dict.fromkeys(note for line in lines for note in line.notes)]
    if (frame["text"] == PROMPTS).any():
        notes.append(OTHER_TEXT)
    return (
        headline(found),
        frame,
        {
            "params": {
                "claims": [one.to_json() for one in found],
                "contradicting": [one.claim.name for one in contradicting],
                "unfit": [one.claim.name for one in unfit],
                "ambiguous": [one.claim.name for one in several],
                "finding": finding(found),
            },
            "notes": notes,
        },
    )


def _slots(inputs: Inputs) -> int | None:
    if DRAFTER not in inputs.roles:
        return None
    slots: int = inputs.scores(DRAFTER).labels.shape[1]
    return slots


def _measured(inputs: Inputs) -> Mapping[str, Estimate]:
    """What every claim could be, on the prompts at hand."""
    from dflash_diag import definitions

    if DRAFTER not in inputs.roles:
        return {}
    scores = inputs.scores(DRAFTER)
    return definitions.measure(scores, seed=inputs.seed, draws=inputs.draws)


def _replayed(inputs: Inputs) -> Mapping[str, Mapping[str, Estimate]]:
    """The same on the texts that were trained and validated on, where they are at hand."""
    try:
        splits = inputs.replay()["splits"]
    except Skip:
        return {}
    return {
        split: {
            name: Estimate(one["value"], one["lo"], one["hi"], found["n_texts"])
            for name, one in found["numbers"].items()
        }
        for split, found in splits.items()
    }


def _rows(one: Fit, splits: Container[str]) -> list[dict[str, Any]]:
    """One row for each definition that a claim's name can mean."""
    text = TRAINING if one.line.split in splits else PROMPTS
    hints = {hint.name: hint for hint in one.hints}
    why = {**dict.fromkeys(one.fits, ""), **dict(one.excluded)}
    if not why:
        why = {"": "no definition has such a value"}
    rows = []
    for name, reason in why.items():
        hint = hints.get(name)
        known = hint.estimate.to_json() if hint else {"value": None, "lo": None, "hi": None}
        rows.append(
            {
                "line": str(one.line),
                "claim": one.claim.name,
                "claimed": one.claim.value,
                "definition": name,
                "fits": name in one.fits,
                "why": reason,
                "measured": known["value"],
                "lo": known["lo"],
                "hi": known["hi"],
                "within": bool(hint and hint.within),
                "text": text if hint else "",
            }
        )
    return rows
