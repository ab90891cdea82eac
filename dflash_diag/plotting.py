"""Plots of stored results: one a diagnostic, looked up by id, drawn on any axes.

A plot reads a `Result` and nothing else. Titles state the finding and n, axes state quantity and
unit, rates share the scale [0, 1]. Roles differ by colour *and* marker *and* dash. matplotlib is
imported inside functions only, and pyplot (global state) not at all.
"""

from __future__ import annotations

import base64
import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    """Height of a panel in inches."""
    brief: Plot | None = None
    """The same result in one panel, for the front page."""


def plot(result: Result, ax: Axes | None = None) -> Axes:
    """Draw a result: its first panel on ``ax``, or all panels on a new figure.

    Raises
    ------
    KeyError
        No plot is registered for ``result.id``.
    """
    if ax is None:
        return figure(result).axes[0]
    with _style():
        PLOTS[result.id].panels[0](result, ax)
    return ax


def _plot_of(result: Result, *, brief: bool) -> Plot:
    registered = PLOTS[result.id]
    return (registered.brief if brief else None) or registered


def figure(result: Result, *, brief: bool = False) -> Figure:
    """A result's plot, or its brief form, on a figure of its own."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    registered = _plot_of(result, brief=brief)
    n = len(registered.panels)
    with _style():
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.1)
        made = Figure(figsize=(WIDTH, registered.height(result) * n), layout=layout)
        for draw, ax in zip(registered.panels, made.subplots(n, squeeze=False)[:, 0], strict=True):
            draw(result, ax)
        _titles_from_the_edge(made)
    return made


def _titles_from_the_edge(made: Figure) -> None:
    """Start titles at the figure's left edge, not at the axes', so that they have all its width."""
    made.draw_without_rendering()
    for ax in made.axes:
        box = ax.get_position()
        ax.set_title(ax.get_title(loc="left"), loc="left", x=(0.012 - box.x0) / box.width)


_METADATA = ("Creator", "Date", "Format", "Type")
"""Left out: it would differ from one matplotlib to the next."""


def svg(result: Result, *, brief: bool = False) -> str:
    """The figure as SVG text, the same bytes for the same result; its letters stay letters."""
    buffer = io.StringIO()
    with _style(), warnings.catch_warnings():
        # A glyph that is not in matplotlib's font is drawn by the browser's.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure(result, brief=brief).savefig(buffer, format="svg", metadata=dict.fromkeys(_METADATA))
    drawn = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", buffer.getvalue())
    drawn = re.sub(r"font-weight: (bold|700)", "font-weight: 600", drawn)
    return drawn[drawn.index("<svg") :]


def figure_html(result: Result, *, brief: bool = False) -> str:
    """``<figure>`` with the drawing inline, its text alternative and its caption."""
    registered = _plot_of(result, brief=brief)
    data = base64.b64encode(svg(result, brief=brief).encode()).decode()
    return (
        f'<figure><img alt="{escape(f"{registered.shows}. {result.headline}", quote=True)}" '
        f'src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(registered.caption)}</figcaption></figure>"
    )


def _style() -> Any:
    import matplotlib as mpl

    with as_file(files("dflash_diag") / "dflash.mplstyle") as path:
        return mpl.rc_context(fname=str(path))


# --- pieces that plots share ----------------------------------------------------------------------


def _title(ax: Axes, text: str) -> None:
    ax.set_title("\n".join(textwrap.wrap(_printable(text), 60)))


def _look(role: str) -> Look:
    return LOOKS.get(role, Look(SOFT, "D", ":"))


def _rate_axis(ax: Axes, label: str) -> None:
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    ax.set_ylabel(label)


def _line(ax: Axes, rows: pd.DataFrame, x: str, y: str, lo: str, hi: str) -> None:
    """One drafter's line with markers and its interval band."""
    look = _look(str(rows["role"].iloc[0]))
    known = rows.dropna(subset=[y])
    ax.plot(
        known[x], known[y], color=look.colour, marker=look.marker, linestyle=look.dash, zorder=3
    )
    band = known.dropna(subset=[lo, hi])
    ax.fill_between(band[x], band[lo], band[hi], color=look.colour, alpha=0.13, linewidth=0)


