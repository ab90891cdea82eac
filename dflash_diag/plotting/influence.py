"""How the influence of rows and slots on proposals is drawn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from dflash_diag.plotting.pieces import BAD, FAINT, INK, SOFT, Plot, set_title
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

FAINTEST, STRONGEST = 1e-4, 1.0
"""Ends of the colours, as a relative change."""
UNSEEN = "#f2f3f5"
AHEAD = 4
"""Rows from the anchor on that are drawn one by one; what lies further is one column."""
NUMBERED = 24
"""Columns up to which cells have room for a number."""


def _rows(result: Result, ax: Axes) -> None:
    frame = result.frame[lambda f: f["kind"] == "row"]
    last = int(frame["last"].max())
    beyond = frame["first"] >= AHEAD
    columns: list[pd.DataFrame] = []
    names: list[str] = []
    old = frame[frame["first"] < frame["last"]]
    for newest, oldest in sorted(old.groupby("last")["first"].min().items(), reverse=True):
        columns.insert(0, frame[(frame["last"] == newest) & (frame["first"] < frame["last"])])
        names.insert(0, f"{oldest}\u2026{newest}")
    single = frame[(frame["first"] == frame["last"]) & ~beyond]
    for offset in sorted(single["first"].unique()):
        columns.append(single[single["first"] == offset])
        names.append("a" if offset == 0 else f"{offset:+d}")
    if beyond.any():
        columns.append(frame[beyond])
        names.append(f"+{AHEAD}\u2026{last:+d}" if last > AHEAD else f"{last:+d}")
    _matrix(ax, result, columns, names)
    at_anchor = sum(not name.startswith(("a", "+")) for name in names) - 0.5
    ax.axvline(at_anchor, color=INK, linewidth=1.2)
    ax.set_xlabel("context row that was changed, from the anchor a [tokens]")
    set_title(ax, result.params["finding"])


def _slots(result: Result, ax: Axes) -> None:
    frame = result.frame
    own, others = frame[frame["kind"] == "slot"], frame[frame["kind"] == "block"]
    columns = [own[own["first"] == slot] for slot in sorted(own["first"].unique())]
    names = ["anchor" if slot == 0 else str(slot) for slot in sorted(own["first"].unique())]
    n_own = len(columns)
    for name, part in (("earlier", others["first"] < 0), ("later", others["first"] > 0)):
        if part.any():
            columns.append(others[part])
            names.append(name)
    _matrix(ax, result, columns, names)
    ax.set_xlabel("own slot that was changed")
    if n_own < len(columns):
        ax.axvline(n_own - 0.5, color=INK, linewidth=1.2)
        ax.set_xlabel("own slot that was changed, or the anchor of another block")
    set_title(ax, "Slots of the block itself, and other blocks of the same pass")


def _matrix(ax: Axes, result: Result, columns: list[pd.DataFrame], names: list[str]) -> None:
    """One column a thing that was changed, one row a slot; a cross where the rule differs."""
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    facts = result.params["facts"]
    slots = range(facts["first_slot"], facts["first_slot"] + facts["n_proposed"])
    shades = colormaps["Blues"]
    for x, column in enumerate(columns):
        cells = column.groupby("slot").agg(
            influence=("influence", "max"),
            seen=("seen", "any"),
            expected=("expected", "any"),
            served=("served", "any"),
        )
        for y, slot in enumerate(slots):
            if slot not in cells.index:
                continue
            cell = cells.loc[slot]
            depth = _depth(float(cell["influence"])) if cell["seen"] else 0.0
            face = shades(depth) if cell["seen"] else UNSEEN
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fc=face, ec="white", lw=0.8))
            if cell["seen"] and len(columns) <= NUMBERED:
                ax.text(
                    x,
                    y,
                    _short(float(cell["influence"])),
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if depth > 0.6 else INK,
                )
            unlike = bool(cell["seen"]) != bool(cell["expected"])
            if unlike or (cell["seen"] and not cell["served"]):
                corner, dash = (x - 0.43, y - 0.43), "-" if unlike else (0, (2, 1.5))
                ax.add_patch(Rectangle(corner, 0.86, 0.86, fill=False, ec=BAD, lw=1.4, ls=dash))
            if unlike:
                ax.plot(x + 0.3, y - 0.28, "x", color=BAD, markersize=4, markeredgewidth=1.4)
    ax.set_xlim(-0.5, len(columns) - 0.5)
    ax.set_ylim(len(slots) - 0.5, -0.5)
    step = max(1, math.ceil(len(columns) / NUMBERED))
    shown = range(0, len(columns), step)
    ax.set_xticks(list(shown), [names[i] for i in shown], fontsize=7.5)
    for label in ax.get_xticklabels():
        label.set_rotation(90 if len(label.get_text()) > 3 else 0)
    step = max(1, math.ceil(len(slots) / 16))
    ax.set_yticks(
        range(0, len(slots), step), [f"slot {slots[i]}" for i in range(0, len(slots), step)]
    )
    ax.tick_params(length=0, colors=SOFT)
    ax.grid(visible=False)
    for side in ax.spines.values():
        side.set_color(FAINT)


def _depth(influence: float) -> float:
    """Place among the colours of a relative change, on a logarithmic scale."""
    if not influence > FAINTEST:
        return 0.08
    span = math.log(STRONGEST / FAINTEST)
    return 0.08 + 0.9 * min(1.0, math.log(influence / FAINTEST) / span)


def _short(influence: float) -> str:
    """A relative change in at most three characters."""
    if influence >= 0.995:
        return f"{influence:.1f}" if influence < 9.95 else ">9"
    return f"{influence:.2f}"[1:] if influence >= 0.005 else "<"


PLOTS: dict[str, Plot] = {
    "mask.influence": Plot(
        panels=(_rows, _slots),
        shows="How much each slot's logits change when one context row or slot is changed",
        caption=(
            "Numbers: relative change of a slot's logits, the largest over the anchors tried (<: "
            "below 0.005, grey: none). A frame with a cross: seen although the rule hides it, or "
            "hidden although the rule shows it. A dashed frame: the rule shows it, and no server "
            "can."
        ),
        height=lambda r: 1.5 + 0.2 * min(int(r.params["facts"]["n_proposed"]), 16),
    ),
}
