"""What captured states really are: the layer they claim, or something that resembles it.

Rows one token off, another layer's states, what a layer adds instead of the sum, a hook one module
late, a norm, a scale, a rotated basis: each leaves shapes, and mostly norms, as they should be. So
the states are compared with everything that the target computes nearby, and named after what they
equal within rounding. What equals nothing is named after what explains most of it, with what is
left; and what is merely near, with no fault that is known here, is called that.

Symbols: R captured rows, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_diag.divergence import FACTOR
from dflash_diag.modules import OUTPUT, Place, Trace

SHIFTS = (1, -1, 2, -2, 3, -3)
"""Rows by which captured states may be off."""
NEAR = 0.2
"""Relative RMS up to which states are near something; beyond it they are something else."""
HALF, THIRD = 1 / 2, 1 / 3
"""What a name may leave of the difference: where it leaves no more than rounding, and where it fits
only roughly."""
MOST_ROWS = 512
"""Rows on which a rotation is looked for; its cost grows with their cube."""


@dataclass(frozen=True)
class Identity:
    """What the states of one layer are."""

    layer: int
    kind: str
    """``right``, ``shifted``, ``other_layer``, ``other_module``, ``normed``, ``centred``,
    ``scaled``, ``offset``, ``rotated``, ``transposed``, ``some_rows``, ``near`` (no known fault) or
    ``unknown``."""
    rel_rms: float
    """Of the states against the layer that they claim to be."""
    explained: float
    """Of the states against what they are."""
    text: str
    rough: bool = False
    """Whether more than rounding is left."""

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "kind": self.kind,
            "rel_rms": self.rel_rms,
            "explained": self.explained,
            "what": self.text,
            "rough": self.rough,
        }


class _Candidate(NamedTuple):
    """Something that the states may be by mistake."""

    kind: str
    text: str
    value: Tensor
    """[R, H]"""
    limit: float
    """Relative RMS that rounding explains."""


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
        ``layer`` and of the one after it.
    floor
        Relative RMS that rounding alone explains, by place.
    rows
        Positions [R] of the states; all by default.
    final_norm
        The target's, to recognise states that it was applied to.
    """
    rows = torch.arange(len(states)) if rows is None else rows
    x = states.double()
    truth = trace[Place(layer, OUTPUT)].double().to(x.device)[rows.to(x.device)]
    claimed = _error(x, truth)
    allowed = FACTOR * floor(Place(layer, OUTPUT))
    if claimed <= allowed:
        return Identity(layer, "right", claimed, claimed, f"layer {layer}, as it should be")
    rough: list[tuple[float, _Candidate]] = []
    for one in (
        *_candidates(layer, trace, rows, x.shape[-1], final_norm, floor),
        *_transformed(layer, x, truth, allowed),
    ):
        error = _error(x, one.value)
        if error <= min(one.limit, HALF * claimed):
            return Identity(layer, one.kind, claimed, error, one.text)
        rough.append((error, one))
    error = rotation_error(x, truth) if claimed > NEAR else claimed
    if error <= allowed:
        text = f"layer {layer} in another basis: an orthogonal rotation"
        return Identity(layer, "rotated", claimed, error, text)
    found = _by_row(layer, x, truth, rows, claimed, allowed)
    if found is not None:
        return found
    error, best = min(rough, key=lambda r: r[0])
    if error <= NEAR and error <= THIRD * claimed:
        return Identity(layer, best.kind, claimed, error, best.text, rough=True)
    if claimed <= NEAR:
        return Identity(layer, "near", claimed, claimed, f"layer {layer}, no known fault")
    return Identity(layer, "unknown", claimed, claimed, f"nothing near layer {layer}")


