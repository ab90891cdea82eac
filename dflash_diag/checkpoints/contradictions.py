"""Keys of one checkpoint that give a field two values.

Only a disagreement that changes a resolved value counts: a key that is absent, or says the same in
other words, contradicts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_diag.checkpoints import attention, rope
from dflash_diag.checkpoints.keys import (
    Value,
    at,
    body_key,
    draft_value,
    is_int,
    n_draft_layers,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.resolving import read_fields
from dflash_diag.checkpoints.stacks import speculators, vllm
from dflash_diag.checkpoints.stacks.common import Reader, layout_claims
from dflash_diag.checkpoints.stacks.detecting import detect_stack
from dflash_diag.checkpoints.vocabulary import possible_kinds


@dataclass(frozen=True)
class Contradiction:
    """Two keys of one checkpoint that give a field different values."""

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
    reader = detect_stack(checkpoint).reader
    values = read_fields(checkpoint, reader)
    if "layer_ids" in values:
        ids, where = values["layer_ids"]
        rule = values["layer_id_rule"].value if "layer_id_rule" in values else "output"
        values["layer_ids"] = Value(as_outputs(ids, rule), where)
    found = []
    for name, claims_of in _CLAIMS.items():
        if name not in values:
            continue
        used, source = values[name].value, values[name].source.key or "the default"
        for key, claimed in claims_of(checkpoint, reader):
            if claimed != used and key not in source.split(", "):
                found.append(Contradiction(name, source, plain(used), key, plain(claimed)))
    return found


_Claims = Iterator[tuple[str, Any]]
"""Keys that speak about a field, each with the value that it claims."""


def _two_places(name: str, convert: Callable[[Any], Any] = lambda v: v) -> Callable[..., _Claims]:
    def claims(checkpoint: Checkpoint, _: Reader) -> _Claims:
        for key in (f"dflash_config.{name}", name):
            value = at(checkpoint.config, key)
            if value is not None:
                yield key, convert(value)

    return claims


def _block_sizes(checkpoint: Checkpoint, reader: Reader) -> _Claims:
    yield from _two_places("block_size")(checkpoint, reader)
    methods = at(checkpoint.config, "speculators_config.proposal_methods")
    key = "speculators_config.proposal_methods.speculative_tokens"
    layout = reader.fields["label_layout"](checkpoint)
    for method in methods if isinstance(methods, list) else ():
        tokens = at(method, "speculative_tokens")
        if is_int(tokens) and layout is not None:
            yield key, tokens + (layout.value == "same")


def _masks(checkpoint: Checkpoint, reader: Reader) -> _Claims:
    yield from _two_places("mask_token_id")(checkpoint, reader)
    for key in ("dspark_noise_token_id", "pard_token"):
        if checkpoint.config.get(key) is not None:
            yield key, checkpoint.config[key]


def as_outputs(ids: Any, rule: str) -> Any:
    """Ids as outputs of decoder layers, so that lists under two rules can be compared."""
    if not isinstance(ids, list | tuple) or not all(map(is_int, ids)):
        return ids
    return tuple(i - (rule == "input") for i in ids)


def _lists(checkpoint: Checkpoint, _: Reader) -> _Claims:
    for key, rule in {**vllm.IDS, speculators.IDS: "input"}.items():
        value = at(checkpoint.config, key)
        if value is not None:
            yield key, as_outputs(value, rule)


def _causal(checkpoint: Checkpoint, _: Reader) -> _Claims:
    layers = n_draft_layers(checkpoint)
    for key in ("is_causal", "dflash_config.causal"):
        value = at(checkpoint.config, key)
        if isinstance(value, bool):
            yield key, ("causal" if value else "bidirectional",) * layers


def _windows(checkpoint: Checkpoint, _: Reader) -> _Claims:
    tokens = at(checkpoint.config, "dflash_config.swa_window_size")
    if is_int(tokens):
        yield "dflash_config.swa_window_size", (tokens,) * n_draft_layers(checkpoint)
    types = attention.layer_types(checkpoint)[0]
    tokens = attention.stated_window(checkpoint)
    if attention.SLIDING in types and tokens is not None:
        stated = tuple(tokens if t == attention.SLIDING else None for t in types)
        yield body_key(checkpoint, "sliding_window"), stated


def _thetas(checkpoint: Checkpoint, reader: Reader) -> _Claims:
    for place in rope.PLACES:
        held, key = rope.entry(checkpoint, place, prefer=reader.rope_of)
        if held.get("rope_theta") is not None:
            yield f"{key}.rope_theta", held["rope_theta"]
    if checkpoint.body.get("rope_theta") is not None:
        yield body_key(checkpoint, "rope_theta"), checkpoint.body["rope_theta"]


def _scalings(checkpoint: Checkpoint, reader: Reader) -> _Claims:
    for place in rope.PLACES:
        held, key = rope.entry(checkpoint, place, prefer=reader.rope_of)
        if "rope_type" in held or "type" in held:
            yield key, rope.normal_scaling(checkpoint, held, key)


def _maps(checkpoint: Checkpoint, _: Reader) -> _Claims:
    if "d2t" in checkpoint.tensors:
        kinds = possible_kinds(checkpoint)
        if kinds == ("absolute",):
            yield "speculators' and vLLM's rule for d2t", "offset"


def _proposals(checkpoint: Checkpoint, _: Reader) -> _Claims:
    rank, key = draft_value(checkpoint.config, "markov_rank")
    if is_int(rank):
        yield key, "markov" if rank > 0 else "argmax"


_CLAIMS: Mapping[str, Callable[[Checkpoint, Reader], _Claims]] = {
    "block_size": _block_sizes,
    "layer_ids": _lists,
    "mask_token_id": _masks,
    "in_block": _causal,
    "window": _windows,
    "label_layout": lambda c, _: iter(layout_claims(c).items()),
    "rope_theta": _thetas,
    "rope_scaling": _scalings,
    "rotary_width": lambda c, reader: iter(rope.width_claims(c, prefer=reader.rope_of).items()),
    "rope_interleaved": lambda c, _: iter(rope.pairing_claims(c).items()),
    "embedding_scale": _two_places("input_embedding_scale"),
    "logit_scale": _two_places("output_multiplier"),
    "softcap": _two_places("final_logit_softcapping", lambda v: v or None),
    "vocabulary_map": _maps,
    "proposal": _proposals,
}


def plain(value: Any) -> Any:
    """A per-layer value as one, where all layers agree."""
    same = isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1
    return value[0] if same else value
