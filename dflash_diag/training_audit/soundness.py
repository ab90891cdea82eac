"""Whether a step can be audited at all: it runs, repeats itself, and leaves its inputs alone.

Symbols: A anchors, D proposed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_diag.adapters.bench import change
from dflash_diag.training_audit.calling import RETURNS, Caller, Output, StepError
from dflash_diag.training_audit.properties import Property, fault, fine, untested

REPEATED = 1e-3
"""Relative change from call to call above which a step is random; below it, or below two roundings
of coarser numbers, it is rounding."""
FACTOR = 4.0
"""What moves logits by less than this many times what a repetition does, moves nothing."""
ROUNDING = 16.0
"""The same in roundings of float32; exactly nothing moves where a mask hides something."""


def first_call(call: Caller) -> tuple[Output | None, Property]:
    """Call the step once."""
    expected = f"{RETURNS}, all finite"
    try:
        output = call()
    except StepError as error:
        return None, fault(
            "step.outputs",
            str(error),
            expected,
            "Nothing else can be said of a step that does not return what was agreed.",
            "Mend the step or its adapter.",
        )
    a, d, v = output.logits.shape
    return output, fine("step.outputs", f"A = {a}, D = {d}, V = {v}", expected)


def repeats(call: Caller, first: Output) -> tuple[float, Property]:
    """Call it again with the same seeds: how much its logits move, and whether that is chance."""
    expected = "the same answer to the same call"
    try:
        again = call()
    except StepError as error:
        found, moved = f"the second call fails: {error}", float("inf")
    else:
        if again.logits.shape != first.logits.shape:
            found, moved = f"logits {[*again.logits.shape]} in the second call", float("inf")
        else:
            parts = _differences(first, again)
            moved = max(parts.values())
            found = ", ".join(f"{name} by {x:.1g}" for name, x in parts.items() if x > 0)
    if moved <= max(REPEATED, 2 * float(torch.finfo(first.logits.dtype).eps)):
        return moved, fine(
            "step.deterministic", "yes", expected, f"From call to call: {found or 'bit for bit'}."
        )
    return moved, fault(
        "step.deterministic",
        found,
        expected,
        "It differs between two calls with the same seeds. Influences and losses are not told from "
        "what varies from call to call, so nothing else was asked.",
        "Seed every generator from data_seed and noise_seed; leave out dropout, the optimizer's "
        "step, and schedules that count calls.",
    )


def _differences(one: Output, two: Output) -> dict[str, float]:
    loss = abs(float(two.loss.detach()) - float(one.loss.detach()))
    found = {
        "logits": largest(change(one.logits, two.logits)),
        "loss": loss / max(abs(float(one.loss.detach())), 1e-12),
        "labels": float((one.labels != two.labels).double().mean()),
        "weights": float((one.weights - two.weights).abs().max()),
    }
    if one.target_logits is not None and two.target_logits is not None:
        found["target logits"] = largest(change(one.target_logits, two.target_logits))
    return found


def largest(moved: Tensor) -> float:
    """The largest of some relative changes; 0 where there are none."""
    return float(moved.nan_to_num(0.0, posinf=float("inf")).max()) if moved.numel() else 0.0


def threshold(repeated: float, dtype: torch.dtype) -> float:
    """Relative change of logits up to which they have not moved."""
    unit = float(torch.finfo(dtype).eps)
    return FACTOR * repeated + (ROUNDING * unit if dtype == torch.float32 else unit)


def mutation(call: Caller) -> Property:
    """Whether any call so far changed what it was given."""
    expected = "inputs as they were"
    if not call.mutated:
        return fine("step.mutates_inputs", "no", expected, f"In {call.calls} calls.")
    names = ", ".join(sorted(call.mutated))
    return fault(
        "step.mutates_inputs",
        names,
        expected,
        f"The step changes {names} in place: whoever uses them after it (the target's logits, the "
        "next drafter, a cache of states) reads something else.",
        "Work on copies.",
    )


def gradient(output: Output) -> Property:
    """Whether the loss can train anything."""
    expected = "a loss with a gradient"
    if output.loss.requires_grad:
        return fine("step.gradient", "yes", expected)
    return fault(
        "step.gradient",
        "the loss has none",
        expected,
        "Nothing learns from it; which loss it is cannot be recovered either.",
        "Compute the loss with gradients on, from logits that are not detached.",
    )


def anchors_used(call: Caller, first: Output, still: float) -> tuple[bool, Property]:
    """Whether the blocks are at the anchors that were given, and at no others."""
    expected = "blocks at the anchors that are given"
    m = call.material
    try:
        moved = call(anchors=tuple(a + 1 for a in m.anchors))
        other_data = call(data_seed=call_seed(1))
    except StepError as error:
        return True, untested("step.anchors", f"with other anchors or another seed, {error}")
    by_anchor, by_seed = (change(first.logits, one.logits) for one in (moved, other_data))
    steady = largest(by_seed) <= still
    if largest(by_anchor) > still and steady:
        return True, fine("step.anchors", "yes", expected, "They move with the anchors alone.")
    if largest(by_anchor) <= still:
        found, evidence = "no", "No block moves when all anchors do."
    else:
        found = "not alone"
        evidence = "Blocks also move when only data_seed does."
    return False, fault(
        "step.anchors",
        found,
        expected,
        f"{evidence} What depends on which row is then unknown.",
        "Use the anchors that are passed in, in place of drawing some.",
    )


def call_seed(index: int) -> int:
    """Other seeds than the first call's."""
    return 1009 + 7 * index


def untestable(ids: Iterator[str] | list[str], why: str) -> list[Property]:
    """Rows for everything that was not asked, with the reason."""
    return [untested(one, why) for one in ids]
