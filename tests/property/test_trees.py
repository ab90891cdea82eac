"""DDTree against brute force: every prefix, every prefix-closed tree, every continuation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_diag.trees import ddtree, ddtree_depths

Path = tuple[int, ...]


@st.composite
def distributions(draw, max_depth=4, max_vocabulary=4):
    """Descending probabilities [D, V] of each slot; small integers make ties and zeros common."""
    depth = draw(st.integers(1, max_depth))
    vocabulary = draw(st.integers(1, max_vocabulary))
    weights = [
        sorted(draw(st.lists(st.integers(0, 5), min_size=vocabulary, max_size=vocabulary)))[::-1]
        for _ in range(depth)
    ]
    rows = np.array([w if w[0] else [1, *w[1:]] for w in weights], dtype=np.float64)
    return rows / rows.sum(axis=1, keepdims=True)


def logs(q: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(q)


def paths_of(tree) -> list[Path]:
    paths: list[Path] = []
    for parent, rank in zip(tree.parent, tree.rank, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(rank)))
    return paths


def prefixes(q: np.ndarray) -> list[Path]:
    depth, vocabulary = q.shape
    return [p for d in range(1, depth + 1) for p in product(range(vocabulary), repeat=d)]


def closed_trees(q: np.ndarray, n: int) -> Iterator[frozenset[Path]]:
    """Every prefix-closed tree of n nodes, each once."""
    depth, vocabulary = q.shape

    def grow(tree: frozenset[Path], frontier: tuple[Path, ...]) -> Iterator[frozenset[Path]]:
        if len(tree) == n:
            yield tree
            return
        for i, node in enumerate(frontier):
            children = tuple((*node, r) for r in range(vocabulary)) if len(node) < depth else ()
            # Frontier nodes passed over stay out, so that no tree is met twice.
            yield from grow(tree | {node}, frontier[i + 1 :] + children)

    yield from grow(frozenset(), tuple((r,) for r in range(vocabulary)))


def expected_depth(tree: frozenset[Path] | set[Path], q: np.ndarray) -> float:
    """E_Q[depth of the continuation inside the tree], over every continuation."""
    depth, vocabulary = q.shape
    total = 0.0
    for y in product(range(vocabulary), repeat=depth):
        chance = math.prod(q[i, r] for i, r in enumerate(y))
        reached = next((d for d in range(depth) if y[: d + 1] not in tree), depth)
        total += chance * reached
    return total


@given(distributions(max_depth=3, max_vocabulary=3), st.integers(1, 4))
@settings(max_examples=60)
def test_no_prefix_closed_tree_expects_to_accept_more(q, n):
    tree = paths_of(ddtree(logs(q), n))
    ours = expected_depth(set(tree), q)
    best = max((expected_depth(t, q) for t in closed_trees(q, len(tree))), default=0.0)
    assert ours >= best - 1e-12
    probabilities = [math.prod(q[i, r] for i, r in enumerate(path)) for path in tree]
    assert abs(ours - sum(probabilities)) < 1e-12


def test_the_enumeration_misses_no_tree():
    # Trees of n nodes in which each node has up to 2 children, from a root of 2: Catalan numbers.
    q = np.full((4, 2), 0.5)
    assert [len(set(closed_trees(q, n))) for n in (1, 2, 3, 4)] == [2, 5, 14, 42]
    assert len(list(closed_trees(q, 4))) == 42


@given(distributions(), st.integers(0, 40))
def test_nodes_are_the_most_probable_prefixes_in_order(q, n):
    lp = logs(q)

    def cost(p: Path) -> float:
        total = 0.0
        for i, r in enumerate(p):
            total -= float(lp[i, r])
        return total

    best = sorted(prefixes(q), key=lambda p: (cost(p), p))
    assert paths_of(ddtree(lp, n)) == best[:n]


@given(distributions(), st.integers(0, 40))
def test_a_tree_has_its_budget_and_parents_come_first(q, n):
    tree = ddtree(logs(q), n)
    assert len(tree.rank) == min(n, len(prefixes(q)))
    assert (tree.parent < np.arange(len(tree.rank))).all()
    assert (np.diff(tree.logprob[np.isfinite(tree.logprob)]) <= 0).all()
    for parent, depth in zip(tree.parent, tree.depth, strict=True):
        assert depth == (tree.depth[parent] + 1 if parent >= 0 else 1)


@given(distributions(), st.data())
def test_depth_is_where_the_label_path_leaves_the_tree(q, data):
    depth, vocabulary = q.shape
    budgets = (1, 2, 4, 8, 16)
    label = data.draw(st.tuples(*[st.integers(0, vocabulary)] * depth))  # V: not stored
    found = ddtree_depths(logs(q)[None], [label], budgets)[0]
    nodes = paths_of(ddtree(logs(q), max(budgets)))
    for n, at in zip(budgets, found, strict=True):
        tree = set(nodes[:n])
        assert at == next((d for d in range(depth) if label[: d + 1] not in tree), depth)
        assert at <= min(n, depth)


@given(distributions(), st.data())
def test_a_larger_budget_never_reaches_less(q, data):
    depth, vocabulary = q.shape
    label = data.draw(st.tuples(*[st.integers(0, vocabulary - 1)] * depth))
    found = ddtree_depths(logs(q)[None], [label], range(40))[0]
    assert (np.diff(found) >= 0).all()


@given(st.integers(1, 8), st.integers(1, 5), st.data())
def test_certain_slots_make_the_chain(depth, vocabulary, data):
    rows = np.full((depth, vocabulary), -np.inf)
    rows[:, 0] = 0.0
    budget = data.draw(st.integers(1, depth))
    assert paths_of(ddtree(rows, budget)) == [(0,) * d for d in range(1, budget + 1)]


@given(distributions(max_depth=3, max_vocabulary=4), st.integers(1, 3), st.data())
def test_stored_candidates_suffice_for_budgets_up_to_their_number(q, k, data):
    """Dropping all but k candidates changes nothing for trees of at most k nodes."""
    depth, vocabulary = q.shape
    k = min(k, vocabulary)
    label = data.draw(st.tuples(*[st.integers(0, vocabulary - 1)] * depth))
    budgets = range(k + 1)
    full = ddtree_depths(logs(q)[None], [label], budgets)
    assert np.array_equal(ddtree_depths(logs(q)[None, :, :k], [label], budgets), full)
