"""A ``torch.save`` file as what it is: a zip of one pickle and many stored arrays.

Only the zip's directory, the pickle and the arrays that are asked for are read; an optimizer's
state of any size costs its few lines in the directory. Arrays are mapped where they lie.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import struct
import weakref
import zipfile
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_diag.checkpoints.pickles import MalformedPickle, UnsafePickle, read_pickle
from dflash_diag.checkpoints.placeholders import StorageRef, TensorRef
from dflash_diag.errors import CheckpointError

MAX_PICKLE = 256 * 2**20
"""Bytes of ``data.pkl`` beyond which a file is no checkpoint; a 27B optimizer's has about 1 MB."""
PIECE = 4 * 2**20
"""Bytes read at a time."""
MAX_EXPANDED = 2**28
"""Elements up to which a tensor may repeat stored values (stride 0)."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_RESAVE = "write it again with torch.save, which writes such files by default since torch 1.6"


class TorchZip:
    """The pickle and the mapped arrays of one ``torch.save`` file.

    Attributes
    ----------
    content
        What the pickle describes: plain containers, `TensorRef` and inert records.

    Raises
    ------
    CheckpointError
        The file is damaged, is no ``torch.save`` file, or would run code.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # One descriptor for good: a trainer may put another file under this name meanwhile.
        self._file = path.open("rb")
        weakref.finalize(self, self._file.close)
        self._size = os.fstat(self._file.fileno()).st_size
        try:
            with zipfile.ZipFile(self._file) as archive:
                self._entries = _unique(archive, path)
        except _ZIP_FAULTS as error:
            raise CheckpointError(
                f"{path} is no complete zip file ({error})",
                "a whole torch.save file",
                "copy it again, or wait until it is written",
            ) from error
        self._prefix = self._find_prefix()
        self._maps: dict[str, tuple[mmap.mmap, int]] = {}
        self._flat: dict[tuple[str, str, int], Tensor] = {}
        order = self._small("byteorder")
        if order not in (b"", b"little"):
            raise CheckpointError(f"{path} has byte order {order[:16]!r}", "little", _RESAVE)
        self.content: Any = self._read_content()

    def tensor(self, ref: TensorRef) -> Tensor:
        """The tensor that ``ref`` describes, a view of the mapped file.

        The mapping is private: writing to the tensor never changes the file.
        """
        flat = self._flat_array(ref.storage, ref.dtype)
        count = math.prod(ref.size)
        last = ref.offset + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True))
        if count and last >= flat.numel():
            raise CheckpointError(
                f"{self.path} is damaged: a tensor {list(ref.size)} reaches element {last} of "
                f"array {ref.storage.key}, which has {flat.numel()}"
            )
        if count > max(flat.numel(), MAX_EXPANDED):
            raise CheckpointError(
                f"{self.path} repeats {flat.numel()} values into a tensor {list(ref.size)}",
                "tensors stored in full",
            )
        return flat.as_strided(ref.size, ref.stride, ref.offset if count else 0)

    def verify(self, ref: TensorRef) -> None:
        """Compare the array under ``ref``, as it lies in the file, with its stored checksum.

        Files written with ``torch.serialization.set_crc32_options(False)`` store no checksum.
        """
        entry = self._entry(f"data/{ref.storage.key}")
        if not entry.CRC or not entry.file_size:
            return
        checksum, start = 0, self._start(entry)
        for at in range(start, start + entry.file_size, PIECE):
            piece = self._read(at, min(PIECE, start + entry.file_size - at))
            checksum = zlib.crc32(piece, checksum)
        if checksum != entry.CRC:
            raise CheckpointError(
                f"{self.path} is damaged: array {ref.storage.key} differs from its checksum",
                do="copy it again",
            )

    def _find_prefix(self) -> str:
        names = [n for n in self._entries if n.count("/") == 1 and n.endswith("/data.pkl")]
        if len(names) != 1:
            found = sorted(self._entries)[:3]
            raise CheckpointError(
                f"{self.path} is a zip file of {', '.join(found) or 'nothing'}",
                "one data.pkl, as torch.save writes it",
            )
        prefix = names[0].removesuffix("data.pkl")
        if any(n.startswith(f"{prefix}code/") for n in self._entries):
            raise CheckpointError(
                f"{self.path} is a TorchScript program", "a state dict written by torch.save"
            )
        return prefix

    def _read_content(self) -> Any:
        size = self._entry("data.pkl").file_size
        if size > MAX_PICKLE:
            raise CheckpointError(
                f"{self.path} has a pickle of {size / 2**20:.0f} MiB beside its arrays",
                f"at most {MAX_PICKLE // 2**20} MiB",
                "save tensors as tensors, not as lists",
            )
        stream = self._small("data.pkl")
        try:
            content = read_pickle(stream, str(self.path))
        except MalformedPickle as error:
            raise CheckpointError(
                f"{self.path} is damaged: its pickle cannot be read ({error})", do="copy it again"
            ) from error
        checksum = self._entry("data.pkl").CRC
        if checksum and checksum != zlib.crc32(stream):
            raise CheckpointError(
                f"{self.path} is damaged: its pickle differs from its checksum", do="copy it again"
            )
        return content

    def _read(self, start: int, n_bytes: int) -> bytes:
        return os.pread(self._file.fileno(), n_bytes, start)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._entries.get(self._prefix + name)
        if entry is None:
            raise CheckpointError(f"{self.path} is damaged: it has no {name}", do="copy it again")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise CheckpointError(
                f"{self.path} is compressed or encrypted", "a plain torch.save file", _RESAVE
            )
        return entry

    def _small(self, name: str) -> bytes:
        if self._prefix + name not in self._entries:
            return b""
        entry = self._entry(name)
        return self._read(self._start(entry), entry.file_size)

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Where an entry's bytes begin, behind its own header."""
        header = self._read(entry.header_offset, _LOCAL_HEADER.size)
        if len(header) == _LOCAL_HEADER.size:
            magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            start = entry.header_offset + _LOCAL_HEADER.size + name_length + extra_length
            if magic == b"PK\x03\x04" and start + entry.file_size <= self._size:
                return int(start)
        raise CheckpointError(
            f"{self.path} is damaged: {entry.filename} lies outside the file", do="copy it again"
        )

    def _map(self, key: str) -> tuple[mmap.mmap, int]:
        """The pages that hold an array, and where it begins in them."""
        if key not in self._maps:
            entry = self._entry(f"data/{key}")
            start = self._start(entry)
            page = start - start % mmap.ALLOCATIONGRANULARITY
            length = start - page + entry.file_size
            pages = mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_COPY, offset=page)
            self._maps[key] = pages, start - page
        return self._maps[key]

    def _flat_array(self, storage: StorageRef, dtype_name: str) -> Tensor:
        """One stored array as a flat tensor; tensors that share it share its memory."""
        at = storage.key, dtype_name, storage.numel
        if at not in self._flat:
            dtype, stored = _PLAIN_DTYPES.get(dtype_name), _PLAIN_DTYPES.get(storage.dtype)
            if dtype is None or stored is None:
                raise CheckpointError(
                    f"{self.path} holds {dtype_name} values", "bfloat16, float16 or float32"
                )
            size = self._entry(f"data/{storage.key}").file_size
            if storage.numel * stored.itemsize > size:
                raise CheckpointError(
                    f"{self.path} is damaged: array {storage.key} has {size} bytes",
                    f"{storage.numel} elements of {storage.dtype}",
                )
            self._flat[at] = self._view(storage, dtype, storage.numel * stored.itemsize)
        return self._flat[at]

    def _view(self, storage: StorageRef, dtype: torch.dtype, n_bytes: int) -> Tensor:
        count = n_bytes // dtype.itemsize
        if not count:
            return torch.empty(0, dtype=dtype)
        pages, start = self._map(storage.key)
        if start % dtype.itemsize:  # torch.save aligns arrays; a repacked zip may not
            return torch.frombuffer(
                bytearray(pages[start : start + n_bytes]), dtype=dtype, count=count
            )
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=start)


