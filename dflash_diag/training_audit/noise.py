"""Whether noise that is meant for the drafter's input reaches the target's logits or the labels.

Symbols: A anchors, D proposed tokens, V vocabulary.
"""

from __future__ import annotations

from dflash_diag.adapters.bench import change
from dflash_diag.training_audit.calling import Caller, Output, StepError
from dflash_diag.training_audit.properties import Property, fault, fine, untested
from dflash_diag.training_audit.soundness import call_seed, largest

ID = "training.noise_on_target_logits"
SEEDS = 2


def noise_on_targets(call: Caller, first: Output, still: float) -> tuple[Property, float]:
    """Move only noise_seed; also returns by how much the draft logits move."""
    expected = "target logits and labels that do not depend on noise_seed"
    try:
        others = [call(noise_seed=call_seed(i)) for i in range(SEEDS)]
    except StepError as error:
        return untested(ID, f"with another noise_seed, {error}", expected=expected), 0.0
    drafts = max(largest(change(first.logits, one.logits)) for one in others)
    labels = max(float((one.labels != first.labels).double().mean()) for one in others)
    target = 0.0
    if first.target_logits is not None:
        target = max(
            largest(change(first.target_logits, one.target_logits))
            for one in others
            if one.target_logits is not None
        )
    moves = [f"target logits ({target:.1%})"] * (target > still)
    moves += [f"{labels:.0%} of the labels"] * (labels > 0)
    if moves:
        return fault(
            ID,
            f"{' and '.join(moves)} move",
            expected,
            f"Moving noise_seed alone moves {' and '.join(moves)}: the noise is on the states that "
            "make them, and the drafter is taught what the target would not say.",
        ), drafts
    what = "labels stay" if first.target_logits is None else "target logits and labels stay"
    reach = f"move by {drafts:.1%}" if drafts > still else "stay too"
    evidence = f"In {SEEDS} other draws {what}; draft logits {reach}."
    return fine(ID, "they do not move", expected, evidence), drafts
