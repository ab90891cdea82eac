"""Which stack a checkpoint comes from, and what its files leave to whoever reads them."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

SHOWN = ("layer_ids", "layer_id_rule", "last_layer_normed", "block_size", "mask_token_id",
         "in_block", "window", "window_rule", "label_layout", "rope_theta", "rotary_width",
         "embedding", "head", "vocabulary_map")  # fmt: skip
"""Fields on which stacks disagree."""


def judge(result: Result) -> Judgement:
    """Two keys that give one field two values are worth a warning; the rest is information."""
    found = result.params["contradictions"]
    if found:
        why = f"{len(found)} contradiction{'s' * (len(found) != 1)} in the files: {found[0]}"
        return Judgement(Verdict.WARN, why)
    return Judgement(Verdict.PASS, "no two keys of the files give a field two values")


@diagnostic(
    id="checkpoint.stack",
    question="Which stack wrote this checkpoint, and what do its files leave open?",
    page="01_checkpoint",
    judge=judge,
)
def stack(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Signs of the stack, contradictions, absent keys, and what readers take differently.

    Returns
    -------
    tuple
        Frame columns: kind, about (a stack or a field), here, elsewhere, who.
    """
    import pandas as pd

    from dflash_diag.checkpoints import absent_keys, ambiguities, contradictions, detect_stack

    role = inputs.roles[0]
    checkpoint, reading = inputs.checkpoint(role), inputs.convention(role)
    found = detect_stack(checkpoint)
    by_hand = {n for n, source in reading.sources.items() if source.confidence == "override"}
    disagree = [one for one in contradictions(checkpoint) if one.field not in by_hand]
    absent = [one for one in absent_keys(checkpoint) if one.field not in by_hand]
    unclear = [one for one in ambiguities(checkpoint) if one.field not in by_hand]
    rows = [("sign", found.title, sign, "", "") for sign in found.evidence]
    for sign in found.against:
        title, _, text = sign.partition(": ")
        rows.append(("sign of another stack", title, text, "", ""))
    rows += [
        ("contradiction", one.field, _said(one.used, one.used_value),
         _said(one.other, one.other_value), "")
        for one in disagree
    ]  # fmt: skip
    rows += [
        ("absent key", one.field, f"no {one.key}: {_text(one.used)}", what, ", ".join(who))
        for one in absent
        for what, who in one.others.items()
    ]
    rows += [
        ("read differently", one.field, _text(one.used), _text(one.other), one.readers)
        for one in unclear
    ]
    left = [f"{len(part)} {name}{'s' * (len(part) != 1)}"
            for part, name in ((disagree, "contradiction"), (absent, "absent key"),
                               (unclear, "ambiguous statement")) if part]  # fmt: skip
    headline = (
        f"{inputs.name(role)} is read as {found.title}'s ({found.evidence[0]}); "
        f"{', '.join(left) if left else 'its files leave nothing open'}."
    )
    return (
        headline,
        pd.DataFrame(rows, columns=["kind", "about", "here", "elsewhere", "who"]),
        {
            "params": {
                "stack": found.name,
                "contradictions": [str(one) for one in disagree],
                "matrix": _matrix(checkpoint, found.title),
                "finding": f"These files, read as {found.title}'s and as others would",
            },
            "notes": [f"{one.field}: {one.why}." for one in unclear],
        },
    )


def _matrix(checkpoint: Any, chosen: str) -> dict[str, dict[str, str]]:
    """By field and stack what each stack's reader makes of the files, where not all agree."""
    from dflash_diag.checkpoints import READERS, as_read_by

    order = sorted(READERS.values(), key=lambda one: one.title != chosen)
    table = {
        field: {one.title: _text(as_read_by(checkpoint, one, field)) for one in order}
        for field in SHOWN
    }
    return {field: row for field, row in table.items() if len(set(row.values())) > 1}


def _said(key: str, value: Any) -> str:
    return f"{key}: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)
