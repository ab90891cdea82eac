"""Look, wait until it has settled, open, measure, tell: a report for every new checkpoint.

::

    OUT/index.html          all checkpoints so far, for people
    OUT/history.parquet     one row a checkpoint
    OUT/watch.json          what is known of each path
    OUT/captures/KEY/       what the target did; made once, used by all
    OUT/runs/RUN_ID/        the report of one checkpoint
    OUT/logs/NAME.log       what the processes wrote

A run's id is the checkpoint's name and a hash of all that its report depends on. Stopping at any
time loses no more than the reports that are being made, and those go on where they were.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Container, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from filelock import Timeout

from dflash_diag import provenance, storage
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput, OutputError
from dflash_diag.executors import LIMIT_S, Command, Ended, Executor, execute
from dflash_diag.history import FILE as HISTORY
from dflash_diag.history import Row, append, read_history, row_of
from dflash_diag.results import Verdict
from dflash_diag.watch import commands, finding, identity, settling
from dflash_diag.watch.overview import Overview, link
from dflash_diag.watch.regression import Regression, Rule, in_order, regression
from dflash_diag.watch.state import ENDED, Seen, State, log_file
from dflash_diag.watch.webhook import Webhook

SCHEMA = "dflash_diag.watch/1"
ATTEMPTS = 2
"""Times that a report is tried."""
LAST_S = 60.0
"""Seconds for which the end of a watch is put off by messages that are on their way."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a watch goes about it."""

    where: str
    """A folder, or a pattern."""
    out: Path
    rule: Rule = field(default_factory=Rule)
    settle: float = 30.0
    """Seconds for which a checkpoint must not change."""
    every: float = 60.0
    """Seconds between two looks."""
    time_limit: float = LIMIT_S
    """Seconds that a process may take; one that hangs would hold its place for ever."""
    once: bool = False
    """End when all that has settled is measured."""
    again: bool = False
    """Measure what was measured before, once more."""
    shards: int = 0
    """Processes that score the prompts of one checkpoint; 0: as many as the executor has to spare,
    which one machine has not."""
    page_url: str = ""
    """Address under which ``out`` is served; links are to files without it."""

    def __post_init__(self) -> None:
        for name in ("settle", "every", "time_limit"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise BadInput(f"--{name.replace('_', '-')} {value:g}", "seconds")


@dataclass(frozen=True)
class News:
    """Something that happened to a checkpoint."""

    kind: Literal[
        "started", "finished", "failed", "unreadable", "growing", "same", "gone", "untold"
    ]
    name: str
    text: str


@dataclass
class _Job:
    """Commands that are being run, and for which state of which path."""

    kind: Literal["open", "capture", "report"]
    path: str
    signature: str
    turns: list[list[Command]]
    """What is still to be run: all of a turn at once, one turn after another."""
    running: int = 0
    failed: Ended | None = None
    """The first of its commands that failed; no further turn is started."""


class Watching:
    """The watch over one folder; `news` is its main loop.

    Parameters
    ----------
    config
        What every report is told; it names no drafter.

    Raises
    ------
    BadInput
        Something given cannot be used, or what an earlier watch left is damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        settings: Settings,
        executor: Executor,
        webhook: Webhook | None = None,
    ) -> None:
        self.settings, self.executor, self.webhook = settings, executor, webhook
        self.out = settings.out
        self.config = config.model_copy(update={"out": str(self.out)})
        finding.find(settings.where)
        self.rows = read_history(self.out / HISTORY)
        self.state = State.read(self.out, self._inputs())
        self._jobs: dict[Future[Ended], _Job] = {}
        self._capture_attempts: dict[str, int] = {}
        self._redone: set[str] = set()
        self._told: dict[str, str | None] = {}
        """What each checkpoint of this watch was compared with when it was told of."""
        self._posted: dict[Future[str], str] = {}
        """Messages on their way, and the checkpoints that they are about."""
        self._stopped = False
        self._began: datetime | None = None

    @property
    def history(self) -> Path:
        """Where the rows are kept."""
        return self.out / HISTORY

    def news(self) -> Generator[News, None, None]:
        """Watch, and tell what happens, until `stop`; or ``once``, and nothing is left to do.

        Raises
        ------
        BadInput
            An input other than a checkpoint cannot be used.
        OutputError
            Another watch is at work here, or it or a report cannot be written.
        """
        with storage.kept_alone(self.out, "another watch is at work in"), self.executor:
            if not self.state.known:
                self._check_inputs()
            try:
                self._resume()
                while not self._stopped:
                    yield from self._look()
                    self._publish()
                    self._start_opening()
                    yield from self._start_reports()
                    if self._is_over():
                        break
                    yield from self._wait()
                    yield from self._answered()
                yield from self._still_growing()
                wait_for(self._posted, timeout=LAST_S)
                yield from self._answered(last=True)
            finally:
                self.state.write(self.out)

    def stop(self) -> None:
        """Let `news` come to its end."""
        self._stopped = True

    def _check_inputs(self) -> None:
        """Refuse what is wrong with everything but the checkpoints before any is looked at."""
        with tempfile.TemporaryDirectory() as folder:  # nothing is written if they are bad
            ended = execute(identity.command(self.config, Path(folder) / "inputs.log"))
        if ended.code:
            raise BadInput(ended.reason)

    def _inputs(self) -> str:
        """Hash of what all checkpoints are measured with, by the files' times and sizes."""
        config = self.config
        names = (config.target, config.reference, config.prompts, config.capture, *config.beside)
        files = [settling.signature(Path(one)) for one in names if one]
        content = config.model_dump(mode="json", exclude={"out"})
        return storage.content_key(content, files, provenance.versions()["dflash-diag"])

    def _resume(self) -> None:
        known = {row.run_id for row in self.rows}
        for one in self.state.seen.values():
            lost = one.stage == "done" and one.run_id not in known
            if self.settings.again or lost:
                one.stage, one.attempts = "settling", 0

    # --- one round --------------------------------------------------------------------------------

    def _look(self) -> Iterator[News]:
        """Take notice of what is there, what has changed and what is gone."""
        now, there = provenance.utc_now(), set()
        self._began = self._began or now
        for one in finding.find(self.settings.where):
            mark = settling.signature(one.path)
            if mark is None:
                continue
            path = str(one.path)
            there.add(path)
            seen = self.state.seen.get(path)
            if seen is None or (seen.signature != mark and not self._is_busy(path)):
                self.state.seen[path] = Seen(one.name, mark, now)
        for path in [p for p in self.state.seen if p not in there and not self._is_busy(p)]:
            seen = self.state.seen.pop(path)
            if seen.stage not in ENDED:
                yield News("gone", seen.name, "gone before it was measured")
        self.state.write(self.out)

    def _start_opening(self) -> None:
        now, settle = provenance.utc_now(), timedelta(seconds=self.settings.settle)
        for path, seen in self.state.seen.items():
            if seen.stage == "settling" and now - seen.since >= settle:
                seen.stage = "opening"
                config = self.config.model_copy(update={"drafter": path})
                self._submit("open", path, [identity.command(config, self._log(seen.name))])

    def _start_reports(self) -> Iterator[News]:
        """Fill the free places, earlier training steps first."""
        waiting = [(path, one) for path, one in self.state.seen.items() if one.stage == "waiting"]
        waiting.sort(key=lambda item: (item[1].step or 0, finding.natural(item[1].name)))
        for path, seen in waiting:
            if len(self._jobs) >= self.executor.at_once:
                return
            capture = self._capture(seen)
            if not (capture / "manifest.json").is_file() and not self.config.capture:
                yield from self._start_capture(path, seen, capture)
                continue
            if self._is_taken(seen.run_id):
                continue
            seen.stage = "running"
            seen.attempts += 1
            out, log = self._run(seen.run_id), self._log(seen.name)
            given = {"drafter": path, "capture": str(capture), "history": self._past(out)}
            config = self.config.model_copy(update=given)
            self._submit(
                "report", path, *commands.report_in_parts(config, out, log, self._shards())
            )
            yield News("started", seen.name, f"report{self._progress()}")

    def _start_capture(self, path: str, seen: Seen, folder: Path) -> Iterator[News]:
        if any(job.kind == "capture" for job in self._jobs.values()):
            return
        attempts = self._capture_attempts
        attempts[seen.capture] = attempts.get(seen.capture, 0) + 1
        config = self.config.model_copy(update={"drafter": path})
        self._submit("capture", path, [commands.capture(config, folder, self._log("capture"))])
        yield News("started", seen.name, "capture of the target, for all checkpoints with its taps")

    def _wait(self) -> Iterator[News]:
        """Until something ends, or it is time for another look."""
        done, _ = wait_for(self._jobs, timeout=self._pause(), return_when=FIRST_COMPLETED)
        if not self._jobs:
            time.sleep(self._pause())
        for future in done:
            job, ended = self._jobs.pop(future), future.result()
            job.running -= 1
            job.failed = job.failed or (ended if ended.code else None)
            if job.running or (job.turns and job.failed is None):
                self._next_turn(job)
                continue
            seen, ended = self.state.seen[job.path], job.failed or ended
            if ended.could_not_write:  # nor can we; nothing is said against the checkpoint
                raise OutputError(ended.reason)
            if job.kind == "capture":
                yield from self._captured(seen, ended)
            elif settling.signature(Path(job.path)) != job.signature:
                yield from self._changed(job, seen)
            elif job.kind == "open":
                yield from self._opened(job.path, seen, ended)
            else:
                yield from self._reported(job.path, seen, ended)
            self.state.write(self.out)

    def _publish(self) -> None:
        """Bring the page over all checkpoints up to date; the last thing before any is told of."""
        self.overview().write()

    def overview(self) -> Overview:
        """The page over all checkpoints, as it would be now."""
        given = self.config.model_dump(mode="json", exclude={"out"}, exclude_defaults=True)
        settings = self.settings
        return Overview(
            settings.where,
            self.out,
            self.rows,
            list(self.state.seen.values()),
            settings.rule,
            given,
        )

    # --- what ended ------------------------------------------------------------------------------

    def _captured(self, seen: Seen, ended: Ended) -> Iterator[News]:
        if not ended.code:
            return
        reason = ended.reason
        if self._capture_attempts[seen.capture] >= ATTEMPTS:
            raise BadInput(f"the target cannot be captured: {reason}")
        yield News("failed", "capture", f"{reason}; tried once more")

    def _changed(self, job: _Job, seen: Seen) -> Iterator[News]:
        """What was read may be half the old and half the new one: it counts for nothing."""
        if job.kind == "report":
            shutil.rmtree(self._run(seen.run_id), ignore_errors=True)
        del self.state.seen[job.path]
        if settling.signature(Path(job.path)) is None:
            yield News("gone", seen.name, "gone before it was measured")
        elif job.kind == "report":
            yield News("growing", seen.name, "changed while it was measured; once more later")

    def _opened(self, path: str, seen: Seen, ended: Ended) -> Iterator[News]:
        if ended.code:
            seen.stage = "unreadable"
            seen.error = ended.reason
            self._publish()
            yield News("unreadable", seen.name, seen.error)
            return
        found = identity.Identity.read(ended.output)
        key = found.key[:12]
        seen.capture, seen.step = found.capture, found.step
        seen.run_id = f"{Path(seen.name).name}-{key}"
        twin = next((row for row in self.rows if row.run_id.endswith(f"-{key}")), None)
        if self.settings.again and seen.run_id not in self._redone:
            self._redone.add(seen.run_id)
            shutil.rmtree(self._run(seen.run_id), ignore_errors=True)
        elif twin is not None:
            seen.stage, seen.run_id = "done", twin.run_id
            if twin.name != seen.name:
                yield News("same", seen.name, f"the same as {twin.name}, which was measured")
            return
        elif (self._run(seen.run_id) / "index.html").is_file():
            try:
                yield from self._finished(path, seen)
                return
            except BadInput as error:  # a report of an earlier watch, which something has damaged
                yield News("failed", seen.name, f"{error}; measured again")
                shutil.rmtree(self._run(seen.run_id), ignore_errors=True)
        seen.stage = "waiting"

    def _reported(self, path: str, seen: Seen, ended: Ended) -> Iterator[News]:
        if not ended.code:
            yield from self._finished(path, seen)
            return
        seen.error = ended.reason
        if seen.attempts < ATTEMPTS:
            seen.stage = "waiting"
            yield News("failed", seen.name, f"{seen.error}; tried once more")
            return
        seen.stage = "failed"
        self._publish()
        yield News("failed", seen.name, f"{seen.error}; see {self._log(seen.name)}")

    def _finished(self, path: str, seen: Seen) -> Iterator[News]:
        """Keep the row, and tell everybody."""
        written = settling.written(Path(path)) or provenance.utc_now()
        made = row_of(self._run(seen.run_id), beside=self.out, written=written, step=seen.step)
        row = replace(made, name=seen.name, checkpoint=path)
        self.rows = append(self.history, row)
        seen.stage, seen.error = "done", ""
        self._publish()
        yield from self._tell(row)
        # One that was done before its predecessor is told of again: now it can be compared.
        for other in [one for one in in_order(self.rows) if one.run_id in self._told]:
            judged = self.regression(other)
            if judged is not None and judged.against != self._told[other.run_id]:
                yield from self._tell(other)

    def _tell(self, row: Row) -> Iterator[News]:
        """A line, and a message to whoever listens."""
        judged = self.regression(row)
        self._told[row.run_id] = None if judged is None else judged.against
        said = sentence(row, judged, self.page(row))
        if self.webhook is not None:
            self._posted[self.webhook.post({"text": said} | self.of(row))] = row.name
        yield News("finished", row.name, said)

    def _answered(self, *, last: bool = False) -> Iterator[News]:
        """What became of messages; of the ``last`` ones all that can be said."""
        for post in [one for one in self._posted if last or one.done()]:
            name = self._posted.pop(post)
            why = post.result(0) if post.done() else f"no answer within {LAST_S:g} s"
            if why and self.webhook is not None:
                yield News("untold", name, f"{self.webhook.host} was not told: {why}")

    def _still_growing(self) -> Iterator[News]:
        for one in self.state.seen.values():
            if one.stage == "settling":
                yield News("growing", one.name, "still being written; left for the next time")

    # --- small questions -------------------------------------------------------------------------

    def _submit(
        self, kind: Literal["open", "capture", "report"], path: str, *turns: list[Command]
    ) -> None:
        self._next_turn(_Job(kind, path, self.state.seen[path].signature, list(turns)))

    def _next_turn(self, job: _Job) -> None:
        """Start what comes after what has ended, if all of it has."""
        if job.running:
            return
        turn = job.turns.pop(0)
        job.running = len(turn)
        limited = [replace(command, limit=self.settings.time_limit) for command in turn]
        self._jobs |= {self.executor.submit(command): job for command in limited}

    def _past(self, out: Path) -> str:
        """A copy of the history for a report's trend, which must not change under its hands."""
        if not self.rows:
            return ""
        return str(storage.atomic_write(out / HISTORY, self.history.read_bytes()))

    def _shards(self) -> int:
        """Processes that score one checkpoint's prompts: as many as the others leave free."""
        if self.settings.shards:
            return self.settings.shards
        stages = [one.stage for one in self.state.seen.values()]
        return max(1, self.executor.spare // (stages.count("waiting") + stages.count("running")))

    def _is_busy(self, path: str) -> bool:
        return any(job.path == path for job in self._jobs.values())

    def _is_taken(self, run_id: str) -> bool:
        """Whether a process that an earlier watch left behind is still at work on a run."""
        try:
            with storage.alone(self._run(run_id), timeout=0):
                return False
        except Timeout:
            return True

    def _is_over(self) -> bool:
        if not self.settings.once or self._jobs or self._began is None:
            return False
        return not any(
            one.stage in ("opening", "waiting")
            or (one.stage == "settling" and one.since <= self._began)
            for one in self.state.seen.values()
        )

    def _pause(self) -> float:
        """Seconds until the next look."""
        now = provenance.utc_now()
        ages = [
            (now - one.since).total_seconds()
            for one in self.state.seen.values()
            if one.stage == "settling"
        ]
        settling_in = [max(0.05, self.settings.settle - age) for age in ages]
        return min([self.settings.every, *settling_in])

    def _capture(self, seen: Seen) -> Path:
        if self.config.capture:
            return Path(self.config.capture)
        return self.out / "captures" / seen.capture[:12]

    def _run(self, run_id: str) -> Path:
        return (self.out / "runs" / run_id).resolve()

    def _log(self, name: str) -> Path:
        return log_file(self.out, name)

    def _progress(self) -> str:
        """How far this is, and how long it may still take."""
        stages = [one.stage for one in self.state.seen.values()]
        left = sum(stages.count(one) for one in ("settling", "opening", "waiting", "running"))
        return f" ({stages.count('done')} done, {left} to do)"

    # --- for people and programs -----------------------------------------------------------------

    def newest(self) -> Row | None:
        """The latest of the measured checkpoints that are there."""
        there = {one.run_id for one in self.state.seen.values() if one.stage == "done"}
        rows = in_order([row for row in self.rows if row.run_id in there])
        return rows[-1] if rows else None

    def regression(self, row: Row) -> Regression | None:
        """A checkpoint against what the rule says."""
        return regression(row, self.rows, self.settings.rule, self.out)

    def alarms(self, refused: Container[Verdict]) -> list[str]:
        """What is wrong, of what ``--fail-on`` refuses.

        That is a regression of the newest checkpoint and, where the watch ends by itself, each one
        that could not be measured: else a broken file could look like a good one.
        """
        found, newest = [], self.newest()
        judged = None if newest is None else self.regression(newest)
        if newest is not None and judged is not None and judged.verdict in refused:
            found.append(f"{newest.name} is {judged.sentence}")
        if self.settings.once and Verdict.ERROR in refused:
            found += [
                f"{one.name} was not measured: {one.error}"
                for one in self.state.seen.values()
                if one.stage in ("unreadable", "failed")
            ]
        return found

    def is_idle(self) -> bool:
        """Whether nothing is being measured or about to be."""
        stages = {one.stage for one in self.state.seen.values()}
        return not self._jobs and stages.isdisjoint(("opening", "waiting", "running"))

    def page(self, row: Row) -> str:
        """Address of a checkpoint's report."""
        if self.settings.page_url:
            return f"{self.settings.page_url.rstrip('/')}/{link(row)}"
        return (self.out / row.out / "index.html").resolve().as_uri()

    def of(self, row: Row) -> dict[str, Any]:
        """A checkpoint in JSON."""
        judged = self.regression(row)
        return {
            "schema": SCHEMA,
            "run_id": row.run_id,
            "name": row.name,
            "step": row.step,
            "finished": row.finished.isoformat(),
            "verdict": row.verdict,
            "cause": row.cause or None,
            "tau": row.tau.to_json(),
            "n_prompts": row.n_prompts,
            "regression": None if judged is None else judged.to_json(),
            "page": self.page(row),
        }

    def to_json(self) -> dict[str, Any]:
        """All that is known, earliest checkpoint first."""
        newest = self.newest()
        judged = None if newest is None else self.regression(newest)
        return {
            "schema": SCHEMA,
            "newest": None if newest is None else newest.name,
            "regression": None if judged is None else judged.to_json(),
            "checkpoints": [self.of(row) for row in in_order(self.rows)],
            "pending": [
                {"name": one.name, "stage": one.stage, "error": one.error or None}
                for one in self.state.seen.values()
                if one.stage != "done"
            ],
        }


def sentence(row: Row, judged: Regression | None, page: str) -> str:
    """One line about a checkpoint: verdict, number, cause, regression, page."""
    found = Verdict[row.verdict]
    tau = f"tau {row.tau_walked:.2f}"
    if row.tau_walked_lo is not None:
        tau += f" [{row.tau_walked_lo:.2f}, {row.tau_walked_hi:.2f}]"
    parts = [f"{found.glyph} {found.name} {row.name}", tau, row.cause]
    if judged is not None:
        parts.append(f"{judged.verdict.glyph} {judged.sentence}")
    return "; ".join(filter(None, [*parts, page]))
