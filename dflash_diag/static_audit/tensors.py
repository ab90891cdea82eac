"""Whether every tensor is there, arrives, and does something; and whether norms are factors."""

from __future__ import annotations

import torch

from dflash_diag.drafter import Drafter
from dflash_diag.static_audit.ablation import effects, random_sample
from dflash_diag.static_audit.layers import fc_taps
from dflash_diag.static_audit.material import TABLES, Checked, Material, StaticFinding, listed
from dflash_diag.static_audit.ownership import spectral_edge

CAUSE = "checkpoint.missing_or_unused_tensors"


def check_tensors(m: Material) -> Checked:
    """Names and shapes, as the audit found them; tables and buffers have checks of their own."""
    counted = fc_taps(m) not in (None, len(m.convention.taps))
    found = [
        StaticFinding(
            CAUSE,
            "fail",
            f"{one}.",
            {"tensor": one.name, "kind": one.kind, "found": one.found, "expected": one.expected},
        )
        for one in m.problems
        if not (one.name in TABLES and one.kind == "unexpected")
        and not one.name.endswith("inv_freq")
        and not (one.name == "fc.weight" and counted)
    ]
    aside = m.checkpoint.extra.get("set_aside") or []
    if aside:
        text = f"{len(aside)} tensors of another model lie in the file and are not read."
        found.append(StaticFinding(CAUSE, "note", text, {"tensors": list(aside)}))
    quantised = m.checkpoint.tensors.quantised
    if quantised:
        text = (
            f"{len(quantised)} tensors are 8-bit floats and are read in bfloat16, scales applied."
        )
        found.append(StaticFinding(CAUSE, "note", text, {"tensors": quantised}))
    return Checked(
        "tensors",
        f"{len(m.checkpoint.tensors)} tensors, named and shaped as the configuration has them",
        "every tensor in the file has a use, and every parameter a tensor",
        found,
    )


def check_loaded(m: Material) -> Checked:
    """The parameters that run hold the file's values."""
    expected = "every parameter holds what the file holds"
    if m.drafter is None:
        return Checked("loaded weights", "", expected, untested=[f"no drafter: {m.unloadable}"])
    held = m.checkpoint.tensors
    differ = [
        name
        for name, parameter in m.drafter.named_parameters()
        if name in held and not torch.equal(held[name].to(parameter.dtype), parameter.cpu())
    ]
    found = [
        StaticFinding(
            CAUSE,
            "fail",
            f"{name} does not hold the file's values once it is loaded.",
            {"tensor": name},
        )
        for name in differ
    ]
    return Checked("loaded weights", "all parameters hold the file's values", expected, found)


def check_effect(m: Material) -> Checked:
    """Silencing a tensor changes the output."""
    expected = "silencing any tensor changes what the head reads"
    if m.drafter is None:
        return Checked("effect", "", expected, untested=[f"no drafter: {m.unloadable}"])
    sample = m.sample or random_sample(m.drafter, m.embedding)
    measured = effects(m.drafter, sample)
    rounding = torch.finfo(m.drafter.fc.weight.dtype).eps
    dead = [name for name, effect in measured.items() if effect <= rounding]
    empty = [name for name in dead if not bool(m.drafter.get_parameter(name).any())]
    rest = [name for name in dead if name not in empty]
    found = []
    if empty:
        text = f"Nothing but zeros: {listed(empty)}."
        found.append(StaticFinding(CAUSE, "warn", text, {"tensors": empty}))
    if rest:
        text = (
            f"Without effect on what the head reads: {listed(rest)}. This reading skips them, or "
            "what they feed is zero."
        )
        found.append(StaticFinding(CAUSE, "warn", text, {"tensors": rest}))
    if silent := _silent_taps(m.drafter):
        words = ", ".join(map(str, silent))
        text = f"fc ignores the tapped layer {words}: its columns are all zero."
        evidence = {"layers": silent}
        found.append(StaticFinding("layers.missing_or_default", "warn", text, evidence))
    least = min(measured, key=measured.__getitem__)
    return Checked(
        "effect",
        f"each of {len(measured)} tensors matters, on {sample.what}; the least is {least}, at "
        f"{100 * measured[least]:.2g}\u00a0% of the output",
        expected,
        found,
        measured={"effects": measured, "on": sample.what},
    )


