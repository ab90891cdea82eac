"""How readings, positions and the density of blocks are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.plotting.pieces import (
    BAD,
    FAINT,
    GOOD,
    INK,
    LOOKS,
    SOFT,
    Look,
    Plot,
    draw_mark,
    label_ends,
    n_prompts,
    rate_axis,
    set_title,
)
from dflash_diag.results import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd
    from matplotlib.axes import Axes

ANSWERS = {
    "better": Look(BAD, "D", "-"),
    "no certain difference": Look(SOFT, "o", "-"),
    "the same proposals": Look(SOFT, "|", "-"),
    "worse": Look(GOOD, "s", "-"),
}
"""A better reading is bad news, hence its colour; markers differ as well."""
STATUS = {
    "found": Look(BAD, "D", "-"),
    "not identifiable": Look(SOFT, "o", "-"),
    "not tested": Look(SOFT, "|", "-"),
    "excluded": Look(GOOD, "s", "-"),
}
BEST_OF_EACH = 22


def draw_readings(result: Result, ax: Axes) -> None:
    """The best reading of every cause against the declared one, in tokens a round."""
    rows = best_of_causes(result.frame)
    looks = [ANSWERS[answer] for answer in rows["answer"]]
    _forest(ax, rows, looks, rows["population"] == "walked", rows["reading"])
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def draw_causes(result: Result, ax: Axes) -> None:
    """Every cause with what its reading gains, and whether that names it."""
    rows = result.frame
    looks = [STATUS[status] for status in rows["status"]]
    _forest(ax, rows, looks, rows["status"] == "found", rows["status"])
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def draw_causes_in_short(result: Result, ax: Axes) -> None:
    """The causes whose gain was measured on every anchor."""
    rows = result.frame.dropna(subset=["delta"])
    looks = [STATUS[status] for status in rows["status"]]
    _forest(ax, rows, looks, rows["status"] == "found", rows["status"])
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _forest(
    ax: Axes, rows: pd.DataFrame, looks: Sequence[Look], filled: pd.Series, words: pd.Series
) -> None:
    """One row a cause: dot, interval, and words at the right."""
    table = zip(rows.itertuples(), looks, filled, words, strict=True)
    for y, (row, look, full, word) in enumerate(table):
        if row.lo == row.lo and row.lo is not None:
            ax.plot([row.lo, row.hi], [y, y], color=look.colour, linewidth=2, alpha=0.5)
        face = look.colour if full else "white"
        ax.plot(row.delta, y, look.marker, color=look.colour, markersize=6, markerfacecolor=face)
        ax.annotate(
            str(word),
            (1.02, y),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=INK if look.colour == BAD else SOFT,
            annotation_clip=False,
        )
    ax.axvline(0, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)))
    ax.set_yticks(range(len(rows)), list(rows["cause"]), fontsize=8.5)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens a round, less the declared reading's")


def best_of_causes(frame: pd.DataFrame) -> pd.DataFrame:
    """The reading of each cause that gains most against the declared one, best first."""
    first = frame[(frame["step"] == "1")].dropna(subset=["delta"])
    best = first.sort_values("delta", ascending=False, kind="stable").drop_duplicates("cause")
    return best.head(BEST_OF_EACH)


def draw_offsets(result: Result, ax: Axes) -> None:
    """Tau of every offset of the block, each with its paired interval against the declared one."""
    rows, declared = result.frame, LOOKS["drafter"]
    base = float(rows.loc[rows["offset"] == 0, "tau"].iloc[0])
    for row in rows.itertuples():
        own = row.offset == 0
        look = Look(INK, "o", "-") if own else ANSWERS.get(_word(str(row.answer)), declared)
        if not own and row.lo == row.lo and row.lo is not None:
            ends = [base + row.lo, base + row.hi]
            ax.plot([row.offset] * 2, ends, color=look.colour, linewidth=2, alpha=0.5)
        ax.plot(row.offset, row.tau, look.marker, color=look.colour, markersize=7)
        ax.annotate(
            f"{row.tau:.2f}",
            (row.offset, row.tau),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=look.colour,
        )
    draw_mark(ax, base, "declared", axis="y")
    ax.set_xticks(rows["offset"], [f"{d:+d}" if d else "0\ndeclared" for d in rows["offset"]])
    ax.set_xlim(rows["offset"].min() - 0.5, rows["offset"].max() + 0.7)
    ax.set_xlabel("positions by which the block is moved")
    ax.set_ylabel("tau while decoding")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _word(answer: str) -> str:
    return "no certain difference" if answer == "as good" else answer


def draw_phases(result: Result, ax: Axes) -> None:
    """Rotary phase error of every slot, one line an offset."""
    rows, b = result.frame, int(result.params["block_size"])
    slots = list(range(b))
    styles = {1: ("o", "-"), 2: ("s", (0, (4, 1.6))), 3: ("^", (0, (1, 1.2)))}
    ends = []
    for row in rows[rows["offset"] > 0].to_dict("records"):
        d = int(row["offset"])
        marker, dash = styles[d]
        values = [row[f"phase_{k}"] for k in slots]
        ax.plot(slots, values, color=LOOKS["drafter"].colour, marker=marker, linestyle=dash)
        ends.append((b - 1, values[-1], f"±{d}", INK))
    ax.set_ylim(bottom=0)
    ax.set_xticks(slots, ["anchor", *map(str, slots[1:])])
    ax.set_xlabel("slot")
    ax.set_ylabel("phase error, degrees")
    label_ends(ax, ends)
    set_title(ax, "How far each offset turns a slot's queries against the context")


def draw_density(result: Result, ax: Axes) -> None:
    """Slot accuracy by anchors in one pass."""
    rows = result.frame
    alone = float(rows.loc[rows["other_blocks"] == "hidden", "accuracy"].iloc[0])
    ax.axhline(alone, color=FAINT, linewidth=1.2)
    looks = {"later": LOOKS["drafter"], "all": LOOKS["reference"]}
    ends = []
    for others, look in looks.items():
        own = rows[rows["other_blocks"] == others]
        x, y = [1, *own["anchors"]], [alone, *own["accuracy"]]
        ax.plot(x, y, color=look.colour, marker=look.marker, linestyle=look.dash)
        words = "later blocks" if others == "later" else "all blocks"
        ends.append((x[-1], y[-1], f"{words} in sight", look.colour))
    ax.set_xscale("log", base=2)
    ticks = [1, *sorted(set(rows.loc[rows["other_blocks"] != "hidden", "anchors"]))]
    ax.set_xticks(ticks, ["1, as served", *map(str, ticks[1:])])
    ax.minorticks_off()
    ax.set_xlabel("anchors in one pass")
    rate_axis(ax, "slots that are right")
    label_ends(ax, ends)
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


_READING_CAPTION = (
    "One field of the convention changed at a time; for each cause the reading that gains most. "
    "Diamonds are better after Holm's correction over all readings; hollow markers were dropped by "
    "a screen over some anchors of every prompt. Intervals are paired by prompt."
)

PLOTS = {
    "alignment.causes": Plot(
        panels=(draw_causes,),
        shows="Dots with intervals",
        caption=(
            "What the best reading of each cause gains: found ones against the declared reading, "
            "the others on top of what was found. No dot where a screen over some anchors did, or "
            "where there was nothing to try. Intervals are paired by prompt."
        ),
        height=lambda result: 0.9 + 0.22 * len(result.frame),
        brief=Plot(
            panels=(draw_causes_in_short,),
            shows="Dots with intervals",
            caption=(
                "What reading the weights in another way gains, for the causes that came near. "
                "The convention page has all of them."
            ),
            height=lambda result: 0.9 + 0.24 * max(1, int(result.frame["delta"].notna().sum())),
        ),
    ),
    "doctor.causes": Plot(
        panels=(draw_causes_in_short,),
        shows="Dots with intervals",
        caption=(
            "What each cause whose effect was measured costs: tau with it put right, less tau as "
            "the drafter is read. Intervals are paired by prompt. Causes without a dot were judged "
            "by files or checks; the table has them all."
        ),
        height=lambda result: 0.9 + 0.24 * max(1, int(result.frame["delta"].notna().sum())),
    ),
    "alignment.readings": Plot(
        panels=(draw_readings,),
        shows="Dots with intervals",
        caption=_READING_CAPTION,
        height=lambda result: 0.9 + 0.24 * len(best_of_causes(result.frame)),
    ),
    "position.alignment": Plot(
        panels=(draw_offsets, draw_phases),
        shows="Dots with intervals, and lines by slot",
        caption=(
            "Above: tau with the block moved against the context; intervals are of the paired "
            "difference to the declared offset. Below: root-mean-square rotary phase error, pairs "
            "weighted by their length in queries and keys; 104 degrees is what random phases give."
        ),
        height=lambda _: 2.7,
    ),
    "mask.density": Plot(
        panels=(draw_density,),
        shows="Lines",
        caption=(
            "Blocks of one pass see one another, as under a faulty training mask. A server has one "
            "block a pass, so whatever is gained here is lost there."
        ),
        height=lambda _: 2.8,
    ),
}
"""Plots by the id of their diagnostic."""
