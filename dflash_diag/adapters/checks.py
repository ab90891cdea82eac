"""Checks of an adapter that need no look inside: two ways to the same context give one answer.

Each yields a `Check`. A tolerance is what rounding explains (`Bench.rounding`), measured on the
adapter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import torch

from dflash_diag.adapters import REFUSED, Refused
from dflash_diag.adapters.bench import Bench, change
from dflash_diag.adapters.checking import changes, snapshot

SHIFT = 256
"""Tokens by which all positions are shifted; no multiple of any rotation's period."""
FLOAT32_UNIT = 2.0**-24


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of an adapter."""

    check: str
    question: str
    status: Literal["ok", "differs", "not testable"]
    number: float | None = None
    """What was measured; mostly the largest relative change of a slot's logits."""
    tolerance: float | None = None
    """How large that may be."""
    reason: str = ""
    cause: str = ""
    """What a difference means, as an id of the catalogue of causes."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Found = tuple[float, float, str]
"""Number, tolerance, and what a difference means."""
CHECKS: dict[str, tuple[str, str, Callable[[Bench], Found]]] = {}


def run_checks(bench: Bench) -> Iterator[Check]:
    """All checks, in order."""
    for name, (question, cause, measure) in CHECKS.items():
        asked: dict[str, Any] = {"check": name, "question": question, "cause": cause}
        try:
            number, tolerance, reason = measure(bench)
        except REFUSED as refused:
            why = str(refused) or type(refused).__name__
            yield Check(**asked, status="not testable", reason=why)
            continue
        asked |= {"number": number, "tolerance": tolerance}
        if number <= tolerance:
            yield Check(**asked, status="ok")
        else:
            yield Check(**asked, status="differs", reason=reason)


def _check(question: str, cause: str = "") -> Callable[[Callable[[Bench], Found]], None]:
    def register(measure: Callable[[Bench], Found]) -> None:
        CHECKS[measure.__name__.removeprefix("_")] = (question, cause, measure)

    return register


@_check("Does a proposal leave the state as it was?", "serving.state")
def _pure(bench: Bench) -> Found:
    anchor = bench.anchors[-1]
    state = bench.context(anchor)
    before = snapshot(state)
    bench.drafter.propose(state, bench.token(anchor), anchor)
    changed = changes(before, snapshot(state))
    return len(changed), 0, f"propose() changes {', '.join(changed[:3])}"


@_check("Does a second proposal from one state equal the first?", "serving.state")
def _repeatable(bench: Bench) -> Found:
    anchor = bench.anchors[-1]
    state, token = bench.context(anchor), bench.token(anchor)
    first, again = (bench.drafter.propose(state, token, anchor) for _ in range(2))
    moved = float(change(first, again).max())
    return moved, bench.rounding, "a second proposal from one state differs from the first"


@_check("Is a truncated context the shorter context?", "serving.state")
def _truncated(bench: Bench) -> Found:
    anchor = bench.anchors[-1]
    back = max(1, anchor - bench.drafter.spec.block_size)
    wanted, token = bench.logits(anchor), bench.token(anchor)
    rows, others = len(bench.tokens), bench.others
    moved = [0.0]
    if rows > anchor and bench.refusal is None:
        longer = bench.drafter.truncate(bench.context(rows), anchor)
        moved.append(float(change(wanted, bench.drafter.propose(longer, token, anchor)).max()))
    # As after a rejected draft: other states for the newest rows, cropped, then the true ones.
    drafted = torch.cat([bench.features[:back], others[back:anchor]])
    kept = bench.drafter.truncate(bench.context(anchor, drafted), back)
    again = bench.drafter.context(
        bench.features[back:anchor], _positions(bench, back, anchor), kept
    )
    moved.append(float(change(wanted, bench.drafter.propose(again, token, anchor)).max()))
    return max(moved), bench.rounding, "rows that were cropped still count, or others are lost"


@_check("Is a context built in pieces the context built at once?", "serving.state")
def _chunked(bench: Bench) -> Found:
    anchor = bench.anchors[-1]
    edges = sorted({0, anchor // 2, anchor - 1, anchor})
    state = None
    for start, end in pairwise(edges):
        piece = bench.features[start:end], _positions(bench, start, end)
        state = bench.drafter.context(*piece, state)
    found = bench.drafter.propose(state, bench.token(anchor), anchor)
    moved = float(change(bench.logits(anchor), found).max())
    return moved, bench.rounding, "rows added later are placed or kept otherwise"


@_check("Does a block in a batch get the answer that it gets alone?")
def _batched(bench: Bench) -> Found:
    if not bench.drafter.has("forward_train"):
        raise Refused("the adapter has no forward_train")
    anchors = torch.tensor(bench.anchors, device=bench.tokens.device)
    rows = int(anchors[-1])
    positions = _positions(bench, 0, rows)
    together = bench.drafter.forward_train(
        bench.features[:rows], positions, anchors, bench.tokens[anchors]
    )
    moved = max(
        float(change(bench.logits(anchor), one).max())
        for anchor, one in zip(bench.anchors, together, strict=True)
    )
    return moved, bench.rounding, "a block drafted beside others is not the block drafted alone"


@_check("Does a shift of all positions change nothing?", "position.rebased")
def _shifted(bench: Bench) -> Found:
    anchor, longest = bench.anchors[-1], bench.drafter.spec.max_context
    shift = SHIFT
    if longest is not None:
        shift = min(shift, longest - len(bench.tokens) - bench.drafter.spec.block_size)
    if shift < 1:
        raise Refused(f"max_context = {longest} leaves no room for a shift")
    moved = float(change(bench.logits(anchor), bench.logits(anchor, shift=shift)).max())
    # An angle at position p is off by up to p half-units of float32, which turns a key by as much
    # as rounding its values to that relative size would.
    furthest = anchor + shift + bench.drafter.spec.block_size
    tolerance = bench.rounding * (1 + furthest * FLOAT32_UNIT / bench.unit)
    return moved, tolerance, "distances between the block and its context depend on the position"


@_check("Does the anchor's token matter?")
def _anchor_read(bench: Bench) -> Found:
    moved = []
    for anchor in bench.anchors:
        other = bench.logits(anchor, token=bench.other_token(bench.token(anchor)))
        moved.append(float(change(bench.logits(anchor), other).max()))
    # Turned round, so that a small number is a good one here as well.
    still = sum(one <= bench.still for one in moved) / len(moved)
    return still, 0.0, "blocks do not change with their anchor's token"


@_check("Is the mask token never proposed?", "mask_token.id")
def _mask_not_proposed(bench: Bench) -> Found:
    mask = bench.drafter.spec.mask_token_id
    if mask is None:
        raise Refused("the mask token is no token of the target")
    chosen = torch.stack([bench.logits(anchor).argmax(-1) for anchor in bench.anchors])
    share = float((chosen == mask).float().mean())
    return share, 0.0, "the mask token is proposed, and no target ever accepts it"


# The last one, so that it is asked after all other calls.
@_check("Does the same call give the same answer, at once and after other calls?")
def _deterministic(bench: Bench) -> Found:
    # Half of the type's digits, whatever the noise; and what counted as unmoved all along.
    tolerance = min(bench.unit**0.5, bench.still)
    moved = max(bench.repeated, bench.drift())
    return moved, tolerance, f"the same call gives logits that differ by {moved:.2g}"


def _positions(bench: Bench, start: int, end: int) -> torch.Tensor:
    return torch.arange(start, end, device=bench.features.device)
