"""What the slots of a block see: one mark for each slot and key, in training and in serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_diag.plotting.pieces import BAD, SOFT, WIDTH, Plot, printable, set_title, short
from dflash_diag.results import Result

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

STATES, SLOTS = "#33457f", "#8ea2e8"
GAP = 0.8
"""Keys' widths between stretches of keys, and between blocks."""
HEAD = 4.4
"""Lines above the first slot: the legend and what the keys are."""
INVISIBLE = {" ": "␣", "\n": "↵", "\t": "→", "\r": "↵"}


class Mark(NamedTuple):
    """How a slot and key are drawn; shape and filling alone tell the marks apart."""

    training: bool
    serving: bool
    marker: str
    scale: float
    """Size as a share of the cell."""
    words: str


MARKS = (
    Mark(True, True, "s", 0.82, "visible"),
    Mark(True, False, "X", 0.86, "visible, but not on a server"),
    Mark(False, True, "D", 0.6, "visible on a server only"),
    Mark(False, False, ".", 0.4, "not visible"),
)


def draw_visibility(frame: pd.DataFrame, ax: Axes, labels: Mapping[int, str] | None = None) -> None:
    """Draw a frame of `dflash_diag.masks.visibility_frame`: slots down, keys across.

    Parameters
    ----------
    labels
        Text of the token at a position, for keys that hold one: context rows and anchors.
    """
    across, down = _columns(frame), _lines(frame)
    x = [across[key] for key in _keys(frame)]
    y = [down[line] for line in _slots(frame)]
    ax.set_xlim(min(x) - 0.9, max(x) + 0.9)
    ax.set_ylim(max(y) + 0.8, -HEAD)
    box = ax.get_window_extent()
    points = 72 / ax.figure.dpi
    cell = points * min(box.width / (max(x) - min(x) + 2), box.height / (max(y) + HEAD + 0.8))
    place = frame.assign(x=x, y=y)
    for mark in MARKS:
        cells = place[(place["training"] == mark.training) & (place["serving"] == mark.serving)]
        for colour, some in _by_colour(mark, cells):
            ax.plot(
                some["x"],
                some["y"],
                mark.marker,
                color=colour,
                markersize=mark.scale * cell,
                markerfacecolor="white" if mark.marker == "D" else colour,
                markeredgewidth=1.0 if mark.marker == "D" else 0.0,
                linestyle="",
                zorder=3,
            )
    _name_keys(ax, place, labels or {}, min(8.5, 1.05 * cell))
    _name_slots(ax, place)
    _legend(ax, place)


def _keys(frame: pd.DataFrame) -> list[tuple[int, int]]:
    """(block, position) of each row's key; block -1 stands for the context."""
    blocks = frame["key_anchor"].fillna(-1).astype(int)
    return list(zip(blocks, frame["key"].astype(int), strict=True))


def _slots(frame: pd.DataFrame) -> list[tuple[str, int, int]]:
    return list(
        zip(frame["layers"], frame["anchor"].astype(int), frame["slot"].astype(int), strict=True)
    )


def _columns(frame: pd.DataFrame) -> dict[tuple[int, int], float]:
    """Where each key is drawn: the context, the block if it is one, the others; gaps between."""
    found: dict[tuple[int, int], float] = {}
    at, before = 0.0, None
    alone = frame["anchor"].iloc[0] if len(set(frame["anchor"])) == 1 else None
    for block, key in sorted(set(_keys(frame)), key=lambda k: (k[0] not in (-1, alone), k)):
        if before is not None:
            at += 1 if before == (block, key - 1) else 1 + GAP
        found[block, key], before = at, (block, key)
    return found


def _lines(frame: pd.DataFrame) -> dict[tuple[str, int, int], float]:
    """Where each slot is drawn, a gap between blocks and between layers."""
    found: dict[tuple[str, int, int], float] = {}
    at = 0.0
    for line in dict.fromkeys(_slots(frame)):
        at += GAP if found and line[2] == 0 else 0.0
        found[line] = at
        at += 1
    return found


