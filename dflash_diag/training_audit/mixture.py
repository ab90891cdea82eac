"""Which loss has this gradient: its labels, its soft part, its temperature.

The gradient of one slot is c ((1-λ) (p - e) + λ v): c the slot's weight, e its label as one-hot, v
the gradient of a soft loss. Every slot has as many equations as there are tokens, and unknowns are
its own c and, common to all, λ and the temperature; so the fit is far over-determined, and what it
leaves over says whether the loss has this form at all.

Symbols: N slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from dflash_diag.training_audit.divergences import (
    FORWARD_KL,
    OTHERS,
    SMOOTHING,
    TOTAL_VARIATION,
    Divergence,
    cross_entropy,
)

TEMPERATURES = (0.25, 16.0)
"""Range in which a temperature is looked for."""
GRID = 25
SUBSET = 2_000_000
"""Numbers, slots times vocabulary, on which a temperature is looked for."""
NEARLY = 1e-3
"""Part of the gradient that may stay unexplained in float32."""
ROUNDED = 1e-5
"""Part that rounding alone leaves in float32."""
MUCH_BETTER = 4.0
"""A richer form is preferred where a simpler one leaves this many times as much."""
ROUNDINGS = 3.0
"""How many roundings of coarser numbers may stay unexplained."""
GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, eq=False)
class Slots:
    """The slots of a step that have a gradient, all in float64."""

    gradient: Tensor
    """[N, V]."""
    draft: Tensor
    """[N, V] logits."""
    target: Tensor | None
    """[N, V] logits."""
    labels: Mapping[str, Tensor]
    """[N] by where they come from, most likely first; -1 where there is none."""
    rounding: float
    """Spacing of the numbers in which the step computed its logits."""

    @property
    def tolerance(self) -> float:
        """Part of the gradient that may stay unexplained, as a relative size."""
        return max(NEARLY, ROUNDINGS * self.rounding)

    @cached_property
    def probabilities(self) -> Tensor:
        """[N, V] of the draft."""
        return self.draft.softmax(-1)

    def some(self) -> Slots:
        """Few enough of them to try many temperatures on."""
        n, v = self.draft.shape
        keep = max(8, SUBSET // v)
        if keep >= n:
            return self
        at = torch.linspace(0, n - 1, keep, device=self.draft.device).round().long()
        return Slots(
            self.gradient[at],
            self.draft[at],
            None if self.target is None else self.target[at],
            {name: one[at] for name, one in self.labels.items()},
            self.rounding,
        )


@dataclass(frozen=True, eq=False)
class Mixture:
    """A loss of the form c ((1-λ) CE + λ soft) that was fitted to a gradient."""

    labels: str
    """Which of the labels are the hard ones."""
    soft: str = ""
    """Name of the soft part; empty where there is none."""
    share: float | None = 0.0
    """λ; None where it varies from slot to slot."""
    temperature: float = 1.0
    residual: float = float("nan")
    """Part of the gradient that is left over, as a relative size."""
    scale: Tensor | None = None
    """[N] c."""
    shares: Tensor | None = None
    """[N] λ of each slot, where it varies."""


def recover(slots: Slots) -> tuple[Mixture, bool]:
    """The simplest form that explains the gradient, and whether it does; else the nearest one.

    A form that leaves no more than rounding is taken at once. Where one leaves little, but more
    than that, richer forms are tried as well, and it has to be about as good as the best of them.
    """
    tried = []
    for attempt in _attempts(slots):
        found = attempt()
        if found.residual <= max(ROUNDED, slots.rounding):
            return found, True
        tried.append(found)
    best = min(one.residual for one in tried)
    found = next(one for one in tried if one.residual <= MUCH_BETTER * best)
    return found, found.residual <= slots.tolerance


def _attempts(slots: Slots) -> list[Callable[[], Mixture]]:
    """Forms, the simplest first."""
    attempts = [partial(_hard, slots)]
    if slots.target is not None:
        attempts += [partial(_mixed, slots, one) for one in (FORWARD_KL, *OTHERS)]
        attempts.append(partial(_free, slots, None, FORWARD_KL))
        attempts.append(partial(_free, slots, FORWARD_KL, TOTAL_VARIATION))
    return [*attempts, partial(_smoothed, slots)]


# --- products: all that a fit needs of a slot's vectors ------------------------------------------


@dataclass(frozen=True, eq=False)
class _Products:
    """Inner products [N] of the gradient g with a hard part u and a soft part v."""

    gg: Tensor
    gu: Tensor
    uu: Tensor
    gv: Tensor
    uv: Tensor
    vv: Tensor

    def left(self, share: Tensor) -> Tensor:
        """Relative size of what c ((1-λ) u + λ v) leaves over, by λ [M], each c its best."""
        on_v = share[:, None]
        on_u = 1 - on_v
        gb = on_u * self.gu + on_v * self.gv
        bb = on_u**2 * self.uu + 2 * on_u * on_v * self.uv + on_v**2 * self.vv
        explained = gb.clamp(min=0).square() / bb.clamp(min=1e-300)
        return ((self.gg - explained).clamp(min=0).sum(-1) / self.gg.sum()).sqrt()

    def best_share(self, rounds: int = 5) -> tuple[float, float]:
        """λ in [0, 1] and what it leaves over: on a grid, and on finer ones around the best."""
        low, high = 0.0, 1.0
        for _ in range(rounds):
            grid = torch.linspace(low, high, 41, dtype=self.gg.dtype, device=self.gg.device)
            left = self.left(grid)
            at = int(left.argmin())
            share, least = float(grid[at]), float(left[at])
            low, high = float(grid[max(0, at - 1)]), float(grid[min(40, at + 1)])
        return share, least


def _hard_products(slots: Slots, labels: Tensor) -> tuple[Tensor, Tensor]:
    """<g, u> and <u, u> for u = p - e."""
    p, at = slots.probabilities, labels.clamp(min=0)[:, None]
    gu = (slots.gradient * p).sum(-1) - slots.gradient.gather(-1, at)[:, 0]
    uu = p.square().sum(-1) - 2 * p.gather(-1, at)[:, 0] + 1
    known = labels >= 0
    return torch.where(known, gu, 0.0), torch.where(known, uu, 1.0)


def _products(slots: Slots, labels: Tensor, v: Tensor) -> _Products:
    gu, uu = _hard_products(slots, labels)
    at = labels.clamp(min=0)[:, None]
    uv = (slots.probabilities * v).sum(-1) - v.gather(-1, at)[:, 0]
    return _Products(
        gg=slots.gradient.square().sum(-1),
        gu=gu,
        uu=uu,
        gv=(slots.gradient * v).sum(-1),
        uv=torch.where(labels >= 0, uv, 0.0),
        vv=v.square().sum(-1),
    )


def _finished(
    slots: Slots,
    labels: str,
    soft: Divergence | None,
    share: float,
    temperature: float,
    v: Tensor | None,
) -> Mixture:
    """The fit with every slot's c, and its residual computed from the vectors themselves."""
    b = (1 - share) * cross_entropy(slots.draft, slots.labels[labels].clamp(min=0))
    if v is not None:
        b = b + share * v
    scale = (slots.gradient * b).sum(-1) / b.square().sum(-1).clamp(min=1e-300)
    scale = scale.clamp(min=0)
    left = slots.gradient - scale[:, None] * b
    return Mixture(
        labels=labels,
        soft=soft.name if soft and share else "",
        share=share,
        temperature=temperature,
        residual=float(left.norm() / slots.gradient.norm()),
        scale=scale,
    )


