"""Refuse a checkpoint that declares what the target at hand cannot have."""

from __future__ import annotations

from dflash_diag.checkpoints.facts import TargetFacts
from dflash_diag.checkpoints.keys import N_TARGET, first
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Convention
from dflash_diag.errors import CheckpointError

_ANOTHER = "was it trained for another target?"


def target_contradictions(
    checkpoint: Checkpoint, convention: Convention, facts: TargetFacts
) -> list[CheckpointError]:
    """Everything that a checkpoint declares and this target cannot have, one error each.

    Sizes are compared as declared, even where no tensor depends on them: a wrong number in a
    configuration is a checkpoint of something else until shown otherwise.
    """
    config, body, found = checkpoint.config, checkpoint.body, []
    hidden = config.get("target_hidden_size")
    hidden = body.get("hidden_size") if hidden is None else hidden
    if hidden is not None and hidden != facts.hidden_size:
        found.append(
            CheckpointError(
                f"the checkpoint declares hidden_size={hidden!r}",
                f"{facts.hidden_size}, the target's",
                _ANOTHER,
            )
        )
    vocab = body.get("vocab_size")
    if vocab is not None and vocab != facts.vocab_size and not _is_reduced(checkpoint, facts):
        found.append(
            CheckpointError(
                f"the checkpoint declares vocab_size={vocab!r}",
                f"{facts.vocab_size}, the rows of the target's embedding",
                _ANOTHER,
            )
        )
    n_target, key = first(config, *N_TARGET)
    if n_target is not None and n_target != facts.n_layers:
        found.append(
            CheckpointError(
                f"the checkpoint declares {key}={n_target!r}",
                f"{facts.n_layers}, the target's",
                _ANOTHER,
            )
        )
    outside = [i for i, tap in zip(convention.layer_ids, convention.taps, strict=True)
               if not -1 <= tap < facts.n_layers]  # fmt: skip
    if outside:
        last = facts.n_layers - (1 if convention.layer_id_rule == "output" else 0)
        found.append(
            CheckpointError(
                f"tapped layer {outside[0]} is out of range",
                f"ids up to {last} for a target of {facts.n_layers} layers",
            )
        )
    if not 0 <= convention.mask_token_id < facts.vocab_size:
        found.append(
            CheckpointError(
                f"mask_token_id {convention.mask_token_id} is outside the target's embedding",
                f"an id below {facts.vocab_size}",
            )
        )
    return found


def check_against_target(
    checkpoint: Checkpoint, convention: Convention, facts: TargetFacts
) -> None:
    """Raise the first of `target_contradictions`.

    Raises
    ------
    CheckpointError
        The checkpoint declares a size, layer or mask token that the target cannot have.
    """
    for error in target_contradictions(checkpoint, convention, facts):
        raise error


def _is_reduced(checkpoint: Checkpoint, facts: TargetFacts) -> bool:
    """Whether a smaller vocabulary is declared together with its map to the target's."""
    tensors, vocab = checkpoint.tensors, checkpoint.body.get("vocab_size")
    if not isinstance(vocab, int) or vocab >= facts.vocab_size:
        return False
    to_target = "d2t" in tensors and tuple(tensors["d2t"].shape) == (vocab,)
    from_target = "t2d" in tensors and tuple(tensors["t2d"].shape) == (facts.vocab_size,)
    return to_target or from_target
