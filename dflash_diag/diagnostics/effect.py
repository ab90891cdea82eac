"""What a difference of hidden states changes: choices of the target, drafts, accepted tokens."""

from __future__ import annotations

import math
from typing import Any

from dflash_diag.causes import HARMLESS
from dflash_diag.diagnostics.base import (
    NOTHING,
    Inputs,
    Skip,
    diagnostic,
    percent,
    relative,
    signed,
)
from dflash_diag.errors import BadInput
from dflash_diag.results import Judgement, Result, Verdict, worst
from dflash_diag.stats import Estimate

COLUMNS = ["side", "prompt", "position", "margin_a", "margin_b", "limit", "decisive"]
FEW = 0.02
"""Share of the target's choices that may flip by more than rounding: nothing is known to depend on
it, so that beyond it a person should look."""
ROUNDED = "the target's choices flip no more than by rounding"
NO_FLIPS = "the target's choices are unknown"
UNKNOWN = f"{NO_FLIPS}: not both captures hold them"


def judge(result: Result) -> Judgement:
    """The worst side decides; by the change of tau, or by flips of more than rounding.

    A side of unknown cost that differs by rounding alone says nothing beside one that is known.
    """
    names = list(result.params["sides"])
    known = [
        name
        for name, side in result.params["sides"].items()
        if f"delta_tau {name}" in result.estimates or side.get("above") or _flips(result, name)
    ]
    found = [_side(result, name) for name in known or names]
    verdict = worst(one.verdict for one in found)
    return next(one for one in found if one.verdict is verdict)


def _flips(result: Result, name: str) -> bool:
    """Whether more choices flip by more than rounding than may."""
    side = result.params["sides"][name]
    return bool(side["n_decisive"] > FEW * side["n_positions"])


def _side(result: Result, name: str) -> Judgement:
    side, delta = result.params["sides"][name], result.estimates.get(f"delta_tau {name}")
    # Without an interval all is possible.
    lo, hi = (-math.inf, math.inf)
    if delta is not None and delta.lo is not None and delta.hi is not None:
        lo, hi = delta.lo, delta.hi
    what = "" if delta is None else f"{name}: tau changes by {signed(delta)}"
    if lo > HARMLESS or hi < -HARMLESS:
        return Judgement(Verdict.FAIL, what)
    if _flips(result, name):
        why = f"{name}: {side['n_decisive']} choices of the target flip by more than rounding"
        return Judgement(Verdict.WARN, why)
    if lo >= -HARMLESS and hi <= HARMLESS:
        return Judgement(Verdict.PASS, f"{what}, less than {HARMLESS} tokens a round")
    if delta is not None:
        return Judgement(Verdict.INCONCLUSIVE, f"{what}, undecided")
    why = ROUNDED if side["n_positions"] else NO_FLIPS
    return Judgement(Verdict.INCONCLUSIVE, f"{name}: {why}; the cost in tokens is unknown")


@diagnostic(
    id="hidden.effect",
    question="What does the difference of hidden states cost in accepted tokens?",
    page="03_hidden_state_divergence",
    judge=judge,
    version=4,
)
def effect(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Flipped choices with their margins, flipped drafts, and the paired change of tau.

    Returns
    -------
    tuple
        Frame columns: side, prompt, position, margin_a and margin_b (of the capture and of the
        side), limit (of rounding) [logits], decisive; one row a flipped choice of the target.
    """
    import pandas as pd

    from dflash_diag import pairs, stats

    if not inputs.sides():
        raise Skip(NOTHING)
    rows, sides, notes, said = [], {}, [], []
    estimates: dict[str, Estimate] = {}
    for name in inputs.sides():
        compared = inputs.divergence(name)
        flips = pd.DataFrame(compared["flips"])
        if len(flips):
            by_prompt = flips.groupby("prompt", sort=False)["flipped"]
            share = stats.ratio(by_prompt.sum(), by_prompt.count(), "share")
            key = f"target_flips {name}"
            found = stats.estimates({key: share}, seed=inputs.seed, draws=inputs.draws)
            estimates[key] = found[key]
            rows.append(flips[flips["flipped"]].assign(side=name)[COLUMNS])
        decisive = int(flips["decisive"].sum()) if len(flips) else 0
        sides[name] = {
            "above": any(row["above"] for row in compared["layers"]),
            "n_positions": len(flips),
            "n_flips": int(flips["flipped"].sum()) if len(flips) else 0,
            "n_decisive": decisive,
            "limit": float(flips["limit"].median()) if len(flips) else None,
        }
        known = estimates.get(f"target_flips {name}")
        choices = known and f"{relative(known.value)} of the target's choices"
        try:
            drafts = pairs.draft_flips(*inputs.side_scores(name))
            estimates[f"delta_tau {name}"] = delta_tau(inputs, name)
            sides[name] |= drafts
            drafted = f"{percent(drafts['flips'] / max(1, drafts['proposed']))} of the drafts flip"
            words = f"{choices} and {drafted}" if choices else f"{drafted} ({UNKNOWN})"
            words += f", tau changes by {signed(estimates[f'delta_tau {name}'])}"
        except Skip as reason:
            words = f"{choices} flip ({decisive} by more than rounding)" if choices else UNKNOWN
            notes.append(f"{name}. {reason}")
        said.append(f"{name}: {words}")
    frame = pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=COLUMNS)
    return (
        f"{'; '.join(said)}.",
        frame,
        {"estimates": estimates, "params": {"sides": sides}, "notes": notes},
    )


def delta_tau(inputs: Inputs, side: str) -> Estimate:
    """Change of walked tau from a side to the capture, paired by prompt; `Skip` if unknown."""
    from dflash_diag import metrics, stats

    try:
        pairs = metrics.paired(*inputs.side_scores(side), trees=False)
    except BadInput as error:
        raise Skip(f"The cost in tokens is unknown: {error}.") from error
    key = "tau_walked_micro"
    return stats.differences({key: pairs[key]}, seed=inputs.seed, draws=inputs.draws)[key]
