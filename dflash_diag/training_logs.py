"""A training's log as one table of step and metric, whatever wrote it.

CSV, JSON lines, JSON (a list, or the ``log_history`` of a trainer's state), TensorBoard's event
files, and exports of Weights & Biases: the chart's CSV (``Step``, ``RUN - METRIC``, with __MIN and
__MAX columns) and the history as JSON lines (``_step``). What cannot be used of a log is left out
and said; a log without any acceptance number is refused.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_diag.errors import BadInput
from dflash_diag.metric_names import phase_of, read_name, split_group
from dflash_diag.storage import StrPath, read_text

if TYPE_CHECKING:
    import pandas as pd

LAST = 5
"""Steps behind a mean of the last ones."""
STEPS = ("step", "global_step", "trainer/global_step", "train/global_step", "_step", "iteration")
"""Names of the column that holds the step, the first one there is taken."""
EVENTS = "tfevents"
"""What TensorBoard has in the names of its files."""
_EXPECTED = (
    "a log with a step and acceptance numbers (accuracy, streak, tau, accept_len, dds8, ...): CSV, "
    "JSON lines, TensorBoard events or an export of Weights & Biases"
)
_IGNORED = ("_runtime", "_timestamp", "_wandb", "epoch", "wall_time")


@dataclass(frozen=True, eq=False)
class TrainingLog:
    """What a training printed."""

    path: Path
    kind: str
    """``csv``, ``json``, ``jsonl``, ``tensorboard`` or ``wandb``."""
    frame: pd.DataFrame
    """Columns step (int), phase (``train`` or ``validation``), group (``train``, ``eval/gsm8k``),
    metric (name without its group), value (finite), known (whether it may be an acceptance number);
    sorted, one row for each step and metric."""
    notes: tuple[str, ...] = ()
    """What was left out, and what was taken where the log is ambiguous."""

    @cached_property
    def _known(self) -> pd.DataFrame:
        return self.frame[self.frame["known"]]

    def groups(self) -> list[str]:
        """Groups that have an acceptance number, those of the training first."""
        order = self._known[["phase", "group"]].drop_duplicates()
        return [str(one) for one in order.sort_values("phase", kind="stable")["group"]]

    def table(self, group: str) -> pd.DataFrame:
        """A group's acceptance numbers: one row a step, one column a metric, NaN where lacking."""
        rows = self._known[self._known["group"] == group]
        order = list(dict.fromkeys(rows["metric"]))
        return rows.pivot_table(index="step", columns="metric", values="value")[order]

    def summary(self, last: int = LAST) -> pd.DataFrame:
        """Last value of each acceptance number, and its mean over the last logged steps.

        Columns: phase, group, metric, step, last, mean, steps.
        """
        import pandas as pd

        rows = []
        for (phase, group, metric), one in self._known.groupby(
            ["phase", "group", "metric"], sort=False
        ):
            end = one.tail(last)
            rows.append(
                {
                    "phase": phase,
                    "group": group,
                    "metric": metric,
                    "step": int(end["step"].iloc[-1]),
                    "last": float(end["value"].iloc[-1]),
                    "mean": float(end["value"].mean()),
                    "steps": len(end),
                }
            )
        return pd.DataFrame(rows)


def read_training_log(path: StrPath) -> TrainingLog:
    """Read a log; a folder stands for the TensorBoard event files in it.

    Raises
    ------
    BadInput
        No such file, not readable as any known kind, empty, or without an acceptance number.
    """
    path = Path(path)
    events = _event_files(path)
    if events:
        kind, rows = "tensorboard", list(_tensorboard(path, events))
    else:
        kind, rows = _text(path)
    return _tidy(path, kind, rows)


# --- kinds ---------------------------------------------------------------------------------------

Row = Mapping[str, Any]


def _event_files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(one for one in path.rglob(f"*{EVENTS}*") if one.is_file())
        if not found:
            raise BadInput(f"{path} holds no TensorBoard events", _EXPECTED)
        return found
    return [path] if EVENTS in path.name and path.is_file() else []


