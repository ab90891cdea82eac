"""How much of the text repeats itself, and how much of the acceptance comes from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_diag.diagnostics.base import Inputs, Threshold, diagnostic, percent
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate

WINDOW = 16
"""Tokens that have to recur for a stretch to count as repeated: about a line of code."""
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


def repeated(ids: Sequence[int], window: int = WINDOW) -> NDArray[np.bool_]:
    """Tokens [G] that lie in a stretch of ``window`` tokens that occurred before in ``ids``."""
    seen: set[tuple[int, ...]] = set()
    inside = np.zeros(len(ids), dtype=bool)
    for start in range(len(ids) - window + 1):
        stretch = tuple(ids[start : start + window])
        if stretch in seen:
            inside[start : start + window] = True
        seen.add(stretch)
    return inside


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

    from dflash_diag import metrics, stats

    texts = inputs.continuations()
    masks = {one.id: repeated(one.ids) for one in texts}
    lines = {one.id: None if one.text is None else repeated_lines(one.text) for one in texts}
    starts = {one.id: one.start for one in texts}
    rows, sums = [], {}
    for role in inputs.roles:
        scores = inputs.scores(role)
        jumps = metrics.accepted(scores) + 1
        visited = metrics.walked(scores.prompt, scores.anchor, jumps)
        scored = np.unique(scores.prompt)
        outside = np.zeros(len(jumps), dtype=bool)
        for index in scored:
            rows_of = np.flatnonzero(scores.prompt == index)
            id_ = scores.prompt_ids[index]
            outside[rows_of] = ~masks[id_][scores.anchor[rows_of] - starts[id_]]

        def per_prompt(values: Any, scores: Any = scores, scored: Any = scored) -> Any:
            return np.bincount(scores.prompt, weights=values)[scored]

        away = visited & outside
        every = stats.ratio(per_prompt(jumps * visited), per_prompt(visited), "tokens")
        beyond = stats.ratio(per_prompt(jumps * away), per_prompt(away), "tokens")
        sums |= {f"{role}_tau_all": every, f"{role}_tau_outside": beyond}
        columns = zip(scored, every.per_prompt(), beyond.per_prompt(), beyond.denominators,
                      every.denominators, strict=True)  # fmt: skip
        for index, tau, tau_outside, n_outside, n in columns:
            id_ = scores.prompt_ids[index]
            found = lines[id_]
            rows.append(
                {
                    "id": id_,
                    "role": role,
                    "drafter": inputs.name(role),
                    "share_repeated": masks[id_].mean(),
                    "share_repeated_lines": found[0] / found[1] if found and found[1] else None,
                    "tau_all": tau,
                    "tau_outside": tau_outside,
                    "rounds": int(n),
                    "rounds_outside": int(n_outside),
                }
            )
    frame = pd.DataFrame(rows).astype({"share_repeated_lines": float})
    first = frame[frame["role"] == inputs.roles[0]]
    tokens = [(masks[id_].sum(), len(masks[id_])) for id_ in first["id"]]
    sums["share_repeated"] = stats.ratio(*zip(*tokens, strict=True), "share")
    counted = [lines[id_] for id_ in first["id"] if lines[id_] is not None]
    if len(counted) == len(first):
        sums["share_repeated_lines"] = stats.ratio(*zip(*counted, strict=True), "share")
    found = stats.estimates(sums, seed=inputs.seed, draws=inputs.draws)
    role, name = inputs.roles[0], inputs.name(inputs.roles[0])
    share, median = found["share_repeated"].value or 0.0, float(first["share_repeated"].median())
    said = (
        f"{percent(share)} of the generated tokens repeat earlier text (median prompt "
        f"{percent(median)}); {name} gets {_two(found[f'{role}_tau_all'])} tokens a round in all "
        f"and {_two(found[f'{role}_tau_outside'])} outside repeats."
    )
    notes = []
    known = first["share_repeated_lines"].dropna()
    if len(known):
        notes.append(f"Median share of repeated lines: {percent(known.median())}.")
    return (
        said,
        frame,
        {
            "estimates": found,
            "params": {
                "n_prompts": len(first),
                "window": WINDOW,
                "bound": LITTLE.at_most,
                "drafters": [(role, inputs.name(role)) for role in inputs.roles],
                "finding": f"{percent(share)} of the generated text repeats itself",
            },
            "notes": notes,
        },
    )


def _two(one: Estimate) -> str:
    return "an unknown number of" if one.value is None else f"{one.value:.2f}"
