"""How claimed numbers and the many definitions of acceptance are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.plotting.pieces import (
    BAD,
    FAINT,
    INK,
    ROWS,
    SOFT,
    Plot,
    look_of,
    n_prompts,
    set_title,
    short,
)
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

DRAWN = {
    "streak": (None,),
    "tau": (None,),
    "eal_product": (None,),
    "topk_oracle": (4, 8),
    "ddtree_tau": (4, 8),
    "chain_tau": (4,),
}
"""Kinds that the picture shows, with the numbers for which it does."""


def _shown(result: Result) -> pd.DataFrame:
    """Lengths that somebody somewhere calls the accepted length, shortest first."""
    frame = result.frame
    numbers = frame["number"].astype(object).where(frame["number"].notna(), None)
    wanted = [n in DRAWN.get(kind, ()) for kind, n in zip(frame["kind"], numbers, strict=True)]
    rows = frame[wanted].dropna(subset=["value"])
    return rows.sort_values("value", kind="stable").reset_index(drop=True)


def _dictionary(result: Result, ax: Axes) -> None:
    rows, look = _shown(result), look_of("drafter")
    for i, row in enumerate(rows.itertuples()):
        if row.lo == row.lo:
            ax.plot([row.lo, row.hi], [i, i], color=look.colour, linewidth=1.8, alpha=0.45)
        filled = look.colour if row.population == "walked" else "white"
        ax.plot(row.value, i, look.marker, color=look.colour, markersize=5, markerfacecolor=filled)
    ax.set_yticks(range(len(rows)), list(rows["definition"]), fontsize=8)
    ax.set_ylim(-0.7, len(rows) - 0.3)
    ax.set_xlim(left=0)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("mean length [tokens per round]")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _fit(result: Result, ax: Axes) -> None:
    rows = _thinned(result.frame)
    ticks = []
    for i, row in enumerate(rows.itertuples()):
        y, colour = -i, look_of("drafter").colour if row.fits else FAINT
        if row.lo == row.lo:
            ax.plot([row.lo, row.hi], [y, y], color=colour, linewidth=1.8, alpha=0.6, zorder=2)
        if row.measured == row.measured:
            ax.plot(row.measured, y, "o", color=colour, markersize=5, zorder=3)
        ax.plot(row.claimed, y, "|", color=INK if row.fits else BAD, markersize=12, zorder=4,
                markeredgewidth=2)  # fmt: skip
        sign = "can be" if row.fits else "cannot be"
        ticks.append(f"{short(row.claim)} {sign} {row.definition or 'anything'}")
    ax.set_yticks([-i for i in range(len(rows))], ticks, fontsize=8)
    for label, fits in zip(ax.get_yticklabels(), rows["fits"], strict=True):
        label.set_color(INK if fits else SOFT)
    ax.set_ylim(-len(rows) + 0.4, 0.6)
    ax.set_xlim(left=min(0.0, float(rows["claimed"].min()) - 0.2))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("claimed (bar), measured here (dot) [tokens or share]")
    set_title(ax, result.params["finding"])


def _thinned(frame: pd.DataFrame) -> pd.DataFrame:
    """At most `ROWS` rows; of single slots those that fit, and first those that are none."""
    slots = frame["definition"].str.match(r"(marginal|survival|conditional)@")
    kept = frame[~slots | frame["fits"]]
    if kept.empty:
        kept = frame
    order = kept.assign(slot=slots).sort_values("slot", kind="stable")
    return kept.loc[sorted(order.index[:ROWS])].reset_index(drop=True)


PLOTS: dict[str, Plot] = {
    "claims.dictionary": Plot(
        panels=(_dictionary,),
        shows="One drafter's mean accepted length under many definitions, sorted",
        caption=(
            "The same drafter on the same text under the definitions that stacks print. Filled: "
            "the anchors that decoding visits; hollow: all anchors. +1 and tau count the bonus "
            "token. Pooled unless macro. Bars: 95 % over prompts."
        ),
        height=lambda r: 1.3 + 0.19 * len(_shown(r)),
    ),
    "claims.fit": Plot(
        panels=(_fit,),
        shows="Claimed numbers beside the definitions that can and cannot have printed them",
        caption=(
            "One row for each definition that a claim's name can mean. Upright bar: the claimed "
            "number. Dot and line: that definition measured, on the trainer's texts where they are "
            "at hand, else on your prompts, with 95 % over texts. Grey: excluded, mostly because "
            "no blocks could have printed the line's numbers. Of single slots only what fits is "
            "drawn."
        ),
        height=lambda r: 1.3 + 0.22 * len(_thinned(r.frame)),
    ),
}
"""Plots of this module by the id of their diagnostic."""
