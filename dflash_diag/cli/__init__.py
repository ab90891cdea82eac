"""``python -m dflash_diag VERB``: one module a verb, their common options in `options`.

Every verb turns its options into one `RunConfig` and hands it on. Exit codes: 0 done; 1
``--fail-on`` met; 2 bad input, with one line on standard error; 3 interrupted, resumable.

Nothing heavy is imported before a verb runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

import typer

from dflash_diag.cli import (
    audit,
    capture,
    compare,
    divergence,
    doctor,
    lab,
    report,
    score,
    watch,
)
from dflash_diag.cli.options import BAD_INPUT, DONE, INTERRUPTED
from dflash_diag.deadlines import end_with_starter
from dflash_diag.errors import DiagError

__all__ = ["app", "main", "run"]

EPILOG = """
Start here: [bold]dflash-diag report[/bold] builds the report of the embedded example.

Exit codes: 0 done; 1 --fail-on met; 2 bad input (one line says what to do); 3 interrupted: the
same command resumes.
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="How many tokens does a DFlash drafter really get accepted?",
    epilog=EPILOG,
)


@app.callback()
def _verbs() -> None:
    """Say how many tokens a DFlash drafter really gets accepted."""


VERBS = {
    "report": report,
    "lab": lab,
    "doctor": doctor,
    "score": score,
    "compare": compare,
    "capture": capture,
    "divergence": divergence,
    "audit": audit,
    "watch": watch,
}
"""In the order in which ``--help`` lists them."""
for _name, _module in VERBS.items():
    app.command(_name, epilog=_module.EPILOG)(_module.verb)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; errors become one line on standard error."""
    signals = _Interruptible()
    try:
        with signals:
            code = app(
                args=None if arguments is None else list(arguments),
                prog_name="dflash-diag",
                standalone_mode=False,
            )
    except DiagError as error:
        kind = "error" if error.exit_code == BAD_INPUT else "stopped"
        return _say(str(error), error.exit_code, kind=kind)
    except typer.TyperException as error:
        return _say(f"{error.format_message()} (see --help)", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except Exception:
        if not signals.stopped:
            raise
        code = 130
    if code == 130:
        return _say("interrupted; resume with the same command", INTERRUPTED, kind="stopped")
    return code or DONE


def _say(message: str, code: int, kind: str = "error") -> int:
    typer.echo(f"{kind}: {' '.join(message.split())}", err=True)
    return code


class _Interruptible:
    """While it lasts, SIGTERM (a scheduler's stop) is treated like Ctrl-C, and both are remembered.

    A library that is reading a file may turn the interruption into an error of its own.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __enter__(self) -> _Interruptible:
        self.stopped = False
        self._before: dict[int, Any] = {}
        try:
            for one in self.SIGNALS:
                self._before[one] = signal.signal(one, self._interrupt)
        except ValueError:  # not the main thread: signals stay as they are
            pass
        return self

    def __exit__(self, *_: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def _interrupt(self, _signal: int, _frame: FrameType | None) -> NoReturn:
        self.stopped = True
        raise KeyboardInterrupt


def main() -> None:
    """Entry point of ``python -m dflash_diag`` and ``dflash-diag``."""
    end_with_starter()
    sys.exit(run())