# --- forms ---------------------------------------------------------------------------------------


def _hard(slots: Slots) -> Mixture:
    """Cross-entropy alone, against whichever labels fit best."""
    gg = slots.gradient.square().sum(-1)

    def left(name: str) -> float:
        gu, uu = _hard_products(slots, slots.labels[name])
        return float((gg - gu.clamp(min=0).square() / uu).clamp(min=0).sum())

    return _finished(slots, _first_best(slots.labels, left), None, 0.0, 1.0, None)


def _mixed(slots: Slots, soft: Divergence) -> Mixture:
    """Cross-entropy and one soft loss in one share, at one temperature."""
    some = slots.some()
    low, high = (float(torch.tensor(x).log()) for x in TEMPERATURES)
    grid = [low + i * (high - low) / (GRID - 1) for i in range(GRID)]
    # T = 1 is among them: nearly everybody uses it.
    grid = sorted({*grid, 0.0})
    best: tuple[float, float, str] = (float("inf"), 0.0, "")
    for log_t in grid:
        v = _soft(some, soft, log_t)
        by_name = {
            name: _products(some, one, v).best_share(rounds=2)[1]
            for name, one in some.labels.items()
        }
        name = _first_best(by_name, by_name.__getitem__)
        best = min(best, (by_name[name], log_t, name))
    _, log_t, name = best

    def left(at: float) -> float:
        return _products(some, some.labels[name], _soft(some, soft, at)).best_share()[1]

    step = (high - low) / (GRID - 1)
    finer = minimise(left, log_t - step, log_t + step)
    # A temperature of one is not moved by rounding.
    if abs(finer) < NEARLY or left(0.0) <= max(1.01 * left(finer), slots.rounding):
        finer = 0.0
    temperature = float(torch.tensor(finer, dtype=torch.float64).exp())
    v = _soft(slots, soft, finer)
    share, _ = _products(slots, slots.labels[name], v).best_share()
    return _finished(slots, name, soft, share, temperature, v)


