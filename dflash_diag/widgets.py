"""Looking into one layer and one prompt of a comparison of hidden states.

The live view and its static twin are the same HTML: the twin shows the worst layer and the worst
prompt, so that an exported page answers without a script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.base import NOTHING
from dflash_diag.divergence import FACTOR
from dflash_diag.views import NUMBER, token_pieces

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
            _STYLE,
            self._modules(side, layer),
            self._tokens(side, prompt),
            self._layers(side, prompt),
        ]
        name = escape(f"{_layer(layer)} and prompt {prompt} against {side}")
        return f'<div class="states" aria-label="{name}" role="group">{"".join(inside)}</div>'

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
        return _table(caption, head, body)

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
        return _table(f"{prompt} against {side}: relative RMS of every layer", head, body)

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
            "side": _menu("against", self.sides, side),
            "layer": _menu("layer", self.layers(side), layer),
            "prompt": _menu("prompt", self.prompts(side), prompt),
        }
        # As a flex box, which it is by default, it would grow with its tables and be cut off.
        shown = ipywidgets.HTML(self.html(side, layer, prompt), layout={"display": "block"})

        def choose(change: Mapping[str, Any]) -> None:
            # Another side may offer others: the menus follow one by one, the view is sent once.
            with shown.hold_sync():
                if change["owner"] is menus["side"]:
                    for name, offered in (("layer", self.layers), ("prompt", self.prompts)):
                        _offer(menus[name], offered(change["new"]))
                shown.value = self.html(**{name: menu.value for name, menu in menus.items()})

        for menu in menus.values():
            menu.observe(choose, "value")
        rows = [ipywidgets.HBox([menu, _step(menu, -1), _step(menu, 1)]) for menu in menus.values()]
        return ipywidgets.VBox([*rows, shown])

    def __repr__(self) -> str:
        return f"StateBrowser against {', '.join(self.sides) or 'nothing'}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        bundle = {"text/html": self.static_html(), "text/plain": repr(self)}
        if not self.sides:
            return bundle
        live = self.widget()._repr_mimebundle_()
        return {**live, **bundle}


def _menu(label: str, values: Sequence[Any], value: Any) -> Any:
    import ipywidgets

    # As wide as the names of most prompts; less where the window is narrow.
    layout = {"width": "auto", "min_width": "0", "flex": "0 1 36em"}
    return ipywidgets.Dropdown(
        options=_options(values), value=value, description=label, layout=layout
    )


def _step(menu: Any, by: int) -> Any:
    """A button that goes one option up or down and stops at the ends.

    JupyterLab keeps the arrow keys of a closed menu for itself and moves to another cell; Enter on
    a button reaches it.
    """
    import ipywidgets

    sign, which = ("↑", "previous") if by < 0 else ("↓", "next")
    layout = {"width": "auto", "flex": "none"}
    button = ipywidgets.Button(
        description=sign, tooltip=f"{menu.description}: {which}", layout=layout
    )

    def step(_: Any) -> None:
        menu.index = min(max(menu.index + by, 0), len(menu.options) - 1)

    button.on_click(step)
    return button


def _options(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """What a menu says for each value."""
    return [("Embedding" if value == -1 else str(value), value) for value in values]


def _offer(menu: Any, values: Sequence[Any]) -> None:
    """Change a menu's options and keep what was chosen where it is still offered."""
    options = _options(values)
    if list(menu.options) != options:
        kept = menu.value
        menu.options = options
        if kept in values:
            menu.value = kept


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


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    kinds = [
        ' class="num"' if all(cell == "—" or NUMBER.match(cell) for cell in column) else ""
        for column in columns
    ]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{k}>{escape(cell)}</td>" for cell, k in zip(row, kinds, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


# Shades of the text's own colour, so that dark and light themes both show them.
_STYLE = """<style>
.states { line-height: 1.4; }
.states .wide { overflow-x: auto; }
.states table { border-collapse: collapse; margin: 0.6em 0; text-align: left; }
.states caption { text-align: left; opacity: 0.8; }
.states td, .states th { padding: 0.1em 1.1em 0.1em 0; vertical-align: bottom; }
.states td.num, .states th.num { text-align: right; }
.states td.num { white-space: nowrap; }
.states pre { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; }
.states .rest { opacity: 0.6; }
.states .flip { font-weight: bold; text-decoration: underline double; }
.states .tie { text-decoration: underline dotted; }
@media print { .states .wide { overflow: visible; } }
</style>"""
