"""Whether the captured states are what they claim to be."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic, layer_names
from dflash_diag.results import Judgement, Result, Verdict

PAGE = "03_hidden_state_divergence"
FEWEST, MOST_OF = 10, 0.95
"""Choices that have to be the target's only without the norm, and their share of all that differ,
before states are called normed: near-ties flip both ways."""


def rows_of(inputs: Inputs, id_: str) -> list[dict[str, Any]]:
    """Rows of one check; raises `Skip` with the reason where it was skipped."""
    found = inputs.state_checks()[id_]
    if isinstance(found, str):
        raise Skip(found)
    return list(found)


def judge_problems(result: Result) -> Judgement:
    """Any problem fails."""
    problems = result.params["problems"]
    if problems:
        return Judgement(Verdict.FAIL, problems[0])
    return Judgement(Verdict.PASS, result.params["good"])


def answer(
    frame: Any, problems: list[str], good: str, *, others: str = "", **more: Any
) -> tuple[str, Any, dict[str, Any]]:
    """Headline, frame and fields of a check that lists problems; ``others`` is said of the rest."""
    others = f" (and {len(problems) - 1} more{others})" if len(problems) > 1 else ""
    said = f"{problems[0]}{others}" if problems else good
    params = {"problems": problems, "good": good, **more}
    return f"{said[0].upper()}{said[1:]}.", frame, {"params": params}


@diagnostic(
    id="hidden.rows",
    question="Are there as many hidden states as tokens, all of them numbers?",
    page=PAGE,
    judge=judge_problems,
    version=2,
)
def rows(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Counts of states, of rows of zeros and of rows that are no numbers, and the norm profile.

    Returns
    -------
    tuple
        Frame columns: prompt, layer, n_tokens, n_rows, nan_rows, inf_rows, zero_rows, first_bad
        (row), largest (magnitude), rms, dtype.
    """
    import pandas as pd

    from dflash_diag.state_checks import FLOAT16_MAX

    frame = pd.DataFrame(rows_of(inputs, "hidden.rows"))
    problems = [
        f"the states are integers ({dtype}): rounded or quantised, and not what the target computes"
        for dtype in frame["dtype"].unique()
        if "int" in dtype
    ]
    for row in frame.itertuples(index=False):
        first = None if pd.isna(row.first_bad) else int(row.first_bad)
        where = f"layer {row.layer} of prompt {row.prompt}"
        if row.n_rows != row.n_tokens:
            problems.append(f"{row.n_rows} states for {row.n_tokens} tokens: {where}")
        if row.zero_rows:
            problems.append(f"{_rows(row.zero_rows)} of zeros, the first at {first}: {where}")
        if row.dtype == "float16" and (row.inf_rows or row.nan_rows or row.largest >= FLOAT16_MAX):
            n = row.inf_rows + row.nan_rows
            problems.append(f"float16 overflow (above {FLOAT16_MAX:g}) in {_rows(n)}: {where}")
        elif row.nan_rows or row.inf_rows:
            n = row.nan_rows + row.inf_rows
            problems.append(f"{_rows(n)} with NaN or Inf, the first at {first}: {where}")
    named = layer_names(frame["layer"])
    good = f"every token has its state in {named}, all of them numbers"
    return answer(frame, problems, good)


def _rows(n: int) -> str:
    return f"{n} row" if n == 1 else f"{n} rows"


@diagnostic(
    id="hidden.argmax",
    question="Do head and final norm, on the last layer's states, choose what the target chooses?",
    page=PAGE,
    judge=judge_problems,
    version=2,
)
def argmax(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The last layer's raw states, normed and multiplied by the head, against the target's choice.

    Returns
    -------
    tuple
        Frame columns: prompt, n, n_equal, n_decisive (differ by more than rounding), n_unnormed
        (differ, but not without the norm), largest_margin [logits] among those that differ.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(inputs, "hidden.argmax"))
    n, equal = int(frame["n"].sum()), int(frame["n_equal"].sum())
    decisive, unnormed = int(frame["n_decisive"].sum()), int(frame["n_unnormed"].sum())
    problems = []
    if unnormed >= max(FEWEST, MOST_OF * (n - equal)):
        problems.append(
            f"{unnormed} of {n} choices are the target's only if the final norm is left out: the "
            "last layer's states are normed already"
        )
    elif decisive:
        problems.append(
            f"{decisive} of {n} choices differ by more than rounding: these are not the raw states "
            "of the last layer, or norm and head are not the target's"
        )
    good = f"all {n} choices are the target's"
    if equal < n:
        good = f"{equal} of {n} choices are the target's, the others are near-ties"
    return answer(frame, problems, good)
