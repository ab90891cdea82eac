"""How the training number is drawn beside its repetition, and its way to serving as a waterfall."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag.gap_words import signed
from dflash_diag.plotting.pieces import FAINT, INK, LOOKS, SOFT, Plot, printable, set_title, short
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

ENDS, FALLS, RISES = "#5b6472", "#d94801", "#1845fb"
"""Grey ends, orange falls, blue rises: told apart in any colour vision, and by their signs."""
THICK = 0.62
ROWS = 24


def draw_waterfall(result: Result, ax: Axes) -> None:
    """From the training number down (and up) to serving's, one bar a part."""
    rows = result.frame.dropna(subset=["change"])
    said = result.params
    first = ("training printed" if said["claimed"] else "measured as in training", said["start"])
    last = ("serving gets (tau)", said["end"])
    n = len(rows)
    for y, value in ((0, first[1]), (n + 1, last[1])):
        ax.barh(y, value, THICK, color=ENDS, zorder=2)
        _beside(ax, value, y, f"{value:.2f}", INK)
    for y, row in enumerate(rows.to_dict("records"), 1):
        _part(ax, y, row, unexplained="unexplained" in row["factors"])
    heights = [first[1], *rows["after"]]
    for y, value in enumerate(heights):
        ax.plot(
            [value] * 2, [y + THICK / 2, y + 1 - THICK / 2], color=SOFT, linewidth=0.9, zorder=1
        )
    labels = [first[0], *(short(part, 34) for part in rows["part"]), last[0]]
    ax.set_yticks(range(n + 2), labels)
    ax.set_ylim(n + 1.55, -0.55)
    ends = np.concatenate([rows[["before", "after"]].to_numpy(float).ravel(), [first[1], last[1]]])
    ax.set_xlim(min(0.0, ends.min() - 0.3), ends.max() * 1.16 + 0.1)
    ax.grid(visible=False, axis="y")
    ax.grid(visible=True, axis="x")
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("tokens a round")
    set_title(ax, said["finding"])


def _part(ax: Axes, y: int, row: dict[str, Any], *, unexplained: bool) -> None:
    """One bar with its sign, its interval and the range over orders."""
    before, after, change = row["before"], row["after"], row["change"]
    colour = FALLS if change < 0 else RISES
    look: dict[str, Any] = {"color": colour}
    if unexplained:
        look = {"facecolor": "white", "edgecolor": colour, "hatch": "////", "linewidth": 1.2}
    ax.barh(y, change, THICK, left=before, zorder=2, **look)
    reach = [before, after]
    if row["lo"] == row["lo"] and row["lo"] is not None and row["lo"] != row["hi"]:
        lo, hi = before + row["lo"], before + row["hi"]
        ax.plot([lo, hi], [y, y], color=INK, linewidth=1.3, zorder=4, solid_capstyle="butt")
        for end in (lo, hi):
            ax.plot([end] * 2, [y - 0.13, y + 0.13], color=INK, linewidth=1.3, zorder=4)
        reach += [lo, hi]
    if row["hi_order"] - row["lo_order"] > 0.005:
        ends = [before + row["lo_order"], before + row["hi_order"]]
        ax.plot(ends, [y + THICK / 2 + 0.08] * 2, color=colour, linewidth=2.6, alpha=0.45, zorder=3)
        reach += ends
    _beside(ax, max(reach), y, signed(change), colour)


def _beside(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.annotate(
        text,
        (x, y),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=9.5,
        fontweight="bold",
        color=colour,
        annotation_clip=False,
    )


def draw_replay(result: Result, ax: Axes) -> None:
    """Each number as measured again (dot, interval) and as logged (upright stroke)."""
    rows = _lengths_first(result.frame)
    looks = dict(zip(dict.fromkeys(rows["split"]), LOOKS.values(), strict=False))
    for y, row in enumerate(rows.to_dict("records")):
        look = looks[row["split"]]
        if row["lo"] == row["lo"] and row["lo"] is not None:
            ax.plot([row["lo"], row["hi"]], [y, y], color=look.colour, linewidth=2.2, alpha=0.55)
        ax.plot(row["replayed"], y, look.marker, color=look.colour, markersize=6.5, zorder=3)
        if row["logged"] == row["logged"]:
            ax.barh(
                y,
                row["logged_hi"] - row["logged_lo"],
                0.72,
                left=row["logged_lo"],
                color=FAINT,
                zorder=1,
            )
            ax.plot([row["logged"]] * 2, [y - 0.36, y + 0.36], color=INK, linewidth=2, zorder=4)
    names = [
        f"{printable(name or definition)}, {split}"
        for name, definition, split in rows[["name", "definition", "split"]].to_numpy()
    ]
    ax.set_yticks(range(len(rows)), names, fontsize=8.5)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(left=0)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens, or share of slots")
    set_title(ax, result.params["finding"])


def _lengths_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows without those of single slots, which a table tells better."""
    slots = frame["definition"].str.contains("@") & ~frame["definition"].str.contains(
        "topk|tree|chain"
    )
    rows = frame[~slots] if not slots.all() else frame
    return rows.head(ROWS).reset_index(drop=True)


PLOTS = {
    "training.replay": Plot(
        panels=(draw_replay,),
        shows="Dots with intervals, and strokes",
        caption=(
            "Dots with 95 % intervals over texts: measured again. Upright strokes: the number that "
            "training printed last; grey: the span of its last lines."
        ),
        height=lambda result: 0.9 + 0.27 * len(_lengths_first(result.frame)),
    ),
    "gap.decomposition": Plot(
        panels=(draw_waterfall,),
        shows="Waterfall",
        caption=(
            "Each bar is the mean change over all feasible orders of changing one factor after "
            "another; bars add up to the gap. Whiskers: 95 % interval, every population resampled "
            "on its own. Pale line below a bar: smallest and largest change over the orders. "
            "Hatched: not explained. Orange falls, blue rises."
        ),
        height=lambda result: 1.2 + 0.36 * (2 + int(result.frame["change"].notna().sum())),
    ),
}
"""Plots by the id of their diagnostic."""
