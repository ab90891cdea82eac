"""How a loss weights its slots: a curve over a block, or weights that the draft itself makes.

Symbols: A anchors, D proposed tokens, k slot from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash_diag.training_audit.mixture import minimise

Floats = NDArray[np.float64]
FLAT = 0.01
"""Relative difference of the first and the last weight below which a curve is called flat."""
FITS = 0.01
"""Relative deviation up to which a curve is that of a formula."""
STEADY = 2e-3
"""Spread of one slot's weight over anchors, below which it does not depend on the anchor."""
FITTED = 1e-4
"""Deviation up to which a curve without a formula is that of D-PACE."""
DECAYED = 0.75
"""Share of the first weight that the last may have in a curve that still counts as decaying."""


@dataclass(frozen=True)
class Weighting:
    """What was found of the weights."""

    kind: str
    """``exponential``, ``flat``, ``other``, ``D-PACE`` (and its two halves), ``over overlap``,
    ``data-dependent``."""
    curve: tuple[float | None, ...]
    """[D] weight of each slot, the first being 1; means over anchors where it depends on them.
    None where no slot has a gradient."""
    words: str
    gamma: float | None = None
    alpha: float | None = None
    """Smoothing of D-PACE."""
    spread: float = 0.0
    """Relative spread of one slot's weight over anchors."""
    by_anchor: bool = False
    """Whether whole blocks are weighted differently."""

    @property
    def is_fixed(self) -> bool:
        """Whether the weights are a function of the slot alone."""
        return self.kind in ("exponential", "flat", "other")

    @property
    def decays(self) -> bool:
        """Whether early slots count more, by a curve or because of what is accepted."""
        known = [w for w in self.curve if w is not None]
        if self.kind.startswith("D-PACE"):
            return True
        return len(known) < 2 or known[-1] <= DECAYED * known[0]

    def fitted(self) -> list[float | None]:
        """[D] weights of the formula, where there is one."""
        k = range(len(self.curve))
        if self.kind == "exponential" and self.gamma:
            return [float(np.exp(-i / self.gamma)) for i in k]
        return [1.0 if self.kind == "flat" else None for _ in k]


def weighting(
    scale: Floats,
    certainty: Floats,
    right: Floats,
    shared: Floats | None = None,
    *,
    rounding: float = 0.0,
) -> Weighting:
    """Say what weights are.

    Parameters
    ----------
    scale
        [A, D] recovered weight of each slot; 0 where it has no gradient.
    certainty
        [A, D] squared size of the direction that the weight multiplies: how well it is known.
    right
        [A, D] probability that the draft gives to the label.
    shared
        [A, D] overlap of draft and target, where there are target logits.
    rounding
        Relative precision of the step's numbers.
    """
    live = scale > 1e-7 * scale.max(initial=0.0)
    by_anchor = np.ones(len(scale))
    curve, spread = _curve(scale, certainty, live)
    steady = max(STEADY, 4 * rounding)
    if spread > steady:
        factors, factored, rest = _factored(scale, certainty, live)
        if rest <= steady:
            by_anchor, curve, spread = factors, factored, rest
    if spread > steady:
        return _dependent(scale, certainty, live, right, shared, (curve, spread, steady))
    first = curve[np.isfinite(curve)][0]
    known = tuple(float(w / first) if np.isfinite(w) else None for w in curve)
    kind, gamma, words = _formula(np.array([np.nan if w is None else w for w in known]))
    if kind == "other":
        # A draft that knows nothing yet is as sure of every label: its D-PACE weights look fixed.
        found = _dpace(scale, certainty * live, live, right, max(spread, FITTED))
        if found is not None:
            return replace(found, curve=known, spread=spread)
    different = bool(np.ptp(by_anchor) > steady * by_anchor.mean())
    if different:
        words += ", and blocks count differently"
    return Weighting(kind, known, words, gamma, spread=spread, by_anchor=different)


