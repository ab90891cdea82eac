"""How far two computations of the hidden states are apart, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic, signed
from dflash_diag.results import Judgement, Result, Verdict, worst
from dflash_diag.stats import Estimate, few_prompts_note

HARMLESS = 0.05
"""Tokens a round below which a change of tau counts as none: what a comparison of drafters takes
as no difference."""
NOTHING = (
    "Nothing was given to compare the states with (--against: a capture of the same tokens, or a "
    "backend and dtype such as torch/bfloat16)."
)
WORDS = {
    Verdict.PASS: "noise",
    Verdict.WARN: "harmless difference",
    Verdict.FAIL: "cause",
    Verdict.INCONCLUSIVE: "difference of unknown cost",
}
"""What the verdict on a comparison means."""
SOURCE = (
    "an error above twice the noise floor is no rounding (the rule of FlashAttention's tests); a "
    f"change of tau within {HARMLESS} tokens a round is taken as none"
)


def judge(result: Result) -> Judgement:
    """The worst side decides; states that are not numbers always fail."""
    found = [_side(result, name) for name in result.params["sides"]]
    verdict = worst(one.verdict for one in found)
    return next(one for one in found if one.verdict is verdict)


def _side(result: Result, name: str) -> Judgement:
    p = result.params["sides"][name]
    if p["n_broken"]:
        why = f"{name}: {p['n_broken']} layers hold zeros or values that are no numbers"
        return Judgement(Verdict.FAIL, why)
    if p["first_above"] is None:
        return Judgement(Verdict.PASS, f"{name}: noise, no layer above twice the noise floor")
    delta = result.estimates.get(f"delta_tau {name}")
    what = f"{name}: {p['n_above']} layers are above twice the noise floor"
    if delta is None or delta.lo is None or delta.hi is None:
        return Judgement(Verdict.INCONCLUSIVE, f"{what}; the cost in tokens is unknown")
    if delta.lo >= -HARMLESS and delta.hi <= HARMLESS:
        return Judgement(Verdict.WARN, f"{what}, at no cost: tau changes by {signed(delta)}")
    if delta.lo > HARMLESS or delta.hi < -HARMLESS:
        return Judgement(Verdict.FAIL, f"{what}, a cause: tau changes by {signed(delta)}")
    return Judgement(Verdict.INCONCLUSIVE, f"{what}; tau changes by {signed(delta)}, undecided")


@diagnostic(
    id="hidden.divergence",
    question="Are the hidden states the same as another backend, dtype or machine computes?",
    page="03_hidden_state_divergence",
    judge=judge,
    version=2,
)
def divergence(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every layer against its noise floor, for each side, and what the difference costs.

    Returns
    -------
    tuple
        Frame columns: side, layer, module, the numbers of `dflash_diag.divergence.Deviation`, kind
        (of the layer), floor and times_floor (largest of the judged numbers, in noise floors),
        above.
    """
    import pandas as pd

    from dflash_diag.divergence import first_above

    rows, sides, notes = [], {}, []
    estimates: dict[str, Estimate] = {}
    for name in _sides(inputs):
        found = inputs.divergence(name)
        layers = [{"side": name, **row} for row in found["layers"]]
        rows += layers
        sides[name] = {
            "first_above": first_above(layers),
            "n_above": sum(row["above"] for row in layers),
            "n_broken": sum(broken(row) > 0 for row in layers),
            "largest": max(layers, key=lambda r: r["rel_rms"] or 0.0),
        }
        notes.append(f"{name}. {found['floor_note']}")
        try:
            estimates[f"delta_tau {name}"] = delta_tau(inputs, name)
        except Skip as reason:
            notes.append(f"{name}. {reason}")
    said = "; ".join(_words(name, one, estimates) for name, one in sides.items())
    n = max((e.n for e in estimates.values()), default=0)
    notes += [f"Judged by: {SOURCE}.", *filter(None, [few_prompts_note(n) if n else None])]
    return (
        f"{said}.",
        pd.DataFrame(rows),
        {"estimates": estimates, "params": {"sides": sides}, "notes": notes},
    )


def _sides(inputs: Inputs) -> list[str]:
    names = list(inputs.sides())
    if not names:
        raise Skip(NOTHING)
    return names


def broken(row: Mapping[str, Any]) -> int:
    """Rows of states that are zeros or no numbers."""
    return int(row["nan_rows"] + row["inf_rows"] + row["zero_rows"])


def _words(name: str, side: Mapping[str, Any], estimates: Mapping[str, Estimate]) -> str:
    largest = side["largest"]
    share = 100 * (largest["rel_rms"] or 0.0)
    at = f"relative RMS at most {share:.2g}\u00a0%, at layer {largest['layer']}"
    if side["n_broken"]:
        return f"{name}: {side['n_broken']} layers hold zeros or no numbers"
    delta = estimates.get(f"delta_tau {name}")
    cost = "" if delta is None else f", tau changes by {signed(delta)}"
    if side["first_above"] is None:
        return f"{name}: within the noise ({at}){cost}"
    return f"{name}: above the noise from layer {side['first_above']['layer']} on ({at}){cost}"


def delta_tau(inputs: Inputs, side: str) -> Estimate:
    """Change of walked tau from a side to the capture, paired by prompt.

    Raises
    ------
    Skip
        It cannot be known.
    """
    from dflash_diag import metrics, stats

    pairs = metrics.paired(*inputs.side_scores(side), trees=False)
    key = "tau_walked_micro"
    return stats.differences({key: pairs[key]}, seed=inputs.seed, draws=inputs.draws)[key]
