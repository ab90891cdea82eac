"""From a checkpoint's mapped tensors to a `Drafter` that runs.

Which parts a drafter has beside its body follows from the reading (its own embedding or head, a
Markov head, a selector) and, for the convolutions, from the tensors; their sizes are the tensors'.
"""

from __future__ import annotations

import re
from typing import Literal

import torch
from torch import Tensor

from dflash_diag.additions import ConvolutionShape, MarkovShape, SelectorShape
from dflash_diag.checkpoints.auditing import TensorProblem, audit
from dflash_diag.checkpoints.facts import TargetFacts
from dflash_diag.checkpoints.keys import draft_value
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.errors import CheckpointError

DEFAULT_CANDIDATES = 16
"""``selector_top_k`` where the configuration lacks it, as in ``speculators``."""


def drafter_shape(checkpoint: Checkpoint, convention: Convention) -> DrafterShape:
    """Sizes as the tensors have them.

    Raises
    ------
    CheckpointError
        A tensor that fixes a size is missing, or the sizes do not fit together.
    """

    def shape(name: str) -> tuple[int, ...]:
        return _shape(checkpoint, name, "a DFlash drafter")

    layers = {int(m[1]) for n in checkpoint.tensors if (m := re.match(r"layers\.(\d+)\.", n))}
    if layers != set(range(len(layers))) or not layers:
        raise CheckpointError(
            f"{checkpoint.path} holds layers {sorted(layers)}", "layers 0, 1, … without a gap"
        )
    if len(layers) != len(convention.in_block):
        raise CheckpointError(
            f"{checkpoint.path} holds {len(layers)} layers",
            f"the {len(convention.in_block)} that the configuration counts (num_hidden_layers)",
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
        convolution=_convolution(checkpoint, hidden),
        markov=_markov(checkpoint) if convention.proposal == "markov" else None,
        selector=_selector(checkpoint) if convention.proposal == "selector" else None,
        embedding_rows=_rows(checkpoint, "embed_tokens.weight", hidden, "embedding=own")
        if convention.embedding == "own"
        else 0,
        head_rows=_rows(checkpoint, "lm_head.weight", hidden, "head=own")
        if convention.head == "own"
        else 0,
        has_map=convention.head == "own" and convention.vocabulary_map != "none",
    )


def _shape(
    checkpoint: Checkpoint, name: str, wanted_by: str, expected: tuple[int | None, ...] = ()
) -> tuple[int, ...]:
    """The shape of a tensor that must be there; None in ``expected`` stands for any size."""
    if name not in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path} has no {name}", wanted_by)
    found = tuple(checkpoint.tensors[name].shape)
    sizes = expected or (None,) * len(found)
    if len(found) != len(sizes) or any(
        want not in (None, have) for want, have in zip(sizes, found, strict=True)
    ):
        words = ", ".join("any" if size is None else str(size) for size in sizes)
        raise CheckpointError(f"{checkpoint.path}: {name} is {list(found)}", f"[{words}]")
    return found


def _rows(checkpoint: Checkpoint, name: str, hidden: int, wanted_by: str) -> int:
    return _shape(checkpoint, name, f"{wanted_by} needs it", (None, hidden))[0]


def _convolution(checkpoint: Checkpoint, hidden: int) -> ConvolutionShape | None:
    """Of the first layer; the others' tensors are compared with it as they are loaded."""
    if not any(".attention_conv." in name or ".mlp_conv." in name for name in checkpoint.tensors):
        return None
    conv, wanted_by = "layers.0.attention_conv.", "the convolutions of a DFlash2 drafter"
    taps = _shape(checkpoint, f"{conv}base_kernel", wanted_by, (2, None, hidden))[1]
    name = f"{conv}kernel_projection.weight"
    rows = _shape(checkpoint, name, wanted_by, (None, hidden))[0]
    groups, rest = divmod(rows, 2 * taps)
    if rest or not groups or hidden % groups:
        raise CheckpointError(
            f"{checkpoint.path}: {name} has {rows} rows",
            f"2 x {taps} taps x a number of groups that divides {hidden}",
        )
    return ConvolutionShape(taps, groups)


def _markov(checkpoint: Checkpoint) -> MarkovShape:
    wanted_by = "the Markov head of a DSpark drafter"
    n_before, rank = _shape(checkpoint, "markov_head.markov_w1", wanted_by, (None, None))
    n_biased = _shape(checkpoint, "markov_head.markov_w2", wanted_by, (None, rank))[0]
    kind: Literal["vanilla", "gated", "rnn"] = "vanilla"
    if "markov_head.gate_proj.weight" in checkpoint.tensors:
        kind = "gated"
    elif "markov_head.joint_proj.weight" in checkpoint.tensors:
        kind = "rnn"
    declared, key = draft_value(checkpoint.config, "markov_head_type")
    if declared is not None and str(declared).lower() != kind:
        raise CheckpointError(
            f"{key} is {declared!r}, and the file has the tensors of the {kind} kind",
            "one kind of Markov head",
        )
    return MarkovShape(n_before, n_biased, rank, kind)


def _selector(checkpoint: Checkpoint) -> SelectorShape:
    wanted_by = "the candidate selector of a DFlash2 drafter"
    name = "candidate_selector.predecessor_codebook"
    n_tokens, rank = _shape(checkpoint, name, wanted_by, (None, None))
    top_k, key = draft_value(checkpoint.config, "selector_top_k")
    top_k = DEFAULT_CANDIDATES if top_k is None else top_k
    if isinstance(top_k, bool) or not isinstance(top_k, int) or not 0 < top_k <= n_tokens:
        raise CheckpointError(f"{key} is {top_k!r}", f"a whole number from 1 to {n_tokens}")
    return SelectorShape(n_tokens, rank, top_k)


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
    if name not in checkpoint.tensors and name.endswith("norm.weight"):
        one = 0.0 if convention.norm_style == "one_plus" else 1.0
        return torch.full(empty.shape, one, dtype=dtype, device=device)
    _shape(checkpoint, name, "every tensor of the drafter", tuple(empty.shape))
    if not empty.is_floating_point():
        return _whole_numbers(checkpoint, name).to(device)
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


def _whole_numbers(checkpoint: Checkpoint, name: str) -> Tensor:
    tensor = checkpoint.tensors[name]
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CheckpointError(f"{checkpoint.path}: {name} is {kind}", "whole numbers")
    return tensor.long()


def _can_do_without(problem: TensorProblem) -> bool:
    is_norm = problem.name.rsplit(".", 2)[-2].endswith("norm") if "." in problem.name else False
    return problem.kind == "unexpected" or (problem.kind == "missing" and is_norm)


def _norm_eps(checkpoint: Checkpoint) -> float:
    value = checkpoint.body.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise CheckpointError(f"the configuration has rms_norm_eps={value!r}", "a small number")
    return float(value)
