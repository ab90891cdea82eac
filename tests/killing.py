"""Run verbs in processes that are killed, and hold what they leave against an undisturbed run.

Processes are forked from one that has imported everything (this file as a program), so that a kill
meets the work rather than the imports, and costs no ten seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
NOTEBOOKS = ("02_acceptance",)
"""Those that a report is tried with: a kernel takes as long as everything else."""
DRAWS = 400
TIMES = {"times", "finished", "started", "written", "since"}
"""Keys of what says when something was made."""


class Spawner:
    """Starts verbs of the command line, each as a process of its own that can be killed.

    Parameters
    ----------
    disks
        Whether they see disks of their own, see `disk`.
    more
        Environment variables of theirs.
    """

    def __init__(self, *, disks: bool = False, **more: str) -> None:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg", **more}
        environment |= {"DFLASH_DIAG_PROGRESS": "silent", "PYTHONPATH": str(TESTS.parent)}
        private = PRIVATE if disks and _can_mount() else ()
        self._process = subprocess.Popen(
            [*private, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            text=True,
        )
        self.root = Path(f"/proc/{self._process.pid}/root") if private else None
        """Where this process sees the files that those see; None if they are the same."""

    def disk(self, place: Path, size: int) -> bool:
        """Give the verbs a disk of so many bytes at a folder, or another size to the one there.

        Whether that can be done: it takes root, or a user who may have a namespace of his own.
        """
        return self.root is not None and self._ask(disk=str(place), size=size) == 0

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def start(self, *arguments: Any, **how: Any) -> Running:
        """Start a verb; ``how`` is what `_child` takes."""
        task = {"arguments": [str(one) for one in arguments], **how}
        return Running(self._ask(**task), self._ask)

    def _ask(self, **task: Any) -> int:
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


@dataclass
class Running:
    """A process that a `Spawner` has started."""

    pid: int
    _ask: Callable[..., int]

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code; the negative number of the signal that killed it."""
        return self._ask(wait=self.pid)

    def ended(self) -> int | None:
        """The same, or None while it runs."""
        code = self._ask(poll=self.pid)
        return None if code == RUNS else code


RUNS = 1000
PRIVATE = ("unshare", "-m") if os.geteuid() == 0 else ("unshare", "-rm")
"""Starts a process whose mounts nobody else sees; a user is root there for that."""


