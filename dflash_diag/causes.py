"""The catalogue of causes: what can be wrong with a drafter, and whether serving could follow it.

Ids are a contract with whoever reads the JSON; entries are added, never renamed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from dflash_diag.stats import Estimate

Kind = Literal["reading_fault", "training_fault", "damage", "ambiguous", "explanation"]


@dataclass(frozen=True)
class Cause:
    """One entry of the catalogue."""

    id: str
    kind: Kind
    """``reading_fault``: the weights are right under another reading. ``training_fault``: they
    learned the wrong thing. ``damage``: tensors or states are wrong. ``ambiguous``: the weights
    cannot tell. ``explanation``: it explains numbers and is no fault."""
    recoverable: bool | None
    """Whether a server could follow the reading that fits the weights; None if unknown."""
    means: str
    """What it is, as part of a sentence: "weights that …"."""
    remedy: str


HARMLESS = 0.05
"""Tokens a round: an effect that is certainly smaller counts as none (the project's design)."""
Status = Literal["found", "excluded", "not_identifiable", "not_tested"]


def _catalogue(*rows: tuple[str, Kind, bool | None, str, str]) -> dict[str, Cause]:
    return {row[0]: Cause(*row) for row in rows}


_LEAK = "Retrain with the mask of the serving rule; no reading that a server can follow helps."
_STRICT = (
    "Retrain with a strict bound (context rows below the anchor): the state of the anchor does not "
    "exist yet when a server drafts."
)
_LABELS = (
    "Either the labels of training were shifted (retrain), or the layout is declared wrongly "
    "(next-token slots read as same-token ones): the training step decides."
)

CAUSES = _catalogue(
    (
        "checkpoint.missing_or_unused_tensors",
        "damage",
        False,
        "tensors are missing, or never used",
        "Export the checkpoint again; compare its tensor names with the trainer's.",
    ),
    (
        "checkpoint.wrong_target",
        "damage",
        False,
        "it belongs to another target, or its weights are damaged or hardly trained",
        "Use the target (and its revision) that it was trained on; look at the checkpoint page.",
    ),
    (
        "checkpoint.config_contradiction",
        "reading_fault",
        True,
        "keys of the configuration contradict each other",
        "Keep the one key that the trainer meant, and delete the other.",
    ),
    (
        "layers.offset",
        "reading_fault",
        True,
        "the tapped layers are off by a constant",
        "Correct target_layer_ids, or the rule by which the server reads them.",
    ),
    (
        "layers.order",
        "reading_fault",
        True,
        "the tapped layers are concatenated in another order",
        "List target_layer_ids in the order of training, in a server that keeps it.",
    ),
    (
        "layers.missing_or_default",
        "reading_fault",
        True,
        "other layers were tapped than those that a default rule picks",
        "Write target_layer_ids into the configuration.",
    ),
    (
        "layers.last_layer_in_fc",
        "reading_fault",
        None,
        "the target's last layer is among the inputs of fc",
        "Train with earlier layers; some servers cannot capture the last one.",
    ),
    (
        "layers.last_layer_norm",
        "reading_fault",
        True,
        "the last layer was read on the other side of the final norm",
        "Capture the last layer where the trainer did.",
    ),
    (
        "mask.anchor_included",
        "training_fault",
        False,
        "the weights were trained with the anchor's own state inside the context",
        _STRICT,
    ),
    (
        "mask.cross_block_leak",
        "training_fault",
        False,
        "the weights were trained with the blocks of other anchors in sight",
        _LEAK,
    ),
    (
        "mask.future_included",
        "damage",
        False,
        "the code that drafts reads states from behind the anchor",
        "Mend the mask of that code; a server has no such states.",
    ),
    (
        "mask.rows_hidden",
        "damage",
        False,
        "the code that drafts leaves out states that the rule shows",
        "Mend the mask, or the cropping of the drafter's cache.",
    ),
    (
        "mask.block_causality",
        "reading_fault",
        True,
        "slots see the slots behind them, and were not trained to (or the other way round)",
        "Set is_causal as in training, in a server that reads it.",
    ),
    (
        "mask.window",
        "reading_fault",
        True,
        "the sliding window is not the one of training",
        "Declare layer_types, sliding_window and use_sliding_window as in training.",
    ),
    (
        "position.block_offset",
        "reading_fault",
        True,
        "the positions of the block are off by a constant against the context's",
        "Put slot 0 where training put it; or retrain with slot 0 at the anchor's own position.",
    ),
    (
        "position.rebased",
        "reading_fault",
        True,
        "positions are counted anew in the middle of a text",
        "Count positions from the start of each document, in training and in serving.",
    ),
    (
        "label.shift",
        "ambiguous",
        None,
        "the slots predict another token than their layout says",
        _LABELS,
    ),
    (
        "rope.theta",
        "reading_fault",
        True,
        "the base of the rotary embedding is not the one of training",
        "Write the trained rope_theta where the server looks for it.",
    ),
    (
        "rope.rotary_width",
        "reading_fault",
        True,
        "another share of each head was rotated in training",
        "Delete partial_rotary_factor, or set it to the share that was rotated in training.",
    ),
    (
        "rope.interleaving",
        "reading_fault",
        True,
        "rotated dimensions are paired in another way",
        "Set is_neox_style as in training.",
    ),
    (
        "rope.scaling",
        "reading_fault",
        True,
        "the rotary embedding is scaled, and was not in training (or the other way round)",
        "Declare the rope_scaling of training.",
    ),
    (
        "mask_token.id",
        "reading_fault",
        True,
        "another token filled the slots in training",
        "Write the mask_token_id of training into the configuration.",
    ),
    (
        "embedding.scale",
        "reading_fault",
        True,
        "the embeddings of the block are scaled differently",
        "Scale them as the target's own embedding module does in training.",
    ),
    (
        "head.tying_or_vocab",
        "damage",
        False,
        "the head, or its vocabulary, is not the one of training",
        "Export the head that was trained against, or none; check tie_word_embeddings and d2t.",
    ),
    (
        "norm.missing_or_doubled",
        "reading_fault",
        True,
        "a norm is missing, doubled, or scales by 1 + w instead of w",
        "Apply the norms as the trainer's model does.",
    ),
    (
        "block.width",
        "reading_fault",
        True,
        "blocks are wider or narrower than in training",
        "Draft with the block size of training.",
    ),
    (
        "hidden.backend",
        "reading_fault",
        True,
        "another implementation computes the target's states",
        "Compute the states as in training.",
    ),
    (
        "hidden.dtype",
        "reading_fault",
        True,
        "the target runs in another precision",
        "Serve the precision of training, or retrain on the states that are served.",
    ),
    (
        "hidden.rows",
        "damage",
        False,
        "captured states do not belong to their tokens",
        "Mend the capture; the audit of the hidden states says what its rows are.",
    ),
    (
        "hidden.ignored_by_drafter",
        "training_fault",
        False,
        "the weights make no use of the target's states",
        "Retrain on states that are neither zero nor shuffled; check what training stored.",
    ),
    (
        "serving.state",
        "damage",
        False,
        "the context that the drafter keeps is not the one that it was given",
        "Mend how its cache is extended and truncated.",
    ),
    (
        "target.not_lossless",
        "damage",
        False,
        "decoding with drafts does not give the target's own tokens",
        "Mend the decoding loop first: no acceptance number means anything before.",
    ),
    (
        "target.padding",
        "damage",
        False,
        "padding changes the target's states",
        "Do not pad, or mask the padding everywhere.",
    ),
    (
        "data.domain",
        "explanation",
        None,
        "the prompts are of another kind than the training text",
        "Compare on the kind of text that is served.",
    ),
    (
        "data.template",
        "explanation",
        None,
        "the prompts are rendered by another template than in training",
        "Render the prompts as in training.",
    ),
    (
        "metric.population",
        "explanation",
        None,
        "the number counts other anchors than decoding visits",
        "Quote walked tau.",
    ),
    (
        "metric.bonus",
        "explanation",
        None,
        "the number counts the bonus token on one side only",
        "Say whether the bonus token is counted.",
    ),
    (
        "metric.aggregation",
        "explanation",
        None,
        "the number averages over prompts on one side and over rounds on the other",
        "Compare the same average.",
    ),
    (
        "metric.tree_definition",
        "explanation",
        None,
        "the number is that of a tree or of an oracle",
        "Say which tree, and compare the same one.",
    ),
    (
        "training.noise_on_target_logits",
        "training_fault",
        False,
        "noise was added to the states that make the target's logits",
        "Add noise to the drafter's input only.",
    ),
    (
        "training.loss_mismatch",
        "training_fault",
        False,
        "the loss is not the deployment's objective",
        "Weight the loss by what is accepted.",
    ),
    (
        "training.leak",
        "training_fault",
        False,
        "labels leak into training other than through a mask",
        "Mend the training step.",
    ),
)
"""Every cause by id, in the order in which people should look."""


def entry(cause: str, status: Status, evidence: str, **fields: Any) -> dict[str, Any]:
    """What is known of one cause, as ``doctor --json`` says it.

    Parameters
    ----------
    fields
        Fields that differ from the catalogue's, or from "unknown": ``kind``, ``recoverable``,
        ``settings``, ``tau_own_reading``, ``delta``, ``aliases``, ``remedy``.

    Raises
    ------
    KeyError
        The catalogue has no such cause.
    """
    about = CAUSES[cause]
    unknown = Estimate(None).to_json()
    return {
        "cause": cause,
        "status": status,
        "kind": about.kind,
        "recoverable": about.recoverable,
        "settings": [],
        "tau_own_reading": unknown,
        "delta": unknown,
        "evidence": evidence,
        "aliases": [],
        "remedy": about.remedy if status == "found" else "",
        **fields,
    }
