"""What a target's files say of its size, checked; transformers is not needed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from dflash_diag.errors import BadInput
from dflash_diag.gguf_file import EMBEDDING, GgufFile, in_gguf
from dflash_diag.storage import StrPath, read_json

Size = Annotated[int, Field(ge=1, le=2**40)]


class TargetConfig(BaseModel):
    """The text model's part, as far as it is relied on; None where it says nothing."""

    model_config = ConfigDict(strict=True, frozen=True)

    hidden_size: Size | None = None
    vocab_size: Size | None = None
    num_hidden_layers: Size | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: Size | None = None
    rms_norm_eps: FiniteFloat = 1e-6
    model_type: str = ""


def read_target_config(source: StrPath) -> TargetConfig:
    """The configuration of a target's folder or GGUF file; what it nests for the text model counts.

    Raises
    ------
    BadInput
        No such file, no JSON object, no GGUF, or a size that is none.
    """
    if in_gguf(source):
        file = GgufFile.read(source)
        return _validated(file.path, _in_configs_words(file))
    path = Path(source) / "config.json"
    content = read_json(path)
    nested = content.get("text_config") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(nested, dict | None):
        raise BadInput(f"{path} is something else", "a model's configuration, a JSON object")
    return _validated(path, {**content, **(nested or {})})


def _in_configs_words(file: GgufFile) -> dict[str, Any]:
    """What a GGUF file's metadata say, under the names of ``config.json``."""
    table = file.tensors.get(EMBEDDING)
    eps = file.setting("attention.layer_norm_rms_epsilon")
    return {
        "hidden_size": file.setting("embedding_length"),
        "vocab_size": file.setting("vocab_size") if table is None else table.shape[0],
        "num_hidden_layers": file.n_layers,
        "max_position_embeddings": file.setting("context_length"),
        "model_type": file.architecture,
        **({} if eps is None else {"rms_norm_eps": eps}),
    }


def _validated(path: Path, content: dict[str, Any]) -> TargetConfig:
    try:
        return TargetConfig.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise BadInput(f"{path}: {name} is {first['input']!r:.60}", first["msg"]) from error
