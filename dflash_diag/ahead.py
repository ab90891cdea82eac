"""Measure on another core what does not need the target, while this process decodes with it.

Trying readings takes about as long as decoding every prompt and comparing the target's states, and
needs the capture alone. A second process does it in the same folder. Nothing depends on it: what it
has not measured is measured where it is asked for, and what goes wrong there is said there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from dflash_diag.deadlines import killed
from dflash_diag.diagnostics.base import DRAFTER

if TYPE_CHECKING:
    from dflash_diag.runs import Run

WORTH = 500
"""Generated tokens in all below which a process costs more to start than it saves."""


@contextmanager
def ahead(run: Run) -> Iterator[None]:
    """Let a second process try readings while the body lasts, each on half of the cores.

    Only where nothing is short: on a CPU, on a machine with a second core, and with a target that
    keeps this process busy meanwhile. The capture is made first if it is not there.

    How sums are rounded depends on the number of threads, so that must not depend on what is there
    already: a run that goes on where it was stopped uses half of the cores as well.
    """
    if not _is_worth_it(run):
        yield
        return
    import torch

    from dflash_diag.alignment_runs import alignment_path

    threads = torch.get_num_threads()
    half = max(1, threads // 2)
    torch.set_num_threads(half)
    try:
        with nullcontext() if alignment_path(run, DRAFTER).is_file() else _trying(run, half):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _trying(run: Run, threads: int) -> Iterator[None]:
    given = run.given.model_copy(update={"out": str(run.out)})
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(threads),
        "DFLASH_DIAG_PROGRESS": "silent",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | environment,
        text=True,
    )
    try:
        _tell(process, given.model_dump_json())
        yield
    finally:
        killed(process)
        _close(process)


def _tell(process: subprocess.Popen[str], text: str) -> None:
    """Hand over the configuration, unless the process has ended before it could be read.

    The pipe stays open: that it closes tells the process that this one has ended, however it did.
    """
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.write(f"{text}\n")
            process.stdin.flush()


def _close(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with suppress(BrokenPipeError):
            process.stdin.close()


def _is_worth_it(run: Run) -> bool:
    from dflash_diag.targets import resolve_device

    return (
        DRAFTER in run.roles
        and bool(run.config.target)
        and resolve_device(run.config.device).type == "cpu"
        and (os.cpu_count() or 1) > 1
        and sum(one.n_generated for one in run.capture.prompts) >= WORTH
    )


def main() -> None:
    """What the second process does: the run on standard input's first line, opened again.

    It ends when that is closed.
    """
    from dflash_diag.config import RunConfig
    from dflash_diag.runs import Run

    given = RunConfig.model_validate_json(sys.stdin.readline())
    Thread(target=_end_with_the_first, daemon=True).start()
    Run.open(given).alignment()


def _end_with_the_first() -> None:
    while os.read(sys.stdin.fileno(), 1):  # a blocked `sys.stdin.read` would hinder our own end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
