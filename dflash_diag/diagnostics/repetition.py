"""How much of the text repeats itself, and how much of the acceptance comes from that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash_diag import metrics
from dflash_diag.diagnostics.base import Continuation, Inputs, Threshold, diagnostic, percent
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate, Ratio, estimates, ratio
from dflash_diag.strata import WINDOW, repeated

if TYPE_CHECKING:
    from dflash_diag.scoring import Scores

LITTLE = Threshold(
    estimate="share_repeated",
    at_most=0.30,
    what="the repeated share of the text",
    source="beyond 30 % the number describes loops rather than the drafter",
)


def judge(result: Result) -> Judgement:
    """Too much repetition is a warning about the text, not a fault of the drafter."""
    verdict, reason = LITTLE.judge(result)
    return Judgement(Verdict.WARN if verdict is Verdict.FAIL else verdict, reason)


def repeated_lines(text: str) -> tuple[int, int]:
    """How many lines of a text that are not blank occurred before in it, and how many there are."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) - len(set(lines)), len(lines)


@diagnostic(
    id="acceptance.repetition",
    question="Does the text repeat itself, and does acceptance live on that?",
    page="02_acceptance",
    judge=judge,
    thresholds=[LITTLE],
)
def repetition(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Share of repeated tokens, and walked tau over all rounds and over those outside repeats.

    A round is inside a repeat when its anchor is.

    Returns
    -------
    tuple
        Frame columns: id, role, drafter, share_repeated, share_repeated_lines (of text, if known),
        tau_all, tau_outside [tokens], rounds, rounds_outside.
    """
    import pandas as pd

    texts = {one.id: one for one in inputs.continuations()}
    masks = {id_: repeated(one.ids) for id_, one in texts.items()}
    lines = {id_: repeated_lines(one.text or "") for id_, one in texts.items()}
    frames: list[pd.DataFrame] = []
    sums: dict[str, Ratio] = {}
    for role in inputs.roles:
        ids, every, beyond = _with_and_without(inputs.scores(role), texts, masks)
        sums |= {f"{role}_tau_all": every, f"{role}_tau_outside": beyond}
        frames.append(
            pd.DataFrame(
                {
                    "id": ids,
                    "role": role,
                    "drafter": inputs.name(role),
                    "share_repeated": [masks[id_].mean() for id_ in ids],
                    "share_repeated_lines": [_share(*lines[id_]) for id_ in ids],
                    "tau_all": every.per_prompt(),
                    "tau_outside": beyond.per_prompt(),
                    "rounds": every.denominators.astype(int),
                    "rounds_outside": beyond.denominators.astype(int),
                }
            )
        )
    frame = pd.concat(frames, ignore_index=True).astype({"share_repeated_lines": float})
    role, name = inputs.roles[0], inputs.name(inputs.roles[0])
    first = frame[frame["role"] == role]
    sums["share_repeated"] = ratio(
        [masks[id_].sum() for id_ in first["id"]], [len(masks[id_]) for id_ in first["id"]], "share"
    )
    found = estimates(sums, seed=inputs.seed, draws=inputs.draws)
    share, median = found["share_repeated"].value, float(first["share_repeated"].median())
    said = (
        f"{percent(share)} of the generated tokens repeat earlier text (median prompt "
        f"{percent(median)}); {name} gets {_two(found[f'{role}_tau_all'])} tokens a round in all "
        f"and {_two(found[f'{role}_tau_outside'])} outside repeats."
    )
    known = first["share_repeated_lines"].dropna()
    notes = [f"Median share of repeated lines: {percent(known.median())}."] if len(known) else []
    params = {
        "n_prompts": len(first),
        "window": WINDOW,
        "bound": LITTLE.at_most,
        "drafters": [(one, inputs.name(one)) for one in inputs.roles],
        "finding": f"{percent(share)} of the generated text repeats itself",
    }
    return said, frame, {"estimates": found, "params": params, "notes": notes}


def _with_and_without(
    scores: Scores, texts: Mapping[str, Continuation], masks: Mapping[str, NDArray[np.bool_]]
) -> tuple[list[str], Ratio, Ratio]:
    """Scored prompts, and their walked tau over all rounds and over those outside repeats."""
    jumps = metrics.accepted(scores) + 1
    visited = metrics.walked(scores.prompt, scores.anchor, jumps)
    outside = np.zeros(len(jumps), dtype=bool)
    scored = np.unique(scores.prompt)
    for index in scored:
        rows, id_ = np.flatnonzero(scores.prompt == index), scores.prompt_ids[index]
        outside[rows] = ~masks[id_][scores.anchor[rows] - texts[id_].start]

    def tau(counted: NDArray[np.bool_]) -> Ratio:
        tokens, rounds = (
            np.bincount(scores.prompt, weights=weights)[scored]
            for weights in (jumps * counted, counted)
        )
        return ratio(tokens, rounds, "tokens")

    return metrics.scored_prompts(scores), tau(visited), tau(visited & outside)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _two(one: Estimate) -> str:
    return "an unknown number of" if one.value is None else f"{one.value:.2f}"
