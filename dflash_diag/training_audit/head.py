"""Whether the logits are made by the target's own head, and whether that is left as it is.

Symbols: V vocabulary, H hidden size, N slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dflash_diag.training_audit.calling import Output
from dflash_diag.training_audit.graph import leaves
from dflash_diag.training_audit.material import Material
from dflash_diag.training_audit.properties import Property, fact, fault, fine, untested

CHECKED = 4096
"""Rows of the head on which a fit is checked."""
TIED = 1e-3
"""Part of the logits that may lie outside the head's row space."""


def head_properties(output: Output, material: Material) -> Iterator[Property]:
    """Head tied, head frozen, target detached, and how much is trained."""
    yield _tied(output, material)
    yield from _trained(output, material)
    yield _detached(output)


def _tied(output: Output, material: Material) -> Property:
    id_, expected = "head.tied", "logits that the target's head can make"
    head = material.head
    if head is None:
        return untested(id_, "the target's head is not at hand", expected=expected)
    logits = output.logits.detach().flatten(0, 1).double()
    if logits.shape[-1] != len(head):
        return untested(
            id_,
            f"the logits are over {logits.shape[-1]} tokens, the target's head over {len(head)}",
            expected=expected,
        )
    left = outside(logits, head.to(logits))
    if left is None:
        return untested(id_, "the head has as many columns as rows", expected=expected)
    if left <= max(TIED, 4 * float(torch.finfo(output.logits.dtype).eps)):
        return fine(id_, "yes", expected, f"{left:.1g} of them lies outside its row space.")
    return fault(
        id_,
        "no",
        expected,
        f"{left:.2g} of the logits lie outside what the target's head makes of any hidden state (a "
        "cap on the logits would do that too).",
        "Serve this drafter with its own head (most servers take the target's), or train with the "
        "target's.",
    )


def outside(logits: Tensor, head: Tensor) -> float | None:
    """Part of logits [N, V] that no hidden state explains, on rows that the fit has not seen."""
    v, h = head.shape
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(v, generator=generator).to(head.device)
    n = h + h // 2 + 8
    fitted, rest = order[:n], order[n : n + CHECKED]
    if not len(rest):
        return None
    # A common constant is no information: softmax does not see it.
    ones = head.new_ones(v, 1)
    wide = torch.cat([head, ones], dim=-1)
    hidden = torch.linalg.lstsq(wide[fitted], logits[:, fitted].T).solution
    made = wide[rest] @ hidden
    truth = logits[:, rest].T
    return float((made - truth).norm() / (truth - truth.mean(0)).norm().clamp(min=1e-300))


def _trained(output: Output, material: Material) -> Iterator[Property]:
    id_, expected = "head.frozen", "no table of V tokens among what is trained"
    if not output.loss.requires_grad:
        yield untested(id_, "the loss has no gradient", expected=expected)
        return
    trained = {id(one): one for one in leaves(output.loss)}.values()
    v, h = output.logits.shape[-1], material.states.shape[-1]
    tables = [one for one in trained if sorted(one.shape) == sorted((v, h))]
    n = sum(one.numel() for one in trained)
    yield fact(
        "step.trained",
        n,
        f"Numbers in the {len(trained)} tensors that the loss reaches and that require a gradient.",
    )
    if not tables:
        yield fine(id_, "yes", expected, "No tensor of the head's shape requires a gradient.")
        return
    same = any(_equal(one, material.head) for one in tables)
    whose = "the target's own head or embedding" if same else "a head or embedding"
    yield fault(
        id_,
        f"{len(tables)} of {[*tables[0].shape]}",
        expected,
        f"{whose[:1].upper()}{whose[1:]} is trained. The target's logits, or what a server "
        "borrows from it, are then no longer those of training.",
        "Freeze head and embedding, or export them with the drafter to a server that reads them.",
    )


def _equal(one: Tensor, head: Tensor | None) -> bool:
    if head is None or one.shape != head.shape:
        return False
    return bool(torch.equal(one.detach().to(head), head))


def _detached(output: Output) -> Property:
    id_, expected = "target.detached", "target logits without a gradient"
    target = output.target_logits
    if target is None:
        return untested(id_, "no target logits were returned", expected=expected)
    if not target.requires_grad:
        return fine(id_, "yes", expected)
    return fault(
        id_,
        "they have one",
        expected,
        "The loss can be lowered by moving the target towards the draft.",
        "Compute target logits without gradients.",
    )
