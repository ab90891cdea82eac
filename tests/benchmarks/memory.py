"""What a process and those that it started hold, in the host's memory and on the GPU."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import torch

GIB = 2**30


def anonymous(pid: int | str = "self") -> int:
    """Bytes of a process's anonymous memory: pages of mapped files are the system's to drop."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = next((line for line in lines if line.startswith("RssAnon")), "RssAnon: 0")
    return int(found.split()[1]) * 1024


def family() -> list[int]:
    """This process and all that it started, directly or not."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
    found = [os.getpid()]
    for one in found:
        found += [pid for pid, parent in parents.items() if parent == one]
    return found


class Resident(threading.Thread):
    """The most anonymous memory that this process has had, in bytes; sampled every 20 ms.

    Parameters
    ----------
    everyone
        Count the processes that it started as well, and what is in use on the GPU.
    """

    def __init__(self, *, everyone: bool = False) -> None:
        super().__init__(daemon=True)
        self.everyone = everyone
        self.most = 0
        self.on_card = 0
        """Bytes in use on the GPU, whoever uses them."""

    def run(self) -> None:
        while True:
            self.most = max(self.most, self._now())
            if self.everyone and torch.cuda.is_initialized():
                free, total = torch.cuda.mem_get_info()
                self.on_card = max(self.on_card, total - free)
            time.sleep(0.02)

    def _now(self) -> int:
        if not self.everyone:
            return anonymous()
        held = 0
        for pid in family():
            try:
                held += anonymous(pid)
            except OSError:  # it has ended meanwhile
                continue
        return held
