"""The training number measured again: same texts, anchors, mask and count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic, estimate, interval
from dflash_diag.results import Judgement, Result, Verdict

USUAL = ("accuracy uniform", "streak uniform", "topk_oracle@4 uniform", "topk_oracle@8 uniform")
"""What training dashboards show, whether or not it was claimed here."""
COLUMNS = ["split", "definition", "name", "logged", "logged_lo", "logged_hi"]
COLUMNS += ["replayed", "lo", "hi", "agrees"]


def judge(result: Result) -> Judgement:
    """A claimed number agrees where a definition that can be it reaches the last logged values.

    Intervals are widened (Bonferroni) for the numbers that are claimed together.
    """
    apart, n = result.params["apart"], result.params["n_claims"]
    if not n:
        why = "no training number was claimed (--training-log, --claim)"
        return Judgement(Verdict.INCONCLUSIVE, why)
    if apart:
        return Judgement(Verdict.WARN, f"{', '.join(apart)} cannot be measured again")
    return Judgement(Verdict.PASS, f"all {n} claimed numbers are reached")


@diagnostic(
    id="training.replay",
    question="Does measuring the training number again give the same number?",
    page="06_train_vs_eval",
    judge=judge,
)
def replay(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Stored training texts through the target once, then scored as the trainer scores them.

    Returns
    -------
    tuple
        Frame columns: split, definition, name (of the claim, or empty), logged with logged_lo and
        logged_hi (of the log's last lines), replayed, lo, hi [tokens, or share of slots], agrees
        (None where nothing was claimed).
    """
    import pandas as pd

    measured = inputs.replay()
    splits = measured["splits"]
    claims = [one for one in measured["claims"] if one["split"] is not None]
    # So many numbers are looked at that some would lie outside of a 95 % interval by chance.
    wider = NormalDist().inv_cdf(1 - 0.025 / max(1, len(claims))) / NormalDist().inv_cdf(0.975)
    rows, apart, judged = [], [], 0
    for claim in claims:
        numbers = splits[claim["split"]]["numbers"]
        fits = [name for name in claim["fits"] if name in numbers]
        agrees = [_within(claim["spread"], numbers[name], wider) for name in fits]
        rows += [
            _row(claim["split"], name, numbers[name], claim, agree)
            for name, agree in zip(fits, agrees, strict=True)
        ]
        judged += bool(fits)
        if fits and not any(agrees):
            apart.append(claim["name"])
    known = {(row["split"], row["definition"]) for row in rows}
    rows += [
        _row(split, name, found["numbers"][name])
        for split, found in splits.items()
        for name in USUAL
        if (split, name) not in known and name in found["numbers"]
    ]
    frame = pd.DataFrame(rows, columns=COLUMNS)
    first = next(iter(splits))
    streak, n = splits[first]["numbers"]["streak uniform"], splits[first]["n_texts"]
    said = f"Measured again on {n} texts ({first}), the streak is {interval(streak)}"
    if judged:
        said += f"; {judged - len(apart)} of {judged} claimed numbers agree"
    estimates = {
        f"streak {name}": estimate(one["numbers"]["streak uniform"], one["n_texts"], "tokens")
        for name, one in splits.items()
    }
    params = {
        "apart": apart,
        "n_claims": judged,
        "n_prompts": n,
        "reading": measured["reading"],
        "finding": said,
    }
    return f"{said}.", frame, {"estimates": estimates, "params": params, "notes": _notes(measured)}


def _within(spread: Sequence[float], numbers: Mapping[str, Any], wider: float) -> bool:
    """Whether a log's last values reach into an interval that is so many times as wide."""
    middle, lo, hi = (numbers[end] for end in ("value", "lo", "hi"))
    if lo is None:
        return False
    below, above = wider * (middle - lo), wider * (hi - middle)
    return bool(spread[1] >= middle - below and spread[0] <= middle + above)


def _row(
    split: str,
    name: str,
    numbers: Mapping[str, Any],
    claim: Mapping[str, Any] | None = None,
    agrees: bool | None = None,
) -> dict[str, Any]:
    said: dict[str, Any] = {"name": ""}
    if claim:
        ends = dict(zip(("logged_lo", "logged_hi"), claim["spread"], strict=True))
        said = {"name": claim["name"], "logged": claim["value"], **ends}
    found = {"replayed": numbers["value"], "lo": numbers["lo"], "hi": numbers["hi"]}
    return {"split": split, "definition": name, **said, **found, "agrees": agrees}


def _notes(measured: Mapping[str, Any]) -> list[str]:
    counts = "; ".join(
        f"{name}: {one['n_anchors']} anchors in {one['n_texts']} texts"
        for name, one in measured["splits"].items()
    )
    reading = ", ".join(f"{k}={v}" for k, v in measured["reading"].items())
    how = f"Read as fits the weights best ({reading})" if reading else "Read as declared"
    noise = f", with noise of {measured['noise']:g} on the states" if measured["noise"] else ""
    labels = "the target's own choices" if measured["labels"] == "target" else "the text's tokens"
    return [
        f"{counts}. The anchors are {measured['anchors']}, labels are {labels}.",
        f"{how}{noise}, in {measured['dtype']}.",
    ]