def _can_mount() -> bool:
    command = [*PRIVATE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except OSError:
        return False


@dataclass(frozen=True)
class Stage:
    """One verb on the tiny world, and what it is to leave."""

    name: str
    arguments: tuple[str, ...]
    out: Path
    log: Path
    how: dict[str, Any] = field(default_factory=dict)
    root: Path = Path("/")
    """Where what the verb sees is seen from here."""

    @property
    def left(self) -> Path:
        """What it writes, as it is seen from here."""
        return self.root / self.out.relative_to("/")

    def start(self, spawner: Spawner, **how: Any) -> Running:
        how = {"log": str(self.log), **self.how, **how}
        return spawner.start(*self.arguments, "--out", self.out, **how)

    def said(self) -> str:
        """What its last process wrote."""
        return self.log.read_text()


def stages(
    world: Path,
    folder: Path,
    *,
    logs: Path | None = None,
    pages: Sequence[str] = NOTEBOOKS,
    root: Path | None = None,
) -> dict[str, Stage]:
    """Every verb that is killed.

    Parameters
    ----------
    world
        One that `write_world` made.
    folder
        Where the verbs write.
    logs
        Where their standard error goes; the same folder unless it is small.
    root
        Where the folder is seen from here, see `Spawner.root`.
    """
    given = ("--target", f"{world}/target", "--prompts", f"{world}/prompts.jsonl")
    given += ("--max-new-tokens", "12")
    drafter = ("--drafter", f"{world}/drafter")
    captured = ("--capture", f"{world}/capture", *drafter, "--target", f"{world}/target")
    watch = ("--capture", f"{world}/capture", "--once", "--settle", "0.2", "--every", "0.2")
    arguments: dict[str, tuple[str, ...]] = {
        "capture": (*given, *drafter),
        "score": (*captured, "--json", str(folder / "score.json")),
        "report": (*given, *drafter),
        "doctor": (*given, *drafter),
        "watch": (f"{world}/watched", *watch),
    }
    how = {"report": {"pages": list(pages)}, "watch": {"stand_ins": True}}
    return {
        name: Stage(
            name,
            (name, *more),
            folder / name,
            (logs or folder) / f"{name}.log",
            how.get(name, {}),
            root or Path("/"),
        )
        for name, more in arguments.items()
    }


def write_world(folder: Path) -> Path:
    """The tiny world, a capture of it and a folder of six checkpoints to watch."""
    import tiny_world
    import watched

    from dflash_diag.capture import make_capture
    from dflash_diag.prompts import read_prompts

    tiny_world.write_world(folder)
    make_capture(
        str(folder / "target"),
        read_prompts(folder / "prompts.jsonl"),
        folder / "capture",
        max_new_tokens=12,
        taps=[0, 2],
        silent=True,
    )
    for step in range(1, 7):
        rounds = [[step, 2, 3], [1, 2], [step]]
        watched.write(folder / "watched" / f"step_{step}.pt", rounds, step=step, do="short")
    return folder


def kept(stage: Stage) -> dict[str, Any]:
    """All that a run leaves, by path; JSON without times, tables by their bytes."""
    found: dict[str, Any] = {}
    for path in sorted(one for one in stage.left.rglob("*") if one.is_file()):
        if re.search(r"/\.[^/]+\.[0-9a-f]{8}\b", f"/{path.relative_to(stage.left)}"):
            continue  # half-made by what was killed; it is swept when it is a day old
        # A key that depends on a capture depends on when that was made.
        name = re.sub(r"\b[0-9a-f]{12}\b", "KEY", path.relative_to(stage.left).as_posix())
        if path.suffix == ".json":
            text = path.read_text().replace(str(stage.out.parent), "FOLDER")
            found[name] = timeless(json.loads(text))
        elif path.name == "history.parquet":
            import pandas as pd

            table = pd.read_parquet(path).drop(columns=["finished", "written"])
            found[name] = table.to_json(orient="records")
        elif path.suffix not in (".ipynb", ".html", ".log") and path.name != "tried":
            found[name] = path.read_bytes()
    # It holds the hash of a file with times; every other hash is that of a file compared here.
    manifests = [name for name in found if name.endswith("manifest.json")]
    for name in manifests:
        found[name] = {k: v for k, v in found[name]["files"].items() if k != "capture.json"}
    return found


def differences(found: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """What two runs left differently, in words."""
    names = sorted(name for name in {*found, *known} if found.get(name) != known.get(name))
    return [
        f"{name}: {found.get(name)!r:.2000} instead of {known.get(name)!r:.2000}" for name in names
    ]


def pages(stage: Stage) -> list[str]:
    """Names of the pages and notebooks."""
    names = [one for kind in ("*.html", "*.ipynb") for one in stage.left.rglob(kind)]
    return sorted(one.relative_to(stage.left).as_posix() for one in names)


def timeless(value: Any) -> Any:
    """JSON without what says when it was made, and without hashes of files that say so."""
    if isinstance(value, dict):
        # How often a report was tried is what a kill changes, and no number of it.
        left_out = TIMES | {"attempts", "capture", "result_key", "key"}
        return {k: timeless(v) for k, v in value.items() if k not in left_out}
    return [timeless(one) for one in value] if isinstance(value, list) else value


# --- the process that all others are forked from --------------------------------------------------


def main() -> None:
    from dflash_diag import cli, diagnostics, ahead, capture, report, runs, scoring, shards  # noqa: F401, I001
    import nbconvert, papermill, pyarrow.parquet, transformers  # noqa: F401, E401
    from transformers import Qwen3_5ForCausalLM  # noqa: F401

    diagnostics.catalogue()
    for line in sys.stdin:
        task = json.loads(line)
        if "wait" in task:
            answer = os.waitstatus_to_exitcode(os.waitpid(task["wait"], 0)[1])
        elif "poll" in task:
            pid, status = os.waitpid(task["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else RUNS
        elif "disk" in task:
            answer = _mounted(Path(task["disk"]), task["size"])
        else:
            answer = os.fork() or _child(**task)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _mounted(place: Path, size: int) -> int:
    again = "remount," if place.is_mount() else ""
    command = ["mount", "-t", "tmpfs", "-o", f"{again}size={size}", "tmpfs", str(place)]
    return subprocess.run(command, stdout=sys.stderr, timeout=30, check=False).returncode


def _child(
    arguments: list[str],
    log: str,
    pages: list[str] | None = None,
    stand_ins: bool = False,
    die_at: int = 0,
    largest: int = 0,
) -> int:
    """One verb, after which the process ends.

    Parameters
    ----------
    pages
        Notebooks of a report.
    stand_ins
        Let a watch start what takes no time (`watched`).
    die_at
        Kill the process before the so-manieth change of a name on disk; negative: after it.
    largest
        Bytes that a file may have.
    """
    from dflash_diag import cli, report
    from dflash_diag.config import RunConfig

    errors = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), errors, errors)):
        os.dup2(file, number)
    if pages is not None:
        report.NOTEBOOKS = {name: report.NOTEBOOKS[name] for name in pages}
    if stand_ins:
        import watched

        watched.install()
    else:
        read = RunConfig.read
        RunConfig.read = lambda given: read({"draws": DRAWS, **given})  # type: ignore[method-assign]
    if die_at:
        _die_at(die_at)
    if largest:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    try:
        code = cli.run(arguments)
    except BaseException:  # noqa: BLE001 - else this process would read the next line
        traceback.print_exc()
        code = 1
    os._exit(code)


def _die_at(when: int) -> None:
    """Replace what changes names on disk by what ends this process at one of its calls."""
    calls = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*given: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == when:
                os.kill(os.getpid(), signal.SIGKILL)
            done = change(*given, **more)
            if calls == -when:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return wrapped

    for name in ("rename", "replace", "link"):
        setattr(os, name, counted(getattr(os, name)))


def until(what: Callable[[], bool], within: float = 60.0) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + within
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


if __name__ == "__main__":
    main()
