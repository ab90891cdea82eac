"""How an audit of a training step is drawn: what its logits depend on, how its slots count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dflash_diag.plotting.pieces import AGREES, BAD, FAINT, INK, LOOKS, SOFT, Plot, set_title
from dflash_diag.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORBIDDEN = {
    "anchor row": "the anchor's own state",
    "later rows": "later states",
    "earlier blocks": "earlier blocks",
    "later blocks": "later blocks",
    "later tokens": "later tokens",
}
"""What no draft logit may depend on, and what it is called on the axis."""
LEAST, MOST = 1e-6, 3.0
"""Ends of the axis of relative changes."""


def _influences(result: Result, ax: Axes) -> None:
    """One row for each thing that was changed; a red cross where it may have no influence."""
    seen = result.params["facts"].get("influence", {})
    set_title(ax, result.params["finding"])
    rows = _rows(result, seen)
    if not rows:
        _nothing(ax, "What the logits depend on was not asked")
        return
    for y, (_, moved, forbidden) in enumerate(rows):
        if moved <= seen["still"]:
            _beside(ax, LEAST, y, "none", SOFT)
            continue
        at = min(moved, MOST)
        colour = BAD if forbidden else AGREES
        ax.plot([LEAST, at], [y, y], color=colour, linewidth=1.4, zorder=2)
        ax.plot(at, y, marker="X" if forbidden else "o", color=colour, markersize=8, zorder=3)
        _beside(ax, at, y, f"{moved:.1%}" if moved < MOST else "all", BAD if forbidden else INK)
    ax.set_xscale("log")
    ax.set_xlim(LEAST, 30)
    ax.set_xticks([1e-6, 1e-4, 1e-2, 1], ["0.0001\u00a0%", "0.01\u00a0%", "1\u00a0%", "100\u00a0%"])
    ax.set_yticks(range(len(rows)), [words for words, _, _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.axhline(sum(key in seen for key in FORBIDDEN) - 0.5, color=FAINT, linewidth=1)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel("relative change of the draft logits")


def _rows(result: Result, seen: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """What was changed, how much it moves, and whether it may not."""
    rows = [(words, seen[key], True) for key, words in FORBIDDEN.items() if key in seen]
    layers = {int(layer): moved for layer, moved in seen.get("layers", {}).items()}
    wrong = any(one["id"] == "layers.last_layer_in_fc" for one in result.params["faults"])
    last = max(layers, default=None) if wrong else None
    return rows + [(f"states of layer {i}", moved, i == last) for i, moved in layers.items()]


def _beside(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.annotate(
        text,
        (x, y),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
    )


def _weights(result: Result, ax: Axes) -> None:
    """Weight of each slot in the loss, and the formula that fits."""
    found: dict[str, Any] = result.params["facts"].get("weights", {})
    if not found:
        _nothing(ax, "The loss was not recovered")
        set_title(ax, "Weights of the slots in the loss")
        return
    slots = range(1, len(found["curve"]) + 1)
    known = [(k, w) for k, w in zip(slots, found["curve"], strict=True) if w is not None]
    fitted = [(k, w) for k, w in zip(slots, found["fitted"], strict=True) if w is not None]
    if fitted:
        ax.plot(*zip(*fitted, strict=True), color=SOFT, linestyle=(0, (2, 2)), label="formula")
    look = LOOKS["drafter"]
    ax.plot(*zip(*known, strict=True), color=look.colour, marker=look.marker, linestyle="none",
            label="from the gradient")  # fmt: skip
    ax.set_ylim(0, 1.08 * max(w for _, w in known))
    ax.set_xlim(0.5, len(found["curve"]) + 0.5)
    ax.set_xticks(list(slots)[:: max(1, len(found["curve"]) // 16)])
    ax.set_xlabel("slot k")
    ax.set_ylabel("weight, slot 1 being 1")
    ax.legend(loc="lower left", frameon=False)
    set_title(ax, f"Weights of the slots in the loss: {found['words']}")


def _nothing(ax: Axes, why: str) -> None:
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, color=SOFT)
    ax.set_xlabel("nothing to show")
    ax.set_xticks([])
    ax.set_yticks([])


PLOTS: dict[str, Plot] = {
    "training.audit": Plot(
        panels=(_influences, _weights),
        shows="What the draft logits of the training step depend on, and the weights of its loss",
        caption=(
            "Above: one thing is changed at a time, and a block's draft logits are compared "
            "(a red cross: a server has no such thing, or should not need it; none: nothing "
            "moves). Below: the weight of each slot, recovered from the gradient of the loss by "
            "the logits."
        ),
        height=lambda r: max(
            2.6, 0.9 + 0.2 * (5 + len(r.params["facts"].get("influence", {}).get("layers", {})))
        ),
    ),
}
