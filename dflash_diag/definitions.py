"""Every number that a training or serving stack prints about acceptance, from one table of scores.

One drafter on one text has many "acceptance lengths": counted over all anchors or along the walk of
decoding, pooled or as a mean of per-prompt means, with or without the bonus token, from blocks or
as a product of slot accuracies, for a chain, a tree or an oracle. Each is a `Definition` here, with
the names under which stacks print it.

A name is what is counted, then the anchors, then the average where it is not the pooled one:
``tau walked macro``, ``topk_oracle@8 + 1 uniform``. Slots whose label a loss mask leaves out
(``valid``) end a run of hits, as in speculators; the ``_passing`` definitions skip them, as
SpecForge and Automodel do. Where all slots are valid the two agree.

Left out, since a table of scores does not hold the target's distribution: acceptance under
sampling, such as DeepSpec's and DSpark's 1 - L1/2 per slot and the lengths made of it. Left out
too is what clips a run at a stop token or a maximal length.

Symbols: N prompts, A anchors, D proposed tokens, S sums, R resamples, k a slot 1..D or a number of
candidates, n nodes of a tree, the root not counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_diag import stats
from dflash_diag.metrics import Lengths, Scored, leading, walked
from dflash_diag.stats import DRAWS, Estimate, Floats, Ratio, ratio
from dflash_diag.trees import ddtree_depths

Hits = NDArray[np.bool_]

WIDTHS = (1, 4, 8, 16)
"""Candidates a slot, nodes of a tree, or slots of a short chain, for which numbers are given."""
POPULATIONS = ("uniform", "walked")


class Statistic(NamedTuple):
    """A number as a function of prompts, so that prompts can be resampled through it."""

    ratios: tuple[Ratio, ...]
    """S sums over the same N prompts."""
    combine: Callable[[Floats], Floats]
    """[..., S] quotients of the sums to [...] the number."""

    def value(self, weights: Floats | None = None) -> Floats:
        """The number for each row of prompt weights.

        Parameters
        ----------
        weights
            [R, N] how often each prompt counts; None: once, as a single row.

        Returns
        -------
        Floats
            [R]; NaN where nothing is left to divide by.
        """
        top = np.stack([one.numerators for one in self.ratios], axis=1)
        bottom = np.stack([one.denominators for one in self.ratios], axis=1)
        rows = np.ones((1, len(top))) if weights is None else weights
        over, under = rows @ top, rows @ bottom
        quotients = np.divide(over, under, out=np.full(over.shape, np.nan), where=under > 0)
        return self.combine(quotients)


class Table:
    """Hits, runs and tree depths of one table of scores, each computed once for all definitions."""

    def __init__(self, scores: Scored) -> None:
        self.scores = scores
        ids, prompt = np.unique(scores.prompt, return_inverse=True)
        self.n_prompts, self.prompt = len(ids), prompt
        self.n_proposed: int = scores.labels.shape[1]
        shape = scores.labels.shape
        self.valid: Hits = np.ones(shape, bool) if scores.valid is None else scores.valid
        self.hits: Hits = np.logical_and(np.equal(scores.proposed, scores.labels), self.valid)
        self.blocks: Hits = np.logical_or.reduce(self.valid, axis=1)
        """[A] blocks that have a slot to be judged by."""

    @cached_property
    def has_walk(self) -> bool:
        """Whether each prompt's anchors are consecutive, so that decoding can be followed."""
        same_prompt = np.diff(self.prompt) == 0
        return bool((np.diff(self.scores.anchor)[same_prompt] == 1).all())

    @cached_property
    def streak(self) -> Lengths:
        """[A] leading hits."""
        return leading(self.hits)

    def capped(self, n: int) -> Lengths:
        """[A] leading hits among the first n slots."""
        return np.minimum(self.streak, n)

    @cached_property
    def passing(self) -> Lengths:
        """[A] hits before the first miss, where a slot without a valid label is no miss."""
        alive = np.logical_and.accumulate(self.hits | ~self.valid, axis=1)
        length: Lengths = (alive & self.valid).sum(axis=1, dtype=np.int64)
        return length

    def oracle(self, k: int) -> Lengths:
        """[A] leading labels among the top k of their slots."""
        return leading((self.scores.rank < k) & self.valid)

    def tree(self, n: int) -> Lengths:
        """[A] depth that the labels reach in the tree of n nodes."""
        at: Lengths = self._trees[:, WIDTHS.index(n)]
        return at

    @cached_property
    def _trees(self) -> Lengths:
        rows = self.scores.topk_logprobs
        # A rank beyond the stored candidates never matches.
        rank = np.where(self.valid, self.scores.rank, rows.shape[2])
        return ddtree_depths(rows, rank, WIDTHS)

    def visits(self, length: Lengths, population: str) -> Hits:
        """[A] anchors that a population counts when rounds accept ``length`` proposals."""
        if population == "uniform":
            return self.blocks
        return walked(self.prompt, self.scores.anchor, length + 1) & self.blocks

    def rounds(self, population: str) -> Hits:
        """[A] anchors that a population counts for the plain chain."""
        return self.blocks if population == "uniform" else self._walk

    @cached_property
    def _walk(self) -> Hits:
        return self.visits(self.streak, "walked")

    def mean(self, values: NDArray[Any], over: Hits, unit: str) -> Ratio:
        """Sum of ``values`` [A] over the chosen anchors, for each prompt, and their number."""
        return ratio(self.total(values * over), self.total(over), unit)

    def total(self, values: NDArray[Any]) -> Floats:
        """Sum of ``values`` [A] for each prompt [N]."""
        summed = np.bincount(self.prompt, weights=values, minlength=self.n_prompts)
        return summed.astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Definition:
    """One way to count acceptance."""

    kind: str
    """What is counted: ``tau``, ``topk_oracle``, ..."""
    number: int | None = None
    """Slot, candidates or nodes, where the kind has such a number."""
    bonus: bool = False
    """Whether 1 is added to a kind that has none by itself."""
    population: str
    """``uniform`` or ``walked``."""
    average: str = "micro"
    """``micro`` (pooled) or ``macro`` (mean of per-prompt means)."""
    means: str
    """One sentence."""
    unit: str
    """``tokens`` or ``share``."""
    stacks: Mapping[str, str]
    """Who prints it, and under which name."""
    count: Callable[[Table], Statistic]

    @property
    def name(self) -> str:
        """Name among all definitions."""
        parts = [
            self.kind if self.number is None else f"{self.kind}@{self.number}",
            "+ 1" if self.bonus else "",
            self.population,
            "" if self.average == "micro" else self.average,
        ]
        return " ".join(filter(None, parts))

    def measure(self, scores: Scored) -> Statistic:
        """The number on a table of scores.

        Raises
        ------
        ValueError
            A walked number where a prompt's anchors have gaps.
        """
        return self.count(Table(scores))


