"""Logs of every kind become one table; what is wrong with a log is said in one line."""

from __future__ import annotations

import json
import struct
import sys

import pytest

from dflash_diag.errors import BadInput
from dflash_diag.training_logs import read_training_log

ROWS = [
    {"step": 10, "train/streak": 0.5, "train/loss": 3.0, "val/streak": 0.4},
    {"step": 20, "train/streak": 0.7, "train/loss": 2.5},
    {"step": 30, "train/streak": 0.9, "train/loss": 2.0, "val/streak": 0.6},
]


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return path


def cells(log, group="train", metric="streak"):
    table = log.table(group)
    return {int(step): value for step, value in table[metric].dropna().items()}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(rows):
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names)]
    lines += [",".join(str(row.get(name, "")) for name in names) for row in rows]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.jsonl", jsonl(ROWS)),
        ("log.json", json.dumps(ROWS)),
        ("trainer_state.json", json.dumps({"log_history": ROWS, "epoch": 1})),
        ("log.csv", csv(ROWS)),
        ("log.csv", "\ufeff" + csv(ROWS).replace("\n", "\r\n")),
        ("log.csv", csv(ROWS).replace("step", "Step")),
        ("log.csv", csv(ROWS).replace(",", ";")),
        ("log.tsv", csv(ROWS).replace(",", "\t")),
        ("history.jsonl", jsonl(ROWS).replace('"step"', '"_step"')),
    ],
)
def test_every_text_kind_gives_the_same_table(tmp_path, name, text):
    log = read_training_log(written(tmp_path, name, text))
    assert log.groups() == ["train", "val"]
    assert cells(log) == {10: 0.5, 20: 0.7, 30: 0.9}
    assert cells(log, "val") == {10: 0.4, 30: 0.6}
    assert log.notes == ()
    assert list(log.frame["phase"].unique()) == ["train", "validation"]
    assert not log.frame[log.frame["metric"] == "loss"]["known"].any()


def test_the_last_value_and_the_mean_of_the_last_steps(tmp_path):
    rows = [{"step": i, "tau": 1 + i / 10} for i in range(1, 9)]
    (row,) = (
        read_training_log(written(tmp_path, "a.jsonl", jsonl(rows))).summary().to_dict("records")
    )
    assert (row["step"], row["last"], row["steps"]) == (8, 1.8, 5)
    assert row["mean"] == pytest.approx(1.6)


def test_a_chart_of_weights_and_biases_has_one_column_a_run(tmp_path):
    text = (
        '"Step","run-a - train/dds8","run-a - train/dds8__MIN","run-a - train/dds8__MAX",'
        '"old - train/dds8","old - train/dds8__MIN","old - train/dds8__MAX"\n'
        '10,"2.5","2.4","2.6","","",""\n20,"2.7","2.6","2.8","1.0","0.9","1.1"\n'
    )
    log = read_training_log(written(tmp_path, "wandb.csv", text))
    assert cells(log, metric="dds8") == {10: 2.5, 20: 2.7}
    assert log.kind == "wandb"
    assert log.notes == ("Of several runs run-a is read, and not old.",)


def test_lists_are_numbered_and_objects_joined(tmp_path):
    rows = [{"step": 1, "slot_accuracy": [0.5, 0.0, None], "eval": {"gsm8k": {"tau": 2.0}}}]
    log = read_training_log(written(tmp_path, "a.jsonl", jsonl(rows)))
    assert log.groups() == ["train", "eval/gsm8k"]
    assert list(log.table("train").columns) == ["slot_accuracy@1", "slot_accuracy@2"]
    assert cells(log, metric="slot_accuracy@2") == {1: 0.0}
    assert cells(log, "eval/gsm8k", "tau") == {1: 2.0}


