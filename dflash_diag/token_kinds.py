"""What kind of token a text is: a word, a number, a line break. Decided by the text alone."""

from __future__ import annotations

import re

NO_TEXT = "no text"
KINDS = (
    "word",
    "name",
    "number",
    "punctuation",
    "line break",
    "space",
    "special",
    "mixed",
    NO_TEXT,
)
"""Every kind, in the order in which menus offer them."""

_SPECIAL = re.compile(r"<\|.*\|>|</?[A-Za-z_]+>|\[[A-Z]+\]", re.DOTALL)
_NUMBER = re.compile(r"[\d.,_]*\d[\d.,_]*|0[xob][0-9a-fA-F_]+")


def kind_of(text: str | None) -> str:
    """One of `KINDS`.

    Blanks around a token do not count, unless there is nothing else. A ``name`` is made of letters
    with a capital, a digit or an underscore among them, as identifiers and proper names are; a
    ``word`` has small letters alone. What has both letters or digits and punctuation is ``mixed``;
    half a character, of which some tokens consist, is ``no text``.
    """
    if not text or "\ufffd" in text:
        return NO_TEXT
    core = text.strip()
    if not core:
        return "line break" if "\n" in text or "\r" in text else "space"
    if _SPECIAL.fullmatch(core):
        return "special"
    if _NUMBER.fullmatch(core):
        return "number"
    if all(one.isalnum() or one == "_" for one in core) and any(map(str.isalpha, core)):
        return "word" if core.isalpha() and core == core.lower() else "name"
    return "mixed" if any(map(str.isalnum, core)) else "punctuation"