def _silent_taps(drafter: Drafter) -> list[int]:
    """Tapped layers, as the checkpoint lists them, that fc gives no weight."""
    columns = drafter.fc.weight.unflatten(1, (drafter.shape.n_taps, -1))
    ids = drafter.convention.layer_ids
    return [ids[tap] for tap in range(len(ids)) if not bool(columns[:, tap].any())]


ZERO_CENTRED = 0.10
"""Share of weights at or below 0, over a drafter's norms, from which they are not factors. Trained
factors are nearly all positive; weights that stand for 1 + w lie on both sides of 0."""

FEATURE_NORM = "hidden_norm.weight"
UNTRAINED = 1.1
"""Spectral edge up to which a matrix is taken to be as it was drawn; training moves it beyond."""


def check_norms(m: Material) -> Checked:
    """Whether the norms' weights are factors, or stand for 1 + w; and whether they were trained."""
    expected = "weights around 1 where they are factors, around 0 where they stand for 1 + w"
    norms = {
        name: tensor.float()
        for name, tensor in m.checkpoint.tensors.items()
        if tensor.ndim == 1 and tensor.numel() and "norm" in name.rpartition(".")[0]
    }
    if not norms:
        return Checked("norms", "", expected, untested=["the file holds no norm"])
    share = sum(float((w <= 0).float().mean()) for w in norms.values()) / len(norms)
    mean = sum(float(w.mean()) for w in norms.values()) / len(norms)
    found, cause = [], "norm.missing_or_doubled"
    one_plus = m.convention.norm_style == "one_plus"
    measured = {"share_not_positive": share, "mean": mean, "norm_style": m.convention.norm_style}
    if not one_plus and share > ZERO_CENTRED:
        text = (
            f"Norms look zero-centred, as if they stood for 1 + w (mean {mean:.2f}, "
            f"{100 * share:.0f}\u00a0% of the weights not above 0), but the reading scales by w."
        )
        found.append(StaticFinding(cause, "fail", text, measured))
    if one_plus and share <= ZERO_CENTRED and mean > 0.5:
        text = f"Norms look like plain factors (mean {mean:.2f}), but the reading scales by 1 + w."
        found.append(StaticFinding(cause, "fail", text, measured))
    neutral = 0.0 if one_plus else 1.0
    flat = [name for name, w in norms.items() if bool((w == neutral).all())]
    if FEATURE_NORM in flat and _is_random(m, "fc.weight"):
        flat.remove(FEATURE_NORM)
        text = (
            f"{FEATURE_NORM} holds exactly {neutral:g} throughout and fc.weight random numbers: "
            "training never reached what reads the target's states."
        )
        found.append(StaticFinding("hidden.ignored_by_drafter", "warn", text))
    if flat:
        text = (
            f"Exactly {neutral:g} throughout: {listed(flat)}. Never trained, rounded back in "
            "bfloat16 training, or missing and filled in when the file was saved."
        )
        found.append(StaticFinding(cause, "warn", text, {"tensors": flat}))
    said = f"{len(norms)} norms of mean {mean:.2f}, {100 * share:.0f}\u00a0% not above 0"
    return Checked("norms", said, expected, found, measured=measured)


def _is_random(m: Material, name: str) -> bool:
    if name not in m.checkpoint.tensors or m.checkpoint.tensors[name].ndim != 2:
        return False
    edge = spectral_edge(m.checkpoint.tensors[name])
    return edge is not None and edge < UNTRAINED
