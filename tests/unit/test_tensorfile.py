"""A safetensors file written piece by piece against safetensors' own writer."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import save

from dflash_diag.errors import BadInput
from dflash_diag.tensorfile import TensorFile


def tensors(dtype, n_layers=12):
    generator = torch.Generator().manual_seed(0)
    layers = {
        f"layer.{j}": torch.randn(7, 6, generator=generator).to(dtype)
        for j in range(-1, n_layers - 1)
    }
    return {"tokens": torch.arange(9), "rows": torch.arange(7), **layers}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["p0", 'an "id" with ünïcode and a \\'])
def test_the_bytes_are_those_of_safetensors(tmp_path, dtype, name):
    made = tensors(dtype)
    order = list(made)
    random.Random(0).shuffle(order)
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        layout = {k: (t.dtype, tuple(t.shape)) for k, t in made.items()}
        writer = TensorFile(file, layout, {"id": name})
        for key in order:
            # Also from memory that is no whole: a column of a larger tensor.
            wide = torch.stack([made[key], made[key] + 1], dim=-1)
            writer.put(key, wide[..., 0])
        writer.check()
    assert path.read_bytes() == save(made, metadata={"id": name})


def test_what_does_not_fit_or_never_comes_is_said(tmp_path):
    layout = {"a": (torch.int64, (3,)), "b": (torch.float32, (2, 2))}
    with (tmp_path / "a").open("wb") as file:
        writer = TensorFile(file, layout, {})
        with pytest.raises(BadInput, match=r"b is torch.bfloat16 \[2, 2\]; expected torch.float32"):
            writer.put("b", torch.zeros(2, 2, dtype=torch.bfloat16))
        with pytest.raises(BadInput, match=r"a is torch.int64 \[4\]"):
            writer.put("a", torch.arange(4))
        writer.put("a", torch.arange(3))
        with pytest.raises(BadInput, match="b never came"):
            writer.check()
