"""Whether one drafter is really better than another, on the prompts that both were scored on.

The number is walked tau, pooled over rounds (what greedy decoding gets), and the difference is
paired: a resample takes the same prompts on both sides, so what makes a prompt easy or hard
cancels. Drafters of different block sizes compare as well as any, since nothing but tokens and
rounds of each prompt is looked at.

Symbols: N prompts, M drafters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from dflash_diag import storage
from dflash_diag.causes import HARMLESS
from dflash_diag.errors import BadInput
from dflash_diag.stats import (
    DRAWS,
    FEW_PROMPTS,
    Estimate,
    Floats,
    Ratio,
    differences,
    estimates,
    holm,
    prompts_needed,
    ratio,
    sign_flip,
)

MARGIN = HARMLESS
"""Tokens a round: a gain that is certainly smaller is none worth having (the doctor's bound)."""
LEVEL = 0.05
"""Of the sign-flip test, after Holm over all pairs that were looked at."""


class Decision(NamedTuple):
    """Answer to "is the first really better?"."""

    answer: Literal["yes", "no", "open"]
    n_more: int | None = None
    """Prompts that would probably settle what is open."""

    def __str__(self) -> str:
        if self.answer != "open":
            return self.answer
        return f"needs {self.n_more} more prompt{'' if self.n_more == 1 else 's'}"


@dataclass(frozen=True, eq=False)
class Side:
    """What decoding got with one drafter.

    Raises
    ------
    ValueError
        Not one id, one number of tokens and one of rounds for each of at least one prompt.
    """

    name: str
    step: int | None
    """Training step, if it is known."""
    capture: str
    """Hash of the text that was decoded (`text_digest`): only equal text is compared."""
    ids: tuple[str, ...]
    """The N prompts that were scored."""
    tokens: Floats
    """[N] tokens that its rounds committed: the sum of accepted + 1."""
    rounds: Floats
    """[N] number of its rounds."""

    def __post_init__(self) -> None:
        for name in ("tokens", "rounds"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), np.float64))
        shape = (len(self.ids),)
        if not self.ids or len(set(self.ids)) != len(self.ids):
            raise ValueError("a side needs prompts, each of them once")
        if self.tokens.shape != shape or self.rounds.shape != shape or (self.rounds < 1).any():
            raise ValueError("a side needs tokens, and at least one round, for each prompt")

    @classmethod
    def of(
        cls,
        jumps: Mapping[str, Sequence[int]],
        *,
        name: str,
        capture: str,
        step: int | None = None,
    ) -> Side:
        """The side of a drafter whose rounds are known: accepted + 1 of each, by prompt."""
        tokens = np.array([sum(rounds) for rounds in jumps.values()], np.float64)
        rounds = np.array([len(rounds) for rounds in jumps.values()], np.float64)
        return cls(name, step, capture, tuple(jumps), tokens, rounds)

    def at(self, ids: Sequence[str]) -> Ratio:
        """Walked tau as per-prompt sums, of some of its prompts."""
        rows = [self.ids.index(one) for one in ids]
        return ratio(self.tokens[rows], self.rounds[rows], "tokens")

    def tau(self, *, seed: int, draws: int = DRAWS) -> Estimate:
        """Walked tau, pooled, on all of its prompts."""
        return estimates({"tau": self.at(self.ids)}, seed=seed, draws=draws)["tau"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """First less second, on the prompts that both have."""

    a: str
    b: str
    delta_tau: Estimate
    """Difference of walked tau, pooled over rounds [tokens a round]."""
    delta_tau_macro: Estimate
    """Difference of the means of per-prompt tau, which the test is about."""
    p: float
    """Of a two-sided sign-flip test of the per-prompt differences."""
    p_adjusted: float
    """The same after Holm over all pairs that were looked at."""
    n_prompts: int
    comparisons: int = 1
    """Pairs that were looked at."""
    delta: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Difference of walked tau of each prompt, by id."""

    @property
    def verdict(self) -> Decision:
        """Whether the first is really better.

        *yes*: the interval lies above 0 and the test agrees; *no*: it excludes a gain of `MARGIN`.
        Otherwise it is open, and prompts are asked for that would, at the present spread, decide
        with a probability of 0.8.
        """
        lo, hi = self.delta_tau.lo, self.delta_tau.hi
        if hi is not None and hi < MARGIN:
            return Decision("no")
        if lo is not None and lo > 0 and self.p_adjusted <= LEVEL:
            return Decision("yes")
        return Decision("open", max(1, self._needed() - self.n_prompts))

    @property
    def better(self) -> str | None:
        """The name of the one whose lead is sure, if any."""
        lo, hi = self.delta_tau.lo, self.delta_tau.hi
        if lo is None or hi is None or self.p_adjusted > LEVEL:
            return None
        return self.a if lo > 0 else self.b if hi < 0 else None

    def _needed(self) -> int:
        """Prompts after which the question would probably be settled one way or the other."""
        delta, macro = self.delta_tau, self.delta_tau_macro
        if delta.value is None or delta.lo is None:
            return FEW_PROMPTS
        gains = delta.value >= MARGIN / 2
        wanted = [prompts_needed(delta, 0 if gains else MARGIN, comparisons=self.comparisons)]
        if delta.lo > 0:  # it is the test that does not agree yet
            wanted.append(prompts_needed(macro, 0, comparisons=self.comparisons))
        # Two equal signs of two have a p-value of a half, however large the difference.
        least = 1 + math.ceil(math.log2(self.comparisons / LEVEL))
        return max([least, *(n for n in wanted if n is not None)])

    def to_json(self) -> dict[str, Any]:
        decision = self.verdict
        return {
            "a": self.a,
            "b": self.b,
            "delta_tau": self.delta_tau.to_json(),
            "n_prompts": self.n_prompts,
            "verdict": str(decision),
            "n_more": decision.n_more,
            "better": self.better,
            "delta_tau_macro": self.delta_tau_macro.to_json(),
            "p": self.p,
            "p_adjusted": self.p_adjusted,
        }


def pair(a: Side, b: Side, *, seed: int, draws: int = DRAWS) -> Pair:
    """Compare two drafters, the first minus the second, on the prompts that both have.

    Prompts are taken in the order of their ids, so that no number depends on how they were listed.

    Raises
    ------
    BadInput
        They were scored on different text, or share no prompt.
    """
    common = common_prompts(a, b)
    left, right = a.at(common), b.at(common)
    found = differences(
        {"micro": (left, right), "macro": (left.macro(), right.macro())}, seed=seed, draws=draws
    )
    apart = left.per_prompt() - right.per_prompt()
    p = sign_flip(apart, seed=seed, draws=draws)
    return Pair(
        a=a.name,
        b=b.name,
        delta_tau=found["micro"],
        delta_tau_macro=found["macro"],
        p=p,
        p_adjusted=p,
        n_prompts=len(common),
        delta=dict(zip(common, apart.tolist(), strict=True)),
    )


def pairs(sides: Sequence[Side], *, seed: int, draws: int = DRAWS) -> list[Pair]:
    """All pairs of M drafters, earlier ones minus later ones, p-values after Holm over all.

    Raises
    ------
    BadInput
        Fewer than two, or two that cannot be compared.
    """
    if len(sides) < 2:
        raise BadInput(f"{len(sides)} drafter to compare", "at least two")
    made = [pair(a, b, seed=seed, draws=draws) for a, b in combinations(sides, 2)]
    adjusted = holm([one.p for one in made])
    return [
        replace(one, p_adjusted=p, comparisons=len(made))
        for one, p in zip(made, adjusted, strict=True)
    ]


def shared(sides: Iterable[Side]) -> list[str]:
    """Ids of the prompts that all have: in their order, or sorted where that differs.

    Resamples depend on the order, so prompts in the capture's own order give the intervals that are
    shown everywhere else.
    """
    listed = [one.ids for one in sides]
    common = set(listed[0]).intersection(*listed[1:])
    orders = {tuple(one for one in ids if one in common) for ids in listed}
    return list(orders.pop()) if len(orders) == 1 else sorted(common)


def common_prompts(a: Side, b: Side) -> list[str]:
    """Ids of the prompts that both have, in the order of `shared`.

    Raises
    ------
    BadInput
        They were scored on different text, or share no prompt.
    """
    if a.capture != b.capture:
        raise BadInput(
            f"{a.name} and {b.name} were scored on different text",
            "the same prompts, continued by the same target to the same length",
            "score both on one capture (--capture)",
        )
    common = shared([a, b])
    if not common:
        raise BadInput(
            f"no prompt was scored for both {a.name} and {b.name}", "the same prompts for both"
        )
    return common


def text_digest(texts: Iterable[tuple[str, int, Sequence[int]]]) -> str:
    """Hash of prompts and continuations: id, number of prompt tokens, and all tokens of each.

    The order of the prompts does not count, nor does what else a capture holds.
    """
    return storage.content_key("text/1", sorted([name, p, list(t)] for name, p, t in texts))
