"""One step of many Muon optimizers: equal shapes share one product.

`torch.optim.Muon` steps matrix by matrix. Twelve small drafters have 180 of them, and a GPU waits
for their thousands of launches: one training step of all twelve took 176 ms that way and 88 ms this
way (H200, torch 2.11, 2026-11-29). The state stays torch's own; so does the arithmetic, which a
test compares with torch's step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_RULE = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
_Entry = tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]
"""A matrix, its gradient, its optimizer's parameter group, and its state."""


@torch.no_grad()
def step_together(optimizers: Iterable[torch.optim.Muon]) -> None:
    """Step every optimizer once, each by its own learning rate and weight decay.

    Raises
    ------
    ValueError
        One has another rule than Nesterov momentum with steps scaled to AdamW's, or another
        momentum or iteration than the first.
    """
    optimizers = list(optimizers)
    rules = [{name: group[name] for name in _RULE} for o in optimizers for group in o.param_groups]
    wanted = {**rules[0], "nesterov": True, "adjust_lr_fn": "match_rms_adamw"}
    if any(rule != wanted for rule in rules):
        raise ValueError(f"the optimizers must share one rule, {wanted}")
    by_shape: dict[torch.Size, list[_Entry]] = defaultdict(list)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entry = (parameter, parameter.grad, group, optimizer.state[parameter])
                    by_shape[parameter.shape].append(entry)
    for shape, entries in by_shape.items():
        parameters = [parameter for parameter, *_ in entries]
        groups = [group for *_, group, _ in entries]
        rule = groups[0]
        gradients = torch.stack([gradient for _, gradient, *_ in entries])
        for parameter, *_, state in entries:
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [state["momentum_buffer"] for *_, state in entries]
        torch._foreach_lerp_(buffers, list(gradients.unbind()), 1 - rule["momentum"])
        update = gradients.lerp(torch.stack(buffers), rule["momentum"])
        update = orthogonalized(update, rule["ns_coefficients"], rule["ns_steps"], rule["eps"])
        scale = 0.2 * math.sqrt(max(shape))  # arXiv 2502.16982, section 2.2
        kept = [1 - group["lr"] * group["weight_decay"] for group in groups]
        torch._foreach_mul_(parameters, kept)
        steps = list(update.to(gradients.dtype).unbind())
        torch._foreach_mul_(steps, [-group["lr"] * scale for group in groups])
        torch._foreach_add_(parameters, steps)


def orthogonalized(
    matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Newton-Schulz towards the nearest orthogonal matrices of [n, r, c].

    In bfloat16 on a GPU, as torch's; in float32 on a CPU, of which many emulate bfloat16 slowly.
    """
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    if tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
