"""From a checkpoint's mapped tensors to a `Drafter` that runs."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from dflash_diag.checkpoints.auditing import TensorProblem, audit
from dflash_diag.checkpoints.facts import TargetFacts
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.errors import CheckpointError


def drafter_shape(checkpoint: Checkpoint, convention: Convention) -> DrafterShape:
    """Sizes as the tensors have them.

    Raises
    ------
    CheckpointError
        A tensor that fixes a size is missing, or the sizes do not fit together.
    """

    def shape(name: str) -> tuple[int, ...]:
        if name not in checkpoint.tensors:
            raise CheckpointError(f"{checkpoint.path} has no {name}", "a DFlash drafter")
        return tuple(checkpoint.tensors[name].shape)

    layers = {int(m[1]) for n in checkpoint.tensors if (m := re.match(r"layers\.(\d+)\.", n))}
    if layers != set(range(len(layers))) or not layers:
        raise CheckpointError(
            f"{checkpoint.path} holds layers {sorted(layers)}", "layers 0, 1, … without a gap"
        )
    hidden, columns = shape("fc.weight")
    first, n_taps = "layers.0.self_attn.", len(convention.layer_ids)
    (head,) = shape(f"{first}q_norm.weight")
    if columns % n_taps:
        raise CheckpointError(
            f"fc.weight has {columns} columns", f"a multiple of {n_taps}, the tapped layers"
        )
    return DrafterShape(
        hidden_size=hidden,
        n_taps=n_taps,
        n_layers=len(layers),
        n_heads=shape(f"{first}q_proj.weight")[0] // head,
        n_kv_heads=shape(f"{first}k_proj.weight")[0] // head,
        head_width=head,
        mlp_size=shape("layers.0.mlp.gate_proj.weight")[0],
        target_hidden_size=None if columns == n_taps * hidden else columns // n_taps,
        attention_bias=f"{first}q_proj.bias" in checkpoint.tensors,
        norm_eps=_norm_eps(checkpoint),
    )


def checkpoint_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The type in which the weights are stored: ``fc.weight``'s."""
    return checkpoint.tensors["fc.weight"].dtype


def load_drafter(
    checkpoint: Checkpoint,
    convention: Convention,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    facts: TargetFacts | None = None,
    strict: bool = True,
) -> Drafter:
    """The drafter in eval mode, under one reading of its weights.

    On a CPU and in the stored type the parameters are the mapped file itself; no copy is made.

    Parameters
    ----------
    dtype
        Type of all weights; the stored one by default.
    strict
        Refuse whatever `audit` reports. If false, unexpected tensors are left out and missing norms
        scale by one; anything else is refused all the same, since nothing can stand in for it.

    Raises
    ------
    CheckpointError
        The tensors are not those of the configured drafter, are damaged, or are not finite.
    """
    problems = audit(checkpoint, facts, convention=convention)
    blocking = problems if strict else [p for p in problems if not _can_do_without(p)]
    if blocking:
        others = f", and {len(blocking) - 1} more" if len(blocking) > 1 else ""
        raise CheckpointError(
            f"{checkpoint.path}: {blocking[0]}{others}", "the tensors that its configuration names"
        )
    with torch.device("meta"):
        drafter = Drafter(drafter_shape(checkpoint, convention), convention)
    checkpoint.tensors.verify()
    dtype = dtype or checkpoint_dtype(checkpoint)
    weights = {
        name: _weight(checkpoint, name, empty, dtype, device, convention)
        for name, empty in drafter.state_dict().items()
    }
    drafter.load_state_dict(weights, assign=True)
    return drafter.requires_grad_(False).eval()


def _weight(
    checkpoint: Checkpoint,
    name: str,
    empty: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
    convention: Convention,
) -> Tensor:
    if name not in checkpoint.tensors:
        one = 0.0 if convention.norm_style == "one_plus" else 1.0
        return torch.full(empty.shape, one, dtype=dtype, device=device)
    tensor = checkpoint.tensors[name].to(device=device, dtype=dtype)
    if not torch.isfinite(tensor).all():
        wide = torch.isfinite(checkpoint.tensors[name]).all()
        raise CheckpointError(
            f"{checkpoint.path}: {name} has values that are not finite"
            + (f" in {str(dtype).removeprefix('torch.')}" if wide else ""),
            "finite weights",
            "use another type" if wide else "the training diverged, or the file is damaged",
        )
    return tensor


def _can_do_without(problem: TensorProblem) -> bool:
    is_norm = problem.name.rsplit(".", 2)[-2].endswith("norm") if "." in problem.name else False
    return problem.kind == "unexpected" or (problem.kind == "missing" and is_norm)


def _norm_eps(checkpoint: Checkpoint) -> float:
    value = checkpoint.body.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise CheckpointError(f"the configuration has rms_norm_eps={value!r}", "a small number")
    return float(value)