def _label_ends(ax: Axes, ends: Iterable[tuple[float, float, str, str]]) -> None:
    """Name lines at their right ends (x, y, text, colour), moved apart where they would overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    right = max((end[0] for end in ends), default=0.0)
    low, high = ax.get_ylim()
    gap = 0.085 * (high - low)
    last = low - gap
    for _, y, text, colour in ends:
        last = max(y, last + gap)
        ax.annotate(
            text,
            (right, last),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9.5,
            fontweight="bold",
            annotation_clip=False,
        )


def _interval(ax: Axes, y: float, row: Any, look: Look, *, filled: bool = True) -> None:
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
        f"{row.value:.2f}",
        (row.value, y),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        fontsize=9.5,
        color=look.colour,
        fontweight="bold",
    )


def _mark(ax: Axes, at: float, text: str, *, axis: str = "x") -> None:
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


def _names(frame: pd.DataFrame) -> list[tuple[str, str]]:
    """(role, name) of the drafters in a frame, in its order."""
    pairs = frame[["role", "drafter"]].drop_duplicates()
    return [(str(r), _short(str(d))) for r, d in pairs.itertuples(index=False)]


def _short(name: str, width: int = 20) -> str:
    """A name on one line, its end left out where it is long; control characters become dots."""
    name = _printable(name)
    return name if len(name) <= width else f"{name[: width - 1]}…"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\u00a0" else "·" for c in text)


def _n(result: Result) -> str:
    n = result.params.get("n_prompts")
    return f"n\u00a0=\u00a0{n}\u00a0prompts"


# --- acceptance -----------------------------------------------------------------------------------


def _headline(result: Result, ax: Axes) -> None:
    rows = result.frame.query("aggregation == 'micro'").reset_index(drop=True)
    rows = rows.rename(columns={"tau": "value"})
    ticks = []
    for i, row in enumerate(rows.itertuples()):
        _interval(ax, -i, row, _look(row.role), filled=row.population == "walked")
        where = "decoding" if row.population == "walked" else "all anchors"
        ticks.append(f"{_short(row.drafter)}\n{where}")
    ax.set_yticks([-i for i in range(len(rows))], ticks)
    ax.set_ylim(-len(rows) + 0.4, 0.75)
    top = float(rows[["value", "hi"]].max().max())
    ax.set_xlim(0.9, max(3.0, top * 1.08))
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens per round (tau) [tokens]")
    bound = result.params.get("bound")
    if bound:
        _mark(ax, bound, f"{bound:g}: half the passes saved")
    _title(ax, f"{result.params['finding']} ({_n(result)})")


def _survival(result: Result, ax: Axes) -> None:
    for curve in result.params.get("published", []):
        ax.plot(range(1, len(curve["survival"]) + 1), curve["survival"], color=FAINT, linewidth=0.8)
    if result.params.get("published"):
        ax.annotate("grey: published", (0.02, 0.03), xycoords="axes fraction", fontsize=8.5,
                    color=SOFT)  # fmt: skip
    walked = result.frame[result.frame["population"] == "walked"]
    _curve(ax, walked, "survival", "survival [share of rounds]")
    ax.set_xlabel("position in the block k" if len(ax.figure.axes) == 1 else "")
    _title(ax, f"{result.params['finding']} ({_n(result)})")


def _conditional(result: Result, ax: Axes) -> None:
    walked = result.frame[result.frame["population"] == "walked"]
    drawn = walked[walked["n_before"] >= _FEW_ROUNDS]
    _curve(ax, drawn, "conditional", "conditional [share]", last=int(walked["k"].max()))
    _title(ax, "Given that all before were right: is this one?")


def _marginal(result: Result, ax: Axes) -> None:
    uniform = result.frame[result.frame["population"] == "uniform"]
    _curve(ax, uniform, "marginal", "marginal [share of anchors]")
    _title(ax, "Each position by itself, over all anchors")
    ax.set_xlabel("position in the block k")


def _curve(
    ax: Axes, frame: pd.DataFrame, quantity: str, label: str, last: int | None = None
) -> None:
    last = last or int(frame["k"].max())
    ax.set_xlim(0.6, last + 0.4)
    ax.set_xticks([k for k in range(1, last + 1) if last <= 8 or k % 2])
    _rate_axis(ax, label)
    ends = []
    for role, name in _names(frame):
        rows = frame[frame["role"] == role]
        _line(ax, rows, "k", quantity, f"{quantity}_lo", f"{quantity}_hi")
        known = rows.dropna(subset=[quantity])
        if len(known):
            end = known.iloc[-1]
            ends.append((float(end["k"]), float(end[quantity]), name, _look(role).colour))
    _label_ends(ax, ends)


def _comparison(result: Result, ax: Axes) -> None:
    frame = result.frame.dropna(subset=["delta"]).sort_values("delta").reset_index(drop=True)
    delta = result.estimates["delta_tau"]
    look = _look("drafter")
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
    _title(ax, f"{result.params['finding']} ({_n(result)})")


def _prompts(result: Result, ax: Axes) -> None:
    frame = result.frame.dropna(subset=["tau_walked"])
    table = frame.pivot_table(index="id", columns="role", values="tau_walked", sort=False)
    table = table.sort_values("drafter", ascending=False)
    shown = table if len(table) <= _ROWS else _spread(table, _ROWS)
    rows = range(len(shown))
    if "reference" in shown:
        ax.hlines(rows, shown["drafter"], shown["reference"], color=FAINT, linewidth=1.4)
    for role in shown.columns:
        look = _look(role)
        ax.plot(shown[role], rows, look.marker, color=look.colour, markersize=5.5, zorder=3)
    ax.axvline(table["drafter"].mean(), color=LOOKS["drafter"].colour, linewidth=1, linestyle=":")
    ax.set_yticks(rows, [_short(str(i), 24) for i in shown.index])
    ax.set_ylim(len(shown) - 0.4, -1.6)
    for i, (role, name) in enumerate(_names(frame)):
        look, at = _look(role), 0.01 + 0.42 * i
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
    _title(ax, f"{result.params['finding']} ({_n(result)}{few})")


_ROWS = 40
_FEW_ROUNDS = 10
"""Conditional rates over fewer rounds are not drawn: they jump about."""


def _spread(table: pd.DataFrame, n: int) -> pd.DataFrame:
    """``n`` rows of a sorted table, evenly spread from its first to its last."""
    step = (len(table) - 1) / (n - 1)
    return table.iloc[[round(i * step) for i in range(n)]]


def _trees(result: Result, ax: Axes) -> None:
    _budgets(result, ax, "ddtree_tau", "tokens per round [tokens]")
    ax.set_xlabel("nodes of the draft tree, root not counted")
    for role, _ in _names(result.frame):
        chain = result.estimates.get(f"{role}_chain")
        if chain and chain.value is not None:
            look = _look(role)
            ax.axhline(chain.value, color=look.colour, linewidth=0.9, linestyle=":")
    _title(ax, f"{result.params['finding']} ({_n(result)})")


def _oracle(result: Result, ax: Axes) -> None:
    _budgets(result, ax, "topk_oracle", "leading proposals [tokens]")
    ax.set_xlabel("k most probable tokens of each position")
    _title(ax, "How near the right token is, position by position")


def _budgets(result: Result, ax: Axes, kind: str, label: str) -> None:
    frame = result.frame.query("kind == @kind and population == 'uniform'")
    sizes = sorted(frame["n"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(n) for n in sizes])
    ax.minorticks_off()
    ax.set_xlim(sizes[0] * 0.85, sizes[-1] * 1.18)
    for role, _ in _names(frame):
        _line(ax, frame[frame["role"] == role], "n", "value", "lo", "hi")
    ax.set_ylim(bottom=min(1.0, ax.get_ylim()[0]) if kind == "ddtree_tau" else 0)
    ends = [
        (end["n"], end["value"], name, _look(role).colour)
        for role, name in _names(frame)
        for end in [frame[frame["role"] == role].iloc[-1]]
        if end["value"] == end["value"]
    ]
    _label_ends(ax, ends)
    ax.set_ylabel(label)


def _repeated(result: Result, ax: Axes) -> None:
    frame = result.frame.drop_duplicates("id").sort_values("share_repeated", ascending=False)
    ax.bar(range(len(frame)), frame["share_repeated"], color=SOFT, width=0.72)
    ax.set_xticks([])
    ax.set_xlabel("prompts, sorted")
    _rate_axis(ax, "repeated [share]")
    _mark(ax, result.params["bound"], f"{100 * result.params['bound']:.0f}\u00a0%", axis="y")
    _title(ax, f"{result.params['finding']} ({_n(result)})")


def _outside(result: Result, ax: Axes) -> None:
    ticks: list[str] = []
    for role, name in result.params["drafters"]:
        for kind, words in (("all", "all rounds"), ("outside", "outside repeats")):
            one = result.estimates[f"{role}_tau_{kind}"]
            if one.value is None:
                continue
            _interval(ax, -len(ticks), one, _look(role), filled=kind == "all")
            ticks.append(f"{_short(name)}\n{words}")
    ax.set_yticks([-i for i in range(len(ticks))], ticks)
    ax.set_ylim(-len(ticks) + 0.4, 0.8)
    ax.set_xlim(left=0.9)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("tokens per round (tau) [tokens]")
    _title(ax, "Tokens a round, with and without repeated text")


# --- trust ----------------------------------------------------------------------------------------


def _lossless(result: Result, ax: Axes) -> None:
    frame = result.frame.sort_values("n_same").reset_index(drop=True).head(_ROWS)
    rows = range(len(frame))
    ax.barh(rows, frame["n_tokens"], color=FAINT, height=0.62)
    ax.barh(rows, frame["n_same"], color=AGREES, height=0.62)
    for cause, marker, colour in (("rounding", "o", SOFT), ("state_fault", "X", BAD)):
        hit = frame[frame["cause"] == cause]
        ax.plot(hit["n_same"], hit.index, marker, color=colour, markersize=8, zorder=3)
    ax.set_yticks(rows, [_short(str(i), 24) for i in frame["id"]])
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("generated tokens")
    _title(ax, f"{result.params['finding']} ({_n(result)})")


def _reference(result: Result, ax: Axes) -> None:
    frame = result.frame.sort_values(["n_differ", "n_rounding"], ascending=False)
    frame = frame.reset_index(drop=True).head(_ROWS)
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
    ax.set_yticks(rows, [_short(str(i), 24) for i in frame["id"]])
    ax.set_ylim(len(frame) - 0.4, -0.6)
    ax.grid(axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("generated tokens")
    _title(ax, f"{result.params['finding']} ({_n(result)})")


# --- checkpoint -----------------------------------------------------------------------------------


def _facts(result: Result, ax: Axes) -> None:
    parts = result.params["parts"]
    ax.barh(range(len(parts)), [n for _, n in parts], color=LOOKS["drafter"].colour, height=0.6)
    for i, (_, n) in enumerate(parts):
        ax.annotate(f" {_millions(n)}", (n, i), va="center", fontsize=9.5, color=SOFT)
    ax.set_yticks(range(len(parts)), [name for name, _ in parts])
    ax.set_ylim(len(parts) - 0.4, -0.6)
    ax.set_xlim(0, max(n for _, n in parts) * 1.18)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    ax.grid(visible=False)
    _title(ax, result.params["finding"])


def _millions(n: float) -> str:
    return f"{n / 1e6:.2f} M" if n >= 1e5 else f"{n:,.0f}"


def _tensors(result: Result, ax: Axes) -> None:
    frame = result.frame[result.frame["rms"].notna()]
    kinds = list(dict.fromkeys(frame["kind"]))
    positive = frame["rms"][frame["rms"] > 0]
    floor = float(positive.min()) / 3 if len(positive) else 1e-3
    for row in frame.itertuples():
        layer = "f" if row.layer is None or row.layer < 0 else str(int(row.layer))
        ax.annotate(
            layer,
            (max(row.rms, floor), kinds.index(row.kind)),
            ha="center",
            va="center",
            fontsize=9,
            color=LOOKS["drafter"].colour if row.rms > 0 else BAD,
            fontweight="bold",
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlim(floor * 0.8, float(frame["rms"].max()) * 1.6)
    ax.set_yticks(range(len(kinds)), kinds)
    ax.set_ylim(len(kinds) - 0.4, -0.6)
    ax.grid(axis="both")
    ax.set_xlabel("root mean square of the values")
    _title(ax, result.params["finding"])


def _convention(result: Result, ax: Axes) -> None:
    from matplotlib.patches import Rectangle

    p = result.params
    b, before = int(p["block_size"]), 5
    for k in range(b):
        y = k
        for row in range(-before, b):
            last = 0 if p["context_bound"] == "inclusive" else -1
            own = row >= 0 and (p["in_block"] == "bidirectional" or row <= k)
            context = row <= last
            if own:
                box = Rectangle((row - 0.44, y - 0.42), 0.88, 0.84, color="#b9c8ff", linewidth=0)
                ax.add_patch(box)
            if context:
                inset = 0.22 if own else 0.0
                box = Rectangle(
                    (row - 0.44 + inset, y - 0.42 + inset),
                    0.88 - 2 * inset,
                    0.84 - 2 * inset,
                    color="#33457f",
                    linewidth=0,
                )
                ax.add_patch(box)
        shift = 0 if p["label_layout"] == "same" else 1
        if k or shift:
            ax.plot(k + shift, y, "o", color=LOOKS["reference"].colour, markersize=4.5)
    ax.set_xlim(-before - 0.6, b + 0.6)
    ax.set_ylim(b - 0.4, -0.6)
    ax.set_xticks(
        [-before, -1, 0, b // 2, b - 1], [f"a-{before}", "", "a", f"a+{b // 2}", f"a+{b - 1}"]
    )
    ax.set_yticks([0, b // 2, b - 1], ["anchor", f"slot {b // 2}", f"slot {b - 1}"])
    ax.grid(visible=False)
    ax.set_xlabel("position in the text")
    _title(ax, result.params["finding"])


# --- the registry ------------------------------------------------------------------------------

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
        height=lambda r: 1.4 + 0.235 * min(_ROWS, r.frame["id"].nunique()),
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
        height=lambda r: 1.2 + 0.17 * min(_ROWS, len(r.frame)),
    ),
    "target.served": Plot(
        panels=(_lossless,),
        shows="Tokens of every prompt up to which the server and plain greedy decoding agree",
        caption=(
            "Length of the continuation (grey) and of the part that the server reproduced "
            "(green). A cross marks the first difference that rounding does not explain, a circle "
            "one that it does."
        ),
        height=lambda r: 1.2 + 0.17 * min(_ROWS, len(r.frame)),
    ),
    "target.reference": Plot(
        panels=(_reference,),
        shows="Tokens of every prompt on which the server and the target agree and differ",
        caption=(
            "Tokens of each continuation, not in their order: the target's own choice after the "
            "same tokens (green), a near-tie that rounding explains (grey), another one (red). A "
            "cross marks a continuation that stopped before its end."
        ),
        height=lambda r: 1.2 + 0.17 * min(_ROWS, len(r.frame)),
    ),
    "checkpoint.facts": Plot(
        panels=(_facts,),
        shows="Weights of each part of the drafter",
        caption="Parameters by part; the embedding and the head are the target's and not counted.",
        height=lambda r: 1.1 + 0.3 * len(r.params["parts"]),
    ),
    "checkpoint.tensors": Plot(
        panels=(_tensors,),
        shows="Root mean square of every tensor of the drafter, by kind and layer",
        caption=(
            "Each number is a draft layer (f: not in a layer) at the root mean square of that "
            "tensor's values. A layer far from the others, or at 0 (left edge), deserves a look."
        ),
        height=lambda r: 1.3 + 0.27 * r.frame["kind"].nunique(),
    ),
    "checkpoint.convention": Plot(
        panels=(_convention,),
        shows="Which positions each slot of a block sees, under the resolved reading",
        caption=(
            "Rows: slots of a block at anchor a. Dark: target states that the slot sees; light: "
            "slots of its own block. A dot marks the position whose token the slot predicts."
        ),
        height=lambda r: 1.3 + 0.24 * min(r.params["block_size"], 16),
    ),
}