def measure(
    scores: Scored, names: Iterable[str] | None = None, *, seed: int, draws: int = DRAWS
) -> dict[str, Estimate]:
    """All definitions that a table of scores can give, with 95 % intervals over prompts.

    Parameters
    ----------
    names
        Only these.
    """
    known = definitions(scores.labels.shape[1])
    wanted = set(known if names is None else names)
    table = Table(scores)
    chosen = {
        name: one
        for name, one in known.items()
        if name in wanted and (one.population == "uniform" or table.has_walk)
    }
    found = estimates({n: one.count(table) for n, one in chosen.items()}, seed=seed, draws=draws)
    units = {name: one.unit for name, one in chosen.items()}
    return {
        name: Estimate(one.value, one.lo, one.hi, one.n, units[name]) for name, one in found.items()
    }


def estimates(
    statistics: Mapping[str, Statistic], *, seed: int, draws: int = DRAWS
) -> dict[str, Estimate]:
    """Value and BCa interval of many statistics over the same prompts, resampled together."""
    if not statistics:
        return {}
    listed = list(statistics.values())
    counted = np.array(
        [np.logical_and.reduce([r.denominators > 0 for r in one.ratios]).sum() for one in listed]
    )

    def together(weights: Floats) -> Floats:
        return np.stack([one.value(weights) for one in listed], axis=1)

    n = len(listed[0].ratios[0].numerators)
    found = stats.bca(together, n, counted, seed=seed, draws=draws)
    return {
        name: Estimate(*numbers, n, one.ratios[0].unit)
        for (name, one), numbers, n in zip(statistics.items(), found, counted, strict=True)
    }