def _candidates(
    layer: int,
    trace: Trace,
    rows: Tensor,
    width: int,
    final_norm: Callable[[Tensor], Tensor] | None,
    floor: Callable[[Place], float],
) -> Iterator[_Candidate]:
    """What the target computes nearby."""
    own = trace[Place(layer, OUTPUT)]
    limit = FACTOR * floor(Place(layer, OUTPUT))
    for shift in SHIFTS:
        text = f"layer {layer}, but row t holds the state of token t{shift:+d}"
        yield _Candidate("shifted", text, _shifted(own, rows, shift), limit)
    first = True
    for place, value in trace.items():
        if value.shape[-1] != width or place == Place(layer, OUTPUT):
            continue
        found, tolerance = value[rows.to(value.device)], FACTOR * floor(place)
        if place.module == OUTPUT:
            text = f"the states of layer {place.layer}"
            yield _Candidate("other_layer", text, found, tolerance)
        elif place.layer == layer:
            text = f"the output of layer {layer}'s {place.module}, not the residual sum"
            yield _Candidate("other_module", text, found, tolerance)
        elif place.layer == layer + 1:
            what = f"layer {place.layer}'s {place.module}"
            text = f"the output of {what}, not of layer {layer}"
            if first and "norm" in place.module:
                text = f"layer {layer} after the next layer's input norm ({what}), one module late"
            first = False
            yield _Candidate("other_module", text, found, tolerance)
    if final_norm is not None:
        once = final_norm(own[rows.to(own.device)])
        yield _Candidate("normed", f"layer {layer} after the final norm", once, limit)
        text = f"layer {layer} after the final norm, twice"
        yield _Candidate("normed", text, final_norm(once), limit)


def _transformed(layer: int, x: Tensor, truth: Tensor, limit: float) -> Iterator[_Candidate]:
    """What else code does to states: norms without the target's weights, scales, offsets."""
    centred = truth - truth.mean(-1, keepdim=True)
    text = f"layer {layer} less the mean of each row"
    yield _Candidate("centred", text, centred, limit)
    for what, value in (("an RMS norm", truth), ("a layer norm", centred)):
        unit = value / value.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-30)
        text = f"layer {layer} after {what} without its weight"
        yield _Candidate("normed", text, unit, limit)
    good = torch.isfinite(x).all(-1) & torch.isfinite(truth).all(-1)
    if not bool(good.any()):
        return
    ours, theirs = x[good], truth[good]
    scale = float((ours * theirs).sum() / theirs.square().sum().clamp(min=1e-30))
    yield _Candidate("scaled", f"layer {layer} times {scale:.3g}", scale * truth, limit)
    offset = float((ours - theirs).mean())
    yield _Candidate("offset", f"layer {layer} plus {offset:.3g}", truth + offset, limit)
    # One number more a channel, which few rows would fit by luck.
    if len(ours) >= 8:
        text = f"layer {layer} plus one vector, the same for every token"
        yield _Candidate("offset", text, truth + (ours - theirs).mean(0), limit)


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
    """Relative RMS of x [R, H] against y in the basis that fits best: |x - y Q| / |y|.

    The smallest over all orthogonal Q has a closed form, ``|x|² + |y|² - 2 |x'y|`` with the sum of
    the singular values of ``x'y``, so no Q needs to be found. With fewer rows than three it says
    nothing.
    """
    good = (torch.isfinite(x).all(-1) & torch.isfinite(y).all(-1)).nonzero()[:, 0]
    if len(good) < 3:
        return float("inf")
    good = good[:: -(-len(good) // MOST_ROWS)]
    a, b = x[good], y[good]
    if len(good) < a.shape[1]:
        # The triangular factors of x' and y' have the same singular values, and are small.
        product = torch.linalg.qr(a.T, mode="r").R @ torch.linalg.qr(b.T, mode="r").R.T
    else:
        product = a.T @ b
    squared = a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(product).sum()
    return float((squared.clamp(min=0) / b.square().sum().clamp(min=1e-30)).sqrt())


def _by_row(
    layer: int, x: Tensor, y: Tensor, rows: Tensor, claimed: float, allowed: float
) -> Identity | None:
    """States of which some rows are right and the others something else; None where not."""
    per_row = ((x - y).norm(dim=-1) / y.norm(dim=-1).clamp(min=1e-30)).nan_to_num(float("inf"))
    # Single rows spread more than their mean.
    wrong = per_row > 2 * allowed
    n_wrong = int(wrong.sum())
    if not 0 < n_wrong < len(rows):
        return None
    if float(per_row[wrong].median()) <= NEAR:
        return None  # rows that are only less near than others
    right = float((x[~wrong] - y[~wrong]).norm() / y[~wrong].norm().clamp(min=1e-30))
    bad = rows[wrong.cpu()].tolist()
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
