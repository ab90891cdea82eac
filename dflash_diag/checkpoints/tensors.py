"""Tensors by name, each made when it is asked for, as a view of the mapped file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_diag.checkpoints.placeholders import TensorRef
from dflash_diag.checkpoints.quantised import ACTIVATIONS, FLOAT8, SCALES, dequantised
from dflash_diag.checkpoints.torchzip import TorchZip
from dflash_diag.errors import CheckpointError


class TensorSource(Protocol):
    """A file, or several, that hold tensors under their stored names."""

    def names(self) -> Iterable[str]:
        """Stored names."""

    def tensor(self, name: str) -> Tensor:
        """The tensor stored under ``name``, mapped."""

    def verify(self, name: str) -> None:
        """Raise `CheckpointError` if the file says that this tensor's bytes are damaged."""


class SafetensorsSource:
    """One or several safetensors files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                handle = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise _unreadable(path, error) from error
            for name in handle.keys():  # noqa: SIM118 - not a mapping
                if name in self._files:
                    raise CheckpointError(f"{path} repeats tensor {name} of another shard")
                self._files[name] = handle

    def names(self) -> Iterable[str]:
        return self._files.keys()

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def verify(self, name: str) -> None:
        """Nothing to do: the format stores no checksums, and opening checked its header."""


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    if not path.exists():
        return CheckpointError(f"no such file: {path}")
    with path.open("rb") as file:
        start = file.read(32)
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"{path} is a Git LFS pointer, not the weights", do="run git lfs pull"
        )
    reason = str(error).removeprefix("Error while deserializing header: ")
    return CheckpointError(
        f"{path} is truncated or corrupted ({reason})",
        "a whole safetensors file",
        "copy it again, or wait until it is written",
    )


class PickledSource:
    """One mapping of names to tensors inside a ``torch.save`` file."""

    def __init__(self, file: TorchZip, refs: Mapping[str, TensorRef]) -> None:
        self._file, self._refs = file, refs

    def names(self) -> Iterable[str]:
        return self._refs.keys()

    def tensor(self, name: str) -> Tensor:
        return self._file.tensor(self._refs[name])

    def verify(self, name: str) -> None:
        self._file.verify(self._refs[name])


class LazyTensors(Mapping[str, Tensor]):
    """Tensors under their clean names; reading an entry maps it, listing them reads nothing.

    Those in 8-bit floats are read as what they stand for; their scales are no entries of their own.

    Parameters
    ----------
    stored
        Clean name to stored name, see `dflash_diag.checkpoints.names`.
    """

    def __init__(self, source: TensorSource, stored: Mapping[str, str]) -> None:
        self._source, self._stored = source, dict(stored)
        self._made: dict[str, Tensor] = {}
        self._scales: dict[str, str] = {}
        for name, at in stored.items():
            path, _, last = name.rpartition(".")
            if last in SCALES + ACTIVATIONS and self._is_float8(f"{path}.weight"):
                del self._stored[name]
                if last in SCALES:
                    self._scales[f"{path}.weight"] = at

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            tensor = self._source.tensor(self._stored[name])
            if tensor.dtype in FLOAT8:
                scale = self._scales.get(name)
                tensor = dequantised(
                    name, tensor, None if scale is None else self._source.tensor(scale)
                )
            self._made[name] = tensor
        return self._made[name]

    @property
    def quantised(self) -> Mapping[str, str | None]:
        """Those that are stored in 8-bit floats, each with the stored name of its scale."""
        return {name: self._scales.get(name) for name in self if self._is_float8(name)}

    def _is_float8(self, name: str) -> bool:
        at = self._stored.get(name)
        return at is not None and self._source.tensor(at).dtype in FLOAT8

    @property
    def stored_names(self) -> Mapping[str, str]:
        """The name under which the file holds each tensor."""
        return self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def verify(self) -> None:
        """Check every tensor against the checksum that the file stores, where it stores one.

        Raises
        ------
        CheckpointError
            A tensor's bytes are damaged.
        """
        for stored in (*self._stored.values(), *self._scales.values()):
            self._source.verify(stored)

    def sha256(self) -> str:
        """Digest of names, types, shapes and values: equal weights, whatever file holds them."""
        digest = hashlib.sha256()
        for name in sorted(self):
            tensor = self[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            flat = tensor.detach().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.hexdigest()
