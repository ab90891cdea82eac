"""The z-lab layout: what its configuration means, as z-lab's own code reads it.

Values are looked up in ``dflash_config`` first and at the top level second; what is absent takes
the default that PyPI ``dflash`` 0.1.0, or the transformers class under it, would take. The same
layout is written by several trainers (SpecForge, Automodel, Model-Optimizer exports).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Convention, Source, check_scaling
from dflash_diag.errors import BadInput, CheckpointError

DEFAULT_BLOCK_SIZE = 16
DEFAULT_THETA = 10_000.0
MAX_LAYERS = 1000
DEFAULT_MAX_WINDOW_LAYERS = 28
_BY_CODE = Source("z-lab's code", "implied")


def resolve_convention(checkpoint: Checkpoint, *, settings: Iterable[str] = ()) -> Convention:
    """The reading that a z-lab checkpoint declares.

    Parameters
    ----------
    settings
        ``field=value`` overrides. Given here rather than to `Convention.override`, they may also
        supply what the configuration lacks (``mask_token_id``, ``layer_ids``).

    Raises
    ------
    CheckpointError
        The configuration belongs to another layout, lacks a value that has no default, or holds
        one that cannot be.
    """
    config, settings = checkpoint.config, list(settings)
    given = {s.partition("=")[0].strip() for s in settings}
    _refuse_other_layouts(config)
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise CheckpointError(
            f"hidden_act is {config['hidden_act']!r}",
            "silu, as all DFlash drafters use",
        )
    n_layers = n_draft_layers(checkpoint)
    ids, ids_source = layer_ids(config, n_layers) if "layer_ids" not in given else ((0,), _BY_CODE)
    block, block_source = _block_size(config)
    mask, mask_source = _mask_token(config) if "mask_token_id" not in given else (0, _BY_CODE)
    in_block, in_block_source = _in_block(config, n_layers)
    window, window_source = _window(config, n_layers)
    rope = _rope(config)
    scale, scale_source = _number(config, "input_embedding_scale", 1.0)
    multiplier, multiplier_source = _number(config, "output_multiplier", 1.0)
    softcap, softcap_source = _number(config, "final_logit_softcapping", 0.0)
    sources = {
        "block_size": block_source,
        "layer_ids": ids_source,
        "mask_token_id": mask_source,
        "in_block": in_block_source,
        "window": window_source,
        "rope_theta": rope.theta_source,
        "rope_scaling": rope.scaling_source,
        "rotary_width": Source("head_dim (the whole head)", "implied"),
        "embedding_scale": scale_source,
        "logit_scale": multiplier_source,
        "softcap": softcap_source,
        # z-lab's inference takes the last layer from transformers, after the final norm; trainers
        # that use hooks do not. A tapped last layer is therefore worth a probe.
        "last_layer_normed": Source("", "default"),
    }
    try:
        convention = Convention(
            block_size=block,
            layer_ids=ids,
            mask_token_id=mask,
            in_block=in_block,
            window=window,
            rope_theta=rope.theta,
            rope_scaling=rope.scaling,
            rotary_width=head_width(checkpoint),
            embedding_scale=scale,
            logit_scale=multiplier,
            softcap=softcap if softcap > 0 else None,
            sources=_complete(sources),
        )
        convention = convention.override(settings)
        if convention.rotary_width > (width := head_width(checkpoint)):
            raise CheckpointError(
                f"rotary_width is {convention.rotary_width}", f"at most {width}, the head's width"
            )
        return convention
    except CheckpointError:
        raise
    except BadInput as error:
        raise CheckpointError(error.found, error.expected, error.do) from error


def n_draft_layers(checkpoint: Checkpoint) -> int:
    """L: ``num_hidden_layers``."""
    return positive(checkpoint.config, "num_hidden_layers", most=MAX_LAYERS)


def declared_target_hidden(config: Mapping[str, Any]) -> int:
    """Width of one tapped layer: the drafter's own hidden size unless the file says otherwise."""
    key = "hidden_size" if config.get("target_hidden_size") is None else "target_hidden_size"
    return positive(config, key)


def head_width(checkpoint: Checkpoint) -> int:
    """d: ``head_dim``, or the width of the query norm where the configuration is silent."""
    config = checkpoint.config
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    name = "layers.0.self_attn.q_norm.weight"
    if name in checkpoint.tensors and checkpoint.tensors[name].numel():
        return checkpoint.tensors[name].numel()
    return positive(config, "hidden_size") // positive(config, "num_attention_heads")