def test_unsorted_doubled_and_missing_numbers_are_noted(tmp_path):
    rows = [
        {"step": 30, "tau": 3.0},
        {"step": 10, "tau": 1.0},
        {"step": 20, "tau": float("nan")},
        {"step": 20, "tau": float("inf")},
        {"step": 10, "tau": 1.5},
        {"step": None, "tau": 9.0},
        {"step": 2.5, "tau": 9.0},
    ]
    log = read_training_log(written(tmp_path, "a.jsonl", jsonl(rows)))
    assert cells(log, metric="tau") == {10: 1.5, 30: 3.0}
    said = " ".join(log.notes)
    assert "2 of 7 rows have no whole step" in said
    assert "2 values are not finite" in said
    assert "sorted" in said
    assert "1 values are logged twice" in said


def test_without_a_step_rows_are_counted(tmp_path):
    log = read_training_log(written(tmp_path, "a.csv", "streak,tau\n0.5,1.5\n0.6,1.6\n"))
    assert cells(log) == {0: 0.5, 1: 0.6}
    assert "No column names the step" in log.notes[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("  \n\n", "is empty"),
        ("step,loss,lr\n1,2.0,0.1\n", "no acceptance number, only loss, lr"),
        ("step,tau\n1,nan\n2,\n", "no acceptance number"),
        ("step,tau\n", "0 row"),
        ("just words\nand more\n", "1 column"),
        ('{"step": 1, "tau": 2.0}\n{"step": 2, "tau"', "line 2: not JSON"),
        ('{"step": 1}\n[1, 2]\n', "line 2: list"),
        ("[1, 2, 3]", "no list of objects"),
        ("[" * 100_000, "not JSON"),
        ("a\0b,c\n", "zero byte"),
        ('step,tau\n1,"unclosed\n', "no acceptance number"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path, text, said):
    with pytest.raises(BadInput) as caught:
        read_training_log(written(tmp_path, "log", text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_binary_missing_and_folders_are_bad_input(tmp_path):
    path = tmp_path / "log.bin"
    path.write_bytes(bytes(range(256)))
    for one, said in (
        (path, "not UTF-8 text"),
        (tmp_path / "no", "no such file"),
        (tmp_path, "holds no"),
    ):
        with pytest.raises(BadInput, match=said):
            read_training_log(one)


def test_a_number_beyond_floats_is_no_number(tmp_path):
    huge = "1" + "0" * 400
    text = f'{{"step": 1, "tau": {huge}, "streak": 1.0}}\n{{"step": {huge}, "streak": 2.0}}\n'
    log = read_training_log(written(tmp_path, "a.jsonl", text))
    assert cells(log) == {1: 1.0}


# --- TensorBoard ---------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path):
    """A folder that TensorBoard's own writer filled."""
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "runs"))
    for row in ROWS:
        for name, value in row.items():
            if name != "step":
                summary = Summary(value=[Summary.Value(tag=name, simple_value=value)])
                writer.add_event(Event(step=row["step"], summary=summary, wall_time=1.0))
    writer.close()
    return tmp_path / "runs"


def test_tensorboards_events_are_read_from_a_folder_or_a_file(events):
    (file,) = events.iterdir()
    for path in (events, file):
        log = read_training_log(path)
        assert log.kind == "tensorboard"
        assert cells(log) == pytest.approx({10: 0.5, 20: 0.7, 30: 0.9})
        assert cells(log, "val") == pytest.approx({10: 0.4, 30: 0.6})


def test_subfolders_of_events_are_groups(events):
    events.rename(events.parent / "validation")
    log = read_training_log(events.parent)
    assert log.groups() == ["validation/train", "validation/val"]
    assert set(log.frame["phase"]) == {"validation"}


def test_damaged_events_are_bad_input(tmp_path):
    pytest.importorskip("tensorboard")
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(struct.pack("<Q", 2**40) + b"not a record at all" * 9)
    with pytest.raises(BadInput):
        read_training_log(path)


def test_without_tensorboard_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(b"")
    with pytest.raises(BadInput, match="pip install tensorboard"):
        read_training_log(path)