def _tensorboard(folder: Path, files: Iterable[Path]) -> Iterator[Row]:
    """One row for each scalar of some event files, named by the subfolder where there is one."""
    try:
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray
    except ImportError as error:
        raise BadInput(
            "TensorBoard's events need the package tensorboard, which is not installed",
            do="pip install tensorboard, or export the scalars as CSV",
        ) from error
    for file in files:
        inside = file.relative_to(folder).parent.as_posix()
        group = "" if inside == "." else f"{inside}/"
        try:
            for event in EventFileLoader(str(file)).Load():
                for value in event.summary.value:
                    number = make_ndarray(value.tensor) if value.HasField("tensor") else None
                    if number is not None and number.ndim == 0 and number.dtype.kind in "fiu":
                        yield {"step": event.step, f"{group}{value.tag}": float(number)}
        except Exception as error:
            raise BadInput(f"{file} cannot be read ({error})", "TensorBoard's events") from error


def _text(path: Path) -> tuple[str, list[Row]]:
    text = read_text(path, _EXPECTED)
    if "\0" in text:
        raise BadInput(f"{path} is not text (a zero byte)", _EXPECTED)
    if not text.strip():
        raise BadInput(f"{path} is empty", _EXPECTED)
    if text.lstrip()[0] not in "[{":
        return _csv(path, text)
    try:
        return "json", _objects(path, json.loads(text))
    except (ValueError, RecursionError):
        return _json_lines(path, text)


def _objects(path: Path, value: Any) -> list[Row]:
    """Rows of one JSON value: a list of objects, or an object that holds one."""
    if isinstance(value, dict):
        value = value.get("log_history", [value])
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise BadInput(f"{path} is JSON, but no list of objects", _EXPECTED)
    return value


def _json_lines(path: Path, text: str) -> tuple[str, list[Row]]:
    rows: list[Row] = []
    # Not splitlines: JSON may hold the other line separators unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise BadInput(f"{path}, line {number}: not JSON ({why})", _EXPECTED) from error
        if not isinstance(row, dict):
            raise BadInput(f"{path}, line {number}: {type(row).__name__}", "a JSON object")
        rows.append(row)
    kind = "wandb" if any("_step" in row for row in rows) else "jsonl"
    return kind, rows


def _csv(path: Path, text: str) -> tuple[str, list[Row]]:
    try:
        header = text.lstrip().split("\n", 1)[0]
        mark = max(",;\t", key=header.count)
        reader = csv.DictReader(io.StringIO(text.lstrip()), delimiter=mark, skipinitialspace=True)
        rows: list[Row] = list(reader)
    except csv.Error as error:
        raise BadInput(f"{path} is no CSV ({error})", _EXPECTED) from error
    names = [name for name in reader.fieldnames or [] if name]
    if len(names) < 2 or not rows:
        raise BadInput(f"{path} has {len(names)} column(s) and {len(rows)} row(s)", _EXPECTED)
    charts = list(_charts(names, rows))
    return ("wandb", charts) if charts else ("csv", rows)


def _charts(names: Iterable[str], rows: Iterable[Row]) -> Iterator[Row]:
    """A chart's rows, without the columns of its bands, and one run after the other."""
    kept = [name for name in names if not name.endswith(("__MIN", "__MAX"))]
    runs: dict[str, dict[str, str]] = {}
    for name in kept:
        run, dash, metric = name.rpartition(" - ")
        if dash:
            runs.setdefault(run, {})[name] = metric
    step = next((name for name in kept if " - " not in name), "Step")
    for run, metrics in runs.items():
        for row in rows:
            read = {metric: row.get(name) for name, metric in metrics.items()}
            yield {RUN: run, step: row.get(step), **read}


RUN = "run"
"""Key of a row's run, where a log holds several."""


