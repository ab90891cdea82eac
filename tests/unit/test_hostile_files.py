"""Files from other people: whatever is in them, one line says what is wrong with it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny_world
import torch
from safetensors.torch import load_file, save_file

from dflash_diag import storage
from dflash_diag.bundle import Capture, manifest_text
from dflash_diag.checkpoints import read_checkpoint
from dflash_diag.compare_runs import member_of_folder
from dflash_diag.errors import MAX_PART, BadInput, CaptureError, CheckpointError, Interrupted
from dflash_diag.history import Row, append, read_history, reference_side
from dflash_diag.prompts import read_prompts
from dflash_diag.results import Result, Verdict
from dflash_diag.scoring import Scores
from dflash_diag.stats import Estimate
from dflash_diag.target_config import read_target_config
from dflash_diag.training_sequences import read_training_sequences
from dflash_diag.views import compare_text


@pytest.mark.parametrize("text", ["\x1b[2J\x1b]0;owned\x07", "a\u202eb", "\ud800", "\x85", "\0"])
def test_an_error_cannot_steer_a_terminal(text):
    said = str(BadInput(f"no layer {text}", f"a {text}", text))
    assert said.isprintable()
    assert said.encode()
    assert said.startswith("no layer")


def test_an_error_has_an_end():
    for text in ("x" * 10**6, "\U000e0001" * 10**6):
        assert len(str(BadInput(text, text))) < 2 * MAX_PART + 100
        assert len(str(Interrupted(text))) < 4 * MAX_PART + 100


def test_words_of_any_script_stay_as_they_are():
    assert str(BadInput("no such file: données/訓練\n.pt")) == "no such file: données/訓練 .pt"


# --- what stands in a file's place ----------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def itself(path: Path) -> None:
    path.symlink_to(path.name)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**36)


@pytest.mark.parametrize("instead", [pipe, itself, endless, large, Path.mkdir])
def test_what_is_no_file_of_json_is_not_waited_for(tmp_path, instead):
    path = tmp_path / "config.json"
    instead(path)
    with pytest.raises(BadInput, match="config.json"):
        storage.read_json(path)


@pytest.mark.parametrize("instead", [itself, endless, large, Path.mkdir])
def test_text_without_an_end_is_not_read(tmp_path, instead):
    path = tmp_path / "prompts.jsonl"
    instead(path)
    with pytest.raises(BadInput, match="prompts.jsonl"):
        read_prompts(path)


def test_prompts_may_come_from_a_pipe(tmp_path):
    import threading

    path = tmp_path / "pipe"
    os.mkfifo(path)
    line = '{"id": "a", "text": "hello"}\n'
    writer = threading.Thread(target=path.write_text, args=(line,))
    writer.start()
    assert [one.id for one in read_prompts(path)] == ["a"]
    writer.join()


@pytest.mark.parametrize("instead", [pipe, itself, endless])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "training_args.json"])
def test_a_checkpoint_with_something_else_in_a_files_place(tmp_path, name, instead):
    folder = tiny_world.write_drafter(tmp_path / "drafter")
    (folder / name).unlink(missing_ok=True)
    instead(folder / name)
    if not (folder / name).exists() and name == "training_args.json":
        assert read_checkpoint(folder).training_args is None  # a link that leads nowhere
    else:
        with pytest.raises(CheckpointError):
            read_checkpoint(folder)


def test_what_is_no_character_is_written_as_json_escapes_it(tmp_path):
    path = storage.write_json(tmp_path / "x.json", {"a": "\ud800é"})
    assert json.loads(path.read_bytes()) == {"a": "\ud800é"}
    storage.atomic_write(tmp_path / "x.html", "<p>\udfff</p>")
    assert (tmp_path / "x.html").read_text() == "<p>\\udfff</p>"


@pytest.mark.parametrize("value", [{}, [1], 3, None, "../other.safetensors", "/etc/passwd"])
def test_shards_that_are_no_names(tmp_path, value):
    folder = tiny_world.write_drafter(tmp_path / "drafter")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"fc.weight": value}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no usable shards"):
        read_checkpoint(folder)


# --- captures whose hashes are right --------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    from dflash_diag.capture import make_capture

    folder = tiny_world.write_world(tmp_path_factory.mktemp("world"))
    prompts = read_prompts(folder / "prompts.jsonl")
    target = str(folder / "target")
    make_capture(target, prompts, folder / "capture", max_new_tokens=8, silent=True)
    return folder


@pytest.fixture
def capture(world, tmp_path):
    import shutil

    return Path(shutil.copytree(world / "capture", tmp_path / "capture"))


def sealed(folder: Path) -> Path:
    """The manifest made again, as somebody would who means harm."""
    names = json.loads((folder / "manifest.json").read_text())["files"]
    hashes = {name: storage.sha256_file(folder / name) for name in names}
    (folder / "manifest.json").write_text(manifest_text(hashes))
    return folder


def look(folder: Path) -> None:
    read = Capture.load(folder)
    for i in range(len(read)):
        read.tokens(i)
        read.final_norm(read.states(i, read.layer_ids))
        read.top_choices(i)
    assert read.embedding.ndim == read.head.ndim == 2


def test_an_unchanged_capture_is_read(capture):
    look(sealed(capture))


FACTS = {
    "no target": lambda f: f.pop("target"),
    "a size that is text": lambda f: f["target"].update(hidden_size="32"),
    "a size below 1": lambda f: f["target"].update(vocab_size=0),
    "a norm without eps": lambda f: f["target"]["final_norm"].pop("eps"),
    "an eps that is no number": lambda f: f["target"]["final_norm"].update(eps=float("nan")),
    "a layer that is text": lambda f: f["layer_ids"].append("3"),
    "a layer that is not there": lambda f: f["layer_ids"].append(77),
    "hashes of something else": lambda f: f["target"].update(files=[1]),
    "a file elsewhere": lambda f: f["shared"].update(head="../../secret.safetensors"),
    "an absolute file": lambda f: f["shared"].update(head="/etc/passwd"),
    "a file that is no text": lambda f: f["shared"].update(head=7),
    "rows that are no number": lambda f: f.update(keep_rows="x"),
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_facts_of_a_capture_that_make_no_sense(capture, change):
    facts = json.loads((capture / "capture.json").read_text())
    change(facts)
    (capture / "capture.json").write_text(json.dumps(facts))
    with pytest.raises(CaptureError):
        look(sealed(capture))


def test_a_manifest_does_not_lead_out_of_its_folder(capture):
    files = json.loads((capture / "manifest.json").read_text())["files"]
    (capture / "manifest.json").write_text(manifest_text({**files, "../../x": "0"}))
    with pytest.raises(CaptureError, match="files of its own folder"):
        Capture.load(capture)


TABLES = {
    "no id": ("prompts", lambda t: t.drop(columns="id")),
    "an id twice": ("prompts", lambda t: t.assign(id="a")),
    "ids that are numbers": ("prompts", lambda t: t.assign(id=range(len(t)))),
    "a prompt of no tokens": ("prompts", lambda t: t.assign(n_prompt_tokens=0)),
    "more tokens than there are": ("prompts", lambda t: t.assign(n_generated=10**6)),
    "counts that are text": ("prompts", lambda t: t.assign(n_generated="x")),
    "no margin": ("positions", lambda t: t.drop(columns="margin")),
    "margins that are text": ("positions", lambda t: t.assign(margin="x")),
    "choices of unequal length": (
        "positions",
        lambda t: t.assign(top_ids=[[1] * (i % 3 + 1) for i in range(len(t))]),
    ),
    "choices that are text": ("positions", lambda t: t.assign(top_ids="x")),
    "no positions": ("positions", lambda t: t.head(0)),
}


@pytest.mark.parametrize(("name", "change"), TABLES.values(), ids=TABLES)
def test_tables_of_a_capture_that_make_no_sense(capture, name, change):
    path = capture / f"{name}.parquet"
    change(pd.read_parquet(path)).to_parquet(path)
    with pytest.raises(CaptureError):
        look(sealed(capture))


TENSORS = {
    "no tokens": lambda t: t.pop("tokens"),
    "tokens that are floats": lambda t: t.update(tokens=t["tokens"].float()),
    "fewer tokens": lambda t: t.update(tokens=t["tokens"][:-1].clone()),
    "tokens in a batch": lambda t: t.update(tokens=t["tokens"][None]),
    "states of another width": lambda t: t.update({"layer.0": t["layer.0"][:, :-1].contiguous()}),
    "states of fewer tokens": lambda t: t.update({"layer.0": t["layer.0"][1:].clone()}),
    "states that are whole": lambda t: t.update({"layer.0": t["layer.0"].to(torch.int32)}),
    "a layer that is no number": lambda t: t.update({"layer.x": t.pop("layer.0")}),
}


@pytest.mark.parametrize("change", TENSORS.values(), ids=TENSORS)
def test_tensors_of_a_capture_that_make_no_sense(capture, change):
    path = capture / "states" / "00000.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CaptureError):
        look(sealed(capture))


def test_a_table_that_is_no_parquet(capture):
    (capture / "positions.parquet").write_bytes(b"PAR1" + bytes(range(256)) + b"PAR1")
    with pytest.raises(CaptureError, match="damaged"):
        look(sealed(capture))


# --- the rest -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [[], {"text_config": 3}, {"hidden_size": "32"}, {"vocab_size": -1}, {"layer_types": 7}],
)
def test_a_targets_configuration_that_makes_no_sense(tmp_path, content):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match="config.json"):
        read_target_config(tmp_path)


def test_code_that_a_target_brings_is_not_even_asked_about(world, tmp_path, monkeypatch):
    import shutil

    from dflash_diag.targets import load_target, load_tokenizer

    folder = Path(shutil.copytree(world / "target", tmp_path / "target"))
    mark = tmp_path / "mark"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    asked = []
    monkeypatch.setattr("builtins.input", lambda *_: asked.append(1) or "y")
    for name, keys in (
        ("config.json", {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.T", "evil.T"]}),
    ):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": keys, "model_type": "evil", "tokenizer_class": "Evil"}
        (folder / name).write_text(json.dumps(config))
    with pytest.raises(BadInput):
        load_target(str(folder))
    with pytest.raises(BadInput):
        load_tokenizer(folder)
    assert not mark.exists()
    assert not asked


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_an_attention_that_would_be_fetched_is_refused(world, tmp_path, key):
    import shutil

    from dflash_diag.targets import load_target

    folder = Path(shutil.copytree(world / "target", tmp_path / "target"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: "evil/kernel"}))
    with pytest.raises(BadInput, match="wants code from elsewhere"):
        load_target(str(folder))


ROW = Row(
    run_id="a",
    name="step_1",
    checkpoint="/x",
    step=1,
    written=datetime(2026, 1, 1, tzinfo=UTC),
    finished=datetime(2026, 1, 1, tzinfo=UTC),
    verdict="pass",
    cause="",
    tau_walked=2.0,
    tau_walked_lo=1.0,
    tau_walked_hi=3.0,
    tau_uniform=2.0,
    n_prompts=2,
    capture="c",
    out="runs/a",
    ids=("p0", "p1"),
    tokens=(6, 8),
    rounds=(3, 4),
)
CELLS = {
    "finished": "yesterday",
    "tau_walked": None,
    "tau_walked_hi": float("nan"),
    "n_prompts": "many",
    "rounds": [0, 0],
    "ids": ["p0", "p0"],
    "tokens": None,
    "name": None,
}


@pytest.mark.parametrize(("name", "value"), CELLS.items(), ids=CELLS)
def test_a_history_with_a_cell_that_makes_no_sense(tmp_path, name, value):
    path = tmp_path / "history.parquet"
    append(path, ROW)
    assert read_history(path) == [ROW]
    table = pq.read_table(path)
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, pa.array([value])), path)
    with pytest.raises(BadInput, match="not a history, or damaged"):
        read_history(path)


ROWS = {
    "a prefix that is text": {"tokens": [1, 2, 3], "prefix": "x"},
    "a prefix without end": {"tokens": [1, 2, 3], "prefix": 10**400},
    "anchors that are objects": {"tokens": [1, 2, 3], "prefix": 1, "anchors": [{}]},
    "anchors that are text": {"tokens": [1, 2, 3], "prefix": 1, "anchors": "x"},
    "a seed below 0": {"tokens": [1, 2, 3], "prefix": 1, "anchor_seed": -1},
    "a seed that is text": {"tokens": [1, 2, 3], "prefix": 1, "anchor_seed": "x"},
    "tokens without end": {"tokens": [2**64, 1], "prefix": 1},
    "tokens that are objects": {"tokens": [{}, []], "prefix": 1},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_training_sequences_that_make_no_sense(tmp_path, row):
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(BadInput, match="row 0"):
        read_training_sequences(path)


def test_a_pipe_among_training_sequences_is_not_waited_for(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"tokens": [1, 2, 3], "prefix": 1}\n')
    os.mkfifo(tmp_path / "validation.jsonl")
    with pytest.raises(BadInput, match="is no file"):
        read_training_sequences(tmp_path)


def test_training_sequences_nested_without_end(tmp_path):
    (tmp_path / "train.jsonl").write_text("[" * 200_000)
    with pytest.raises(BadInput, match="line 1"):
        read_training_sequences(tmp_path / "train.jsonl")


def test_whole_numbers_of_numpy_are_training_sequences_too(tmp_path):
    from safetensors.numpy import save_file as save

    columns = {"tokens": np.arange(12).reshape(2, 6), "prefix": np.array([2, 3])}
    save({**columns, "anchor_seed": np.array([4, 5])}, tmp_path / "train.safetensors")
    (split,) = read_training_sequences(tmp_path / "train.safetensors").values()
    assert [(text.prefix, text.seed) for text in split] == [(2, 4), (3, 5)]


# --- what a run has left --------------------------------------------------------------------------


@pytest.fixture
def result(tmp_path):
    """A saved result with text and numbers in its table."""
    rows = [{"k": k, "population": "uniform", "survival": 0.5, "note": "a"} for k in range(1, 4)]
    made = Result(
        id="acceptance.by_position",
        question="How far?",
        headline="So far.",
        verdict=Verdict.PASS,
        estimates={"tau": Estimate(1.5, 1.0, 2.0, 3, "tokens")},
        frame=pd.DataFrame(rows),
        notes=("a note",),
    )
    return made.save(tmp_path / "result")


@pytest.mark.parametrize(
    "change",
    [
        {"headline": 1}, {"question": None}, {"id": ["a"]}, {"verdict": "FINE"}, {"verdict": []},
        {"estimates": []}, {"estimates": {"tau": {"value": "a"}}}, {"estimates": {"tau": {"x": 1}}},
        {"estimates": {"tau": {"value": 10**400}}}, {"params": "a"}, {"notes": 3}, {"notes": [1]},
        {"provenance": None}, {"frame": {}}, {"frame": None}, {"schema_version": 7},
    ],
)  # fmt: skip
def test_a_result_whose_record_was_changed(result, change):
    path = result / "result.json"
    storage.write_json(path, storage.read_json(path) | change)
    with pytest.raises(BadInput, match=r"result\.json"):
        Result.load(result)


def test_a_results_record_does_not_lead_to_another_file(result, tmp_path):
    path = result / "result.json"
    record = storage.read_json(path)
    record["frame"]["file"] = "../elsewhere.parquet"
    storage.write_json(path, record)
    assert len(Result.load(result).frame) == 3


def changed_table(result: Path, table: pa.Table) -> None:
    """Put another table in a result's place, and its hash into the record."""
    path = result / "result.json"
    pq.write_table(table, result / "frame.parquet")
    record = storage.read_json(path)
    record["frame"]["sha256"] = storage.sha256_file(result / "frame.parquet")
    storage.write_json(path, record)


