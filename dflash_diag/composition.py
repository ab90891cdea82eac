"""Whether text that is accepted less is harder, or the drafter is only worse on it.

Text is harder where the target itself is unsure, and its entropy says where. The difference of two
rates splits into two parts that sum exactly to it (Kitagawa 1955; Oaxaca 1973 and Blinder 1973 for
linear models): *composition*, from the sets having other shares of sure and unsure positions, and
*rate*, from other acceptance at equal entropy. Either part can be taken at the one set's shares or
at the other's; both orders are averaged. Beside it stands what each set would get with the other's
shares (post-stratification).

Entropy is cut into ten bins; what varies with it inside a bin counts as rate. Five bins remove
about 90 % of a smooth effect (Cochran 1968).

Symbols: N prompts, J bins, M counted rows, A anchors, D proposed tokens, R draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_diag.stats import Estimate, Floats, bca_apart
from dflash_diag.strata import NO_ENTROPY, NUMBERS, Blocks, excludes_zero

BINS = 10
OVERLAP = 0.9
"""Share of each set that has to lie in bins in which the other has prompts as well."""
ENOUGH = 5
"""Prompts a set; below that nothing is split."""
IN_BIN = 2
"""Prompts of each set without which a bin says nothing about both."""
PARTS = ("a", "b", "difference", "composition", "rate", "a_with_mix_of_b", "b_with_mix_of_a")


class Bin(NamedTuple):
    """Positions of about equal entropy, in both sets."""

    low: float
    high: float
    """Entropies [nats] found in it."""
    share_a: float
    share_b: float
    rate_a: float | None
    rate_b: float | None
    """None where the set has nothing there."""


class Split(NamedTuple):
    """A difference of two sets in its two parts, or why there is none."""

    a: str
    b: str
    n_a: int
    n_b: int
    number: str
    """Which of `dflash_diag.strata.NUMBERS`."""
    estimates: dict[str, Estimate]
    """By `PARTS`; ``difference`` is a less b. Empty where nothing was split."""
    orders: tuple[float, float] | None
    """Composition at the rates of a alone, and at those of b alone."""
    bins: list[Bin]
    why_not: str = ""

    @property
    def differs(self) -> bool:
        """Whether the sets certainly differ."""
        return "difference" in self.estimates and excludes_zero(self.estimates["difference"])

    def sentence(self) -> str:
        """What was found, in words."""
        if self.why_not:
            return f"{self.a} and {self.b}: not split, since {self.why_not}."
        total, composition, rate = (
            self.estimates[name] for name in ("difference", "composition", "rate")
        )
        unit = {"accuracy": " in slot accuracy"}.get(self.number, " tokens a round")
        said = f"{self.a} differs from {self.b} by {_signed(total)}{unit}"
        if not self.differs:
            return f"{said}, which may be chance."
        return (
            f"{said}: {_signed(composition)} because the target is surer of one than of the other, "
            f"{_signed(rate)} at equal entropy."
        )


def _signed(one: Estimate) -> str:
    if one.value is None:
        return "an unknown amount"
    interval = "" if one.lo is None else f" [{one.lo:+.2f}, {one.hi:+.2f}]"
    return f"{one.value:+.2f}{interval}"


def split(
    a: tuple[str, Blocks], b: tuple[str, Blocks], number: str, *, seed: int, draws: int
) -> Split:
    """Split the difference of two sets of prompts, a less b, by the target's entropy.

    Parameters
    ----------
    a, b
        Name and blocks of each set; no prompt is in both. Each is resampled on its own.
    number
        ``tau_walked``, ``tau_uniform`` (a row is a block, with the mean entropy of the positions
        that it predicts) or ``accuracy`` (a row is a proposal, with the entropy at its position).
    """
    sets = (a[1], b[1])
    sizes = [len(one.texts) for one in sets]

    nothing = Split(a[0], b[0], sizes[0], sizes[1], number, {}, None, [])
    if any(one.entropy is None for one in sets):
        return nothing._replace(why_not=NO_ENTROPY)
    cells = [_cells(one, number) for one in sets]
    edges = _edges(cells[0].entropy, cells[1].entropy)
    tables = [_table(one, edges, n) for one, n in zip(cells, sizes, strict=True)]
    bins = _bins(cells, edges, tables)
    if min(sizes) < ENOUGH:
        why = f"{min(sizes)} prompts in a set are too few ({ENOUGH} or more are needed)"
        return nothing._replace(bins=bins, why_not=why)
    common = np.all([(bottom > 0).sum(axis=0) >= IN_BIN for _, bottom in tables], axis=0)
    overlap = [float(bottom[:, common].sum() / bottom.sum()) for _, bottom in tables]
    if min(overlap) < OVERLAP:
        which, other = (a[0], b[0]) if overlap[0] <= overlap[1] else (b[0], a[0])
        share = 100 * (1 - min(overlap))
        return nothing._replace(
            bins=bins,
            why_not=f"{share:.0f}\u00a0% of {which} has an entropy that {other} hardly ever has",
        )

    def statistic(weights: Sequence[Floats]) -> Floats:
        of_a, of_b = (_weighted(*one) for one in zip(tables, weights, strict=True))
        return _parts(*of_a, *of_b)

    found = bca_apart(statistic, sizes, seed=seed, draws=draws)
    unit = "share" if number == "accuracy" else "tokens"
    estimates = {
        name: Estimate(*one, sum(sizes), unit) for name, one in zip(PARTS, found, strict=True)
    }
    return nothing._replace(estimates=estimates, bins=bins, orders=_orders(estimates))


class _Cells(NamedTuple):
    """What is counted: M rows."""

    prompt: NDArray[np.int64]
    value: Floats
    entropy: Floats


def _cells(blocks: Blocks, number: str) -> _Cells:
    if number not in NUMBERS:
        raise ValueError(f"{number} is none of {', '.join(NUMBERS)}")
    entropy, hardness = blocks.entropy, blocks.hardness
    assert entropy is not None  # noqa: S101 - checked by the caller
    assert hardness is not None  # noqa: S101
    if number == "accuracy":
        at = blocks.judged
        prompt = np.broadcast_to(blocks.prompt[:, None], at.shape)[at]
        return _Cells(prompt, blocks.right[at].astype(np.float64), entropy[at])
    rows = blocks.visited if number == "tau_walked" else np.ones(len(blocks.prompt), bool)
    value = blocks.jumps[rows].astype(np.float64)
    return _Cells(blocks.prompt[rows], value, hardness[rows])


def _edges(a: Floats, b: Floats) -> Floats:
    """Inner edges of bins that hold equal shares of the two sets together, each counting half."""
    both = np.concatenate([a, b])
    weights = np.concatenate([np.full(len(one), 1 / len(one)) for one in (a, b)])
    shares = np.arange(1, BINS) / BINS
    return np.unique(np.quantile(both, shares, weights=weights, method="inverted_cdf"))


def _table(cells: _Cells, edges: Floats, n: int) -> tuple[Floats, Floats]:
    """Sum of values and number of rows of every prompt in every bin: [N, J] each."""
    j = len(edges) + 1
    cell = cells.prompt * j + np.searchsorted(edges, cells.entropy)
    top, bottom = (
        np.bincount(cell, weights=weights, minlength=n * j).astype(np.float64).reshape(n, j)
        for weights in (cells.value, np.ones(len(cell)))
    )
    return top, bottom


def _weighted(table: tuple[Floats, Floats], weights: Floats) -> tuple[Floats, Floats]:
    """Share and rate of each bin [R, J] under weights of prompts [R, N]; NaN where it is empty."""
    top, bottom = (weights @ part for part in table)
    rate = np.divide(top, bottom, out=np.full(top.shape, np.nan), where=bottom > 0)
    return bottom / bottom.sum(axis=1, keepdims=True), rate


def _parts(share_a: Floats, rate_a: Floats, share_b: Floats, rate_b: Floats) -> Floats:
    """`PARTS` [R, 7] of shares and rates [R, J].

    A bin that one set lacks can only count as composition: it gets the other set's rate.
    """
    rate_a, rate_b = np.where(share_a > 0, rate_a, rate_b), np.where(share_b > 0, rate_b, rate_a)
    # Bins that both lack hold nothing.
    rate_a, rate_b = np.nan_to_num(rate_a), np.nan_to_num(rate_b)
    a, b = (share_a * rate_a).sum(axis=1), (share_b * rate_b).sum(axis=1)
    composition = ((share_a - share_b) * (rate_a + rate_b) / 2).sum(axis=1)
    rate = ((rate_a - rate_b) * (share_a + share_b) / 2).sum(axis=1)
    crossed = (share_b * rate_a).sum(axis=1), (share_a * rate_b).sum(axis=1)
    return np.stack([a, b, a - b, composition, rate, *crossed], axis=1)


def _orders(found: dict[str, Estimate]) -> tuple[float, float]:
    """Composition at the rates of a, and at those of b."""
    a, b, crossed_a, crossed_b = (
        found[name].value or 0.0 for name in ("a", "b", "a_with_mix_of_b", "b_with_mix_of_a")
    )
    return a - crossed_a, crossed_b - b


def _bins(cells: list[_Cells], edges: Floats, tables: list[tuple[Floats, Floats]]) -> list[Bin]:
    entropy = np.concatenate([one.entropy for one in cells])
    at = np.searchsorted(edges, entropy)
    shares, rates = zip(
        *(_weighted(table, np.ones((1, len(table[0])))) for table in tables), strict=True
    )
    made = []
    for j in np.unique(at):
        inside = entropy[at == j]
        of = [None if np.isnan(rate[0, j]) else float(rate[0, j]) for rate in rates]
        made.append(
            Bin(float(inside.min()), float(inside.max()), *(float(s[0, j]) for s in shares), *of)
        )
    return made
