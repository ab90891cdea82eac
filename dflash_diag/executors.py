"""Where independent pieces of work run: on this machine, or on the nodes of a Ray cluster.

A piece of work is a command line, so that a crash stays its own, and it tells what it did by files:
the nodes of a cluster have to see the same paths, and the same Python with this package.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, Protocol, Self

from dflash_diag.deadlines import GONE_S, GRACE_S, STARTER, within
from dflash_diag.errors import BadInput

LIMIT_S = 86400.0
"""Seconds that a command may take unless it is said otherwise."""
RAY_S = 120.0
"""Seconds that a Ray cluster may take to answer, or to start."""
_POLL_S = 0.1
_TAIL = 2000


@dataclass(frozen=True)
class Command:
    """A command line; what it writes to standard error goes to the end of ``log``."""

    arguments: tuple[str, ...]
    log: str
    given: str = ""
    """What it reads on standard input."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the machine on which it runs."""
    limit: float = LIMIT_S
    """Seconds after which it is ended."""

    @classmethod
    def python(cls, *arguments: str, log: Path, given: str = "") -> Self:
        """``python -m …`` with this very package."""
        root = str(Path(__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {"PYTHONPATH": os.pathsep.join(paths), "DFLASH_DIAG_PROGRESS": "lines"}
        return cls((sys.executable, "-m", *arguments), str(log), given, environment)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; the negative number of the signal that killed it."""
    output: str
    """What it wrote to standard output."""
    last_line: str
    """The last line that it wrote to standard error."""

    @property
    def reason(self) -> str:
        """Why it failed, in a line."""
        return self.last_line.removeprefix("error: ") or f"ended with code {self.code}"

    @property
    def could_not_write(self) -> bool:
        """Whether it failed for want of a place to write to, on a full disk say."""
        return self.code != 0 and self.reason.startswith("cannot write ")


class Executor(Protocol):
    """Runs commands, so many at once; further ones wait for their turn.

    To be entered; leaving it drops what waits and ends what runs, which has `GRACE_S` seconds.
    """

    @property
    def at_once(self) -> int:
        """How many run at the same time."""

    @property
    def spare(self) -> int:
        """Into how many commands one piece of work may be cut when there is no other."""

    def submit(self, command: Command) -> Future[Ended]:
        """Start a command as soon as there is room."""

    def __enter__(self) -> Self:
        """Nothing happens yet."""

    def __exit__(self, *_: object) -> None:
        """End everything."""


def executor(name: str, *, jobs: int = 0, gpu: bool = False, address: str = "") -> Executor:
    """The executor of that name, ``local`` or ``ray``.

    Parameters
    ----------
    jobs
        How many commands run at once; 0: one here, one a node of a cluster.
    gpu
        Whether a command needs a GPU to itself, for a cluster that counts them.
    address
        Of a Ray cluster.

    Raises
    ------
    BadInput
        No such executor, Ray is not installed, or no cluster is there.
    """
    if jobs < 0:
        raise BadInput(f"--jobs {jobs}", "how many reports to make at once")
    if name == "local":
        return Local(jobs or 1)
    if name == "ray":
        return OnRay(jobs, gpu=gpu, address=address)
    raise BadInput(f"--executor {name}", "local or ray")


class Local:
    """Commands as processes of this machine, which share its cores: cutting work gains nothing."""

    spare = 1

    def __init__(self, at_once: int) -> None:
        self.at_once = at_once
        self._pool = ThreadPoolExecutor(at_once)
        self._stopped = Event()
        self._share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // at_once))}
        if at_once == 1 or "OMP_NUM_THREADS" in os.environ:
            self._share = {}

    def submit(self, command: Command) -> Future[Ended]:
        command = replace(command, environment={**command.environment, **self._share})
        return self._pool.submit(execute, command, self._stopped)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def execute(command: Command, stopped: Event | None = None) -> Ended:
    """Run a command to its end, its time's end, or until ``stopped``; an exception ends it too.

    It leads a process group of its own, so that a Ctrl-C reaches it through us, and once.
    """
    log = Path(command.log)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        errors = log.open("a+b")
    except OSError as error:
        return Ended(1, "", f"cannot write {log}: {error.strerror}")
    with errors:
        start = errors.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            command.arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | dict(command.environment) | {STARTER: str(os.getpid())},
            start_new_session=True,
        )
        try:
            output = _wait(process, command.given.encode(), command.limit, stopped)
        finally:
            _end(process)
        errors.seek(max(start, errors.seek(0, os.SEEK_END) - _TAIL))
        lines = errors.read().decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    if output is None:
        return Ended(process.returncode or 1, "", f"it had not ended after {command.limit:g} s")
    return Ended(process.returncode, output.decode("utf-8", "replace"), last)


def _wait(
    process: subprocess.Popen[bytes], given: bytes, limit: float, stopped: Event | None
) -> bytes | None:
    """Standard output; nothing when ``stopped``, and None when the time is over."""
    end = time.monotonic() + limit
    # An interruption that another thread asks for is only seen between two short waits.
    rest: bytes | None = given
    while True:
        try:
            return process.communicate(rest, timeout=_POLL_S)[0]
        except subprocess.TimeoutExpired:
            rest = None
            if stopped is not None and stopped.is_set():
                return b""
            if time.monotonic() > end:
                return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of a process that has ended, or has to."""
    try:
        if process.poll() is None:
            _stop(process)
    finally:
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End a process, with those that it started; a second interruption kills them at once."""
    try:
        process.send_signal(signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < end:
            time.sleep(_POLL_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # it hangs in the system itself
            process.wait(GONE_S)


class OnRay:
    """Commands as tasks of a Ray cluster that is there.

    Parameters
    ----------
    address
        As Ray takes it; the default is the environment variable ``RAY_ADDRESS``, else the cluster
        to which this machine belongs. ``local`` starts one that lasts as long as this process.
    """

    def __init__(self, jobs: int = 0, *, gpu: bool = False, address: str = "") -> None:
        self._ray, all_nodes = _connected(address or os.environ.get("RAY_ADDRESS", "") or "auto")
        nodes = [one["Resources"] for one in all_nodes if one["Alive"]]
        gpus = sum(int(one.get("GPU", 0)) for one in nodes) if gpu else 0
        self.at_once = self.spare = jobs or gpus or len(nodes)
        # Workers find this package by no path of their own; what they start does.
        self._ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        cores = min(int(one.get("CPU", 1)) for one in nodes)
        a_node = -(-self.at_once // len(nodes))
        self._task = self._ray.remote(
            num_cpus=max(1, cores // a_node), num_gpus=1 if gpus else 0, max_retries=0
        )(execute)
        self._running: dict[Future[Ended], Any] = {}

    def submit(self, command: Command) -> Future[Ended]:
        reference = self._task.remote(command)
        future: Future[Ended] = Future()
        future.set_running_or_notify_cancel()
        self._running[future] = reference
        reference.future().add_done_callback(partial(self._ended, future))
        return future

    def _ended(self, future: Future[Ended], task: Future[Ended]) -> None:
        """Hand on how a command ended; that its node is lost, say, is one more way of failing."""
        error = task.exception()
        if error is not None:
            said = [line.strip() for line in str(error).splitlines() if line.strip()]
            future.set_result(Ended(1, "", f"Ray: {(said or [type(error).__name__])[-1]}"))
        else:
            future.set_result(task.result())
        self._running.pop(future, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        running = dict(self._running)
        for reference in running.values():
            self._ray.cancel(reference)
        late = wait_for(running, timeout=GRACE_S + 5).not_done
        for future in late:
            self._ray.cancel(running[future], force=True)
        self._ray.shutdown()


def _connected(address: str) -> tuple[Any, list[dict[str, Any]]]:
    """The module ``ray``, connected to a cluster, and the nodes of that."""
    try:
        import ray
    except ImportError as error:
        raise BadInput(
            "--executor ray, and Ray is not installed", do='pip install "dflash-diag[ray]"'
        ) from error

    def nodes() -> list[dict[str, Any]]:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        return list(ray.nodes())

    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        return ray, within(RAY_S, nodes)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        raise BadInput(
            f"no Ray cluster answers at {address}",
            "one that runs",
            "start it with ray start --head, name it with --ray-address, or say local there",
        ) from error
    finally:
        for one, handler in before.items():  # Ray puts its own in their place
            signal.signal(one, handler)
