"""The tokenizer in a GGUF file, as transformers builds it, mended where that is not the file's.

transformers takes a tokenizer of its own for each kind and fills in the file's words. What that
class brings along stays in it: a token that the file does not have, another way to split or join.
"""

from __future__ import annotations

import json
from typing import Any

from dflash_diag.gguf_file import BYTE_LEVEL, GgufFile
from dflash_diag.gguf_loading import quick_reading

_DIGITS_APART = frozenset(
    ("codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder")
)
"""Ways to split text, in llama.cpp's names, that take every digit by itself before all else."""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""transformers' names of special tokens, and the file's."""


def load_tokenizer(file: GgufFile) -> Any:
    """The file's tokenizer with its chat template; None where it has none.

    Only the file counts, whatever lies beside it.
    """
    from transformers import PreTrainedTokenizerFast

    if not file.tokens:
        return None
    with quick_reading():
        tokenizer = PreTrainedTokenizerFast(
            gguf_file=str(file.path),
            name_or_path=str(file.path.parent),
        )
    tokenizer.clean_up_tokenization_spaces = False
    _drop_strangers(tokenizer, len(file.tokens))
    _split_and_join(tokenizer.backend_tokenizer, file)
    for role, name in _ROLES.items():
        one = file.token_id(name)
        if one is not None:
            setattr(tokenizer, f"{role}_token", file.tokens[one])
    return tokenizer


def _drop_strangers(tokenizer: Any, size: int) -> None:
    """Take out tokens that were added behind the vocabulary: no row of the embedding is theirs."""
    from tokenizers import Tokenizer

    if len(tokenizer) <= size:
        return
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [one for one in state["added_tokens"] if one["id"] < size]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))  # noqa: SLF001 - the only way


def _split_and_join(backend: Any, file: GgufFile) -> None:
    """Split text as the file's kind does, and join bytes without leaving any out."""
    from tokenizers import decoders, pre_tokenizers

    if file.text("tokenizer.ggml.model") != BYTE_LEVEL:
        return
    backend.decoder = decoders.ByteLevel()
    if file.text("tokenizer.ggml.pre") in _DIGITS_APART:
        # GPT-2's way alone would take the last of several blanks with the digit behind it.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
