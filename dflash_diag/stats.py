"""Intervals and tests over prompts: the prompt is the unit, never the block.

Blocks of one prompt depend on each other, so every resample draws whole prompts. Everything here is
a *ratio of sums over prompts*: a pooled (micro) mean is Σ tokens / Σ rounds, and a mean of
per-prompt means (macro) is Σ mean / Σ 1. One set of resamples serves all ratios of a call, so a
hundred of them cost about as much as one, and all of them see the same prompts in each draw.

Symbols: N prompts, R draws, S statistics.
References: Efron 1987 (BCa); Field & Welsh 2007 (clusters); Flynn & Peters 2004 (few clusters run
short); Holm 1979; Phipson & Smyth 2010 (the +1 of a Monte-Carlo p-value).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Key = TypeVar("Key", bound=Hashable)

DRAWS = 20_000
LEVEL = 0.95
FEW_PROMPTS = 24
"""Below this many clusters bootstrap intervals are too narrow (Flynn & Peters 2004)."""
EXACT_SIGN_FLIPS = 20
"""Up to this many prompts all 2^N sign patterns are enumerated."""

_NORMAL = NormalDist()
_CHUNK = 1 << 22  # resampled prompt indices held at once


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over prompts.

    ``None`` means unknown: no value where nothing could be counted, no interval where a single
    prompt was measured. Never NaN.
    """

    value: float | None
    lo: float | None = None
    hi: float | None = None
    n: int = 0
    """Prompts that the number rests on."""
    unit: str = ""

    def __post_init__(self) -> None:
        for name in ("value", "lo", "hi"):
            number = getattr(self, name)
            if number is None:
                continue
            number = float(number)
            if not math.isfinite(number):
                msg = f"Estimate.{name} is {number}; an unknown number is None"
                raise ValueError(msg)
            object.__setattr__(self, name, number)
        object.__setattr__(self, "n", int(self.n))

    def to_json(self) -> dict[str, float | None]:
        """``{"value", "lo", "hi"}``."""
        return {"value": self.value, "lo": self.lo, "hi": self.hi}

    def __str__(self) -> str:
        if self.value is None:
            return "unknown"
        interval = "" if self.lo is None else f" [{self.lo:.3g}, {self.hi:.3g}]"
        return f"{self.value:.3g}{interval} {self.unit}".rstrip()


class Ratio(NamedTuple):
    """Per-prompt sums [N] whose totals are divided; row i of every ratio is the same prompt."""

    numerators: Floats
    denominators: Floats
    unit: str = ""

    def macro(self) -> Ratio:
        """The mean of per-prompt ratios, over the prompts that have a denominator."""
        counted = self.denominators > 0
        means = np.divide(
            self.numerators, self.denominators, out=np.zeros(len(counted)), where=counted
        )
        return Ratio(means, counted.astype(np.float64), self.unit)

    def per_prompt(self) -> Floats:
        """Ratio of each prompt [N]; NaN where its denominator is 0."""
        means, counted, _ = self.macro()
        return np.where(counted > 0, means, np.nan)


