"""Divide a difference among the factors that make it up, whatever the order of changing them.

A *state* is the set of factors that have been changed; its value is what is then measured. Changing
one factor after another leads from no factor to all of them, and each step's difference is that
factor's share. The steps depend on the order, so a factor's share is the mean over all orders
(Shapley's value; Shorrocks 2013), which sums to the whole difference exactly.

Some states may be *infeasible*, such as walking through text that nobody generates. Only orders
through feasible states count. Where there is no such order, factors that cannot be told apart are
merged into one.

Symbols: m factors, R draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TypeVar

import numpy as np

from dflash_diag.stats import Floats

State = frozenset[str]
Value = TypeVar("Value", float, Floats)

EXACT = 12
"""Up to this many factors all orders count; beyond it some are drawn."""
ORDERS = 4_000
"""Orders that are drawn."""


@dataclass(frozen=True, eq=False)
class Shares:
    """How every order of changing the factors divides the difference of any value.

    Made by `shares`; the states' values come in afterwards, as often as one likes.
    """

    groups: tuple[tuple[str, ...], ...]
    """The factors, each by itself unless it was merged with others."""
    steps: Mapping[tuple[State, State], float]
    """From each state to the next: the share of orders that take the step."""
    n_orders: int
    """Orders that count, or that were drawn."""

    @property
    def states(self) -> list[State]:
        """States whose values are needed."""
        return list(dict.fromkeys(state for step in self.steps for state in step))

    def means(self, values: Mapping[State, Value]) -> list[Value]:
        """Each group's share, a number or one a draw [R]: the mean over orders."""
        nothing: Value = values[frozenset()] * 0
        return [
            sum(
                (
                    weight * (values[after] - values[before])
                    for before, after, weight in self._steps(group)
                ),
                start=nothing,
            )
            for group in self.groups
        ]

    def ranges(self, values: Mapping[State, float]) -> list[tuple[float, float]]:
        """Smallest and largest share of each group over the orders."""
        found = []
        for group in self.groups:
            moves = [values[after] - values[before] for before, after, _ in self._steps(group)]
            found.append((min(moves), max(moves)))
        return found

    def _steps(self, group: tuple[str, ...]) -> Iterator[tuple[State, State, float]]:
        for (before, after), weight in self.steps.items():
            if after - before == frozenset(group):
                yield before, after, weight


def shares(
    factors: Sequence[str],
    feasible: Callable[[State], bool],
    *,
    seed: int = 0,
    exact: int = EXACT,
) -> Shares:
    """Weigh the steps between states by the orders that take them.

    Parameters
    ----------
    factors
        m names.
    feasible
        Whether the value of a state can be measured.
    seed
        Of the orders that are drawn where there are more than ``exact`` factors.

    Raises
    ------
    ValueError
        No factor, the first or the last state is infeasible, or none of the drawn orders is
        feasible.
    """
    whole = frozenset(factors)
    if not whole or not (feasible(frozenset()) and feasible(whole)):
        msg = "there must be a factor, and both ends must be feasible"
        raise ValueError(msg)
    if len(whole) > exact:
        return _drawn(factors, feasible, seed)
    good = {state for state in _subsets(factors) if feasible(state)}
    groups = _groups(factors, good)
    return _counted(groups, good)


def _subsets(factors: Sequence[str]) -> Iterator[State]:
    for size in range(len(factors) + 1):
        yield from map(frozenset, combinations(factors, size))


def _counted(groups: Sequence[tuple[str, ...]], good: Set[State]) -> Shares:
    """Exact: orders through a step are the ways to its start times the ways from its end."""
    whole = frozenset().union(*groups)
    levels = [
        [s for s in (frozenset().union(*some) for some in combinations(groups, n)) if s in good]
        for n in range(len(groups) + 1)
    ]
    moves = [
        (before, after)
        for lower, upper in pairwise(levels)
        for before in lower
        for group in groups
        if (after := before | frozenset(group)) != before and after in upper
    ]
    ways_to: dict[State, int] = {frozenset(): 1}
    for before, after in moves:
        ways_to[after] = ways_to.get(after, 0) + ways_to.get(before, 0)
    ways_from: dict[State, int] = {whole: 1}
    for before, after in reversed(moves):
        ways_from[before] = ways_from.get(before, 0) + ways_from.get(after, 0)
    total = ways_to[whole]
    steps = {
        (before, after): ways / total
        for before, after in moves
        if (ways := ways_to.get(before, 0) * ways_from.get(after, 0))
    }
    return Shares(tuple(groups), steps, total)


def _groups(factors: Sequence[str], good: Set[State]) -> list[tuple[str, ...]]:
    """The finest division of the factors that has a feasible order.

    The steps of a longest chain of feasible states from none to all are such a division; of several
    the one with the most orders is taken, then the one that merges later factors.
    """
    whole = frozenset(factors)
    longest: dict[State, int] = {frozenset(): 0}
    parts: dict[State, set[frozenset[State]]] = {frozenset(): {frozenset()}}
    for state in sorted(good - {frozenset()}, key=len):
        before = [one for one in longest if one < state]
        most = max(longest[one] for one in before)
        longest[state] = most + 1
        parts[state] = {
            chain | {state - one} for one in before if longest[one] == most for chain in parts[one]
        }
    candidates = [_ordered(factors, one) for one in parts[whole]]
    return min(
        candidates, key=lambda groups: (-_counted(groups, good).n_orders, _rank(factors, groups))
    )


def _ordered(factors: Sequence[str], parts: Iterable[State]) -> list[tuple[str, ...]]:
    """Groups in the order of their first factors, each in the factors' order."""
    groups = [tuple(f for f in factors if f in part) for part in parts]
    return sorted(groups, key=lambda group: factors.index(group[0]))


def _rank(factors: Sequence[str], groups: Sequence[tuple[str, ...]]) -> list[int]:
    return [-factors.index(f) for group in groups if len(group) > 1 for f in group]


def _drawn(factors: Sequence[str], feasible: Callable[[State], bool], seed: int) -> Shares:
    """Of random orders, those that pass through feasible states alone."""
    rng = np.random.default_rng(seed)
    known: dict[State, bool] = {}
    taken: dict[tuple[State, State], int] = {}
    kept = 0
    for _ in range(ORDERS):
        order = [factors[i] for i in rng.permutation(len(factors))]
        states = [frozenset(order[:n]) for n in range(len(order) + 1)]
        for state in states:
            if state not in known:
                known[state] = feasible(state)
            if not known[state]:
                break
        else:
            kept += 1
            for step in pairwise(states):
                taken[step] = taken.get(step, 0) + 1
    if not kept:
        msg = f"none of {ORDERS} orders of {len(factors)} factors is feasible"
        raise ValueError(msg)
    steps = {step: count / kept for step, count in taken.items()}
    return Shares(tuple((f,) for f in factors), steps, kept)
