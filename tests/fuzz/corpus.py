"""Kinds of input: a small valid one of each, made of the tiny world, and the code that reads it.

A reader does with an input what a user would have done with it: it opens it, looks at all of it and
writes down what it found. It may end in `DiagError`; anything else is a fault.
"""

from __future__ import annotations

import csv
import filecmp
import json
import os
import shutil
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import tiny_gguf
import tiny_world
import torch
from mutators import CHATS
from safetensors.torch import save_file

from dflash_diag import servers, storage
from dflash_diag.bundle import Capture, manifest_text
from dflash_diag.checkpoints import load_drafter, training_step
from dflash_diag.claims import read_log
from dflash_diag.config import RunConfig
from dflash_diag.errors import DiagError
from dflash_diag.history import Row, append, frame, read_history, row_of
from dflash_diag.prompts import Prompt, read_prompts
from dflash_diag.references import check_served, read_served
from dflash_diag.results import Result
from dflash_diag.runs import Reading, Run
from dflash_diag.training_logs import read_training_log
from dflash_diag.training_sequences import AnchorRule, check_ids, draw_anchors
from dflash_diag.training_sequences import read_training_sequences as read_sequences

G = 12
"""Tokens of a continuation."""
DRAWS = 200
"""Resamples behind each interval."""
FACTS = {"hidden_size": 32, "vocab_size": tiny_world.VOCABULARY, "n_layers": 4}


@dataclass(frozen=True)
class Kind:
    """One kind of input."""

    name: str
    share: int
    """Of a run's inputs, in relation to the other kinds."""
    write: Callable[[Path, Path], Path]
    """From the world and an empty folder to the path that is read, in that folder."""
    read: Callable[[Path, Path, Path], None]
    """Takes the path, the world and a folder to write into."""
    parts: tuple[str, ...] = ("**/*",)
    """Globs of the files that are mutated, where the input is a folder."""
    mend: Callable[[Path, Path], None] | None = None
    """Makes checksums right again, so that what stands behind them is reached."""
    spared: frozenset[str] = frozenset()
    """Mutations that make no sense for it."""


def write_world(folder: Path) -> Path:
    """Target, drafters, prompts, a capture, and a run with all that it found."""
    from dflash_diag import report
    from dflash_diag.capture import make_capture

    tiny_world.write_world(folder)
    prompts = read_prompts(folder / "prompts.jsonl")
    make_capture(str(folder / "target"), prompts, folder / "capture", max_new_tokens=G, silent=True)
    tiny_gguf.write_gguf(folder / "target.gguf", tiny_gguf.make_llama())
    run = Run.open(_config(folder, folder / "run"))
    storage.write_json(run.out / "run.json", run.config.model_dump(mode="json"))
    storage.write_json(run.out / "summary.json", report.summary(run, run.results()))
    return folder


def _config(world: Path, out: Path) -> RunConfig:
    names = {name: str(world / name) for name in ("drafter", "reference", "capture")}
    return RunConfig(**names, out=str(out), draws=DRAWS)


# --- checkpoints ----------------------------------------------------------------------------------


def _drafter(world: Path, to: Path) -> Path:
    shutil.copytree(world / "drafter", to / "drafter")
    arguments = {"lr": 1e-3, "anchors": 64, "loss": {"gamma": 7.0}, "out": "/x"}
    (to / "drafter" / "training_args.json").write_text(json.dumps(arguments))
    return to / "drafter"


