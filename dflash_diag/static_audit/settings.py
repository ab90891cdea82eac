"""Settings, lengths and files as a whole: each thing said once, or the same each time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash_diag.checkpoints import Checkpoint, contradictions
from dflash_diag.static_audit.material import Checked, Material, Severity, StaticFinding


def check_length(m: Material) -> Checked:
    """The run's texts fit into the positions that the drafter is declared for.

    A text that is too long contradicts no other key: what is at stake is the range of positions
    that RoPE was set up for, which is what its scaling is about, hence the cause.
    """
    cause, found, untested = "rope.scaling", [], []
    limit = m.body.get("max_position_embeddings")
    longest = max((len(text) for text in m.texts), default=0) + m.convention.block_size
    theirs = m.target.get("max_positions")
    if not isinstance(limit, int):
        untested.append("the configuration states no max_position_embeddings")
    elif not m.texts:
        untested.append("no text is at hand to measure")
    elif longest > limit:
        text = (
            f"max_position_embeddings is {limit}, texts and blocks reach position {longest}: "
            "servers clip or refuse what lies beyond."
        )
        found.append(StaticFinding(cause, "warn", text, {"limit": limit, "longest": longest}))
    if isinstance(limit, int) and isinstance(theirs, int) and limit < theirs:
        text = f"The drafter is declared for {limit} positions, the target for {theirs}."
        found.append(StaticFinding(cause, "note", text, {"limit": limit, "target": theirs}))
    said = f"{limit} positions, of which the run's texts reach {longest if m.texts else 'none'}"
    expected = "max_position_embeddings covers prompts, continuations and one block"
    return Checked("length", said, expected, found, untested)


def check_block(m: Material) -> Checked:
    """One block size for training, files and serving."""
    how, cause, found = m.convention, "block.width", []
    if not m.stated("block_size"):
        text = f"No key states the block size; {how.block_size} is z-lab's default, others' 7 or 8."
        found.append(StaticFinding(cause, "warn", text, {"used": how.block_size}))
    for key, value in m.declared("block_size", "dspark_block_size").items():
        if m.overridden("block_size") and value != how.block_size:
            text = f"A block of {how.block_size} is asked for, {key} is {value}."
            found.append(StaticFinding(cause, "warn", text, {"key": key, "declared": value}))
    for n in _speculative_tokens(m.checkpoint.config):
        if n != how.n_proposed:
            text = (
                f"speculators_config asks for {n} tokens a round, a block of {how.block_size} "
                f"proposes {how.n_proposed}."
            )
            found.append(StaticFinding(cause, "warn", text, {"asked": n}))
    said = f"a block of {how.block_size} slots, which proposes {how.n_proposed}"
    return Checked("block size", said, "the width of training, everywhere", found)


def _speculative_tokens(config: Mapping[str, Any]) -> list[int]:
    speculators = config.get("speculators_config")
    methods = speculators.get("proposal_methods") if isinstance(speculators, Mapping) else None
    methods = methods if isinstance(methods, list) else []
    asked = [one.get("speculative_tokens") for one in methods if isinstance(one, Mapping)]
    return [n for n in asked if isinstance(n, int)]


_ELSEWHERE = ("rope", "rotary", "layer_id")
"""Fields whose contradictions the checks above describe."""
_TRAINED_AS = {
    "block_size": "block.width",
    "mask_token_id": "mask_token.id",
    "rope_theta": "rope.theta",
}
"""Training arguments that are fields of the reading, and what it is if they differ; those of the
tapped layers are looked at with the layers."""


def check_configuration(m: Material) -> Checked:
    """No two keys, and no training argument, give a setting two values."""
    cause = "checkpoint.config_contradiction"
    found = [
        StaticFinding(cause, "warn", f"{one}.", {"field": one.field})
        for one in contradictions(m.checkpoint)
        if not (one.field.startswith(_ELSEWHERE) or "speculative_tokens" in one.other)
    ]
    arguments = m.checkpoint.training_args or {}
    for name, what in _TRAINED_AS.items():
        trained, used = arguments.get(name), getattr(m.convention, name)
        if isinstance(trained, int | float) and trained != used and not m.overridden(name):
            text = f"The training arguments have {name} {trained}, the reading {used}."
            found.append(StaticFinding(what, "warn", text, {"field": name, "trained": trained}))
    said = "no two keys disagree" + (", nor do the training arguments" if arguments else "")
    return Checked("configuration", said, "each setting has one value", found)


_WORDS = {"hidden_size": "hidden size", "n_layers": "layers"}


def check_target(m: Material) -> Checked:
    """The target is the one whose sizes the checkpoint declares."""
    cause, found, expected = "checkpoint.wrong_target", [], "the sizes of the target at hand"
    hidden = m.declared("target_hidden_size") or m.declared("hidden_size")
    sizes = {"hidden_size": hidden}
    sizes["n_layers"] = m.declared("num_target_layers", "target_num_hidden_layers")
    known = {name: m.target.get(name) for name in sizes if m.target.get(name) is not None}
    for name, declared in sizes.items():
        for key, value in declared.items():
            if name in known and value != known[name]:
                text = f"{key} is {value}, the target's is {known[name]}: a drafter of another one."
                found.append(StaticFinding(cause, "fail", text, {"key": key, "declared": value}))
    if not known:
        return Checked("target", "", expected, untested=["the target's sizes are not known"])
    said = ", ".join(f"{_WORDS[name]} {value}" for name, value in known.items())
    return Checked("target", said, expected, found)


_BESIDE: tuple[tuple[str, str, Severity, str], ...] = (
    ("mask_embedding.*", "mask_token.id", "warn",
     "vLLM and SGLang put it in the mask token's place, other readers use the target's row"),
    ("adapter_model.*", "checkpoint.missing_or_unused_tensors", "warn",
     "an adapter that was not merged into the weights, and is not read"),
    ("d2t.*", "head.tying_or_vocab", "warn", "a map of the vocabulary, which is not read"),
    ("t2d.*", "head.tying_or_vocab", "warn", "a map of the vocabulary, which is not read"),
    ("vocab_mapping.*", "head.tying_or_vocab", "warn", "a map of the vocabulary; it is not read"),
    ("hf_quant_config.json", "hidden.dtype", "note", "the weights were quantised for serving"),
)  # fmt: skip


def check_files(m: Material) -> Checked:
    """Nothing beside the weights changes what they mean."""
    folder = m.checkpoint.weight_files[0].parent
    files = beside(m.checkpoint)
    found = [
        StaticFinding(cause, severity, f"{name} lies beside the weights: {why}.", {"file": name})
        for pattern, cause, severity, why in _BESIDE
        for name in files
        if Path(name).match(pattern)
    ]
    expected = "no file that some readers apply and others do not"
    return Checked("files beside", f"{len(files)} other files in {folder.name}", expected, found)


def beside(checkpoint: Checkpoint) -> list[str]:
    """Names of the files beside a checkpoint's weights."""
    own = {path.name for path in checkpoint.weight_files}
    folder = checkpoint.weight_files[0].parent
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in own)
