"""Gradients and leaves, read off the graph that a step leaves behind.

Symbols: A anchors, D proposed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

RESHAPES = (
    "Alias",
    "AsStrided",
    "Clone",
    "Expand",
    "Index",
    "Permute",
    "Reshape",
    "Select",
    "Slice",
    "Squeeze",
    "Split",
    "T",
    "ToCopy",
    "Transpose",
    "Unflatten",
    "Unsafe",
    "Unsqueeze",
    "View",
)
"""How the nodes begin that only select, reorder or cast what they are given."""


def loss_gradient(loss: Tensor, logits: Tensor) -> Tensor | None:
    """Gradient of the loss with respect to logits [A, D, V]: of their shape, in float64.

    Adapters often return a view of the tensor that the loss was computed from: a slice, another
    shape, another type. Such a view is not in the loss's graph, but what it was made from is, and
    the gradient there is taken through the same view.

    Returns
    -------
    Tensor or None
        None where the loss does not depend on these logits, or on what they are a view of.
    """
    if not (loss.requires_grad and logits.requires_grad):
        return None
    found = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)[0]
    if found is None:
        edge = _shared_origin(loss, logits)
        if edge is None:
            return None
        there = torch.autograd.grad(loss, edge, retain_graph=True)[0]
        # The view is linear, y = P x, so that P g is the derivative of <P'u, g> by u.
        u = torch.zeros_like(logits, requires_grad=True)
        back = torch.autograd.grad(
            logits, edge, grad_outputs=u, retain_graph=True, create_graph=True
        )[0]
        found = torch.autograd.grad(back, u, grad_outputs=there.to(back.dtype))[0]
    return found.detach().double()


def _shared_origin(loss: Tensor, logits: Tensor) -> GradientEdge | None:
    """The node nearest to the logits, through views only, on which the loss depends too."""
    of_loss = set(nodes(loss))
    node, output = logits.grad_fn, logits.output_nr
    while node is not None:
        if node in of_loss:
            return GradientEdge(node, output)
        if not node.name().startswith(RESHAPES):
            return None
        before = [edge for edge in node.next_functions if edge[0] is not None]
        if len(before) != 1:
            return None
        node, output = before[0]
    return None


def nodes(value: Tensor) -> Iterator[Any]:
    """Every node of the graph behind a tensor, once."""
    waiting, seen = [value.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [edge[0] for edge in node.next_functions]


def leaves(value: Tensor) -> list[Tensor]:
    """Every tensor that requires a gradient and on which ``value`` depends: what is trained."""
    return [node.variable for node in nodes(value) if hasattr(node, "variable")]
