"""Gradients of the losses that drafters are trained with, with respect to the draft's logits.

Each is a function of one slot's draft logits z and target logits t (or its label), summed over
nothing: [N, V] in, [N, V] out. p = softmax(z), q = softmax(t); at temperature T both are of z/T and
t/T, and the gradient is that of T² times the divergence, whose size then does not depend on T.

Symbols: N slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Gradient = Callable[[Tensor, Tensor, float], Tensor]


class Divergence(NamedTuple):
    """A soft loss: what it is called, and its gradient at a temperature."""

    name: str
    gradient: Gradient
    value: Gradient
    """[N] the loss itself, T² included."""


def cross_entropy(z: Tensor, labels: Tensor) -> Tensor:
    """Gradient of -log p(label): p - e."""
    p = z.softmax(-1)
    return p.scatter_add(-1, labels[:, None], p.new_full((len(p), 1), -1.0))


def _forward_kl(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    return temperature * ((z / temperature).softmax(-1) - (t / temperature).softmax(-1))


def _forward_kl_value(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    log_p, log_q = (x.div(temperature).log_softmax(-1) for x in (z, t))
    return temperature**2 * torch.nn.functional.kl_div(
        log_p, log_q, reduction="none", log_target=True
    ).sum(-1)


def _reverse_kl(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    log_p, log_q = (x.div(temperature).log_softmax(-1) for x in (z, t))
    return temperature * _centred(log_p.exp(), _difference(log_p, log_q))


def _reverse_kl_value(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    return _forward_kl_value(t, z, temperature)


def _jensen_shannon(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    log_p, log_q = (x.div(temperature).log_softmax(-1) for x in (z, t))
    middle = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=z.dtype))
    return 0.5 * temperature * _centred(log_p.exp(), log_p - middle)


def _jensen_shannon_value(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    log_p, log_q = (x.div(temperature).log_softmax(-1) for x in (z, t))
    middle = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=z.dtype))
    both = [x.exp() * (x - middle) for x in (log_p, log_q)]
    return 0.5 * temperature**2 * (both[0] + both[1]).sum(-1)


def _total_variation(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    p, q = (x.div(temperature).softmax(-1) for x in (z, t))
    return temperature * _centred(p, (p > q).to(p.dtype))


def _total_variation_value(z: Tensor, t: Tensor, temperature: float) -> Tensor:
    p, q = (x.div(temperature).softmax(-1) for x in (z, t))
    return temperature**2 * (p - q).clamp(min=0).sum(-1)


def _squared(z: Tensor, t: Tensor, temperature: float) -> Tensor:  # noqa: ARG001
    return (z - t) / z.shape[-1]


def _squared_value(z: Tensor, t: Tensor, temperature: float) -> Tensor:  # noqa: ARG001
    return 0.5 * (z - t).square().mean(-1)


def _smoothing(z: Tensor, t: Tensor, temperature: float) -> Tensor:  # noqa: ARG001
    return z.softmax(-1) - 1 / z.shape[-1]


def _smoothing_value(z: Tensor, t: Tensor, temperature: float) -> Tensor:  # noqa: ARG001
    return -z.log_softmax(-1).mean(-1)


def _centred(p: Tensor, x: Tensor) -> Tensor:
    """Derivative of a mean of ``x`` under softmax p by the logits, ``x`` held: p (x - <p, x>)."""
    return p * (x - (p * x).sum(-1, keepdim=True))


def _difference(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Zero where p is: a target may rule tokens out."""
    return torch.where(log_p.exp() > 0, log_p - log_q, 0.0)


def overlap(z: Tensor, t: Tensor) -> Tensor:
    """[N] share of the proposals of a sampled draft that are accepted: sum of min(p, q)."""
    return torch.minimum(z.softmax(-1), t.softmax(-1)).sum(-1)


FORWARD_KL = Divergence("KL(target, draft)", _forward_kl, _forward_kl_value)
SMOOTHING = Divergence("label smoothing", _smoothing, _smoothing_value)
"""Needs no target."""
TOTAL_VARIATION = Divergence("total variation", _total_variation, _total_variation_value)
OTHERS = (
    Divergence("KL(draft, target)", _reverse_kl, _reverse_kl_value),
    Divergence("Jensen-Shannon", _jensen_shannon, _jensen_shannon_value),
    TOTAL_VARIATION,
    Divergence("squared difference of logits", _squared, _squared_value),
)
"""What is tried where cross-entropy and KL(target, draft) do not explain the gradient."""
