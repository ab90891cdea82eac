"""Errors a person can act on: what was found, what was expected, what to do next."""

from __future__ import annotations


class DiagError(Exception):
    """Base of every error that this package raises on purpose.

    ``exit_code`` is what the command line returns for it.
    """

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(_line(message, 4 * MAX_PART))


class BadInput(DiagError):
    """Something that the user handed in cannot be used (exit code 2).

    Parameters
    ----------
    found
        What was found, in words a person can check: a path, a key, a shape.
    expected
        What would have been accepted.
    do
        The next step, if there is an obvious one.
    """

    def __init__(self, found: str, expected: str | None = None, do: str | None = None) -> None:
        self.found, self.expected, self.do = found, expected, do
        parts = [found]
        if expected:
            parts.append(f"expected {expected}")
        if do:
            parts.append(do)
        super().__init__("; ".join(_line(part, MAX_PART) for part in parts))


MAX_PART = 1000
"""Characters of each part of an error; names in other people's files may be of any length."""


def _line(text: str, most: int) -> str:
    """One line that a terminal can show: what could steer it, or is no character, is spelled out.

    Names and values in errors come from other people's files.
    """
    line = " ".join(text.split())
    shown = line[: most + 1]  # what is spelled out grows, and what is beyond need not be looked at
    shown = printable(shown)
    return shown if len(shown) <= most else f"{shown[:most]}…"


def printable(text: str) -> str:
    """Text in which what could steer a terminal, or is no character, is spelled out."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in "\n\xa0" else c.encode("unicode_escape").decode() for c in text
    )


class CheckpointError(BadInput):
    """A drafter checkpoint cannot be read, or contradicts the target."""


class CaptureError(BadInput):
    """A capture is damaged, incomplete, or belongs to another target."""


class PromptError(BadInput):
    """A prompt file or one of its prompts cannot be used."""


class OutputError(BadInput):
    """The output folder cannot be written (read-only, full disk, not a folder)."""


class Interrupted(DiagError):
    """The run was stopped before its end and can be resumed (exit code 3)."""

    exit_code = 3
