"""Other people's chat templates, rendered within limits of time and memory.

A template is a program that a target brings along. transformers' sandbox keeps it from files and
from Python, not from a loop without end or a text without bound, which no check inside a Python
process can stop for certain. So it runs in a process of its own, `chat_process`, which is ended
when its time is up; the next prompt gets a new one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from dflash_diag.deadlines import GONE_S, within

SECONDS = 10.0
"""For one prompt; a real template takes some thousandths of that."""
START_S = 120.0
"""For the process to import what it needs, on a busy machine or a slow disk."""
_PROGRAM = Path(__file__).with_name("chat_process.py")


class TemplateError(Exception):
    """A chat template failed."""


class TemplateLimit(TemplateError):
    """It would not end, or its process did."""


class Renderer:
    """Renders chats, in one process that is started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def render(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]
    ) -> str:
        """What ``tokenizer.apply_chat_template`` returns as text, with a prompt to generate.

        Parameters
        ----------
        arguments
            Further ones, as JSON has them.

        Raises
        ------
        TemplateError
            The template fails, or takes too much memory.
        TemplateLimit
            It has not ended after `SECONDS`.
        """
        asked = {
            "template": tokenizer.chat_template,
            "tokens": tokenizer.special_tokens_map,
            "messages": messages,
            "arguments": arguments,
            "seconds": SECONDS,
        }
        try:
            line = json.dumps(asked)
        except (TypeError, ValueError) as error:
            raise TemplateError(f"it is given what JSON does not have: {error}") from error
        answer = json.loads(self._ask(line))
        if "error" in answer:
            raise TemplateError(answer["error"])
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._end()
            self._process = None

    def _ask(self, line: str) -> str:
        process = self._process or self._start()

        try:
            answer = within(SECONDS, partial(_exchange, process, line))
        except TimeoutError as error:
            self.close()
            raise TemplateLimit(f"it has not ended after {SECONDS:g} s") from error
        except BrokenPipeError:
            answer = ""
        except BaseException:  # an interruption leaves an answer to the wrong question
            self.close()
            raise
        if not answer:
            self.close()
            raise TemplateLimit("the process that renders it has died of it")
        return answer

    def _start(self) -> subprocess.Popen[str]:
        # -P: the folder of the program is ours and holds modules of any name.
        process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
        )
        self._process = process
        self._end = weakref.finalize(self, _end, process)
        try:
            began = within(START_S, partial(_exchange, process, ""))
        except TimeoutError:
            began = ""
        if not began:
            self.close()
            raise TemplateLimit("the process that renders it does not start")
        return process


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """The next line that a process writes, after one that it is given."""
    given, answers = cast("tuple[IO[str], IO[str]]", (process.stdin, process.stdout))
    if line:
        given.write(f"{line}\n")
        given.flush()
    return answers.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # it hangs in the system itself
        process.communicate(timeout=GONE_S)
