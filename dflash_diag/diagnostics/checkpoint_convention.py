"""How the weights are read, where each answer comes from, and how sure that makes it."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

DECISIVE = ("block_size", "layer_ids", "mask_token_id", "rope_theta")
"""Fields without which no stack reads a drafter the same way; public cases of each gone wrong:
SpecForge 249 and speculators 649 (theta), vLLM 40898 and 42704 (layer ids)."""
MEANING = {
    "block_size": "slots in a block, the anchor's included",
    "layer_ids": "tapped layers, in the order in which fc reads them",
    "layer_id_rule": "whether id i is a layer's output or its input",
    "last_layer_normed": "whether the last layer is read after the final norm",
    "context_bound": "strict: target states below the anchor; inclusive: also the anchor's own",
    "in_block": "which slots of its own block a slot sees, by layer",
    "other_blocks": "other blocks of the same pass that a slot sees; a server has none",
    "window": "sliding window in tokens, by layer",
    "window_rule": "what the window is counted from",
    "label_layout": "same: slot k predicts position a+k; next: a+k+1",
    "label_offset": "added to the position that a slot predicts",
    "position_offset": "added to the positions of the block",
    "rope_theta": "base of the rotary embedding",
    "rotary_width": "rotated dimensions of a head",
    "rope_interleaved": "how rotated dimensions are paired",
    "rope_scaling": "scaling of the rotary embedding",
    "mask_token_id": "token that fills the slots",
    "feature_norm": "how often a norm follows fc",
    "final_norm": "how often a norm precedes the head",
    "norm_style": "norms scale by w, or by 1 + w",
    "embedding_scale": "factor on the block's embeddings",
    "embedding": "whose embedding is used",
    "head": "whose head is used",
    "logit_scale": "factor on the logits",
    "softcap": "soft cap of the logits",
    "vocabulary_map": "how draft ids become target ids",
    "proposal": "step from hidden states to proposed tokens",
}


def judge(result: Result) -> Judgement:
    """Every decisive field has to be stated somewhere."""
    guessed = result.params["guessed"]
    if guessed:
        why = f"left to a default: {', '.join(guessed)}"
        return Judgement(Verdict.WARN, why)
    return Judgement(Verdict.PASS, f"{', '.join(DECISIVE)} are all stated in the files")


@diagnostic(
    id="checkpoint.convention",
    question="How are these weights read, and who says so?",
    page="01_checkpoint",
    judge=judge,
)
def convention(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The resolved convention, field by field.

    Returns
    -------
    tuple
        Frame columns: field, value (text), confidence, source, meaning.
    """
    import pandas as pd

    from dflash_diag.checkpoints import detect_stack

    role = inputs.roles[0]
    reading, stack = inputs.convention(role), detect_stack(inputs.checkpoint(role))
    fields = reading.to_json()
    rows = [
        {
            "field": field,
            "value": _text(entry["value"]),
            "confidence": entry["confidence"],
            "source": entry["source"] or "—",
            "meaning": MEANING.get(field, ""),
        }
        for field, entry in fields.items()
    ]
    guessed = [field for field in DECISIVE if fields[field]["confidence"] == "default"]
    changed = [field for field, entry in fields.items() if entry["confidence"] == "override"]
    stated = sum(entry["confidence"] in ("declared", "implied") for entry in fields.values())
    sight = "sees target states strictly below its anchor"
    if reading.context_bound == "inclusive":
        sight = "also sees the target state of its anchor, which serving does not have"
    headline = (
        f"{inputs.name(role)}, read as {stack.title}'s: {stated} of {len(rows)} answers are stated "
        f"or implied by the files; a block of {reading.block_size} {sight}."
    )
    return (
        headline,
        pd.DataFrame(rows),
        {
            "params": {
                "guessed": guessed,
                "block_size": reading.block_size,
                "context_bound": reading.context_bound,
                "in_block": reading.in_block[0],
                "label_layout": reading.label_layout,
                "finding": f"A block of {reading.block_size}: what each slot sees and predicts",
            },
            "notes": [f"Overridden by hand: {', '.join(changed)}."] if changed else [],
        },
    )


def _text(value: Any) -> str:
    if isinstance(value, list):
        same = len(set(map(str, value))) == 1 and len(value) > 1
        return f"{value[0]} (all {len(value)})" if same else ", ".join(map(str, value))
    return "none" if value is None else str(value)
