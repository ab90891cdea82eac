"""Whether the block sits where training put it."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic, signed
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate

CAUSE = "position.block_offset"
ROUNDING = 1e-2
"""Relative RMS that moving everything may cause: float32 rounds angles at long positions."""


def judge(result: Result) -> Judgement:
    """Off by d fails; several offsets that do equally well leave it open."""
    best, open_ = result.params["best"], result.params["open"]
    if result.params["shifted"] > ROUNDING:
        shifted = result.params["shifted"]
        return Judgement(
            Verdict.FAIL, f"moving everything alike changes the output ({shifted:.2g})"
        )
    if best:
        return Judgement(Verdict.FAIL, f"the block is off by {best:+d}")
    if open_:
        words = ", ".join(f"{d:+d}" for d in open_)
        return Judgement(
            Verdict.INCONCLUSIVE, f"offset {words} does as well; {result.params['more']}"
        )
    return Judgement(Verdict.PASS, "every other offset of the block is accepted less")


@diagnostic(
    id="position.alignment",
    question="Does the block sit at the positions that it was trained at?",
    page="04_position_alignment",
    judge=judge,
)
def alignment(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The block's offset from -3 to 3, each on the same anchors.

    A constant shift of the context is the same function as a shift of the block, and is reported
    here too.

    Returns
    -------
    tuple
        Frame columns: offset, tau, delta, lo, hi [tokens a round; against the declared offset],
        accuracy_gain [share of slots], answer, and phase_0 … phase_(B-1) [degrees, root mean
        square over rotary pairs, by slot].
    """
    import pandas as pd

    measured = inputs.alignment()
    first, places = measured["rounds"][0], measured["positions"]
    declared = inputs.convention(inputs.roles[0]).position_offset
    tried = {
        int(one["settings"][0].partition("=")[2]) - declared: one
        for one in first["tried"]
        if one["cause"] == CAUSE
    }
    rows = []
    for offset, phases in zip(places["offsets"], places["phase_degrees"], strict=True):
        row = _own(first) if offset == 0 else _other(tried[offset])
        rows.append(
            {"offset": offset, **row} | {f"phase_{k}": phase for k, phase in enumerate(phases)}
        )
    frame = pd.DataFrame(rows)
    best = next(e for e in measured["findings"] if e["cause"] == CAUSE)
    found = best["status"] == "found"
    off = int(best["settings"][0].partition("=")[2]) - declared if found else 0
    open_ = [r["offset"] for r in rows if r["answer"] == "as good"] if not off else []
    shifts = {one["expected"]: one["rel_rms"] for one in places["shifts"]}
    name, tau = inputs.name(inputs.roles[0]), first["tau"]
    n = measured["n_prompts"]
    estimates = {"tau": Estimate(tau["value"], tau["lo"], tau["hi"], n, "tokens a round")}
    said = f"{name} is aligned: every other offset of the block is accepted less."
    if off:
        delta = best["delta"]
        estimates["delta"] = Estimate(delta["value"], delta["lo"], delta["hi"], n, "tokens a round")
        said = (
            f"The block of {name} is off by {off:+d}: there it gains {signed(estimates['delta'])}."
        )
    elif open_:
        words = ", ".join(f"{d:+d}" for d in open_)
        said = (
            f"Where the block of {name} was trained cannot be told: offset {words} does as well as "
            "the declared one."
        )
    return (
        said,
        frame,
        {
            "estimates": estimates,
            "params": {
                "best": off,
                "open": open_,
                "more": best["evidence"].rpartition("; ")[2].rstrip(".") if open_ else "",
                "shifted": shifts["no change"],
                "block_size": inputs.convention(inputs.roles[0]).block_size,
                "n_prompts": n,
                "finding": said.rstrip("."),
            },
            "notes": [_shift_words(one) for one in places["shifts"]],
        },
    )


def _shift_words(one: dict[str, Any]) -> str:
    return f"{one['check']}: relative RMS {one['rel_rms']:.2g}, expected {one['expected']}."


def _own(first: dict[str, Any]) -> dict[str, Any]:
    numbers = {"tau": first["tau"]["value"], "delta": 0.0, "lo": 0.0, "hi": 0.0}
    return numbers | {"accuracy_gain": 0.0, "answer": "declared"}


def _other(one: dict[str, Any]) -> dict[str, Any]:
    delta = one["delta"]
    answer = "better" if one["found"] else "worse" if one["excluded"] else "as good"
    return {
        "tau": one["tau"]["value"],
        "delta": delta["value"],
        "lo": delta["lo"],
        "hi": delta["hi"],
        "accuracy_gain": one["gain"]["value"],
        "answer": answer,
    }
