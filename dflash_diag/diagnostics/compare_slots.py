"""At which slots of the block drafters differ."""

from __future__ import annotations

from typing import Any

from dflash_diag.compare import LEVEL
from dflash_diag.compare_words import elided, signed
from dflash_diag.diagnostics.base import Inputs, diagnostic, estimate
from dflash_diag.results import Judgement, Result, Verdict

MOST = 2
"""Drafters that the headline speaks of."""
RATES = ("survival", "conditional")
HOW = (
    "Intervals hold for one slot at a time; certain is what remains after Holm over the slots of a "
    f"pair (sign flips by prompt, {LEVEL:g})."
)


def judge(result: Result) -> Judgement:
    """WARN where a slot is certainly worse than another drafter's, given that it was reached."""
    worse = result.params["worse"]
    if not worse:
        return Judgement(Verdict.PASS, "no slot is certainly worse, given that it was reached")
    said = "; ".join(f"slots {', '.join(map(str, ks))} than {b}'s" for b, ks in worse.items())
    return Judgement(Verdict.WARN, f"certainly worse, given that they were reached: {said}")


@diagnostic(
    id="compare.slots",
    question="At which slots of the block do they differ?",
    page="08_compare",
    judge=judge,
)
def compare_slots(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Paired differences of survival and of conditional rates, over walked rounds.

    Returns
    -------
    tuple
        Frame columns: a, b, k, and for survival and conditional [share of rounds] the rates of
        both (``_a``, ``_b``) and their difference (``_delta``) with ``_lo`` and ``_hi``; n_before_a
        and n_before_b (rounds that reached the slot), p_adjusted (of the conditional difference).
    """
    import pandas as pd

    found = inputs.compared()
    frame = pd.DataFrame([_row(one) for one in found["slots"]])
    numbers = [name for name in frame if name.startswith(RATES)]
    frame[numbers] = frame[numbers].astype(float)
    name, others = found["drafters"][0]["name"], list(dict.fromkeys(frame["b"]))
    sure = frame[frame["p_adjusted"] <= LEVEL]
    worse, better = (
        {b: sure.loc[(sure["b"] == b) & which, "k"].tolist() for b in others}
        for which in (sure["conditional_delta"] < 0, sure["conditional_delta"] > 0)
    )
    said = " ".join(
        _said(name, b, [one for one in found["slots"] if one["b"] == b], worse[b], better[b])
        for b in others[:MOST]
    )
    n = min(one["n_prompts"] for one in found["pairs"])
    estimates = {
        f"survival_{one['k']} less {one['b']}'s": estimate(one["survival_delta"], n, "")
        for one in found["slots"]
    }
    params = {
        "n_prompts": n,
        "worse": {b: ks for b, ks in worse.items() if ks},
        "finding": f"{elided(name)} less {elided(others[0])}, where a slot was reached: "
        + _certain(worse[others[0]], better[others[0]]),
        "drafters": found["drafters"],
    }
    return said, frame, {"estimates": estimates, "params": params, "notes": [HOW]}


def _row(one: dict[str, Any]) -> dict[str, Any]:
    row = {key: one[key] for key in ("a", "b", "k")}
    for rate in RATES:
        delta = one[f"{rate}_delta"]
        row |= {f"{rate}_{side}": one[f"{rate}_{side}"] for side in "ab"}
        row |= {f"{rate}_delta": delta["value"]}
        row |= {f"{rate}_{end}": delta[end] for end in ("lo", "hi")}
    before = dict(zip(("n_before_a", "n_before_b"), one["n_before"], strict=True))
    return row | before | {"p_adjusted": one["p_adjusted"]}


def _points(numbers: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value is None else 100 * value for key, value in numbers.items()}


def _said(name: str, b: str, rows: list[Any], worse: list[int], better: list[int]) -> str:
    most = max(rows, key=lambda one: abs(one["survival_delta"]["value"]))
    return (
        f"{name} less {b}: survival differs most at slot {most['k']}, "
        f"by {signed(_points(most['survival_delta']), 0)} percentage points; where a slot was "
        f"reached, {_certain(worse, better)}."
    )


def _certain(worse: list[int], better: list[int]) -> str:
    parts = [
        f"slot{'' if len(ks) == 1 else 's'} {', '.join(map(str, ks))} "
        f"{'is' if len(ks) == 1 else 'are'} certainly {what}"
        for what, ks in (("worse", worse), ("better", better))
        if ks
    ]
    return " and ".join(parts) or "no slot is certainly worse or better"
