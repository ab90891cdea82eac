"""Gradients of a block's logits, and whether they say what perturbations say.

A gradient is zero for what is masked, and not lost where a small change is lost in rounding.

Symbols: T rows, K tapped layers, H hidden size, B block size, D proposed tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dflash_diag.adapters import AdapterError, Refused
from dflash_diag.adapters.bench import Bench, repeated
from dflash_diag.adapters.checks import Check


@dataclass(frozen=True)
class Slopes:
    """Gradients of a fixed combination of each slot's logits."""

    rows: Tensor
    """[D, T] size of the gradient by a row, times the row's size."""
    slots: Tensor | None
    """[D, B] the same for the block's own slots, where the adapter shows them."""
    along: Tensor
    """[D] slope from the states towards `Bench.others`."""
    weights: Tensor
    """[D, V] the combination."""


class Gradients:
    """Gradients of one adapter."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def of(self, anchor: int, rows: int, features: Tensor | None = None) -> Slopes | None:
        """Gradients of a block by its context and its slots; None where there is no graph."""
        if self.missing is not None:
            return None
        return self._graph(anchor, rows, self.bench.features if features is None else features)

    @cached_property
    def missing(self) -> str | None:
        """Why there are no gradients; None where there are."""
        anchor = self.bench.anchors[0]
        try:
            found = self._graph(anchor, anchor, self.bench.features)
        except (RuntimeError, AdapterError, Refused) as error:
            return str(error).splitlines()[0]
        return None if found is not None else "the logits carry no graph"

    @torch.enable_grad()
    def _graph(self, anchor: int, rows: int, features: Tensor) -> Slopes | None:
        bench, drafter = self.bench, self.bench.drafter
        x = features[:rows].detach().clone().requires_grad_()
        inputs, token = [x], bench.token(anchor)
        state = bench.context(rows, x)
        if drafter.has("block", "propose_block"):
            inputs.append(drafter.block(token).clone().requires_grad_())
            logits = drafter.propose_block(state, inputs[1], anchor)
        else:
            logits = drafter.propose(state, token, anchor)
        if not logits.requires_grad:
            return None
        weights = self._weights(logits.detach())
        combined = (torch.where(weights != 0, logits, 0.0) * weights).sum(-1)
        towards = (repeated(bench.others, rows) - x).detach().double()
        by_row, by_slot, along = [], [], []
        for one in combined:
            found = torch.autograd.grad(one, inputs, retain_graph=True, materialize_grads=True)
            by_row.append(found[0].flatten(1).norm(dim=-1) * x.detach().flatten(1).norm(dim=-1))
            by_slot += [g.norm(dim=-1) * inputs[1].detach().norm(dim=-1) for g in found[1:]]
            along.append((found[0].double() * towards).sum())
        return Slopes(
            torch.stack(by_row).float().cpu(),
            torch.stack(by_slot).float().cpu() if by_slot else None,
            torch.stack(along).cpu(),
            weights,
        )

    def _weights(self, logits: Tensor) -> Tensor:
        """[D, V] one random combination of each slot's logits, of the size of a relative change."""
        generator = torch.Generator().manual_seed(self.bench.seed + 2)
        drawn = torch.randn(logits.shape, generator=generator).to(logits.device)
        rated = logits.isfinite()
        kept = torch.where(rated, logits, 0.0)
        spread = torch.where(rated, kept - kept.sum(-1, True) / rated.sum(-1, True), 0.0)
        return torch.where(rated, drawn, 0.0) / spread.norm(dim=-1, keepdim=True)

    def agreement(self, cells: Iterable[Mapping[str, Any]]) -> Check:
        """Whether gradients say the same as perturbations: of which cells, and how steep."""
        asked: dict[str, Any] = {
            "check": "gradient",
            "question": "Do gradients and perturbations agree?",
        }
        bench, anchor = self.bench, self.bench.anchors[-1]
        slopes = self.of(anchor, anchor)
        if slopes is None:
            return Check(**asked, status="not testable", reason=self.missing or "")
        # Central differences, at the step where truncation and rounding weigh about the same.
        step = bench.unit ** (1 / 3)
        x, towards = bench.features.double(), (bench.others - bench.features).double()
        up, down = (
            bench.logits(anchor, (x + sign * step * towards).to(bench.features)) for sign in (1, -1)
        )
        rise = torch.where(slopes.weights != 0, up - down, 0.0).double() * slopes.weights.double()
        off = float(((rise.sum(-1) / (2 * step)).cpu() - slopes.along).abs().max())
        tolerance = bench.rounding / step + step * float(slopes.along.abs().max())
        cut = [one for one in cells if one["gradient"] == 0 and one["influence"] > bench.still]
        asked |= {"number": off, "tolerance": tolerance}
        if cut:
            reason = f"{len(cut)} cells with an influence have no gradient: the graph is cut"
        elif off > tolerance:
            reason = "the slope of the logits is not what the gradient says"
        else:
            return Check(**asked, status="ok")
        return Check(**asked, status="differs", reason=reason)
