"""Which machine is at work in a folder that several of them see.

Locks of the system end with their process, however that ends, but on shared file systems they are
not to be relied on, and elsewhere they end at the machine. So a small file beside the folder says
who is at work in it, and changes every few seconds. Whoever finds another machine's watches it: one
that stays as it is was left by a process that was killed. No two clocks are compared.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from dflash_diag.errors import OutputError

BEAT_S = 5.0
"""Seconds between two changes of the file."""
DEAD_S = 30.0
"""Seconds without a change after which nobody is at work; file systems may show one that late."""
TRIES = 3
"""Times that the file is tried to be made while others make theirs."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def kept_off(out: Path) -> Iterator[None]:
    """Keep other machines out of a folder, which need not be there yet.

    Where no file can be made beside it, nothing is kept off. On this machine a lock has to do that.

    Raises
    ------
    OutputError
        Another machine is at work in it.
    """
    path, own = file_of(out), f"{platform.node()} {os.getpid()} {_boot()} "
    stop = Event()
    beating = Thread(target=_beat, args=(path, own, stop), daemon=True)
    if not _made(path, own, out):
        yield
        return
    beating.start()
    try:
        yield
    finally:
        stop.set()
        beating.join(BEAT_S)
        if (_read(path) or "").startswith(own):
            with suppress(OSError):
                path.unlink()


def file_of(out: Path) -> Path:
    """Where it is said who is at work in ``out``."""
    return out.parent / f".{out.name}.machine"


def _made(path: Path, own: str, out: Path) -> bool:
    """Whether the file is there now and ours; of those who try, one makes it."""
    for _ in range(TRIES):
        _wait(path, out)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x") as file:
                file.write(_line(own, 0))
        except FileExistsError:
            continue
        except OSError:
            break
        return True
    return False


def _wait(path: Path, out: Path) -> None:
    """Until it is sure that no other machine is at work, whose file is removed then."""
    first, end = _read(path), time.monotonic() + DEAD_S
    if first is None:
        return
    name, number, boot = [*first.split(), "", "", ""][:3]
    # One of this machine was left by a process that was killed: a living one has the lock.
    while (name, boot) != (platform.node(), _boot()) and time.monotonic() < end:
        time.sleep(BEAT_S / 5)
        now = _read(path)
        if now is None:
            return
        if now != first:
            raise OutputError(
                f"another machine, {name}, is writing to {out} (process {number})",
                do="wait for it, or give another --out",
            )
    with suppress(OSError):
        path.unlink()


def _beat(path: Path, own: str, stop: Event) -> None:
    count = 0
    while not stop.wait(BEAT_S):
        count += 1
        with suppress(OSError), path.open("r+") as file:  # in place: that takes no room on the disk
            file.write(_line(own, count))


def _line(own: str, count: int) -> str:
    return f"{own}{count:010d}\n"


def _read(path: Path) -> str | None:
    """What it says, None if it is not there; to open it makes a shared file system look anew."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _boot() -> str:
    """What tells machines of one name apart, where the system tells it."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "-"
