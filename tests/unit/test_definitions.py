"""Every definition of an acceptance number, against loops over one table of scores."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from score_table import Scores

from dflash_diag import definitions, metrics
from dflash_diag.definitions import DEFINITIONS, Statistic, Table
from dflash_diag.stats import ratio
from dflash_diag.trees import ddtree_depths

D = 4
V = 24
"""More than the widest oracle, so that a tree of 16 nodes is exact."""


def made(seed: int = 0, sizes=(9, 5, 14)) -> Scores:
    """Prompts of different lengths, with low ranks more likely than high ones."""
    rng = np.random.default_rng(seed)
    prompt = np.repeat(np.arange(len(sizes)), sizes)
    rank = np.minimum(rng.geometric(0.45, (sum(sizes), D)) - 1, V - 1)
    logits = np.sort(rng.normal(0, 2, (sum(sizes), D, V)), axis=-1)[..., ::-1]
    return Scores(
        prompt_ids=[f"p{i}" for i in range(len(sizes))],
        prompt=prompt,
        anchor=np.concatenate([10 + np.arange(n) for n in sizes]),
        labels=rank + 50,
        proposed=np.full_like(rank, 50),
        rank=rank,
        topk_logprobs=logits - np.log(np.exp(logits).sum(-1, keepdims=True)),
        block_size=D + 1,
    )


def value(name: str, scores: Scores) -> float:
    return float(definitions.definitions(D)[name].measure(scores).value()[0])


def run(flags) -> int:
    length = 0
    for flag in flags:
        if not flag:
            break
        length += 1
    return length


def rows(scores: Scores, lengths, population: str) -> list[int]:
    """Anchors that a population counts, found by walking."""
    if population == "uniform":
        return list(range(len(scores.prompt)))
    found = []
    for one in np.unique(scores.prompt):
        mine = np.flatnonzero(scores.prompt == one)
        at = 0
        while at < len(mine):
            found.append(mine[at])
            at += lengths[mine[at]] + 1
    return found


@pytest.fixture(scope="module")
def scores() -> Scores:
    return made()


@pytest.mark.parametrize("population", ["uniform", "walked"])
def test_lengths_are_those_of_a_loop(scores, population):
    hits = scores.rank == 0
    depths = ddtree_depths(scores.topk_logprobs, scores.rank, (1, 4, 8, 16))
    lengths = {"streak": [run(row) for row in hits]}
    for at, n in enumerate((1, 4, 8, 16)):
        lengths[f"topk_oracle@{n}"] = [run(row < n) for row in scores.rank]
        lengths[f"chain_tau@{n}"] = [run(row[:n]) for row in hits]
        lengths[f"ddtree_tau@{n}"] = depths[:, at].tolist()
    for name, length in lengths.items():
        counted = np.array(length)[rows(scores, length, population)]
        bonus = name.partition("@")[0].endswith("tau")
        assert value(f"{name} {population}", scores) == pytest.approx(counted.mean() + bonus)
    counted = rows(scores, lengths["streak"], population)
    by_prompt = [
        np.mean([lengths["streak"][r] for r in counted if scores.prompt[r] == one])
        for one in range(3)
    ]
    assert value(f"streak {population} macro", scores) == pytest.approx(np.mean(by_prompt))
    assert value(f"tau {population} macro", scores) == pytest.approx(np.mean(by_prompt) + 1)


@pytest.mark.parametrize("population", ["uniform", "walked"])
def test_shares_are_those_of_a_loop(scores, population):
    hits = scores.rank == 0
    length = np.array([run(row) for row in hits])
    counted = rows(scores, length, population)
    accepted, rounds = length[counted].sum(), len(counted)
    assert value(f"accuracy {population}", scores) == pytest.approx(hits[counted].mean())
    assert value(f"full_block {population}", scores) == pytest.approx((length[counted] == D).mean())
    rate = value(f"draft_acceptance_rate {population}", scores)
    assert rate == pytest.approx(accepted / (rounds * D))
    rate = value(f"verify_rate {population}", scores)
    assert rate == pytest.approx((accepted + rounds) / (rounds * (D + 1)))
    for k in range(1, D + 1):
        survived = (length[counted] >= k).mean()
        before = (length[counted] >= k - 1).mean()
        assert value(f"marginal@{k} {population}", scores) == pytest.approx(
            hits[counted, k - 1].mean()
        )
        assert value(f"survival@{k} {population}", scores) == pytest.approx(survived)
        assert value(f"conditional@{k} {population}", scores) == pytest.approx(survived / before)


def test_a_product_of_means_is_not_the_mean_of_products():
    """Two blocks, one all right and one all wrong: 2 tokens on average, or 1/2 + 1/4 + ...."""
    rank = np.array([[0] * D, [3] * D])
    two = replace(made(sizes=(2,)), rank=rank, labels=rank + 50, proposed=np.full_like(rank, 50))
    assert value("streak uniform", two) == 2
    assert value("eal_product uniform", two) == pytest.approx(sum(0.5**k for k in range(1, D + 1)))
    assert value("eal_product + 1 uniform", two) == value("eal_product uniform", two) + 1


def test_slots_without_a_label_end_a_run_or_are_passed(scores):
    """Right, unknown, right, wrong: 1 where the unknown slot ends the run, 2 where it is passed."""
    rank = np.array([[0, 7, 0, 3], [0, 0, 0, 0]])
    valid = np.array([[True, False, True, True], [False] * 4])
    one = replace(made(sizes=(2,)), rank=rank, labels=rank + 50, valid=valid)
    one.proposed = np.full_like(rank, 50)
    assert value("streak uniform", one) == 1
    assert value("streak_passing uniform", one) == 2
    assert value("tau_passing uniform", one) == 3
    assert value("accuracy uniform", one) == pytest.approx(2 / 3)
    assert np.isnan(value("marginal@2 uniform", one))
    assert value("topk_oracle@8 uniform", one) == 1
    assert value("ddtree_tau@16 uniform", one) == 2
    every = replace(scores, valid=np.ones_like(scores.rank, bool))
    for name in DEFINITIONS:
        assert value(name, every) == value(name, scores)


def test_numbers_are_those_of_the_metrics(scores):
    """The same quantity under both names is the same number with the same interval."""
    found = definitions.measure(scores, seed=3, draws=400)
    other = metrics.measure(scores, seed=3, draws=400)
    same = {}
    for population, suffix in metrics.POPULATIONS.items():
        same |= {
            f"tau_{population}_micro": f"tau {population}",
            f"tau_{population}_macro": f"tau {population} macro",
            f"streak_{population}": f"streak {population}",
        }
        for kind, numbers in (
            ("marginal", range(1, D + 1)),
            ("survival", range(1, D + 1)),
            ("conditional", range(1, D + 1)),
            ("topk_oracle", (1, 4, 8)),
            ("ddtree_tau", (1, 4, 8, 16)),
        ):
            same |= {f"{kind}{suffix}@{n}": f"{kind}@{n} {population}" for n in numbers}
    assert set(same) == set(other) - {"ddtree_tau@64", "ddtree_tau_walked@64"}
    for ours, theirs in same.items():
        a, b = other[ours], found[theirs]
        assert (a.value, a.n, a.unit) == (pytest.approx(b.value, abs=1e-12), b.n, b.unit)
        assert (a.lo, a.hi) == pytest.approx((b.lo, b.hi), abs=1e-9)


def test_anchors_with_gaps_have_no_walk(scores):
    gaps = replace(scores, anchor=scores.anchor * 2)
    assert not Table(gaps).has_walk
    found = definitions.measure(gaps, seed=0, draws=200)
    assert found["tau uniform"].value == value("tau uniform", scores)
    assert not [name for name in found if "walked" in name]
    with pytest.raises(ValueError, match="consecutive"):
        DEFINITIONS["tau walked"].measure(gaps)


def test_a_statistic_is_recomputed_under_weights():
    """The product of two quotients of weighted sums, by hand."""
    two = Statistic((ratio([1, 3], [2, 4]), ratio([1, 0], [1, 1])), lambda q: q[..., 0] * q[..., 1])
    assert two.value().tolist() == [pytest.approx(4 / 6 * 1 / 2)]
    weighted = two.value(np.array([[2.0, 0.0], [0.0, 1.0]]))
    assert weighted.tolist() == [pytest.approx(0.5), 0.0]


def test_every_definition_says_what_it_means():
    known = definitions.definitions(3)
    assert set(DEFINITIONS) <= set(known)
    assert {"marginal@3 uniform", "conditional@1 walked"} <= set(known)
    assert {"streak uniform", "tau walked", "topk_oracle@8 + 1 uniform"} <= set(DEFINITIONS)
    for name, one in known.items():
        assert name == one.name
        assert one.means.endswith(".")
        assert one.unit in ("tokens", "share")
        assert all(one.stacks.values())
