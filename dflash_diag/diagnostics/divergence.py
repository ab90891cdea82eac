"""How far two computations of the hidden states are apart, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_diag.causes import HARMLESS
from dflash_diag.diagnostics.base import (
    NOTHING,
    Inputs,
    Skip,
    diagnostic,
    layer_names,
    relative,
    signed,
)
from dflash_diag.diagnostics.effect import delta_tau
from dflash_diag.diagnostics.reference import doubt, doubted
from dflash_diag.diagnostics.state_identity import broken_capture
from dflash_diag.divergence import FACTOR
from dflash_diag.results import Judgement, Result, Verdict, worst
from dflash_diag.stats import Estimate, few_prompts_note

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
    """The worst side decides; states that are no numbers, or not what they claim, always fail."""
    for id_, why in result.params.get("broken", {}).items():
        return Judgement(Verdict.FAIL, f"the capture is broken, whatever that costs: {why} ({id_})")
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
    version=3,
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
    if not inputs.sides():
        raise Skip(NOTHING)
    for name in inputs.sides():
        found = inputs.divergence(name)
        layers = [{"side": name, **row} for row in found["layers"]]
        rows += layers
        sides[name] = {
            "first_above": first_above(layers),
            "n_above": sum(row["above"] for row in layers),
            "n_broken": sum(broken(row) > 0 for row in layers),
            "broken": [row["layer"] for row in layers if broken(row)],
            "where": _where(layers),
            "left_out": found.get("left_out", ""),
            "largest": max(layers, key=lambda r: r["rel_rms"] or 0.0),
        }
        notes.append(f"{name}. {found['floor_note']}")
        if sides[name]["left_out"]:
            notes.append(f"{name}. Compared: {sides[name]['left_out']}.")
        try:
            estimates[f"delta_tau {name}"] = delta_tau(inputs, name)
        except Skip as reason:
            notes.append(f"{name}. {reason}")
    said = "; ".join(_words(name, one, estimates) for name, one in sides.items()) + "."
    damage, text = broken_capture(inputs), doubted(inputs)
    if damage:
        said += f" The capture is broken ({', '.join(damage)})."
    if text is not None:
        notes.insert(0, doubt(text))
        said += f" Of the tokens, a server's, it says nothing: {text.id} is {text.verdict.name}."
    n = max((e.n for e in estimates.values()), default=0)
    notes += [f"Judged by: {SOURCE}.", *filter(None, [few_prompts_note(n) if n else None])]
    params = {"sides": sides, "broken": damage}
    return said, pd.DataFrame(rows), {"estimates": estimates, "params": params, "notes": notes}


def broken(row: Mapping[str, Any]) -> int:
    """Rows of states that are zeros or no numbers."""
    return int(row["nan_rows"] + row["inf_rows"] + row["zero_rows"])


def _words(name: str, side: Mapping[str, Any], estimates: Mapping[str, Estimate]) -> str:
    largest = side["largest"]
    part = side["left_out"] and f", on {side['left_out']} alone"
    if side["n_broken"]:
        return f"{name}: zeros or no numbers at {layer_names(side['broken'])}{part}"
    at = f"relative RMS at most {relative(largest['rel_rms'])}, at layer {largest['layer']}"
    delta = estimates.get(f"delta_tau {name}")
    cost = "" if delta is None else f", tau changes by {signed(delta)}"
    if side["first_above"] is None:
        limit = relative(FACTOR * largest["floor"])
        at = f"{at}; up to {limit} counts as rounding" if largest["rel_rms"] else "no difference"
        return f"{name}: within the noise ({at}){part}{cost}"
    return f"{name}: above the noise {side['where']} ({at}){part}{cost}"


def _where(rows: Sequence[Mapping[str, Any]]) -> str:
    """Which layers are above the noise."""
    above = [row["layer"] for row in rows if row["above"]]
    follow = [row["layer"] for row in rows if above and row["layer"] >= above[0]]
    return (
        f"from layer {above[0]} on" if 1 < len(above) == len(follow) else f"at {layer_names(above)}"
    )
