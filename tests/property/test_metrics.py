"""Identities and bounds that hold for any drafter on any prompts."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from score_table import Scores

from dflash_diag.metrics import accepted, measure, per_prompt, ratios, score_json, walked
from dflash_diag.stats import Ratio

BUDGETS = (1, 4, 8, 16, 64)


@st.composite
def scores(draw, min_prompts=1):
    """A drafter whose labels are drawn from its own distributions, sharpened or blunted."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=min_prompts, max_size=5))
    n_proposed, vocabulary = draw(st.integers(1, 6)), draw(st.integers(2, 12))
    sharpness = draw(st.sampled_from([0.0, 1.0, 3.0, 30.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n = sum(sizes)
    logits = sharpness * rng.normal(size=(n, n_proposed, vocabulary))
    if draw(st.booleans()):
        logits = np.round(logits)  # ties
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(-1)
    order = np.argsort(-logprobs, axis=-1, kind="stable")
    return Scores(
        prompt_ids=[f"p{i}" for i in range(len(sizes))],
        prompt=np.repeat(np.arange(len(sizes)), sizes),
        anchor=np.concatenate([draw(st.integers(1, 50)) + np.arange(s) for s in sizes]),
        labels=labels,
        proposed=order[..., 0],
        rank=(order == labels[..., None]).argmax(-1),
        topk_logprobs=np.take_along_axis(logprobs, order, axis=-1),
        block_size=n_proposed + 1,
    )


def value(one: Ratio) -> float:
    return one.numerators.sum() / one.denominators.sum()


def curve(sums: dict[str, Ratio], name: str) -> list[float]:
    return [value(one) for key, one in sums.items() if key.split("@")[0] == name]


def slow_walk(s: Scores, hits: np.ndarray) -> dict[str, list[int]]:
    """Decode each prompt round by round, as a server would: rounds of accepted + 1."""
    lengths = {}
    for p, a, row in zip(s.prompt, s.anchor, hits.tolist(), strict=True):
        lengths[int(p), int(a)] = (*row, False).index(False)
    rounds = {}
    for p, name in enumerate(s.prompt_ids):
        at = min(a for q, a in lengths if q == p)
        rounds[name] = []
        while (p, at) in lengths:
            rounds[name].append(lengths[p, at] + 1)
            at += lengths[p, at] + 1
    return rounds


# --- item 1: tau = 1 + sum of survival, on the same population -----------------------------------


@pytest.mark.parametrize(("population", "suffix"), [("uniform", ""), ("walked", "_walked")])
@given(s=scores())
def test_tau_is_one_plus_the_sum_of_survival(population, suffix, s):
    sums = ratios(s, trees=False)
    survival = curve(sums, f"survival{suffix}")
    tau = value(sums[f"tau_{population}_micro"])
    assert abs(tau - (1 + sum(survival))) < 1e-9
    assert abs(tau - (1 + value(sums[f"streak_{population}"]))) < 1e-9
    assert all(a >= b for a, b in pairwise(survival))
    assert 1 <= tau <= s.block_size


@given(scores())
def test_the_macro_tau_sums_each_prompts_own_survival(s):
    sums = ratios(s, trees=False)
    by_prompt = sum(
        one.per_prompt() for key, one in sums.items() if key.startswith("survival_walked@")
    )
    assert value(sums["tau_walked_macro"]) == pytest.approx(1 + by_prompt.mean(), abs=1e-9)


@given(scores())
def test_lengths_survival_and_tau_tell_one_story(s):
    lengths = accepted(s)
    sums = ratios(s, trees=False)
    for k, survival in enumerate(curve(sums, "survival"), start=1):
        assert survival == (lengths >= k).mean()
        assert survival <= value(sums[f"marginal@{k}"]) + 1e-12
        conditional = sums[f"conditional@{k}"]
        if conditional.denominators.sum():
            before = (lengths >= k - 1).mean()
            assert survival == pytest.approx(before * value(conditional))


@given(scores())
def test_the_walk_is_what_decoding_would_visit(s):
    by_prompt = slow_walk(s, s.labels == s.proposed)
    assert {row["id"]: row["rounds"] for row in per_prompt(s)} == by_prompt
    visited = walked(s.prompt, s.anchor, accepted(s) + 1)
    rounds = [r for one in by_prompt.values() for r in one]
    assert visited.sum() == len(rounds)
    assert value(ratios(s, trees=False)["tau_walked_micro"]) == pytest.approx(np.mean(rounds))


# --- items 2 to 4: trees and the oracle ----------------------------------------------------------


@given(scores())
def test_a_tree_of_one_node_is_the_first_slots_accuracy(s):
    sums = ratios(s)
    assert value(sums["ddtree_tau@1"]) == pytest.approx(1 + value(sums["marginal@1"]))


@pytest.mark.parametrize("suffix", ["", "_walked"])
@given(s=scores())
def test_the_oracle_of_one_candidate_is_the_streak(suffix, s):
    sums = ratios(s, trees=False)
    streak = sums["streak_walked" if suffix else "streak_uniform"]
    assert value(sums[f"topk_oracle{suffix}@1"]) == value(streak)


@given(scores(), st.sampled_from([1, 4, 8]))
def test_a_walked_oracle_jumps_by_its_own_length(s, k):
    rounds = [r for one in slow_walk(s, s.rank < k).values() for r in one]
    assert value(ratios(s, trees=False)[f"topk_oracle_walked@{k}"]) == pytest.approx(
        np.mean(rounds) - 1
    )


@given(scores())
def test_trees_and_oracle_keep_their_bounds(s):
    sums = ratios(s)
    trees, oracle = curve(sums, "ddtree_tau"), curve(sums, "topk_oracle")
    n_proposed = s.labels.shape[1]
    assert all(a <= b for a, b in pairwise(trees))
    assert all(a <= b for a, b in pairwise(oracle))
    for n, tau in zip(BUDGETS, trees, strict=True):
        assert 1 <= tau <= min(n, n_proposed) + 1
    for n in (1, 4, 8):
        assert value(sums[f"ddtree_tau@{n}"]) <= 1 + value(sums[f"topk_oracle@{n}"]) + 1e-12
    assert all(0 <= length <= n_proposed for length in oracle)


@given(scores())
def test_with_certain_slots_a_large_tree_is_the_chain(s):
    rows = np.full(s.topk_logprobs.shape, -np.inf)
    rows[..., 0] = 0.0
    certain = replace(s, topk_logprobs=rows)
    sums = ratios(certain)
    for n in (1, 4):
        if n <= s.labels.shape[1]:
            chain = np.minimum(accepted(s), n).mean()
            assert value(sums[f"ddtree_tau@{n}"]) == pytest.approx(1 + chain)


@pytest.mark.parametrize("hit", [True, False])
@given(s=scores())
def test_an_oracle_drafter_accepts_all_and_a_hopeless_one_nothing(hit, s):
    n_proposed = s.labels.shape[1]
    worst = s.topk_logprobs.shape[-1] - 1
    rank = np.full_like(s.rank, 0 if hit else worst)
    edge = replace(s, rank=rank, labels=s.proposed if hit else s.proposed + 1)
    sums = ratios(edge)
    for name in ("tau_walked_micro", "tau_walked_macro", "tau_uniform_micro", "tau_uniform_macro"):
        assert value(sums[name]) == (n_proposed + 1 if hit else 1)
    assert value(sums["topk_oracle@1"]) == (n_proposed if hit else 0)


# --- the order of prompts, and intervals ---------------------------------------------------------


@given(scores(min_prompts=2), st.randoms(use_true_random=False))
def test_the_order_of_prompts_changes_nothing(s, random):
    order = list(range(len(s.prompt_ids)))
    random.shuffle(order)
    rows = np.concatenate([np.flatnonzero(s.prompt == p) for p in order])
    shuffled = Scores(
        prompt_ids=[s.prompt_ids[p] for p in order],
        prompt=np.repeat(np.arange(len(order)), [(s.prompt == p).sum() for p in order]),
        **{
            name: getattr(s, name)[rows]
            for name in ("anchor", "labels", "proposed", "rank", "topk_logprobs")
        },
        block_size=s.block_size,
    )
    ours, theirs = ratios(s), ratios(shuffled)
    for key, one in ours.items():
        total = one.denominators.sum()
        assert total == theirs[key].denominators.sum()
        if total:
            assert value(one) == pytest.approx(value(theirs[key]), abs=1e-12)


@given(scores())
def test_intervals_contain_their_value_and_nothing_is_nan(s):
    for one in measure(s, seed=0, draws=200).values():
        if one.lo is not None:
            assert one.lo <= one.value <= one.hi
    record = score_json(s, seed=0, draws=50)
    assert record["n_rounds"] <= record["n_anchors"] == len(s.anchor)
