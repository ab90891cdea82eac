"""Texts of a run's tokens: the tokenizer's, else those that the capture has, else their ids."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_diag.gguf_file import GgufFile, in_gguf
from dflash_diag.targets import load_tokenizer
from dflash_diag.token_kinds import kind_of

if TYPE_CHECKING:
    from dflash_diag.runs import Run


class Words:
    """What the tokens of a run's target are called."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def decode(self) -> Callable[[int], str] | None:
        """The text of any token; None where no tokenizer is at hand."""
        folder = Path(self.run.config.target)
        if not self.run.config.target or not folder.exists():
            return None
        if in_gguf(folder) and (decode := GgufFile.read(folder).decoder):
            return decode
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            # The same text at a thousandth of the time that importing transformers takes.
            found = Tokenizer.from_file(str(folder / "tokenizer.json"))
            return lambda token: found.decode([token], skip_special_tokens=False)
        tokenizer = load_tokenizer(folder)
        return None if tokenizer is None else lambda token: tokenizer.decode([token])

    @cached_property
    def known(self) -> dict[int, str]:
        """Texts of the tokens that the capture has, for where there is no tokenizer."""
        capture = self.run.capture
        if capture.foreign:
            return {}
        tables = [capture.positions(i) for i in range(len(capture))]
        return {
            token: text
            for rows in tables
            for token, text in zip(rows["token"], rows["text"], strict=True)
            if isinstance(text, str)
        }

    def text(self, token: int) -> str | None:
        """A token's text; None where nobody knows it."""
        found = self.known.get(token) if self.decode is None else self.decode(token)
        return found or None

    def quoted(self, token: int) -> str:
        """A token's text in quotes, blanks and line ends visible; its id if that is all."""
        text = self.text(token)
        return f"[{token}]" if text is None else repr(text)

    def kind(self, token: int) -> str:
        """What kind of token it is."""
        return kind_of(self.text(token))
