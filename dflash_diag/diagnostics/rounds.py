"""What single rounds of decoding look like: how many accept nothing, how many everything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from dflash_diag.diagnostics.base import Inputs, Threshold, diagnostic, interval, percent
from dflash_diag.outcomes import PICKS, Outcomes
from dflash_diag.stats import Estimate, estimates, ratio

NOTHING = Threshold(
    estimate="nothing",
    at_most=0.35,
    what="the share of rounds that accept nothing",
    source=(
        "usable published DFlash-family drafters lose 0.11 to 0.35 of their rounds at the first "
        "proposal, a checkpoint called weak 0.52 (data/published_survival_curves.csv)"
    ),
)


@diagnostic(
    id="acceptance.rounds",
    question="What happens in single rounds?",
    page="09_explorer",
    thresholds=[NOTHING],
)
def rounds(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Share of rounds by what they accept, while decoding; the rounds that tell most.

    Estimates ``nothing`` and ``everything`` are shares of rounds; ``accepted`` and ``expected``
    [tokens a round, bonus excluded] are what was accepted and what the drafter's own probabilities
    foretold. The other drafters' have their role before them.

    Returns
    -------
    tuple
        Frame columns: role, drafter, accepted [tokens], n [rounds], and share [of rounds] with its
        ``lo`` and ``hi``.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = []
    found: dict[str, Estimate] = {}
    for role in inputs.roles:
        outcomes = Outcomes(inputs.scores(role))
        measured = _measured(outcomes, inputs)
        prefix = "" if role == inputs.roles[0] else f"{role}_"
        d = outcomes.scores.labels.shape[1]
        counts = np.bincount(outcomes.accepted[outcomes.visited], minlength=d + 1)
        for j in range(d + 1):
            one = measured.pop(j)
            row = {"role": role, "drafter": inputs.name(role), "accepted": j, "n": int(counts[j])}
            rows.append({**row, "share": one.value, "lo": one.lo, "hi": one.hi})
            if j in (0, d):
                found[f"{prefix}{'everything' if j else 'nothing'}"] = one
        found |= {f"{prefix}{name}": one for name, one in measured.items()}
    frame = pd.DataFrame(rows)
    frame[["share", "lo", "hi"]] = frame[["share", "lo", "hi"]].astype(float)
    ours = Outcomes(inputs.scores(inputs.roles[0]))
    picks = list(_picked(ours))
    name, n = inputs.name(inputs.roles[0]), int(ours.visited.sum())
    said = (
        f"{name} accepts nothing in {_share(found['nothing'])} of its {n} rounds and everything in "
        f"{_share(found['everything'])}"
    )
    none, whole = percent(found["nothing"].value), percent(found["everything"].value)
    return (
        f"{said}.",
        frame,
        {
            "estimates": found,
            "params": {
                "n_prompts": found["nothing"].n,
                "n_rounds": n,
                "blocks": picks,
                "finding": f"{name}: nothing in {none} of rounds, everything in {whole}",
            },
            "notes": [_forecast(name, found), *map(_sentence, picks)],
        },
    )


def _measured(outcomes: Outcomes, inputs: Inputs) -> dict[Any, Estimate]:
    """Shares of rounds by what they accept (0 to D), then ``accepted`` and ``expected``."""
    scores = outcomes.scores
    ids, prompt = np.unique(scores.prompt, return_inverse=True)
    counted = outcomes.visited

    def mean(values: Any, unit: str) -> Any:
        top, bottom = (
            np.bincount(prompt, weights=one * counted, minlength=len(ids))
            for one in (values, np.ones(len(prompt)))
        )
        return ratio(top, bottom, unit)

    wanted: dict[Any, Any] = {
        j: mean(outcomes.accepted == j, "share") for j in range(scores.labels.shape[1] + 1)
    }
    wanted["accepted"] = mean(outcomes.accepted, "tokens")
    wanted["expected"] = mean(outcomes.expected, "tokens")
    return estimates(wanted, seed=inputs.seed, draws=inputs.draws)


def _picked(outcomes: Outcomes) -> Iterator[dict[str, Any]]:
    """The rounds that the explorer shows first."""
    scores = outcomes.scores
    for name in PICKS:
        row = outcomes.pick(name, outcomes.visited)
        if row is not None:
            yield {
                "which": name,
                "prompt": scores.prompt_ids[scores.prompt[row]],
                "anchor": int(scores.anchor[row]),
                "accepted": int(outcomes.accepted[row]),
                "expected": float(outcomes.expected[row]),
                "surprise": float(outcomes.surprise[row]),
            }


def _sentence(one: dict[str, Any]) -> str:
    return (
        f"The {one['which']} round is at position {one['anchor']} of {one['prompt']}: "
        f"{one['accepted']} accepted where {one['expected']:.1f} were expected, a surprise of "
        f"{one['surprise']:.2f} nats."
    )


def _share(one: Estimate) -> str:
    """A share in words; that of what never happened has no interval that means anything."""
    return "none" if one.value == 0 else interval(one)


def _forecast(name: str, found: dict[str, Estimate]) -> str:
    return (
        f"By its own probabilities {name} expects {interval(found['expected'])} proposals a round "
        f"to be accepted; it gets {interval(found['accepted'])}, the bonus token not counted."
    )
