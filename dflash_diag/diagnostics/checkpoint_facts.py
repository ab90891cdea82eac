"""What is in a checkpoint: sizes, settings, training arguments, and whether they agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

PARTS = {
    "fc.": "fc (tapped states)",
    "layers.self_attn": "attention",
    "layers.mlp": "MLP",
    "embed_tokens": "own embedding",
    "lm_head": "own head",
}
ARGUMENTS_SHOWN = 30


def judge(result: Result) -> Judgement:
    """A configuration that says two things about one setting is worth a warning."""
    found = result.params["contradictions"]
    if found:
        return Judgement(Verdict.WARN, f"the configuration contradicts itself: {found[0]}")
    return Judgement(Verdict.PASS, "no two keys of the configuration disagree")


@diagnostic(
    id="checkpoint.facts",
    question="What is in this checkpoint?",
    page="01_checkpoint",
    judge=judge,
)
def facts(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Sizes and settings of the judged drafter.

    Returns
    -------
    tuple
        Frame columns: fact, value (text), where (file or key).
    """
    import pandas as pd

    from dflash_diag.checkpoints import contradictions, detect_stack

    role = inputs.roles[0]
    checkpoint, name = inputs.checkpoint(role), inputs.name(role)
    config, body, convention = checkpoint.config, checkpoint.body, inputs.convention(role)
    tensors = checkpoint.tensors
    sizes = {one: tensors[one].numel() for one in tensors}
    total = sum(sizes.values())
    types = Counter(str(tensors[one].dtype).removeprefix("torch.") for one in tensors)
    rows = [
        ("architecture", ", ".join(map(str, config.get("architectures", []))) or "—", "config"),
        ("written by", detect_stack(checkpoint).title, "files and config"),
        ("file kind", checkpoint.kind, ", ".join(p.name for p in checkpoint.weight_files)),
        ("parameters", f"{total:,}", "tensors"),
        ("stored as", ", ".join(f"{n} {kind}" for kind, n in types.most_common()), "tensors"),
        ("draft layers", str(body.get("num_hidden_layers", "—")), "config"),
        ("hidden size", str(body.get("hidden_size", "—")), "config"),
        ("vocabulary", str(body.get("vocab_size", "—")), "config"),
        ("block size", str(convention.block_size), "convention"),
        ("proposals a round", str(convention.n_proposed), "convention"),
        ("tapped layers", ", ".join(map(str, convention.layer_ids)), "convention"),
    ]
    rows += [
        (f"training: {key}", str(value), "training arguments")
        for key, value in list((checkpoint.training_args or {}).items())[:ARGUMENTS_SHOWN]
        if not isinstance(value, Mapping)
    ]
    found = [str(one) for one in contradictions(checkpoint)]
    parts = Counter[str]()
    for tensor, n in sizes.items():
        parts[_part(tensor)] += n
    said = (
        f"{name}: {total / 1e6:.2f} M parameters in {config.get('num_hidden_layers', '?')} layers, "
        f"block of {convention.block_size}, reading target layers "
        f"{', '.join(map(str, convention.layer_ids))}."
    )
    return (
        said,
        pd.DataFrame(rows, columns=["fact", "value", "where"]),
        {
            "params": {
                "parts": parts.most_common(),
                "contradictions": found,
                "finding": f"{name}: {total / 1e6:.2f} M parameters",
            },
            "notes": found,
        },
    )


def _part(tensor: str) -> str:
    """Which part of the drafter a tensor belongs to."""
    plain = ".".join(piece for piece in tensor.split(".") if not piece.isdigit())
    if "norm" in plain:
        return "norms"
    return next((part for start, part in PARTS.items() if plain.startswith(start)), "other")
