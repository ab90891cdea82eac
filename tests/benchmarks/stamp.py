"""When and with what a table was measured: its first line."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

LIBRARIES = ("torch", "transformers", "numpy")


def stamp() -> str:
    """Command, date, processor and versions."""
    today = datetime.datetime.now(datetime.UTC).date()
    command = " ".join(["python", f"tests/benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    return f"{command} · {today} · {os.cpu_count()} x {processor()} · {versions}"


def processor() -> str:
    """The processor's own name, where the system tells it."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
