"""How comparisons and the audit of hidden states are drawn, for one side or for several at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_diag.causes import HARMLESS
from dflash_diag.plotting.pieces import (
    BAD,
    FAINT,
    GOOD,
    ROWS,
    SOFT,
    Look,
    Plot,
    draw_interval,
    label_ends,
    rate_axis,
    set_title,
    short,
    spread,
)
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SIDES = (
    Look("#1845fb", "o", "-"),
    Look("#d94801", "s", (0, (4, 1.6))),
    Look("#0a6b4b", "^", (0, (1, 1.2))),
    Look("#8b2fb0", "D", (0, (6, 1.4, 1.2, 1.4))),
    Look("#8a5a00", "v", (0, (8, 2))),
    Look("#3b4046", "P", (0, (2.5, 1.2, 1, 1.2, 1, 1.2))),
)
"""Sides in their order; after the last they start again."""
LIMIT = 2.0
"""Noise floors from which a difference is none of rounding."""
NOTED = 3
"""Wrong layers that are named in the figure; the table names all."""


def _looks(
    frame: pd.DataFrame, names: Sequence[str] = (), by: str = "side"
) -> list[tuple[str, pd.DataFrame, Look]]:
    """(name, rows, look) of every side of a frame, by its place among ``names``."""
    groups = {str(name): rows for name, rows in frame.groupby(by, sort=False)}
    names = list(names) or list(groups)
    return [(n, groups[n], SIDES[names.index(n) % len(SIDES)]) for n in names if n in groups]


def _log_axis(ax: Axes, values: pd.Series, label: str) -> float:
    """A logarithmic axis around positive values; returns the height at which zeros are drawn."""
    from matplotlib.ticker import LogLocator

    known = values[(values > 0) & (values < math.inf)]
    low, high = (float(known.min()), float(known.max())) if len(known) else (1e-3, 1e-1)
    zero = low / 2.5
    ax.set_yscale("log")
    ax.set_ylim(zero / 1.35, high * 2.2)
    if high < 100 * low:
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    ax.set_ylabel(label)
    if (values == 0).any():
        ax.annotate(
            "0",
            (0, zero),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=9.5,
        )
    return zero


def _layer_axis(ax: Axes, layers: pd.Series, kinds: pd.Series | None = None) -> None:
    """Layers from the embedding to the last; those of full attention on a faint line."""
    from matplotlib.ticker import MaxNLocator

    first, last = int(layers.min()), int(layers.max())
    ax.set_xlim(first - 0.6, last + 0.6)
    ax.xaxis.set_major_locator(MaxNLocator(9, integer=True))
    ax.xaxis.set_major_formatter(lambda x, _: "emb." if x == -1 else f"{x:g}")
    ax.set_xlabel("layer")
    if kinds is None or kinds.nunique() < 2:
        return
    full = sorted(set(layers[kinds == "full_attention"]))
    for layer in full:
        ax.axvline(layer, color=FAINT, linewidth=3.5, alpha=0.45, zorder=0)
    ax.set_xlabel("layer (grey: full attention, else linear)")


def _noise(ax: Axes, x: Sequence[float], floor: Sequence[float], bottom: float) -> None:
    """The noise floor, and all that is no more than twice as much."""
    ax.fill_between(x, bottom, [LIMIT * f for f in floor], color=SOFT, alpha=0.13, linewidth=0)
    ax.plot(x, floor, color=SOFT, linewidth=1, linestyle=(0, (1, 1.5)), zorder=1)


def _crosses(ax: Axes, x: Sequence[float], y: Sequence[float], size: float = 8) -> None:
    """What is above the noise, or broken."""
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.7}
    ax.plot(x, y, "X", color=BAD, markersize=size, zorder=4, linestyle="", **edge)


def _note(ax: Axes, x: float, y: float, text: str, colour: str = BAD) -> None:
    """Text beside a point, on the side where there is room."""
    across, up = ax.transAxes.inverted().transform(ax.transData.transform((x, y)))
    is_left = across < 0.5
    ax.annotate(
        text,
        (x, y),
        xytext=(8 if is_left else -8, 10 if up < 0.85 else -16),
        textcoords="offset points",
        ha="left" if is_left else "right",
        fontsize=9,
        fontweight="bold",
        color=colour,
        zorder=5,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1},
    )


def _named(ax: Axes, ends: list[tuple[float, float, str, str]], sides: int) -> None:
    """Names at the lines' ends, where there is more than one line to tell apart."""
    if sides > 1:
        label_ends(ax, ends)


