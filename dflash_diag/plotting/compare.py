"""How drafters are drawn side by side: by tau, pair, slot, prompt and training step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag.compare_words import elided
from dflash_diag.plotting.pieces import (
    BAD,
    FAINT,
    GOOD,
    INK,
    LOOKS,
    SOFT,
    Draw,
    Look,
    Plot,
    draw_interval,
    draw_mark,
    label_ends,
    n_prompts,
    printable,
    set_title,
    short,
)
from dflash_diag.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = LOOKS["reference"]
OTHERS = (
    LOOKS["drafter"],
    Look("#0a7d6c", "^", (0, (1, 1.2))),
    Look("#8a3ffc", "D", (0, (5, 1.5, 1, 1.5))),
    Look("#b5179e", "v", (0, (3, 1))),
    Look("#7a5c00", "P", (0, (8, 2))),
    Look("#4d5358", "X", (0, (2, 2))),
)
"""Looks of drafters that are not the reference; each has a colour, a marker and a dash."""
ANSWERS = {"yes": ("✓ yes", GOOD), "no": ("✗ no", BAD)}
REFERENCE_NAME = "reference"
"""A name that says by itself what it is."""
WIDE = 24
"""Characters of a name beside an axis."""
MOST_PAIRS = 10
MOST_PROMPTS = 24


def looks(result: Result) -> dict[str, Look]:
    """How each drafter is drawn, by its name."""
    found, free = {}, 0
    for one in result.params["drafters"]:
        if one["reference"]:
            found[one["name"]] = REFERENCE
        else:
            found[one["name"]] = OTHERS[min(free, len(OTHERS) - 1)]
            free += 1
    return found


# --- pairs ----------------------------------------------------------------------------------------


def draw_taus(result: Result, ax: Axes) -> None:
    """Every drafter's tau, the reference's as a line through all of them."""
    drafters, seen = result.params["drafters"], looks(result)
    for one in drafters:
        tau = one["tau"]
        if one["reference"] and tau["lo"] is not None:
            ax.axvspan(tau["lo"], tau["hi"], color=REFERENCE.colour, alpha=0.1, linewidth=0)
            ax.axvline(tau["value"], color=REFERENCE.colour, linewidth=1, linestyle=REFERENCE.dash)
    for y, one in enumerate(drafters):
        draw_interval(ax, y, _Row(one["tau"]), seen[one["name"]])
    ends = [end for one in drafters for end in one["tau"].values() if end is not None]
    ax.set_xlim(min(0.95, min(ends) - 0.1), max(ends) + 0.2)
    said = {one["name"]: "\n(reference)" for one in drafters if one["reference"]} | {
        REFERENCE_NAME: ""
    }
    names = [_short(one["name"], WIDE) + said.get(one["name"], "") for one in drafters]
    _rows(ax, names)
    ax.set_xlabel("tokens per round (tau) while decoding [tokens]")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def draw_pairs(result: Result, ax: Axes) -> None:
    """Every difference with its interval, and what it answers."""
    frame, seen = result.frame.head(MOST_PAIRS), looks(result)
    margin = result.params["margin"]
    ax.axvspan(0, margin, color=SOFT, alpha=0.16, linewidth=0)
    ax.axvline(0, color=INK, linewidth=0.9)
    for y, row in enumerate(frame.to_dict("records")):
        numbers = {"value": row["delta"], "lo": row["lo"], "hi": row["hi"]}
        draw_interval(ax, y, _Row(numbers), seen[row["a"]], signed=True)
        words, colour = ANSWERS.get(row["verdict"], (f"? {row['verdict']}", INK))
        ax.annotate(
            words.replace("needs ", "needs\n").partition(" prompt")[0],
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold",
            annotation_clip=False,
        )
    ends = frame[["delta", "lo", "hi"]].to_numpy(float)
    lo, hi = float(np.nanmin([0, *ends.ravel()])), float(np.nanmax([margin, *ends.ravel()]))
    ax.set_xlim(lo - 0.12 * (hi - lo), hi + 0.12 * (hi - lo))
    names = [f"{_short(a, WIDE)}\nless {_short(b, WIDE)}" for a, b in frame[["a", "b"]].to_numpy()]
    _rows(ax, names)
    ax.set_xlabel("difference in tau, paired by prompt [tokens per round]")
    left_out = len(result.frame) - len(frame)
    more = f" ({left_out} more in the table)" if left_out else ""
    set_title(ax, f"First less second: is it better?{more}")


class _Row:
    """Value and interval under the names that `draw_interval` reads."""

    def __init__(self, numbers: dict[str, float | None]) -> None:
        self.value, self.lo, self.hi = (numbers[key] for key in ("value", "lo", "hi"))


def _rows(ax: Axes, names: Iterable[str]) -> None:
    """Names beside the rows of an axis, the first on top."""
    names = [printable_lines(name) for name in names]
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.set_ylim(len(names) - 0.4, -0.75)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")


def _heights(result: Result) -> tuple[float, float]:
    """Of both panels of differences in inches."""
    above, below = len(result.params["drafters"]), _n_pairs(result)
    return 1.0 + 0.46 * above, 1.0 + 0.46 * below


def _short(name: str, width: int) -> str:
    return elided(printable(name), width)


def printable_lines(text: str) -> str:
    """The text with its line breaks, and a dot for every other character that cannot be drawn."""
    return "\n".join(map(printable, text.split("\n")))


def _n_pairs(result: Result) -> int:
    return min(len(result.frame), MOST_PAIRS)


# --- slots ----------------------------------------------------------------------------------------


def draw_survival(result: Result, ax: Axes) -> None:
    """Difference of survival, slot by slot, one line for each drafter it is compared with."""
    _differences(result, ax, "survival")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def draw_conditional(result: Result, ax: Axes) -> None:
    """Difference of conditional rates."""
    _differences(result, ax, "conditional")
    set_title(ax, "Given that the slot was reached: is it right more often?")
    ax.set_xlabel("position in the block k")


def _differences(result: Result, ax: Axes, rate: str) -> None:
    frame, seen = result.frame, looks(result)
    frame = frame[frame[["n_before_a", "n_before_b"]].min(axis=1) >= FEW_ROUNDS]
    last = int(frame["k"].max()) if len(frame) else 1
    ax.axhline(0, color=INK, linewidth=0.9)
    ax.set_xlim(0.6, last + 0.4)
    ends, heights = [], [0.0]
    for name, rows in frame.groupby("b", sort=False):
        look = seen[str(name)]
        value, lo, hi = (100 * rows[f"{rate}_{end}"].to_numpy(float) for end in _ENDS)
        ax.plot(
            rows["k"], value, color=look.colour, marker=look.marker, linestyle=look.dash, zorder=3
        )
        ax.fill_between(rows["k"], lo, hi, color=look.colour, alpha=0.13, linewidth=0)
        heights += [one for one in (*lo, *hi, *value) if one == one]
        text = f"less {_short(str(name), 12)}"
        ends.append((last + 0.4, float(value[-1]), text, look.colour))
    room = 0.08 * (max(heights) - min(heights)) + 1
    ax.set_ylim(min(heights) - room, max(heights) + room)
    ax.set_xticks([k for k in range(1, last + 1) if last <= 8 or k % 2])
    ax.set_ylabel(f"difference in\n{rate} [points]")
    label_ends(ax, ends)


_ENDS = ("delta", "lo", "hi")
FEW_ROUNDS = 10
"""Rounds that reach a slot below which its difference is left to the table."""


# --- prompts --------------------------------------------------------------------------------------


def draw_prompts(result: Result, ax: Axes) -> None:
    """The prompts with the greatest gains and losses; one marker for each comparison."""
    order, seen = _drawn_prompts(result), looks(result)
    rows = {name: y for y, name in enumerate(order)}
    ax.axvline(0, color=INK, linewidth=0.9)
    for index, (name, part) in enumerate(result.frame.groupby("b", sort=False)):
        look = seen[str(name)]
        part = part[part["id"].isin(rows)]
        y = part["id"].map(rows).to_numpy(float)
        if not index:
            ax.hlines(y, 0, part["delta"], color=FAINT, linewidth=1.6, zorder=1)
        ax.plot(
            part["delta"],
            y,
            look.marker,
            color=look.colour,
            markersize=6,
            zorder=3,
            label=f"less {_short(str(name), 28)}",
        )
    gap = len(order) // 2 - 0.5
    if len(order) < result.frame["id"].nunique():
        draw_mark(ax, gap, "", axis="y")
    ax.set_yticks(range(len(order)), [short(one, 30) for one in order], fontsize=8)
    ax.set_ylim(len(order) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    ax.margins(x=0.08)
    ax.locator_params(axis="x", nbins=7)
    columns = 1 if max(map(len, seen)) > WIDE else 2
    ax.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.5 / _prompts_height(result)), ncols=columns
    )
    ax.set_xlabel("difference in tau [tokens per round]")
    set_title(ax, result.params["finding"])


def _drawn_prompts(result: Result) -> list[str]:
    """Prompts from the greatest gain to the greatest loss, those in between left out."""
    first = result.frame[result.frame["b"] == result.frame["b"].iloc[0]]
    ids = [str(one) for one in first["id"]]
    half = MOST_PROMPTS // 2
    return ids if len(ids) <= MOST_PROMPTS else [*ids[:half], *ids[-half:]]


def _prompts_height(result: Result) -> float:
    return 1.5 + 0.19 * len(_drawn_prompts(result))


# --- trend ----------------------------------------------------------------------------------------


def draw_trend(result: Result, ax: Axes) -> None:
    """Tau over training steps: a line for each training, and the reference's level."""
    frame = result.frame
    points = frame[frame["kind"] == "checkpoint"].astype({"step": float})
    lines = sorted(
        points.groupby("line", sort=False), key=lambda one: one[0] != result.params["own"]
    )
    ends = []
    for look, (line, rows) in zip(OTHERS, lines, strict=False):
        ax.plot(
            rows["step"], rows["value"], color=look.colour, marker=look.marker,
            linestyle=look.dash, zorder=3,
        )  # fmt: skip
        ax.fill_between(
            rows["step"], rows["lo"], rows["hi"], color=look.colour, alpha=0.13, linewidth=0
        )
        end = rows.iloc[-1]
        name = "checkpoints" if len(lines) == 1 else str(line).rpartition("/")[2]
        ends.append((float(end["step"]), float(end["value"]), _short(name, 14), look.colour))
    for one in frame[frame["kind"] == "reference"].to_dict("records"):
        ax.axhline(one["value"], color=REFERENCE.colour, linewidth=1.2, linestyle=REFERENCE.dash)
        if one["lo"] == one["lo"]:
            ax.axhspan(one["lo"], one["hi"], color=REFERENCE.colour, alpha=0.1, linewidth=0)
        ends.append((0.0, float(one["value"]), _short(one["name"], 14), REFERENCE.colour))
    _steps_axis(ax, result)
    right = ax.get_xlim()[1]
    values = frame[frame["kind"] != "log"][["value", "lo", "hi"]].to_numpy(float)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    ax.set_ylim(low - 0.1 * (high - low) - 0.02, high + 0.1 * (high - low) + 0.02)
    label_ends(ax, [(right, *end[1:]) for end in ends])
    ax.set_ylabel("tau while decoding\n[tokens per round]")
    set_title(ax, f"{result.params['finding']} ({n_prompts(result)})")


