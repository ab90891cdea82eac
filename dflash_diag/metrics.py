"""Acceptance numbers of one drafter on one set of prompts, each named by what it counts.

Two choices hide behind "accepted length", and both are spelled out in every name:

- the *population*: ``uniform`` counts every anchor, ``walked`` only those that decoding visits
  (start at the first generated token, jump accepted + 1);
- the *average*: ``micro`` pools rounds, ``macro`` is the mean of per-prompt means.

tau counts the bonus token, streak and the top-k oracle do not. On one population
tau = 1 + sum_k S_k, S_k being the survival to proposal k.

Symbols: N prompts, A anchors, D proposed tokens, k a proposal 1..D or a number of candidates,
n nodes of a tree, the root not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash_diag.errors import BadInput
from dflash_diag.stats import DRAWS, Estimate, Ratio, estimates, few_prompts_note, ratio
from dflash_diag.storage import plain
from dflash_diag.trees import BUDGETS, ddtree_depths

Ints = NDArray[np.integer]
Lengths = NDArray[np.int64]

SCHEMA = "dflash_diag.score/1"
ORACLE_WIDTHS = (1, 4, 8)
"""Candidates a slot that the top-k oracle is reported for."""
POPULATIONS = {"uniform": "", "walked": "_walked"}
"""Population, and the suffix it gives to keys that are over uniform anchors unless they say so."""


class Scored(Protocol):
    """What is read from `dflash_diag.scoring.Scores`: one row an anchor, by prompt and position."""

    @property
    def prompt_ids(self) -> list[str]:
        """Ids of the prompts."""

    @property
    def unscored(self) -> list[dict[str, Any]]:
        """Prompts without a complete block: ``id`` and ``reason``."""

    @property
    def prompt(self) -> Ints:
        """[A] index into ``prompt_ids``."""

    @property
    def anchor(self) -> Ints:
        """[A] position of the anchor."""

    @property
    def labels(self) -> Ints:
        """[A, D] the target's greedy tokens."""

    @property
    def proposed(self) -> Ints:
        """[A, D] the drafter's tokens."""

    @property
    def rank(self) -> Ints:
        """[A, D] rank of the label in the drafter's distribution, 0 being its top choice."""

    @property
    def topk_logprobs(self) -> NDArray[np.floating]:
        """[A, D, min(64, V)] the drafter's best log-probabilities, descending."""

    @property
    def valid(self) -> NDArray[np.bool_] | None:
        """[A, D] slots whose label a loss mask keeps; None where every slot is."""

    @property
    def block_size(self) -> int:
        """B."""

    @property
    def convention(self) -> Mapping[str, Any]:
        """Resolved reading of the weights, as JSON."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the numbers come from, as JSON."""


def leading(hits: NDArray[np.bool_]) -> Lengths:
    """Length [A] of the run of hits [A, D] that starts at the first proposal."""
    length: Lengths = np.logical_and.accumulate(hits, axis=1).sum(axis=1, dtype=np.int64)
    return length


def accepted(scores: Scored) -> Lengths:
    """Leading proposals equal to the target's greedy tokens [A], the bonus token excluded."""
    return leading(np.equal(scores.proposed, scores.labels))


def walked(prompt: Ints, anchor: Ints, jumps: Ints) -> NDArray[np.bool_]:
    """Anchors that decoding visits.

    Parameters
    ----------
    prompt, anchor
        [A] prompt and position of each anchor; a prompt's anchors are consecutive positions, the
        first being its first generated token.
    jumps
        [A] tokens that a round at this anchor commits: accepted + 1.

    Returns
    -------
    NDArray
        [A] bool. The walk of a prompt ends when it passes its last anchor.

    Raises
    ------
    ValueError
        Anchors with a gap, or a jump below 1.
    """
    same_prompt = np.diff(prompt) == 0
    if not (np.diff(anchor)[same_prompt] == 1).all():
        msg = "the anchors of a prompt must be consecutive positions, in order"
        raise ValueError(msg)
    if len(jumps) and jumps.min() < 1:
        msg = f"a round commits at least 1 token; found {jumps.min()}"
        raise ValueError(msg)
    visited = np.zeros(len(anchor), dtype=bool)
    ends = [*(np.flatnonzero(~same_prompt) + 1).tolist(), len(anchor)]
    for start, end in zip([0, *ends], ends, strict=False):
        row = start
        while row < end:
            visited[row] = True
            row += jumps[row]
    return visited


