"""One block of a capture, drafted again: proposals beside the target's tokens, and what slots see.

Symbols: T tokens, P prompt tokens, G generated tokens, B block size, D proposed tokens, W stored
candidates, a anchor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash_diag.blocks import Context, context_rows, draft_blocks
from dflash_diag.bundle import Capture
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter
from dflash_diag.masks import MaskRule, rules_of
from dflash_diag.metrics import leading
from dflash_diag.proposals import Proposed
from dflash_diag.scoring import Borrowed, tapped_states


@dataclass(frozen=True, eq=False)
class DraftedBlock:
    """What a drafter proposes behind one anchor."""

    anchor: int
    how: Convention
    """The reading that it was drafted under, the moved position included."""
    labels: Tensor
    """[D] the target's tokens."""
    proposed: Proposed
    """With [D] in place of [M, D]."""

    @property
    def positions(self) -> range:
        """Of the B slots, as the drafter is told them."""
        first = self.anchor + self.how.position_offset
        return range(first, first + self.how.block_size)

    @property
    def predicts(self) -> range:
        """Positions of the D labels."""
        first = self.anchor + 1 + self.how.label_offset
        return range(first, first + self.how.n_proposed)

    @property
    def accepted(self) -> int:
        """Leading proposals that are the target's tokens."""
        return int(leading((self.proposed.ids == self.labels)[None].cpu().numpy())[0])


class BlockDrafts:
    """Drafts one block after another of a capture; what blocks of one prompt share is kept."""

    def __init__(self, capture: Capture, drafter: Drafter) -> None:
        self.capture, self.drafter = capture, drafter
        self._borrowed = Borrowed.of(capture, drafter)
        self._prompt: _Prompt | None = None

    def anchors(self, index: int) -> range:
        """Anchors of prompt ``index`` behind which all D labels exist."""
        prompt, how = self.capture.prompts[index], self.drafter.convention
        count = prompt.n_generated - how.n_proposed - max(0, how.label_offset)
        return range(prompt.n_prompt_tokens, prompt.n_prompt_tokens + max(0, count))

    @torch.inference_mode()
    def draft(self, index: int, anchor: int, offset: int = 0) -> DraftedBlock:
        """The block behind one of the `anchors`, moved by ``offset`` against its context."""
        how = self.drafter.convention
        drafter = self.drafter
        if offset:
            drafter = drafter.under(replace(how, position_offset=how.position_offset + offset))
        at = self._of(index)
        # Where blocks see one another, this one is drafted among all others, as it is scored.
        alone = how.other_blocks == "hidden"
        anchors = torch.tensor([anchor] if alone else list(self.anchors(index)))
        anchors = anchors.to(at.tokens.device)
        hidden = draft_blocks(
            drafter, self._borrowed.embedding, at.tokens, anchors, at.features, at.context
        )
        own, hidden = anchors == anchor, hidden[anchors == anchor]
        ahead = torch.arange(1, how.n_proposed + 1, device=anchors.device) + how.label_offset
        labels = at.tokens[anchor + ahead]
        found = self._borrowed.proposal.score(hidden, at.tokens[anchors[own]], labels[None])
        return DraftedBlock(
            anchor=anchor,
            how=drafter.convention,
            labels=labels,
            proposed=Proposed(**{name: values[0] for name, values in vars(found).items()}),
        )

    def _of(self, index: int) -> _Prompt:
        if self._prompt is None or self._prompt.index != index:
            drafter, how = self.drafter, self.drafter.convention
            weight = drafter.fc.weight
            n_context = context_rows(how.context_bound, self.anchors(index)[-1])
            states = tapped_states(self.capture, index, how)[:n_context]
            features = drafter.features(states.to(weight.device, weight.dtype))
            context = drafter.context(features, torch.arange(n_context, device=weight.device))
            tokens = self.capture.tokens(index).to(weight.device)
            self._prompt = _Prompt(index, tokens, features, context)
        return self._prompt


@dataclass(frozen=True, eq=False)
class _Prompt:
    index: int
    tokens: Tensor
    features: Tensor
    context: Context


@dataclass(frozen=True)
class Sight:
    """What one slot sees in some draft layers that show it the same."""

    layers: tuple[int, ...]
    """Empty where all layers do."""
    rows: tuple[int, ...]
    """Context rows."""
    slots: tuple[int, ...]
    """Of its own block."""
    others: int
    """Other blocks of the pass."""
    beyond_rows: tuple[int, ...]
    """Those of ``rows`` that a server does not show."""
    beyond_slots: tuple[int, ...]
    """Likewise of ``slots``."""


def sights(how: Convention, anchor: int, anchors: range) -> list[list[Sight]]:
    """What each slot of the block at ``anchor`` sees: [B] lists, one entry a rule.

    A server has the rows below the anchor and one block a pass, and moves a window with the slot,
    as engines do.

    Parameters
    ----------
    anchors
        Of the blocks of one pass, if they see one another.
    """
    rules = rules_of(how)
    seen: list[list[Sight]] = [[] for _ in range(how.block_size)]
    for rule in dict.fromkeys(rules):
        layers = tuple(i for i, one in enumerate(rules) if one == rule)
        rows, slots = _grids(rule, anchor)
        served_rows, served_slots = _grids(replace(rule.served, window_rule="slot"), anchor)
        others = {"hidden": 0, "later": anchors.stop - 1 - anchor, "all": len(anchors) - 1}
        for slot, sight in enumerate(seen):
            sight.append(
                Sight(
                    layers=() if len(layers) == len(rules) else layers,
                    rows=_where(rows[slot]),
                    slots=_where(slots[slot]),
                    others=others[rule.other_blocks],
                    beyond_rows=_where(rows[slot] & ~served_rows[slot]),
                    beyond_slots=_where(slots[slot] & ~served_slots[slot]),
                )
            )
    return seen


def _grids(rule: MaskRule, anchor: int) -> tuple[Tensor, Tensor]:
    """Visible rows [B, a + 1] and slots [B, B]."""
    rows = rule.rows(torch.tensor([anchor]), anchor + 1)[0]
    return rows.expand(rule.block_size, -1), rule.own()


def _where(visible: Tensor) -> tuple[int, ...]:
    return tuple(visible.nonzero()[:, 0].tolist())