def definitions(n_proposed: int) -> dict[str, Definition]:
    """`DEFINITIONS` and those of each of D slots, by name."""
    listed = [one for k in range(1, n_proposed + 1) for one in _of_slot(k)]
    return {**DEFINITIONS, **{one.name: one for one in listed}}


def definition(name: str) -> Definition:
    """The definition of a name, whatever its number of slots, candidates or nodes.

    Raises
    ------
    KeyError
        There is no such definition.
    """
    number = re.search(r"@(\d+)", name)
    if name in DEFINITIONS or number is None:
        return DEFINITIONS[name]
    n = int(number[1])
    return {one.name: one for one in (*_candidates([n]), *_of_slot(n))}[name]


# --- counting ------------------------------------------------------------------------------------


def _single(one: Ratio) -> Statistic:
    return Statistic((one,), _only)


def _only(quotients: Floats) -> Floats:
    one: Floats = quotients[..., 0]
    return one


def _length(
    of: Callable[[Table], Lengths], population: str, *, bonus: bool = False, macro: bool = False
) -> Callable[[Table], Statistic]:
    """Mean of a round's length; a walk jumps by that length and the bonus token."""

    def count(table: Table) -> Statistic:
        length = of(table)
        found = table.mean(length + int(bonus), table.visits(length, population), "tokens")
        return _single(found.macro() if macro else found)

    return count


def _rate(population: str, *, bonus: bool) -> Callable[[Table], Statistic]:
    """Accepted over drafted tokens, or both with the bonus token."""

    def count(table: Table) -> Statistic:
        rounds = table.rounds(population)
        over = rounds * (table.n_proposed + int(bonus))
        tokens = table.total((table.streak + int(bonus)) * rounds)
        return _single(ratio(tokens, table.total(over), "share"))

    return count


def _accuracy(population: str, *, macro: bool = False) -> Callable[[Table], Statistic]:
    def count(table: Table) -> Statistic:
        slots = table.valid & table.rounds(population)[:, None]
        right, all_ = (table.hits & slots).sum(axis=1), slots.sum(axis=1)
        found = ratio(table.total(right), table.total(all_), "share")
        return _single(found.macro() if macro else found)

    return count


def _full(population: str) -> Callable[[Table], Statistic]:
    def count(table: Table) -> Statistic:
        rounds = table.rounds(population)
        return _single(table.mean(table.streak == table.n_proposed, rounds, "share"))

    return count


def _slot(kind: str, k: int, population: str) -> Callable[[Table], Statistic]:
    def count(table: Table) -> Statistic:
        rounds = table.rounds(population)
        survived, before = table.streak >= k, table.streak >= k - 1
        if kind == "marginal":
            found = table.mean(table.hits[:, k - 1], rounds & table.valid[:, k - 1], "share")
        elif kind == "survival":
            found = table.mean(survived, rounds, "share")
        else:
            found = table.mean(survived, rounds & before, "share")
        return _single(found)

    return count


def _product(*, bonus: bool) -> Callable[[Table], Statistic]:
    """Sum over k of the product of the first k slots' accuracies."""

    def combine(accuracies: Floats) -> Floats:
        total: Floats = np.cumprod(accuracies, axis=-1).sum(axis=-1) + int(bonus)
        return total

    def count(table: Table) -> Statistic:
        slots = range(1, table.n_proposed + 1)
        means = [_slot("marginal", k, "uniform")(table).ratios[0] for k in slots]
        return Statistic(tuple(means), combine)

    return count


