"""Where a drafter's settings stand in its configuration, and what they may be.

Stacks put the same setting in different places: at the top level, in ``dflash_config``, or, for
sizes and RoPE, in speculators' ``transformer_layer_config``. A key is written as a dotted path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Source
from dflash_diag.errors import CheckpointError

MAX_LAYERS = 1000


class Value(NamedTuple):
    """What one field of a convention is, and where that came from."""

    value: Any
    source: Source


def declared(value: Any, key: str) -> Value:
    """A value that ``key`` states."""
    return Value(value, Source(key, "declared"))


def at(config: Any, path: str) -> Any:
    """What stands at a dotted ``path``; None where any part of it is missing."""
    for part in path.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def first(config: Mapping[str, Any], *paths: str) -> tuple[Any, str]:
    """The first of several paths that holds something, and which; None and the last otherwise."""
    for path in paths:
        value = at(config, path)
        if value is not None:
            return value, path
    return None, paths[-1]


def draft_value(config: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """A value and its key: ``dflash_config.<name>`` first, then the top level, else None."""
    return first(config, f"dflash_config.{name}", name)


def body_key(checkpoint: Checkpoint, name: str) -> str:
    """The full key of a setting of the transformer itself."""
    nested = checkpoint.body is not checkpoint.config
    return f"transformer_layer_config.{name}" if nested else name


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, which a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(
    config: Mapping[str, Any], key: str, *, most: int = 2**31, do: str | None = None
) -> int:
    """A whole number above 0 that the configuration must have."""
    value = config.get(key)
    if not is_int(value) or not 0 < value <= most:
        says = f"has {key}={value!r}" if key in config else f"lacks {key}"
        found = f"the configuration {says}"
        raise CheckpointError(found, f"a whole number from 1 to {most}", do)
    return int(value)


def flag(value: Any, key: str) -> bool:
    """A setting that is true or false."""
    if not isinstance(value, bool):
        raise CheckpointError(f"{key} is {value!r}", "true or false")
    return value


def is_on(config: Any, path: str) -> bool:
    """A switch that is off where it is absent; anything but true or false is refused.

    Text such as ``"false"`` would count as true where it is only asked whether something is there.
    """
    value = at(config, path)
    return False if value is None else flag(value, path)


def number(value: Any, key: str) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{key} is {value!r}", "a number")
    return float(value)


def architectures(config: Mapping[str, Any]) -> list[str]:
    """Names of model classes that the configuration lists."""
    names = config.get("architectures")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list | tuple) else []


def n_draft_layers(checkpoint: Checkpoint) -> int:
    """L: ``num_hidden_layers``."""
    return positive(checkpoint.body, "num_hidden_layers", most=MAX_LAYERS)


N_TARGET = ("dflash_config.num_target_layers", "num_target_layers", "target_num_hidden_layers")


def n_target_layers(checkpoint: Checkpoint) -> tuple[int, str] | None:
    """N as the drafter's configuration states it, and the key; None where it does not."""
    value, key = first(checkpoint.config, *N_TARGET)
    return None if value is None else (positive({key: value}, key), key)


def declared_target_hidden(checkpoint: Checkpoint) -> int:
    """Width of one tapped layer: the drafter's own hidden size unless the file says otherwise."""
    if checkpoint.config.get("target_hidden_size") is not None:
        return positive(checkpoint.config, "target_hidden_size")
    return positive(checkpoint.body, "hidden_size")


def head_width(checkpoint: Checkpoint) -> int:
    """d: ``head_dim``, or the width of the query norm where the configuration is silent."""
    body = checkpoint.body
    if body.get("head_dim") is not None:
        return positive(body, "head_dim")
    name = "layers.0.self_attn.q_norm.weight"
    if name in checkpoint.tensors and checkpoint.tensors[name].numel():
        return checkpoint.tensors[name].numel()
    return positive(body, "hidden_size") // positive(body, "num_attention_heads")


def default_layer_ids(n_target_layers: int, n_taps: int) -> tuple[int, ...]:
    """Layers that z-lab's code taps when none are listed: evenly from 1 to N-3, or N//2 alone."""
    if n_taps == 1:
        return (n_target_layers // 2,)
    step = (n_target_layers - 4) / (n_taps - 1)
    return tuple(round(1 + i * step) for i in range(n_taps))