def _by_colour(mark: Mark, cells: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    if mark.training and mark.serving:
        of_context = cells["kind"] == "context"
        return [(STATES, cells[of_context]), (SLOTS, cells[~of_context])]
    return [(SOFT if mark.marker == "." else BAD, cells)]


def _name_keys(ax: Axes, place: pd.DataFrame, labels: Mapping[int, str], size: float) -> None:
    """Tokens below the columns, and above them what they are."""
    keys, drawn = place.drop_duplicates("x").sort_values("x"), set(place["anchor"])
    # A slot other than the first holds a mask token.
    named = keys[(keys["kind"] == "context") | (keys["key"] == keys["key_anchor"])]
    names = [_token(labels.get(at, str(at))) for at in named["key"].astype(int)]
    ax.set_xticks(named["x"].to_list(), names, rotation=90, fontsize=size)
    for tick, at in zip(ax.get_xticklabels(), named["key"], strict=True):
        tick.set_fontweight("bold" if at in drawn else "normal")
    ax.tick_params(axis="x", length=0)
    ax.grid(visible=False)
    ax.spines[["left", "bottom"]].set_visible(False)
    for block, columns in keys.groupby(keys["key_anchor"].fillna(-1).astype(int)):
        if block == -1:
            text = "target states"
        elif len(drawn) == 1 and block in drawn:
            text = "own block"
        else:
            text = f"block at {block}"
        ax.annotate(
            text,
            (columns["x"].mean(), -1.1),
            ha="center",
            va="bottom",
            fontsize=9,
            color=SOFT,
            annotation_clip=False,
        )


def _token(text: str) -> str:
    """A token on one short line, blanks made visible."""
    return short(printable("".join(INVISIBLE.get(c, c) for c in text)), 8)


def _name_slots(ax: Axes, place: pd.DataFrame) -> None:
    lines = place.drop_duplicates("y").sort_values("y")
    last = int(lines["slot"].max())
    several = len(lines) > last + 1
    ticks, names = [], []
    for row in lines.itertuples():
        if row.slot in (0, last) or row.slot == last // 2:
            head = f"{_of(row, place)}\n" if several and row.slot == last // 2 else ""
            ticks.append(row.y)
            names.append(f"{head}{'anchor' if row.slot == 0 else f'slot {row.slot}'}")
    ax.set_yticks(ticks, names)


def _of(row: Any, place: pd.DataFrame) -> str:
    """Which block and layers a slot belongs to, as far as there is more than one."""
    words = []
    if len(set(place["anchor"])) > 1:
        words.append(f"block at {row.anchor}")
    if len(set(place["layers"])) > 1:
        words.append(f"layer{'s' if ',' in row.layers else ''} {short(row.layers, 12)}")
    return ", ".join(words)


def _legend(ax: Axes, place: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    there = set(zip(place["training"], place["serving"], strict=True))
    handles = [
        Line2D(
            [],
            [],
            marker=mark.marker,
            linestyle="",
            color=STATES if mark.marker == "s" else SOFT if mark.marker == "." else BAD,
            markerfacecolor="white" if mark.marker == "D" else None,
            markersize=7,
            label=mark.words,
        )
        for mark in MARKS
        if (mark.training, mark.serving) in there
    ]
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=len(handles),
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        handletextpad=0.2,
        columnspacing=1.4,
    )


def _visibility(result: Result, ax: Axes) -> None:
    labels = {int(at): text for at, text in result.params["labels"].items()}
    draw_visibility(result.frame, ax, labels)
    where = f"block at {result.params['anchor']} of {short(result.params['prompt'])}"
    set_title(ax, f"{result.params['finding']} ({where})")


def _line_height(frame: pd.DataFrame) -> float:
    """Inches; about a column's width, so that cells are square."""
    return min(0.19, max(0.11, 0.87 * WIDTH / (max(_columns(frame).values()) + 2)))


PLOTS: dict[str, Plot] = {
    "mask.visibility": Plot(
        panels=(_visibility,),
        shows="Which target states and which slots each slot of one block sees",
        caption=(
            "Rows: slots of the block. Columns: target states of the tokens around its anchor and "
            "around the end of a window, then slots of the block itself and of others in the same "
            "pass, each above its anchor's token; the block's own anchor is bold. Squares: "
            "visible. Crosses: visible under this reading, but not on a server. Diamonds: visible "
            "on a server only. Dots: not visible."
        ),
        height=lambda r: 1.1 + _line_height(r.frame) * (max(_lines(r.frame).values()) + HEAD + 1),
    )
}
