"""What became of each block, beside what its drafter expected; which blocks to look at first.

The probability p_k that a drafter gives its proposal k is its forecast that the proposal is right.
Together they are a forecast of how many are accepted::

    P(j) = p_1 ... p_j (1 - p_(j+1)),    the last factor left out for j = D

from which follow what the drafter *expects*, the sum of j P(j) = sum_k p_1 ... p_k, and the
*surprise* of the outcome, -ln P(accepted) in nats (Shannon's surprisal). A confident proposal that
is wrong surprises, and so does a diffident one that is right. A drafter that was trained on the
target's distribution rather than on its choice is right more often than it expects.

Symbols: A anchors, D proposed tokens, k a proposal 1..D, p_k a probability.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_diag.metrics import leading, walked

if TYPE_CHECKING:
    from dflash_diag.scoring import Scores

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]

FINEST = 2.0**-24
"""The smallest 1 - p that is told from 0: log-probabilities are float32."""


def expected(logprobs: Floats) -> Floats:
    """Accepted proposals [A] that a drafter expects, the bonus token not counted.

    Parameters
    ----------
    logprobs
        [A, D] of its proposals, in nats.
    """
    return np.exp(np.cumsum(logprobs, axis=1)).sum(axis=1)


def surprise(logprobs: Floats, accepted: NDArray[np.integer]) -> Floats:
    """Surprise [A] at the number of accepted proposals, in nats.

    Parameters
    ----------
    logprobs
        [A, D] of the proposals, in nats.
    accepted
        [A] leading proposals that are right.
    """
    wrong = np.log(np.maximum(-np.expm1(logprobs), FINEST))
    steps = np.arange(logprobs.shape[1])
    before, miss = (steps < accepted[:, None]), (steps == accepted[:, None])
    return -(logprobs * before + wrong * miss).sum(axis=1) + 0.0  # without it, a certain 0 is -0


class Visit(NamedTuple):
    """Where decoding stands when it comes to an anchor."""

    rounds: Rows
    """Rows of the prompt's rounds, in order."""
    at: int
    """Index in ``rounds`` of the round that starts at the anchor, or that jumps over it."""
    starts: bool
    """Whether it starts there."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Every block of one drafter: one row an anchor, as in its `Scores`."""

    scores: Scores

    @cached_property
    def accepted(self) -> NDArray[np.int64]:
        """[A] leading proposals that are right."""
        return leading(np.equal(self.scores.proposed, self.scores.labels))

    @cached_property
    def visited(self) -> Mask:
        """[A] whether a round of decoding starts at the anchor."""
        return walked(self.scores.prompt, self.scores.anchor, self.accepted + 1)

    @cached_property
    def logprobs(self) -> Floats:
        """[A, D] of the proposals, in nats; rounding above 0 is cut off."""
        return np.minimum(self.scores.topk_logprobs[..., 0].astype(np.float64), 0.0)

    @cached_property
    def expected(self) -> Floats:
        """[A] accepted proposals that the drafter expected."""
        return expected(self.logprobs)

    @cached_property
    def surprise(self) -> Floats:
        """[A] surprise at what was accepted, in nats."""
        return surprise(self.logprobs, self.accepted)

    @cached_property
    def missed(self) -> NDArray[np.int64]:
        """[A] the target's token at the first miss; -1 where all proposals are accepted."""
        return np.where(self._misses, self._at_miss(self.scores.labels), -1)

    @cached_property
    def _misses(self) -> Mask:
        return self.accepted < self.scores.labels.shape[1]

    def _at_miss(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values [A, D] at the first miss [A], or at the last slot where there is none."""
        last = values.shape[1] - 1
        return values[np.arange(len(values)), np.minimum(self.accepted, last)]

    @cached_property
    def from_worst(self) -> Rows:
        """Rows from the worst on: fewest accepted, then the target's token least probable."""
        liked = np.where(self._misses, self._at_miss(self.scores.label_logprob), 0.0)
        return np.lexsort((liked, self.accepted))

    @cached_property
    def from_fewest(self) -> Rows:
        """Rows by what they accept, equal ones by their surprise."""
        return np.lexsort((self.surprise, self.accepted))

    @cached_property
    def from_most_surprising(self) -> Rows:
        """Rows by falling surprise."""
        return np.argsort(-self.surprise, kind="stable")

    def ordered(self, order: str, kept: Mask) -> Rows:
        """The rows of a mask [A] in one of `ORDERS`; what is equal stays as in the text."""
        rows = ORDERS[order](self)
        return rows[kept[rows]]

    def pick(self, name: str, kept: Mask) -> int | None:
        """The row of a mask [A] that one of `PICKS` names; None where the mask is empty.

        ``worst``: fewest accepted; of those, the target's token at the miss is least probable.
        ``median``: the middle one by what is accepted; of equal ones, by their surprise.
        ``most surprising``: as it says.
        """
        rows = PICKS[name](self)
        rows = rows[kept[rows]]
        if not len(rows):
            return None
        return int(rows[(len(rows) - 1) // 2 if name == "median" else 0])

    def visit(self, row: int) -> Visit:
        """Decoding around an anchor."""
        own = self.scores.prompt == self.scores.prompt[row]
        rounds = np.flatnonzero(own & self.visited)
        at = int(np.searchsorted(rounds, row, side="right")) - 1
        return Visit(rounds, at, bool(self.visited[row]))


ORDERS: dict[str, Callable[[Outcomes], Rows]] = {
    "as in the text": lambda one: np.arange(len(one.accepted)),
    "worst first": lambda one: one.from_worst,
    "most surprising first": lambda one: one.from_most_surprising,
}
PICKS: dict[str, Callable[[Outcomes], Rows]] = {
    "worst": lambda one: one.from_worst,
    "median": lambda one: one.from_fewest,
    "most surprising": lambda one: one.from_most_surprising,
}
