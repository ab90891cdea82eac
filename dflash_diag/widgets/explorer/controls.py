"""What the explorer is moved by: menus and buttons that the keyboard reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag.outcomes import ORDERS, PICKS
from dflash_diag.trees import BUDGETS
from dflash_diag.widgets.explorer.blocks import ANY, NO_MISS, Blocks, Filter
from dflash_diag.widgets.shared import Option, menu, offer, view, with_arrows

if TYPE_CHECKING:
    from dflash_diag.widgets.explorer.exploring import Explorer


class Controls:
    """Controls and the view that they change; one change draws the view once.

    ``checkpoint``, ``blocks``, ``first miss``, ``token kind`` and ``within`` say which blocks
    there are, ``prompt`` and ``anchor`` which of them is shown, and so do the buttons; ``order`` is
    the one in which ``previous`` and ``next`` go.
    """

    def __init__(self, explorer: Explorer) -> None:
        import ipywidgets

        self.explorer = explorer
        self._busy = True
        names = [(explorer.run.name(role), role) for role in explorer.roles]
        role = explorer.roles[0]
        own = explorer.blocks(role)
        decoded = [("rounds of decoding", True), ("every anchor", False)]
        within: list[Option] = [("all prompts", False), ("this prompt", True)]
        self.menus = {
            "checkpoint": menu("checkpoint", names, role, SHORT),
            "beside": menu("beside", self._beside(role), explorer.other(role), SHORT),
            "blocks": menu("blocks", decoded, True, SHORT),
            "first miss": menu("first miss", _misses(own), ANY, SHORT),
            "token kind": menu("token kind", _kinds(own), "", SHORT),
            "within": menu("within", within, False, SHORT),
            "prompt": menu("prompt", _prompts(own), own.prompts[0]),
            "anchor": menu("anchor", [NO_BLOCK], NOWHERE),
            "order": menu("order", [(one, one) for one in ORDERS], "as in the text", SHORT),
            "tree nodes": menu("tree nodes", [(str(n), n) for n in BUDGETS], 16, SHORT),
        }
        self.buttons = {name: _button(name) for name in (*PICKS, "previous", "next")}
        self.count, self.shown = view(""), view("")
        for one in self.menus.values():
            one.observe(self._changed, "value")
        for name, button in self.buttons.items():
            button.on_click(self._step(name))
        self._show(own.outcomes.pick("worst", own.kept(self.filter)))
        self._busy = False
        self._draw()

        def line(*names: str) -> Any:
            return ipywidgets.HBox([self.menus[name] for name in names], layout=WRAP)

        self.box = ipywidgets.VBox(
            [
                line("checkpoint", "beside"),
                line("blocks", "first miss", "token kind", "within"),
                with_arrows(self.menus["prompt"]),
                with_arrows(self.menus["anchor"]),
                ipywidgets.HBox(list(self.buttons.values()), layout=WRAP),
                line("order", "tree nodes"),
                self.count,
                self.shown,
            ]
        )

    # --- what is chosen ---------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Any:
        """The value of a menu."""
        return self.menus[name].value

    @property
    def blocks(self) -> Blocks:
        """Those of the chosen checkpoint."""
        return self.explorer.blocks(self["checkpoint"])

    @property
    def filter(self) -> Filter:
        """Which of them are of interest."""
        prompt = self["prompt"] if self["within"] else ""
        return Filter(self["blocks"], self["first miss"], self["token kind"], prompt)

    @property
    def row(self) -> int | None:
        """The block that is shown; None where the filter leaves none."""
        return self.blocks.row(self["prompt"], self["anchor"])

    # --- what follows from a change ---------------------------------------------------------------

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """While menus follow one another, nothing is drawn; afterwards it is, once."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        self._draw()

    def _changed(self, change: dict[str, Any]) -> None:
        if self._busy:
            return
        name = change["owner"].description
        with self._quietly():
            if name == "checkpoint":
                role, beside = change["new"], self["beside"]
                offer(self.menus["beside"], self._beside(role))
                self.menus["beside"].value = self.explorer.other(role) if beside else ""
                offer(self.menus["prompt"], _prompts(self.blocks))
                offer(self.menus["first miss"], _misses(self.blocks))
                offer(self.menus["token kind"], _kinds(self.blocks))
            if name in ("checkpoint", "blocks", "first miss", "token kind", "within"):
                self._show(self._nearest())
            elif name == "prompt":
                self._offer_anchors()
                options = self.menus["anchor"].options
                self.menus["anchor"].value = options[0][1]

    def _nearest(self) -> int | None:
        """The block shown where it passes the filter, else the next one in the text that does."""
        kept = np.flatnonzero(self.blocks.kept(self.filter))
        if not len(kept):
            return None
        row = self.row
        start = self.blocks.first(self["prompt"]) if row is None else row
        return int(kept[min(int(np.searchsorted(kept, start)), len(kept) - 1)])

    def _step(self, name: str) -> Callable[[Any], None]:
        def step(_: Any) -> None:
            row = self._picked(name)
            if row is not None:
                with self._quietly():
                    self._show(row)

        return step

    def _picked(self, name: str) -> int | None:
        kept = self.blocks.kept(self.filter)
        if name in PICKS:
            return self.blocks.outcomes.pick(name, kept)
        order = self.blocks.outcomes.ordered(self["order"], kept)
        if not len(order):
            return None
        if self.row is None:  # nothing is shown: start where the order does
            return int(order[0])
        at = int(np.flatnonzero(order == self.row)[0]) + (1 if name == "next" else -1)
        return int(order[min(max(at, 0), len(order) - 1)])

    def _show(self, row: int | None) -> None:
        """Let the menus say which block is shown."""
        if row is not None:
            self.menus["prompt"].value = self.blocks.place(row)[0]
        self._offer_anchors()
        if row is not None:
            self.menus["anchor"].value = self.blocks.place(row)[1]

    def _offer_anchors(self) -> None:
        wanted = Filter(self["blocks"], self["first miss"], self["token kind"], self["prompt"])
        rows = np.flatnonzero(self.blocks.kept(wanted)).tolist()
        accepted, d = self.blocks.outcomes.accepted, self.blocks.n_proposed
        anchors = [self.blocks.place(row)[1] for row in rows]
        options: list[Option] = [
            (f"{anchor}: {accepted[row]} of {d} accepted", anchor)
            for row, anchor in zip(rows, anchors, strict=True)
        ]
        offer(self.menus["anchor"], options or [NO_BLOCK])

    def _draw(self) -> None:
        kept = self.blocks.kept(self.filter)
        row, n = self.row, int(kept.sum())
        if row is None:
            said = f"{n} blocks pass the filter, none of them in this prompt."
            html = self.explorer.nothing(replace(self.filter, prompt=""), self["prompt"])
        else:
            order = self.blocks.outcomes.ordered(self["order"], kept)
            at = int(np.flatnonzero(order == row)[0]) + 1
            said = f"Block {at} of {n} that pass the filter, {self['order']}."
            html = self.explorer.html(
                self["checkpoint"],
                self["prompt"],
                self["anchor"],
                beside=self["beside"],
                nodes=self["tree nodes"],
            )
        self.count.value = said
        self.shown.value = html

    # --- what menus offer -------------------------------------------------------------------------

    def _beside(self, role: str) -> list[Option]:
        run = self.explorer.run
        others = [(run.name(one), one) for one in self.explorer.roles if one != role]
        nothing = "nothing" if others else "nothing (give --reference)"
        return [(nothing, ""), *others]


NOWHERE = -1
NO_BLOCK: Option = ("no block passes the filter", NOWHERE)
SHORT = "19em"
WRAP = {"flex_flow": "row wrap"}


def _prompts(blocks: Blocks) -> list[Option]:
    return [(one, one) for one in blocks.prompts]


def _misses(blocks: Blocks) -> list[Option]:
    at: list[Option] = [(f"k = {k}", k) for k in range(1, blocks.n_proposed + 1)]
    return [("any", ANY), *at, ("none, all accepted", NO_MISS)]


def _kinds(blocks: Blocks) -> list[Option]:
    return [("any", ""), *((kind, kind) for kind in blocks.kinds)]


def _button(name: str) -> Any:
    import ipywidgets

    tips = {"previous": "previous block in the order", "next": "next block in the order"}
    tip = tips.get(name, f"the {name} block that passes the filter")
    return ipywidgets.Button(description=name, tooltip=tip, layout={"width": "auto"})