def test_a_result_whose_table_is_damaged(result):
    table = pq.read_table(result / "frame.parquet")
    no_text = pa.array([b"\xff\xfe", b"b", b"c"]).view(pa.string())
    changed_table(result, table.set_column(3, "note", no_text))
    with pytest.raises(BadInput, match=r"frame\.parquet is damaged"):
        Result.load(result)
    changed_table(result, table.replace_schema_metadata({b"pandas": b"[]"}))
    with pytest.raises(BadInput, match=r"frame\.parquet is damaged"):
        Result.load(result)


def test_a_table_that_cannot_be_drawn_is_named(result):
    changed_table(result, pa.table({"k": ["a", "b"]}))
    with pytest.raises(BadInput, match=r"table of acceptance\.by_position cannot be drawn"):
        Result.load(result).html()


def scored(folder: Path) -> Scores:
    """Scores of one prompt with three anchors, saved."""
    a, d, w = 3, 2, 4
    made = Scores(
        prompt_ids=["p"], n_prompt_tokens=np.array([5]), n_generated=np.array([a + d]), unscored=[],
        prompt=np.zeros(a, np.int32), anchor=np.arange(5, 5 + a, dtype=np.int32),
        labels=np.ones((a, d), np.int64), proposed=np.ones((a, d), np.int64),
        rank=np.zeros((a, d), np.int32), label_logprob=np.zeros((a, d), np.float32),
        topk_ids=np.zeros((a, d, w), np.int32),
        topk_logprobs=np.tile(-np.arange(w, dtype=np.float32), (a, d, 1)),
        block_size=3, convention={}, provenance={},
    )  # fmt: skip
    made.save(folder)
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"anchor": np.array([5, 7, 8], np.int32)}, {"n_generated": np.array([50])},
        {"n_generated": np.array([0])}, {"n_prompt_tokens": np.array([4])},
        {"rank": np.full((3, 2), -1, np.int32)}, {"topk_ids": np.zeros((3, 2, 1), np.int32)},
        {"topk_logprobs": np.full((3, 2, 4), np.nan, np.float32)}, {"convention": None},
        {"labels": np.ones((3, 1), np.int64), "n_generated": np.array([6])},
    ],
)  # fmt: skip
def test_scores_whose_parts_do_not_fit_together(tmp_path, change):
    made = scored(tmp_path / "scores")
    assert Scores.load(tmp_path / "scores").anchor.tolist() == [5, 6, 7]
    if "labels" in change:  # of a table with as many rows, D is another
        facts = storage.read_json(tmp_path / "scores" / "scores.json")
        storage.write_json(tmp_path / "scores" / "scores.json", facts | {"n_proposed": 1})
    else:
        replace(made, **change).save(tmp_path / "scores")
    with pytest.raises(BadInput, match="scores is damaged"):
        Scores.load(tmp_path / "scores")


