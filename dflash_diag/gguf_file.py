"""A target in one GGUF file: what its header says, checked before anything relies on it.

llama.cpp's format: a magic, counts, key-value pairs (sizes, tokenizer, chat template), a table of
tensors, then their data, mostly in quantised blocks. No weight is read until it is asked for, and
no count is believed that the file's size cannot hold. transformers is not needed for any of it; the
package ``gguf`` knows the kinds of blocks and turns them back into numbers.

Symbols: V vocabulary, H hidden size.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from dflash_diag.errors import BadInput
from dflash_diag.storage import StrPath

if TYPE_CHECKING:
    from torch import Tensor

SUFFIX = ".gguf"
NEEDED = ("gguf", "accelerate")
"""Packages without which no GGUF is loaded; transformers asks for the second."""
MAX_HEADER = 2**26
"""Bytes before the tensors' data; half a million tokens and as many merges take a third of it."""
MAX_ITEMS = 2**22
"""Keys, tensors, or entries of one list."""
MAX_DIMS = 4
"""Of a tensor, as ggml has it."""
PLAIN = ("F32", "F16", "BF16", "F64")
"""Types that are numbers already; all others are quantised."""
ENDS = ("eos", "eot", "eom")
"""Tokens that end a sequence, a turn and a message: llama.cpp stops at each of them."""

EMBEDDING, FINAL_NORM, HEAD = "token_embd.weight", "output_norm.weight", "output.weight"
"""llama.cpp's names; the head is there only where it is not the embedding."""

BYTE_LEVEL = "gpt2"
"""llama.cpp's name of vocabularies that are spelled in bytes."""

_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = dict(enumerate(("u1", "i1", "u2", "i2", "u4", "i4", "f4", "?"))) | {
    10: "u8",
    11: "i8",
    12: "f8",
}
"""numpy's names of the types that a value can have."""
_TEXT, _LIST = 8, 9
_ALIGNMENT = 32


class Stored(NamedTuple):
    """Where a tensor lies in the file."""

    shape: tuple[int, ...]
    """As torch has it."""
    kind: str
    """ggml's type: ``F32``, ``Q4_1``, …"""
    start: int
    n_bytes: int


