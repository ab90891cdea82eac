"""Stepping through one real block of a drafter; a typical one in reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag.alignment_runs import real_blocks
from dflash_diag.one_block import BlockDrafts, DraftedBlock, Sight, sights
from dflash_diag.positions import pair_energies, phase_errors
from dflash_diag.readings import OFFSETS
from dflash_diag.views import token_pieces
from dflash_diag.widgets.shared import Option, bundle, group, menu, offer, table, view, with_arrows
from dflash_diag.widgets.words import Words

if TYPE_CHECKING:
    from dflash_diag.runs import Run

BEFORE = 20
"""Context tokens that are shown before the anchor."""
HEAD = (
    "slot",
    "position",
    "fed",
    "predicts",
    "target",
    "drafter",
    "outcome",
    "p",
    "rank",
    "phase",
    "sees",
    "served",
)


class BlockBrowser:
    """Slots of one block of a drafter, drafted again for every prompt, anchor and offset.

    Parameters
    ----------
    role
        ``"drafter"`` or ``"reference"``.
    """

    def __init__(self, run: Run, role: str = "drafter") -> None:
        self.run, self.role = run, role

    @cached_property
    def drafts(self) -> BlockDrafts:
        """The drafter on the run's capture."""
        return BlockDrafts(self.run.capture, self.run.drafter(self.role))

    @cached_property
    def prompts(self) -> list[str]:
        """Prompts that have a whole block."""
        return list(self.run.scores(self.role).prompt_ids)

    @cached_property
    def offsets(self) -> list[int]:
        """By how much the block may be moved."""
        return sorted({0, *OFFSETS})

    @cached_property
    def phases(self) -> list[list[float]]:
        """Degrees by offset and slot, over the blocks that the page's answer is about."""
        drafter, capture = self.drafts.drafter, self.run.capture
        blocks = real_blocks(capture, drafter, [capture.index(id_) for id_ in self.prompts])
        errors: list[list[float]] = phase_errors(
            drafter, pair_energies(drafter, blocks), self.offsets
        ).tolist()
        return errors

    @cached_property
    def words(self) -> Words:
        """What tokens are called."""
        return Words(self.run)

    def typical(self) -> tuple[str, int]:
        """Prompt and anchor of a block that is accepted about as far as the median one."""
        scores = self.run.scores(self.role)
        apart = np.abs(scores.accepted - np.median(scores.accepted))
        nearest = np.flatnonzero(apart == apart.min())
        one = nearest[len(nearest) // 2]
        return scores.prompt_ids[scores.prompt[one]], int(scores.anchor[one])

    def html(self, prompt: str, anchor: int, offset: int) -> str:
        """One block as HTML that stands alone."""
        index = self.run.capture.index(prompt)
        block = self.drafts.draft(index, anchor, offset)
        parts = [
            self._outcome(index, block, offset),
            self._text(index, block),
            self._slots(index, block, offset),
        ]
        return group("block", f"Block at position {anchor} of prompt {prompt}", parts)

    def _outcome(self, index: int, block: DraftedBlock, offset: int) -> str:
        d = block.how.n_proposed
        said = f"accepted {block.accepted} of {d}"
        if offset:
            stays = self.drafts.draft(index, block.anchor).accepted
            said += f" with the block moved by {offset:+d}; {stays} of {d} in its place"
        prompt = self.run.capture.prompts[index].id
        return f"<p><strong>{escape(prompt)}</strong>, anchor at {block.anchor}: {said}.</p>"

    def _text(self, index: int, block: DraftedBlock) -> str:
        pieces = token_pieces(self.run.capture, index)
        start, last = max(0, block.anchor - BEFORE), block.predicts[-1]
        before = "".join(pieces[start : block.anchor])
        after = "".join(pieces[block.anchor + 1 : last + 1])
        return (
            f'<p>The anchor is <span class="anchor">boxed</span>; what the target says after it is '
            f'<span class="rest">grey</span>.</p><pre>{"…" if start else ""}{before}'
            f'<span class="anchor">{pieces[block.anchor]}</span>'
            f'<span class="rest">{after}</span></pre>'
        )

    def _slots(self, index: int, block: DraftedBlock, offset: int) -> str:
        how = block.how
        phases = self.phases[self.offsets.index(offset)]
        seen = sights(how, block.anchor, self.drafts.anchors(index))
        fed = [self.words.quoted(int(self.run.capture.tokens(index)[block.anchor]))]
        fed += ["mask"] * (how.block_size - 1)
        proposals = [("—",) * 6] * how.first_slot + list(self._proposals(block))
        rows = [
            (
                str(slot),
                str(position),
                fed[slot],
                *proposals[slot],
                f"{phases[slot]:.0f}",
                "\n".join(map(_sees, seen[slot])),
                "\n".join(map(_served, seen[slot])),
            )
            for slot, position in enumerate(block.positions)
        ]
        miss = how.first_slot + block.accepted
        classes = [_CLASSES[(slot > miss) - (slot < miss)] for slot in range(how.block_size)]
        said = (
            f"Mask is token {how.mask_token_id}. <em>p</em> is the probability of the drafter's "
            "choice, <em>rank</em> how many tokens it likes better than the target's, "
            "<em>phase</em> how many degrees the move turns the slot's queries against the context "
            "(root mean square; 104 is as good as random), <em>sees</em> which context rows and "
            "slots of its block, <em>served</em> whether a server shows the same."
        )
        caption = f"{self.run.name(self.role)}, slot by slot"
        return f"<p>{said}</p>{table(caption, HEAD, rows, classes)}"

    def _proposals(self, block: DraftedBlock) -> Iterator[tuple[str, ...]]:
        """Cells of each proposal, from the position that is predicted to the label's rank."""
        found = block.proposed
        for k, (position, label, own) in enumerate(
            zip(block.predicts, block.labels.tolist(), found.ids.tolist(), strict=True)
        ):
            rank = int(found.rank[k])
            yield (
                str(position),
                self.words.quoted(label),
                self.words.quoted(own),
                _mark(right=label == own, ahead=k - block.accepted),
                f"{float(found.topk_logprobs[k, 0].exp()):.2f}",
                str(rank) if found.label_logprob[k].isfinite() else "never",
            )

    def static_html(self) -> str:
        """A block that is accepted about as far as the median one."""
        scores = self.run.scores(self.role)
        middle, n = np.median(scores.accepted), len(scores.accepted)
        said = (
            f"Of {n} blocks the median has {middle:g} accepted; this is one of the nearest to it. "
            "In JupyterLab, menus choose others and move them."
        )
        return f"<p>{said}</p>{self.html(*self.typical(), 0)}"

    def widget(self) -> Any:
        """Menus for prompt, anchor and offset above the block that they draft."""
        import ipywidgets

        prompt, anchor = self.typical()
        menus = {
            "prompt": menu("prompt", [(one, one) for one in self.prompts], prompt),
            "anchor": menu("anchor", self._anchors(prompt), anchor),
            "offset": menu("moved by", [(f"{d:+d}" if d else "0", d) for d in self.offsets], 0),
        }
        shown = view(self.html(prompt, anchor, 0))

        def choose(change: Mapping[str, Any]) -> None:
            if change["owner"] is menus["prompt"]:
                # While the menu of anchors follows, nothing is drafted.
                menus["anchor"].unobserve(choose, "value")
                offer(menus["anchor"], self._anchors(change["new"]))
                menus["anchor"].observe(choose, "value")
            shown.value = self.html(**{name: one.value for name, one in menus.items()})

        for one in menus.values():
            one.observe(choose, "value")
        return ipywidgets.VBox([*map(with_arrows, menus.values()), shown])

    def _anchors(self, prompt: str) -> list[Option]:
        index = self.run.capture.index(prompt)
        tokens = self.run.capture.tokens(index).tolist()
        return [(f"{a}: {self.words.quoted(tokens[a])}", a) for a in self.drafts.anchors(index)]

    def __repr__(self) -> str:
        return f"BlockBrowser of {self.run.name(self.role)}, {len(self.prompts)} prompts"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return bundle(self.static_html(), repr(self), self.widget)


_CLASSES = {-1: "", 0: "miss", 1: "rest"}
"""Rows before, at and behind the first miss."""


def _mark(*, right: bool, ahead: int) -> str:
    """Whether a proposal counts, in a mark and words."""
    sign = "✓" if right else "✗"
    words = "accepted" if ahead < 0 else "first miss" if ahead == 0 else "after the miss"
    return f"{sign} {words}"


def _sees(sight: Sight) -> str:
    """What a slot sees in some layers, in words."""
    parts = [f"rows {_runs(sight.rows)}", f"slots {_runs(sight.slots)}"]
    if sight.others:
        parts.append(f"{sight.others} other blocks")
    numbers = ", ".join(map(str, sight.layers))
    layers = f"layer{'s' * (len(sight.layers) > 1)} {numbers}: " if numbers else ""
    return layers + "; ".join(parts)


def _served(sight: Sight) -> str:
    """Whether a server shows the same, in a mark and words."""
    lacking = [
        f"{name} {_runs(beyond)}"
        for name, beyond in (("rows", sight.beyond_rows), ("slots", sight.beyond_slots))
        if beyond
    ]
    if sight.others:
        lacking.append("other blocks")
    return f"✗ lacks {'; '.join(lacking)}" if lacking else "✓ same"


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs) or "none"
