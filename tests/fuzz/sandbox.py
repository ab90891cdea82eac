"""Read inputs in a process that may not do much, and notice what they make it do.

A worker is forked for a batch. It may have so much more memory and so much processor time; each
input has seconds; an audit hook sees every file opened for writing, every connection, every program
started and every unpickling, and what happens outside the input's own folder is a fault, done or
not. If the worker dies, the input that it died of is the fault and the next worker goes on after
it.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from corpus import KINDS, Kind
from mutators import mutate

from dflash_diag.errors import DiagError

MEMORY = 2**30
"""Bytes that a worker may have more than when it was forked."""
RESIDENT = 2**29
"""Bytes by which one input may raise what a worker has ever held."""
SECONDS = 10
"""For one input."""
LINE = 4200
"""Characters of an error."""
BATCH = 250
FAST = Path("/dev/shm")


@dataclass(frozen=True)
class Outcome:
    """What became of one input."""

    kind: str
    index: int
    verdict: str
    """``accepted``, ``refused`` or ``crashed``."""
    said: str
    """The error's line, or the traceback."""
    seconds: float


class Hang(BaseException):
    """An input took too long; no handler of ours may catch it."""


def shares(inputs: int) -> dict[str, int]:
    """How many inputs each kind gets: at least one, and what its share comes to."""
    total = sum(kind.share for kind in KINDS.values())
    counts = {name: max(1, inputs * kind.share // total) for name, kind in KINDS.items()}
    first = next(iter(counts))
    counts[first] = max(1, counts[first] + inputs - sum(counts.values()))
    return counts


def fuzz(
    counts: dict[str, int], seed: int, world: Path, keep: Path | None, start: int = 0
) -> list[Outcome]:
    """Outcomes of so many inputs of each kind, from an index on."""
    found: list[Outcome] = []
    for name in counts:
        warm(KINDS[name], world)
    for name, n in counts.items():
        began, before = time.monotonic(), len(found)
        found += run(KINDS[name], range(start, start + n), seed, world, keep)
        crashed = sum(one.verdict == "crashed" for one in found[before:])
        seconds = time.monotonic() - began
        print(f"{name}: {n} in {seconds:.0f} s, {crashed} crashed", file=sys.stderr)
    return found


def run(
    kind: Kind, indices: Sequence[int], seed: int, world: Path, keep: Path | None
) -> Iterator[Outcome]:
    """Outcomes of some mutated inputs of one kind; inputs that crash are kept in ``keep``."""
    todo = list(indices)
    while todo:
        batch, todo = todo[:BATCH], todo[BATCH:]
        finished = 0
        for outcome in _batch(kind, batch, seed, world, keep):
            finished += 1
            yield outcome
        todo = batch[finished:] + todo


def replay(kind: Kind, path: Path, world: Path) -> Outcome:
    """The outcome of an input that was kept."""
    return next(_forked(kind, [path], world, lambda here, path: _unpacked(path, here), None))


def _batch(
    kind: Kind, indices: Sequence[int], seed: int, world: Path, keep: Path | None
) -> Iterator[Outcome]:
    return _forked(kind, indices, world, lambda here, i: make(kind, i, seed, world, here), keep)


def make(kind: Kind, index: int, seed: int, world: Path, here: Path) -> Path:
    """Write the mutated input of an index into a folder."""
    rng = Random(f"{seed} {kind.name} {index}")
    path = kind.write(world, here)
    for _ in range(rng.choice((1, 1, 1, 2))):
        alone = path.is_file()
        globs = ("*",) if alone else kind.parts
        where = here if alone else path
        files = {p for glob in globs for p in where.glob(glob) if p.is_file()}
        files = {p for p in files if not p.is_symlink() and p.stat().st_size < 2**24}
        if not files:
            break
        changed = mutate(rng, list(files), alone=alone, spared=kind.spared)
        if kind.mend is not None and rng.random() < 0.8:
            kind.mend(path, changed)
    return path


def _forked(
    kind: Kind, items: Sequence[Any], world: Path, write: Any, keep: Path | None
) -> Iterator[Outcome]:
    """Outcomes of a worker's inputs; the last is a crash if the worker died of it."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    worker = fork.Process(target=_work, args=(kind, items, world, write, keep, theirs), daemon=True)
    worker.start()
    theirs.close()
    done, started = 0, time.monotonic()
    try:
        while done < len(items):
            if not ours.poll(3 * SECONDS):
                worker.kill()
                yield _died(kind, items[done], "hung, and could not be interrupted", started, keep)
                return
            outcome = ours.recv()
            done, started = done + 1, time.monotonic()
            yield outcome
    except EOFError:
        worker.join()
        yield _died(kind, items[done], f"the worker died ({worker.exitcode})", started, keep)
    finally:
        worker.join(5)
        if worker.is_alive():
            worker.kill()
            worker.join()
        ours.close()


def _died(kind: Kind, item: Any, why: str, started: float, keep: Path | None) -> Outcome:
    index = item if isinstance(item, int) else -1
    if keep is not None and index >= 0:
        keep.mkdir(parents=True, exist_ok=True)
        (keep / f"{_slug(kind)}.{index}.txt").write_text(why)
    return Outcome(kind.name, index, "crashed", why, time.monotonic() - started)


def _work(
    kind: Kind, items: Sequence[Any], world: Path, write: Any, keep: Path | None, pipe: Any
) -> None:
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=FAST if FAST.is_dir() else None))
    gc.freeze()  # what was there before the fork need not be looked at again
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.environ["FUZZ_CANARY"] = str(root / "canary")
    os.chdir(root)
    tempfile.tempdir = str(root)
    warnings.simplefilter("ignore")
    watch = _Watch(root)
    sys.addaudithook(watch)
    base = _virtual()
    resource.setrlimit(resource.RLIMIT_AS, (base + MEMORY, base + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu = int(time.process_time()) + SECONDS * len(items) + 60
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
    signal.signal(signal.SIGALRM, _ring)
    for item in items:
        here = root / "input"
        here.mkdir()
        try:
            path = write(here, item)
        except Exception:  # noqa: BLE001 - a fault of ours, to be seen too
            outcome = Outcome(kind.name, item, "crashed", traceback.format_exc(), 0.0)
            if keep is not None:
                _keep(keep, kind, outcome, here, here)
            pipe.send(outcome)
            shutil.rmtree(here)
            continue
        outcome = _read(kind, path, item if isinstance(item, int) else -1, world, root, watch)
        if outcome.verdict == "crashed" and keep is not None:
            _keep(keep, kind, outcome, here, path)
        pipe.send(outcome)
        shutil.rmtree(root / "out", ignore_errors=True)
        shutil.rmtree(here, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
    os._exit(0)


def warm(kind: Kind, world: Path) -> None:
    """Read a valid input, so that a worker has nothing to import any more."""
    from dflash_diag import servers

    servers._FIRST_PAUSE_S = 0.001  # what is asked for again need not be waited for
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        here, out = Path(folder) / "input", Path(folder) / "out"
        here.mkdir()
        out.mkdir()
        kind.read(kind.write(world, here), world, out)
    gc.collect()


def _read(kind: Kind, path: Path, index: int, world: Path, root: Path, watch: _Watch) -> Outcome:
    out = root / "out"
    out.mkdir()
    before, started = _peak(), time.monotonic()
    verdict, said = "accepted", ""
    watch.start()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        kind.read(path, world, out)
    except DiagError as error:
        verdict, said = "refused", str(error)
        if error.exit_code == 2 or kind.name == "a server's answers":
            wrong = _faults_of(said)
        else:
            wrong = f"exit code {error.exit_code}"
        if wrong:
            verdict, said = "crashed", f"{wrong}: {said[:LINE]!r}\n{traceback.format_exc()[-3000:]}"
    except BaseException:  # noqa: BLE001 - an interruption is a fault like any other
        verdict, said = "crashed", traceback.format_exc()[-6000:]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        done = watch.stop()
    seconds = time.monotonic() - started
    gc.collect()
    if (root / "canary").exists():
        done.append("the canary was touched")
        (root / "canary").unlink()
    if _peak() - before > RESIDENT:
        done.append(f"{(_peak() - before) / 2**20:.0f} MiB more memory")
    if done:
        verdict, said = "crashed", f"did {'; '.join(done)}\n{said}"
    return Outcome(kind.name, index, verdict, said, seconds)


def _faults_of(said: str) -> str:
    """What is wrong with an error's line."""
    if len(said) > LINE:
        return f"an error of {len(said)} characters"
    return "" if said.isprintable() else "an error that is no line of printable text"


def _ring(_signal: int, _frame: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # again, should somebody swallow it
    raise Hang(f"more than {SECONDS} s")


class _Watch:
    """An audit hook: what is done that reading a file does not need."""

    ALWAYS = frozenset(
        (
            *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty"),
            *("subprocess.Popen", "pty.spawn", "pickle.find_class", "ctypes.dlopen"),
            *("webbrowser.open", "urllib.Request", "code.__new__", "os.chmod", "os.chown"),
            *("os.link", "os.symlink", "os.putenv", "os.kill", "sys.setprofile"),
        )
    )
    PATHS = frozenset(
        ("os.remove", "os.rmdir", "os.mkdir", "os.rename", "os.truncate", "shutil.rmtree")
    )
    PLACES = frozenset(("socket.connect", "socket.bind", "socket.sendto"))
    FREE = ("/dev/null",)
    OWN = ("chat_process.py", "HEAD", "--untracked-files=no")
    """How the command lines end that we start, and may end: templates are rendered in a process
    of their own, and git is asked for a version."""

    def __init__(self, root: Path) -> None:
        self.root, self.on, self.done, self.started = str(root), False, [], False

    def start(self) -> None:
        self.done, self.on = [], True

    def stop(self) -> list[str]:
        self.on = False
        return list(dict.fromkeys(self.done))

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        own = event == "subprocess.Popen" and str(args[1][-1]).endswith(self.OWN)
        self.started |= own
        if not self.on or own or (event == "os.kill" and self.started):
            return
        if event == "open":
            path, mode, flags = args
            writes = (isinstance(mode, str) and any(c in mode for c in "wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and not self._ours(path):
                self._note(f"open {path!r:.200} for writing")
        elif event == "import" and args[0] == "fuzz_canary":
            self._note("import fuzz_canary")
        elif event in self.ALWAYS or (event in self.PATHS and not self._ours(args[0])):
            self._note(f"{event} {args!r:.200}")
        elif event in self.PLACES and "127.0.0.1" not in str(args[1]):
            self._note(f"{event} {args[1]!r:.200}")

    def _ours(self, path: Any) -> bool:
        if isinstance(path, int):
            return True
        text = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 - must open nothing
        return text.startswith((self.root, *self.FREE))

    def _note(self, what: str) -> None:
        self.done.append(what)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


# --- kept inputs ----------------------------------------------------------------------------------


def _slug(kind: Kind) -> str:
    return "".join(c if c.isalnum() else "-" for c in kind.name)


def _keep(keep: Path, kind: Kind, outcome: Outcome, here: Path, path: Path) -> None:
    """An input with what it did: a tar archive and a text beside it."""
    import tarfile

    keep.mkdir(parents=True, exist_ok=True)
    name = f"{_slug(kind)}.{outcome.index}"
    (keep / f"{name}.txt").write_text(outcome.said, "utf-8", "backslashreplace")
    with tarfile.open(keep / f"{name}.tar", "w", errors="surrogateescape") as archive:
        for entry in here.rglob("*"):
            # Half an endless file is as good as all of it, and fits on the disk.
            if not (entry.is_file() and not entry.is_symlink() and entry.stat().st_size > 2**26):
                archive.add(entry, entry.relative_to(here), recursive=False)
    (keep / f"{name}.path").write_text(str(path.relative_to(here)))


def kind_of(kept: Path) -> Kind:
    """The kind of an input that was kept, by its name."""
    slug = kept.name.split(".")[0]
    return next(kind for kind in KINDS.values() if _slug(kind) == slug)


def _unpacked(kept: Path, here: Path) -> Path:
    import tarfile

    with tarfile.open(kept) as archive:
        archive.extractall(here, filter="fully_trusted")
    return here / kept.with_suffix(".path").read_text()