def _weights(world: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(world / "drafter" / "model.safetensors")


def _shards(world: Path, to: Path) -> Path:
    folder, weights = to / "shards", _weights(world)
    folder.mkdir()
    weights["fc.weight"] = weights["fc.weight"].to(torch.float8_e4m3fn)
    weights["fc.weight_scale"] = torch.ones(len(weights["fc.weight"]), 1)
    names = sorted(weights)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = dict(zip(files, (names[::2], names[1::2]), strict=True))
    for file, held in halves.items():
        save_file({name: weights[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)
    shutil.copy(world / "drafter" / "config.json", folder)
    return folder


def _training_file(world: Path, to: Path) -> Path:
    import argparse

    weights = {f"module.{name}": tensor for name, tensor in _weights(world).items()}
    content = {
        "model": weights,
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(4, 5)}}, "param_groups": [{"lr": 0.1}]},
        "step": 8000,
        "args": argparse.Namespace(lr=1e-3, out=Path("/x")),
        "config": json.loads((world / "drafter" / "config.json").read_text()),
    }
    torch.save(content, to / "step_8000.pt")
    return to / "step_8000.pt"


def read_drafter(path: Path, world: Path, out: Path) -> None:
    """A drafter before it is scored: opened, compared with the target, loaded, written down."""
    reading = Reading.read(str(path))
    reading.check(FACTS)
    checkpoint = reading.checkpoint
    training_step(checkpoint)
    about = [checkpoint.files, checkpoint.config, checkpoint.extra, reading.convention.to_json()]
    storage.write_json(out / "about.json", about)
    load_drafter(checkpoint, reading.convention, strict=False)


def audit_drafter(path: Path, world: Path, out: Path) -> None:
    """What a report says of a drafter's files."""
    config = RunConfig(drafter=str(path), capture=str(world / "capture"), out=str(out))
    Run.open(config, strict=False).static("drafter")


def score(path: Path, world: Path, out: Path) -> None:
    """The verb ``score`` on a drafter, or on a capture."""
    from dflash_diag import views

    drafter, capture = path, world / "capture"
    if (path / "capture.json").exists() or path.name == "capture":
        drafter, capture = world / "drafter", path
    run = Run.open(RunConfig(drafter=str(drafter), capture=str(capture), out=str(out)))
    storage.write_json(out / "score.json", run.metrics("drafter"))
    _printable(views.score_text(run))


# --- captures -------------------------------------------------------------------------------------


def _capture(world: Path, to: Path) -> Path:
    shutil.copytree(world / "capture", to / "capture")
    return to / "capture"


def mend_capture(path: Path, changed: Path) -> None:
    """The manifest of a capture, made again with the new hash of one file."""
    manifest = path / "manifest.json"
    if changed == manifest or not (manifest.is_file() and changed.is_file()):
        return
    if changed.is_symlink() or changed.stat().st_size > 2**26:
        return
    try:
        files = dict(json.loads(manifest.read_text())["files"])
    except (ValueError, KeyError, TypeError, RecursionError):  # changed before
        return
    files[changed.relative_to(path).as_posix()] = storage.sha256_file(changed)
    manifest.write_bytes(manifest_text(files).encode("utf-8", "surrogatepass"))


def read_capture(path: Path, world: Path, out: Path) -> None:
    """All that a capture holds."""
    capture = Capture.load(path)
    for i, prompt in enumerate(capture.prompts):
        capture.tokens(i), capture.continuation(i), capture.rows(i)
        states = capture.states(i, capture.layer_ids)
        capture.positions(i), capture.top_choices(i)
        capture.index(prompt.id)
        capture.final_norm(states)
    assert capture.embedding.ndim == capture.head.ndim == 2
    _ = capture.max_new_tokens, capture.reference, capture.thinned
    storage.write_json(out / "facts.json", capture.target_facts)
    storage.write_json(out / "ids.json", [prompt.id for prompt in capture.prompts])


def _dump(world: Path, to: Path) -> Path:
    path = to / "dump.safetensors"
    made = Capture.load(world / "capture", verify=False)
    tensors = {"tokens": made.tokens(0), "hidden_states": made.states(0, made.layer_ids)}
    tensors |= {"layer_ids": torch.tensor(made.layer_ids)}
    save_file(tensors, path, metadata={"n_prompt_tokens": "3", "id": "first"})
    return path