def default_layer_ids(n_target_layers: int, n_draft_layers: int) -> tuple[int, ...]:
    """Layers that z-lab's code taps when none are listed: evenly from 1 to N-3, or N//2 alone."""
    if n_draft_layers == 1:
        return (n_target_layers // 2,)
    step = (n_target_layers - 4) / (n_draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(n_draft_layers))


def layer_ids(config: Mapping[str, Any], n_layers: int) -> tuple[tuple[int, ...], Source]:
    """Tapped layers in the order in which ``fc`` reads them."""
    value, key = draft_value(config, "target_layer_ids")
    if value is not None:
        if not isinstance(value, list | tuple) or not value or not all(map(_is_int, value)):
            raise CheckpointError(f"{key} is {value!r}", "a list of layer numbers")
        return tuple(value), Source(key, "declared")
    n_target = positive(config, "num_target_layers", do="list the tapped layers")
    return default_layer_ids(n_target, n_layers), Source("num_target_layers", "default")


def draft_value(config: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """A value and its key: ``dflash_config.<name>`` first, then the top level, else None."""
    nested = config.get("dflash_config")
    if isinstance(nested, Mapping) and nested.get(name) is not None:
        return nested[name], f"dflash_config.{name}"
    return config.get(name), name


def positive(
    config: Mapping[str, Any], key: str, *, most: int = 2**31, do: str | None = None
) -> int:
    """A whole number above 0 that the configuration must have."""
    value = config.get(key)
    if not _is_int(value) or not 0 < value <= most:
        says = f"has {key}={value!r}" if key in config else f"lacks {key}"
        found = f"the configuration {says}"
        raise CheckpointError(found, f"a whole number from 1 to {most}", do)
    return int(value)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _block_size(config: Mapping[str, Any]) -> tuple[int, Source]:
    value, key = draft_value(config, "block_size")
    if value is None:
        return DEFAULT_BLOCK_SIZE, Source("z-lab's default", "default")
    if not _is_int(value) or value < 2:
        raise CheckpointError(f"{key} is {value!r}", "at least 2 (an anchor and a slot)")
    return value, Source(key, "declared")


def _mask_token(config: Mapping[str, Any]) -> tuple[int, Source]:
    value, key = draft_value(config, "mask_token_id")
    if not _is_int(value) or value < 0:
        raise CheckpointError(
            f"{key} is {value!r}" if value is not None else "the configuration lacks mask_token_id",
            "the id of the mask token",
            "give it with --set mask_token_id=…",
        )
    return value, Source(key, "declared")


def _number(config: Mapping[str, Any], name: str, default: float) -> tuple[float, Source]:
    value, key = draft_value(config, name)
    if value is None:
        return default, Source("", "default")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{key} is {value!r}", "a number")
    return float(value), Source(key, "declared")


def _layer_types(config: Mapping[str, Any], n_layers: int) -> tuple[list[str], str]:
    """One type a layer, and the key; transformers' rule where the configuration has none."""
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS)
        slides = _sliding_window(config) is not None and _is_int(first)
        types = ["sliding_attention" if slides and i >= first else "full_attention"
                 for i in range(n_layers)]  # fmt: skip
        return types, "use_sliding_window, max_window_layers"
    if not isinstance(types, list | tuple) or len(types) != n_layers:
        found = f"layer_types lists {len(types) if isinstance(types, list | tuple) else types!r}"
        raise CheckpointError(found, f"one type for each of the {n_layers} layers")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise CheckpointError(
            f"layer_types lists {unknown[0]!r}", "full_attention or sliding_attention"
        )
    return list(types), "layer_types"


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """``sliding_window`` as transformers' Qwen3 keeps it: only with ``use_sliding_window``."""
    value = config.get("sliding_window")
    if not config.get("use_sliding_window"):
        return None
    if value is not None and (not _is_int(value) or value < 1):
        raise CheckpointError(f"sliding_window is {value!r}", "a number of tokens")
    return value


def _in_block(config: Mapping[str, Any], n_layers: int) -> tuple[tuple[str, ...], Source]:
    """``is_causal`` for every layer; else sliding layers are causal and full ones are not."""
    declared = config.get("is_causal")
    if declared is not None:
        kind = "causal" if declared else "bidirectional"
        return (kind,) * n_layers, Source("is_causal", "declared")
    types, key = _layer_types(config, n_layers)
    kinds = tuple("causal" if t == "sliding_attention" else "bidirectional" for t in types)
    return kinds, Source(key, "implied")


def _window(config: Mapping[str, Any], n_layers: int) -> tuple[tuple[int | None, ...], Source]:
    types, key = _layer_types(config, n_layers)
    width = _sliding_window(config)
    windows = tuple(width if t == "sliding_attention" else None for t in types)
    if "sliding_attention" not in types:
        return windows, Source(key, "declared" if key == "layer_types" else "implied")
    if width is None:
        return windows, Source(f"{key}, but no use_sliding_window", "implied")
    return windows, Source(f"{key}, sliding_window", "declared")


class _Rope(NamedTuple):
    theta: float
    theta_source: Source
    scaling: str | None
    scaling_source: Source


def _rope(config: Mapping[str, Any]) -> _Rope:
    """Follow transformers: ``rope_scaling`` if set, else ``rope_parameters``; theta from there."""
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    parameters = config.get(place) or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"{place} is {parameters!r}", "an object")
    if any(isinstance(v, Mapping) for v in parameters.values()):
        entries = [v for v in parameters.values() if isinstance(v, Mapping)]
        if any(e != entries[0] for e in entries):
            raise CheckpointError(
                f"{place} differs between layer types ({', '.join(map(str, parameters))})",
                "one RoPE for all layers",
            )
        parameters = entries[0]
    theta, key = parameters.get("rope_theta"), f"{place}.rope_theta"
    if theta is None:
        theta, key = config.get("rope_theta"), "rope_theta"
    source = Source(key, "declared") if theta is not None else Source("", "default")
    theta = DEFAULT_THETA if theta is None else theta
    if isinstance(theta, bool) or not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise CheckpointError(f"{key} is {theta!r}", "a number above 0")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        scaling_source = (
            Source(place, "declared") if "rope_type" in parameters else Source("", "default")
        )
        return _Rope(float(theta), source, None, scaling_source)
    try:
        check_scaling(place, parameters)
    except BadInput as error:
        raise CheckpointError(error.found, error.expected) from error
    kept = {k: v for k, v in parameters.items() if k not in _NOT_SCALING} | {"rope_type": kind}
    if config.get("max_position_embeddings") is not None:
        kept["max_position_embeddings"] = positive(config, "max_position_embeddings")
    scaling = json.dumps(kept, sort_keys=True)
    return _Rope(float(theta), source, scaling, Source(place, "declared"))


