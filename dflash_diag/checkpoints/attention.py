"""Layer types, sliding windows and in-block causality as a configuration declares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash_diag.checkpoints.keys import (
    Value,
    at,
    body_key,
    declared,
    first,
    flag,
    is_int,
    is_on,
    n_draft_layers,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Source
from dflash_diag.errors import CheckpointError

DEFAULT_MAX_WINDOW_LAYERS = 28
SLIDING, FULL = "sliding_attention", "full_attention"


def layer_types(checkpoint: Checkpoint) -> tuple[list[str], str]:
    """One type a layer, and the key; transformers' rule where the configuration has none."""
    body, n_layers = checkpoint.body, n_draft_layers(checkpoint)
    types, key = body.get("layer_types"), body_key(checkpoint, "layer_types")
    if types is None:
        start = body.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        slides = switched_window(checkpoint) is not None and is_int(start)
        types = [SLIDING if slides and i >= start else FULL for i in range(n_layers)]
        return types, "use_sliding_window, max_window_layers"
    if not isinstance(types, list | tuple) or len(types) != n_layers:
        found = f"{key} lists {len(types) if isinstance(types, list | tuple) else types!r}"
        raise CheckpointError(found, f"one type for each of the {n_layers} layers")
    unknown = [t for t in types if t not in (FULL, SLIDING)]
    if unknown:
        raise CheckpointError(f"{key} lists {unknown[0]!r}", f"{FULL} or {SLIDING}")
    return list(types), key


def switched_window(checkpoint: Checkpoint) -> int | None:
    """``sliding_window`` as transformers' Qwen3 keeps it: only with ``use_sliding_window``."""
    if not is_on(checkpoint.body, "use_sliding_window"):
        return None
    return stated_window(checkpoint)


def stated_window(checkpoint: Checkpoint) -> int | None:
    """``sliding_window`` whether or not the switch is on."""
    value = checkpoint.body.get("sliding_window")
    return None if value is None else _tokens(value, body_key(checkpoint, "sliding_window"))


def _tokens(value: Any, key: str) -> int:
    if not is_int(value) or value < 1:
        raise CheckpointError(f"{key} is {value!r}", "a number of tokens")
    return int(value)


def windows(checkpoint: Checkpoint) -> Value:
    """The window of each layer, as transformers resolves the layer types and the switch."""
    types, key = layer_types(checkpoint)
    tokens = switched_window(checkpoint)
    found = tuple(tokens if t == SLIDING else None for t in types)
    if SLIDING not in types:
        return Value(found, Source(key, "declared" if "layer_types" in key else "implied"))
    if tokens is None:
        return Value(found, Source(f"{key}, but no use_sliding_window", "implied"))
    return declared(found, f"{key}, {body_key(checkpoint, 'sliding_window')}")


def swa_window(checkpoint: Checkpoint) -> Value | None:
    """``dflash_config.use_swa``: one window for every layer; None where it is not on."""
    if not is_on(checkpoint.config, "dflash_config.use_swa"):
        return None
    key = "dflash_config.swa_window_size"
    tokens = _tokens(at(checkpoint.config, key), key)
    return declared((tokens,) * n_draft_layers(checkpoint), f"dflash_config.use_swa, {key}")


def causality(*keys: str, otherwise: Callable[[Checkpoint], Value]) -> Callable[..., Value]:
    """Causal or not in all layers by the first of ``keys`` that is there, else ``otherwise``."""

    def read(checkpoint: Checkpoint) -> Value:
        value, key = first(checkpoint.config, *keys)
        if value is None:
            return otherwise(checkpoint)
        kind = "causal" if flag(value, key) else "bidirectional"
        return declared((kind,) * n_draft_layers(checkpoint), key)

    return read


def causal_where_sliding(checkpoint: Checkpoint) -> Value:
    """Sliding layers are causal, full ones are not: z-lab's, SpecForge's and the servers' rule."""
    types, key = layer_types(checkpoint)
    kinds = tuple("causal" if t == SLIDING else "bidirectional" for t in types)
    return Value(kinds, Source(key, "implied"))
