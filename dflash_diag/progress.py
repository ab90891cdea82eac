"""Progress of one stage: a bar on a terminal, whole lines anywhere else.

A bar drawn into a log or a notebook leaves a heap of fragments, so without a terminal a stage
writes one line when it ends, and one now and then while it lasts. ``DFLASH_DIAG_PROGRESS`` forces
``bar``, ``lines`` or ``silent``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from dflash_diag.errors import BadInput

if TYPE_CHECKING:
    from tqdm.std import tqdm

T = TypeVar("T")

MODES = ("auto", "bar", "lines", "silent")
HEARTBEAT_S = 30.0
"""Seconds between two lines of one stage, so that a log shows that the work goes on."""


@overload
def progress(work: int, desc: str, *, unit: str = ..., silent: bool = ...) -> Progress[None]: ...
@overload
def progress(
    work: Iterable[T], desc: str, *, unit: str = ..., silent: bool = ...
) -> Progress[T]: ...
def progress(
    work: Iterable[Any] | int, desc: str, *, unit: str = "it", silent: bool = False
) -> Progress[Any]:
    """Report the progress of one stage on standard error.

    Iterate over it, or enter it and call ``update``; stages may be nested::

        for prompt in progress(prompts, "scoring", unit="prompt"): ...

        with progress(n_steps, "training", unit="step") as stage:
            stage.update(note="loss 2.1")

    Parameters
    ----------
    work
        What to go through, or how many steps there will be.
    desc
        Name of the stage.
    unit
        What one step is, in the singular.
    silent
        Report nothing.
    """
    return Progress(work, desc, unit=unit, mode="silent" if silent else _mode())


class Progress(Generic[T]):
    """One stage; made by `progress`."""

    def __init__(self, work: Iterable[T] | int, desc: str, *, unit: str, mode: str) -> None:
        self.items: Iterable[T] | None = None if isinstance(work, int) else work
        self.total = work if isinstance(work, int) else _length(work)
        self.desc, self.unit, self.mode = desc, unit, mode
        self.done, self.note = 0, ""
        self._bar: tqdm[T] | None = None

    def __enter__(self) -> Self:
        self._started = self._spoke = time.monotonic()
        if self.mode == "bar":
            from tqdm.std import tqdm

            # An inner stage's bar goes away with it; an outer one stays with its time.
            self._bar = tqdm(
                total=self.total,
                desc=self.desc,
                unit=f" {self.unit}",
                leave=None,
                dynamic_ncols=True,
                file=sys.stderr,
            )
        return self

    def update(self, n: int = 1, *, note: str = "") -> None:
        """``n`` more steps are done; ``note`` is shown after the rate until the next one."""
        self.done += n
        self.note = note or self.note
        if self._bar is not None:
            if note:
                self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(n)
        elif self.mode == "lines" and time.monotonic() - self._spoke >= HEARTBEAT_S:
            self._say("")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self.mode == "lines":
            self._say("done" if kind is None else "stopped")

    def __iter__(self) -> Iterator[T]:
        if self.items is None:
            raise TypeError(f"stage {self.desc!r} counts steps: enter it and call update")
        with self:
            for item in self.items:
                yield item
                self.update()

    def _say(self, state: str) -> None:
        self._spoke = time.monotonic()
        seconds = self._spoke - self._started
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        parts = [f"{count} {self.unit}", f"{seconds:.1f} s"]
        if self.done and seconds > 0:
            parts.append(f"{self.done / seconds:.3g} {self.unit}/s")
            if not state and self.total:
                parts.append(f"{seconds / self.done * (self.total - self.done):.0f} s left")
        parts += [part for part in (self.note, state) if part]
        sys.stderr.write(f"{self.desc}: {', '.join(parts)}\n")
        sys.stderr.flush()


def _length(work: Iterable[T]) -> int | None:
    return len(work) if isinstance(work, Sized) else None


def _mode() -> str:
    mode = os.environ.get("DFLASH_DIAG_PROGRESS", "auto")
    if mode not in MODES:
        raise BadInput(f"DFLASH_DIAG_PROGRESS={mode}", f"one of {', '.join(MODES)}")
    if mode == "auto":
        return "bar" if sys.stderr is not None and sys.stderr.isatty() else "lines"
    return mode
