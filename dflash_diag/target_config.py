"""What a target's ``config.json`` says of its size, checked; transformers is not needed for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from dflash_diag.errors import BadInput
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


def read_target_config(folder: StrPath) -> TargetConfig:
    """The configuration of a target's folder; what it nests for the text model counts.

    Raises
    ------
    BadInput
        No such file, no JSON object, or a size that is none.
    """
    path = Path(folder) / "config.json"
    content = read_json(path)
    nested = content.get("text_config") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(nested, dict | None):
        raise BadInput(f"{path} is something else", "a model's configuration, a JSON object")
    try:
        return TargetConfig.model_validate({**content, **(nested or {})})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise BadInput(f"{path}: {name} is {first['input']!r:.60}", first["msg"]) from error
