"""What the files of a capture have to hold. Their hashes only tell that nothing was changed since.

Symbols: T tokens, R positions held, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from torch import Tensor

from dflash_diag.errors import CaptureError

if TYPE_CHECKING:
    import pandas as pd

AGAIN = "make the capture again"
MOST = 2**40
"""No count and no size is larger."""

Count = Annotated[int, Field(ge=0, le=MOST)]
Size = Annotated[int, Field(ge=1, le=MOST)]


class _Facts(BaseModel):
    """Only what is relied on is checked; more may be there."""

    model_config = ConfigDict(strict=True, extra="allow")


class _Norm(_Facts):
    style: str
    eps: FiniteFloat


class _Files(_Facts):
    weights: dict[str, str] = {}
    tokenizer: dict[str, str] = {}


class _Target(_Facts):
    hidden_size: Size
    vocab_size: Size
    n_layers: Size
    final_norm: _Norm
    dtype: str
    source: str | None = None
    layer_types: list[str] | None = None
    max_positions: Size | None = None
    backend: dict[str, Any] | None = None
    files: _Files | None = None


class _CaptureFacts(_Facts):
    target: _Target
    layer_ids: list[Annotated[int, Field(ge=-1, le=MOST)]]
    max_new_tokens: Count
    shared: dict[str, str]
    keep_rows: Size | None = None
    all_layers_for: Count = 0
    reference: dict[str, Any] | None = None


class _Prompt(_Facts):
    id: Annotated[str, Field(min_length=1)]
    n_prompt_tokens: Size
    n_generated: Count
    ended: bool
    logit_noise: float | None
    decode_gap: float | None
    prompt_text: Any
    continuation_text: Any


PROMPT_COLUMNS = tuple(_Prompt.model_fields)
POSITION_COLUMNS = (
    *("prompt", "position", "token", "text", "top_ids", "top_logprobs", "top_logit", "margin"),
    "entropy",
)


def check_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Refuse a ``capture.json`` that lacks what is relied on, or names files outside its folder.

    Raises
    ------
    CaptureError
        With the key.
    """
    _check(_CaptureFacts, facts, path)
    for name in facts["shared"].values():
        check_inside(path, name)


def check_inside(path: Path, name: str) -> None:
    """Refuse the name of a file that does not lie in the capture's folder."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts or not name.isprintable() or len(name) > 255:
        raise CaptureError(f"{path} names the file {name!r}", "files of its own folder", AGAIN)


def check_prompts(path: Path, rows: list[dict[str, Any]]) -> None:
    """Refuse a table of prompts with a row that is none, or with an id twice."""
    for row in rows:
        _check(_Prompt, row, path)
    if len({row["id"] for row in rows}) != len(rows):
        raise CaptureError(f"{path} has two prompts of one id", do=AGAIN)


def check_positions(path: Path, table: pd.DataFrame) -> None:
    """Refuse a table of positions whose columns are of other types."""
    kinds = dict.fromkeys(("prompt", "position", "token"), "iu")
    kinds |= dict.fromkeys(("top_logit", "margin", "entropy"), "f")
    for name, kind in kinds.items():
        if table[name].dtype.kind not in kind:
            raise CaptureError(f"{path}: {name} is {table[name].dtype}", "numbers", AGAIN)
    for name, kind in (("top_ids", "iu"), ("top_logprobs", "f")):
        try:
            lists = np.array(table[name].to_list())
        except ValueError:
            lists = np.empty(0)
        if len(table) and (lists.ndim != 2 or lists.dtype.kind not in kind):
            raise CaptureError(f"{path}: {name} is something else", "equal lists", AGAIN)


def check_tensor(
    path: Path, name: str, tensor: Tensor, shape: tuple[int | None, ...], *, whole: bool = False
) -> Tensor:
    """A tensor, if it has the shape and holds numbers of the kind that are expected.

    Parameters
    ----------
    shape
        None stands for any size.
    whole
        Whether its numbers are whole.
    """
    fits = tensor.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, tensor.shape, strict=True)
    )
    floating = tensor.is_floating_point()
    if not fits or floating == whole or tensor.is_complex():
        words = ", ".join("any" if size is None else str(size) for size in shape)
        kind = str(tensor.dtype).removeprefix("torch.")
        raise CaptureError(
            f"{path}: {name} is {kind} {list(tensor.shape)}",
            f"{'whole numbers' if whole else 'a float type'} [{words}]",
            AGAIN,
        )
    return tensor


def _check(kind: type[BaseModel], value: Any, path: Path) -> None:
    try:
        kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "all of it"
        what = "is not there" if first["type"] == "missing" else f"is {first['input']!r:.60}"
        raise CaptureError(f"{path}: {name} {what}", first["msg"], AGAIN) from error
