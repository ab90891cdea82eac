"""What the training step does, if one was given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

if TYPE_CHECKING:
    from dflash_diag.training_audit import Audit

NO_STEP = (
    "No training step was given (--step FILE.py:FUNC). A few lines around the trainer are enough: "
    "def step(tokens, states, anchors, loss_mask, data_seed, noise_seed), which returns loss, "
    "logits, labels, weights, and target_logits or None."
)


def verdict(
    faults: list[dict[str, Any]], misreported: list[dict[str, Any]], n_asked: int
) -> Judgement:
    """A fault of the step fails; a metric that is not what it claims to be warns.

    Parameters
    ----------
    n_asked
        Properties that have an answer.
    """
    if faults:
        return Judgement(Verdict.FAIL, f"found: {', '.join(one['id'] for one in faults)}")
    if misreported:
        names = ", ".join(one["id"].removeprefix("metric.reported.") for one in misreported)
        return Judgement(Verdict.WARN, f"metrics that are not what they claim: {names}")
    return Judgement(Verdict.PASS, f"{n_asked} properties, none of them wrong")


def judge(result: Result) -> Judgement:
    """See `verdict`."""
    p = result.params
    return verdict(p["faults"], p["misreported"], p["n_asked"])


@diagnostic(
    id="training.audit",
    question="Does the training step train what will be served?",
    page="07_training_audit",
    judge=judge,
)
def audit(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Every property of the training step.

    Returns
    -------
    tuple
        Frame columns: property, status, found, expected, evidence, remedy. ``params["facts"]`` has
        the weight of each slot and the influence of rows, layers and blocks.
    """
    found = inputs.audit()
    asked = summary(found)
    trial = found.facts["trial"]
    said = sentence(found)
    notes = [
        (
            f"Tried on {trial['text']} ({trial['n_tokens']} tokens, {len(trial['anchors'])} "
            f"blocks, {trial['calls']} calls); the source of the step was not read."
        ),
        *(f"{one.id}: {one.evidence} {one.remedy}".strip() for one in found.faults),
        *found.notes,
    ]
    finding = asked["faults"][0]["id"] if asked["faults"] else "no fault"
    return (
        f"{trial['step']}: {said}",
        found.frame,
        {
            "params": {
                **asked,
                "facts": dict(found.facts),
                "finding": f"{trial['step']}: {finding}",
            },
            "notes": notes,
        },
    )


def summary(found: Audit) -> dict[str, Any]:
    """What is wrong, and how much was asked."""

    def rows(properties: list[Any]) -> list[dict[str, Any]]:
        keys = ("id", "evidence", "remedy")
        return [{key: getattr(one, key) for key in keys} for one in properties]

    asked = sum(one.status not in ("not_tested", "not_identifiable") for one in found)
    return {
        "faults": rows(found.faults),
        "misreported": rows(found.misreported),
        "n_asked": asked,
    }


def sentence(found: Audit) -> str:
    """The audit in one sentence."""
    loss = next((one.found for one in found if one.id == "loss.form" and one.found), None)
    trains = "its loss is not known" if loss is None else f"its loss is {loss}"
    if not found.faults:
        asked = sum(one.status in ("excluded", "measured") for one in found)
        return f"nothing is wrong in {asked} properties; {trains}."
    first = found.faults[0]
    why = first.found if first.id == "step.outputs" else _without_stop(first.evidence)
    more = [one.id for one in found.faults[1:]]
    others = f" Also found: {', '.join(more)}." if more else ""
    return f"{first.id}: {why}; {trains}.{others}"


def _without_stop(text: str) -> str:
    """The first sentence of an evidence, without its full stop."""
    return text.split(". ")[0].removesuffix(".")
