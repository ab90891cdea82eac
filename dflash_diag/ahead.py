"""Measure on another core what will be asked for, while this process decodes with the target.

Trying readings takes about as long as decoding every prompt and comparing the target's states, and
needs the capture alone. A second process does it in the same folder; where memory holds the target
twice it goes on with what a report asks for later. Nothing depends on it: what it has not measured
is measured where it is asked for, and what goes wrong there is said there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from dflash_diag.deadlines import killed
from dflash_diag.diagnostics.base import DRAFTER, Skip

if TYPE_CHECKING:
    from dflash_diag.runs import Run

TIMES = 16
"""Bytes of a target in memory for each on the disk, at the most: from 4 bits a weight to 32, and as
much again for what is computed."""
WORTH = 500
"""Generated tokens in all below which a process costs more to start than it saves."""


@contextmanager
def ahead(run: Run, *, report: bool = False) -> Iterator[None]:
    """Let a second process measure while the body lasts, each on half of the cores.

    Only where nothing is short: on a CPU, on a machine with a second core, and with a target that
    keeps this process busy meanwhile. The capture is made first if it is not there.

    How sums are rounded depends on the number of threads, so that must not depend on what is there
    already: a run that goes on where it was stopped uses half of the cores as well.

    Parameters
    ----------
    report
        Whether the body asks for everything, and not for the readings alone.
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
        more = report and _has_room_for_another(run.config.target)
        known = alignment_path(run, DRAFTER).is_file()
        with nullcontext() if known and not more else _trying(run, half, more=more):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _trying(run: Run, threads: int, *, more: bool) -> Iterator[None]:
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
        _tell(process, json.dumps({"given": given.model_dump(mode="json"), "more": more}))
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


def _has_room_for_another(target: str) -> bool:
    """Whether memory holds a target once more, at `TIMES` its files and beside this process."""
    import psutil

    path = Path(target)
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(one.stat().st_size for one in files if one.is_file())
    return 0 < TIMES * size < psutil.virtual_memory().available


def main() -> None:
    """What the second process does: the run on standard input's first line, opened again.

    It ends when that is closed.
    """
    from dflash_diag.config import RunConfig
    from dflash_diag.runs import Run

    asked = json.loads(sys.stdin.readline())
    Thread(target=_end_with_the_first, daemon=True).start()
    run = Run.open(RunConfig.model_validate(asked["given"]))
    run.alignment()
    for measure in (run.replay, run.gap, run.renderings) if asked["more"] else ():
        with suppress(Skip):
            measure()


def _end_with_the_first() -> None:
    while os.read(sys.stdin.fileno(), 1):  # a blocked `sys.stdin.read` would hinder our own end
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