@dataclass(frozen=True, eq=False)
class GgufFile:
    """The header of a GGUF file. Made by `GgufFile.read`."""

    path: Path
    metadata: Mapping[str, Any]
    """Every key; lists of numbers are arrays, lists of texts are lists."""
    tensors: Mapping[str, Stored]

    @classmethod
    def read(cls, path: StrPath) -> GgufFile:
        """Read and check a file's header.

        Raises
        ------
        BadInput
            No GGUF, one that is cut short or contradicts itself, one of several parts, or the
            packages to load it are not installed.
        """
        path = Path(path).expanduser()
        try:
            facts = path.stat()
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror})", "a GGUF file") from error
        return _read(path, facts.st_size, facts.st_mtime_ns)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's kind, with which its keys begin."""
        return str(self.metadata["general.architecture"])

    def setting(self, name: str) -> Any:
        """A size or constant of the model; None where the file does not state it."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def text(self, key: str) -> str | None:
        """A key's value if it is a text."""
        found = self.metadata.get(key)
        return found if isinstance(found, str) else None

    def token_id(self, role: str) -> int | None:
        """The id of a special token, if the file names one of its tokens for that role."""
        found = self.metadata.get(f"tokenizer.ggml.{role}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(self.tokens) else None

    @property
    def n_layers(self) -> int:
        """Decoder layers, without those that predict several tokens ahead."""
        ahead = self.setting("nextn_predict_layers")
        return int(self.setting("block_count")) - (ahead if isinstance(ahead, int) else 0)

    def predicts_ahead(self, tensor: str) -> bool:
        """Whether a tensor is of a layer for several tokens ahead, which is no decoder layer."""
        layer = _LAYER.match(tensor)
        return layer is not None and int(layer[1]) >= self.n_layers

    @property
    def tensor_types(self) -> dict[str, int]:
        """How many tensors there are of each type, the most first."""
        return dict(Counter(one.kind for one in self.tensors.values()).most_common())

    @property
    def tokens(self) -> Sequence[str]:
        """Texts of its tokens, as the tokenizer spells them; empty where it has no tokenizer."""
        found = self.metadata.get("tokenizer.ggml.tokens")
        return found if isinstance(found, list) else ()

    @property
    def sha256_of_template(self) -> str | None:
        """Hash of its chat template; None where it has none."""
        text = self.text("tokenizer.chat_template")
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()

    @property
    def end_ids(self) -> list[int]:
        """Tokens at which generation ends."""
        found = map(self.token_id, ENDS)
        return sorted({one for one in found if one is not None})

    @property
    def decoder(self) -> Callable[[int], str] | None:
        """The text of any token, without transformers; None where the spelling is another one."""
        from tokenizers import decoders

        if self.text("tokenizer.ggml.model") != BYTE_LEVEL or not self.tokens:
            return None
        tokens, bytes_ = self.tokens, decoders.ByteLevel()
        return lambda token: bytes_.decode([tokens[token]]) if token < len(tokens) else ""

    def tensor(self, name: str) -> Tensor:
        """A tensor as numbers: float32, dequantised where it is quantised.

        Raises
        ------
        BadInput
            There is none of this name, or no code for its type.
        """
        import gguf
        import torch

        if name not in self.tensors:
            raise BadInput(f"{self.path} holds no tensor {name}", "a target's weights")
        one = self.tensors[name]
        kind = gguf.GGMLQuantizationType[one.kind]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        with self.path.open("rb") as file:
            file.seek(one.start)
            data = np.frombuffer(file.read(one.n_bytes), np.uint8)
        if one.kind in ("F32", "F16", "F64"):
            values = data.view(f"<f{size}").reshape(one.shape)
        else:
            rows = data.reshape(*one.shape[:-1], one.shape[-1] // block * size)
            try:
                values = gguf.dequantize(rows, kind)
            except NotImplementedError as error:
                raise BadInput(
                    f"{self.path}: {name} is of type {one.kind}",
                    "a type that the package gguf dequantises",
                    "pip install -U gguf",
                ) from error
        return torch.from_numpy(np.array(values, np.float32))


def in_gguf(source: StrPath) -> bool:
    """Whether a target is a GGUF file, by its name, and neither folder nor hub id."""
    path = Path(source).expanduser()
    return path.suffix == SUFFIX and path.is_file()


@lru_cache(maxsize=4)
def _read(path: Path, size: int, _written: int) -> GgufFile:
    """The header of a file of this size, written then."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise BadInput(
            f"{path} is a GGUF file, for which {' and '.join(lacking)} is not installed"
            if len(lacking) == 1
            else f"{path} is a GGUF file, for which {' and '.join(lacking)} are not installed",
            do="pip install 'dflash-diag[gguf]'",
        )
    try:
        with path.open("rb") as file:
            return _Header(path, file, size).read()
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})", "a GGUF file") from error


class _Header:
    """Reads the header from its start; never beyond the file's end, nor beyond `MAX_HEADER`."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path, self.file, self.size = path, file, size
        self.at = 0
        self.where = "header"

    def read(self) -> GgufFile:
        if self.file.read(4) != _MAGIC:
            raise BadInput(
                f"{self.path} is no GGUF file: it does not begin with {_MAGIC.decode()}",
                "a GGUF file, a transformers folder, or a hub id",
            )
        self.at = 4
        version = self.number("u4")
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise self.bad(
                "is of the other byte order" if swapped else f"is of GGUF version {version}",
                f"little-endian, version {' or '.join(map(str, _VERSIONS))}",
            )
        n_tensors, n_keys = self.number("u8"), self.number("u8")
        metadata = self.keys(self.count(n_keys, "keys", 8 + 4 + 1))
        self.check(metadata)
        table = self.table(self.count(n_tensors, "tensors", 8 + 4 + 4 + 8), metadata)
        found = GgufFile(self.path, metadata, table)
        self.check_sizes(found)
        return found

    # --- parts of the header ----------------------------------------------------------------------

    def keys(self, n: int) -> dict[str, Any]:
        self.where = "metadata"
        metadata: dict[str, Any] = {}
        for _ in range(n):
            name = self.text()
            if name in metadata:
                raise self.bad(f"has the key {name} twice", "each key once")
            self.where = f"metadata, at {name}"
            metadata[name] = self.value(self.number("u4"))
        return metadata

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            raise self.bad(f"has a value of type {kind} in its {self.where}", "a type of GGUF's")
        of, n = self.number("u4"), self.number("u8")
        if of == _TEXT:
            return [self.text() for _ in range(self.count(n, "texts", 8))]
        if of not in _SCALARS:
            raise self.bad(f"has a list of type {of} in its {self.where}", "numbers or texts")
        one = np.dtype(_SCALARS[of]).newbyteorder("<")
        return np.frombuffer(self.take(self.count(n, "numbers", one.itemsize) * one.itemsize), one)

    def table(self, n: int, metadata: Mapping[str, Any]) -> dict[str, Stored]:
        import gguf

        self.where = "table of tensors"
        entries = {}
        for _ in range(n):
            name = self.text()
            if name in entries:
                raise self.bad(f"has the tensor {name} twice", "each tensor once")
            n_dims = self.number("u4")
            if not 1 <= n_dims <= MAX_DIMS:
                raise self.bad(f"has {n_dims} dimensions for {name}", f"1 to {MAX_DIMS}")
            shape = tuple(self.number("u8") for _ in range(n_dims))[::-1]
            entries[name] = (shape, self.number("u4"), self.number("u8"))
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        start = -(-self.at // alignment) * alignment
        table = {}
        for name, (shape, number, offset) in entries.items():
            try:
                kind = gguf.GGMLQuantizationType(number)
            except ValueError as error:
                raise self.bad(
                    f"has {name} in type {number}, which the package gguf does not know",
                    "one of ggml's types",
                    "pip install -U gguf",
                ) from error
            block, size = gguf.GGML_QUANT_SIZES[kind]
            if min(shape) < 1 or shape[-1] % block:
                raise self.bad(
                    f"has {name} of shape {list(shape)} in {kind.name}",
                    f"rows of whole blocks of {block}",
                )
            table[name] = Stored(shape, kind.name, start + offset, math.prod(shape) // block * size)
        self.check_data(table, start)
        return table

    # --- what must hold ---------------------------------------------------------------------------

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Refuse metadata without an architecture, of no alignment, or of one part of several."""
        if not isinstance(metadata.get("general.architecture"), str):
            raise self.bad("states no general.architecture", "a model")
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.bad(f"has general.alignment {alignment!r:.40}", "a power of two")
        parts = metadata.get("split.count")
        if isinstance(parts, int) and parts > 1:
            raise self.bad(
                f"is one of {parts} parts of a model",
                "the whole in one file",
                "join them: llama-gguf-split --merge",
            )

    def check_data(self, table: Mapping[str, Stored], start: int) -> None:
        """Refuse tensors that the file does not hold."""
        if not table:
            raise self.bad("holds no tensors", "a model with its weights")
        last = max(table, key=lambda name: table[name].start + table[name].n_bytes)
        end = table[last].start + table[last].n_bytes
        if end > self.size:
            raise self.bad(
                f"has {self.size:,} bytes and ends within its tensors' data ({last})",
                f"{end:,} bytes",
                "it was cut short: copy or download it again",
            )
        if sum(one.n_bytes for one in table.values()) > self.size - start:
            raise self.bad("has tensors that overlap", "each tensor's data by itself")

    def check_sizes(self, found: GgufFile) -> None:
        """Refuse metadata of more or fewer layers, or of another width, than the tensors have."""
        stated = found.setting("block_count")
        layers = {int(match[1]) for match in map(_LAYER.match, found.tensors) if match}
        if not isinstance(stated, int) or layers != set(range(min(stated, len(layers) + 1))):
            raise self.bad(
                f"states {found.architecture}.block_count {stated!r:.40} and has the tensors of "
                f"{len(layers)} layers",
                "as many layers as it states",
            )
        for name in (EMBEDDING, HEAD):
            if name in found.tensors and len(found.tensors[name].shape) != 2:
                raise self.bad(f"has {name} of shape {list(found.tensors[name].shape)}", "[V, H]")
        table = found.tensors.get(EMBEDDING)
        for name, has in (("vocab_size", 0), ("embedding_length", 1)):
            said = found.setting(name)
            if table is None or said is None:
                continue
            if not isinstance(said, int) or said != table.shape[has]:
                raise self.bad(
                    f"states {found.architecture}.{name} {said!r:.40} and has {EMBEDDING} of "
                    f"shape {list(table.shape)}",
                    "metadata that are those of its weights",
                )

    # --- bytes ------------------------------------------------------------------------------------

    def count(self, n: int, of: str, least: int) -> int:
        """A count, if the file can hold as many of at least so many bytes each."""
        if n > MAX_ITEMS or n * least > self.size - self.at:
            raise self.bad(
                f"claims {n:,} {of} in its {self.where}",
                f"at most {min(MAX_ITEMS, (self.size - self.at) // least):,}, for {self.size:,} "
                "bytes",
                "it is damaged: copy or download it again",
            )
        return n

    def take(self, n: int) -> bytes:
        if self.at + n > MAX_HEADER:
            raise self.bad(
                f"has more than {MAX_HEADER:,} bytes before its tensors' data (in its "
                f"{self.where})",
                "a header that is shorter",
                "it is damaged: copy or download it again",
            )
        content = self.file.read(n)
        if len(content) < n:
            raise self.bad(
                f"ends within its {self.where}, after {self.size:,} bytes",
                "a whole GGUF file",
                "it was cut short: copy or download it again",
            )
        self.at += n
        return content

    def number(self, kind: str) -> Any:
        code = _CODES[kind]
        return code.unpack(self.take(code.size))[0]

    def text(self) -> str:
        content = self.take(self.number("u8"))
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.bad(f"has a text in its {self.where} that is no UTF-8", "UTF-8") from error

    def bad(self, found: str, expected: str, do: str | None = None) -> BadInput:
        return BadInput(f"{self.path} {found}", expected, do)


_CODES = {
    kind: struct.Struct(f"<{code}")
    for kind, code in zip(_SCALARS.values(), "BbHhIif?Qqd", strict=True)
}
