"""A safetensors file written tensor by tensor, so that its content is never in memory as a whole.

Types and shapes must be known beforehand, because the header comes first; the tensors may then come
in any order. The bytes are those that ``safetensors.torch.save`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import BinaryIO

import torch
from torch import Tensor

from dflash_diag.errors import BadInput

# Wider types first, as safetensors orders them, so that every tensor lies aligned.
_NAMES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}
_ORDER = list(_NAMES)


class TensorFile:
    """A safetensors file that is being written.

    Parameters
    ----------
    file
        Open for writing, empty.
    layout
        Type and shape of every tensor, by name.
    metadata
        Text that the header carries.
    """

    def __init__(
        self,
        file: BinaryIO,
        layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        self._file, self._layout = file, dict(layout)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        self._start: dict[str, int] = {}
        end = 0
        for name in sorted(layout, key=lambda n: (_ORDER.index(layout[n][0]), n)):
            dtype, shape = layout[name]
            self._start[name] = end
            end += torch.Size(shape).numel() * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [self._start[name], end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        self._data = 8 + len(text)
        self._lacking = set(layout)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, which lies in host memory, into its place.

        Raises
        ------
        BadInput
            It has another type or shape than was laid out.
        """
        found = (tensor.dtype, tuple(tensor.shape))
        if found != self._layout[name]:
            raise BadInput(
                f"{name} is {found[0]} {list(found[1])}",
                f"{self._layout[name][0]} {list(self._layout[name][1])} like the others",
            )
        self._file.seek(self._data + self._start[name])
        self._file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        self._lacking.discard(name)

    def check(self) -> None:
        """Make sure that every tensor was written.

        Raises
        ------
        BadInput
            One was not.
        """
        if self._lacking:
            raise BadInput(f"{min(self._lacking)} never came", "all tensors of the layout")
