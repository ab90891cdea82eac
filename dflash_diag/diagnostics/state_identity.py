"""What the captured states are, where they are not what they claim."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic, layer_names, relative
from dflash_diag.diagnostics.captured_states import PAGE, answer, judge_problems, rows, rows_of
from dflash_diag.divergence import FACTOR
from dflash_diag.results import Judgement, Result, Verdict

PLACED = ("shifted", "other_layer", "other_module")
"""Kinds whose words name a place, which may be another one on another prompt."""


def judge_identity(result: Result) -> Judgement:
    """A known fault fails; what is near, with none, is left to what it costs."""
    verdict, reason = judge_problems(result)
    if verdict is Verdict.FAIL and not result.params["n_faults"]:
        return Judgement(Verdict.WARN, f"{reason}: what that costs is judged elsewhere")
    return Judgement(verdict, reason)


@diagnostic(
    id="hidden.identity",
    question="Are the captured states those of the layers and rows that they claim?",
    page=PAGE,
    judge=judge_identity,
    version=2,
)
def identity(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The captured states beside everything that the live target computes nearby.

    Returns
    -------
    tuple
        Frame columns: prompt, layer, kind, rel_rms (against what they claim), explained (against
        what they are), what (in words), rough (whether more than rounding is left), floor.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(inputs, "hidden.identity"))
    wrong = frame[frame["kind"] != "right"]
    place = wrong["what"].where(wrong["kind"].isin(PLACED), "")
    problems, layers, n_faults = [], [], 0
    groups = [g for _, g in wrong.groupby(["layer", "kind", place.rename("place")], sort=False)]
    for group in sorted(groups, key=lambda g: g["kind"].iloc[0] == "near"):
        first, n = group.iloc[0], frame["prompt"].nunique()
        n_faults += first["kind"] != "near"
        layers.append(first["layer"])
        on = f"on {group['prompt'].nunique()} of {n} prompts"
        if first["kind"] == "some_rows":
            on += f", these on {first['prompt']}"
        problems.append(f"the states kept as layer {first['layer']} are {_words(group)} ({on})")
    limits = FACTOR * frame["floor"][frame["layer"] >= min(0, frame["layer"].max())]
    ends = dict.fromkeys((relative(limits.min()), relative(limits.max())))
    good = (
        f"the states of {layer_names(frame['layer'])} are what the target computes (relative RMS "
        f"at most {relative(frame['rel_rms'].max())}; up to {' to '.join(ends)} counts as rounding)"
    )
    others = f", of {layer_names(layers[1:])}" if layers[1:] else ""
    return answer(frame, problems, good, others=others, n_faults=n_faults)


def broken_capture(inputs: Inputs) -> dict[str, str]:
    """Checks by which captured states are not what they claim, by id, and what they say."""
    found = {one.id: one(inputs) for one in (rows, identity)}
    return {
        id_: one.headline.removesuffix(".")
        for id_, one in found.items()
        if one.verdict is Verdict.FAIL
    }


def _words(group: Any) -> str:
    """What the states of one layer are, with how far off that is."""
    first = group.iloc[0]
    off = f"{relative(group['rel_rms'].astype(float).max())} off"
    if first["kind"] == "near":
        return f"layer {first['layer']}, {off}, no known fault"
    if first["kind"] == "unknown":
        return f"{first['what']} ({off})"
    left = relative(group["explained"].astype(float).max())
    return f"{first['what']}, {left} off" if group["rough"].any() else str(first["what"])