def _soft(slots: Slots, soft: Divergence, log_temperature: float) -> Tensor:
    assert slots.target is not None  # noqa: S101 - soft losses are tried with target logits only
    temperature = float(torch.tensor(log_temperature, dtype=torch.float64).exp())
    return soft.gradient(slots.draft, slots.target, temperature)


def _smoothed(slots: Slots) -> Mixture:
    """Cross-entropy with label smoothing."""
    v = SMOOTHING.gradient(slots.draft, slots.draft, 1.0)
    fits = {name: _products(slots, one, v).best_share() for name, one in slots.labels.items()}
    name = _first_best(fits, lambda one: fits[one][1])
    return _finished(slots, name, SMOOTHING, fits[name][0], 1.0, v)


def _free(slots: Slots, one: Divergence | None, other: Divergence) -> Mixture:
    """Two losses in shares that vary from slot to slot; without ``one``, cross-entropy."""
    assert slots.target is not None  # noqa: S101 - soft losses are tried with target logits only
    name = next(iter(slots.labels))
    if one is None:
        u = cross_entropy(slots.draft, slots.labels[name].clamp(min=0))
    else:
        u = one.gradient(slots.draft, slots.target, 1.0)
    v = other.gradient(slots.draft, slots.target, 1.0)
    pair = torch.stack([u, v], dim=-1)
    found = torch.linalg.lstsq(pair, slots.gradient[..., None]).solution.clamp(min=0)
    left = slots.gradient - (pair @ found)[..., 0]
    parts = found[..., 0]
    scale = parts.sum(-1)
    named = f"{one.name if one else 'cross-entropy'} and {other.name}"
    return Mixture(
        labels=name,
        soft=f"{named} in shares that vary from slot to slot",
        share=None,
        residual=float(left.norm() / slots.gradient.norm()),
        scale=scale,
        shares=parts[:, 1] / scale.clamp(min=1e-300),
    )


def _first_best(names: Mapping[str, object] | Sequence[str], left: Callable[[str], float]) -> str:
    """The name that leaves least over; an earlier one where two are as good."""
    by_name = {name: left(name) for name in names}
    least = min(by_name.values())
    return next(n for n, x in by_name.items() if x <= 1.001 * least + 1e-18)


def minimise(f: Callable[[float], float], low: float, high: float, steps: int = 40) -> float:
    """Where a function with one valley between two ends is lowest, by golden section."""
    a, b = low, high
    c, d = b - GOLDEN * (b - a), a + GOLDEN * (b - a)
    at_c, at_d = f(c), f(d)
    for _ in range(steps):
        if at_c < at_d:
            b, d, at_d = d, c, at_c
            c = b - GOLDEN * (b - a)
            at_c = f(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + GOLDEN * (b - a)
            at_d = f(d)
    return (a + b) / 2


def without_square(share: float, temperature: float) -> float:
    """λ of the same gradient written as (1-λ) CE + λ KL_T, without the factor T²."""
    square = temperature**2
    return share * square / (share * square + 1 - share) if share < 1 else 1.0
