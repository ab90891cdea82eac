"""What captured states really are: the layer they claim, or something that resembles it.

Rows one token off, another layer's states, what a layer adds instead of the sum, a rotated basis:
each leaves shapes and norms as they should be. So the states are compared with everything that the
target computes nearby, and named after what they equal.

Symbols: R captured rows, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dflash_diag.divergence import FACTOR
from dflash_diag.modules import OUTPUT, Place, Trace

SHIFTS = (1, -1, 2, -2, 3, -3)
"""Rows by which captured states may be off."""


@dataclass(frozen=True)
class Identity:
    """What the states of one layer are."""

    layer: int
    kind: str
    """``right``, ``shifted``, ``other_layer``, ``other_module``, ``normed``, ``scaled``,
    ``rotated``, ``some_rows`` or ``unknown``."""
    rel_rms: float
    """Of the states against the layer that they claim to be."""
    explained: float
    """Of the states against what they are."""
    text: str

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "kind": self.kind,
            "rel_rms": self.rel_rms,
            "explained": self.explained,
            "what": self.text,
        }


def identify(
    layer: int,
    states: Tensor,
    trace: Trace,
    *,
    floor: Callable[[Place], float],
    rows: Tensor | None = None,
    final_norm: Callable[[Tensor], Tensor] | None = None,
) -> Identity:
    """Name the states of one layer.

    Parameters
    ----------
    states
        [R, H] that claim to be the output of decoder layer ``layer`` (-1: the embedding).
    trace
        What the target computes on the same T tokens: every layer's output, and the modules of
        ``layer``.
    floor
        Relative RMS that rounding alone explains, by place.
    rows
        Positions [R] of the states; all by default.
    final_norm
        The target's, to recognise states that it was applied to.
    """
    rows = torch.arange(len(states)) if rows is None else rows
    x = states.double()
    truth = trace[Place(layer, OUTPUT)].double().to(x.device)
    claimed = _error(x, truth[rows])
    allowed = FACTOR * floor(Place(layer, OUTPUT))
    if claimed <= allowed:
        return Identity(layer, "right", claimed, claimed, f"layer {layer}, as it should be")
    for kind, text, candidate, limit in _candidates(layer, x, trace, rows, final_norm, floor):
        error = _error(x, candidate)
        if error <= limit:
            return Identity(layer, kind, claimed, error, text)
    scale = float((x * truth[rows]).nansum() / truth[rows].square().sum())
    error = _error(x, scale * truth[rows])
    if error <= allowed:
        return Identity(layer, "scaled", claimed, error, f"layer {layer} times {scale:.3g}")
    error = rotation_error(x, truth[rows])
    if error <= 2 * allowed:
        # Products of rows carry the error of both factors.
        text = f"layer {layer} in another basis: an orthogonal rotation"
        return Identity(layer, "rotated", claimed, error, text)
    return _by_row(layer, x, truth[rows], rows, claimed, allowed)


def _candidates(
    layer: int,
    x: Tensor,
    trace: Trace,
    rows: Tensor,
    final_norm: Callable[[Tensor], Tensor] | None,
    floor: Callable[[Place], float],
) -> Iterator[tuple[str, str, Tensor, float]]:
    """Kind, name, tensor [R, H] and tolerance of all that states may be by mistake."""
    width = x.shape[-1]
    own = trace[Place(layer, OUTPUT)]
    limit = FACTOR * floor(Place(layer, OUTPUT))
    for shift in SHIFTS:
        text = f"layer {layer}, but row t holds the state of token t{shift:+d}"
        yield "shifted", text, _shifted(own, rows, shift), limit
    for place, value in trace.items():
        if value.shape[-1] != width or place == Place(layer, OUTPUT):
            continue
        tolerance = FACTOR * floor(place)
        if place.module == OUTPUT:
            text = f"the states of layer {place.layer}"
            yield "other_layer", text, value[rows.to(value.device)], tolerance
        elif place.layer == layer:
            text = f"the output of layer {layer}'s {place.module}, not the residual sum"
            yield "other_module", text, value[rows.to(value.device)], tolerance
    if final_norm is not None:
        text = f"layer {layer} after the final norm"
        yield "normed", text, final_norm(own[rows.to(own.device)]), limit


def _shifted(value: Tensor, rows: Tensor, shift: int) -> Tensor:
    """States of ``rows + shift``; NaN where there is no such row."""
    wanted = rows.to(value.device) + shift
    inside = (wanted >= 0) & (wanted < len(value))
    found = value[wanted.clamp(0, len(value) - 1)].clone()
    found[~inside] = float("nan")
    return found


def _error(x: Tensor, y: Tensor) -> float:
    """Relative RMS over the rows that are finite in both; infinite where none is."""
    y = y.double().to(x.device)
    good = torch.isfinite(x).all(-1) & torch.isfinite(y).all(-1)
    if not bool(good.any()):
        return float("inf")
    return float((x[good] - y[good]).norm() / y[good].norm().clamp(min=1e-30))


def rotation_error(x: Tensor, y: Tensor) -> float:
    """How far x [R, H] is from some orthogonal transformation of y: 0 where all angles agree.

    ``x = y Q`` for an orthogonal Q exactly when the products of all pairs of rows are the same, so
    no Q needs to be found: ``|x x' - y y'| / |y y'|``. With fewer rows than three it says nothing.
    """
    good = torch.isfinite(x).all(-1) & torch.isfinite(y).all(-1)
    if int(good.sum()) < 3:
        return float("inf")
    ours, theirs = x[good] @ x[good].T, y[good] @ y[good].T
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def _by_row(
    layer: int, x: Tensor, y: Tensor, rows: Tensor, claimed: float, allowed: float
) -> Identity:
    """States of which only some rows are wrong, or nothing that has a name."""
    per_row = ((x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-30)).nan_to_num(float("inf"))
    # Single rows spread more than their mean.
    wrong = per_row > 2 * allowed
    n_wrong = int(wrong.sum())
    if not 0 < n_wrong < len(rows):
        return Identity(layer, "unknown", claimed, claimed, f"nothing near layer {layer}")
    bad = rows[wrong.cpu()].tolist()
    right = float((x[~wrong] - y[~wrong]).norm() / y[~wrong].norm().clamp(min=1e-30))
    text = f"layer {layer}, but {n_wrong} of {len(rows)} rows differ: {_ranges(bad)}"
    return Identity(layer, "some_rows", claimed, right, text)


def _ranges(numbers: Sequence[int], most: int = 4) -> str:
    """Positions as ranges: ``0-12, 40``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans[:most]]
    return ", ".join(shown) + (", …" if len(spans) > most else "")


def layer_trace(kept: Mapping[int, Tensor]) -> Trace:
    """Outputs of layers [T, H] by id, as a trace."""
    return {Place(layer, OUTPUT): value for layer, value in kept.items()}
