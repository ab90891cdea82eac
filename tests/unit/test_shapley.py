"""Shapley's value over feasible orders, against every order written out with exact fractions."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest

from dflash_diag.shapley import shares

NAMES = "abcdef"


def brute(factors, values):
    """Shares and ranges over all feasible orders, in fractions; None where there is none."""
    moves = {factor: [] for factor in factors}
    for order in itertools.permutations(factors):
        states = [frozenset(order[:n]) for n in range(len(order) + 1)]
        if all(state in values for state in states):
            for factor, before, after in zip(order, states, states[1:], strict=False):
                moves[factor].append(values[after] - values[before])
    if not moves[factors[0]]:
        return None
    means = [sum(moves[f]) / len(moves[f]) for f in factors]
    return means, [(min(moves[f]), max(moves[f])) for f in factors], len(moves[factors[0]])


def game(seed, infeasible):
    """A random game of up to six factors, some of its states missing."""
    rng = random.Random(seed)
    factors = NAMES[: rng.randint(1, 6)]
    subsets = [
        frozenset(some)
        for n in range(len(factors) + 1)
        for some in itertools.combinations(factors, n)
    ]
    ends = (subsets[0], subsets[-1])
    values = {
        state: Fraction(rng.randint(-999, 999), rng.randint(1, 99))
        for state in subsets
        if state in ends or rng.random() >= infeasible
    }
    return factors, values


def solve(factors, values, **options):
    found = shares(factors, values.__contains__, **options)
    return found, found.means(values), found.ranges(values)


@pytest.mark.parametrize("seed", range(60))
def test_it_is_the_mean_over_all_feasible_orders(seed):
    factors, values = game(seed, infeasible=(0, 0.15, 0.3)[seed % 3])
    expected = brute(factors, values)
    found, means, ranges = solve(factors, values)
    assert sum(means) == pytest.approx(
        float(values[frozenset(factors)] - values[frozenset()]), abs=1e-9
    )
    if expected is None:
        assert any(len(group) > 1 for group in found.groups)
        return
    assert found.groups == tuple((f,) for f in factors)
    assert found.n_orders == expected[2]
    assert means == pytest.approx([float(x) for x in expected[0]], abs=1e-9)
    assert ranges == expected[1]


def test_where_effects_add_up_every_order_says_the_same():
    effects = {"a": 1.0, "b": -0.25, "c": 0.5}
    values = {
        frozenset(some): sum(effects[f] for f in some)
        for n in range(4)
        for some in itertools.combinations("abc", n)
    }
    _, means, ranges = solve("abc", values)
    assert means == pytest.approx(list(effects.values()))
    assert all(lo == pytest.approx(hi) for lo, hi in ranges)


def test_the_glove_game():
    """A left glove against two right ones: 2/3, 1/6, 1/6 (Shapley 1953)."""
    values = {
        frozenset(some): float("l" in some and len(some) > 1)
        for n in range(4)
        for some in itertools.combinations("lrs", n)
    }
    _, means, ranges = solve("lrs", values)
    assert means == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    assert ranges == [(0, 1)] * 3


def test_factors_without_an_order_between_them_are_one():
    values = {frozenset(s): float(len(s)) for s in ("", "c", "ab", "abc")}
    found, means, _ = solve("abc", values)
    assert found.groups == (("a", "b"), ("c",))
    assert means == pytest.approx([2.0, 1.0])


def test_only_what_must_be_is_merged():
    """b and c come only together, a by itself, d only last."""
    values = {frozenset(s): float(len(s)) for s in ("", "a", "abc", "bc", "abcd")}
    found, means, _ = solve("abcd", values)
    assert found.groups == (("a",), ("b", "c"), ("d",))
    assert means == pytest.approx([1.0, 2.0, 1.0])


@pytest.mark.parametrize("seed", range(40))
def test_no_finer_division_has_an_order(seed):
    factors, values = game(1000 + seed, infeasible=0.7)
    found, _, _ = solve(factors, values)
    for parts in divisions(factors):
        if len(parts) <= len(found.groups):
            continue
        orders = itertools.permutations(parts)
        assert not any(
            all(frozenset().union(*order[:n]) in values for n in range(len(order) + 1))
            for order in orders
        )


def divisions(factors):
    """All divisions of some factors into groups."""
    if not factors:
        yield []
        return
    first, rest = factors[0], factors[1:]
    for parts in divisions(rest):
        yield [frozenset(first), *parts]
        for i, part in enumerate(parts):
            yield [*parts[:i], part | {first}, *parts[i + 1 :]]


def test_drawn_orders_come_near_all_of_them_and_sum_exactly():
    factors, values = game(5, infeasible=0)
    values = {state: float(value) for state, value in values.items()}
    _, exact, _ = solve(factors, values)
    found, drawn, _ = solve(factors, values, exact=0)
    spread = max(values.values()) - min(values.values())
    assert drawn == pytest.approx(exact, abs=0.03 * spread)
    assert sum(drawn) == pytest.approx(values[frozenset(factors)] - values[frozenset()], abs=1e-9)
    assert found.n_orders == 4_000


def test_values_may_be_draws():
    values = {frozenset(s): np.array([len(s), 2.0 * len(s)]) for s in ("", "a", "b", "ab")}
    found = shares("ab", values.__contains__)
    np.testing.assert_allclose(found.means(values), [[1, 2], [1, 2]])


def test_both_ends_must_be_feasible():
    for factors, states in (("a", [""]), ("a", ["a"]), ("", [""])):
        feasible = {frozenset(s) for s in states}
        with pytest.raises(ValueError, match="both ends"):
            shares(factors, feasible.__contains__)
    with pytest.raises(ValueError, match="none of"):
        shares("ab", {frozenset(), frozenset("ab")}.__contains__, exact=0)
