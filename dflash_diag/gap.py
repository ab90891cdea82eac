"""Take the gap between a training number and the serving tau apart, factor by factor.

Both ends are the same kind of thing: a definition, applied to some blocks of some texts, proposed
under some reading. So every mixture of the two can be measured as well: the trainer's definition on
the anchors that decoding visits, serving's reading on training texts, and so on. Each factor's part
is its mean effect over all orders of changing them one by one (`shapley`), and the parts sum to the
gap. What lies between the number that was claimed and the same number measured again is unexplained
and comes first.

Data change in steps, from texts that were trained on to held-out texts, to the target's own greedy
text after the same beginnings, to the user's prompts; one step cannot be taken before the last.
Decoding is followed only through text that the target generates, and never visits a prompt.

Only data, reading, noise, backend and precision need the drafter (`Level.replayed`); the rest is
arithmetic.

Symbols: N texts, R draws, S numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dflash_diag.definitions import DEFINITIONS, Definition, Statistic
from dflash_diag.replay import Replayed
from dflash_diag.shapley import Shares, State, shares
from dflash_diag.stats import DRAWS, Estimate, Floats, bca_apart

SERVED = "tau uniform"
"""Serving's definition; over the anchors that decoding visits it is the walked tau."""
METRIC, REGION, WALK = "metric definition", "prompt region", "anchor population"
UNSEEN, GREEDY, PROMPTS = "data: unseen texts", "data: own greedy text", "data: your prompts"
READING, NOISE = "mask and convention", "training noise"
BACKEND, PRECISION = "hidden-state backend", "precision"
UNEXPLAINED = "unexplained"
WITHOUT_TEXTS = "training texts and the unexplained"
"""What is unexplained where there are no training texts to measure again."""
NONE = Shares((), {}, 1)
"""Where the two ends do not differ."""
DRAFTED = frozenset({READING, NOISE, BACKEND, PRECISION})
"""Factors for which the drafter runs again."""
FACTORS = (METRIC, BACKEND, PRECISION, REGION, WALK, UNSEEN, GREEDY, PROMPTS, READING, NOISE)
"""In the order in which they are shown."""


@dataclass(frozen=True, eq=False)
class Level:
    """One kind of data, and a drafter's blocks on it."""

    factor: str
    """The step of data that leads here; empty for the first."""
    population: str
    """What is resampled: levels of one population have the same members."""
    member: Mapping[str, int]
    """The member of that population that a text comes from, by the text's id."""
    generated: bool
    """Whether the target says this text, so that decoding can be followed through it."""
    replayed: Callable[[State], Replayed]
    """Its blocks, by which of `DRAFTED` are serving's."""


@dataclass(frozen=True, eq=False)
class World:
    """Everything that lies between the two ends."""

    levels: Sequence[Level]
    """From the trainer's data to the user's."""
    sizes: Mapping[str, int]
    """Members of each population."""
    definition: Definition
    """What the training number counts."""
    prompt_too: bool = False
    """Whether the trainer's anchors lie in prompts as well."""
    readings: bool = False
    """Whether the trainer's reading differs from serving's."""
    noise: bool = False
    """Whether the trainer put noise on the states."""
    precision: bool = False
    """Whether the trainer's drafter computed in another precision."""
    backend: bool = False
    """Whether the trainer's target was computed by other code or in another precision."""
    _kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def factors(self) -> list[str]:
        """Factors in which the two ends differ."""
        differs = {
            METRIC: uniform(self.definition) != SERVED,
            REGION: self.prompt_too,
            # Drawn anchors cannot be walked, whatever the trainer's definition says.
            WALK: not (self.definition.population == "walked" and self.levels[0].generated),
            READING: self.readings,
            NOISE: self.noise,
            PRECISION: self.precision,
            BACKEND: self.backend,
        }
        data = {level.factor for level in self.levels if level.factor}
        return [f for f in FACTORS if differs.get(f, f in data)]

    def feasible(self, state: State) -> bool:
        """Whether a mixture of the two ends can be measured."""
        steps = [level.factor in state for level in self.levels if level.factor]
        if steps != sorted(steps, reverse=True):
            return False
        if {BACKEND, PRECISION} & {*self.factors} - state:
            # These can be slow here, so the trainer's are kept to the first texts.
            return not any(steps) and not {READING, NOISE} & state
        follows = self._level(state).generated and not self._prompt_too(state)
        return follows or not self._walks(state)

    def measure(self, state: State) -> tuple[Level, Statistic, list[int]]:
        """The number in a state, with the member that each of its texts comes from."""
        level = self._level(state)
        of = DRAFTED & state
        rows = {"walk": self._walks(state), "prompt_too": self._prompt_too(state)}
        key = (level.factor, of, *rows.values())
        if key not in self._kept:
            self._kept[key] = level.replayed(of).rows(**rows)
        scores = self._kept[key]
        name = SERVED if METRIC in state else uniform(self.definition)
        members = [level.member[scores.prompt_ids[i]] for i in np.unique(scores.prompt)]
        return level, DEFINITIONS[name].measure(scores), members

    def _level(self, state: State) -> Level:
        return [one for one in self.levels if not one.factor or one.factor in state][-1]

    def _walks(self, state: State) -> bool:
        return WALK in state or WALK not in self.factors

    def _prompt_too(self, state: State) -> bool:
        return REGION in self.factors and REGION not in state


