"""DDTree on trees small enough to write down."""

from __future__ import annotations

import numpy as np
import pytest

from dflash_diag.trees import BUDGETS, ddtree, ddtree_depths

INF = float("-inf")


def ranks_of(tree) -> list[tuple[int, ...]]:
    """Rank tuple of each node, read off the parents."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parent, tree.rank, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(rank)))
    return paths


def test_a_tree_by_hand():
    # slot 1: 0.6 0.4 · slot 2: 0.9 0.1 -> 0.6, 0.54, 0.4, 0.36, 0.06, 0.04
    tree = ddtree(np.log([[0.6, 0.4], [0.9, 0.1]]), budget=9)
    assert ranks_of(tree) == [(0,), (0, 0), (1,), (1, 0), (0, 1), (1, 1)]
    assert tree.parent.tolist() == [-1, 0, -1, 2, 0, 2]
    assert tree.depth.tolist() == [1, 2, 1, 2, 2, 2]
    assert np.exp(tree.logprob) == pytest.approx([0.6, 0.54, 0.4, 0.36, 0.06, 0.04])


def test_ties_go_to_the_smaller_rank_tuple():
    tree = ddtree([[-1.0, -2.0, -3.0], [-1.0, -2.0, -3.0]], budget=7)
    assert ranks_of(tree) == [(0,), (0, 0), (1,), (0, 1), (1, 0), (2,), (0, 2)]


def test_depth_of_the_label_path_by_hand():
    rows = np.log([[0.6, 0.4], [0.9, 0.1]])[None].repeat(4, axis=0)
    labels = [[0, 0], [1, 0], [0, 1], [1, 1]]
    depths = ddtree_depths(rows, labels, budgets=(1, 2, 3, 4, 5, 6))
    assert depths.tolist() == [
        [1, 2, 2, 2, 2, 2],
        [0, 0, 1, 2, 2, 2],
        [1, 1, 1, 1, 2, 2],
        [0, 0, 1, 1, 1, 2],
    ]


def test_the_root_is_not_counted():
    rows = np.log([[[0.6, 0.4]]])
    assert ddtree_depths(rows, [[0]], budgets=(0, 1)).tolist() == [[0, 1]]


def test_certain_slots_make_a_chain_and_impossible_tokens_come_last():
    rows = np.array([[0.0, INF, INF]] * 4)
    tree = ddtree(rows, budget=6)
    assert ranks_of(tree)[:4] == [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]
    assert tree.logprob[4:].tolist() == [INF, INF]
    assert len(tree.rank) == 6


def test_a_label_outside_the_stored_candidates_never_matches():
    rows = np.log([[[0.5, 0.3]]])  # the third token is not stored
    assert ddtree_depths(rows, [[2]], budgets=(64,)).tolist() == [[0]]


def test_rounding_above_zero_does_not_put_a_child_before_its_parent():
    tree = ddtree([[1e-7, -9.0], [1e-7, -9.0]], budget=2)
    assert ranks_of(tree) == [(0,), (0, 0)]
    assert tree.logprob.tolist() == [0.0, 0.0]


def test_float32_rows_are_read_as_they_are():
    rows = np.log(np.random.default_rng(0).dirichlet(np.ones(8), size=(5, 3)))
    rows = -np.sort(-rows, axis=-1).astype(np.float32)
    labels = np.zeros((5, 3), dtype=np.int32)
    assert np.array_equal(
        ddtree_depths(rows, labels), ddtree_depths(rows.astype(np.float64), labels)
    )


def test_no_anchors_no_depths():
    assert ddtree_depths(np.zeros((0, 3, 4)), np.zeros((0, 3), int)).shape == (0, len(BUDGETS))


@pytest.mark.parametrize(
    ("rows", "ranks", "budgets", "match"),
    [
        ([[[-2.0, -1.0]]], [[0]], (4,), "descending"),
        ([[[float("nan"), -1.0]]], [[0]], (4,), "descending"),
        ([[[float("nan")]]], [[0]], (4,), "descending"),
        ([[[3.0, 1.0]]], [[0]], (4,), "log-probabilities"),
        ([[-1.0, -2.0]], [[0]], (4,), "expected"),
        ([[[-1.0, -2.0]]], [[0, 0]], (4,), "label_rank has shape"),
        ([[[-1.0, -2.0]]], [[-1]], (4,), "ranks start at 0"),
        ([[[-1.0, -2.0]]], [[0]], (-1,), "0 or more nodes"),
    ],
)
def test_what_cannot_be_a_tree_is_refused(rows, ranks, budgets, match):
    with pytest.raises(ValueError, match=match):
        ddtree_depths(rows, ranks, budgets)