def draw_log(result: Result, ax: Axes) -> None:
    """What training logged over the same steps."""
    logged = result.frame[result.frame["kind"] == "log"].astype({"step": float})
    unit, ends = result.params["log_unit"], []
    for look, (name, rows) in zip(LOGS, logged.groupby("line", sort=False), strict=False):
        ax.plot(rows["step"], rows["value"], color=look.colour, linestyle=look.dash, linewidth=1.6)
        ends.append((0.0, float(rows["value"].iloc[-1]), short(str(name), 18), look.colour))
    _steps_axis(ax, result)
    right = ax.get_xlim()[1]
    if unit == "share":
        ax.set_ylim(0, 1)
    else:
        ax.set_ylim(bottom=0)
    label_ends(ax, [(right, *end[1:]) for end in ends])
    ax.set_ylabel(f"logged [{unit}]")
    set_title(ax, "What training logged: the same rise?")


LOGS = (Look("#4d5358", "", "-"), Look("#8a3ffc", "", (0, (4, 1.6))))


def _steps_axis(ax: Axes, result: Result) -> None:
    """The same steps on both panels."""
    steps = result.frame["step"].dropna().to_numpy(float)
    room = 0.03 * (steps.max() - steps.min())
    ax.set_xlim(steps.min() - room, steps.max() + room)
    ax.set_xlabel("training step")
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x >= 1000 else f"{x:g}")


