"""The process in which other people's chat templates are rendered; see `chat_templates`.

Run as a file: it imports nothing of this package, and of transformers only what renders. A line of
JSON on standard input is answered by one on standard output; it ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

MEMORY = 2**30
"""Bytes that rendering may take more than what is there before."""
CHARACTERS, TIMES = 2**18, 4
"""A rendered text may have so many, and for each that it was made from so many more."""


def main() -> None:
    """Say that all is imported, then answer line by line."""
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    class Filled(PreTrainedTokenizerBase):
        """What `apply_chat_template` looks at of a tokenizer."""

        def __init__(self, template: Any, tokens: dict[str, str]) -> None:
            self.chat_template, self._tokens = template, tokens

        @property
        def special_tokens_map(self) -> dict[str, str]:
            return self._tokens

    # Nothing that is printed while rendering may stand where an answer is expected.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    limit_memory()
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        limit_time(asked["seconds"])
        try:
            text = Filled(asked["template"], asked["tokens"]).apply_chat_template(
                asked["messages"], tokenize=False, add_generation_prompt=True, **asked["arguments"]
            )
            most = CHARACTERS + TIMES * len(line)
            long = {"error": f"it writes more than {most} characters"}
            answer = {"text": text} if len(text) <= most else long
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY // 2**20} MiB"}
        except Exception as error:  # noqa: BLE001 - a template is a program, and may fail like one
            answer = {"error": str(error)[:1000] or type(error).__name__}
        print(json.dumps(answer), file=answers, flush=True)


def limit_memory() -> None:
    """Bound what this process may have, where the system can."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        return
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)
    _limit(resource.RLIMIT_CORE, 0)


def limit_time(seconds: float) -> None:
    """Die after so much work: whoever would end this process may be gone by then."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + seconds) + 2)


def _limit(kind: int, value: int) -> None:
    import resource

    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


if __name__ == "__main__":
    main()
