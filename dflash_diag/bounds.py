"""What the numbers of one line allow each other to be, whatever was measured.

A line is what one program printed of one set of blocks. Whatever these blocks were, their survival
curve falls, a top-8 count is never below a top-4 count, a tree of n nodes is never deeper than the
top-n labels reach. All of it is linear in a few shares of blocks, so whether claimed numbers can be
true together under some reading is a linear program: the reading is excluded only if no blocks
whatsoever could have printed the numbers.

The same holds of pooled numbers, of means of per-prompt means, and of any fixed set of anchors. It
does not hold across oracles and trees that each walk by their own length: those are bounded alone.

Slot 1 is taken to have a label in every block, since an anchor without one trains nothing; later
slots may lack theirs, and then end a run.

Symbols: D proposed tokens, k a slot, w candidates a slot, n nodes of a tree, the root not counted;
S_k survival, m_k marginal, O_k survival of the top-w oracle, T_k share of trees that reach depth k.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

UNKNOWN_D = 32
"""Slots assumed where their number is not known; more slots allow more."""
INFEASIBLE = 2
"""Status of a linear program that has no solution."""
_EXACT = 1e-9


class Reading(NamedTuple):
    """What a number may count, apart from over which anchors: see `Definition`."""

    kind: str
    number: int | None = None
    bonus: bool = False


class Number(NamedTuple):
    """A printed number, known to lie within ``slack`` of its value."""

    value: float
    slack: float

    @property
    def lo(self) -> float:
        return self.value - self.slack - _EXACT

    @property
    def hi(self) -> float:
        return self.value + self.slack + _EXACT


Row = tuple[Mapping[str, float], float]
"""Coefficients by variable, and a constant."""


class Bounds:
    """The inequalities among the numbers of one line.

    Parameters
    ----------
    n_proposed
        D, where it is known. Without it, relations that need it are left out.
    """

    def __init__(self, n_proposed: int | None = None) -> None:
        self.known_d = n_proposed is not None
        self.d = n_proposed or UNKNOWN_D
        self._solved: dict[Hashable, float | None] = {}

    def extent(self, reading: Reading) -> tuple[float, float]:
        """Lowest and highest value of a reading beside no other number."""
        if reading.kind == "conditional":
            return 0.0, 1.0
        terms, constant = self.row(reading)
        high = sum(c * (self.d if name == "passing" else 1.0) for name, c in terms.items())
        return constant, constant + high

    def allow(self, line: Sequence[tuple[Reading, Number]]) -> bool:
        """Whether some blocks could have printed all these numbers, each under its reading."""
        return self._solve(line) is not None

    def span(
        self, reading: Reading, given: Sequence[tuple[Reading, Number]]
    ) -> tuple[float, float] | None:
        """Lowest and highest value of a reading beside given numbers; None if these contradict.

        A conditional share is not linear and spans 0 to 1.
        """
        if reading.kind == "conditional":
            return None if self._solve(given) is None else (0.0, 1.0)
        low, high = (self._solve(given, reading, sign) for sign in (1, -1))
        return None if low is None or high is None else (low, high)

    def _solve(
        self, given: Sequence[tuple[Reading, Number]], aim: Reading | None = None, sign: int = 1
    ) -> float | None:
        """`_Program.solve`, each problem once."""
        key = (tuple(given), aim, sign)
        if key not in self._solved:
            program = _Program(self, [*([aim] if aim else []), *(one for one, _ in given)])
            objective = self.row(aim) if aim else None
            self._solved[key] = program.solve(given, objective=objective, sign=sign)
        return self._solved[key]

    def can(self, reading: Reading) -> bool:
        """Whether a block of D slots has such a number at all."""
        slots = ("marginal", "survival", "conditional")
        return reading.kind not in slots or 1 <= (reading.number or 0) <= self.d

    def row(self, reading: Reading) -> Row:
        """A reading as a linear form of the line's shares."""
        kind, n, bonus = reading
        slots = range(1, self.d + 1)
        one = float(bonus)
        if kind in ("streak", "tau"):
            return _sum("S", slots), one + (kind == "tau")
        if kind in ("streak_passing", "tau_passing"):
            return {"passing": 1.0}, one + (kind == "tau_passing")
        if kind == "eal_product":
            return _sum("E", slots), one
        if kind == "topk_oracle":
            return _sum("S" if n == 1 else f"O{n}.", slots), one
        if kind == "ddtree_tau":
            return _sum(f"T{n}.", range(1, min(n or 0, self.d) + 1)), one + 1
        if kind == "chain_tau":
            return _sum("S", range(1, min(n or 0, self.d) + 1)), one + 1
        if kind in ("marginal", "survival"):
            return {f"{'m' if kind == 'marginal' else 'S'}{n}": 1.0}, one
        if not self.known_d and kind != "accuracy":
            return {f"free.{kind}": 1.0}, one
        scale = 1 / self.d
        if kind == "draft_acceptance_rate":
            return _sum("S", slots, scale), one
        if kind == "verify_rate":
            return _sum("S", slots, 1 / (self.d + 1)), one + 1 / (self.d + 1)
        return {{"accuracy": "accuracy", "full_block": f"S{self.d}"}[kind]: 1.0}, one


def _sum(letter: str, slots: Iterable[int], scale: float = 1.0) -> dict[str, float]:
    return {f"{letter}{k}": scale for k in slots}


