"""Which module inside a layer is the first to differ by more than rounding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_diag.diagnostics.base import NOTHING, Inputs, Skip, diagnostic, relative
from dflash_diag.results import Judgement, Result, Verdict


def judge(result: Result) -> Judgement:
    """A module above twice its noise floor warns: what it costs is judged elsewhere."""
    for name, first in result.params["first_above"].items():
        if first is not None:
            why = f"{name}: first above its noise floor is {place(first)}, {first['origin']} there"
            return Judgement(Verdict.WARN, why)
    return Judgement(Verdict.PASS, "no module differs by more than twice its noise floor")


@diagnostic(
    id="hidden.modules",
    question="Which module is the first to differ by more than rounding?",
    page="03_hidden_state_divergence",
    judge=judge,
    version=3,
)
def modules(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every module in execution order, as errors add up and started from the other side's input.

    Returns
    -------
    tuple
        Frame columns: side, step (of execution), layer, module, the numbers of
        `dflash_diag.divergence.Deviation`, floor, times_floor, above, and local_rel_rms,
        local_floor, local_times_floor of the error that the layer makes by itself.
    """
    import pandas as pd

    from dflash_diag.divergence import first_above

    if not inputs.sides():
        raise Skip(NOTHING)
    rows: list[dict[str, Any]] = []
    first: dict[str, dict[str, Any] | None] = {}
    notes = []
    for name in inputs.sides():
        found = inputs.divergence(name)
        notes.append(f"{name}. {found['modules_note']}")
        if found["modules"]:
            first[name] = first_above(found["modules"])
            rows += [{"side": name, "step": i, **r} for i, r in enumerate(found["modules"])]
    if not rows:
        raise Skip(" ".join(notes))
    said = "; ".join(_words(name, one) for name, one in first.items())
    return (
        f"{said}.",
        pd.DataFrame(rows),
        {"params": {"first_above": first, "sides": list(inputs.sides())}, "notes": notes},
    )


def place(row: Mapping[str, Any]) -> str:
    """A module in words."""
    if row["layer"] < 0:
        return "the embedding"
    what = "the output" if row["module"] == "output" else row["module"]
    return f"{what} of layer {row['layer']}"


def _words(name: str, first: Mapping[str, Any] | None) -> str:
    if first is None:
        return f"{name}: every module is within its noise floor"
    before = first["input"]
    entered = (
        "" if before is None else f"; {place(before)}, before it, {relative(before['rel_rms'])}"
    )
    return (
        f"{name}: the first above its noise floor is {place(first)} "
        f"({relative(first['rel_rms'])}, floor {relative(first['floor'])}{entered}), "
        f"{first['origin']} there"
    )
