"""Whether the target's states depend on what they must not depend on."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic, relative
from dflash_diag.diagnostics.captured_states import PAGE, answer, judge_problems, rows_of
from dflash_diag.divergence import FACTOR


def compared(inputs: Inputs, id_: str, bad: str, good: str) -> tuple[str, Any, dict[str, Any]]:
    """Cases that must agree, layer by layer, in noise floors.

    Returns
    -------
    tuple
        Frame columns: case, layer, rel_rms, floor, times_floor, first_rows (relative RMS of the
        first rows alone), above.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(inputs, id_))
    times = frame["times_floor"].astype(float).fillna(float("inf"))
    frame["above"] = times > FACTOR
    problems = []
    for case, group in frame[frame["above"]].groupby("case", sort=False):
        first = group.iloc[0]
        problems.append(
            f"{bad} ({case}: {times[group.index].max():.3g} noise floors, from layer "
            f"{first['layer']} on)"
        )
    largest = frame["rel_rms"].max()
    return answer(frame, problems, f"{good} (relative RMS at most {relative(largest)})")


@diagnostic(
    id="hidden.batch",
    question="Does a sequence have the same states alone and in a batch?",
    page=PAGE,
    judge=judge_problems,
)
def batch(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Three sequences of one length together, and each alone; see `compared` for the frame."""
    bad = "states depend on what else is in the batch"
    return compared(inputs, "hidden.batch", bad, "states are the same alone and in a batch")


@diagnostic(
    id="hidden.padding",
    question="Do padding tokens on the left leave the states of real tokens alone?",
    page=PAGE,
    judge=judge_problems,
)
def padding(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Padded on the left, alone and in a batch of two; see `compared` for the frame."""
    bad = "left padding reaches the states of real tokens"
    return compared(inputs, "hidden.padding", bad, "left padding changes no state")


@diagnostic(
    id="hidden.packing",
    question="Do packed documents have the states that they have alone?",
    page=PAGE,
    judge=judge_problems,
)
def packing(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Two documents in one row, kept apart by their boundaries; see `compared` for the frame."""
    bad = "document boundaries are ignored when documents are packed"
    return compared(inputs, "hidden.packing", bad, "packed documents have their own states")


@diagnostic(
    id="hidden.chunks",
    question="Are the states the same just below, at and above the length of a chunk?",
    page=PAGE,
    judge=judge_problems,
)
def chunks(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """63, 64 and 65 tokens, against the same inside a longer text; see `compared` for the frame."""
    bad = "states depend on where a chunk of 64 tokens ends"
    return compared(inputs, "hidden.chunks", bad, "the length of a chunk changes no state")


@diagnostic(
    id="hidden.decode",
    question="Does decoding token by token give the states of one forward?",
    page=PAGE,
    judge=judge_problems,
)
def decode(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Half at once and half token by token, by a cache; see `compared` for the frame."""
    bad = "decoding with a cache computes other states than one forward"
    return compared(inputs, "hidden.decode", bad, "prefill and decoding give the same states")