def _torch_dump(world: Path, to: Path) -> Path:
    path = to / "dump.pt"
    made = Capture.load(world / "capture", verify=False)
    states = made.states(0, made.layer_ids)
    content = {
        "input_ids": made.tokens(0),
        "loss_mask": (torch.arange(len(states)) >= 3).long(),
        "hidden_states": list(states.unbind(1)),
        "metadata": {"layer_ids": list(made.layer_ids)},
    }
    torch.save(content, path)
    return path


def read_dump(path: Path, world: Path, out: Path) -> None:
    """A capture made by other code, with what the target lends it."""
    capture = Capture.load(path, target=world / "target")
    _read_lent(capture)


def _read_lent(capture: Capture) -> None:
    for i in range(len(capture)):
        capture.tokens(i), capture.continuation(i)
        capture.final_norm(capture.states(i, capture.layer_ids))
    assert capture.embedding.ndim == capture.head.ndim == 2


def _target(world: Path, to: Path) -> Path:
    shutil.copytree(world / "target", to / "target")
    return to / "target"


def read_lent(path: Path, world: Path, out: Path) -> None:
    """Another target's folder, whose tensors a capture made by other code borrows."""
    dump = _dump(world, out)
    _read_lent(Capture.load(dump, target=path))


def _gguf(world: Path, to: Path) -> Path:
    return Path(shutil.copy(world / "target.gguf", to))


def load_gguf(path: Path, world: Path, out: Path) -> None:
    """A target in one file: its facts, its weights as numbers, its tokenizer."""
    from dflash_diag.targets import fingerprint, load_target

    storage.write_json(out / "files.json", fingerprint(path))
    target = load_target(str(path))
    target.encode(Prompt(id="a", text="def f(x):"))
    storage.write_json(out / "facts.json", target.facts())


def _chat(world: Path, to: Path) -> Path:
    """A tokenizer with a chat template; who renders it is there before the clock runs."""
    _model(os.getpid(), world / "target").encode(Prompt(id="a", messages=(HELLO,)))
    (to / "chat").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(world / "target" / name, to / "chat")
    (to / "chat" / "chat_template.jinja").write_text(CHATS[0])
    return to / "chat"