def _streak(table: Table) -> Lengths:
    return table.streak


def _passing(table: Table) -> Lengths:
    return table.passing


def _oracle(k: int) -> Callable[[Table], Lengths]:
    return lambda table: table.oracle(k)


def _tree(n: int) -> Callable[[Table], Lengths]:
    return lambda table: table.tree(n)


def _chain(n: int) -> Callable[[Table], Lengths]:
    return lambda table: table.capped(n)


# --- the dictionary ------------------------------------------------------------------------------

_OVER = {
    "uniform": "over all anchors",
    "walked": "over the anchors that decoding visits",
}
_HOW = {"micro": "pooled", "macro": "mean of per-prompt means"}
_LENGTH_STACKS: Mapping[tuple[str, str, str], Mapping[str, str]] = {
    ("streak", "uniform", "micro"): {"dashboards": "streak"},
    ("tau", "uniform", "micro"): {
        "speculators >= 0.9": "eal",
        "SpecForge": "accept_len (Domino), tau (DSpark)",
    },
    ("streak", "walked", "micro"): {"vLLM": "accepted tokens / drafts"},
    ("tau", "walked", "micro"): {
        "vLLM": "Mean acceptance length",
        "SGLang": "spec_accept_length",
        "DeepSpec": "accept_len",
        "Model-Optimizer": "AR",
        "verl-SpeCo": "accept_len",
        "SpecForge": "simulated_acc_len",
    },
    ("tau", "walked", "macro"): {"z-lab": "acceptance length", "DDTree": "acceptance length"},
}


def _lengths() -> Iterable[Definition]:
    for population in POPULATIONS:
        for average in _HOW:
            for kind in ("streak", "tau"):
                with_bonus = kind == "tau"
                what = "Accepted tokens" + (" and the bonus token" if with_bonus else "")
                yield Definition(
                    kind=kind,
                    population=population,
                    average=average,
                    means=f"{what} a round, {_OVER[population]}, {_HOW[average]}.",
                    unit="tokens",
                    stacks=_LENGTH_STACKS.get((kind, population, average), {}),
                    count=_length(_streak, population, bonus=with_bonus, macro=average == "macro"),
                )
    for kind in ("streak", "tau"):
        with_bonus = kind == "tau"
        yield Definition(
            kind=f"{kind}_passing",
            population="uniform",
            means=(
                f"Like {kind} over all anchors, but a slot that the loss mask leaves out does not "
                "end the run."
            ),
            unit="tokens",
            stacks=(
                {"Automodel": "accept_len"} if with_bonus else {"SpecForge": "accept_len (DFlash)"}
            ),
            count=_length(_passing, "uniform", bonus=with_bonus),
        )


def _products() -> Iterable[Definition]:
    for bonus in (False, True):
        yield Definition(
            kind="eal_product",
            bonus=bonus,
            population="uniform",
            means=(
                "Sum over k of the product of the first k slots' accuracies, as if slots were "
                f"independent, {'the bonus token included' if bonus else 'no bonus token'}."
            ),
            unit="tokens",
            stacks={} if bonus else {"speculators < 0.9": "eal"},
            count=_product(bonus=bonus),
        )