def ratio(numerators: ArrayLike, denominators: ArrayLike, unit: str = "") -> Ratio:
    """Per-prompt sums as a `Ratio`; a scalar denominator holds for every prompt.

    Raises
    ------
    ValueError
        Not one number a prompt, a number that is not finite, or a negative denominator.
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.broadcast_to(np.asarray(denominators, dtype=np.float64), top.shape)
    if top.ndim != 1 or not len(top):
        msg = f"numerators have shape {top.shape}; expected one number a prompt"
        raise ValueError(msg)
    if not (np.isfinite(top).all() and np.isfinite(bottom).all() and (bottom >= 0).all()):
        msg = "per-prompt sums must be finite, denominators at least 0"
        raise ValueError(msg)
    return Ratio(top, bottom, unit)


def estimates(
    ratios: Mapping[Key, Ratio], *, seed: int, draws: int = DRAWS, level: float = LEVEL
) -> dict[Key, Estimate]:
    """Value and BCa interval of many ratios, resampling prompts once for all of them.

    Parameters
    ----------
    ratios
        S ratios over the same N prompts.
    seed
        The same seed and N give the same resamples, whichever ratios are asked for.

    Returns
    -------
    dict
        An `Estimate` for each key. Without a denominator the value is None; with one contributing
        prompt the interval is None; where all prompts agree it has no width.
    """
    if not ratios:
        return {}
    top, bottom = _stack(ratios.values())

    def statistic(weights: Floats) -> Floats:
        return _divide(weights @ top, weights @ bottom)

    counted = (bottom > 0).sum(axis=0)
    found = bca(statistic, len(top), counted, seed=seed, draws=draws, level=level)
    return {
        key: Estimate(*numbers, n, r.unit)
        for (key, r), numbers, n in zip(ratios.items(), found, counted, strict=True)
    }


def differences(
    pairs: Mapping[Key, tuple[Ratio, Ratio]],
    *,
    seed: int,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> dict[Key, Estimate]:
    """Paired difference (first minus second) of ratios over the same prompts.

    A draw takes the same prompts on both sides, so what makes a prompt easy or hard cancels.
    Prompts that have no denominator on either side are left out of both.
    """
    if not pairs:
        return {}
    a_top, a_bottom = _stack([a for a, _ in pairs.values()])
    b_top, b_bottom = _stack([b for _, b in pairs.values()])
    if a_top.shape != b_top.shape:
        msg = f"{len(a_top)} prompts on one side, {len(b_top)} on the other"
        raise ValueError(msg)
    both = (a_bottom > 0) & (b_bottom > 0)
    a_top, a_bottom, b_top, b_bottom = (x * both for x in (a_top, a_bottom, b_top, b_bottom))

    def statistic(weights: Floats) -> Floats:
        return _divide(weights @ a_top, weights @ a_bottom) - _divide(
            weights @ b_top, weights @ b_bottom
        )

    counted = both.sum(axis=0)
    found = bca(statistic, len(a_top), counted, seed=seed, draws=draws, level=level)
    return {
        key: Estimate(*numbers, n, a.unit)
        for (key, (a, _)), numbers, n in zip(pairs.items(), found, counted, strict=True)
    }


def sign_flip(
    per_prompt: ArrayLike,
    *,
    seed: int = 0,
    draws: int = DRAWS,
    alternative: Literal["two-sided", "greater"] = "two-sided",
) -> float:
    """P-value of paired per-prompt differences [N] under random signs of their mean.

    Exact up to `EXACT_SIGN_FLIPS` prompts; beyond that by seeded Monte Carlo, where the observed
    pattern counts as one of the draws so that p is never 0.
    """
    d = np.asarray(per_prompt, dtype=np.float64)
    if d.ndim != 1 or not len(d) or not np.isfinite(d).all():
        msg = "expected one finite difference a prompt"
        raise ValueError(msg)
    exact = len(d) <= EXACT_SIGN_FLIPS
    if exact:
        sums = np.zeros(1)
        for one in d:
            sums = np.concatenate([sums + one, sums - one])
    else:
        rng = np.random.default_rng(seed)
        sums = np.concatenate(
            [
                rng.choice((-1.0, 1.0), size=(part, len(d))) @ d
                for part in _parts(draws, _CHUNK // len(d))
            ]
        )
    observed = d.sum()
    if alternative == "two-sided":
        observed, sums = abs(observed), np.abs(sums)
    # Equal patterns differ in the last bits; they are ties and count as extreme.
    extreme = int((sums >= observed - 1e-12 * np.abs(d).sum()).sum())
    return extreme / len(sums) if exact else (extreme + 1) / (len(sums) + 1)


def smallest_p(n: int) -> float:
    """Smallest two-sided p-value that `sign_flip` can reach with ``n`` prompts."""
    return min(1.0, 2.0 ** (1 - n)) if n <= EXACT_SIGN_FLIPS else 1 / (DRAWS + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for all of them being looked at, in the given order (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=np.float64)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return adjusted.tolist()


def prompts_needed(
    estimate: Estimate,
    threshold: float,
    *,
    power: float = 0.8,
    comparisons: int = 1,
    level: float = LEVEL,
) -> int | None:
    """Prompts after which the interval would probably clear ``threshold``.

    The per-prompt spread is read off the interval's width, s = width * sqrt(n) / (2 z); clearing a
    distance d with probability ``power`` takes ((z_level + z_power) * s / d)^2 prompts.

    Parameters
    ----------
    comparisons
        Number of comparisons made, for a Bonferroni-like z.

    Returns
    -------
    int or None
        None where the estimate has no spread to go by, or lies on the threshold.
    """
    if estimate.value is None or estimate.lo is None or estimate.hi is None:
        return None
    distance = abs(estimate.value - threshold)
    spread = (estimate.hi - estimate.lo) * math.sqrt(estimate.n) / (2 * _z(level))
    if distance == 0 or spread == 0:
        return None
    z = _z(1 - (1 - level) / comparisons) + _NORMAL.inv_cdf(power)
    return max(2, math.ceil((z * spread / distance) ** 2))


def few_prompts_note(n: int) -> str | None:
    """The sentence that goes with intervals over fewer than `FEW_PROMPTS` prompts, else None."""
    if n >= FEW_PROMPTS:
        return None
    if n < 2:
        return "A single prompt gives no interval; 24 or more are advised."
    return (
        f"{n} prompts: below {FEW_PROMPTS}, 95 % intervals run short "
        "(they cover the truth less often than they say)."
    )


def _z(level: float) -> float:
    return _NORMAL.inv_cdf((1 + level) / 2)


def _stack(ratios: Iterable[Ratio]) -> tuple[Floats, Floats]:
    """Numerators and denominators, each [N, S]."""
    listed = list(ratios)
    sizes = {len(r.numerators) for r in listed}
    if len(sizes) != 1:
        msg = f"ratios over different numbers of prompts: {sorted(sizes)}"
        raise ValueError(msg)
    return (
        np.stack([r.numerators for r in listed], axis=1),
        np.stack([r.denominators for r in listed], axis=1),
    )


def _divide(top: Floats, bottom: Floats) -> Floats:
    quotient: Floats = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)
    return quotient


def _parts(total: int, size: int) -> list[int]:
    size = max(1, size)
    return [min(size, total - start) for start in range(0, total, size)]


def _weights(n: int, draws: int, rng: np.random.Generator) -> Floats:
    """How often each prompt is drawn: [R, N]."""
    picks = rng.integers(0, n, size=(draws, n)) + np.arange(draws)[:, None] * n
    return np.bincount(picks.ravel(), minlength=draws * n).reshape(draws, n).astype(np.float64)


def bca(
    statistic: Callable[[Floats], Floats],
    n: int,
    counted: NDArray[np.int_],
    *,
    seed: int,
    draws: int,
    level: float = LEVEL,
) -> list[tuple[float | None, float | None, float | None]]:
    """Bias-corrected and accelerated intervals of S statistics of prompt weights.

    Parameters
    ----------
    statistic
        Maps weights [R, N] to values [R, S], NaN where a draw leaves nothing to divide by.
    counted
        [S] prompts that contribute to each statistic.

    Returns
    -------
    list
        (value, lo, hi) of each statistic.
    """
    rng = np.random.default_rng(seed)
    value = statistic(np.ones((1, n)))[0]
    left_out = statistic(1.0 - np.eye(n))
    drawn = np.concatenate(
        [statistic(_weights(n, part, rng)) for part in _parts(draws, _CHUNK // n)]
    )
    drawn = np.sort(drawn.T, axis=1)  # undefined draws (NaN) go last
    return [
        _one_bca(value[s], left_out[:, s], drawn[s], int(counted[s]), level)
        for s in range(len(value))
    ]


def bca_apart(
    statistic: Callable[[Sequence[Floats]], Floats],
    sizes: Sequence[int],
    *,
    seed: int,
    draws: int = DRAWS,
    level: float = LEVEL,
) -> list[tuple[float | None, float | None, float | None]]:
    """The same for statistics of several populations, each resampled on its own.

    Parameters
    ----------
    statistic
        Maps the weights [R, n] of each population to values [R, S].
    sizes
        Members of each population. With a single one there is no interval.

    Returns
    -------
    list
        (value, lo, hi) of each statistic.
    """
    rng = np.random.default_rng(seed)
    value = statistic([np.ones((1, n)) for n in sizes])[0]
    left_out = []
    for at, n in enumerate(sizes):
        weights = [np.ones((n, other)) for other in sizes]
        weights[at] = 1.0 - np.eye(n)
        one = statistic(weights)
        left_out.append(one - one.mean(axis=0))
    influences = np.concatenate(left_out)
    parts = _parts(draws, _CHUNK // max(sizes))
    drawn = np.concatenate([statistic([_weights(n, part, rng) for n in sizes]) for part in parts])
    drawn = np.sort(drawn.T, axis=1)
    return [
        _one_bca(value[s], influences[:, s], drawn[s], min(sizes), level) for s in range(len(value))
    ]


def _one_bca(
    value: float, left_out: Floats, drawn: Floats, counted: int, level: float
) -> tuple[float | None, float | None, float | None]:
    if np.isnan(value):
        return None, None, None
    if counted < 2:
        return value, None, None
    # Rounding makes equal values differ in the last bits; below this they count as equal.
    tie = 1e-12 * max(1.0, abs(value))
    influence = left_out.mean() - left_out
    if np.abs(influence).max() <= tie:
        return value, value, value
    drawn = drawn[: len(drawn) - int(np.isnan(drawn).sum())]
    below = np.searchsorted(drawn, value - tie, "left") + np.searchsorted(
        drawn, value + tie, "right"
    )
    share = min(max(below / (2 * len(drawn)), 0.5 / len(drawn)), 1 - 0.5 / len(drawn))
    bias = _NORMAL.inv_cdf(share)
    acceleration = (influence**3).sum() / (6 * (influence**2).sum() ** 1.5)

    def end(z: float) -> float:
        room = 1 - acceleration * (bias + z)
        level_there = _NORMAL.cdf(bias + (bias + z) / room) if room > 0 else float(z > 0)
        at = level_there * (len(drawn) - 1)
        low = int(at)
        high = min(low + 1, len(drawn) - 1)
        return float(drawn[low] + (at - low) * (drawn[high] - drawn[low]))

    z = _z(level)
    # With very few prompts BCa can miss its own estimate; widening to it errs on the safe side.
    return value, min(end(-z), value), max(end(z), value)
