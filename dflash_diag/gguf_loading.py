"""A GGUF file's model through transformers: dequantised, whole, and in seconds.

transformers reads the file's every token through numpy several times over, and builds the table of
tensor names anew for each module of the model: for 135 M parameters that takes ten times as long as
the weights. Both are replaced while it loads; what it makes of them is its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch

from dflash_diag.errors import BadInput
from dflash_diag.gguf_file import HEAD, GgufFile

_STRAIGHT = (None, "none")
"""Ways to scale RoPE that leave it as it is."""


@contextmanager
def quick_reading() -> Iterator[None]:
    """Spare transformers the slow parts of ``gguf``, and its own bar, inside the block."""
    import gguf

    class Reader(gguf.GGUFReader):
        """Slices plain memory: a slice of a mapped array takes ten times as long."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = mapped.view(np.ndarray)

    swapped: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", cache(Reader)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ]
    with suppress(ImportError):  # to be dropped when its successor knows all architectures
        loader = import_module("transformers.modeling_gguf_pytorch_utils")
        swapped.append((loader, "tqdm", lambda items, **_: items))
    before = [(home, name, getattr(home, name)) for home, name, _ in swapped]
    try:
        for home, name, value in swapped:
            setattr(home, name, value)
        yield
    finally:
        for home, name, value in before:
            setattr(home, name, value)


def as_plain_numbers() -> dict[str, Any]:
    """Arguments with which transformers dequantises whatever machine it is on.

    It would keep some architectures' weights in blocks where it finds kernels for them, which it
    may fetch.
    """
    import transformers

    made = getattr(transformers, "GgufConfig", None)
    return {} if made is None else {"quantization_config": made(dequantize=True)}


def refuse_another_model(file: GgufFile, config: Any, kind: Any) -> None:
    """Refuse a file whose numbers are not those of the model that transformers would make of it.

    It would allocate those that the file lacks, at random, and say nothing of those that it leaves
    out: biases, factors of RoPE, layers beyond the count.

    Parameters
    ----------
    kind
        The class that makes the model.
    """
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = (getattr(kind, "from_config", None) or kind)(config)
        model.tie_weights()
    asked = sum(one.numel() for one in model.parameters())
    tied = getattr(text, "tie_word_embeddings", False)
    held = sum(
        math.prod(one.shape)
        for name, one in file.tensors.items()
        if not (tied and name == HEAD) and not file.predicts_ahead(name)
    )
    if asked != held:
        raise BadInput(
            f"{file.path} holds {held:,} numbers, and what transformers makes of its metadata is a "
            f"{file.architecture} of {asked:,}",
            "a model that it loads whole",
            "give it as a transformers folder",
        )
    scaling = file.text(f"{file.architecture}.rope.scaling.type")
    rope = getattr(text, "rope_parameters", None) or {}
    if scaling not in _STRAIGHT and rope.get("rope_type", "default") == "default":
        raise BadInput(
            f"{file.path} scales RoPE ({scaling}), which transformers leaves out",
            "a model that it loads whole",
            "give it as a transformers folder",
        )