def _chat_in_settings(world: Path, to: Path) -> Path:
    path = _chat(world, to)
    (path / "chat_template.jinja").unlink()
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "a", "chat_template": CHATS[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@cache
def _model(process: int, target: Path) -> Any:
    """The target, once a process, with the process of its own in which templates are rendered."""
    from dflash_diag import chat_templates
    from dflash_diag.targets import load_target

    chat_templates.SECONDS = 1.0
    model = load_target(str(target))
    model.tokenizer.chat_template = CHATS[0]
    return model


HELLO = {"role": "user", "content": "hello"}


def render_chat(path: Path, world: Path, out: Path) -> None:
    """Chats as the tokens that a chat template makes of them."""
    from dflash_diag.targets import load_tokenizer

    model = _model(os.getpid(), world / "target")
    own, model.__dict__["tokenizer"] = model.tokenizer, load_tokenizer(path)
    try:
        messages = (HELLO, {"role": "assistant", "content": "a\nb"})
        ids = model.encode(Prompt(id="b", messages=messages), {"enable_thinking": False})
    finally:
        model.__dict__["tokenizer"] = own
    storage.write_json(out / "ids.json", ids)


def load_target(path: Path, world: Path, out: Path) -> None:
    """A target as transformers loads it, with its tokenizer."""
    from dflash_diag.targets import load_target

    load_target(str(path)).encode(Prompt(id="a", text="def f(x):"))


# --- texts ----------------------------------------------------------------------------------------


def _prompts(world: Path, to: Path) -> Path:
    lines = [
        {"id": "a", "text": "def f(x):\n    return", "kind": "code"},
        {"id": "b", "messages": [{"role": "user", "content": "hello"}]},
        {"id": "c", "prompt_ids": [1, 2, 3]},
    ]
    return _lines(to / "prompts.jsonl", lines)


def _lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def read_prompt_file(path: Path, world: Path, out: Path) -> None:
    """Prompts, written down again."""
    storage.write_json(out / "prompts.json", [one.to_json() for one in read_prompts(path)])


def _served(world: Path, to: Path) -> Path:
    rows = [{"id": f"p{i}", "output_ids": list(range(3, 9))} for i in range(2)]
    return _lines(to / "served.jsonl", [*rows, {"id": "p2", "text": "hello"}])


def read_served_output(path: Path, world: Path, out: Path) -> None:
    """A server's output, compared with a capture."""
    found = [one for one in read_served(path) if one.text is None]
    lossless = check_served(Capture.load(world / "capture", verify=False), found)
    storage.write_json(out / "lossless.json", [vars(one) for one in lossless.mismatches])


_METRICS = ("train/accuracy", "train/streak", "eval/dds8", "loss")


def _log_rows() -> list[dict[str, Any]]:
    return [
        {"step": 10 * i, **{name: 0.1 * i + k for k, name in enumerate(_METRICS)}}
        for i in range(1, 8)
    ]


def _csv_log(world: Path, to: Path) -> Path:
    path = to / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", *_METRICS])
        writer.writeheader()
        writer.writerows(_log_rows())
    return path


def _wandb_chart(world: Path, to: Path) -> Path:
    path = to / "chart.csv"
    names = [f"run{r} - dds8{end}" for r in (1, 2) for end in ("", "__MIN", "__MAX")]
    lines = [",".join(f'"{name}"' for name in ["Step", *names])]
    lines += [",".join(f'"{i + k / 10}"' for k in range(7)) for i in range(6)]
    path.write_text("\n".join(lines))
    return path


def _json_lines_log(world: Path, to: Path) -> Path:
    return _lines(to / "log.jsonl", _log_rows())


def _wandb_history(world: Path, to: Path) -> Path:
    rows = [{"_step": row["step"], "_runtime": 1.5, **row} for row in _log_rows()]
    return _lines(to / "history.jsonl", rows)


def _trainer_state(world: Path, to: Path) -> Path:
    path = to / "trainer_state.json"
    path.write_text(json.dumps({"log_history": _log_rows(), "global_step": 70}))
    return path


def _events(world: Path, to: Path) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(to / "events")) as writer:
        for row in _log_rows():
            for name in _METRICS:
                writer.add_scalar(name, row[name], row["step"])
    return to / "events"


def read_a_log(path: Path, world: Path, out: Path) -> None:
    """A training's log, as tables and as claims."""
    log = read_training_log(path)
    log.summary().to_csv(out / "summary.csv")
    for group in log.groups():
        log.table(group)
    for line in read_log(log):
        storage.write_json(out / "line.json", [str(claim) for claim in line.claims])


def _sequences_json(world: Path, to: Path) -> Path:
    (to / "sequences").mkdir()
    rows: list[dict[str, Any]] = [{"tokens": list(range(5, 25)), "prefix": 6} for _ in range(3)]
    rows += [{"tokens": [7] * 12, "loss_mask": [0] * 4 + [1] * 8, "anchors": [5, 6]}]
    rows += [{"tokens": [7] * 12, "prefix": 2, "documents": [0] * 6 + [1] * 6, "anchor_seed": 3}]
    _lines(to / "sequences" / "train.jsonl", rows)
    _lines(to / "sequences" / "validation.jsonl", rows[:2])
    return to / "sequences"


def _sequences_tensors(world: Path, to: Path) -> Path:
    tensors = {
        "tokens": torch.arange(60).reshape(3, 20),
        "loss_mask": (torch.arange(60).reshape(3, 20) % 20 > 5).to(torch.uint8),
        "documents": (torch.arange(60).reshape(3, 20) % 20 > 11).long(),
        "anchors": torch.tensor([[6, 7], [8, 9], [10, 11]]),
        "anchor_seed": torch.tensor([1, 2, 3]),
    }
    save_file(tensors, to / "train.safetensors")
    return to / "train.safetensors"


