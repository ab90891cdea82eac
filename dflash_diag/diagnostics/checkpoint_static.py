"""What a checkpoint's files say without being scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.diagnostics.checkpoint_tensors import kind_of
from dflash_diag.results import Judgement, Result, Verdict

COLUMNS = ("check", "status", "found", "expected", "cause")


def judge(result: Result) -> Judgement:
    """What breaks the reading fails; what costs some stack acceptance warns; a note does neither.

    Acceptance is measured elsewhere: a finding says that files are wrong or read in two ways, not
    how much it costs.
    """
    fail, warn = len(result.params["fail"]), len(result.params["warn"])
    if fail:
        return Judgement(Verdict.FAIL, f"findings that break the reading: {fail}")
    if warn:
        return Judgement(Verdict.WARN, f"findings that cost acceptance in some stack: {warn}")
    n = result.params["n_checks"]
    return Judgement(Verdict.PASS, f"{n} checks found nothing; notes do not count")


@diagnostic(
    id="checkpoint.static",
    question="What is wrong with these files, whatever the drafter scores?",
    page="01_checkpoint",
    judge=judge,
)
def static(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every static check of the judged drafter.

    Returns
    -------
    tuple
        Frame columns: check, status (ok, finding, note, not testable), found, expected, cause (id
        in the catalogue, empty where nothing was found). ``params["effects"]`` has the effect of
        each tensor, and ``params["measured"]`` what else the checks measured.
    """
    import pandas as pd

    role = inputs.roles[0]
    name, checks = inputs.name(role), inputs.static(role)
    rows = [row for one in checks for row in _rows(one)]
    found = [finding for one in checks for finding in one["findings"]]
    by = {s: [one for one in found if one["severity"] == s] for s in ("fail", "warn", "note")}
    untested = sum(row[1] == "not testable" for row in rows)
    counted = by["fail"] + by["warn"]
    if counted:
        others = f" {len(counted) - 1} more below." if len(counted) > 1 else ""
        headline = f"{name}: {counted[0]['text']}{others}"
    else:
        headline = f"{name}: {len(checks)} checks of the files found nothing wrong."
    notes = [one["text"] for one in by["note"]]
    if untested:
        notes.append(f"{untested} checks lacked something to look at; the table says what.")
    measured = {one["check"]: one["measured"] for one in checks if one["measured"]}
    effects = measured.get("effect", {}).get("effects", {})
    return (
        headline,
        pd.DataFrame(rows, columns=list(COLUMNS)),
        {
            "params": {
                **by,
                "n_checks": len(checks),
                "effects": [
                    {"tensor": tensor, "kind": kind, "layer": layer, "effect": effect}
                    for tensor, effect in effects.items()
                    for kind, layer in [kind_of(tensor)]
                ],
                "measured": {k: v for k, v in measured.items() if k != "effect"},
                "finding": f"{name}: what the drafter loses when one tensor is silenced",
            },
            "notes": notes,
        },
    )


def _rows(check: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """One row a finding and a part that was not testable; or one that says all is well."""
    name, expected = check["check"], check["expected"]
    counted = False
    for one in check["findings"]:
        status = "note" if one["severity"] == "note" else "finding"
        counted |= status == "finding"
        yield name, status, one["text"], expected, one["cause"]
    for why in check["untested"]:
        yield name, "not testable", f"{why[:1].upper()}{why[1:]}.", expected, ""
    if check["found"] and not counted:
        yield name, "ok", f"{check['found'][:1].upper()}{check['found'][1:]}.", expected, ""
