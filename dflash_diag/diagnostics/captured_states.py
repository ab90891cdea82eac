"""Whether the captured states are what they claim to be."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

PAGE = "03_hidden_state_divergence"


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
    frame: Any, problems: list[str], good: str, **more: Any
) -> tuple[str, Any, dict[str, Any]]:
    """Headline, frame and fields of a check that lists problems."""
    others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    said = f"{problems[0]}{others}" if problems else good
    params = {"problems": problems, "good": good, **more}
    return f"{said[0].upper()}{said[1:]}.", frame, {"params": params}


@diagnostic(
    id="hidden.rows",
    question="Are there as many hidden states as tokens, all of them numbers?",
    page=PAGE,
    judge=judge_problems,
)
def rows(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Counts of states, of rows of zeros and of rows that are no numbers, and the norm profile.

    Returns
    -------
    tuple
        Frame columns: prompt, layer, n_tokens, n_rows, nan_rows, inf_rows, zero_rows, first_bad
        (row), largest (magnitude), rms, float16.
    """
    import pandas as pd

    from dflash_diag.state_checks import FLOAT16_MAX

    frame = pd.DataFrame(rows_of(inputs, "hidden.rows"))
    problems = []
    for row in frame.itertuples(index=False):
        first = None if pd.isna(row.first_bad) else int(row.first_bad)
        where = f"layer {row.layer} of prompt {row.prompt}"
        if row.n_rows != row.n_tokens:
            problems.append(f"{row.n_rows} states for {row.n_tokens} tokens: {where}")
        if row.zero_rows:
            problems.append(f"{row.zero_rows} rows of zeros, the first at {first}: {where}")
        if row.float16 and (row.inf_rows or row.nan_rows or row.largest >= FLOAT16_MAX):
            n = row.inf_rows + row.nan_rows
            problems.append(f"float16 overflow (above {FLOAT16_MAX:g}) in {n} rows: {where}")
        elif row.nan_rows or row.inf_rows:
            n = row.nan_rows + row.inf_rows
            problems.append(f"{n} rows hold NaN or Inf, the first at {first}: {where}")
    good = (
        f"every token has its state in all {frame['layer'].nunique()} layers, all of them numbers"
    )
    return answer(frame, problems, good)


@diagnostic(
    id="hidden.argmax",
    question="Do head and final norm, on the last layer's states, choose what the target chooses?",
    page=PAGE,
    judge=judge_problems,
)
def argmax(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The last layer's raw states, normed and multiplied by the head, against the target's choice.

    Returns
    -------
    tuple
        Frame columns: prompt, n, n_equal, n_decisive (differ by more than rounding),
        largest_margin [logits] among those that differ.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(inputs, "hidden.argmax"))
    n, equal = int(frame["n"].sum()), int(frame["n_equal"].sum())
    decisive = int(frame["n_decisive"].sum())
    problems = []
    if decisive:
        problems.append(
            f"{decisive} of {n} choices differ by more than rounding: these are not the raw states "
            "of the last layer, or norm and head are not the target's"
        )
    good = f"all {n} choices are the target's"
    if equal < n:
        good = f"{equal} of {n} choices are the target's, the others are near-ties"
    return answer(frame, problems, good)


@diagnostic(
    id="hidden.identity",
    question="Are the captured states those of the layers and rows that they claim?",
    page=PAGE,
    judge=judge_problems,
)
def identity(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The captured states beside everything that the live target computes nearby.

    Returns
    -------
    tuple
        Frame columns: prompt, layer, kind, rel_rms (against what they claim), explained (against
        what they are), what (in words), floor.
    """
    import pandas as pd

    frame = pd.DataFrame(rows_of(inputs, "hidden.identity"))
    wrong = frame[frame["kind"] != "right"]
    problems = [
        f"the states kept as layer {layer} are {what} (on {len(group)} of "
        f"{frame['prompt'].nunique()} prompts)"
        for (layer, what), group in wrong.groupby(["layer", "what"], sort=False)
    ]
    n = frame["layer"].nunique()
    good = f"the states of all {n} layers are what the target computes, up to rounding"
    return answer(frame, problems, good)
