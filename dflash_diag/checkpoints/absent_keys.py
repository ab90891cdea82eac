"""Keys that a checkpoint lacks, and what each stack takes in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_diag.checkpoints import attention, rope
from dflash_diag.checkpoints.contradictions import as_outputs, plain
from dflash_diag.checkpoints.keys import at, n_target_layers
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks import speculators, vllm
from dflash_diag.checkpoints.stacks.common import Reader
from dflash_diag.checkpoints.stacks.detecting import READERS, detect_stack
from dflash_diag.checkpoints.variants import variant
from dflash_diag.conventions import Convention
from dflash_diag.errors import CheckpointError


@dataclass(frozen=True)
class AbsentKey:
    """A key that is not there, and what each stack takes in its place."""

    field: str
    key: str
    used: Any
    """The value used here; None where it has to be given."""
    assumed: Mapping[str, Any] = dataclasses.field(hash=False)
    """By stack; None is one that refuses."""

    @property
    def others(self) -> dict[str, list[str]]:
        """What is assumed instead of the value used here, as text, and by whom."""
        found: dict[str, list[str]] = {}
        for who, value in self.assumed.items():
            if value != self.used:
                found.setdefault("nothing" if value is None else str(value), []).append(who)
        return found

    def __str__(self) -> str:
        said = "; ".join(f"{', '.join(who)}: {what}" for what, who in self.others.items())
        used = "it has to be given" if self.used is None else f"{self.used} is used"
        return f"{self.field}: no {self.key}; {used} ({said})"


def absent_keys(checkpoint: Checkpoint) -> list[AbsentKey]:
    """Keys that are not there and for which stacks do not take the same value."""
    stack = detect_stack(checkpoint)
    found = []
    for name, (key, paths, engines) in _KEYS.items():
        if any(at(checkpoint.config, path) is not None for path in paths):
            continue
        assumed = {one.title: as_read_by(checkpoint, one, name) for one in READERS.values()}
        assumed |= {who: look(checkpoint) for who, look in engines.items()}
        if any(value != next(iter(assumed.values())) for value in assumed.values()):
            found.append(AbsentKey(name, key, as_read_by(checkpoint, stack.reader, name), assumed))
    return found


def as_read_by(checkpoint: Checkpoint, reader: Reader, name: str) -> Any:
    """What a stack takes a field of this checkpoint for; None where it takes it for nothing.

    Layers are given as outputs of decoder layers, and a value that all layers share as one.
    """
    look = reader.fields.get(name)
    try:
        value = look(checkpoint) if look else None
        rule = reader.fields.get("layer_id_rule") if name == "layer_ids" else None
        if value is not None and rule is not None:
            return as_outputs(value.value, getattr(rule(checkpoint), "value", "output"))
    except CheckpointError:
        return None
    return plain(value.value) if value is not None else getattr(Convention, name, None)


def _raw_eagle_ids(checkpoint: Checkpoint) -> Any:
    """Layers that vLLM taps without a list: those of its EAGLE-3 drafters, as outputs."""
    n = n_target_layers(checkpoint)
    return None if n is None else as_outputs((2, n[0] // 2, n[0] - 3), "input")


def _slides(kind: str) -> Callable[[Checkpoint], Any]:
    """``kind`` in sliding layers, bidirectional in full ones."""

    def look(checkpoint: Checkpoint) -> Any:
        types, _ = attention.layer_types(checkpoint)
        return plain(tuple(kind if t == attention.SLIDING else "bidirectional" for t in types))

    return look


def _next_of_dspark(layout: str) -> Callable[[Checkpoint], Any]:
    """``layout`` for a DSpark drafter, the slot's own position for any other."""
    return lambda c: layout if variant(c).name == "dspark" else "same"


_NESTED_ROPE = [f"{place}.{part}rope_theta" for place in rope.PLACES
                for part in ("", f"{attention.SLIDING}.", f"{attention.FULL}.")]  # fmt: skip
_THETAS = [*_NESTED_ROPE, "rope_theta"]
_Engines = Mapping[str, Callable[[Checkpoint], Any]]
_KEYS: Mapping[str, tuple[str, list[str], _Engines]] = {
    "block_size": (
        "block_size",
        ["dflash_config.block_size", "block_size"],
        {"SGLang": lambda _: 16, "vLLM serving": lambda _: "1 + num_speculative_tokens"},
    ),
    "layer_ids": (
        "target_layer_ids",
        [*vllm.IDS, speculators.IDS],
        {"vLLM serving": _raw_eagle_ids},
    ),
    "mask_token_id": (
        "mask_token_id",
        ["dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token"],
        {
            "SGLang": lambda _: "the token <|MASK|>",
            "SpecForge's trainer": lambda _: "the tokenizer's mask, pad or end token",
        },
    ),
    "rope_theta": (
        "rope_theta",
        [*_THETAS, *(f"transformer_layer_config.{path}" for path in _THETAS)],
        {"vLLM serving": lambda _: 1e6, "Model-Optimizer's export": lambda _: "the target's"},
    ),
    "in_block": (
        "is_causal",
        ["is_causal", "dflash_config.causal", "sliding_window_non_causal"],
        {"SGLang": _slides("causal")},
    ),
    "label_layout": (
        "sample_from_anchor",
        [
            f"{place}{name}"
            for place in ("dflash_config.", "")
            for name in ("sample_from_anchor", "dspark_bonus_anchor", "shift_label")
        ],
        {
            "SGLang": _next_of_dspark("next"),
            "vLLM's adapter of speculators": _next_of_dspark("same"),
        },
    ),
}
"""By field: the key that is missed, every place where it could stand, and servers' defaults."""
