"""Whether the code lets a proposal depend on what its convention says, and on nothing else."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic
from dflash_diag.results import Judgement, Result, Verdict


def judge(result: Result) -> Judgement:
    """Every difference from the rule, and every check that differs, fails."""
    p = result.params
    if p["found"]:
        causes = ", ".join(one["cause"] for one in p["found"])
        return Judgement(Verdict.FAIL, f"found: {causes}")
    if p["differing"]:
        return Judgement(Verdict.FAIL, f"checks that differ: {', '.join(p['differing'])}")
    n = len(p["excluded"])
    return Judgement(
        Verdict.PASS, f"the code follows a rule that can be served; {n} causes are excluded"
    )


@diagnostic(
    id="mask.influence",
    question="Which states and slots does a proposal depend on as the code runs?",
    page="05_attention_mask",
    judge=judge,
)
def influence(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Influence of context rows, own slots and other blocks on every slot, against the rule.

    Returns
    -------
    tuple
        Frame columns: those of `dflash_diag.influence.Influence.frame`.
    """
    if not inputs.roles:
        raise Skip("No drafter was given, so there are no proposals to look at (--drafter).")
    role = inputs.roles[0]
    name, seen = inputs.name(role), inputs.influence(role)
    facts = seen.facts
    checked = [one for one in seen.checks if one["status"] == "ok"]
    if seen.clean:
        headline = (
            f"{name}: each slot depends on the states and slots that its convention shows, and on "
            f"nothing else; {len(checked)} checks of its context hold."
        )
        finding = f"{name}: each slot depends on what the rule shows, and on nothing else"
    else:
        wrong = [f"{one['cause']} ({one['evidence']})" for one in seen.found]
        wrong += [f"{one['reason']}" for one in seen.differing if not one["cause"]]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        headline = f"{name}: {wrong[0]}{more}."
        named = seen.found[0]["cause"] if seen.found else seen.differing[0]["check"]
        finding = f"{name}: {named}{more}"
    moved = (
        f"Slots move by {facts['repeated']:.1g} from call to call; rounding would explain up to "
        f"{facts['rounding']:.1g}."
    )
    notes = [
        "This says what the code does; what the weights were trained for is another question.",
        moved,
    ]
    notes += [f"{one['cause']}: {one['evidence']}." for one in seen.found[1:]]
    notes += [
        f"Not tested: {one['cause']} ({one['evidence']})."
        for one in seen.causes
        if one["status"] == "not_tested"
    ]
    notes += [
        f"{one['question']} Not testable: {one['reason']}."
        for one in seen.checks
        if one["status"] == "not testable"
    ]
    return (
        headline,
        seen.frame,
        {
            "params": {
                "found": seen.found,
                "differing": [one["check"] for one in seen.differing],
                "excluded": [one["cause"] for one in seen.causes if one["status"] == "excluded"],
                "not_tested": [o["cause"] for o in seen.causes if o["status"] == "not_tested"],
                "checks": seen.checks,
                "facts": dict(facts),
                "finding": finding,
            },
            "notes": [*notes, *seen.notes],
        },
    )
