"""Whose embedding or head a checkpoint carries: the target's, trained, random, or another's.

Many trainers save a copy of the target's tables; some save what they trained; some save what a
constructor left behind. All have the right shape, and readers differ on which they take.

Symbols: V vocabulary rows, H hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kind = Literal["copy", "trained", "random", "constant", "not finite", "other", "unknown"]
ROWS = 4096
"""Rows looked at in one piece, and at most for the spectrum."""
COPY, TRAINED = 0.999, 0.5
"""Share of equal rows from which a table is a copy, and median cosine from which it began as one.
Rows of unrelated tables have cosines around 0."""
NOISE = 2.0
"""Largest spectral edge of a random table. Random ones have 1; those of trained models, 20 and
more."""


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """A table beside the target's."""

    kind: Kind
    equal_rows: float | None
    """Share of rows that are equal in the coarser type of the two; None without a counterpart."""
    median_cosine: float | None
    """Over rows."""
    spectral_edge: float | None
    """See `spectral_edge`."""


def compare(own: Tensor, theirs: Tensor | None, rows: Tensor | None = None) -> Likeness:
    """Tell what a table is.

    Parameters
    ----------
    own
        [V', H] the checkpoint's.
    theirs
        [V, H] the target's, if it is at hand.
    rows
        [V'] the target's row of each of ours, where the vocabulary is reduced. Otherwise rows are
        taken in order, as far as both tables go: one of them may be padded.
    """
    if not all(bool(part.isfinite().all()) for part in own.split(ROWS)):
        return Likeness(kind="not finite", equal_rows=None, median_cosine=None, spectral_edge=None)
    edge = spectral_edge(own)
    if edge is None:
        return Likeness(kind="constant", equal_rows=None, median_cosine=None, spectral_edge=None)
    if theirs is None or theirs.shape[1] != own.shape[1]:
        kind: Kind = "random" if edge < NOISE else "unknown" if theirs is None else "other"
        return Likeness(kind=kind, equal_rows=None, median_cosine=None, spectral_edge=edge)
    equal, cosine = _by_row(own, theirs, rows)
    if equal >= COPY:
        kind = "copy"
    elif cosine >= TRAINED:
        kind = "trained"
    else:
        kind = "random" if edge < NOISE else "other"
    return Likeness(kind=kind, equal_rows=equal, median_cosine=cosine, spectral_edge=edge)


def _by_row(own: Tensor, theirs: Tensor, rows: Tensor | None) -> tuple[float, float]:
    """Share of equal rows, and median cosine."""
    if rows is None:
        rows = torch.arange(min(len(own), len(theirs)))
    coarse = max(own.dtype, theirs.dtype, key=lambda t: torch.finfo(t).eps)
    equal, cosines = 0, []
    for start in range(0, len(rows), ROWS):
        a, b = own[start : start + ROWS][: len(rows) - start], theirs[rows[start : start + ROWS]]
        equal += int((a.to(coarse) == b.to(coarse)).all(-1).sum())
        cosines.append(F.cosine_similarity(a.float(), b.float(), dim=-1))
    return equal / len(rows), float(torch.cat(cosines).median())


def spectral_edge(table: Tensor) -> float | None:
    """Largest eigenvalue of the rows' second moment, over that of independent random values.

    Independent values of one variance have their largest eigenvalue at variance * (1 + sqrt(H/V))^2
    (Marchenko and Pastur 1967), whatever their distribution. None where all values are equal.
    """
    n = min(len(table), ROWS)
    at = torch.linspace(0, len(table) - 1, n).long()
    sample = table[at].float()
    variance = float(sample.square().mean())
    if float(sample.max()) == float(sample.min()):
        return None
    direction = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(0))
    value = 0.0
    for _ in range(30):
        image = sample.T @ (sample @ (direction / direction.norm()))
        value, direction = float(image.norm()), image
    return value / n / variance / (1 + math.sqrt(table.shape[1] / n)) ** 2
