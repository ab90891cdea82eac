"""Where two ways of computing one target part: module by module, made there or inherited.

Each layer is run twice: as it comes, so that errors add up from layer to layer, and started from
the other side's input, so that only what the layer itself does differently is left. The noise floor
is measured in the same two ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dflash_diag.divergence import JUDGED, deviation, times_floor, with_floor
from dflash_diag.modules import OUTPUT, Place, Trace, Variant, computed_as, started_from, traced
from dflash_diag.targets import Target

LAYERS_AT_ONCE = 8
"""Layers whose modules are held in memory together, per run."""


def noise_variants(a: Variant, b: Variant, low: str = "bfloat16") -> tuple[Variant, Variant]:
    """Low precision and float32 of ``b``'s backend, whose difference is the noise floor.

    Parameters
    ----------
    low
        The low precision where both sides are in float32.
    """
    lower = next((v.dtype for v in (b, a) if v.dtype != "float32"), low)
    return Variant(b.backend, lower), Variant(b.backend, "float32")


@torch.inference_mode()
def compare_modules(
    target: Target,
    a: Variant,
    b: Variant,
    tokens: Sequence[int],
    *,
    layers: Sequence[int] | None = None,
    layers_at_once: int = LAYERS_AT_ONCE,
    tick: Callable[[int], None] = lambda _n: None,
) -> list[dict[str, Any]]:
    """Every module of a target as computed by ``a`` against ``b``, in execution order.

    Parameters
    ----------
    tokens
        One sequence.
    layers
        Decoder layers to look into; all by default.
    tick
        Told the number of layers done.

    Returns
    -------
    list
        Rows of `dflash_diag.divergence.with_floor`, with ``layer``, ``module``, and of the error
        that is left when each layer starts from ``b``'s input ``local_rel_rms``, ``local_floor``
        and ``local_times_floor``.
    """
    low, high = noise_variants(a, b)
    chosen = range(target.n_layers) if layers is None else layers
    found: dict[Place, dict[str, Any]] = {}
    for first in range(0, len(chosen), layers_at_once):
        window = list(chosen[first : first + layers_at_once])
        run = _Window(target, tokens, window)
        errors, local = run.compare(a, b)
        noise, local_noise = run.compare(low, high)
        for row in with_floor(errors, {(r["layer"], r["module"]): r for r in noise}):
            place = Place(row["layer"], row["module"])
            own, limit = local.get(place), local_noise.get(place)
            if own is not None and limit is not None:
                row["local_rel_rms"] = own["rel_rms"]
                row["local_floor"] = limit["rel_rms"]
                row["local_times_floor"] = max(times_floor(own[n], limit[n]) for n in JUDGED)
            found.setdefault(place, row)
        tick(len(window))
    return list(found.values())


class _Window:
    """Traces of some layers, each run once."""

    def __init__(self, target: Target, tokens: Sequence[int], layers: Sequence[int]) -> None:
        self._target, self._layers = target, layers
        self._ids = torch.tensor([list(tokens)])
        self._traces: dict[Variant, Trace] = {}

    def compare(
        self, x: Variant, y: Variant
    ) -> tuple[list[dict[str, Any]], dict[Place, dict[str, Any]]]:
        """Errors of x against y: as they come, and of each layer started from y's input."""
        examined, reference = self._trace(x), self._trace(y)
        errors = [
            {"layer": place.layer, "module": place.module, **deviation(value, reference[place])}
            for place, value in examined.items()
            if place in reference
        ]
        # A layer that was skipped over has no input at hand.
        inputs = {
            i: reference[Place(i - 1, OUTPUT)]
            for i in self._layers
            if Place(i - 1, OUTPUT) in reference
        }
        own = examined if x == y else self._run(x, inputs)
        local = {
            place: deviation(value, reference[place])
            for place, value in own.items()
            if place in reference and place.layer in inputs
        }
        return errors, local

    def _trace(self, variant: Variant) -> Trace:
        if variant not in self._traces:
            self._traces[variant] = self._run(variant, None)
        return self._traces[variant]

    def _run(self, variant: Variant, inputs: Mapping[int, Tensor] | None) -> Trace:
        with (
            computed_as(self._target, variant) as live,
            nullcontext() if inputs is None else started_from(live.parts, inputs),
            traced(live.parts, self._layers) as kept,
        ):
            live.logits(self._ids, last_only=True)
            return kept