def _floors(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Rows of every side whose floor differs from that of a side before it."""
    found: list[pd.DataFrame] = []
    for _, rows, _ in _looks(frame):
        if not any(list(one["floor"]) == list(rows["floor"]) for one in found):
            found.append(rows)
    return found


# --- the comparison -------------------------------------------------------------------------------


def _layers(result: Result, ax: Axes) -> None:
    """Relative RMS over the layers, beside the noise."""
    frame = result.frame
    numbers = frame["rel_rms"].astype(float)
    floor = frame["floor"].astype(float)
    zero = _log_axis(ax, _joined(numbers, floor), "relative RMS")
    _layer_axis(ax, frame["layer"], frame.get("kind"))
    for rows in _floors(frame):
        _noise(ax, rows["layer"], rows["floor"].clip(lower=zero), ax.get_ylim()[0])
    top = ax.get_ylim()[1] / 1.3
    ends = []
    sides = _looks(frame)
    for name, rows, look in sides:
        y = rows["rel_rms"].astype(float).clip(lower=zero).fillna(top)
        ax.plot(rows["layer"], y, color=look.colour, linestyle=look.dash, linewidth=1.6, zorder=3)
        fine = ~rows["above"].astype(bool)
        style: dict[str, Any] = {"color": look.colour, "markersize": 4.5, "linestyle": ""}
        ax.plot(rows["layer"][fine], y[fine], look.marker, zorder=3, **style)
        _crosses(ax, rows["layer"][~fine], y[~fine])
        if (~fine).any():
            at = rows.index[~fine][0]
            _note(ax, rows["layer"][at], y[at], f"layer {rows['layer'][at]}", look.colour)
        ends.append((float(rows["layer"].iloc[-1]), float(y.iloc[-1]), short(name), look.colour))
    _named(ax, ends, len(sides))
    set_title(ax, f"{_finding(result)} (n\u00a0=\u00a0{frame['n_tokens'].max()}\u00a0tokens)")


def _finding(result: Result) -> str:
    """What became of the sides, in a few words."""
    sides = result.params["sides"]
    broken = [name for name, side in sides.items() if side["n_broken"]]
    above = [name for name, side in sides.items() if side["first_above"] is not None]
    if broken:
        return f"{broken[0]}: layers that hold zeros or no numbers"
    if not above:
        what = next(iter(sides)) if len(sides) == 1 else f"all {len(sides)} sides"
        return f"{what}: within the noise"
    first = sides[above[0]]["first_above"]["layer"]
    others = f"; {len(above)} of {len(sides)} sides are" if len(sides) > 1 else ""
    return f"{above[0]}: above the noise from layer {first} on{others}"


def _joined(*columns: pd.Series) -> pd.Series:
    import pandas as pd

    return pd.concat(columns, ignore_index=True)


def _layer_times(result: Result, ax: Axes) -> None:
    """The largest judged number of each layer, in noise floors."""
    frame = result.frame
    _layer_axis(ax, frame["layer"], frame.get("kind"))
    _times(ax, frame, "side")
    set_title(ax, "The same in noise floors: the largest of the judged numbers")


def _times(ax: Axes, frame: pd.DataFrame, by: str) -> None:
    """Curves in noise floors with the limit; linear up to 10, else logarithmic from 1 on."""
    times = frame["times_floor"].astype(float).fillna(math.inf)
    finite = times[times < math.inf]
    high = max(2.6, 1.15 * float(finite.max()) if len(finite) else 0.0)
    if high > 10:
        ax.set_yscale("symlog", linthresh=1, linscale=0.6)
        ticks = [0, 1, *(10**n for n in range(1, math.ceil(math.log10(high)) + 1))]
        ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
        ax.minorticks_off()
        high *= 1.6
    ax.set_ylim(0, high)
    ax.set_ylabel("difference [noise floors]")
    ax.axhspan(0, LIMIT, color=SOFT, alpha=0.13, linewidth=0)
    ax.axhline(1, color=SOFT, linewidth=1, linestyle=(0, (1, 1.5)), zorder=1)
    ax.axhline(LIMIT, color=SOFT, linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
    ax.annotate("limit: 2", (0.01, LIMIT), xycoords=("axes fraction", "data"), va="bottom",
                xytext=(0, 1), textcoords="offset points", fontsize=8.5, color=SOFT)  # fmt: skip
    ends = []
    groups = _looks(frame.assign(times=times.clip(upper=high * 0.94)), by=by)
    for name, rows, look in groups:
        above = rows["above"].astype(bool)
        line = {"color": look.colour, "linestyle": look.dash, "linewidth": 1.6}
        ax.plot(rows["layer"], rows["times"], zorder=3, clip_on=False, **line)
        ax.plot(rows["layer"][~above], rows["times"][~above], look.marker, color=look.colour,
                markersize=4.5, linestyle="", zorder=3, clip_on=False)  # fmt: skip
        _crosses(ax, rows["layer"][above], rows["times"][above])
        end = float(rows["layer"].iloc[-1]), float(rows["times"].iloc[-1])
        ends.append((*end, short(name), look.colour))
    _named(ax, ends, len(groups))


def _modules(result: Result, ax: Axes) -> None:
    """Relative RMS of every module, errors adding up."""
    _module_curve(result, ax, "rel_rms", "floor", "relative RMS")
    first = {k: v for k, v in result.params["first_above"].items() if v is not None}
    for name, rows, look in _looks(result.frame, result.params["sides"]):
        if name in first:
            at = rows[rows["above"].astype(bool)].iloc[0]
            y = at["rel_rms"] if at["rel_rms"] == at["rel_rms"] else ax.get_ylim()[1] / 1.5
            _crosses(ax, [at["step"]], [y], 9)
            _note(ax, at["step"], y, _place(first[name]), look.colour)
    what = "Every module is within its noise"
    if first:
        name, one = next(iter(first.items()))
        what = f"{name}: first above the noise is {_place(one)}, {one['origin']} there"
    set_title(ax, f"{what} ({result.frame['step'].max() + 1} modules)")


def _place(row: Mapping[str, Any]) -> str:
    return "the embedding" if row["layer"] < 0 else f"{row['module']} of layer {row['layer']}"


def _local(result: Result, ax: Axes) -> None:
    """Relative RMS that is left when each layer starts from the other side's input."""
    _module_curve(result, ax, "local_rel_rms", "local_floor", "local relative RMS")
    frame = result.frame
    if "local_rel_rms" in frame:
        made = frame[_created(frame)]
        _crosses(ax, made["step"], made["local_rel_rms"].fillna(ax.get_ylim()[1] / 1.5), 6.5)
    set_title(ax, "Made by the layer itself, started from the other side's input")


def _created(frame: pd.DataFrame) -> pd.Series:
    """Modules whose own layer makes more than rounding."""
    times = frame["local_times_floor"].astype(float)
    is_known = frame["local_rel_rms"].notna()
    return is_known & (times.fillna(math.inf) > LIMIT)


def _module_curve(result: Result, ax: Axes, value: str, floor: str, label: str) -> None:
    frame = result.frame
    if value not in frame or not frame[value].notna().any():
        ax.text(0.5, 0.5, "not measured", transform=ax.transAxes, ha="center", color=SOFT)
        ax.set_ylabel(label)
        return
    # What is exactly the same has no place on a logarithmic axis, and needs none.
    frame = frame.assign(y=frame[value].astype(float).where(lambda v: v > 0))
    known = _joined(frame["y"], frame[floor].astype(float).where(lambda v: v > 0)).dropna()
    _log_axis(ax, known, label)
    longest = frame[frame["side"] == frame.groupby("side", sort=False).size().idxmax()]
    _step_axis(ax, longest)
    seen: list[list[float]] = []
    ends = []
    sides = _looks(frame, result.params["sides"])
    for name, rows, look in sides:
        noise = rows[floor].astype(float).fillna(0.0)
        if list(noise) not in seen:
            seen.append(list(noise))
            usual = noise.where(noise > 0).ffill().bfill()
            _noise(ax, rows["step"], usual, ax.get_ylim()[0])
        drawn = rows.dropna(subset=["y"])
        ax.plot(drawn["step"], drawn["y"], color=look.colour, linestyle=look.dash, linewidth=1,
                marker=look.marker, markersize=1.8, zorder=3)  # fmt: skip
        if len(drawn):
            last = drawn.iloc[-1]
            ends.append((float(last["step"]), float(last["y"]), short(name), look.colour))
    _named(ax, ends, len(sides))


def _step_axis(ax: Axes, rows: pd.DataFrame) -> None:
    """Modules in execution order; ticks where layers begin, every second layer shaded."""
    starts = rows.groupby("layer", sort=False)["step"].min()
    ends = [*list(starts)[1:], int(rows["step"].max()) + 1]
    ax.set_xlim(-1, ends[-1])
    every = max(1, math.ceil(len(starts) / 10))
    shown = [layer for layer in starts.index if layer >= 0 and layer % every == 0]
    ax.set_xticks([starts[layer] for layer in shown], [str(layer) for layer in shown])
    for layer, end in zip(starts.index, ends, strict=True):
        if layer % 2 == 0:
            ax.axvspan(starts[layer] - 0.5, end - 0.5, color=FAINT, alpha=0.16, linewidth=0)
    ax.grid(visible=False, axis="x")
    ax.set_xlabel("modules in execution order [layer]")


def _flips(result: Result, ax: Axes) -> None:
    """Margins of the choices that flip, a row a side, beside what rounding explains."""
    sides = result.params["sides"]
    frame = result.frame.assign(margin=result.frame[["margin_a", "margin_b"]].min(axis=1))
    limits = [side["limit"] for side in sides.values() if side["limit"]]
    known = [*frame["margin"][frame["margin"] > 0], *limits]
    low, high = (min(known) / 1.6, max(known) * 1.8) if known else (1e-3, 1.0)
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ticks = []
    for i, (name, side) in enumerate(sides.items()):
        look = SIDES[i % len(SIDES)]
        rows = frame[frame["side"] == name].sort_values("margin").reset_index(drop=True)
        if side["limit"]:
            ax.fill_betweenx([i - 0.4, i + 0.4], low, side["limit"], color=SOFT, alpha=0.15,
                             linewidth=0)  # fmt: skip
        # Spread over the row's height by rank, so that near-equal margins do not hide each other.
        y = i + 0.5 * (rows.index.to_series() * 0.618 % 1 - 0.5)
        x = rows["margin"].clip(lower=low * 1.05)
        decisive = rows["decisive"].astype(bool)
        style: dict[str, Any] = {
            "color": look.colour,
            "markersize": 4.5,
            "markerfacecolor": "white",
        }
        ax.plot(x[~decisive], y[~decisive], look.marker, linestyle="", zorder=3, **style)
        _crosses(ax, x[decisive], y[decisive])
        ticks.append(f"{short(name)}\n{_share(side)}")
    ax.set_yticks(range(len(sides)), ticks)
    ax.set_ylim(len(sides) - 0.45, -0.55)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("smaller margin [logits]; grey: rounding")
    n = sum(side["n_positions"] for side in sides.values())
    decisive_ones = sum(side["n_decisive"] for side in sides.values())
    flipped = sum(side["n_flips"] for side in sides.values())
    what = f"{flipped} of {n} choices of the target flip, {decisive_ones} by more than rounding"
    set_title(ax, what if n else "The target's choices are not known")


def _share(side: Mapping[str, Any]) -> str:
    if not side["n_positions"]:
        return "choices unknown"
    share = 100 * side["n_flips"] / side["n_positions"]
    return f"{side['n_flips']} of {side['n_positions']} ({share:.2g}\u00a0%)"


def _cost(result: Result, ax: Axes) -> None:
    """The change of tau that each side makes."""
    sides = list(result.params["sides"])
    ax.axvspan(-HARMLESS, HARMLESS, color=SOFT, alpha=0.15, linewidth=0)
    ax.axvline(0, color=SOFT, linewidth=0.9)
    reach = 0.12
    for i, name in enumerate(sides):
        one = result.estimates.get(f"delta_tau {name}")
        if one is None or one.value is None:
            ax.text(0.5, i, "unknown", ha="center", va="center", color=SOFT, fontsize=9.5,
                    transform=ax.get_yaxis_transform(),
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip
            continue
        draw_interval(ax, i, one, SIDES[i % len(SIDES)], signed=True)
        reach = max(reach, *(1.2 * abs(v) for v in (one.value, one.lo, one.hi) if v is not None))
    ax.set_xlim(-reach, reach)
    ax.set_yticks(range(len(sides)), [short(name) for name in sides])
    ax.set_ylim(len(sides) - 0.45, -0.75)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("change of tau [tokens per round]; grey: counts as none")
    set_title(ax, "What that costs, paired by prompt")


# --- the audit ------------------------------------------------------------------------------------


def _answer(result: Result) -> str:
    return result.headline.removesuffix(".")


def _cases(result: Result, ax: Axes) -> None:
    """Cases that must agree, layer by layer, in noise floors."""
    _layer_axis(ax, result.frame["layer"])
    _times(ax, result.frame, "case")
    set_title(ax, _answer(result))


def _profile(result: Result, ax: Axes) -> None:
    """Root mean square of the states over the layers; broken layers crossed."""
    frame = result.frame
    rms = frame.assign(rms=frame["rms"].astype(float)).groupby("layer")["rms"]
    middle = rms.median()
    _log_axis(ax, _joined(rms.min(), rms.max()).dropna(), "root mean square")
    _layer_axis(ax, frame["layer"])
    ax.fill_between(middle.index, rms.min(), rms.max(), color=SIDES[0].colour, alpha=0.16,
                    linewidth=0)  # fmt: skip
    ax.plot(middle.index, middle, color=SIDES[0].colour, marker="o", markersize=4)
    bad = frame[["nan_rows", "inf_rows", "zero_rows"]].sum(axis=1) > 0
    layers = sorted(set(frame["layer"][bad | (frame["n_rows"] != frame["n_tokens"])]))
    heights = middle.reindex(layers).fillna(middle.max())
    _crosses(ax, layers, heights, 10)
    for layer in layers[:1]:
        _note(ax, layer, heights[layer], f"layer {layer}")
    set_title(ax, f"{_answer(result)} (n\u00a0=\u00a0{frame['prompt'].nunique()}\u00a0prompts)")


def _equal(result: Result, ax: Axes) -> None:
    """Share of choices that are the target's, prompt by prompt."""
    frame = result.frame.assign(share=result.frame["n_equal"] / result.frame["n"].clip(lower=1))
    frame = frame.sort_values("share").reset_index(drop=True)
    shown = frame if len(frame) <= ROWS else spread(frame, ROWS).reset_index(drop=True)
    ax.bar(shown.index, shown["share"], color=SIDES[0].colour, alpha=0.75, width=0.72)
    decisive = shown["n_decisive"] > 0
    _crosses(ax, shown.index[decisive], shown["share"][decisive])
    ax.set_xticks([])
    ax.set_xlabel("prompts, sorted")
    rate_axis(ax, "equal [share]")
    set_title(ax, f"{_answer(result)} (n\u00a0=\u00a0{len(frame)}\u00a0prompts)")


def _kinds(result: Result, ax: Axes) -> None:
    """States against what they claim to be; what they are instead, in words."""
    frame = result.frame.assign(error=result.frame["rel_rms"].astype(float))
    zero = _log_axis(ax, _joined(frame["error"], frame["floor"]), "relative RMS")
    _layer_axis(ax, frame["layer"])
    floor = frame.groupby("layer")["floor"].max()
    _noise(ax, floor.index, floor.clip(lower=zero), ax.get_ylim()[0])
    top = ax.get_ylim()[1] / 1.3
    frame["error"] = frame["error"].clip(lower=zero).fillna(top)
    right = frame["kind"] == "right"
    ax.plot(frame["layer"][right], frame["error"][right], "o", color=GOOD, markersize=3.5,
            alpha=0.5, linestyle="")  # fmt: skip
    _crosses(ax, frame["layer"][~right], frame["error"][~right])
    wrong = frame[~right].sort_values("error", ascending=False).drop_duplicates("layer")
    for i, row in enumerate(wrong.sort_values("layer").head(NOTED).itertuples(index=False)):
        text = f"{row.layer}: {short(str(row.what), 44)}"
        ax.annotate(text, (0.03, 0.93 - 0.085 * i), xycoords="axes fraction", fontsize=9,
                    fontweight="bold", color=BAD, va="top")  # fmt: skip
    if len(wrong):
        low, high = ax.get_ylim()
        ax.set_ylim(low, high * (high / low) ** 0.45)  # room for the words
    set_title(ax, f"{_answer(result)} (n\u00a0=\u00a0{frame['prompt'].nunique()}\u00a0prompts)")


# --- the registry ---------------------------------------------------------------------------------


def _per_side(base: float, each: float) -> Any:
    return lambda result: base + each * len(result.params["sides"])


_LAYERS_ALONE = Plot(
    panels=(_layers,),
    shows="Relative RMS of the hidden states over the layers, beside the noise floor",
    caption=(
        "Difference of the hidden states, layer by layer. Dotted: the noise floor, low precision "
        "against float32 of the same code; grey: up to twice that. A cross marks a layer above it."
    ),
    height=lambda _: 3.6,
)


def _audit(shows: str, how: str) -> Plot:
    """Plot of a check whose cases must agree."""
    caption = (
        f"{how} Differences layer by layer in noise floors, a line a case; grey: up to twice the "
        "floor, what rounding explains. A cross marks a layer above that."
    )
    return Plot(panels=(_cases,), shows=shows, caption=caption, height=lambda _: 2.9)


PLOTS: dict[str, Plot] = {
    "hidden.divergence": Plot(
        panels=(_layers, _layer_times),
        shows="Two charts over the layers: relative RMS beside the noise floor, and noise floors",
        caption=(
            "Top: difference of the hidden states, layer by layer. Dotted: the noise floor, low "
            "precision against float32 of the same code; grey: up to twice that. Bottom: the "
            "largest of relative RMS, relative RMS without the loudest channels, and the 99th "
            "percentile of single tokens, each in its own noise floor. A cross marks a layer above "
            "twice its floor, the first of which is named; what is no number lies at the top."
        ),
        height=lambda _: 3.1,
        brief=_LAYERS_ALONE,
    ),
    "hidden.modules": Plot(
        panels=(_modules, _local),
        shows="Two charts over the modules in execution order: errors that add up, and local ones",
        caption=(
            "Top: relative RMS of every module's output as the forward pass adds errors up. "
            "Bottom: the same when each layer starts from the other side's input, so that only "
            "what it does differently by itself is left. Dotted: noise floor; grey: up to twice "
            "that; crosses: the first module above it (top), and modules above it by themselves "
            "(bottom). What is exactly the same is not drawn."
        ),
        height=lambda _: 3.1,
    ),
    "hidden.effect": Plot(
        panels=(_flips, _cost),
        shows="Margins of the target's choices that flip, and the change of tau, side by side",
        caption=(
            "Top: a mark a flipped choice of the target, at the smaller of its two margins; within "
            "grey, rounding explains it (a tie lies at the left edge), a cross marks one that it "
            "does not. Bottom: tokens per round on the capture less those on the side, with 95 % "
            "intervals over prompts."
        ),
        height=_per_side(1.35, 0.42),
    ),
    "hidden.rows": Plot(
        panels=(_profile,),
        shows="Root mean square of the captured states over the layers, broken layers crossed",
        caption=(
            "Line: median over prompts; band: from the quietest to the loudest prompt. A cross "
            "marks a layer with rows that are missing, zero or no numbers."
        ),
        height=lambda _: 2.9,
    ),
    "hidden.argmax": Plot(
        panels=(_equal,),
        shows="Share of choices that head and norm reproduce from the last layer, every prompt",
        caption=(
            "Bars: share of positions at which the final norm and the head, on the captured last "
            "layer, choose what the target chose. A cross: some differ by more than rounding."
        ),
        height=lambda _: 2.4,
    ),
    "hidden.identity": Plot(
        panels=(_kinds,),
        shows="Relative RMS of the captured states against the live target, layer by layer",
        caption=(
            "A dot a prompt and layer: captured states against what the target computes for that "
            "layer. Dotted: noise floor; grey: up to twice that. A cross marks states that are "
            "something else, with what they are for the first few layers."
        ),
        height=lambda _: 3.0,
    ),
    "hidden.batch": _audit(
        "Differences between a sequence alone and in a batch, layer by layer, in noise floors",
        "Three sequences of one length together, and each alone.",
    ),
    "hidden.padding": _audit(
        "Differences that padding on the left makes, layer by layer, in noise floors",
        "A sequence padded on the left, alone and beside a longer one, and without padding.",
    ),
    "hidden.packing": _audit(
        "Differences between packed and single documents, layer by layer, in noise floors",
        "Two documents in one row, and each alone.",
    ),
    "hidden.chunks": _audit(
        "Differences around the length of a chunk, layer by layer, in noise floors",
        "Sequences of 63, 64 and 65 tokens, and the same tokens inside a longer one.",
    ),
    "hidden.decode": _audit(
        "Differences between decoding and one forward, layer by layer, in noise floors",
        "Half of a sequence at once and the rest token by token, and all of it at once.",
    ),
}