SUMMARY = {
    "schema": "dflash_diag.summary/1",
    "drafters": {"drafter": "step_1", "reference": "r"},
    "steps": {"drafter": 1, "reference": None},
    "scores": {
        role: {"per_prompt": [{"id": "p", "rounds": [1, 2]}], "n_proposed": 4}
        for role in ("drafter", "reference")
    },
    "config": {"drafter": "/x/step_1", "device": "cpu", "dtype": "auto", "overrides": []},
    "provenance": {
        "content": {
            "text": "t", "target": {}, "versions": {}, "drafters": {"step_1": {"files": {}}},
        }
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["scores"], 3), (["scores"], []), (["scores", "drafter"], None), (["steps"], 1),
        (["scores", "drafter", "per_prompt"], [{"id": "p", "rounds": "a"}]),
        (["scores", "drafter", "per_prompt"], [{"id": "p", "rounds": []}]),
        (["provenance", "content", "versions"], False), (["provenance"], "x"),
        (["provenance", "content", "target"], {"files": {"weights": {}}, "backend": 1}),
        (["config", "drafter"], None), (["config"], []), (["drafters"], {"drafter": []}),
    ],
)  # fmt: skip
def test_a_run_whose_summary_was_changed(tmp_path, keys, value):
    storage.write_json(tmp_path / "summary.json", SUMMARY)
    assert member_of_folder(tmp_path).side.name == "step_1"
    changed = json.loads(json.dumps(SUMMARY))
    part = changed
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    storage.write_json(tmp_path / "summary.json", changed)
    with pytest.raises(BadInput, match=r"summary\.json"):
        member_of_folder(tmp_path)


