"""Looking into one layer and one prompt of a comparison of hidden states; the worst in reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.base import NOTHING
from dflash_diag.divergence import FACTOR
from dflash_diag.views import token_pieces
from dflash_diag.widgets.shared import Option, bundle, group, menu, offer, table, view, with_arrows

if TYPE_CHECKING:
    from dflash_diag.runs import Run

Row = Mapping[str, Any]


class StateBrowser:
    """Modules of a layer, and layers and tokens of a prompt, of one side of a comparison."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._found: dict[str, Mapping[str, Any]] = {}

    @cached_property
    def sides(self) -> list[str]:
        """What the captured states are compared with."""
        return list(self.run.sides())

    def comparison(self, side: str) -> Mapping[str, Any]:
        """The stored comparison with a side."""
        if side not in self._found:
            self._found[side] = self.run.divergence(side)
        return self._found[side]

    def layers(self, side: str) -> list[int]:
        """Layers that were compared."""
        return [row["layer"] for row in self.comparison(side)["layers"]]

    def prompts(self, side: str) -> list[str]:
        """Prompts that were compared."""
        return list(dict.fromkeys(row["prompt"] for row in self.comparison(side)["prompts"]))

    def worst(self) -> tuple[str, int, str]:
        """The side, the layer and the prompt that are furthest apart."""
        side = max(self.sides, key=lambda s: max(map(_badness, self.comparison(s)["layers"])))
        layer = max(self.comparison(side)["layers"], key=_badness)["layer"]
        flips = [row for row in self.comparison(side)["flips"] if row["flipped"]]
        rows = [row for row in self.comparison(side)["prompts"] if row["layer"] == layer]

        def apart(row: Row) -> tuple[bool, int, int, float]:
            own = [flip["decisive"] for flip in flips if flip["prompt"] == row["prompt"]]
            return row["rel_rms"] is None, sum(own), len(own), row["rel_rms"] or 0.0

        return side, layer, max(rows, key=apart)["prompt"]

    def html(self, side: str, layer: int, prompt: str) -> str:
        """One side, layer and prompt as HTML that stands alone."""
        inside = [
            self._modules(side, layer),
            self._tokens(side, prompt),
            self._layers(side, prompt),
        ]
        return group("states", f"{_layer(layer)} and prompt {prompt} against {side}", inside)

    def _modules(self, side: str, layer: int) -> str:
        found = self.comparison(side)
        rows = [row for row in found["modules"] if row["layer"] == layer]
        head: tuple[str, ...] = (
            "module",
            "relative RMS",
            "floor",
            "by itself",
            "its floor",
            "verdict",
        )
        body: list[tuple[str, ...]] = [
            (
                row["module"],
                *map(_number, (row["rel_rms"], row["floor"])),
                *map(_number, (row.get("local_rel_rms"), row.get("local_floor"))),
                _origin(row),
            )
            for row in rows
        ]
        if not rows:
            head = ("module", "relative RMS", "floor", "noise floors", "verdict")
            body = [
                (
                    "output",
                    *map(_number, (row["rel_rms"], row["floor"], row["times_floor"])),
                    _origin(row),
                )
                for row in found["layers"]
                if row["layer"] == layer
            ]
        caption = f"{_layer(layer)} against {side}, in execution order. {found['modules_note']}"
        return table(caption, head, body)

    def _tokens(self, side: str, prompt: str) -> str:
        capture = self.run.capture
        index = capture.index(prompt)
        pieces = token_pieces(capture, index)
        flips = [row for row in self.comparison(side)["flips"] if row["prompt"] == prompt]
        flipped = [row for row in flips if row["flipped"]]
        for row in flipped:
            kind, mark = ("flip", "✗") if row["decisive"] else ("tie", "≈")
            tip = f"margins {row['margin_a']:.2g} and {row['margin_b']:.2g} logits"
            piece = pieces[row["position"]]
            pieces[row["position"]] = (
                f'<span class="{kind}" title="{tip}">{piece}<sup>{mark}</sup></span>'
            )
        start = capture.prompts[index].n_prompt_tokens
        decisive = sum(row["decisive"] for row in flipped)
        said = (
            f"{len(flipped)} of {len(flips)} choices flip, {decisive} by more than rounding"
            if flips
            else "the target's choices are not known"
        )
        return (
            f"<p><strong>{escape(prompt)}</strong>: {said}. After a token marked "
            '<span class="flip">✗</span> the target goes on differently, after one marked '
            '<span class="tie">≈</span> too, but by no more than rounding explains; the prompt is '
            f'grey.</p><pre><span class="rest">{"".join(pieces[:start])}</span>'
            f"{''.join(pieces[start:])}</pre>"
        )

    def _layers(self, side: str, prompt: str) -> str:
        found = self.comparison(side)
        overall = {row["layer"]: row for row in found["layers"]}
        rows = [row for row in found["prompts"] if row["prompt"] == prompt]
        body = [
            (
                _layer(row["layer"]),
                *map(_number, (row["rel_rms"], overall[row["layer"]]["rel_rms"])),
                _number(overall[row["layer"]]["floor"]),
                _number(row["token_max"]),
                "—" if row["token"] is None else str(row["token"]),
            )
            for row in rows
        ]
        head = ("layer", "this prompt", "all prompts", "floor", "worst token", "at position")
        return table(f"{prompt} against {side}: relative RMS of every layer", head, body)

    def static_html(self) -> str:
        """The worst layer and prompt; what is missing, where nothing is compared."""
        if not self.sides:
            return f"<p>{escape(NOTHING)}</p>"
        side, layer, prompt = self.worst()
        said = (
            f"Furthest apart: {_layer(layer).lower()} and {prompt}, against {side}. In JupyterLab, "
            "menus choose others."
        )
        return f"<p>{escape(said)}</p>{self.html(side, layer, prompt)}"

    def widget(self) -> Any:
        """Menus for side, layer and prompt above the view that they change."""
        import ipywidgets

        side, layer, prompt = self.worst()
        menus = {
            "side": menu("against", _options(self.sides), side),
            "layer": menu("layer", _options(self.layers(side)), layer),
            "prompt": menu("prompt", _options(self.prompts(side)), prompt),
        }
        shown = view(self.html(side, layer, prompt))

        def choose(change: Mapping[str, Any]) -> None:
            # Another side may offer others: the menus follow one by one, the view is sent once.
            with shown.hold_sync():
                if change["owner"] is menus["side"]:
                    for name, offered in (("layer", self.layers), ("prompt", self.prompts)):
                        offer(menus[name], _options(offered(change["new"])))
                shown.value = self.html(**{name: one.value for name, one in menus.items()})

        for one in menus.values():
            one.observe(choose, "value")
        return ipywidgets.VBox([*map(with_arrows, menus.values()), shown])

    def __repr__(self) -> str:
        return f"StateBrowser against {', '.join(self.sides) or 'nothing'}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        if not self.sides:
            return {"text/html": self.static_html(), "text/plain": repr(self)}
        return bundle(self.static_html(), repr(self), self.widget)


def _options(values: Sequence[Any]) -> list[Option]:
    """What a menu says for each value."""
    return [("Embedding" if value == -1 else str(value), value) for value in values]


def _badness(row: Row) -> tuple[bool, bool, float]:
    broken = row["nan_rows"] + row["inf_rows"] + row["zero_rows"] > 0
    # On disk an infinite number is None.
    times = row["times_floor"]
    return broken, row["above"], float("inf") if times is None else times


def _origin(row: Row) -> str:
    """Where a module's error comes from, in a mark and words."""
    if not row["above"]:
        return "✓ noise"
    if row["nan_rows"] + row["inf_rows"] + row["zero_rows"]:
        return "✗ zeros or no numbers"
    if row.get("local_rel_rms") is None:
        return "✗ above the noise"
    times = row["local_times_floor"]
    is_created = times is None or times > FACTOR
    return "✗ created in this layer" if is_created else "! inherited"


def _layer(layer: int) -> str:
    return "Embedding" if layer < 0 else f"Layer {layer}"


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.2g}"
