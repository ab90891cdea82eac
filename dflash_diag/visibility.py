"""What a rule lets a proposal depend on, through all layers: the expectation behind the probes.

Written from the rule's words and not from the masks that the drafter uses, so that the two can be
held against each other. A slot depends on what it sees, and on what the slots that it sees depend
on: two layers carry a row that only slot 0 may see to every slot that sees slot 0.

Symbols: A anchors, B block size, D proposed tokens, T context rows, S = A*B slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_diag.adapters import DraftSpec
from dflash_diag.conventions import Convention


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which rows and slots a block sees; fields as in `Convention`."""

    block_size: int
    first_slot: int
    n_proposed: int
    in_block: tuple[str, ...] = ("bidirectional",)
    window: tuple[int | None, ...] = (None,)
    context_bound: str = "strict"
    window_rule: str = "slot"
    other_blocks: str = "hidden"
    label_offset: int = 0

    @classmethod
    def of(cls, how: Convention) -> Rule:
        """The rule of a resolved convention."""
        return cls(
            block_size=how.block_size,
            first_slot=how.first_slot,
            n_proposed=how.n_proposed,
            in_block=how.in_block,
            window=how.window,
            context_bound=how.context_bound,
            window_rule=how.window_rule,
            other_blocks=how.other_blocks,
            label_offset=how.label_offset,
        )

    @classmethod
    def serving(cls, spec: DraftSpec) -> Rule:
        """The serving rule with full, bidirectional layers."""
        return cls(
            block_size=spec.block_size, first_slot=spec.first_slot, n_proposed=spec.n_proposed
        )

    def not_servable(self) -> Iterator[tuple[str, str]]:
        """Cause and reason of whatever serving cannot follow."""
        if self.context_bound != "strict":
            yield (
                "mask.anchor_included",
                "the rule shows a block the state of its anchor, which no server has by then",
            )
        if self.other_blocks != "hidden":
            yield (
                "mask.cross_block_leak",
                "the rule shows a block other blocks, and a server drafts one at a time",
            )
        if self.label_offset:
            yield (
                "label.shift",
                f"the rule labels every slot {self.label_offset:+d} tokens from its own",
            )

    def served(self) -> Rule:
        """The same layers under the serving rule."""
        return replace(self, context_bound="strict", other_blocks="hidden", label_offset=0)

    def oldest_window(self) -> int | None:
        """The largest window, where every layer has one."""
        sizes = [size for size in self.window if size is not None]
        return max(sizes) if len(sizes) == len(self.window) else None


def dependence(rule: Rule, anchors: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """What proposals may depend on.

    Parameters
    ----------
    anchors
        [A] positions of blocks that are drafted in one pass, over rows 0..n_rows-1.

    Returns
    -------
    tuple
        On context rows [A, D, T], and on slots [A, D, A, B], bool.
    """
    a, b = len(anchors), rule.block_size
    rows, own = torch.zeros(a * b, n_rows, dtype=torch.bool), torch.eye(a * b, dtype=torch.bool)
    for in_block, window in zip(rule.in_block, rule.window, strict=True):
        context, slots = _seen(rule, anchors.cpu(), n_rows, in_block, window)
        through = slots.float()
        rows = rows | context | ((through @ rows.float()) > 0)
        own = own | ((through @ own.float()) > 0)
    last = rule.first_slot + rule.n_proposed
    kept = slice(rule.first_slot, last)
    return rows.view(a, b, n_rows)[:, kept], own.view(a, b, a, b)[:, kept]


def _seen(
    rule: Rule, anchors: Tensor, n_rows: int, in_block: str, window: int | None
) -> tuple[Tensor, Tensor]:
    """What each slot sees in one layer: rows [S, T] and slots [S, S]."""
    b = rule.block_size
    slot, anchor = torch.arange(b).repeat(len(anchors)), anchors.repeat_interleave(b)
    block = torch.arange(len(anchors)).repeat_interleave(b)
    row = torch.arange(n_rows)
    newest = anchor if rule.context_bound == "inclusive" else anchor - 1
    rows = row <= newest[:, None]
    back = slot[:, None] - slot[None, :]
    inside = torch.ones_like(back, dtype=torch.bool) if in_block != "causal" else back >= 0
    if window is not None:
        oldest = anchor + slot - window + 1 if rule.window_rule == "slot" else anchor - window
        rows &= row >= oldest[:, None]
        inside &= back.abs() < window
    same = block[:, None] == block[None, :]
    slots = same & inside
    if rule.other_blocks == "all":
        slots |= ~same
    elif rule.other_blocks == "later":
        slots |= anchor[:, None] < anchor[None, :]
    return rows, slots
