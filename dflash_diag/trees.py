"""DDTree: the best-first draft tree of one block's per-slot distributions.

One pass gives D independent distributions. Taking them at their word, a prefix's probability is the
product of its tokens', and the n most probable prefixes form the tree of n nodes with the largest
expected accepted depth (Ringel & Romano, arXiv 2604.12989, propositions 1-3). A node is written as
its *rank tuple*: (0, 2) is the top choice of slot 1 followed by the third choice of slot 2.

The root (the anchor) is not counted among the n nodes, and trees of growing n are nested, so one
pass answers every budget. Equal probabilities are ordered by rank tuple, the lexicographically
smaller first, and a prefix's log-probability is always summed from slot 1 on: the order depends on
the numbers alone, never on the path by which a node was reached.

Symbols: A anchors, D proposed tokens, k stored candidates a slot, n nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BUDGETS = (1, 4, 8, 16, 64)
"""Node budgets that are reported, the root not counted."""

Node = tuple[float, tuple[int, ...], int, float]
"""(cost, rank tuple, index of the parent, cost of the parent); cost is minus log-probability."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Nodes of one tree in the order in which a growing budget adds them; the root is implied."""

    parent: NDArray[np.int32]
    """[n] index of the parent node, -1 for the root."""
    depth: NDArray[np.int32]
    """[n] slot that the node proposes for, 1..D."""
    rank: NDArray[np.int32]
    """[n] which choice of its slot it takes, 0 being the most probable."""
    logprob: NDArray[np.float64]
    """[n] log-probability of the prefix that ends here."""


def ddtree(topk_logprobs: ArrayLike, budget: int) -> Tree:
    """Build the tree of one anchor, for drawing or inspection.

    Parameters
    ----------
    topk_logprobs
        [D, k] log-probabilities of each slot's k best tokens, descending.
    budget
        n, the root not counted; fewer nodes come back where fewer prefixes exist.

    Raises
    ------
    ValueError
        Rows that are not descending log-probabilities, or a negative budget.
    """
    rows = np.asarray(topk_logprobs)
    _check_rows(rows[None])
    _check_budgets([budget])
    nodes = list(islice(_best_first(_as_lists(rows)), budget))
    return Tree(
        parent=np.array([parent for _, _, parent, _ in nodes], dtype=np.int32),
        depth=np.array([len(ranks) for _, ranks, _, _ in nodes], dtype=np.int32),
        rank=np.array([ranks[-1] for _, ranks, _, _ in nodes], dtype=np.int32),
        logprob=np.array([-cost for cost, _, _, _ in nodes], dtype=np.float64),
    )


def ddtree_depths(
    topk_logprobs: ArrayLike, label_rank: ArrayLike, budgets: Sequence[int] = BUDGETS
) -> NDArray[np.int64]:
    """How deep the label path reaches inside each anchor's tree, the bonus token excluded.

    Parameters
    ----------
    topk_logprobs
        [A, D, k] log-probabilities of each slot's k best tokens, descending.
    label_rank
        [A, D] rank of the label among all tokens; 0 is the top choice.
    budgets
        Numbers of nodes, the root not counted.

    Returns
    -------
    NDArray
        [A, len(budgets)] leading labels found in the tree; tau of a round is this plus 1.

    Notes
    -----
    A label outside the stored k never matches. For n <= k this is exact: a node of rank r (from 0)
    follows its r better siblings, so it is never among the first r nodes, and no tree of n nodes
    uses a rank of n or more. It is exact at any n where k is the whole vocabulary. Otherwise the
    tree is the best one *of the stored candidates*, not the best of all.

    Raises
    ------
    ValueError
        Shapes that do not fit, rows that are not descending log-probabilities, a negative rank or
        budget.
    """
    rows = np.asarray(topk_logprobs)
    _check_rows(rows)
    ranks = np.asarray(label_rank)
    if ranks.shape != rows.shape[:2]:
        msg = f"label_rank has shape {ranks.shape}; expected {rows.shape[:2]}"
        raise ValueError(msg)
    if ranks.size and ranks.min() < 0:
        msg = f"label_rank contains {ranks.min()}; ranks start at 0"
        raise ValueError(msg)
    _check_budgets(budgets)
    largest = max(budgets, default=0)
    depths = np.zeros((len(rows), len(budgets)), dtype=np.int64)
    for anchor, path in enumerate(map(tuple, ranks.tolist())):
        reachable = _reachable(path, largest, rows.shape[2])
        if reachable:
            found_at = _positions(_as_lists(rows[anchor]), path[:reachable], largest)
            depths[anchor] = [sum(at < n for at in found_at) for n in budgets]
    return depths


def _reachable(path: tuple[int, ...], n: int, width: int) -> int:
    """Count the leading labels that any tree of n nodes could hold, whatever the probabilities.

    A prefix comes after everything that takes no worse a rank at any of its slots, which makes
    r_1 + r_1 r_2 + ... nodes (ranks from 1) up to itself.
    """
    same_depth, total = 1, 0
    for depth, rank in enumerate(path):
        same_depth *= rank + 1
        total += same_depth
        if rank >= width or total > n:
            return depth
    return len(path)


def _positions(rows: list[list[float]], path: tuple[int, ...], n: int) -> list[int]:
    """Positions, among the first n nodes, of the prefixes of ``path`` that are there."""
    found: list[int] = []
    wanted = path[:1]
    for index, (_, ranks, _, _) in enumerate(islice(_best_first(rows), n)):
        if ranks == wanted:
            found.append(index)
            if len(found) == len(path):
                break
            wanted = path[: len(found) + 1]
    return found


def _best_first(rows: list[list[float]]) -> Iterator[Node]:
    """Yield all prefixes of the rows' candidates, the most probable first (algorithm 1)."""
    depth_limit = len(rows)
    heap: list[Node] = [(-rows[0][0], (0,), -1, 0.0)] if depth_limit else []
    index = 0
    while heap:
        node = heappop(heap)
        yield node
        cost, ranks, parent, parent_cost = node
        depth, rank = len(ranks), ranks[-1] + 1
        row = rows[depth - 1]
        if rank < len(row):
            heappush(heap, (parent_cost - row[rank], (*ranks[:-1], rank), parent, parent_cost))
        if depth < depth_limit:
            heappush(heap, (cost - rows[depth][0], (*ranks, 0), index, cost))
        index += 1


def _check_rows(rows: NDArray[Any]) -> None:
    if rows.ndim != 3 or not rows.shape[1] or not rows.shape[2]:
        msg = f"log-probabilities have shape {rows.shape}; expected [A, D, k]"
        raise ValueError(msg)
    # Written so that NaN fails too.
    if not ((rows[..., :-1] >= rows[..., 1:]).all() and (rows[..., 0] <= 1e-3).all()):
        msg = "each slot's candidates must be log-probabilities in descending order"
        raise ValueError(msg)


def _as_lists(rows: NDArray[Any]) -> list[list[float]]:
    """Python floats of one anchor's rows; rounding above 0 would put a child before its parent."""
    listed: list[list[float]] = np.minimum(rows, 0).tolist()
    return listed


def _check_budgets(budgets: Sequence[int]) -> None:
    if any(n < 0 for n in budgets):
        msg = f"budgets are {list(budgets)}; a tree has 0 or more nodes"
        raise ValueError(msg)