class _Program:
    """The linear program over what some readings need."""

    def __init__(self, bounds: Bounds, readings: Sequence[Reading]) -> None:
        self.bounds, self.d = bounds, bounds.d
        self.widths = sorted({r.number or 0 for r in readings if r.kind == "topk_oracle"} - {1})
        self.budgets = sorted({r.number or 0 for r in readings if r.kind == "ddtree_tau"})
        self.kinds = {r.kind.removeprefix("tau_").removeprefix("streak_") for r in readings}
        self.rows: list[dict[str, float]] = []
        self.limits: list[float] = []
        self._chain()
        self._oracles()
        self._trees()
        self._others()

    def at_most(self, terms: Mapping[str, float], limit: float = 0.0) -> None:
        """Add ``terms <= limit``."""
        self.rows.append(dict(terms))
        self.limits.append(limit)

    def _falls(self, letter: str, last: int) -> None:
        for k in range(2, last + 1):
            self.at_most({f"{letter}{k}": 1, f"{letter}{k - 1}": -1})

    def _chain(self) -> None:
        """Survival falls, from the first marginal on, and is never above the marginal."""
        self._falls("S", self.d)
        self.at_most({"m1": 1, "S1": -1})
        for k in range(1, self.d + 1):
            self.at_most({f"S{k}": 1, f"m{k}": -1})

    def _oracles(self) -> None:
        narrower = "S"
        for w in self.widths:
            self._falls(f"O{w}.", self.d)
            for k in range(1, self.d + 1):
                self.at_most({f"{narrower}{k}": 1, f"O{w}.{k}": -1})
            narrower = f"O{w}."

    def _trees(self) -> None:
        """Trees grow with n, hold the top choice of slot 1, and are no wider than n allows."""
        smaller: tuple[str, int] | None = None
        for n in self.budgets:
            last = min(n, self.d)
            letter = f"T{n}."
            if last:
                self._falls(letter, last)
                self.at_most({"S1": 1, f"{letter}1": -1})
            if smaller:
                for k in range(1, smaller[1] + 1):
                    self.at_most({f"{smaller[0]}{k}": 1, f"{letter}{k}": -1})
            for w in sorted({1, n, *self.widths}):
                self._reach(letter, n, last, w)
            smaller = letter, last

    def _reach(self, letter: str, n: int, last: int, w: int) -> None:
        """A path of depth k whose slots beyond the first i are past rank w needs many nodes.

        Before its prefix come all prefixes that are better in every slot: i + (w + 1)(k - i) nodes
        in all, which bounds i from below, and the labels were within the top w until then.
        """
        known = w == 1 or w in self.widths
        for k in range(1, last + 1):
            first = math.ceil(((w + 1) * k - n) / w)
            if known and first >= 1:
                within = "S" if w == 1 else f"O{w}."
                self.at_most({f"{letter}{k}": 1, f"{within}{first}": -1})

    def _others(self) -> None:
        slots = range(1, self.d + 1)
        if "eal_product" in self.kinds:
            self._falls("E", self.d)
            self.at_most({"E1": 1, "m1": -1})
            self.at_most({"m1": 1, "E1": -1})
            for k in slots[1:]:
                self.at_most({f"E{k}": 1, f"m{k}": -1})
                self.at_most({f"E{k - 1}": 1, f"m{k}": 1, f"E{k}": -1}, 1)
        if "passing" in self.kinds:
            self.at_most({**_sum("S", slots), "passing": -1})
            self.at_most({**_sum("m", slots, -1), "passing": 1})
        if "accuracy" in self.kinds and self.bounds.known_d:
            self.at_most({**_sum("S", slots), "accuracy": -self.d})
            self.at_most({"accuracy": self.d, "m1": -1}, self.d - 1)
            if "passing" in self.kinds:
                self.at_most({"passing": 1, "accuracy": -self.d})

    def solve(
        self,
        given: Sequence[tuple[Reading, Number]],
        *,
        objective: Row | None = None,
        sign: int = 1,
    ) -> float | None:
        """Smallest (sign 1) or largest (-1) value of the objective; None if nothing is feasible."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        for reading, number in given:
            self._claim(reading, number)
        aim, constant = objective or ({}, 0.0)
        names = sorted({name for row in (*self.rows, aim) for name in row})
        column = {name: i for i, name in enumerate(names)}
        entries = [(i, column[x], c) for i, row in enumerate(self.rows) for x, c in row.items()]
        at, of, values = zip(*entries, strict=True)
        costs = np.zeros(len(names))
        for name, c in aim.items():
            costs[column[name]] = sign * c
        top = [self.d if name == "passing" else 1.0 for name in names]
        found = linprog(
            costs,
            A_ub=csr_array((values, (at, of)), shape=(len(self.rows), len(names))),
            b_ub=np.array(self.limits),
            bounds=np.stack([np.zeros(len(names)), np.array(top)], axis=1),
            method="highs",
        )
        if found.status == 0:
            return sign * float(found.fun) + constant
        # Only what is proven excludes; a solver in difficulties proves nothing.
        return None if found.status == INFEASIBLE else sign * -math.inf

    def _claim(self, reading: Reading, number: Number) -> None:
        """Add that a reading has a printed value."""
        if reading.kind == "conditional":
            self._conditional(reading.number or 1, number)
            return
        terms, constant = self.bounds.row(reading)
        self.at_most(terms, number.hi - constant)
        self.at_most({name: -c for name, c in terms.items()}, constant - number.lo)

    def _conditional(self, k: int, number: Number) -> None:
        """S_k over S_(k-1), S_0 being 1; a value outside 0 to 1 is none."""
        if number.lo > 1 or number.hi < 0:
            self.at_most({"S1": 1.0}, -1.0)
            return
        for sign, end in ((1.0, number.hi), (-1.0, number.lo)):
            before = {f"S{k - 1}": -sign * end} if k > 1 else {}
            self.at_most({f"S{k}": sign, **before}, sign * end if k == 1 else 0.0)
