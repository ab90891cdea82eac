"""The history: readable without us, whole after every append, never overwritten when damaged."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from datetime import UTC, datetime

import pandas as pd
import pyarrow.parquet as pq
import pytest

from dflash_diag import history, storage
from dflash_diag.errors import BadInput
from dflash_diag.history import Row, append, read_history, row_of


def a_row(**changes) -> Row:
    fields = {
        "run_id": "step_20-1a2b3c4d",
        "name": "step_20",
        "checkpoint": "/ckpt/step_20",
        "step": 20,
        "written": datetime(2026, 11, 30, 11, 0, 0, 250, tzinfo=UTC),
        "finished": datetime(2026, 11, 30, 12, 0, 5, tzinfo=UTC),
        "verdict": "WARN",
        "cause": "mask.window",
        "tau_walked": 2.5,
        "tau_walked_lo": 2.25,
        "tau_walked_hi": 2.75,
        "tau_uniform": 3.0,
        "n_prompts": 2,
        "capture": "c0ffee",
        "out": "runs/step_20-1a2b3c4d",
        "ids": ("p0", "p1"),
        "tokens": (10, 15),
        "rounds": (4, 6),
    }
    return Row(**fields | changes)


def test_rows_come_back_as_they_were(tmp_path):
    path = tmp_path / "history.parquet"
    assert read_history(path) == []
    first = a_row(step=None, tau_walked_lo=None, tau_walked_hi=None, cause="")
    later = a_row(run_id="b", finished=datetime(2026, 11, 30, 13, tzinfo=UTC))
    append(path, later)
    assert append(path, first) == read_history(path) == [first, later]
    assert later.side.at(["p1"]).numerators.tolist() == [15]
    assert str(later.tau) == "2.5 [2.25, 2.75] tokens"


def test_a_run_has_one_row(tmp_path):
    path = tmp_path / "history.parquet"
    append(path, a_row())
    again = a_row(verdict="PASS", finished=datetime(2026, 12, 1, tzinfo=UTC))
    assert append(path, again) == [again]


def test_it_is_plain_parquet(tmp_path):
    path = tmp_path / "history.parquet"
    append(path, a_row())
    assert pq.read_schema(path).metadata[b"schema"] == b"dflash_diag.history/1"
    table = pd.read_parquet(path)
    assert list(table.columns) == [field.name for field in dataclasses.fields(Row)]
    one = table.iloc[0]
    assert (one["step"], one["finished"].isoformat()) == (20, "2026-11-30T12:00:05+00:00")
    assert sum(one["tokens"]) / sum(one["rounds"]) == one["tau_walked"]
    assert history.frame(read_history(path))["tokens"][0] == (10, 15)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\0" * 40 + b"PAR1", "cut"])
def test_a_damaged_file_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "history.parquet"
    append(path, a_row())
    content = path.read_bytes()[:-20] if content == "cut" else content
    path.write_bytes(content)
    for call in (lambda: read_history(path), lambda: append(path, a_row(run_id="b"))):
        with pytest.raises(BadInput, match=r"history.parquet is not a history, or damaged"):
            call()
    assert path.read_bytes() == content


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "history.parquet"
    pd.DataFrame({"run_id": ["a"]}).to_parquet(path)
    with pytest.raises(BadInput, match=r"has schema none; expected dflash_diag.history/1"):
        append(path, a_row())


def test_no_append_of_several_processes_is_lost(tmp_path):
    path = tmp_path / "history.parquet"
    append(path, a_row())
    code = (
        "import dataclasses, sys; from dflash_diag.history import append, read_history\n"
        "row = read_history(sys.argv[1])[0]\n"
        "for i in range(5): append(sys.argv[1],"
        " dataclasses.replace(row, run_id=f'{sys.argv[2]}{i}'))"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(path), one]) for one in "xyz"]
    assert [one.wait() for one in running] == [0, 0, 0]
    assert {row.run_id for row in read_history(path)} == {
        "step_20-1a2b3c4d", *(f"{one}{i}" for one in "xyz" for i in range(5))
    }  # fmt: skip


def test_the_row_of_a_finished_report(tmp_path):
    out = tmp_path / "runs" / "one"
    scored = {
        "tau": {
            "walked_micro": {"value": 2.0, "lo": 1.5, "hi": 2.5},
            "uniform_micro": {"value": 2.25, "lo": None, "hi": None},
        },
        "per_prompt": [{"id": "a", "rounds": [1, 3]}, {"id": "b", "rounds": [2]}],
    }
    summary = {
        "verdict": "FAIL",
        "drafters": {"drafter": "d", "reference": "r"},
        "scores": {"drafter": scored},
        "config": {"drafter": "/ckpt/d"},
        "provenance": {
            "content": {"capture": "of its states too", "text": "c0ffee"},
            "times": {"finished": "2026-11-30T12:00:05+00:00"},
        },
    }
    storage.write_json(out / "summary.json", summary)
    found = row_of(out, beside=tmp_path, written=a_row().written, step=7)
    assert found.capture == "c0ffee"
    assert (found.tokens, found.rounds, found.ids) == ((4, 2), (2, 1), ("a", "b"))
    assert (found.out, found.run_id, found.step, found.cause) == ("runs/one", "one", 7, "")
    doctor = {"params": {"found": ["label.shift", "metric.bonus"]}}
    storage.write_json(out / "results" / "doctor.causes" / "result.json", doctor)
    assert row_of(out, beside=tmp_path, written=a_row().written).cause == "label.shift"
    append(tmp_path / "history.parquet", found)
    assert read_history(tmp_path / "history.parquet") == [found]


def test_no_report_no_row(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        row_of(tmp_path, beside=tmp_path, written=a_row().written)
    storage.write_json(tmp_path / "summary.json", {"scores": {}})
    with pytest.raises(BadInput, match="no scores of a drafter"):
        row_of(tmp_path, beside=tmp_path, written=a_row().written)
