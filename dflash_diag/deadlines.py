"""Calls and processes that end in time, whatever the other side does."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_S = 30.0
"""Seconds that a process has to end by itself when it is told to stop: a notebook's cell is not
broken off."""
GONE_S = 10.0
"""Seconds that the system may take to end a process that was killed."""
STARTER = "DFLASH_DIAG_STARTER"
"""Environment variable of a process: the one that started it, and with which it ends."""
_LOOK_S = 0.5


def within(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, if it does so in time.

    For waits whose own limit starts anew with every byte: a peer that sends one now and then would
    be waited for without end. The thread that waits is left behind, and ends with its peer or with
    the process.

    Raises
    ------
    TimeoutError
        The time is up.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result(seconds)


def killed(process: subprocess.Popen[Any]) -> None:
    """Kill a process and wait until it is gone.

    One that hangs in the system itself, in a file system that does not answer say, is left behind:
    it ends when that lets go of it.
    """
    process.kill()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GONE_S)


def end_with_starter() -> None:
    """Let this process be told to stop as soon as the one named by `STARTER` is gone.

    Whoever is killed cannot end what it has started. That would work on, while the next one finds
    its folder taken.
    """
    starter = os.environ.pop(STARTER, "")  # what we start has us instead
    if starter:
        Thread(target=_end_with, args=(int(starter),), daemon=True).start()


def _end_with(starter: int) -> None:
    while os.getppid() == starter:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)
