"""Calling a training step so that whatever it does becomes an answer.

The step is other people's code. It gets copies, so that it can damage nothing; what it raises is
caught and named; what it returns is checked before anybody computes with it; and what it prints
goes to standard error, where it spoils no output.

Symbols: T tokens, K layers, H hidden size, A anchors, D proposed tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_diag.training_audit.material import Material, Step

DATA_SEED, NOISE_SEED = 11, 23
RETURNS = "loss, logits [A, D, V], labels [A, D], weights [A, D], target_logits [A, D, V] or None"


class StepError(Exception):
    """The step raised, or returned what cannot be used; its text says which."""


@dataclass(frozen=True, eq=False)
class Output:
    """What one call returned, checked."""

    loss: Tensor
    """Scalar."""
    logits: Tensor
    """[A, D, V], as they were returned: still in the graph, if they were."""
    labels: Tensor
    """[A, D] int64."""
    weights: Tensor
    """[A, D] float64."""
    target_logits: Tensor | None
    """[A, D, V]."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """Reported numbers by name; None for what is no single number."""


@dataclass(eq=False)
class Caller:
    """A step with the text that it is tried on."""

    step: Step
    material: Material
    mutated: set[str] = field(default_factory=set)
    """Names of inputs that the step has changed in place."""
    calls: int = 0
    shape: tuple[int, int] | None = None
    """D and V of the first call; others have to have the same."""

    def __call__(
        self,
        *,
        tokens: Tensor | None = None,
        states: Tensor | None = None,
        anchors: tuple[int, ...] | None = None,
        loss_mask: Tensor | None = None,
        data_seed: int = DATA_SEED,
        noise_seed: int = NOISE_SEED,
    ) -> Output:
        """One call; whatever is not given is the material's.

        ``states`` that require a gradient stay in the graph.

        Raises
        ------
        StepError
            The step raised, or what it returned is not what the contract says.
        """
        m = self.material
        places = m.anchors if anchors is None else anchors
        given = {
            "tokens": m.tokens if tokens is None else tokens,
            "states": m.states if states is None else states,
            "anchors": torch.tensor(places, device=m.tokens.device),
            "loss_mask": m.loss_mask if loss_mask is None else loss_mask,
        }
        handed = {name: value.clone() for name, value in given.items()}
        self.calls += 1
        try:
            with _apart():
                returned = self.step(*handed.values(), data_seed, noise_seed)
        except (Exception, SystemExit) as error:  # other people's code may raise anything
            raise StepError(_named(error)) from error
        self.mutated |= {
            name for name, value in given.items() if not torch.equal(value, handed[name].detach())
        }
        output = checked(returned, len(places))
        shape = (output.logits.shape[1], output.logits.shape[2])
        if self.shape not in (None, shape):
            raise StepError(f"its logits have [D, V] = {[*shape]}, in the first call {self.shape}")
        self.shape = shape
        return output


@contextlib.contextmanager
def _apart() -> Any:
    """Prints go to standard error, and gradients are on whatever the caller set."""
    with contextlib.redirect_stdout(sys.stderr), torch.inference_mode(False), torch.enable_grad():
        yield


def _named(error: BaseException) -> str:
    """An exception in one line, with where the step raised it."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    said = " ".join(str(error).split())
    return f"it raised {type(error).__name__}{f': {said[:300]}' if said else ''}{where}"


def checked(returned: Any, n_anchors: int) -> Output:
    """What a step returned as an `Output`.

    Raises
    ------
    StepError
        Not what the contract says: the text names the part, what it is and what it should be.
    """
    if not isinstance(returned, tuple | list) or len(returned) not in (5, 6):
        size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise StepError(f"it returned {_kind(returned)}{size}, not {RETURNS}")
    loss, logits, labels, weights, target = returned[:5]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise StepError(f"its loss is {_shape(loss)}, not one floating-point number")
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[0] != n_anchors:
        raise StepError(
            f"its logits are {_shape(logits)}, not [A, D, V] with A = {n_anchors} anchors"
        )
    if not logits.is_floating_point():
        raise StepError(f"its logits are of {logits.dtype}, not floating-point")
    a, d, _ = logits.shape
    for name, value in (("labels", labels), ("weights", weights)):
        if not isinstance(value, Tensor) or value.shape != (a, d):
            raise StepError(f"its {name} are {_shape(value)}, not [A, D] = [{a}, {d}]")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise StepError(f"its labels are of {labels.dtype}, not token ids")
    if target is not None and (
        not isinstance(target, Tensor)
        or target.shape != logits.shape
        or not target.is_floating_point()
    ):
        raise StepError(
            f"its target logits are {_shape(target)}, not None and not [A, D, V] like its logits "
            f"{[*logits.shape]}"
        )
    weights = weights.detach().double()
    for name, value in (("loss", loss), ("logits", logits), ("weights", weights)):
        if not bool(value.detach().isfinite().all()):
            raise StepError(f"its {name} {'is' if name == 'loss' else 'are'} not finite")
    if bool((weights < 0).any()):
        raise StepError("some of its weights are negative")
    if target is not None and bool(target.detach().isnan().any()):
        raise StepError("its target logits are not numbers")
    return Output(
        loss=loss,
        logits=logits,
        labels=labels.detach().long(),
        weights=weights,
        target_logits=target,
        metrics=_metrics(returned[5]) if len(returned) == 6 else {},
    )


def _metrics(given: Any) -> dict[str, float | None]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise StepError(f"its metrics are {_kind(given)}, not a dictionary")
    return {str(name): _number(value) for name, value in given.items()}


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{[*value.shape]} of {str(value.dtype).removeprefix('torch.')}"
    return _kind(value)


def _kind(value: Any) -> str:
    """The type of something, with its article."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
