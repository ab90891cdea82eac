"""Plots of stored results: one a diagnostic, looked up by id, drawn on any axes.

A plot reads a `Result` and nothing else. Titles state the finding and n, axes state quantity and
unit, rates share the scale [0, 1]. Roles differ by colour *and* marker *and* dash. matplotlib is
imported inside functions only, and pyplot (global state) not at all.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING

from dflash_diag.errors import BadInput
from dflash_diag.plotting import (
    acceptance,
    alignment,
    audit,
    checkpoint,
    claims,
    compare,
    data,
    gap,
    influence,
    masks,
    states,
)
from dflash_diag.plotting.pieces import FAINT, FONTS, LOOKS, WIDTH, Plot, style
from dflash_diag.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS: dict[str, Plot] = {
    **acceptance.PLOTS,
    **alignment.PLOTS,
    **checkpoint.PLOTS,
    **masks.PLOTS,
    **states.PLOTS,
    **influence.PLOTS,
    **gap.PLOTS,
    **claims.PLOTS,
    **data.PLOTS,
    **audit.PLOTS,
    **compare.PLOTS,
}
"""Plots by the id of their diagnostic."""


def plot(result: Result, ax: Axes | None = None) -> Axes:
    """Draw a result: its first panel on ``ax``, or all panels on a new figure.

    Raises
    ------
    KeyError
        No plot is registered for ``result.id``.
    BadInput
        The result's table is not one that its diagnostic makes.
    """
    if ax is None:
        return figure(result).axes[0]
    first, *_ = PLOTS[result.id].panels
    with style(), _drawing(result):
        first(result, ax)
    return ax


@contextmanager
def _drawing(result: Result) -> Iterator[None]:
    """Results are read from files, and somebody may have changed those."""
    try:
        yield
    except Exception as error:  # whatever another table leads to
        raise BadInput(
            f"the table of {result.id} cannot be drawn ({type(error).__name__}: {error})",
            "the one that its diagnostic makes",
            "run the diagnostic again",
        ) from error


def _plot_of(result: Result, *, brief: bool) -> Plot:
    registered = PLOTS[result.id]
    return (registered.brief if brief else None) or registered


def figure(result: Result, *, brief: bool = False) -> Figure:
    """A result's plot, or its brief form, on a figure of its own; errors as those of `plot`."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    registered = _plot_of(result, brief=brief)
    with style(), _drawing(result):
        panels = (*registered.panels, *registered.more(result))
        n = len(panels)
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.1)
        made = Figure(figsize=(WIDTH, registered.height(result) * n), layout=layout)
        rows = made.subplots(n, squeeze=False, height_ratios=registered.ratios(result))
        for draw, ax in zip(panels, rows[:, 0], strict=True):
            draw(result, ax)
        _labels_to_the_edge(made)
        _titles_from_the_edge(made)
    return made


def _labels_to_the_edge(made: Figure) -> None:
    """End labels that are wider than their axes at the axes' right edge, so that nothing is cut."""
    made.draw_without_rendering()
    for ax in made.axes:
        label = ax.xaxis.label
        if label.get_window_extent().width > ax.get_window_extent().width:
            label.set(ha="right", x=1.0)


def _titles_from_the_edge(made: Figure) -> None:
    """Start titles at the figure's left edge, not at the axes', so that they have all its width."""
    made.draw_without_rendering()
    made.set_layout_engine("none")  # what follows is not to move the axes again
    for ax in made.axes:
        box = ax.get_position()
        ax.set_title(ax.get_title(loc="left"), loc="left", x=(0.012 - box.x0) / box.width)


_METADATA = ("Creator", "Date", "Format", "Type")
"""Left out: it would differ from one matplotlib to the next."""


def svg(result: Result, *, brief: bool = False) -> str:
    """The figure as SVG text, the same bytes for the same result; its letters stay letters."""
    buffer = io.StringIO()
    with style(), warnings.catch_warnings():
        # A glyph that is not in matplotlib's font is drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure(result, brief=brief).savefig(buffer, format="svg", metadata=dict.fromkeys(_METADATA))
    drawn = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", buffer.getvalue())
    drawn = re.sub(r"font-weight: (bold|700)", "font-weight: 600", drawn)
    return drawn[drawn.index("<svg") :]


def figure_html(result: Result, *, brief: bool = False, caption: str = "") -> str:
    """``<figure>``: the drawing inline, its text alternative, its caption or another."""
    registered = _plot_of(result, brief=brief)
    drawn = base64.b64encode(svg(result, brief=brief).encode()).decode()
    return (
        f'<figure><img alt="{escape(f"{registered.shows}. {result.headline}", quote=True)}" '
        f'src="data:image/svg+xml;base64,{drawn}">'
        f"<figcaption>{escape(caption or registered.caption)}</figcaption></figure>"
    )


__all__ = ["FAINT", "LOOKS", "PLOTS", "Plot", "figure", "figure_html", "plot", "svg"]
