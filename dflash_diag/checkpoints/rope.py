"""RoPE as a configuration declares it: base, scaling, rotated width and pairing.

Old configurations hold ``rope_theta`` and ``rope_scaling``, new ones ``rope_parameters``, either of
them possibly one entry for each layer type. transformers takes ``rope_scaling`` where both stand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from dflash_diag.checkpoints.attention import layer_types
from dflash_diag.checkpoints.keys import (
    Value,
    at,
    body_key,
    declared,
    flag,
    head_width,
    number,
    positive,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Source, check_scaling
from dflash_diag.errors import BadInput, CheckpointError

DEFAULT_THETA = 10_000.0
PLACES = ("rope_scaling", "rope_parameters")
_NOT_SCALING = (
    "rope_theta",
    "type",
    "rope_dim",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "is_neox_style",
)
PAIRING = ("rope_is_neox_style", "is_neox_style")


def parameters(checkpoint: Checkpoint, *, prefer: str = "") -> tuple[Mapping[str, Any], str]:
    """The parameters in force and their key; empty where there are none.

    Where they differ between layer types, those of ``prefer`` are taken if they exist, else those
    of the one type that the drafter has.
    """
    place = PLACES[0] if checkpoint.body.get(PLACES[0]) else PLACES[1]
    return entry(checkpoint, place, prefer=prefer)


def entry(checkpoint: Checkpoint, place: str, *, prefer: str = "") -> tuple[Mapping[str, Any], str]:
    """What stands in one of `PLACES`, for the drafter's layers."""
    key = body_key(checkpoint, place)
    found = checkpoint.body.get(place) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{key} is {found!r}", "an object")
    kinds = {name: one for name, one in found.items() if isinstance(one, Mapping)}
    if not kinds:
        return found, key
    used = set(layer_types(checkpoint)[0])
    if prefer not in kinds:
        prefer = used.pop() if len(used) == 1 else ""
    if prefer in kinds:
        return kinds[prefer], f"{key}.{prefer}"
    entries = list(kinds.values())
    if any(one != entries[0] for one in entries):
        raise CheckpointError(
            f"{key} differs between layer types ({', '.join(map(str, found))})",
            "one RoPE for all layers",
        )
    return entries[0], f"{key}.{next(iter(kinds))}"


def theta(checkpoint: Checkpoint, *, prefer: str = "") -> Value:
    """The base, from the parameters in force, else from the top level, else transformers' own."""
    held, place = parameters(checkpoint, prefer=prefer)
    value, key = held.get("rope_theta"), f"{place}.rope_theta"
    if value is None:
        value, key = checkpoint.body.get("rope_theta"), body_key(checkpoint, "rope_theta")
    if value is None:
        return Value(DEFAULT_THETA, Source("", "default"))
    return declared(positive_number(value, key), key)


def positive_number(value: Any, key: str) -> float:
    """A finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{key} is {value!r}", "a number above 0")
    return float(value)


def scaling(checkpoint: Checkpoint, *, prefer: str = "") -> Value:
    """The scaling in force as canonical JSON, or None."""
    held, place = parameters(checkpoint, prefer=prefer)
    stated = "rope_type" in held or "type" in held
    source = Source(place, "declared") if stated else Source("", "default")
    return Value(normal_scaling(checkpoint, held, place), source)


def normal_scaling(checkpoint: Checkpoint, held: Mapping[str, Any], place: str) -> str | None:
    """Scaling parameters as canonical JSON; None for those that scale nothing."""
    kind = held.get("rope_type", held.get("type", "default"))
    if kind in ("default", "mrope"):  # text has one position a token: mrope turns as plain RoPE
        return None
    try:
        check_scaling(place, held)
    except BadInput as error:
        raise CheckpointError(error.found, error.expected) from error
    kept = {k: v for k, v in held.items() if k not in _NOT_SCALING} | {"rope_type": kind}
    if checkpoint.body.get("max_position_embeddings") is not None:
        kept["max_position_embeddings"] = positive(checkpoint.body, "max_position_embeddings")
    return json.dumps(kept, sort_keys=True)


def width(checkpoint: Checkpoint, *, prefer: str = "") -> Value:
    """Rotated dimensions of a head: ``rope_dim``, else the share, else the whole head.

    vLLM and SGLang honour both; transformers' Qwen3 class, and with it z-lab's, neither.
    """
    for key, value in width_claims(checkpoint, prefer=prefer).items():
        if not key.endswith("mrope_section"):  # it divides the width, whatever that is
            return declared(value, key)
    return Value(head_width(checkpoint), Source("head_dim (the whole head)", "implied"))


def width_claims(checkpoint: Checkpoint, *, prefer: str = "") -> dict[str, int]:
    """Every key that states a rotated width, the one in force first."""
    held, place = parameters(checkpoint, prefer=prefer)
    whole, claims = head_width(checkpoint), {}
    if held.get("rope_dim") is not None:
        claims[f"{place}.rope_dim"] = _even(held["rope_dim"], f"{place}.rope_dim", whole)
    for key, share in (
        (f"{place}.partial_rotary_factor", held.get("partial_rotary_factor")),
        (
            body_key(checkpoint, "partial_rotary_factor"),
            checkpoint.body.get("partial_rotary_factor"),
        ),
    ):
        if share is not None:
            claims[key] = _even(number(share, key) * whole, f"{key} * head_dim", whole)
    sections = held.get("mrope_section")
    if sections is not None:
        key = f"{place}.mrope_section"
        if not isinstance(sections, list | tuple) or not all(type(n) is int for n in sections):
            raise CheckpointError(f"{key} is {sections!r}", "a list of whole numbers")
        claims[key] = _even(2 * sum(sections), f"twice {key}", whole)
    return claims


def _even(value: Any, key: str, whole: int) -> int:
    """A width that can be rotated in pairs."""
    fits = isinstance(value, int | float) and value == value and 2 <= value <= whole
    if not fits or isinstance(value, bool) or int(value) % 2:
        raise CheckpointError(f"{key} is {value!r}", f"an even number from 2 to {whole}")
    return int(value)


def interleaved(checkpoint: Checkpoint) -> Value | None:
    """Whether neighbouring dimensions are paired; None where no key says so."""
    claims = pairing_claims(checkpoint)
    if not claims:
        return None
    key, value = next(iter(claims.items()))
    return declared(value, key)


def pairing_claims(checkpoint: Checkpoint) -> dict[str, bool]:
    """Every key that states the pairing (SGLang's name first), as ``rope_interleaved``."""
    paths = [*PAIRING, *(f"{place}.{name}" for place in PLACES for name in PAIRING)]
    found = {path: at(checkpoint.body, path) for path in paths}
    return {
        body_key(checkpoint, path): not flag(value, path)
        for path, value in found.items()
        if value is not None
    }
