"""Weights in 8-bit floats, as the numbers that they stand for.

Exporters store a matrix in float8 with its scale beside it, ``weight_scale_inv`` (DeepSeek's, one
number a block of 128 x 128) or ``weight_scale`` (compressed-tensors', one a tensor or a row); both
are factors. A tensor without one is what it says. The product is rounded to bfloat16, which holds
every 8-bit float and errs less than a tenth of what quantising did. How a server rounds its
activations is not repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_diag.errors import CheckpointError

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
SCALES = ("weight_scale_inv", "weight_scale")
ACTIVATIONS = ("input_scale",)
"""Of what a server rounds before it multiplies; not read."""
BLOCK = 128
ROWS = 8 * BLOCK
"""Rows in float32 at a time."""


def dequantised(name: str, values: Tensor, scale: Tensor | None) -> Tensor:
    """The weights in bfloat16.

    Parameters
    ----------
    values
        [R, C], or of any shape where one scale or none is for all.
    scale
        One number; [R] or [R, 1]; or one a block, [ceil(R / 128), ceil(C / 128)].

    Raises
    ------
    CheckpointError
        A scale of another shape, or of whole numbers.
    """
    if scale is None:
        return values.to(torch.bfloat16)
    if not scale.is_floating_point():
        raise CheckpointError(f"the scale of {name} is {scale.dtype}", "a floating-point scale")
    scale = scale.float()
    if scale.numel() == 1:
        return (values.float() * scale.reshape(())).to(torch.bfloat16)
    rows, columns = values.shape if values.ndim == 2 else (0, 0)
    if scale.shape in ((rows,), (rows, 1)):
        by_row = scale.reshape(rows, 1)
    elif scale.shape == (-(-rows // BLOCK), -(-columns // BLOCK)):
        by_row = scale.repeat_interleave(BLOCK, 0)[:rows]
    else:
        raise CheckpointError(
            f"{name} is {list(values.shape)} and its scale {list(scale.shape)}",
            f"one number, one a row, or one a block of {BLOCK} x {BLOCK}",
        )
    made = torch.empty(values.shape, dtype=torch.bfloat16)
    for at in range(0, rows, ROWS):
        factor = by_row[at : at + ROWS]
        if factor.shape[1] > 1:
            factor = factor.repeat_interleave(BLOCK, 1)[:, :columns]
        made[at : at + ROWS] = values[at : at + ROWS].float() * factor
    return made