def scored_prompts(scores: Scored) -> list[str]:
    """Ids of the prompts that have anchors: the N rows of every `Ratio` of `ratios`."""
    return [scores.prompt_ids[i] for i in np.unique(scores.prompt)]


def ratios(scores: Scored, *, trees: bool = True) -> dict[str, Ratio]:
    """Per-prompt sums behind every number, ready for intervals or for a paired comparison.

    Parameters
    ----------
    trees
        Whether to build the draft trees too, which takes most of the time.

    Returns
    -------
    dict
        ``tau_{uniform,walked}_{micro,macro}``, ``streak_{uniform,walked}`` and, over uniform
        anchors or with ``_walked`` before the ``@``, ``marginal@k``, ``survival@k``,
        ``conditional@k``, ``ddtree_tau@n`` and ``topk_oracle@k``. A walked tree or oracle number
        walks by its own accepted length.

    Raises
    ------
    BadInput
        There is no anchor to count.
    """
    if not len(scores.anchor):
        raise BadInput(
            f"no scorable prompt among {len(scores.prompt_ids) + len(scores.unscored)}",
            f"a continuation of more than {scores.labels.shape[1]} tokens (one complete block)",
            "raise --max-new-tokens, or give prompts that the target answers at length",
        )
    ids, prompt = np.unique(scores.prompt, return_inverse=True)

    def total(values: NDArray[Any]) -> NDArray[Any]:
        return np.bincount(prompt, weights=values, minlength=len(ids))

    def mean(length: NDArray[Any], over: NDArray[np.bool_], unit: str = "tokens") -> Ratio:
        return ratio(total(length * over), total(over), unit)

    def visits(length: Lengths, population: str) -> NDArray[np.bool_]:
        if population == "uniform":
            return np.ones(len(prompt), dtype=bool)
        return walked(prompt, scores.anchor, length + 1)

    hits = np.equal(scores.proposed, scores.labels)
    streak = leading(hits)
    budgets = BUDGETS if trees else ()
    depths = ddtree_depths(scores.topk_logprobs, scores.rank, budgets)
    found: dict[str, Ratio] = {}
    for population, suffix in POPULATIONS.items():
        rounds = visits(streak, population)
        found[f"tau_{population}_micro"] = mean(streak + 1, rounds)
        found[f"tau_{population}_macro"] = mean(streak + 1, rounds).macro()
        found[f"streak_{population}"] = mean(streak, rounds)
        for k in range(1, hits.shape[1] + 1):
            survived, before = streak >= k, streak >= k - 1
            found[f"marginal{suffix}@{k}"] = mean(hits[:, k - 1], rounds, "share")
            found[f"survival{suffix}@{k}"] = mean(survived, rounds, "share")
            found[f"conditional{suffix}@{k}"] = mean(survived, rounds & before, "share")
        for n, depth in zip(budgets, depths.T, strict=True):
            found[f"ddtree_tau{suffix}@{n}"] = mean(depth + 1, visits(depth, population))
        for k in ORACLE_WIDTHS:
            length = leading(scores.rank < k)
            found[f"topk_oracle{suffix}@{k}"] = mean(length, visits(length, population))
    return found


def measure(scores: Scored, *, seed: int, draws: int = DRAWS) -> dict[str, Estimate]:
    """Every number of `ratios` with its 95 % interval over prompts."""
    return estimates(ratios(scores), seed=seed, draws=draws)


