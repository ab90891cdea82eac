"""Whether the tensors are those that the configuration calls for, and sane."""

from __future__ import annotations

import re
from typing import Any

from dflash_diag.diagnostics.base import Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

LAYER = re.compile(r"^layers\.(\d+)\.(?:self_attn\.|mlp\.)?(.+?)(?:\.weight)?$")


def judge(result: Result) -> Judgement:
    """Any missing, unexpected, mis-shaped or non-finite tensor fails; one of zeros warns."""
    p = result.params
    if p["problems"]:
        why = f"{len(p['problems'])} tensors do not fit: {p['problems'][0]}"
        return Judgement(Verdict.FAIL, why)
    if p["not_finite"]:
        return Judgement(Verdict.FAIL, f"not finite: {', '.join(p['not_finite'])}")
    if p["all_zero"]:
        return Judgement(Verdict.WARN, f"nothing but zeros: {', '.join(p['all_zero'])}")
    return Judgement(Verdict.PASS, f"all {p['n_tensors']} tensors fit and hold finite numbers")


@diagnostic(
    id="checkpoint.tensors",
    question="Are the tensors those that the configuration calls for?",
    page="01_checkpoint",
    judge=judge,
)
def tensors(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Audit of names and shapes, and the root mean square of every tensor's values.

    Returns
    -------
    tuple
        Frame columns: tensor, kind, layer (-1: none), shape, dtype, parameters, rms, problem.
    """
    import pandas as pd

    role = inputs.roles[0]
    checkpoint, name = inputs.checkpoint(role), inputs.name(role)
    problems = {one.name: one for one in inputs.problems(role)}
    rows, not_finite, all_zero = [], [], []
    for tensor in checkpoint.tensors:
        values = checkpoint.tensors[tensor]
        # float32 squares of bfloat16 weights neither overflow nor vanish at any sane scale
        rms = float(values.float().square().mean().sqrt()) if values.numel() else 0.0
        if rms != rms or rms == float("inf"):
            not_finite.append(tensor)
        elif rms == 0.0:
            all_zero.append(tensor)
        kind, layer = kind_of(tensor)
        rows.append(
            {
                "tensor": tensor,
                "kind": kind,
                "layer": layer,
                "shape": ", ".join(map(str, values.shape)),
                "dtype": str(values.dtype).removeprefix("torch."),
                "parameters": values.numel(),
                "rms": rms if rms < float("inf") else None,
                "problem": problems[tensor].kind if tensor in problems else "",
            }
        )
    described = [
        f"{one.name} is {one.kind} (found {one.found}, expected {one.expected}): {one.reason}"
        for one in problems.values()
    ]
    if described:
        headline = f"{name}: {len(described)} tensors do not fit. {described[0]}."
    else:
        headline = f"{name}: all {len(rows)} tensors are expected, of the right shape, and used."
    return (
        headline,
        pd.DataFrame(rows).astype({"rms": float}),
        {
            "params": {
                "n_tensors": len(rows),
                "problems": described,
                "not_finite": not_finite,
                "all_zero": all_zero,
                "finding": f"{name}: size of the weights, by kind and layer",
            },
            "notes": described[1:],
        },
    )


def kind_of(tensor: str) -> tuple[str, int]:
    """What a tensor is, without its layer, and the layer (-1 outside layers)."""
    inside = LAYER.match(tensor)
    if inside:
        return inside[2], int(inside[1])
    return tensor.removesuffix(".weight"), -1
