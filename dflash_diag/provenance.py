"""Where a number came from: software, machine, inputs and parameters, apart from the times.

`collect` returns two parts. ``content`` is the same for the same run on the same machine, so two
results can be compared by it; ``times`` never is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_diag.paths import checkout
from dflash_diag.storage import StrPath, content_key, plain, sha256_file

PACKAGES = (
    "dflash-diag",
    "torch",
    "transformers",
    "triton",
    "flash-linear-attention",
    "causal-conv1d",
    "safetensors",
    "gguf",
    "tokenizers",
    "numpy",
    "scipy",
    "pandas",
)


def collect(
    *,
    given: Mapping[str, Any] | None = None,
    defaulted: Mapping[str, Any] | None = None,
    files: Mapping[str, StrPath] | None = None,
    device: str | None = None,
    started: datetime | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Provenance of one result.

    Parameters
    ----------
    given, defaulted
        Parameters that somebody chose, and those that were left at their defaults.
    files
        Input files by role; each is recorded as its name and sha256.
    device
        ``"cpu"`` or ``"cuda…"``, if torch did the work there.
    started
        When the work began (`utc_now`), if that is to be recorded.
    facts
        Anything else that decides the numbers: seed, dtype, backend, …

    Returns
    -------
    dict
        ``{"content": {"versions", "machine", "source", "parameters", "files", …}, "key",
        "times": {"started", "finished"}}``; ``key`` is the hash of ``content``.
    """
    content = {
        "versions": versions(),
        "machine": machine(),
        "device": None if device is None else device_facts(device),
        "source": source_revision(),
        "parameters": {"given": dict(given or {}), "defaulted": dict(defaulted or {})},
        "files": {
            role: {"name": Path(path).name, "sha256": sha256_file(path)}
            for role, path in sorted((files or {}).items())
        },
        **facts,
    }
    return {
        "content": plain(content),
        "key": content_key(content),
        "times": {
            "started": None if started is None else _stamp(started),
            "finished": _stamp(utc_now()),
        },
    }


def utc_now() -> datetime:
    """The time, with its zone (UTC)."""
    return datetime.now(UTC)


def versions() -> dict[str, str | None]:
    """Versions of Python and `PACKAGES`, None where one is not installed; imports none of them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """System, processor and number of usable cores; nothing that names the machine or its user."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count() if usable is None else len(usable),
    }


def device_facts(device: str) -> dict[str, Any]:
    """What decides speed and rounding on a torch device."""
    import torch

    kind = torch.device(device)
    if kind.type != "cuda":
        return {"device": kind.type, "threads": torch.get_num_threads()}
    facts = torch.cuda.get_device_properties(kind)
    return {
        "device": "cuda",
        "name": facts.name,
        "capability": f"{facts.major}.{facts.minor}",
        "memory_gib": round(facts.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Version of the GPU's driver, where its own tool tells it."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n", 1)[0].strip() or None


def source_revision() -> dict[str, Any] | None:
    """Git commit of the checkout that this package runs from, and whether it has local changes.

    None for an installed copy, or where git cannot tell.
    """
    root = checkout()
    if root is None or not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain", "--untracked-files=no")
    if commit is None or status is None:
        return None
    return {"commit": commit, "dirty": bool(status)}


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            # A mere look must not take the index lock from somebody who is committing.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str | None:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None


def _stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds")
