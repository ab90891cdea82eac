"""A block's DDTree as an inline drawing, the target's path through it marked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from math import exp
from typing import NamedTuple
from unicodedata import east_asian_width

import numpy as np

from dflash_diag.trees import Tree, ddtree
from dflash_diag.widgets.explorer.blocks import Block

LETTERS = 14
"""Cells of a token's text that are drawn at most; a wide character takes two."""
CELL, LINE, GAP, TOP, BEND = 7.5, 22, 32, 20, 14
"""Pixels: width of a letter, height of a row, from a label to the next but one column's start,
height above the rows, and from a node back to where its edge bends."""


class DrawnTree(NamedTuple):
    """A tree of one block, and how far the target follows it."""

    tree: Tree
    path: list[int]
    """Nodes that are the target's tokens, from slot 1 on."""


def grow(block: Block, nodes: int) -> DrawnTree:
    """The tree of ``nodes`` nodes, the root not counted, and the target's path through it."""
    tree = ddtree(block.topk_logprobs, nodes)
    path: list[int] = []
    parents, depths, ranks = (one.tolist() for one in (tree.parent, tree.depth, tree.rank))
    # A parent comes before its children, so that one pass finds the whole path.
    for node, (parent, depth, rank) in enumerate(zip(parents, depths, ranks, strict=True)):
        on_path = len(path) == depth - 1 and parent == (path[-1] if path else -1)
        if on_path and rank == block.rank[depth - 1]:
            path.append(node)
    return DrawnTree(tree, path)


def draw(block: Block, drawn: DrawnTree, word: Callable[[int], str], anchor: int) -> str:
    """The tree as SVG: a column a slot, the plain draft as its top row.

    Parameters
    ----------
    word
        What a token is called.
    anchor
        The token at the root.
    """
    tree, path = drawn.tree, set(drawn.path)
    parents, depths = [-1, *(tree.parent + 1).tolist()], [0, *tree.depth.tolist()]
    labels = [_cut(word(anchor))] + [
        _label(block, int(depth), int(rank), word, on_path=node in path)
        for node, (depth, rank) in enumerate(zip(tree.depth, tree.rank, strict=True))
    ]
    rows = _rows(parents)
    widths = [
        max(_cells(label) for label, d in zip(labels, depths, strict=True) if d == depth)
        for depth in range(max(depths) + 1)
    ]
    lefts = [8.0, *(8 + np.cumsum([CELL * w + GAP for w in widths])).tolist()]
    at = [(lefts[d], TOP + LINE * (row + 0.5)) for d, row in zip(depths, rows, strict=True)]
    ends = [x + 9 + CELL * _cells(label) for (x, _), label in zip(at, labels, strict=True)]
    marked = {0, *(node + 1 for node in path)}
    parts = [
        f'<text x="{lefts[k]:.0f}" y="13" class="head">k = {k}</text>'
        for k in range(1, len(widths))
    ]
    for kind, on_path in (("", False), (' class="got"', True)):
        edges = [(parents[n], n) for n in range(1, len(at)) if (n in marked) is on_path]
        parts.append(f'<path{kind} d="{_lines(at, ends, edges)}"/>')
    for node, (x, y) in enumerate(at):
        kind = ' class="got"' if node in marked else ""
        parts.append(
            f'<circle{kind} cx="{x:.0f}" cy="{y:.0f}" r="4"/>'
            f'<text{kind} x="{x + 8:.0f}" y="{y + 4:.0f}">{escape(labels[node])}</text>'
        )
    width, height = lefts[-1], TOP + LINE * (max(rows) + 1)
    return (
        f'<svg role="img" aria-label="{escape(said(block, drawn, word))}" width="{width:.0f}" '
        f'height="{height:.0f}">{"".join(parts)}</svg>'
    )


def said(block: Block, drawn: DrawnTree, word: Callable[[int], str]) -> str:
    """The tree in one sentence."""
    nodes, depth = len(drawn.tree.depth), len(drawn.path)
    along = " ".join(word(int(token)) for token in block.labels[:depth])
    found = f"{nodes} node{'s' * (nodes != 1)}: {depth} of {len(block.labels)} accepted"
    found += f" ({along})" if depth else ""
    if depth == len(block.labels):
        return f"{found}, the whole block."
    label, rank = word(int(block.labels[depth])), int(block.rank[depth])
    return f"{found}; the target's next, {label} of rank {rank}, is not in it."


def _label(
    block: Block, depth: int, rank: int, word: Callable[[int], str], *, on_path: bool
) -> str:
    token, logprob = block.topk_ids[depth - 1, rank], block.topk_logprobs[depth - 1, rank]
    return f"{'✓ ' if on_path else ''}{_cut(word(int(token)))} {probability(float(logprob))}"


def probability(logprob: float) -> str:
    """A probability in two digits, in one where it is below a hundredth."""
    p = exp(logprob)
    return f"{p:.2f}" if p >= 0.01 else f"{p:.1g}"


def _rows(parents: list[int]) -> list[int]:
    """The row of every node: its first child's is its own, the next child is below all of that."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    rows, free = [0] * len(parents), 0
    # Nodes come best first, and so do the children of each.
    todo = [(0, True)]
    while todo:
        node, is_first = todo.pop()
        if not is_first:
            free += 1
        rows[node] = free
        own = children[node]
        todo += [(child, i == 0) for i, child in reversed(list(enumerate(own)))]
    return rows


def _lines(at: list[tuple[float, float]], ends: list[float], edges: list[tuple[int, int]]) -> str:
    """Edges (parent, node) as a path: right from the parent's label, or down and then right."""
    said, lowest = "", {}
    for parent, node in edges:
        (x, y), above = at[node], at[parent][1]
        if y == above:
            said += f"M{ends[parent] + 2:.0f} {y:.0f}H{x - 4:.0f}"
        else:
            said += f"M{x - BEND:.0f} {y:.0f}H{x - 4:.0f}"
            lowest[parent] = x - BEND, above, y
    # One line down for all children of a node: several would look darker.
    return said + "".join(f"M{x:.0f} {top:.0f}V{y:.0f}" for x, top, y in lowest.values())


def _widths(text: str) -> Iterator[int]:
    for letter in text:
        yield 2 if east_asian_width(letter) in "WF" else 1


def _cells(text: str) -> int:
    return sum(_widths(text))


def _cut(text: str) -> str:
    """The text, its end left out where it is too long to be drawn."""
    if _cells(text) <= LETTERS:
        return text
    used, kept = 0, 0
    for width in _widths(text):
        if used + width >= LETTERS:
            break
        used, kept = used + width, kept + 1
    return f"{text[:kept]}…"
