"""The explorer: one block as HTML, a few telling ones in reports, any of them with controls."""

from __future__ import annotations

from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.reference import doubt, doubted
from dflash_diag.errors import BadInput
from dflash_diag.outcomes import PICKS
from dflash_diag.views import token_pieces
from dflash_diag.widgets.explorer import drawing
from dflash_diag.widgets.explorer.blocks import Block, Blocks, Filter
from dflash_diag.widgets.explorer.controls import Controls
from dflash_diag.widgets.shared import bundle, group, table
from dflash_diag.widgets.words import Words

if TYPE_CHECKING:
    from dflash_diag.runs import Run

NODES = 16
"""Nodes of the tree that is drawn unless another is asked for."""


class Explorer:
    """Single blocks of a run's drafters."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.roles = list(run.roles)
        self._blocks: dict[str, Blocks] = {}
        self._context: tuple[str, list[str], list[int]] = ("", [], [])

    @cached_property
    def words(self) -> Words:
        """What tokens are called."""
        return Words(self.run)

    def blocks(self, role: str) -> Blocks:
        """All blocks of one drafter."""
        if role not in self._blocks:
            found = Blocks(self.run.name(role), self.run.scores(role), self.words.text)
            self._blocks[role] = found
        return self._blocks[role]

    def other(self, role: str) -> str:
        """The drafter to put beside one; empty where there is none."""
        return next((one for one in self.roles if one != role), "")

    def html(
        self, role: str, prompt: str, anchor: int, *, beside: str = "", nodes: int = NODES
    ) -> str:
        """One block as HTML that stands alone.

        Parameters
        ----------
        role, beside
            The drafter, and another to put beside it; ``"drafter"`` or ``"reference"``.
        nodes
            Of the tree, the root not counted.

        Raises
        ------
        BadInput
            The drafter has no block there.
        """
        own = self.blocks(role)
        row = own.row(prompt, anchor)
        if row is None:
            raise BadInput(
                f"{own.name} has no block at position {anchor} of {prompt!r}",
                f"a generated position that is followed by {own.n_proposed} tokens",
            )
        shown, lacking = [own.block(row)], ""
        if beside:
            other = self.blocks(beside)
            at = other.row(prompt, anchor)
            if at is None:
                lacking = (
                    f"<p>{escape(other.name)} has no block here: not all of the "
                    f"{other.n_proposed} tokens that it predicts were generated.</p>"
                )
            else:
                shown.append(other.block(at))
        pieces, tokens = self._text(prompt)
        where = f"anchor at position {anchor}: {self.words.quoted(tokens[anchor])}"
        parts = [
            drawing.STYLE,
            drawing.headline(prompt, where, shown, self.words),
            lacking,
            self._cautions,
            drawing.context(pieces, anchor, tokens[anchor], self.words),
            drawing.lines(shown, self.words),
            drawing.slots(shown, self.words),
            self._each(shown, nodes, tokens[anchor]),
            drawing.walk(own, row, own.outcomes.visit(row), self.words),
        ]
        return group("explorer", f"Block at position {anchor} of prompt {prompt}", parts)

    def _each(self, shown: list[Block], nodes: int, anchor: int) -> str:
        """What has a place of its own for every drafter."""
        made = "".join(
            f"<div>{drawing.candidates(one, self.words)}"
            f"{drawing.ddtree(one, nodes, self.words, anchor)}</div>"
            for one in shown
        )
        return f'<div class="pair">{made}</div>'

    def _text(self, prompt: str) -> tuple[list[str], list[int]]:
        """A prompt's tokens, as HTML and as ids; the last one asked for is kept."""
        if self._context[0] != prompt:
            capture = self.run.capture
            index = capture.index(prompt)
            tokens = capture.tokens(index).tolist()
            pieces = token_pieces(capture, index)
            if capture.foreign and self.words.decode is not None:
                pieces = [escape(self.words.decode(token)) for token in tokens]
            self._context = prompt, pieces, tokens
        return self._context[1:]

    @cached_property
    def _cautions(self) -> str:
        """What has to be known of every block: who wrote the text, and what tokens are called."""
        said = []
        text = doubted(self.run)
        if text is not None:
            said.append(f"{doubt(text)} Accepted means equal to that text.")
        if self.words.decode is None:
            which = "Tokens" if self.run.capture.foreign else "Tokens that the capture has not"
            said.append(
                f"{which} are shown by their ids in brackets: no tokenizer is at hand (give the "
                "target's folder with --target)."
            )
        return "".join(f'<p class="soft">{escape(one)}</p>' for one in said)

    def nothing(self, wanted: Filter, prompt: str) -> str:
        """What is shown where no block passes the filter."""
        inside = (
            f"<p>There is no block to show: none of the {escape(str(wanted))} is in prompt "
            f"<strong>{escape(prompt)}</strong>. Choose another prompt, or let more pass.</p>"
        )
        return group("explorer", "No block", [drawing.STYLE, inside])

    def picks(self, role: str, wanted: Filter) -> dict[str, int]:
        """Rows of the telling blocks that pass a filter, by what they are called."""
        blocks = self.blocks(role)
        kept = blocks.kept(wanted)
        found = {name: blocks.outcomes.pick(name, kept) for name in PICKS}
        return {name: row for name, row in found.items() if row is not None}

    def static_html(self) -> str:
        """The worst, the median and the most surprising round of decoding."""
        role = self.roles[0]
        blocks, beside = self.blocks(role), self.other(role)
        wanted = Filter()
        picks = self.picks(role, wanted)
        n = int(blocks.kept(wanted).sum())
        found = blocks.outcomes
        rows = [
            (
                name,
                *map(str, blocks.place(row)),
                f"{found.accepted[row]} of {blocks.n_proposed}",
                f"{found.expected[row]:.1f}",
                f"{found.surprise[row]:.2f}",
            )
            for name, row in picks.items()
        ]
        head = ("round", "prompt", "anchor", "accepted", "expected", "surprise [nats]")
        caption = f"Three of the {n} rounds that decoding takes with {blocks.name}"
        named: dict[int, list[str]] = {}
        for name, row in picks.items():
            named.setdefault(row, []).append(name)
        shown = "".join(
            f"<details{' open' if i == 0 else ''}><summary>The {' and '.join(names)} round"
            f"</summary>{self.html(role, *blocks.place(row), beside=beside)}</details>"
            for i, (row, names) in enumerate(named.items())
        )
        said = (
            "The worst round accepts fewest, and of those gives the target's token least; the "
            "median is the middle one. Surprise is minus the logarithm of the probability that "
            "the drafter's own confidence gave to what happened. In JupyterLab, menus show any "
            "block."
        )
        return f"<p>{said}</p>{group('explorer', caption, [table(caption, head, rows)])}{shown}"

    def widget(self) -> Any:
        """Controls above the block that they choose."""
        return Controls(self).box

    def __repr__(self) -> str:
        names = " beside ".join(self.run.name(role) for role in self.roles)
        return f"Explorer of {names}, {len(self.blocks(self.roles[0]).prompts)} prompts"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return bundle(self.static_html(), repr(self), self.widget)