def uniform(definition: Definition) -> str:
    """Name of the same count over given blocks; which blocks these are is another factor."""
    parts = [definition.name.partition(definition.population)[0].strip(), "uniform"]
    return " ".join([*parts, *([definition.average] if definition.average != "micro" else [])])


@dataclass(frozen=True)
class Bar:
    """One factor's part of the gap."""

    factors: tuple[str, ...]
    change: Estimate
    """Tokens by which the number moves; negative where it falls."""
    lo_order: float
    hi_order: float
    """Smallest and largest part over the orders of changing factors."""

    @property
    def name(self) -> str:
        """The factor, or those that cannot be told apart."""
        return " and ".join(self.factors)


@dataclass(frozen=True, eq=False)
class Gap:
    """A training number, serving's tau, and what lies between."""

    claimed: float | None
    replayed: Estimate
    served: Estimate
    bars: tuple[Bar, ...]
    """The unexplained part first, where a number was claimed."""
    n_orders: int


def decompose(world: World, claimed: float | None, *, seed: int, draws: int = DRAWS) -> Gap:
    """Divide the gap, with 95 % intervals over all populations.

    Parameters
    ----------
    claimed
        What training printed; None if nobody knows.
    """
    whole = frozenset(world.factors)
    plan = shares(world.factors, world.feasible, seed=seed) if whole else NONE
    states = dict.fromkeys([frozenset(), *plan.states, whole])
    measured = {state: world.measure(state) for state in states}
    names = list(world.sizes)

    def numbers(weights: Sequence[Floats]) -> Floats:
        """[R, S]: replayed, served, unexplained, and each group's part."""
        values = {}
        for state, (level, statistic, members) in measured.items():
            values[state] = statistic.value(weights[names.index(level.population)][:, members])
        start, end = values[frozenset()], values[whole]
        unexplained = np.zeros_like(start) if claimed is None else start - claimed
        return np.stack([start, end, unexplained, *plan.means(values)], axis=1)

    found = bca_apart(numbers, list(world.sizes.values()), seed=seed, draws=draws)
    n = [world.sizes[name] for name in names]
    estimates = [Estimate(*one, min(n), "tokens") for one in found]
    points = {s: float(one[1].value(np.ones((1, len(one[2]))))[0]) for s, one in measured.items()}
    bars = [
        Bar(group, change, *ends)
        for group, change, ends in zip(plan.groups, estimates[3:], plan.ranges(points), strict=True)
    ]
    if claimed is not None:
        same = estimates[2].value or 0.0
        name = WITHOUT_TEXTS if world.levels[0].generated else UNEXPLAINED
        bars.insert(0, Bar((name,), estimates[2], same, same))
    return Gap(claimed, estimates[0], estimates[1], tuple(bars), plan.n_orders)