def _log_panel(result: Result) -> tuple[Draw, ...]:
    return (draw_log,) if (result.frame["kind"] == "log").any() else ()


PLOTS: dict[str, Any] = {
    "compare.pairs": Plot(
        panels=(draw_taus, draw_pairs),
        shows="Dots with intervals, drafters above and their differences below",
        caption=(
            "Dots with 95 % intervals over prompts (BCa). Above: each drafter by itself; the "
            "reference's interval runs through all rows. Below: differences, every resample takes "
            "the same prompts on both sides. Yes: the interval lies above 0, and a sign-flip test "
            "agrees after Holm over all pairs. No: it excludes a gain that matters (grey). "
            "Else: so many more prompts would probably decide."
        ),
        height=lambda result: sum(_heights(result)) / 2,
        ratios=_heights,
    ),
    "compare.slots": Plot(
        panels=(draw_survival, draw_conditional),
        shows="Lines with bands over positions",
        caption=(
            "Differences in percentage points, paired by prompt, over the rounds of decoding; "
            "bands are 95 % intervals for one slot at a time. Above 0 the drafter does better. "
            "Slots that fewer than 10 rounds of either reached are in the table only."
        ),
        height=lambda _: 2.7,
    ),
    "compare.prompts": Plot(
        panels=(draw_prompts,),
        shows="Dots on a line for each prompt",
        caption=(
            "Difference in tau on each prompt, from the greatest gain to the greatest loss; of "
            "many prompts the middle is left out (dotted line)."
        ),
        height=_prompts_height,
    ),
    "compare.trend": Plot(
        panels=(draw_trend,),
        more=_log_panel,
        shows="Lines over training steps",
        caption=(
            "Above: tau of each checkpoint with its 95 % interval over prompts, and the "
            "reference's level with its own. Below, where a log was given: what training logged. "
            "It counts something else on other texts, so compare shapes and not heights."
        ),
        height=lambda _: 2.8,
    ),
}
"""Plots by the id of their diagnostic."""
