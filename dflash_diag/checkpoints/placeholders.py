"""Inert stand-ins for what a pickle describes; none of them can be called or does anything.

A pickle is a program that builds objects. Read here, it builds only these records: which global it
named, with which arguments and state. Tensors become `TensorRef`, the description of a view of a
stored array, from which the real tensor is made later, on access.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Global:
    """A name that the pickle refers to, such as ``argparse.Namespace``."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A stored flat array: entry ``data/<key>`` of a torch zip, of ``numel`` elements."""

    key: str
    dtype: str
    numel: int


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor as a strided view of a stored array; offset and strides count elements."""

    storage: StorageRef
    dtype: str
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def __str__(self) -> str:
        return f"<tensor {self.dtype} {list(self.size)}>"


@dataclass(slots=True, eq=False)
class Record:
    """An object that the pickle would have built by calling ``of``; it was not called."""

    of: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[Any, Any] = field(default_factory=dict)
    states: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    pairs: dict[Any, Any] = field(default_factory=dict)

    def attributes(self) -> dict[Any, Any]:
        """The attributes that its states would have set (slots included)."""
        found: dict[Any, Any] = {}
        for state in self.states:
            for part in state if isinstance(state, tuple) else (state,):
                if isinstance(part, dict):
                    found.update(part)
        return found


def as_mapping(value: Any) -> Mapping[Any, Any] | None:
    """``value`` as a mapping, if the object it stands for was one; else None."""
    if isinstance(value, dict):
        return value
    if isinstance(value, Record) and value.pairs:
        return value.pairs
    return None


def is_namespace(value: Any) -> bool:
    """Whether ``value`` stands for an ``argparse.Namespace`` (or types.SimpleNamespace)."""
    return isinstance(value, Record) and str(value.of) in {
        "argparse.Namespace",
        "types.SimpleNamespace",
    }


MAX_DEPTH = 32
MAX_VALUES = 50_000
CUT = "…"


def to_plain(value: Any) -> Any:
    """``value`` in JSON's types, as far as it has such a form.

    Paths become text, numpy scalars numbers, namespaces and other objects the dict of their
    attributes; anything else becomes a short description. Depth and size are bounded, because a
    few bytes of pickle can describe a structure of any size; what lies beyond becomes ``…``.
    """
    return _plain(value, 0, iter(range(MAX_VALUES)))


def _plain(value: Any, depth: int, budget: Iterator[int]) -> Any:
    if depth > MAX_DEPTH or next(budget, None) is None:
        return CUT
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 1024 else f"<integer of {value.bit_length()} bits>"
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v, depth + 1, budget) for v in value]
    if isinstance(value, dict):
        return _plain_dict(value, depth, budget)
    if isinstance(value, bytes | bytearray):
        return f"<{len(value)} bytes>"
    if isinstance(value, Record):
        return _plain_record(value, depth, budget)
    return str(value)


def _plain_dict(value: Mapping[Any, Any], depth: int, budget: Iterator[int]) -> dict[str, Any]:
    out = {}
    for key, entry in value.items():
        name = key if isinstance(key, str) else str(_plain(key, depth + 1, budget))
        out[name] = _plain(entry, depth + 1, budget)
    return out


_PATHS = {
    "Path": PurePosixPath,
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "WindowsPath": PureWindowsPath,
    "PureWindowsPath": PureWindowsPath,
}


def _plain_record(record: Record, depth: int, budget: Iterator[int]) -> Any:
    of = record.of
    module, name = (of.module, of.name) if isinstance(of, Global) else ("", "")
    strings = all(isinstance(a, str) for a in record.args)
    if module.split(".")[0] == "pathlib" and name in _PATHS and record.args and strings:
        return str(_PATHS[name](*record.args))
    if module.startswith("numpy") and name == "scalar":
        return _numpy_scalar(record)
    attributes = record.attributes()
    if attributes or record.pairs or is_namespace(record):
        return _plain_dict({**attributes, **record.pairs}, depth, budget)
    if record.items:
        return [_plain(v, depth + 1, budget) for v in record.items]
    scalars = [a for a in record.args if isinstance(a, str | int | float) or a is None]
    if len(scalars) == len(record.args):
        return f"{_name(of)}({', '.join(_short(a) for a in scalars)})"
    return f"<{_name(of)}>"


def _numpy_scalar(record: Record) -> Any:
    """A number from ``numpy.core.multiarray.scalar(dtype, bytes)``."""
    match record.args:
        case (Record(args=(str(code), *_)), bytes(raw)) if code[1:].isdigit() and code[0] in "biuf":
            # States of a dtype are (version, byte order, …); only the order matters to a number.
            order = next((s[1] for s in record.args[0].states if _has_order(s)), "<")
            try:
                return _plain(np.frombuffer(raw, np.dtype(order + code))[0].item(), 0, iter((0,)))
            except (TypeError, ValueError, IndexError):
                return CUT
    return CUT


def _has_order(state: Any) -> bool:
    return isinstance(state, tuple) and len(state) > 1 and state[1] in ("<", ">", "|", "=")


def _short(value: Any) -> str:
    text = repr(_plain(value, 0, iter((0,))))
    return text if len(text) <= 80 else text[:79] + CUT


def _name(of: Any) -> str:
    return str(of) if isinstance(of, Global) else "object"
