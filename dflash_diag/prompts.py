"""Prompt files: one JSON object a line, ``{"id", "text" | "messages" | "prompt_ids"}``.

An optional ``"kind"`` names what sort of prompt it is (coding, chat, …), so that kinds can be told
apart later. Reading is strict. A prompt that is silently dropped or read twice changes every
average after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_diag.errors import BadInput, PromptError
from dflash_diag.storage import read_text

FORMS = ("text", "messages", "prompt_ids")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt; exactly one of ``text``, ``messages`` and ``prompt_ids`` is set.

    Raises
    ------
    PromptError
        None or several of the three, or one that is empty or of the wrong type.
    """

    id: str
    text: str | None = None
    """Text that the tokenizer encodes as it stands."""
    messages: tuple[Mapping[str, Any], ...] | None = None
    """Chat messages, each with a ``role``, for the tokenizer's chat template."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids; no tokenizer is needed."""
    kind: str | None = None
    """What sort of prompt it is, in the words of whoever wrote the file."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id.strip() or _text_problem(self.id):
            raise PromptError(f"id is {self.id!r}", "a string of valid Unicode that is not empty")
        if self.kind is not None and (problem := _text_problem(self.kind)):
            found, expected = problem
            raise PromptError(f"prompt {self.id!r}: kind {found}", expected)
        given = [form for form in FORMS if getattr(self, form) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "no content"
            raise PromptError(f"prompt {self.id!r} has {found}", f"one of {', '.join(FORMS)}")
        problem = _PROBLEM[given[0]](getattr(self, given[0]))
        if problem:
            found, expected = problem
            raise PromptError(f"prompt {self.id!r}: {given[0]} {found}", expected)

    @classmethod
    def from_json(cls, value: Any) -> Prompt:
        """The prompt that one line's JSON value describes; keys other than ours are ignored."""
        if not isinstance(value, dict):
            raise PromptError(f"{type(value).__name__} {str(value)[:40]!r}", "a JSON object")
        if "id" not in value:
            raise PromptError(f"no id among the keys {', '.join(value) or '(none)'}", "an id")
        fields = {form: value[form] for form in FORMS if value.get(form) is not None}
        for form in ("messages", "prompt_ids"):
            if isinstance(fields.get(form), list):
                fields[form] = tuple(fields[form])
        return cls(id=value["id"], kind=value.get("kind"), **fields)

    def to_json(self) -> dict[str, Any]:
        """The line's JSON value: ``id``, the one form that is set, and the kind if there is one."""
        fields = {name: getattr(self, name) for name in (*FORMS, "kind")}
        return {"id": self.id} | {name: v for name, v in fields.items() if v is not None}

    @property
    def form(self) -> str:
        """Which of `FORMS` is set."""
        return next(form for form in FORMS if getattr(self, form) is not None)


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """Read a prompt file; blank lines are skipped.

    Raises
    ------
    PromptError
        No such file, not UTF-8, no prompt in it, a line that is not a prompt, or an id used twice;
        the message names the line.
    """
    path = Path(path)
    try:
        lines = read_text(path, "a .jsonl file of prompts, one JSON object a line").split("\n")
    except BadInput as error:
        raise PromptError(error.found, error.expected) from error
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            prompt = Prompt.from_json(json.loads(line))
        except PromptError as error:
            raise PromptError(f"{where}: {error.found}", error.expected, error.do) from error
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise PromptError(f"{where}: not JSON ({why})", "a JSON object a line") from error
        if prompt.id in line_of:
            raise PromptError(
                f"{where}: id {prompt.id!r} is that of line {line_of[prompt.id]}", "unique ids"
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise PromptError(f"{path} holds no prompt", "at least one JSON object a line")
    return prompts


Problem = tuple[str, str] | None


def _text_problem(text: Any) -> Problem:
    if not isinstance(text, str):
        return f"is {type(text).__name__}", "a string"
    if not text:
        return "is empty", "at least one character"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has a lone surrogate at character {error.start}", "valid Unicode"
    return None


def _messages_problem(messages: Any) -> Problem:
    if not isinstance(messages, tuple):
        return f"is {type(messages).__name__}", "a list of messages"
    if not messages:
        return "is empty", "at least one message"
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f"entry {index} has no role", 'objects such as {"role": "user", "content": "…"}'
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            # Templates that take other things write them as Python would, or leave them out.
            said = "no content" if content is None else f"content of type {type(content).__name__}"
            return f"entry {index} has {said}", "text: a string"
    return _text_problem(json.dumps(messages, ensure_ascii=False, default=str))


def _prompt_ids_problem(ids: Any) -> Problem:
    if not isinstance(ids, tuple):
        return f"is {type(ids).__name__}", "a list of token ids"
    if not ids:
        return "is empty", "at least one token id"
    for index, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            return f"entry {index} is {value!r}", "integers from 0"
    return None


_PROBLEM = {
    "text": _text_problem,
    "messages": _messages_problem,
    "prompt_ids": _prompt_ids_problem,
}