def paired(a: Scored, b: Scored, *, trees: bool = True) -> dict[str, tuple[Ratio, Ratio]]:
    """Numbers that two drafters share, over the prompts that both were scored on.

    Feed it, or the part of interest, to `dflash_diag.stats.differences`.

    Raises
    ------
    BadInput
        No prompt was scored for both.
    """
    ids_a, ids_b = scored_prompts(a), scored_prompts(b)
    common = [one for one in ids_a if one in set(ids_b)]
    if not common:
        raise BadInput("no prompt was scored for both drafters", "the same prompts for both")
    rows_a, rows_b = ([ids.index(one) for one in common] for ids in (ids_a, ids_b))

    def at(one: Ratio, rows: list[int]) -> Ratio:
        return Ratio(one.numerators[rows], one.denominators[rows], one.unit)

    left, right = ratios(a, trees=trees), ratios(b, trees=trees)
    return {key: (at(left[key], rows_a), at(right[key], rows_b)) for key in left if key in right}


def by_position(
    ratios: Mapping[str, Ratio], found: Mapping[str, Estimate], population: str = "uniform"
) -> list[dict[str, float | int | None]]:
    """One row a proposal: marginal m_k, survival S_k and conditional c_k with their intervals.

    ``n`` is the number of anchors (uniform) or rounds (walked); what has no denominator is None.
    """
    suffix = POPULATIONS[population]
    rows: list[dict[str, float | int | None]] = []
    k = 1
    while f"survival{suffix}@{k}" in found:
        marginal, survival, conditional = (
            found[f"{name}{suffix}@{k}"] for name in ("marginal", "survival", "conditional")
        )
        rows.append(
            {
                "k": k,
                "n": _count(ratios[f"survival{suffix}@{k}"]),
                "marginal": marginal.value,
                "marginal_lo": marginal.lo,
                "marginal_hi": marginal.hi,
                "survival": survival.value,
                "lo": survival.lo,
                "hi": survival.hi,
                "conditional": conditional.value,
                "conditional_lo": conditional.lo,
                "conditional_hi": conditional.hi,
            }
        )
        k += 1
    return rows


def per_prompt(scores: Scored) -> list[dict[str, Any]]:
    """One row a scored prompt: its id, its walked tau, and accepted + 1 of each of its rounds."""
    jumps = accepted(scores) + 1
    visited = walked(scores.prompt, scores.anchor, jumps)
    rows = []
    for index in np.unique(scores.prompt):
        rounds = jumps[visited & (scores.prompt == index)].tolist()
        tau = sum(rounds) / len(rounds)
        rows.append({"id": scores.prompt_ids[index], "tau_walked": tau, "rounds": rounds})
    return rows


def score_json(
    scores: Scored,
    *,
    seed: int,
    draws: int = DRAWS,
    lossless: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Everything that ``score --json`` says about one drafter.

    Parameters
    ----------
    lossless
        ``{"checked", "ok"}`` of the lossless check; None where no target was at hand.

    Returns
    -------
    dict
        Plain JSON values; a number that nothing could be counted for is None. Tree and oracle
        numbers are micro. ``notes`` says what limits the intervals.
    """
    sums = ratios(scores)
    found = estimates(sums, seed=seed, draws=draws)
    n_prompts = len(scored_prompts(scores))
    note = few_prompts_note(n_prompts)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "block_size": scores.block_size,
        "n_proposed": scores.labels.shape[1],
        "n_prompts": n_prompts,
        "n_anchors": _count(sums["tau_uniform_micro"]),
        "n_rounds": _count(sums["tau_walked_micro"]),
        "lossless": lossless,
        "tau": {
            f"{population}_{average}": found[f"tau_{population}_{average}"]
            for population in ("walked", "uniform")
            for average in ("micro", "macro")
        },
        "streak": {population: found[f"streak_{population}"] for population in POPULATIONS},
    }
    for population, suffix in POPULATIONS.items():
        record[f"by_position{suffix}"] = by_position(sums, found, population)
        record[f"ddtree_tau{suffix}"] = {str(n): found[f"ddtree_tau{suffix}@{n}"] for n in BUDGETS}
        record[f"topk_oracle{suffix}"] = {
            str(k): found[f"topk_oracle{suffix}@{k}"] for k in ORACLE_WIDTHS
        }
    record |= {
        "per_prompt": per_prompt(scores),
        "unscored": scores.unscored,
        "convention": scores.convention,
        "provenance": scores.provenance,
        "notes": [note] if note else [],
    }
    clean: dict[str, Any] = plain(record)
    return clean


def _count(one: Ratio) -> int:
    return int(one.denominators.sum())