def _shares() -> Iterable[Definition]:
    for population in POPULATIONS:
        uniform = population == "uniform"
        for average in _HOW:
            yield Definition(
                kind="accuracy",
                population=population,
                average=average,
                means=f"Share of right slots among all slots, {_OVER[population]}, "
                f"{_HOW[average]}.",
                unit="share",
                stacks=(
                    {
                        "SpecForge": "accuracy",
                        "speculators": "full_acc",
                        "Automodel": "accuracy",
                        "Model-Optimizer": "train_acc",
                        "verl-SpeCo": "accuracy",
                    }
                    if uniform and average == "micro"
                    else {}
                ),
                count=_accuracy(population, macro=average == "macro"),
            )
        yield Definition(
            kind="full_block",
            population=population,
            means=f"Share of blocks with every slot right, {_OVER[population]}.",
            unit="share",
            stacks={"SpecForge": "full-block accuracy"} if uniform else {},
            count=_full(population),
        )
        yield Definition(
            kind="draft_acceptance_rate",
            population=population,
            means=f"Accepted over drafted tokens, {_OVER[population]}.",
            unit="share",
            stacks=(
                {} if uniform else {"vLLM": "Draft acceptance rate", "SGLang": "spec_accept_rate"}
            ),
            count=_rate(population, bonus=False),
        )
        yield Definition(
            kind="verify_rate",
            population=population,
            means=(
                "Accepted tokens with the bonus over verified tokens with the anchor, "
                f"{_OVER[population]}."
            ),
            unit="share",
            stacks={} if uniform else {"DeepSpec": "verify_rate", "verl-SpeCo": "accept_rate"},
            count=_rate(population, bonus=True),
        )


def _candidates(numbers: Iterable[int] = WIDTHS) -> Iterable[Definition]:
    for population in POPULATIONS:
        uniform, over = population == "uniform", _OVER[population]
        for n in numbers:
            for bonus in (False, True):
                yield Definition(
                    kind="topk_oracle",
                    number=n,
                    bonus=bonus,
                    population=population,
                    means=(
                        f"Leading slots whose label is among the top {n}, {over}"
                        f"{', plus 1' if bonus else ''}."
                    ),
                    unit="tokens",
                    stacks=(
                        {
                            "SpecForge": f"unary top-{n} oracle accepted length",
                            "dashboards": f"dds{n}",
                        }
                        if uniform
                        else {}
                    ),
                    count=_length(_oracle(n), population, bonus=bonus),
                )
            yield Definition(
                kind="ddtree_tau",
                number=n,
                population=population,
                means=(
                    f"Accepted depth in the best-first tree of {n} "
                    f"node{'' if n == 1 else 's'}, plus the bonus token, {over}."
                ),
                unit="tokens",
                stacks=(
                    {"dashboards": f"dds{n}"}
                    if uniform
                    else {"DDTree": f"acceptance length at budget {n}"}
                ),
                count=_length(_tree(n), population, bonus=True),
            )
            yield Definition(
                kind="chain_tau",
                number=n,
                population=population,
                means=f"tau of a chain of the first {n} slots, {over}.",
                unit="tokens",
                stacks={} if uniform else {"vLLM": f"with num_speculative_tokens {n}"},
                count=_length(_chain(n), population, bonus=True),
            )


_SLOT_MEANS = {
    "marginal": "Share of right proposals at slot {k}",
    "survival": "Share of blocks whose slots 1 to {k} are all right",
    "conditional": "Share of right proposals at slot {k} where all before are right",
}


def _of_slot(k: int) -> Iterable[Definition]:
    stacks: Mapping[tuple[str, str], Mapping[str, str]] = {
        ("marginal", "uniform"): {
            "speculators": f"position_{k}_acc",
            "SpecForge": f"accuracy of position {k}",
            "verl-SpeCo": f"accuracy of position {k}",
        },
        ("survival", "walked"): {
            "vLLM": f"Per-position acceptance rate, {k}",
            "SGLang": f"spec_correct_drafts_histogram, at least {k}",
            "DeepSpec": f"accept_rate@{k - 1}",
        },
        ("conditional", "walked"): {"DSpark": f"conditional acceptance at {k}"},
    }
    for population in POPULATIONS:
        for kind, means in _SLOT_MEANS.items():
            yield Definition(
                kind=kind,
                number=k,
                population=population,
                means=f"{means.format(k=k)}, {_OVER[population]}.",
                unit="share",
                stacks=stacks.get((kind, population), {}),
                count=_slot(kind, k, population),
            )


DEFINITIONS: dict[str, Definition] = {
    one.name: one for family in (_lengths, _products, _shares, _candidates) for one in family()
}
"""Definitions that any number of slots has; `definitions` adds those of single slots."""
