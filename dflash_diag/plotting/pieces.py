"""The look that all plots share, and the pieces that they are made of."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

WIDTH = 5.8
"""Inches. Narrow, so that a phone shows the figure at nearly its own size."""
FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', "
    "Arial, sans-serif"
)


class Look(NamedTuple):
    """How one drafter is drawn."""

    colour: str
    marker: str
    dash: Any


# petroff8 (Petroff 2021), chosen for colour-vision deficiencies
LOOKS = {
    "drafter": Look("#1845fb", "o", "-"),
    "reference": Look("#d94801", "s", (0, (4, 1.6))),
}
INK, SOFT, FAINT = "#1c1e21", "#656b73", "#c3c7cc"
GOOD, BAD, AGREES = "#0a6b4b", "#b3261e", "#7db8a0"

ROWS = 40
"""Prompts drawn at most; more are thinned out evenly."""

Draw = Callable[[Result, "Axes"], None]


@dataclass(frozen=True, kw_only=True)
class Plot:
    """How a diagnostic is drawn: panels from top to bottom, and what a reader is told of them."""

    panels: tuple[Draw, ...]
    shows: str
    """What kind of picture it is, for the text alternative."""
    caption: str
    """Method and how to read it."""
    height: Callable[[Result], float] = lambda _: 3.2
    """Height of a panel in inches, the mean of them where they differ."""
    ratios: Callable[[Result], Sequence[float] | None] = lambda _: None
    """Heights of the panels relative to one another; None: the same for all."""
    more: Callable[[Result], tuple[Draw, ...]] = lambda _: ()
    """Panels that only some results have something for."""
    brief: Plot | None = None
    """The same result in one panel, for the front page."""


def style() -> Any:
    """Context in which figures are made."""
    import matplotlib as mpl

    with as_file(files("dflash_diag") / "dflash.mplstyle") as path:
        return mpl.rc_context(fname=str(path))


def set_title(ax: Axes, text: str) -> None:
    """Set a title, wrapped to the figure's width."""
    ax.set_title("\n".join(textwrap.wrap(printable(text), 60, break_on_hyphens=False)))


def look_of(role: str) -> Look:
    """How a drafter is drawn."""
    return LOOKS.get(role, Look(SOFT, "D", ":"))


def rate_axis(ax: Axes, label: str) -> None:
    """An axis from 0 to 1."""
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    ax.set_ylabel(label)


def draw_line(ax: Axes, rows: pd.DataFrame, x: str, y: str, lo: str, hi: str) -> None:
    """One drafter's line with markers and its interval band."""
    look = look_of(str(rows["role"].iloc[0]))
    known = rows.dropna(subset=[y])
    ax.plot(
        known[x], known[y], color=look.colour, marker=look.marker, linestyle=look.dash, zorder=3
    )
    band = known.dropna(subset=[lo, hi])
    ax.fill_between(band[x], band[lo], band[hi], color=look.colour, alpha=0.13, linewidth=0)


def label_ends(ax: Axes, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Name lines at their right ends (x, y, text, colour), moved apart where they would overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    right = max((end[0] for end in ends), default=0.0)
    wanted = [_height(ax, y) for _, y, _, _ in ends]
    for at, (_, _, text, colour) in zip(_apart(wanted), ends, strict=True):
        ax.annotate(
            text,
            (right, at),
            xycoords=("data", "axes fraction"),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9.5,
            fontweight="bold",
            annotation_clip=False,
        )


def _height(ax: Axes, y: float) -> float:
    """Height of a value on linear or logarithmic axes, as a share of theirs."""
    return float(ax.transAxes.inverted().transform(ax.transData.transform((1, y)))[1])


def _apart(heights: Sequence[float], gap: float = 0.085) -> list[float]:
    """Rising heights moved apart, and down again where that went past the top."""
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + gap) if found else height)
    top = max(1.0, *heights) if heights else 1.0
    for i in reversed(range(len(found))):
        found[i], top = min(found[i], top), min(found[i], top) - gap
    return found


def draw_interval(
    ax: Axes, y: float, row: Any, look: Look, *, filled: bool = True, signed: bool = False
) -> None:
    """A dot with its interval on row ``y``, and the number beside it."""
    if row.lo is not None and row.lo == row.lo:
        ax.plot([row.lo, row.hi], [y, y], color=look.colour, linewidth=2.2, alpha=0.55, zorder=2)
    ax.plot(
        row.value,
        y,
        marker=look.marker,
        color=look.colour,
        markersize=7.5,
        markerfacecolor=look.colour if filled else "white",
        markeredgewidth=1.6,
        zorder=3,
    )
    ax.annotate(
        f"{row.value:{'+' if signed else ''}.2f}",
        (row.value, y),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=9.5,
        color=look.colour,
        fontweight="bold",
    )


def draw_mark(ax: Axes, at: float, text: str, *, axis: str = "x") -> None:
    """A labelled reference line."""
    if axis == "x":
        ax.axvline(at, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        ax.annotate(
            text,
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=8.5,
            color=SOFT,
            va="top",
        )
    else:
        ax.axhline(at, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
        ax.annotate(
            text,
            (1, at),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
            fontsize=8.5,
            color=SOFT,
        )


def drafters(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """(role, name) of the drafters in a frame, in its order."""
    pairs = frame[["role", "drafter"]].drop_duplicates()
    return [(str(r), short(str(d))) for r, d in pairs.itertuples(index=False)]


def short(name: str, width: int = 20) -> str:
    """A name on one line, its end left out where it is long; control characters become dots."""
    name = printable(name)
    return name if len(name) <= width else f"{name[: width - 1]}…"


def printable(text: str) -> str:
    """The text with a dot for every character that cannot be drawn."""
    return "".join(c if c.isprintable() or c == "\u00a0" else "·" for c in text)


def spread(table: pd.DataFrame, n: int) -> pd.DataFrame:
    """``n`` rows of a sorted table, evenly spread from its first to its last."""
    step = (len(table) - 1) / (n - 1)
    return table.iloc[[round(i * step) for i in range(n)]]


def n_prompts(result: Result) -> str:
    """The number of prompts, in words."""
    n = result.params.get("n_prompts")
    return f"n\u00a0=\u00a0{n}\u00a0prompts"
