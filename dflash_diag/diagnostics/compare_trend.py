"""Whether more training still pays, by the checkpoints so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_diag.compare_words import ends, numbers
from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic, estimate
from dflash_diag.results import Judgement, Result, Verdict

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("kind", "line", "name", "step", "value", "lo", "hi")
ANOTHER_NUMBER = (
    "What training logged is another number, over all anchors of its own texts: compare the shape "
    "of the lines, not their height."
)
CHECKPOINT, LOGGED, LEVEL = "checkpoint", "log", "reference"


def judge(result: Result) -> Judgement:
    """By the last two steps: PASS where it gained, WARN where it did not."""
    last = result.params["changes"][0]
    if last["verdict"] == "yes":
        return Judgement(Verdict.PASS, f"{last['a']} is better than {last['b']}")
    if last["verdict"] == "no":
        return Judgement(Verdict.WARN, f"{last['a']} is not better than {last['b']}")
    why = f"{last['a']} against {last['b']}: it {last['verdict']}"
    return Judgement(Verdict.INCONCLUSIVE, why)


@diagnostic(
    id="compare.trend",
    question="Does more training still gain accepted tokens?",
    page="08_compare",
    judge=judge,
)
def compare_trend(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Walked tau of every checkpoint of the training, the last paired with those before it.

    Returns
    -------
    tuple
        Frame columns: kind (checkpoint, reference, log), line (the training, or the logged number),
        name, step, value, lo, hi [tokens a round; the log's own unit].
    """
    found = inputs.compared()
    line = found["trend"]
    if line is None:
        raise Skip(f"{found['no_trend']} A trend takes two steps or more (--beside, --history).")
    frame = frame_of(line, [one for one in found["drafters"] if one["reference"]])
    changes = line["changes"]
    said = " ".join(
        f"From step {one['steps'][0]} to {one['steps'][1]}: {numbers(one)}." for one in changes
    )
    keys = {"before": "since the step before", "first": "since the first step"}
    estimates = {
        keys[one["since"]]: estimate(one["delta_tau"], one["n_prompts"], "tokens")
        for one in changes
    }
    steps = [one["step"] for one in line["points"] if one["line"] == line["line"]]
    params = {
        "n_prompts": changes[0]["n_prompts"],
        "changes": changes,
        "own": line["line"],
        "log_unit": (line["log"] or {"unit": "tokens"})["unit"],
        "finding": f"Step {steps[-1]} against step {steps[-2]}: {changes[0]['verdict']}",
    }
    notes = [*line["left_out"], *_about_log(line["log"])]
    return said, frame, {"estimates": estimates, "params": params, "notes": notes}


def frame_of(line: Mapping[str, Any], levels: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """What the plot of a trend shows.

    Parameters
    ----------
    line
        What `dflash_diag.trend.trend` returns.
    levels
        Name and tau of drafters that have no step, the reference.
    """
    import pandas as pd

    rows = [
        (CHECKPOINT, one["line"], one["name"], one["step"], *ends(one["tau"]))
        for one in line["points"]
    ]
    rows += [(LEVEL, LEVEL, one["name"], None, *ends(one["tau"])) for one in levels]
    log = line["log"] or {"lines": [], "unit": "tokens"}
    rows += [
        (LOGGED, one["name"], one["name"], step, value, None, None)
        for one in log["lines"]
        for step, value in zip(one["steps"], one["values"], strict=True)
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    return frame.astype({"step": "Int64", "value": float, "lo": float, "hi": float})


def _about_log(log: dict[str, Any] | None) -> list[str]:
    if log is None:
        return ["No training log was given (--training-log)."]
    if not log["lines"]:
        return [f"{log['file']} holds no number that could be drawn beside."]
    return [f"The log is {log['file']}. {ANOTHER_NUMBER}"]
