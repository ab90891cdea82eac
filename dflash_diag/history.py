"""What became of every checkpoint so far: one row each in ``history.parquet``.

A row holds the number that people quote with its interval, the verdict and, prompt by prompt, how
many tokens decoding got in how many rounds, so that two checkpoints can be compared by prompt when
their runs and captures are long gone. The file is plain parquet; its schema's name stands in the
metadata under the key ``schema``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag.compare import Side
from dflash_diag.errors import BadInput, OutputError
from dflash_diag.stats import Estimate
from dflash_diag.storage import WAIT_S, StrPath, alone, atomic_write, read_json

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

SCHEMA = "dflash_diag.history/1"
FILE = "history.parquet"
_MAY_LACK = {"step", "tau_walked_lo", "tau_walked_hi"}
"""Columns in which a row may have nothing."""


@dataclass(frozen=True)
class Row:
    """One checkpoint, measured; N prompts were scored."""

    run_id: str
    """Names the content: the same checkpoint measured in the same way has the same."""
    name: str
    checkpoint: str
    """Path of the checkpoint; what lies there may have been replaced since."""
    step: int | None
    """Training step, if the checkpoint or its name tells."""
    written: datetime
    """UTC; when the checkpoint's weights were last written."""
    finished: datetime
    """UTC."""
    verdict: str
    """Of the whole report."""
    cause: str
    """The doctor's first finding; empty if there is none."""
    tau_walked: float
    """Tokens a round while decoding, the bonus token included, rounds pooled."""
    tau_walked_lo: float | None
    tau_walked_hi: float | None
    tau_uniform: float
    """The same over all anchors."""
    n_prompts: int
    capture: str
    """Hash of the text that was decoded (`dflash_diag.compare.text_digest`)."""
    out: str
    """Folder of the run, relative to the history's."""
    ids: tuple[str, ...]
    """[N] prompts."""
    tokens: tuple[int, ...]
    """[N] tokens that decoding got: the sum of accepted + 1 over the rounds."""
    rounds: tuple[int, ...]
    """[N] rounds."""

    @property
    def side(self) -> Side:
        """What `dflash_diag.compare.pair` takes."""
        tokens, rounds = np.array(self.tokens), np.array(self.rounds)
        return Side(self.name, self.step, self.capture, self.ids, tokens, rounds)

    @property
    def tau(self) -> Estimate:
        """Walked tau with its interval."""
        return Estimate(
            self.tau_walked, self.tau_walked_lo, self.tau_walked_hi, self.n_prompts, "tokens"
        )


def read_history(path: StrPath) -> list[Row]:
    """The rows in the order in which they were finished; none where there is no file yet.

    Raises
    ------
    BadInput
        Not a history, damaged, or of another schema.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.exists():
        return []
    damaged = BadInput(
        f"{path} is not a history, or damaged",
        f"a parquet file of schema {SCHEMA}",
        "move it away; finished runs are read again from their folders",
    )
    if not path.is_file():
        raise damaged
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise damaged from error
    found = (table.schema.metadata or {}).get(b"schema", b"none").decode("utf-8", "replace")
    if found != SCHEMA:
        raise BadInput(f"{path} has schema {found}", SCHEMA)
    try:
        table = table.select([field.name for field in fields(Row)]).cast(_columns())
        if any(table[name].null_count for name in set(table.column_names) - _MAY_LACK):
            raise damaged
        rows = [_row(one) for one in table.to_pylist()]
        for row in rows:
            _ = row.side, row.tau  # these look at the numbers
    except (pa.ArrowException, KeyError, ValueError, TypeError, OverflowError) as error:
        raise damaged from error
    return sorted(rows, key=lambda row: row.finished)


def append(path: StrPath, row: Row) -> list[Row]:
    """Add a row, in place of an older one of the same run, and return all of them.

    Safe between processes of one machine; a reader meets the old file or the new one.

    Raises
    ------
    BadInput
        What is there is no history; it is left as it is.
    OutputError
        The file cannot be written.
    """
    with _written_by_us(Path(path)):
        rows = [one for one in read_history(path) if one.run_id != row.run_id]
        rows = sorted([*rows, row], key=lambda one: one.finished)
        atomic_write(path, _bytes(rows))
    return rows


@contextmanager
def _written_by_us(path: Path) -> Iterator[None]:
    """Keep others from adding a row at the same time, which takes them a moment."""
    from filelock import Timeout

    try:
        with alone(path, timeout=WAIT_S):
            yield
    except Timeout as error:
        raise OutputError(
            f"another process has been writing to {path} for {WAIT_S:.0f} s",
            do="see what it does, or end it",
        ) from error


def row_of(out: StrPath, *, beside: StrPath, written: datetime, step: int | None = None) -> Row:
    """The row of a finished report; its id is the name of the folder.

    Parameters
    ----------
    out
        The run's folder.
    beside
        Folder of the history.

    Raises
    ------
    BadInput
        There is no finished report, or it scored no drafter.
    """
    out = Path(out).resolve()
    summary = read_json(out / "summary.json")
    try:
        return _row_of(summary, out, Path(beside).resolve(), written, step)
    except _ODD as error:
        raise BadInput(
            f"{out / 'summary.json'} has no scores of a drafter", "a finished report"
        ) from error


def reference_side(row: Row, folder: StrPath) -> Side | None:
    """What decoding got with the reference drafter in a row's run; None if the run had none.

    Parameters
    ----------
    folder
        Where the history lies.

    Raises
    ------
    BadInput
        The run is gone, or damaged.
    """
    path = Path(folder) / row.out / "summary.json"
    summary = read_json(path)
    try:
        scored = summary["scores"].get("reference")
        if scored is None:
            return None
        ids, tokens, rounds = _by_prompt(scored)
        name = str(summary["drafters"]["reference"])
        return Side(name, None, row.capture, ids, np.array(tokens), np.array(rounds))
    except _ODD as error:
        raise BadInput(f"{path} is damaged ({error})", "a finished report") from error


_ODD = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
"""What a summary that is not as it was written leads to."""


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a table; per-prompt columns hold tuples."""
    import pandas as pd

    return pd.DataFrame([asdict(row) for row in rows], columns=[f.name for f in fields(Row)])


