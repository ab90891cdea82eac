"""Whether every place that describes RoPE describes the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_diag.drafter import rope_frequencies
from dflash_diag.static_audit.material import Checked, Material, StaticFinding, listed

_NOT_SCALING = (
    "rope_theta",
    "rope_type",
    "type",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
)
THETA = 10_000.0
"""What transformers takes where no theta is stated."""


def check_rope(m: Material) -> Checked:
    """Every place that states a RoPE says the same, and a buffer in the file is that RoPE's."""
    how, places = m.convention, dict(_rope_places(m.body))
    found = [
        *_rope_theta(m, places),
        *_rope_scaling(places),
        *_rope_layout(m, places),
        *_rope_buffers(m),
    ]
    scaling = "" if how.rope_scaling is None else ", scaled"
    return Checked(
        "RoPE",
        f"theta {how.rope_theta:g} over {how.rotary_width} dimensions{scaling}, stated by "
        + (", ".join(places) or "nothing"),
        "one theta, width and scaling, whichever key a reader takes",
        found,
    )


def _rope_places(body: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where RoPE is described and with what, the old schema and both forms of the new one."""
    if body.get("rope_theta") is not None:
        yield "rope_theta", {"rope_theta": body["rope_theta"]}
    for name in ("rope_parameters", "rope_scaling"):
        value = body.get(name)
        if not isinstance(value, Mapping):
            continue
        flat = {k: v for k, v in value.items() if not isinstance(v, Mapping)}
        if flat:
            yield name, flat
        nested = {k: v for k, v in value.items() if isinstance(v, Mapping)}
        used = set(body.get("layer_types") or nested) & set(nested) or set(nested)
        for kind in sorted(used):
            yield f"{name}.{kind}", nested[kind]


def _rope_theta(m: Material, places: Mapping[str, Mapping[str, Any]]) -> Iterator[StaticFinding]:
    stated = {p: v["rope_theta"] for p, v in places.items() if _is_number(v.get("rope_theta"))}
    if len(set(stated.values())) > 1:
        said = ", ".join(f"{_key(place)} is {value!r}" for place, value in stated.items())
        text = f"RoPE's theta depends on the key that is read: {said}."
        yield StaticFinding("checkpoint.config_contradiction", "warn", text, {"theta": stated})
    elif not stated and not m.overridden("rope_theta"):
        text = (
            f"No key states RoPE's theta: transformers and speculators then take {THETA:g}, other "
            "readers 1000000 or the target's."
        )
        yield StaticFinding("rope.theta", "warn", text, {"used": m.convention.rope_theta})
    elif stated and set(stated.values()) != {THETA}:
        old, new = "rope_theta" in stated, len(stated) > ("rope_theta" in stated)
        if not (old and new):
            lacking = "rope_parameters" if old else "the top-level rope_theta"
            text = (
                f"Only {_key(next(iter(stated)))} states theta; code that reads {lacking} alone "
                f"takes {THETA:g}."
            )
            yield StaticFinding("rope.theta", "note", text, {"theta": stated})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(place: str) -> str:
    return place if place == "rope_theta" else f"{place}.rope_theta"


def _rope_scaling(places: Mapping[str, Mapping[str, Any]]) -> Iterator[StaticFinding]:
    stated = {
        place: {"rope_type": v.get("rope_type", v.get("type"))}
        | {k: x for k, x in v.items() if k not in _NOT_SCALING}
        for place, v in places.items()
        if v.get("rope_type", v.get("type")) is not None
    }
    values = list(stated.values())
    if any(value != values[0] for value in values):
        said = ", ".join(f"{place} says {value['rope_type']}" for place, value in stated.items())
        text = f"RoPE's scaling depends on the key that is read: {said}, or its numbers differ."
        yield StaticFinding("checkpoint.config_contradiction", "warn", text, {"scaling": stated})
    scaled = [p for p, v in stated.items() if v["rope_type"] not in ("default", "mrope")]
    if len(stated) == 1 and scaled:
        text = f"Only {scaled[0]} states the scaling; code that does not read it scales nothing."
        yield StaticFinding("rope.scaling", "note", text, {"scaling": stated})


def _rope_layout(m: Material, places: Mapping[str, Mapping[str, Any]]) -> Iterator[StaticFinding]:
    """Keys that some readers follow and others, the drafter's own class among them, do not."""
    factors = [m.body.get("partial_rotary_factor")]
    factors += [v.get("partial_rotary_factor") for v in places.values()]
    partial = {f for f in factors if _is_number(f) and f != 1}
    if partial and not m.overridden("rotary_width"):
        text = (
            f"partial_rotary_factor is {listed(sorted(partial))}: vLLM and SGLang rotate that part "
            "of a head, z-lab's class and most trainers all of it. This reading rotates "
            f"{m.convention.rotary_width} dimensions."
        )
        yield StaticFinding("rope.rotary_width", "warn", text, {"factors": sorted(partial)})
    mrope = sorted({k for v in places.values() for k in v if k.startswith("mrope")})
    mrope += [p for p, v in places.items() if v.get("rope_type", v.get("type")) == "mrope"]
    if mrope:
        text = (
            f"{listed(mrope)} come from a vision-language target; a drafter of text has one "
            "position a token, and servers that see these keys refuse it or rotate otherwise."
        )
        yield StaticFinding("rope.scaling", "warn", text, {"keys": mrope})
    styles = m.declared("is_neox_style", "rope_is_neox_style")
    interleaved = [f"{key} is {value}" for key, value in styles.items() if not value]
    if interleaved and not m.overridden("rope_interleaved"):
        pairs = "neighbouring dimensions" if m.convention.rope_interleaved else "halves of a head"
        text = (
            f"{listed(interleaved)}: vLLM and SGLang then pair neighbouring dimensions, z-lab's "
            f"class and most trainers halves of a head. This reading pairs {pairs}."
        )
        yield StaticFinding("rope.interleaving", "warn", text, {"declared": styles})


def _rope_buffers(m: Material) -> Iterator[StaticFinding]:
    """Frequencies that were saved with the weights are those that training used."""
    how = m.convention
    names = [n for n in m.checkpoint.tensors if n.endswith("inv_freq") and "original" not in n]
    ours, _ = rope_frequencies(how.rope_theta, how.rotary_width, how.rope_scaling)
    for name in names:
        stored = m.checkpoint.tensors[name].float().flatten()
        if len(stored) != len(ours):
            text = (
                f"{name} has frequencies for {2 * len(stored)} dimensions of a head, this reading "
                f"rotates {how.rotary_width}."
            )
            yield StaticFinding("rope.rotary_width", "fail", text, {"tensor": name})
        # A buffer that was cast to bfloat16 is off by up to 1 in 256.
        elif not torch.allclose(stored, ours, rtol=1e-2, atol=0):
            implied = _implied_theta(stored)
            said = f"those of about theta {implied:.2g}" if implied else "no RoPE's"
            text = f"{name} holds other frequencies than theta {how.rope_theta:g} gives: {said}."
            evidence = {"tensor": name, "implied_theta": implied}
            yield StaticFinding("rope.theta", "fail", text, evidence)


def _implied_theta(frequencies: Tensor) -> float | None:
    """The theta whose unscaled frequencies these are, up to rounding; None if there is none."""
    if len(frequencies) < 2 or not bool((frequencies > 0).all()):
        return None
    theta = float(frequencies[-1]) ** -(len(frequencies) / (len(frequencies) - 1))
    again, _ = rope_frequencies(theta, 2 * len(frequencies), None)
    return theta if torch.allclose(frequencies, again, rtol=2e-2, atol=0) else None