_ZIP_FAULTS = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, EOFError)


def _unique(archive: zipfile.ZipFile, path: Path) -> dict[str, zipfile.ZipInfo]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) != len(archive.infolist()):
        raise CheckpointError(f"{path} holds two entries of one name", "a torch.save file")
    return entries


_PLAIN_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
"""Types whose values are their bytes; a quantised type needs more than its array."""


MAX_BARE_PICKLE = 64 * 2**20
"""Bytes of a file that is no zip that are looked through for what it is."""
LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
"""First object of a file written by torch before 1.6."""


def explain_bare_pickle(path: Path) -> CheckpointError:
    """Why a file that is no zip cannot be read: a hostile pickle, an old torch file, or neither.

    Old torch files are a row of pickles followed by the arrays; the pickles are looked through (not
    executed) so that a hostile one is named.
    """
    first: Any = None
    n_read = 0
    with path.open("rb") as file:
        stream = io.BytesIO(file.read(MAX_BARE_PICKLE))
    try:
        for _ in range(4):
            value = read_pickle(stream, str(path))
            first = value if n_read == 0 else first
            n_read += 1
    except UnsafePickle as error:
        return error
    except MalformedPickle:
        pass
    if first == LEGACY_MAGIC and isinstance(first, int):
        return CheckpointError(
            f"{path} is in the format of torch before 1.6, which cannot be mapped",
            "a zip file, the default of torch.save",
            "re-save it: load it where you trust it and write it again with torch.save",
        )
    if n_read:
        return CheckpointError(
            f"{path} is a plain pickle", "a file written by torch.save, or safetensors"
        )
    return CheckpointError(
        f"{path} is not a checkpoint", "a safetensors file or one written by torch.save"
    )