# --- one table -----------------------------------------------------------------------------------


def _tidy(path: Path, kind: str, rows: list[Row]) -> TrainingLog:
    import pandas as pd

    rows, notes = _one_run(rows) if kind == "wandb" else (rows, [])
    key = _step_key(rows)
    if key is None:
        notes.append("No column names the step (step, _step, global_step); rows are counted.")
    cells: list[tuple[int, str, float]] = []
    stepless = lacking = 0
    for number, row in enumerate(rows):
        step = number if key is None else _step(row.get(key))
        if step is None:
            stepless += 1
            continue
        for name, value in _numbers(row):
            if name.lower() in STEPS or name in _IGNORED:
                continue
            if math.isfinite(value):
                cells.append((step, name, value))
            else:
                lacking += 1
    if stepless:
        notes.append(f"{stepless} of {len(rows)} rows have no whole step and are left out.")
    if lacking:
        notes.append(f"{lacking} values are not finite and are left out.")
    frame = pd.DataFrame(cells, columns=["step", "name", "value"])
    if not frame["step"].is_monotonic_increasing and kind != "tensorboard":
        notes.append("Steps do not rise from row to row; they are sorted.")
    again = frame.duplicated(["step", "name"], keep="last")
    if again.any():
        notes.append(f"{again.sum()} values are logged twice for a step; the last one is taken.")
    frame = frame[~again].sort_values("step", kind="stable").reset_index(drop=True)
    return TrainingLog(path, kind, _named(path, frame), tuple(notes))


def _named(path: Path, frame: pd.DataFrame) -> pd.DataFrame:
    """The table with its names taken apart."""
    known, phases, groups, metrics = {}, {}, {}, {}
    for name in dict.fromkeys(frame["name"]):
        group, metric = split_group(name)
        phases[name] = phase_of(group) or "train"
        groups[name], metrics[name] = group or "train", metric
        known[name] = read_name(metric).known
    if not any(known.values()):
        shown = f", only {', '.join(list(known)[:6])}" if known else ""
        raise BadInput(f"{path} has no acceptance number{shown}", _EXPECTED)
    columns = {"phase": phases, "group": groups, "metric": metrics, "known": known}
    named = frame.assign(**{key: frame["name"].map(of) for key, of in columns.items()})
    return named[["step", "phase", "group", "metric", "value", "known"]]


def _one_run(rows: list[Row]) -> tuple[list[Row], list[str]]:
    """Rows of the run that has most of them; the others are named."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(str(row.get(RUN, "")), []).append(row)
    if len(runs) == 1:
        return rows, []
    filled = {
        run: sum(any(math.isfinite(v) for _, v in _numbers(row)) for row in of)
        for run, of in runs.items()
    }
    best = max(filled, key=lambda run: filled[run])
    others = ", ".join(run for run in runs if run != best)
    return runs[best], [f"Of several runs {best} is read, and not {others}."]


def _step_key(rows: Iterable[Row]) -> str | None:
    names = dict.fromkeys(name for row in rows for name in row if isinstance(name, str))
    for wanted in STEPS:
        for name in names:
            if name.strip().lower() == wanted:
                return name
    return None


def _step(value: Any) -> int | None:
    number = _number(value)
    if number is None or not abs(number) < 2**53 or number != int(number):
        return None
    return int(number)


def _numbers(row: Row, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a row by name; those of a list are numbered from 1, an object's keys joined."""
    for key, value in row.items():
        if not isinstance(key, str) or not key.strip():
            continue
        name = f"{prefix}{key.strip()}"
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, list):
            yield from _numbers({f"{name}@{k}": one for k, one in enumerate(value, start=1)})
        else:
            number = _number(value)
            if number is not None:
                yield name, number


def _number(value: Any) -> float | None:
    """A number, or the text of one; NaN for words that stand for it."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.nan
    if not isinstance(value, str) or not value.strip():
        return None
    try:
        return float(value)
    except ValueError:
        return None
