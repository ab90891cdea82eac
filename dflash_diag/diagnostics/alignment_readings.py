"""Every reading that was tried, beside the declared one."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict


def judge(result: Result) -> Judgement:
    """The declared reading has to be the best; what a better one means is for the causes."""
    better = result.params["better"]
    if better:
        return Judgement(Verdict.WARN, f"better: {'; '.join(better[:3])}")
    return Judgement(Verdict.PASS, f"{result.params['n_tried']} readings tried, none is better")


@diagnostic(
    id="alignment.readings",
    question="What is each other reading of these weights accepted?",
    page="04_position_alignment",
    judge=judge,
)
def readings(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """One field of the convention changed at a time, then pairs; the same anchors for all.

    Returns
    -------
    tuple
        Frame columns: step (1: on the declared reading; 2…: on top of what was found), cause,
        reading, population (walked, or some anchors where a screen dropped it), tau, delta, lo, hi
        [tokens a round], accuracy_gain [share of slots], p (Holm), answer.
    """
    import pandas as pd

    measured = inputs.alignment()
    steps = [(f"{at + 1}", made) for at, made in enumerate(measured["rounds"])]
    if measured["pairs"]:
        steps.append(("pairs", measured["pairs"]))
    frame = pd.DataFrame([_row(step, one) for step, made in steps for one in made["tried"]])
    first = frame[frame["step"] == "1"]
    better = first[first["answer"] == "better"].sort_values("delta", ascending=False)
    worse = int((first["answer"] == "worse").sum())
    name = inputs.name(inputs.roles[0])
    rest = len(first) - len(better) - worse
    said = (
        f"Of {len(first)} other readings of {name}, {len(better)} are better than the declared "
        f"one, {worse} are worse, and {rest} make no certain difference."
    )
    return (
        said,
        frame,
        {
            "params": {
                "better": better["reading"].tolist(),
                "n_tried": len(first),
                "n_prompts": measured["n_prompts"],
                "finding": "Accepted tokens under other readings, less the declared one's",
            }
        },
    )


def _row(step: str, one: dict[str, Any]) -> dict[str, Any]:
    delta = one["delta"]
    answer = "no certain difference"
    if one["found"]:
        answer = "better"
    elif one["equal"]:
        answer = "the same proposals"
    elif delta["hi"] is not None and delta["hi"] < 0:
        answer = "worse"
    return {
        "step": step,
        "cause": one["cause"],
        "reading": ", ".join(one["settings"]) or "context of zeros",
        "population": "walked" if one["whole"] else "some anchors",
        "tau": one["tau"]["value"],
        "delta": delta["value"],
        "lo": delta["lo"],
        "hi": delta["hi"],
        "accuracy_gain": one["gain"]["value"],
        "p": one["p_adjusted"],
        "answer": answer,
    }
