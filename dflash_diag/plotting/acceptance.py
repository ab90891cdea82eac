"""How tokens per round, and the checks of trust in them, are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_diag.plotting.pieces import (
    AGREES,
    BAD,
    FAINT,
    GOOD,
    INK,
    LOOKS,
    ROWS,
    SOFT,
    Plot,
    drafters,
    draw_interval,
    draw_line,
    draw_mark,
    label_ends,
    look_of,
    n_prompts,
    rate_axis,
    set_title,
    short,
    spread,
)
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

# --- acceptance -----------------------------------------------------------------------------------


def _headline(result: Result, ax: Axes) -> None:
    rows = result.frame.query("aggregation == 'micro'").reset_index(drop=True)
    rows = rows.rename(columns={"tau": "value"})
    ticks = []
    for i, row in enumerate(rows.itertuples()):
        draw_interval(ax, -i, row, look_of(row.role), filled=row.population == "walked")
        where = "decoding" if row.population == "walked" else "all anchors"
        ticks.append(f"{short(row.drafter)}\n{where}")
    ax.set_yticks([-i for i in range(len(rows))], ticks)
    ax.set_ylim(-len(rows) + 0.4, 0.75)
    top = float(rows[["value", "hi"]].max().max())
    ax.set_xlim(0.9, max(3.0, top * 1.08))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens per round (tau) [tokens]")
    bound = result.params.get("bound")
    if bound:
        draw_mark(ax, bound, f"{bound:g}: half the passes saved")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _survival(result: Result, ax: Axes) -> None:
    for curve in result.params.get("published", []):
        ax.plot(range(1, len(curve["survival"]) + 1), curve["survival"], color=FAINT, linewidth=0.8)
    if result.params.get("published"):
        ax.annotate("grey: published", (0.02, 0.03), xycoords="axes fraction", fontsize=8.5,
                    color=SOFT)  # fmt: skip
    walked = result.frame[result.frame["population"] == "walked"]
    _curve(ax, walked, "survival", "survival [share of rounds]")
    ax.set_xlabel("position in the block k" if len(ax.figure.axes) == 1 else "")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _conditional(result: Result, ax: Axes) -> None:
    walked = result.frame[result.frame["population"] == "walked"]
    drawn = walked[walked["n_before"] >= FEW_ROUNDS]
    _curve(ax, drawn, "conditional", "conditional [share]", last=int(walked["k"].max()))
    set_title(ax, "Given that all before were right: is this one?")


def _marginal(result: Result, ax: Axes) -> None:
    uniform = result.frame[result.frame["population"] == "uniform"]
    _curve(ax, uniform, "marginal", "marginal [share of anchors]")
    set_title(ax, "Each position by itself, over all anchors")
    ax.set_xlabel("position in the block k")


def _curve(
    ax: Axes, frame: pd.DataFrame, quantity: str, label: str, last: int | None = None
) -> None:
    last = last or int(frame["k"].max())
    ax.set_xlim(0.6, last + 0.4)
    ax.set_xticks([k for k in range(1, last + 1) if last <= 8 or k % 2])
    rate_axis(ax, label)
    ends = []
    for role, name in drafters(frame):
        rows = frame[frame["role"] == role]
        draw_line(ax, rows, "k", quantity, f"{quantity}_lo", f"{quantity}_hi")
        known = rows.dropna(subset=[quantity])
        if len(known):
            end = known.iloc[-1]
            ends.append((float(end["k"]), float(end[quantity]), name, look_of(role).colour))
    label_ends(ax, ends)


def _comparison(result: Result, ax: Axes) -> None:
    frame = result.frame.dropna(subset=["delta"]).sort_values("delta").reset_index(drop=True)
    delta = result.estimates["delta_tau"]
    look = look_of("drafter")
    if delta.lo is not None and delta.hi is not None:
        ax.axhspan(delta.lo, delta.hi, color=look.colour, alpha=0.13, linewidth=0)
    ax.axhline(0, color=INK, linewidth=0.9)
    if delta.value is not None:
        ax.axhline(delta.value, color=look.colour, linewidth=1.4)
        ax.annotate(
            f" {delta.value:+.2f}",
            (1, delta.value),
            xycoords=("axes fraction", "data"),
            va="center",
            color=look.colour,
            fontweight="bold",
            annotation_clip=False,
        )
    ax.vlines(frame.index, 0, frame["delta"], color=FAINT, linewidth=1.2, zorder=2)
    better = frame["delta"] >= 0
    for mask, marker, colour in ((better, "^", GOOD), (~better, "v", BAD)):
        ax.plot(
            frame.index[mask], frame["delta"][mask], marker, color=colour, markersize=5, zorder=3
        )
    ax.set_xticks([])
    ax.set_xlabel("prompts, sorted")
    ax.set_ylabel("difference [tokens per round]")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _prompts(result: Result, ax: Axes) -> None:
    frame = result.frame.dropna(subset=["tau_walked"])
    table = frame.pivot_table(index="id", columns="role", values="tau_walked", sort=False)
    table = table.sort_values("drafter", ascending=False)
    shown = table if len(table) <= ROWS else spread(table, ROWS)
    rows = range(len(shown))
    if "reference" in shown:
        ax.hlines(rows, shown["drafter"], shown["reference"], color=FAINT, linewidth=1.4)
    for role in shown.columns:
        look = look_of(role)
        ax.plot(shown[role], rows, look.marker, color=look.colour, markersize=5.5, zorder=3)
    ax.axvline(table["drafter"].mean(), color=LOOKS["drafter"].colour, linewidth=1, linestyle=":")
    ax.set_yticks(rows, [short(str(i), 24) for i in shown.index])
    ax.set_ylim(len(shown) - 0.4, -1.6)
    for i, (role, name) in enumerate(drafters(frame)):
        look, at = look_of(role), 0.01 + 0.42 * i
        place: dict[str, Any] = {
            "xycoords": "axes fraction",
            "textcoords": "offset points",
            "va": "center",
        }
        ax.plot(at, 0.985, look.marker, color=look.colour, markersize=5.5, transform=ax.transAxes)
        ax.annotate(name, (at, 0.985), xytext=(8, 0), color=look.colour, fontsize=9.5,
                    fontweight="bold", **place)  # fmt: skip
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlim(left=0.9)
    ax.set_xlabel("tokens per round (tau) [tokens]")
    few = "" if len(shown) == len(table) else f"; {len(shown)} of them drawn"
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)}{few})")


def _rounds(result: Result, ax: Axes) -> None:
    frame = result.frame
    last = int(frame["accepted"].max())
    roles = drafters(frame)
    for i, (role, _) in enumerate(roles):
        rows, look = frame[frame["role"] == role], look_of(role)
        at = rows["accepted"] + 0.22 * (i - (len(roles) - 1) / 2)
        ax.vlines(at, 0, rows["share"], color=look.colour, linewidth=1, alpha=0.5)
        known = rows["lo"].notna()
        ax.vlines(at[known], rows["lo"][known], rows["hi"][known], color=look.colour,
                  linewidth=3.5, alpha=0.4)  # fmt: skip
        ax.plot(at, rows["share"], look.marker, color=look.colour, markersize=6, zorder=3)
    for i, (role, name) in enumerate(roles):
        look, height = look_of(role), 0.93 - 0.08 * i
        ax.plot(0.4, height, look.marker, color=look.colour, markersize=6,
                transform=ax.transAxes)  # fmt: skip
        ax.annotate(name, (0.4, height), xycoords="axes fraction", xytext=(8, 0), va="center",
                    textcoords="offset points", color=look.colour, fontsize=9.5,
                    fontweight="bold")  # fmt: skip
    ax.set_xticks(range(last + 1), ["none", *map(str, range(1, last + 1))])
    ax.set_xlabel("accepted proposals [tokens]")
    rate_axis(ax, "rounds [share]")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


FEW_ROUNDS = 10
"""Conditional rates over fewer rounds are not drawn: they jump about."""


def _trees(result: Result, ax: Axes) -> None:
    _budgets(result, ax, "ddtree_tau", "tokens per round [tokens]")
    ax.set_xlabel("nodes of the draft tree, root not counted")
    for role, _ in drafters(result.frame):
        chain = result.estimates.get(f"{role}_chain")
        if chain and chain.value is not None:
            look = look_of(role)
            ax.axhline(chain.value, color=look.colour, linewidth=0.9, linestyle=":")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _oracle(result: Result, ax: Axes) -> None:
    _budgets(result, ax, "topk_oracle", "leading proposals [tokens]")
    ax.set_xlabel("k most probable tokens of each position")
    set_title(ax, "How near the right token is, position by position")


def _budgets(result: Result, ax: Axes, kind: str, label: str) -> None:
    frame = result.frame.query("kind == @kind and population == 'uniform'")
    sizes = sorted(frame["n"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.minorticks_off()
    ax.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.18)
    for role, _ in drafters(frame):
        draw_line(ax, frame[frame["role"] == role], "n", "value", "lo", "hi")
    ax.set_ylim(bottom=min(1.0, ax.get_ylim()[0]) if kind == "ddtree_tau" else 0)
    ends = [
        (end["n"], end["value"], name, look_of(role).colour)
        for role, name in drafters(frame)
        for end in [frame[frame["role"] == role].iloc[-1]]
        if end["value"] == end["value"]
    ]
    label_ends(ax, ends)
    ax.set_ylabel(label)


def _repeated(result: Result, ax: Axes) -> None:
    frame = result.frame.drop_duplicates("id").sort_values("share_repeated", ascending=False)
    ax.bar(range(len(frame)), frame["share_repeated"], color=SOFT, width=0.72)
    ax.set_xticks([])
    ax.set_xlabel("prompts, sorted")
    rate_axis(ax, "repeated [share]")
    draw_mark(ax, result.params["bound"], f"{100 * result.params['bound']:.0f}\u00a0%", axis="y")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _outside(result: Result, ax: Axes) -> None:
    ticks: list[str] = []
    for role, name in result.params["drafters"]:
        for kind, words in (("all", "all rounds"), ("outside", "outside repeats")):
            one = result.estimates[f"{role}_tau_{kind}"]
            if one.value is None:
                continue
            draw_interval(ax, -len(ticks), one, look_of(role), filled=kind == "all")
            ticks.append(f"{short(name)}\n{words}")
    ax.set_yticks([-i for i in range(len(ticks))], ticks)
    ax.set_ylim(-len(ticks) + 0.4, 0.8)
    ax.set_xlim(left=0.9)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens per round (tau) [tokens]")
    set_title(ax, "Tokens a round, with and without repeated text")


# --- trust ----------------------------------------------------------------------------------------


def _lossless(result: Result, ax: Axes) -> None:
    frame = result.frame.sort_values("n_same").reset_index(drop=True).head(ROWS)
    rows = range(len(frame))
    ax.barh(rows, frame["n_tokens"], color=FAINT, height=0.62)
    ax.barh(rows, frame["n_same"], color=AGREES, height=0.62)
    for cause, marker, colour in (("rounding", "o", SOFT), ("state_fault", "X", BAD)):
        hit = frame[frame["cause"] == cause]
        ax.plot(hit["n_same"], hit.index, marker, color=colour, markersize=8, zorder=3)
    ax.set_yticks(rows, [short(str(i), 24) for i in frame["id"]])
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("generated tokens")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def _reference(result: Result, ax: Axes) -> None:
    frame = result.frame.sort_values(["n_differ", "n_rounding"], ascending=False)
    frame = frame.reset_index(drop=True).head(ROWS)
    rows, left = range(len(frame)), 0
    for name, colour, words in (
        ("n_equal", AGREES, "the target's choice"),
        ("n_rounding", FAINT, "near-tie"),
        ("n_differ", BAD, "differs"),
    ):
        ax.barh(rows, frame[name], left=left, color=colour, height=0.62, label=words)
        left = left + frame[name]
    early = frame[frame["stopped_early"]]
    ax.plot(early["n_tokens"], early.index, "X", color=INK, markersize=8, zorder=3)
    ax.set_yticks(rows, [short(str(i), 24) for i in frame["id"]])
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("generated tokens")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


_SURVIVAL_ALONE = Plot(
    panels=(_survival,),
    shows="Survival curves over the position in the block, with 95 % bands",
    caption=(
        "Share of rounds whose first k proposals are all accepted, over the anchors that decoding "
        "visits. Bands: 95 % over prompts."
    ),
    height=lambda _: 5.4,
)
PLOTS: dict[str, Plot] = {
    "acceptance.headline": Plot(
        panels=(_headline,),
        shows="Dots with 95 % intervals: tokens per round over walked and over all anchors",
        caption=(
            "Tokens per round, bonus token included, pooled over rounds. Filled: the anchors that "
            "decoding visits. Hollow: all anchors, which most training dashboards show. Bars: 95 % "
            "intervals over prompts."
        ),
        height=lambda r: 1.35 + 0.5 * len(r.frame[r.frame["aggregation"] == "micro"]),
    ),
    "acceptance.by_position": Plot(
        panels=(
            _survival,
            _conditional,
            _marginal,
        ),
        shows=(
            "Three charts over the position in the block, with 95 % bands: survival and "
            "conditional acceptance while decoding, and marginal accuracy over all anchors"
        ),
        caption=(
            "Top: share of rounds whose first k proposals are all accepted, over the anchors that "
            "decoding visits. Middle: the same given that the first k - 1 were, where 10 rounds or "
            "more got that far. Bottom: share of anchors whose proposal k is right, whatever came "
            "before, over all anchors. Bands: 95 % over prompts."
        ),
        height=lambda _: 2.75,
        brief=_SURVIVAL_ALONE,
    ),
    "acceptance.comparison": Plot(
        panels=(_comparison,),
        shows="Differences in tokens per round between drafter and reference, prompt by prompt",
        caption=(
            "One dot a prompt, sorted; each is the drafter's mean tokens per round less the "
            "reference's, on the same continuation. Line and band: pooled difference with its 95 % "
            "interval over prompts."
        ),
        height=lambda _: 3.1,
    ),
    "acceptance.prompts": Plot(
        panels=(_prompts,),
        shows="Tokens per round of every prompt, drafter beside reference",
        caption=(
            "Mean tokens per round while decoding, bonus token included, one row a prompt, sorted "
            "by the drafter. The dotted line is the drafter's mean over prompts."
        ),
        height=lambda r: 1.4 + 0.235 * min(ROWS, r.frame["id"].nunique()),
    ),
    "acceptance.rounds": Plot(
        panels=(_rounds,),
        shows="Share of rounds of decoding by how many proposals they accept",
        caption=(
            "Share of the rounds of decoding that accept none, one, two and so on of their "
            "proposals, bonus token not counted. Thick bars: 95 % intervals over prompts."
        ),
        height=lambda _: 3.1,
    ),
    "acceptance.trees": Plot(
        panels=(
            _trees,
            _oracle,
        ),
        shows="Tokens per round against tree size, and leading proposals within the top k",
        caption=(
            "Top: a best-first tree of n nodes from the per-position distributions, over all "
            "anchors, bonus token included; dotted: the plain chain on the same anchors. Bottom: "
            "leading positions whose token is among the k most probable, bonus excluded; no "
            "decoder reaches it. Bands: 95 % over prompts."
        ),
        height=lambda _: 2.9,
    ),
    "acceptance.repetition": Plot(
        panels=(
            _repeated,
            _outside,
        ),
        shows="Share of repeated text for every prompt, and tokens per round with and without it",
        caption=(
            "Top: share of each greedy continuation that repeats an earlier part of it. Bottom: "
            "tokens per round over all rounds (filled) and over the rounds that start outside "
            "repeated text (hollow). Bars: 95 % over prompts."
        ),
        height=lambda _: 2.6,
    ),
    "target.lossless": Plot(
        panels=(_lossless,),
        shows="Tokens of every prompt up to which speculative and plain greedy decoding agree",
        caption=(
            "Length of the continuation (grey) and of the part in which drafting and verifying "
            "gives the same tokens as plain greedy decoding (green). A cross marks the first "
            "difference that rounding does not explain, a circle one that it does."
        ),
        height=lambda r: 1.2 + 0.17 * min(ROWS, len(r.frame)),
    ),
    "target.served": Plot(
        panels=(_lossless,),
        shows="Tokens of every prompt up to which the server and plain greedy decoding agree",
        caption=(
            "Length of the continuation (grey) and of the part that the server reproduced "
            "(green). A cross marks the first difference that rounding does not explain, a circle "
            "one that it does."
        ),
        height=lambda r: 1.2 + 0.17 * min(ROWS, len(r.frame)),
    ),
    "target.reference": Plot(
        panels=(_reference,),
        shows="Tokens of every prompt on which the server and the target agree and differ",
        caption=(
            "Tokens of each continuation, not in their order: the target's own choice after the "
            "same tokens (green), a near-tie that rounding explains (grey), another one (red). A "
            "cross marks a continuation that stopped before its end."
        ),
        height=lambda r: 1.2 + 0.17 * min(ROWS, len(r.frame)),
    ),
}
