"""What the browsers have in common: menus that the keyboard can step through, tables, a style."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from dflash_diag.views import NUMBER

Option = tuple[str, Any]
"""What a menu says, and the value that it stands for."""


class Cell(NamedTuple):
    """A table's cell that is more than its text."""

    html: str
    attributes: str = ""


def menu(label: str, options: Sequence[Option], value: Any, width: str = "36em") -> Any:
    """A menu of options, one of them chosen.

    Parameters
    ----------
    width
        As wide as the names of most prompts by default; less where the window is narrow.
    """
    import ipywidgets

    layout = {"width": "auto", "min_width": "0", "flex": f"0 1 {width}"}
    return ipywidgets.Dropdown(options=options, value=value, description=label, layout=layout)


def with_arrows(menu: Any) -> Any:
    """A menu with buttons that go one option up or down and stop at the ends.

    JupyterLab keeps the arrow keys of a closed menu for itself and moves to another cell; Enter on
    a button reaches it.
    """
    import ipywidgets

    return ipywidgets.HBox([menu, _step(menu, -1), _step(menu, 1)])


def _step(menu: Any, by: int) -> Any:
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


def offer(menu: Any, options: Sequence[Option]) -> None:
    """Change a menu's options and keep what was chosen where it is still offered."""
    if list(menu.options) != list(options):
        kept = menu.value
        menu.options = options
        if kept in [value for _, value in options]:
            menu.value = kept


def bundle(static: str, text: str, widget: Callable[[], Any]) -> dict[str, Any]:
    """A view as a notebook's output: the controls where there is somebody to move them.

    What executes a notebook without a person (papermill, nbconvert) takes no input from a keyboard
    either. Controls in its output would be dead, and a blank space once it is made into a page.
    """
    twin = {"text/html": static, "text/plain": text}
    return {**widget()._repr_mimebundle_(), **twin} if _somebody_is_there() else twin


def _somebody_is_there() -> bool:
    """Whether the cell that is running could ask for input; True outside of a kernel."""
    from IPython import get_ipython

    kernel = getattr(get_ipython(), "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", True))


def view(html: str) -> Any:
    """Where the chosen HTML is shown."""
    import ipywidgets

    # As a flex box, which it is by default, it would grow with its tables and be cut off.
    return ipywidgets.HTML(html, layout={"display": "block"})


def group(kind: str, name: str, parts: Iterable[str]) -> str:
    """Parts of a view together, under the class ``kind`` and a name for screen readers."""
    inside = "".join([_STYLE, *parts])
    return f'<div class="browser {kind}" aria-label="{escape(name)}" role="group">{inside}</div>'


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    classes: Sequence[str] = (),
) -> str:
    """A table of plain text where it has no `Cell`, columns of numbers right-aligned.

    Parameters
    ----------
    classes
        One for each row; none by default.
    """
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    kinds = [' class="num"' if all(map(_is_number, column)) else "" for column in columns]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, kinds, strict=True)
    )
    marks = [f' class="{one}"' if one else "" for one in classes] or [""] * len(rows)
    body = "".join(
        f"<tr{mark}>"
        + "".join(_td(cell, kind) for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row, mark in zip(rows, marks, strict=True)
    )
    return (
        f'<div class="wide"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _is_number(cell: str | Cell) -> bool:
    return isinstance(cell, str) and (cell == "—" or NUMBER.match(cell) is not None)


def _td(cell: str | Cell, kind: str) -> str:
    if isinstance(cell, Cell):
        return f"<td{cell.attributes}>{cell.html}</td>"
    return f"<td{kind}>{escape(cell)}</td>"


# Shades of the text's own colour, so that dark and light themes both show them.
_STYLE = """<style>
.browser { line-height: 1.4; }
.browser .wide { overflow-x: auto; }
.browser table { border-collapse: collapse; margin: 0.6em 0; text-align: left; }
.browser caption { text-align: left; opacity: 0.9; }
.browser td, .browser th { padding: 0.1em 1.1em 0.1em 0; vertical-align: bottom; }
.browser td.num, .browser th.num { text-align: right; }
.browser td.num { white-space: nowrap; }
.browser pre { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6; }
.browser .rest { opacity: 0.75; }
.browser .flip { font-weight: bold; text-decoration: underline double; }
.browser .tie { text-decoration: underline dotted; }
.browser.block td { white-space: pre; vertical-align: top; }
.browser.block td, .browser.block th { padding-right: 0.7em; }
.browser.block .anchor { font-weight: bold; border: 1px solid; border-radius: 2px; padding: 0 1px; }
.browser.block .miss { font-weight: bold; }
@media print { .browser .wide { overflow: visible; } }
</style>"""
