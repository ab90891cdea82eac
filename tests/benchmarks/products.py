"""The matrix products that some code makes, to be made again alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MADE = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul"})


class Recorder(TorchDispatchMode):
    """Notes every matrix product: the operation, and layout of what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, list[Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in MADE:
            self.calls.append((func.overloadpacket, [layout(one) for one in args]))
        elif "attention" in name or "mkldnn" in name:
            raise AssertionError(f"{name} multiplies, and is not counted")
        return func(*args, **(kwargs or {}))


def layout(one: Any) -> Any:
    """Shape, strides and type of a tensor; anything else as it is."""
    return (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, Tensor) else one


def products_of(run: Callable[[], Any]) -> tuple[Callable[[], None], int]:
    """A function that makes the products of ``run`` and nothing else, and their number.

    Their values are random, and those of one layout are the same tensor.
    """
    with Recorder() as recorder:
        run()
    made: dict[Any, Tensor] = {}

    def operand(one: Any) -> Any:
        if not (isinstance(one, tuple) and len(one) == 3 and isinstance(one[2], torch.dtype)):
            return one
        if one not in made:
            shape, stride, dtype = one
            made[one] = torch.empty_strided(shape, stride, dtype=dtype).normal_()
        return made[one]

    calls = [(func, [operand(one) for one in args]) for func, args in recorder.calls]

    def alone() -> None:
        for func, args in calls:
            func(*args)

    return alone, len(calls)
