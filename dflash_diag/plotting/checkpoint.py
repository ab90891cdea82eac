"""How a drafter's files and reading are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash_diag.plotting.pieces import AGREES, BAD, INK, LOOKS, SOFT, Plot, set_title, short
from dflash_diag.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
    set_title(ax, result.params["finding"])


def _millions(n: float) -> str:
    return f"{n / 1e6:.2f} M" if n >= 1e5 else f"{n:,.0f}"


def _tensors(result: Result, ax: Axes) -> None:
    frame = result.frame[result.frame["rms"].notna()]
    _by_kind(ax, list(zip(frame["kind"], frame["layer"], frame["rms"], strict=True)))
    ax.set_xlabel("root mean square of the values")
    set_title(ax, result.params["finding"])


def _static(result: Result, ax: Axes) -> None:
    effects = result.params["effects"]
    if effects:
        _by_kind(ax, [(one["kind"], one["layer"], one["effect"]) for one in effects], edge=0.01)
    else:
        why = "the drafter cannot be run"
        ax.annotate(why, (0.5, 0.5), xycoords="axes fraction", ha="center", color=SOFT)
        ax.set_yticks([])
    ax.set_xlabel("change of what the head reads (1: as large as the output)")
    set_title(ax, result.params["finding"])


def _by_kind(
    ax: Axes, tensors: list[tuple[str, int, float]], *, edge: float = float("inf")
) -> None:
    """Kind, layer and a number of every tensor: the layer is written where the number is.

    Zeros stand at the left edge, which is below all other numbers and at most at ``edge``.
    """
    kinds = list(dict.fromkeys(kind for kind, _, _ in tensors))
    positive = [value for _, _, value in tensors if value > 0]
    floor = min(min(positive, default=3e-3) / 3, edge)
    for kind, layer, value in tensors:
        ax.annotate(
            "f" if layer is None or layer < 0 else str(int(layer)),
            (max(value, floor), kinds.index(kind)),
            ha="center",
            va="center",
            fontsize=9,
            color=LOOKS["drafter"].colour if value > 0 else BAD,
            fontweight="bold",
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.set_xlim(floor * 0.8, max(positive, default=floor) * 1.6)
    ax.set_yticks(range(len(kinds)), kinds)
    ax.set_ylim(len(kinds) - 0.4, -0.6)
    ax.grid(axis="both")


def _stack(result: Result, ax: Axes) -> None:
    matrix = result.params["matrix"]
    stacks = list(next(iter(matrix.values()), {"as here": ""}))
    for y, row in enumerate(matrix.values()):
        here = row[stacks[0]]
        for x, name in enumerate(stacks):
            if x and row[name] == here:
                ax.plot(x, y, "o", color=AGREES, markersize=4)
                continue
            colour = INK if x == 0 else BAD
            ax.annotate(
                _wrapped(row[name]), (x, y), ha="center", va="center", fontsize=7.5, color=colour
            )
    if not matrix:
        ax.annotate("every stack reads these files alike", (0, 0), ha="center", color=SOFT)
    # Every other name stands a line higher, since they are wider than their columns.
    names = [f"{name}\n" if x % 2 else name for x, name in enumerate(stacks)]
    ax.set_xticks(range(len(stacks)), names, fontsize=8)
    ax.set_yticks(range(len(matrix)), list(matrix), fontsize=8.5)
    ax.set_xlim(-0.6, len(stacks) - 0.4)
    ax.set_ylim(max(len(matrix), 1) - 0.4, -0.6)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    ax.grid(visible=False)
    set_title(ax, result.params["finding"])


def _wrapped(text: str, width: int = 12) -> str:
    import textwrap

    text = short(text, 3 * width).replace("bidirectional", "bi-directional")
    return "\n".join(textwrap.wrap(text, width)) or text


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
    set_title(ax, result.params["finding"])


PLOTS: dict[str, Plot] = {
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
    "checkpoint.stack": Plot(
        panels=(_stack,),
        shows="What each stack's code would make of these files, where they differ",
        caption=(
            "First column: the reading used here. A dot: another stack reads the same; red: it "
            "reads otherwise (none: it finds no such value in these files)."
        ),
        height=lambda r: 1.2 + 0.42 * max(len(r.params["matrix"]), 1),
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
    "checkpoint.static": Plot(
        panels=(_static,),
        shows="How much the output changes when each tensor of the drafter is silenced",
        caption=(
            "Each number is a draft layer (f: not in a layer) at the root mean square by which "
            "what the head reads changes when that tensor is made zero, over that of the output. "
            "A tensor at the left edge does nothing. The table has all checks."
        ),
        height=lambda r: 1.3 + 0.27 * len({one["kind"] for one in r.params["effects"]}),
    ),
}