def _row_of(
    summary: Mapping[str, Any], out: Path, beside: Path, written: datetime, step: int | None
) -> Row:
    scored, provenance = summary["scores"]["drafter"], summary["provenance"]
    walked, (ids, tokens, rounds) = scored["tau"]["walked_micro"], _by_prompt(scored)
    return Row(
        run_id=out.name,
        name=summary["drafters"]["drafter"],
        checkpoint=summary["config"]["drafter"],
        step=step,
        written=written,
        finished=datetime.fromisoformat(provenance["times"]["finished"]),
        verdict=summary["verdict"],
        cause=_first_cause(out),
        tau_walked=walked["value"],
        tau_walked_lo=walked["lo"],
        tau_walked_hi=walked["hi"],
        tau_uniform=scored["tau"]["uniform_micro"]["value"],
        n_prompts=len(ids),
        capture=provenance["content"]["text"],
        out=os.path.relpath(out, beside),
        ids=ids,
        tokens=tokens,
        rounds=rounds,
    )


def _by_prompt(
    scored: Mapping[str, Any],
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Ids, tokens and rounds of the prompts of what ``score --json`` writes."""
    prompts = scored["per_prompt"]
    return (
        tuple(one["id"] for one in prompts),
        tuple(sum(one["rounds"]) for one in prompts),
        tuple(len(one["rounds"]) for one in prompts),
    )


def _first_cause(out: Path) -> str:
    """The doctor's first finding, worst first; empty where it found or examined nothing."""
    path = out / "results" / "doctor.causes" / "result.json"
    found = read_json(path)["params"].get("found", []) if path.is_file() else []
    return str(found[0]) if found else ""


def _row(value: Mapping[str, Any]) -> Row:
    lists = {name: tuple(value[name]) for name in ("ids", "tokens", "rounds")}
    moments = {name: value[name].replace(tzinfo=UTC) for name in ("written", "finished")}
    return Row(**{f.name: value[f.name] for f in fields(Row)} | lists | moments)


def _bytes(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=_columns())
    made = io.BytesIO()
    pq.write_table(table, made)
    return made.getvalue()


def _columns() -> pa.Schema:
    """Types of the columns; named, so that a first row without a step has them too."""
    import pyarrow as pa

    text, number, count = pa.string(), pa.float64(), pa.int64()
    moment = pa.timestamp("us", tz="UTC")
    return pa.schema(
        {
            "run_id": text,
            "name": text,
            "checkpoint": text,
            "step": count,
            "written": moment,
            "finished": moment,
            "verdict": text,
            "cause": text,
            "tau_walked": number,
            "tau_walked_lo": number,
            "tau_walked_hi": number,
            "tau_uniform": number,
            "n_prompts": count,
            "capture": text,
            "out": text,
            "ids": pa.list_(text),
            "tokens": pa.list_(count),
            "rounds": pa.list_(count),
        },
        metadata={"schema": SCHEMA},
    )