def _curve(scale: Floats, certainty: Floats, live: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Weight of each slot over all anchors, and the relative spread around it."""
    sure = certainty * live
    total = sure.sum(0)
    curve = np.divide(
        (sure * scale).sum(0), total, out=np.full(len(total), np.nan), where=total > 0
    )
    off = sure * (scale - np.nan_to_num(curve)) ** 2
    size = (sure * scale**2).sum()
    return curve, float(np.sqrt(off.sum() / size)) if size > 0 else 0.0


def _factored(
    scale: Floats, certainty: Floats, live: NDArray[np.bool_]
) -> tuple[Floats, Floats, float]:
    """Weights as a factor of the anchor times one of the slot."""
    factors = np.ones(len(scale))
    for _ in range(50):
        curve, _ = _curve(scale / factors[:, None], certainty * factors[:, None] ** 2, live)
        sure, c = certainty * live, np.nan_to_num(curve)
        total = (sure * c**2).sum(1)
        factors = np.divide((sure * scale * c).sum(1), total, out=factors.copy(), where=total > 0)
        factors = factors / factors[factors > 0].mean()
    _, spread = _curve(scale / factors[:, None], certainty * factors[:, None] ** 2, live)
    return factors, curve, spread


def _formula(curve: Floats) -> tuple[str, float | None, str]:
    """Kind, gamma and words of a curve whose first weight is 1."""
    k = np.arange(len(curve))[np.isfinite(curve)]
    w = curve[np.isfinite(curve)]
    if len(w) < 2:
        return "other", None, "one slot only"
    if np.ptp(w) <= FLAT * w.max():
        return "flat", None, "the same for all slots"
    slope, offset = np.polyfit(k, np.log(w), 1)
    off = float(np.abs(np.exp(slope * k + offset) / w - 1).max())
    if off <= FITS and slope < 0:
        gamma = float(-1 / slope)
        return "exponential", gamma, f"exp(-(k-1)/{gamma:.3g})"
    return "other", None, f"{w[0]:.2g} for the first slot to {w[-1]:.2g} for the last"


# --- weights that depend on the draft ------------------------------------------------------------


def _dependent(
    scale: Floats,
    certainty: Floats,
    live: NDArray[np.bool_],
    right: Floats,
    shared: Floats | None,
    known: tuple[Floats, float, float],
) -> Weighting:
    curve, spread, steady = known
    shown = tuple(float(w / np.nanmax(curve)) if np.isfinite(w) else None for w in curve)
    found = _dpace(scale, certainty * live, live, right, steady)
    if found is not None:
        return replace(found, curve=shown, spread=spread)
    if shared is not None:
        times, rest = _curve(scale * shared, certainty / shared.clip(1e-9) ** 2, live)
        if rest <= steady:
            first = times[np.isfinite(times)][0]
            _, gamma, shape = _formula(times / first)
            words = (
                f"{shape}, over the overlap of draft and target: the loss is minus its logarithm"
            )
            return Weighting("over overlap", shown, words, gamma, spread=spread)
    words = "they depend on the data, by no known formula"
    return Weighting("data-dependent", shown, words, spread=spread)


def _dpace(
    scale: Floats, sure: Floats, live: NDArray[np.bool_], right: Floats, limit: float
) -> Weighting | None:
    """The kind of D-PACE, and its smoothing, that explains weights up to ``limit``."""
    size = (sure * scale**2).sum()

    def left(alpha: float, name: str) -> float:
        model = dpace(right, live, alpha, name)
        s = (sure * scale * model).sum() / max((sure * model**2).sum(), 1e-300)
        return float(np.sqrt((sure * (scale - s * model) ** 2).sum() / size))

    for name, words in DPACE.items():
        grid = np.linspace(0, 1, 21)
        at = int(np.argmin([left(a, name) for a in grid]))
        low, high = float(grid[max(0, at - 1)]), float(grid[min(20, at + 1)])
        alpha = minimise(partial(left, name=name), low, high)
        if left(alpha, name) <= limit:
            return Weighting(name, (), f"{words}, smoothing {alpha:.2g}", alpha=alpha)
    return None


DPACE: dict[str, str] = {
    "D-PACE": "D-PACE: what the draft expects to be accepted from the slot on",
    "D-PACE, confidence only": "the first half of D-PACE: the draft's confidence up to the slot",
    "D-PACE, continuation only": "the second half of D-PACE: what is to come if the slot is right",
}
"""Weights from the draft's own confidence (arXiv 2605.18810), and words for them."""


def dpace(right: Floats, live: NDArray[Any], alpha: float, kind: str = "D-PACE") -> Floats:
    """[A, D] weights of D-PACE for probabilities ``right`` of the labels.

    With s = (1-alpha) q + alpha, C_k the product of s up to slot k: the sum of C from k on; the
    two halves are C_k itself and that sum over C_k. Slots that are not trained on are left out.
    """
    s = np.where(live, (1 - alpha) * right + alpha, 1.0)
    confidence = s.cumprod(1)
    if kind == "D-PACE, confidence only":
        return confidence
    onward = (confidence * live)[:, ::-1].cumsum(1)[:, ::-1]
    return onward if kind == "D-PACE" else onward / confidence.clip(1e-300)


def as_json(value: Weighting) -> dict[str, Any]:
    """For the plot: the curve found and the curve fitted."""
    return {
        "kind": value.kind,
        "words": value.words,
        "curve": list(value.curve),
        "fitted": value.fitted(),
    }