def read_texts(path: Path, world: Path, out: Path) -> None:
    """What a drafter trained on, and the anchors that its trainer would draw."""
    splits = read_sequences(path)
    check_ids(splits, tiny_world.VOCABULARY)
    for split in splits.values():
        draw_anchors(split, AnchorRule(count=4), 5, 0)


def _history(world: Path, to: Path) -> Path:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    row = Row(
        run_id="a",
        name="step_1",
        checkpoint="/x/step_1",
        step=1,
        written=now,
        finished=now,
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
    append(to / "history.parquet", row)
    append(to / "history.parquet", replace(row, run_id="b", step=None))
    return to / "history.parquet"


def read_a_history(path: Path, world: Path, out: Path) -> None:
    """A watched folder's history."""
    rows = read_history(path)
    frame(rows)
    for row in rows:
        _ = row.tau, row.side


def _options(world: Path, to: Path) -> Path:
    path = to / "options.json"
    options = {
        "target": str(world / "target"),
        "prompts": str(world / "prompts.jsonl"),
        "max_new_tokens": G,
        "drafter": str(world / "drafter"),
        "overrides": ["rope_theta=1e6", "block_size=5", "context_bound=inclusive"],
        "claims": ["dds8=3.58", "eval/accuracy=0.7"],
        "chat_template_kwargs": '{"enable_thinking": false}',
        "against": "torch/bfloat16",
        "server_timeout": 3.5,
        "device": "cpu",
        "draws": 400,
        "seed": 3,
    }
    path.write_text(json.dumps(options))
    return path


def read_options(path: Path, world: Path, out: Path) -> None:
    """Options of a run. The file itself is no input of ours."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError):
        return
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key != "step"}
        Run.open(RunConfig.read({**values, "out": str(out)}), strict=False)


# --- what a run has left --------------------------------------------------------------------------


def _results(world: Path, to: Path) -> Path:
    shutil.copytree(world / "run" / "results", to / "results")
    return to / "results"


def mend_result(path: Path, changed: Path) -> None:
    """The hash of a changed table in the record beside it."""
    record = changed.with_name("result.json")
    if changed.name != "frame.parquet" or not changed.is_file():
        return
    try:
        content = json.loads(record.read_text())
        content["frame"]["sha256"] = storage.sha256_file(changed)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # changed before
        return
    record.write_text(json.dumps(content))


def read_results(path: Path, world: Path, out: Path) -> None:
    """Results that were changed, as a notebook shows them."""
    own = world / "run" / "results"
    changed = [p.name for p in path.iterdir() if _differs(p, own / p.name)]
    for name in sorted(changed) or ["acceptance.by_position"]:
        one = path / name
        found = Result.load(one)
        storage.write_json(out / "result.json", found.to_json())
        assert found._repr_mimebundle_()["text/plain"]


def _differs(a: Path, b: Path) -> bool:
    names = {p.name for folder in (a, b) for p in folder.glob("*")}
    return any(
        not (a / name).is_file() or not (b / name).is_file() or not filecmp.cmp(a / name, b / name)
        for name in names
    )


def _run(world: Path, to: Path) -> Path:
    shutil.copytree(world / "run", to / "run")
    return to / "run"


def resume(path: Path, world: Path, out: Path) -> None:
    """The verb ``report`` on a folder in which all is there, but for the notebooks and figures."""
    from dflash_diag import report, views

    run = Run.open(_config(world, path))
    found = run.compute()
    storage.write_json(out / "summary.json", report.summary(run, found))
    storage.atomic_write(out / "junit.xml", report.junit(found))
    _printable(views.score_text(run))


def _finished(world: Path, to: Path) -> Path:
    (to / "run").mkdir()
    for name in ("run.json", "summary.json"):
        shutil.copy(world / "run" / name, to / "run")
    return to / "run"


def compare(path: Path, world: Path, out: Path) -> None:
    """The verb ``compare`` on finished runs."""
    from dflash_diag import compare_runs, views

    config = RunConfig(beside=(str(path), str(world / "run")), out=str(out), draws=DRAWS)
    found = compare_runs.compare(config)
    storage.write_json(out / "compare.json", found)
    _printable(views.compare_text(found))


def _watched(world: Path, to: Path) -> Path:
    folder = to / "watched"
    for name in ("step_1-a", "step_2-b"):
        (folder / "runs" / name / "results").mkdir(parents=True)
        shutil.copy(world / "run" / "summary.json", folder / "runs" / name)
        (folder / "runs" / name / "index.html").write_text("<p>report</p>")
        shutil.copytree(
            world / "run" / "results" / "doctor.causes",
            folder / "runs" / name / "results" / "doctor.causes",
        )
        out = folder / "runs" / name
        row = row_of(out, beside=folder, written=datetime(2026, 1, 1, tzinfo=UTC))
        append(folder / "history.parquet", replace(row, name=name[:6], step=int(name[5])))
    (folder / "logs").mkdir()
    (folder / "logs" / "step_3.log").write_text("error: cut short\n")
    seen = {f"/x/step_{i}": _seen(i, stage) for i, stage in enumerate(STAGES, 1)}
    content = {"schema": "dflash_diag.watch_state/1", "inputs": "x", "seen": seen}
    storage.write_json(folder / "watch.json", content)
    return folder


STAGES = ("done", "done", "unreadable", "waiting")


def _seen(i: int, stage: str) -> dict[str, Any]:
    name = f"step_{i}"
    return {
        "name": name,
        "signature": "x",
        "since": "2026-01-01T00:00:00+00:00",
        "stage": stage,
        "run_id": f"{name}-{'ab'[i - 1]}" if i < 3 else "",
        "capture": "",
        "step": i,
        "attempts": 1,
        "error": "cut short" if stage == "unreadable" else "",
    }


def overview(path: Path, world: Path, out: Path) -> None:
    """The page over all checkpoints of a watched folder, and what is told of the newest."""
    from dflash_diag.executors import Local
    from dflash_diag.results import Verdict
    from dflash_diag.watch.regression import Rule
    from dflash_diag.watch.watching import Settings, Watching, sentence

    config, rule = RunConfig(capture=str(world / "capture")), Rule("reference", draws=DRAWS)
    settings = Settings(where=str(world), out=path, once=True, rule=rule)
    with Local(1) as local:
        watching = Watching(config, settings, local)
        storage.write_json(out / "watch.json", watching.to_json())
        for row in watching.rows:
            _printable(sentence(row, watching.regression(row), watching.page(row)))
        watching.alarms(Verdict)
        watching.overview().html()
    for folder in sorted((path / "runs").iterdir()):
        row_of(folder, beside=path, written=datetime(2026, 1, 1, tzinfo=UTC))


def _lab(world: Path, to: Path) -> Path:
    from dflash_diag import lab

    (to / "run").mkdir()
    lab.write(Run.open(_config(world, to / "run")))
    return to / "run"


def open_lab(path: Path, world: Path, out: Path) -> None:
    """The verb ``lab`` on notebooks that somebody has changed."""
    from dflash_diag import lab

    lab.write(Run.open(_config(world, path)))


def _printable(text: str) -> None:
    """Fail where a text could steer a terminal."""
    assert text.replace("\n", "").replace("\xa0", "").isprintable(), text


# --- a server's answers ---------------------------------------------------------------------------


def _answers(world: Path, to: Path) -> Path:
    """What a server says, request by request: its models, a page, and completions."""
    (to / "answers").mkdir()
    choice = {"index": 0, "finish_reason": "length", "text": "ab", "token_ids": [65, 66]}
    pages = {
        "models": {"data": [{"id": "tiny", "owned_by": "vllm"}]},
        "version": {"version": "1.2"},
        "completion": {
            "model": "tiny",
            "choices": [choice],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2},
        },
    }
    for name, page in pages.items():
        (to / "answers" / f"{name}.json").write_text(json.dumps(page))
    (to / "answers" / "head.http").write_bytes(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nRetry-After: 0\r\n"
    )
    return to / "answers"


def ask(path: Path, world: Path, out: Path) -> None:
    """Ask a server that gives these answers for a continuation."""
    asked = servers.Asked("p0", (1, 2, 3), "abc", 2, tiny_world.VOCABULARY, frozenset({0}))
    with Serving(path) as port, servers.Server(f"http://127.0.0.1:{port}", timeout=1.5) as server:
        server.open(asked)
        found = server.complete(asked)
        storage.write_json(out / "served.json", {**found.to_json(), **server.facts()})


class Serving:
    """A socket that answers every request with the bytes of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> int:
        self.thread.start()
        return int(self.socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join(5)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection:
                try:
                    connection.settimeout(1)
                    self._answer(connection)
                except OSError:
                    continue

    def _answer(self, connection: socket.socket) -> None:
        request = connection.recv(2**16)
        names = {b"/v1/models": "models", b"/version": "version", b"_info": "version"}
        name = next((n for path, n in names.items() if path in request[:60]), "completion")
        body = self._bytes(f"{name}.json")
        head = self._bytes("head.http")
        if b"Content-Length" not in head:
            head += b"Content-Length: %d\r\n" % len(body)
        connection.sendall(head + b"Connection: close\r\n\r\n" + body)

    def _bytes(self, name: str) -> bytes:
        file = self.folder / name
        return file.read_bytes() if file.is_file() else b""


KINDS = {
    kind.name: kind
    for kind in (
        Kind("checkpoint folder", 16, _drafter, read_drafter),
        Kind("sharded checkpoint", 4, _shards, read_drafter),
        Kind("training file", 18, _training_file, read_drafter),
        Kind("static audit", 2, _drafter, audit_drafter),
        Kind("capture", 16, _capture, read_capture, mend=mend_capture),
        Kind("dump, safetensors", 5, _dump, read_dump),
        Kind("dump, torch.save", 8, _torch_dump, read_dump),
        Kind("target that lends", 4, _target, read_lent, ("config.json", "*.safetensors")),
        Kind("prompts", 8, _prompts, read_prompt_file),
        Kind("served output", 4, _served, read_served_output),
        Kind("log, CSV", 3, _csv_log, read_a_log),
        Kind("log, W&B chart", 2, _wandb_chart, read_a_log),
        Kind("log, JSON lines", 3, _json_lines_log, read_a_log),
        Kind("log, W&B history", 2, _wandb_history, read_a_log),
        Kind("log, trainer's state", 2, _trainer_state, read_a_log),
        Kind("log, TensorBoard", 3, _events, read_a_log),
        Kind("training sequences, JSON lines", 3, _sequences_json, read_texts),
        Kind("training sequences, safetensors", 3, _sequences_tensors, read_texts),
        Kind("history", 4, _history, read_a_history),
        Kind("options", 3, _options, read_options),
        Kind("a server's answers", 4, _answers, ask, spared=frozenset({"file"})),
        Kind("score, drafter", 1, _drafter, score),
        Kind("score, capture", 1, _capture, score, mend=mend_capture),
        Kind("target", 1, _target, load_target),
        Kind("target, GGUF", 3, _gguf, load_gguf),
        Kind("chat template", 1, _chat, render_chat, ("*.jinja",)),
        Kind("chat template in settings", 1, _chat_in_settings, render_chat, ("*_config.json",)),
        Kind("results", 2, _results, read_results, mend=mend_result),
        Kind("run folder, resumed", 2, _run, resume, mend=mend_result),
        Kind("run folder, compared", 4, _finished, compare),
        Kind("watched folder", 2, _watched, overview),
        Kind("notebooks of lab", 2, _lab, open_lab, ("lab/*.ipynb",)),
    )
}
"""In the order of the table."""

__all__ = ["KINDS", "DiagError", "Kind", "write_world"]
