"""How strata of the text, and the difference between two sets of it, are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.plotting.pieces import (
    INK,
    LOOKS,
    SOFT,
    Plot,
    draw_interval,
    draw_mark,
    n_prompts,
    set_title,
    short,
)
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

STEP = 0.21
"""Inches a stratum."""
WORDS = {
    "difference": "difference",
    "composition": "from how sure\nthe target is",
    "rate": "at equal entropy",
}
SETS = (LOOKS["drafter"], LOOKS["reference"])


def _strata(result: Result, ax: Axes) -> None:
    frame = _judged(result.frame)
    look, ticks, at = LOOKS["drafter"], [], []
    y = 0.0
    for dimension, rows in frame.groupby("dimension", sort=False):
        ax.annotate(
            str(dimension), (0, y), xycoords=("axes fraction", "data"), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8.5, color=SOFT, fontweight="bold",
        )  # fmt: skip
        for row in rows.itertuples():
            y += 1
            if row.tau_walked_lo == row.tau_walked_lo and row.tau_walked_lo is not None:
                ends = [row.tau_walked_lo, row.tau_walked_hi]
                ax.plot(ends, [y, y], color=look.colour, linewidth=2, alpha=0.5)
            face = look.colour if row.differs else "white"
            marker = "D" if row.differs else "o"
            ax.plot(row.tau_walked, y, marker, color=look.colour, markersize=6, zorder=3,
                    markerfacecolor=face)  # fmt: skip
            ax.annotate(
                f"{row.tau_walked:.2f}  ({row.n_prompts})" if row.tau_walked == row.tau_walked
                else f"no round  ({row.n_prompts})",
                (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8,
                color=INK if row.differs else SOFT, annotation_clip=False,
            )  # fmt: skip
            ticks.append(short(str(row.stratum), 26))
            at.append(y)
        y += 1.3
    ax.set_yticks(at, ticks, fontsize=8.5)
    ax.set_ylim(y - 0.6, -0.9)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlim(left=0.9)
    ax.set_xlabel("tokens per round while decoding [tokens]; prompts in brackets")
    tau = result.estimates["tau_walked"].value
    if tau is not None:
        draw_mark(ax, tau, "all")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _judged(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["role"] == frame["role"].iloc[0]]


def _strata_height(result: Result) -> float:
    frame = _judged(result.frame)
    return 1.2 + STEP * (len(frame) + 1.3 * frame["dimension"].nunique())


def _parts(result: Result, ax: Axes) -> None:
    shown = [(name, result.estimates[name]) for name in WORDS if name in result.estimates]
    for i, (name, one) in enumerate(shown):
        draw_interval(ax, -i, one, SETS[0], filled=name == "difference", signed=True)
    if not shown:
        ax.annotate("not split", (0.5, 0.5), xycoords="axes fraction", ha="center", color=SOFT)
    ax.axvline(0, color=INK, linewidth=0.9)
    ax.set_yticks([-i for i in range(len(shown))], [WORDS[name] for name, _ in shown])
    ax.set_ylim(-max(1, len(shown)) + 0.4, 0.8)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    a, b = (short(result.params[one], 16) for one in ("a", "b"))
    ax.set_xlabel(f"tokens per round, {a} less {b} [tokens]")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _rates(result: Result, ax: Axes) -> None:
    _by_bin(result, ax, "rate")
    ax.set_ylabel("per round [tokens]")
    set_title(ax, "Accepted at equal entropy")


def _mix(result: Result, ax: Axes) -> None:
    _by_bin(result, ax, "share", 100)
    ax.set_ylim(0, ax.get_ylim()[1] * 1.1)
    ax.set_ylabel("of its rounds [%]")
    ax.set_xlabel("mean entropy of the target over the block [nats]")
    set_title(ax, "How much of each set is that hard")


def _by_bin(result: Result, ax: Axes, part: str, scale: float = 1) -> None:
    params = result.params
    frame = result.frame
    frame = frame[(frame["part"] == part) & (frame["number"] == "tau_walked")]
    frame = frame[frame["a"] == params["a"]]
    for look, name in zip(SETS, (params["a"], params["b"]), strict=True):
        rows = frame[frame["set"] == name].dropna(subset=["value"])
        middle = (rows["low"] + rows["high"]) / 2
        ax.plot(middle, rows["value"] * scale, look.marker, color=look.colour, linestyle=look.dash,
                label=short(name))  # fmt: skip
    ax.legend(fontsize=8.5, frameon=False)
    ax.set_xlim(left=0)


def _renderings(result: Result, ax: Axes) -> None:
    look, frame = LOOKS["drafter"], result.frame
    for y, row in enumerate(frame.itertuples()):
        if row.tau_lo is not None and row.tau_lo == row.tau_lo:
            ax.plot([row.tau_lo, row.tau_hi], [y, y], color=look.colour, linewidth=2, alpha=0.5)
        face = look.colour if y == 0 or row.certain else "white"
        ax.plot(row.tau, y, look.marker, color=look.colour, markerfacecolor=face, zorder=3)
        said = f"{row.tau:.2f}" if y == 0 else f"{row.tau:.2f}  ({row.delta:+.2f})"
        ax.annotate(
            said, (1.02, y), xycoords=("axes fraction", "data"), va="center", fontsize=8,
            color=INK, annotation_clip=False,
        )  # fmt: skip
    ax.set_yticks(range(len(frame)), [short(name, 34) for name in frame["name"]], fontsize=8.5)
    ax.set_ylim(len(frame) - 0.5, -0.5)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens per round while decoding [tokens]; difference in brackets")
    set_title(ax, f"{short(result.params['finding'], 70)} ({n_prompts(result)})")


def _renderings_height(result: Result) -> float:
    return 0.9 + 0.4 * len(result.frame)


PLOTS: dict[str, Plot] = {
    "data.template": Plot(
        panels=(_renderings,),
        shows="Dots with 95 % intervals: tokens per round under each rendering of the prompts",
        caption=(
            "Tokens per round while decoding, bonus token included, on the same questions rendered "
            "in each way and answered anew. Filled: as given, or for certain different from that. "
            "Bars: 95 % over prompts; in brackets the paired difference."
        ),
        height=_renderings_height,
    ),
    "data.strata": Plot(
        panels=(_strata,),
        shows="Dots with 95 % intervals: tokens per round in each stratum of the text",
        caption=(
            "Tokens per round while decoding, bonus token included, in each part of the text. "
            "Filled diamonds differ for certain from the rest of their group, after correction "
            "for all strata. Bars: 95 % over prompts, whose number stands in brackets. Dotted: "
            "all rounds."
        ),
        height=_strata_height,
    ),
    "data.entropy": Plot(
        panels=(_parts, _rates, _mix),
        shows=(
            "A difference between two sets of prompts in two parts, with 95 % intervals, and "
            "acceptance and frequency by the target's entropy in each set"
        ),
        caption=(
            "Top: the difference in tokens per round, and its two parts, which sum to it: what "
            "comes from the target being surer of one set, and what is left at equal entropy. "
            "Middle and bottom: acceptance and share of rounds by the target's entropy, in ten "
            "bins. Bars: 95 % over prompts, each set by itself."
        ),
        height=lambda _: 2.5,
    ),
}
