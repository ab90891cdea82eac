"""Calls that end in time, whatever the other side does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


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