# A drafter rotates the whole head whatever ``partial_rotary_factor`` says (z-lab's own class).
_NOT_SCALING = ("rope_theta", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved")

_OTHER_LAYOUTS = {
    "speculators_model_type": "speculators",
    "eagle_aux_hidden_state_layer_ids": "vLLM's normal form",
    "aux_hidden_state_layer_ids": "speculators",
    "num_context_layers": "verl",
}


def _refuse_other_layouts(config: Mapping[str, Any]) -> None:
    """A configuration of another stack means other things by the same words."""
    wanted = "the z-lab layout (dflash_config with target_layer_ids and mask_token_id)"
    for key, layout in _OTHER_LAYOUTS.items():
        if config.get(key) is not None:
            raise CheckpointError(f"the configuration has {key}, as {layout} writes it", wanted)
    architectures = config.get("architectures") or []
    names = [str(n) for n in architectures] if isinstance(architectures, list | tuple) else []
    for name in names:
        if "DSpark" in name or "Domino" in name or "Speculator" in name:
            raise CheckpointError(f"the configuration's architecture is {name}", wanted)
    projector, key = draft_value(config, "projector_type")
    if projector in ("domino", "dspark"):
        raise CheckpointError(f"{key} is {projector}", wanted)


def _complete(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Every field with a source: what z-lab's code fixes is implied by the layout."""
    fields = [f.name for f in dataclasses.fields(Convention) if f.name != "sources"]
    return {name: sources.get(name, _BY_CODE) for name in fields}


@dataclass(frozen=True)
class Contradiction:
    """Two keys of one configuration that give a field different values."""

    field: str
    used: str
    used_value: Any
    other: str
    other_value: Any

    def __str__(self) -> str:
        return (
            f"{self.field}: {self.used} is {self.used_value!r}, "
            f"{self.other} is {self.other_value!r}; the first is used"
        )


def contradictions(checkpoint: Checkpoint) -> list[Contradiction]:
    """Keys whose disagreement changes a resolved value, depending on who reads them."""
    config = checkpoint.config
    nested = config.get("dflash_config")
    nested = nested if isinstance(nested, Mapping) else {}
    found = []

    def compare(field: str, used: str, used_value: Any, other: str, other_value: Any) -> None:
        if used_value is not None and other_value is not None and used_value != other_value:
            found.append(Contradiction(field, used, used_value, other, other_value))

    for name, field in _TWO_PLACES.items():
        compare(field, f"dflash_config.{name}", nested.get(name), name, config.get(name))
    for place in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(place), Mapping):
            theta = config[place].get("rope_theta")
            compare("rope_theta", f"{place}.rope_theta", theta, "rope_theta",
                    config.get("rope_theta"))  # fmt: skip
    n_layers = n_draft_layers(checkpoint)
    causal = {kind == "causal" for kind in _in_block(config, n_layers)[0]}
    resolved = causal.pop() if len(causal) == 1 else None
    key = "is_causal" if config.get("is_causal") is not None else "layer_types"
    compare("in_block", key, resolved, "dflash_config.causal", nested.get("causal"))
    if nested.get("use_swa"):
        resolved_window = next((w for w in _window(config, n_layers)[0] if w), 0)
        width = nested.get("swa_window_size")
        compare("window", "layer_types", resolved_window, "dflash_config.swa_window_size", width)
    if "sliding_attention" in _layer_types(config, n_layers)[0] and config.get("sliding_window"):
        compare("window", "use_sliding_window", _sliding_window(config) or 0,
                "sliding_window", config["sliding_window"])  # fmt: skip
    return found


_TWO_PLACES = {
    "block_size": "block_size",
    "mask_token_id": "mask_token_id",
    "target_layer_ids": "layer_ids",
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "softcap",
}