@pytest.mark.parametrize("scores", [1, {"reference": {"per_prompt": [{"id": "p"}]}}])
def test_a_reference_that_its_run_no_longer_tells_of(tmp_path, scores):
    (tmp_path / "run").mkdir()
    storage.write_json(tmp_path / "run" / "summary.json", SUMMARY | {"scores": scores})
    with pytest.raises(BadInput, match=r"summary\.json is damaged"):
        reference_side(SimpleNamespace(out="run", capture="t"), tmp_path)


@pytest.mark.parametrize("instead", [pipe, large, Path.mkdir])
def test_what_is_no_file_of_history_is_not_waited_for(tmp_path, instead):
    instead(tmp_path / "history.parquet")
    with pytest.raises(BadInput, match=r"history\.parquet is not a history"):
        read_history(tmp_path / "history.parquet")


def test_a_name_from_another_run_cannot_steer_a_terminal():
    number = {"value": 1.0, "lo": 1.0, "hi": 1.0}
    drafter = {"name": "\x1b[2J", "reference": False, "tau": number, "n_prompts": 1}
    found = {"differs": [], "drafters": [drafter], "pairs": [], "slots": [], "notes": ["\x07"]}
    shown = compare_text({**found, "trend": None})
    assert "\\x1b[2J" in shown
    assert shown.replace("\n", "").isprintable()
