"""The parts of a watch: what lies there, whether it has settled, what is remembered and told."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from receiver import receiver

from dflash_diag import cli
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput
from dflash_diag.history import Row
from dflash_diag.results import Verdict
from dflash_diag.watch import commands, finding, settling, webhook
from dflash_diag.watch.regression import Rule, in_order, regression
from dflash_diag.watch.state import Seen, State
from dflash_diag.watch.webhook import Webhook, webhook_of

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


# --- finding --------------------------------------------------------------------------------------


def names(where) -> list[str]:
    return [one.name for one in finding.find(str(where))]


def test_checkpoints_of_a_folder(tmp_path):
    touch(
        tmp_path / "step_1000" / "model.safetensors",
        tmp_path / "step_900" / "model.safetensors.index.json",
        tmp_path / "step_900" / "model-00001-of-00002.safetensors",
        tmp_path / "step_20.pt",
        tmp_path / "config.json",
        tmp_path / "optimizer.pt",
        tmp_path / "logs" / "train.txt",
        tmp_path / "raw" / "state.pth",
        tmp_path / ".step_1100.pt",
        tmp_path / ".tmp" / "model.safetensors",
        tmp_path / "deep" / "run" / "model.safetensors",
    )
    (tmp_path / "empty.pt").mkdir()
    assert names(tmp_path) == ["raw", "step_20", "step_900", "step_1000"]
    (tmp_path / "model.safetensors").touch()
    assert names(tmp_path) == sorted(
        ["raw", "step_900", "step_1000", tmp_path.name], key=finding.natural
    )


def test_checkpoints_that_match_a_pattern(tmp_path, monkeypatch):
    touch(
        tmp_path / "a" / "step_10" / "draft" / "model.safetensors",
        tmp_path / "b" / "step_9" / "draft" / "model.safetensors",
        tmp_path / "b" / "step_9" / "draft" / "config.json",
        tmp_path / "b" / "last.pt",
    )
    assert names(tmp_path / "*" / "*" / "draft") == ["a/step_10/draft", "b/step_9/draft"]
    assert names(tmp_path / "b" / "*") == ["last"]
    assert names(tmp_path / "**" / "*.pt") == ["b/last"]
    assert names(tmp_path / "nothing*") == []
    monkeypatch.chdir(tmp_path)
    assert names("b/*.pt") == ["last"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(BadInput, match=r"nowhere is no folder; expected a folder of checkpoints"):
        finding.find(str(tmp_path / "nowhere"))


# --- settling -------------------------------------------------------------------------------------


def test_every_change_of_a_checkpoint_shows(tmp_path):
    folder = tmp_path / "step"
    touch(folder / "model.safetensors", folder / "config.json")
    marks = [settling.signature(folder)]
    assert settling.signature(folder) == marks[0]
    stat = (folder / "config.json").stat()
    (folder / "config.json").write_bytes(b"y")  # same size, and the old time put back
    os.utime(folder / "config.json", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    marks.append(settling.signature(folder))
    touch(folder / "training_args.json")
    marks.append(settling.signature(folder))
    assert len(set(marks)) == 3
    touch(folder / "sub" / "other")
    assert settling.signature(folder) == marks[-1]


def test_a_file_changes_with_its_settings(tmp_path):
    path = tmp_path / "step_1.pt"
    touch(path)
    alone = settling.signature(path)
    touch(tmp_path / "step_2.pt")
    assert settling.signature(path) == alone
    touch(tmp_path / "config.json")
    assert settling.signature(path) != alone


def test_what_is_gone_has_no_signature(tmp_path):
    assert settling.signature(tmp_path / "gone") is None
    assert settling.written(tmp_path / "gone") is None
    (tmp_path / "dangling.pt").symlink_to(tmp_path / "gone")
    assert settling.signature(tmp_path / "dangling.pt") is None


def test_when_it_was_written(tmp_path):
    touch(tmp_path / "d" / "model.safetensors", tmp_path / "d" / "config.json")
    os.utime(tmp_path / "d" / "model.safetensors", (NOON.timestamp(),) * 2)
    os.utime(tmp_path / "d" / "config.json", (NOON.timestamp() - 60,) * 2)
    assert settling.written(tmp_path / "d") == NOON


# --- state ----------------------------------------------------------------------------------------


def test_the_state_comes_back_and_what_was_under_way_is_taken_up(tmp_path):
    state = State("inputs")
    state.seen["/a"] = Seen("a", "s", NOON, "done", "a-1", step=3)
    state.seen["/b"] = Seen("b", "s", NOON, "running", "b-1", attempts=1)
    state.write(tmp_path)
    back = State.read(tmp_path, "inputs")
    assert (state.known, back.known) == (False, True)
    assert back.seen["/a"] == state.seen["/a"]
    assert (back.seen["/b"].stage, back.seen["/b"].attempts) == ("settling", 0)
    assert {one.stage for one in State.read(tmp_path, "others").seen.values()} == {"settling"}


@pytest.mark.parametrize(
    "content", ["{", '{"schema": "dflash_diag.watch_state/1"}', '{"schema": "x", "seen": {}}', "[]"]
)
def test_a_damaged_state_is_named(tmp_path, content):
    (tmp_path / "watch.json").write_text(content)
    with pytest.raises(BadInput, match=r"watch\.json"):
        State.read(tmp_path, "inputs")


# --- regressions ----------------------------------------------------------------------------------


def a_row(name: str, tokens: list[int], *, hour: int = 0, step: int | None = None, **more) -> Row:
    n = len(tokens)
    fields = {
        "run_id": f"{name}-1",
        "name": name,
        "checkpoint": f"/{name}",
        "step": step,
        "written": NOON + timedelta(hours=hour),
        "finished": NOON + timedelta(hours=hour + 1),
        "verdict": "PASS",
        "cause": "",
        "tau_walked": sum(tokens) / (10 * n),
        "tau_walked_lo": None,
        "tau_walked_hi": None,
        "tau_uniform": 1.0,
        "n_prompts": n,
        "capture": "c0ffee",
        "out": f"runs/{name}-1",
        "ids": tuple(f"p{i}" for i in range(n)),
        "tokens": tuple(tokens),
        "rounds": (10,) * n,
    }
    return Row(**fields | more)


BASE = [20 + i % 5 for i in range(30)]


def against(row: Row, rows: list[Row], **rule) -> tuple[str, Verdict] | None:
    found = regression(row, rows, Rule(draws=2000, **rule), Path("/"))
    return None if found is None else (found.against, found.verdict)


@pytest.mark.parametrize(
    ("shift", "verdict"),
    [
        ([0] * 30, Verdict.PASS),
        ([3] * 30, Verdict.PASS),
        # Every prompt loses 0.2 tokens a round: certain, however much prompts differ.
        ([-2] * 30, Verdict.FAIL),
        # Half of them lose 0.1: 0.05 [0.03, 0.07] is a loss, and not surely more than 0.05.
        ([-1, 0] * 15, Verdict.WARN),
        ([-5, 5] * 15, Verdict.INCONCLUSIVE),
    ],
)
def test_the_whole_interval_decides(shift, verdict):
    old = a_row("old", BASE)
    new = a_row("new", [a + b for a, b in zip(BASE, shift, strict=True)], hour=1)
    assert against(new, [old, new]) == ("old", verdict)


def test_what_it_is_compared_with():
    rows = [
        a_row("step_1", [t + 5 for t in BASE], hour=3, step=1),
        a_row("step_2", BASE, hour=1, step=2),
        a_row("step_3", BASE, hour=2, step=3),
    ]
    assert against(rows[2], rows) == ("step_2", Verdict.PASS)
    assert against(rows[2], rows, against="best") == ("step_1", Verdict.FAIL)
    assert against(rows[0], rows) is None
    assert [row.name for row in in_order(rows)] == ["step_1", "step_2", "step_3"]
    # Where one has no step, the order is that in which they were written.
    final = a_row("final", BASE, hour=9)
    assert [row.name for row in in_order([final, *rows])] == [
        "step_2", "step_3", "step_1", "final"
    ]  # fmt: skip


def test_other_texts_and_other_prompts_are_not_compared():
    old = a_row("old", BASE)
    assert against(a_row("new", BASE, hour=1, capture="other"), [old]) is None
    ids = tuple(f"q{i}" for i in range(30))
    assert against(a_row("new", BASE, hour=1, ids=ids), [old]) is None
    few = a_row("new", [t - 2 for t in BASE[:5]], hour=1)
    found = regression(few, [old], Rule(draws=2000), Path("/"))
    assert (found.delta.n, found.verdict) == (5, Verdict.FAIL)


def test_the_sentence_has_the_numbers():
    old = a_row("old", BASE)
    new = a_row("new", [t - 2 for t in BASE], hour=1)
    found = regression(new, [old, new], Rule(draws=2000), Path("/"))
    assert found.sentence == "worse than old (-0.20 [-0.20, -0.20])"
    assert found.to_json()["delta_tau"] == pytest.approx({"value": -0.2, "lo": -0.2, "hi": -0.2})
    one = regression(a_row("new", BASE[:1], hour=1), [old], Rule(draws=2000), Path("/"))
    assert (one.verdict, one.sentence) == (Verdict.INCONCLUSIVE, "perhaps worse than old (+0.00)")
    open_ = a_row("new", [a + b for a, b in zip(BASE, [-5, 5] * 15, strict=True)], hour=1)
    found = regression(open_, [old], Rule(draws=2000), Path("/"))
    assert found.n_more > 100
    assert f"needs {found.n_more} more prompts" in found.sentence


def test_the_reference_is_that_of_the_same_run(tmp_path):
    row = a_row("new", BASE)
    summary = {
        "drafters": {"drafter": "new", "reference": "theirs"},
        "scores": {"reference": {"per_prompt": [
            {"id": f"p{i}", "rounds": [3] * 10} for i in range(30)
        ]}},
    }  # fmt: skip
    (tmp_path / row.out).mkdir(parents=True)
    (tmp_path / row.out / "summary.json").write_text(json.dumps(summary))
    found = regression(row, [row], Rule("reference", draws=2000), tmp_path)
    assert (found.against, found.verdict) == ("theirs", Verdict.FAIL)
    assert found.delta.value == pytest.approx(sum(BASE) / 300 - 3)
    summary["scores"] = {"drafter": {}}
    (tmp_path / row.out / "summary.json").write_text(json.dumps(summary))
    assert regression(row, [row], Rule("reference"), tmp_path) is None


# --- commands -------------------------------------------------------------------------------------

CONFIG = {
    "target": "/t",
    "drafter": "/d",
    "reference": "/r",
    "prompts": "/p.jsonl",
    "max_new_tokens": 64,
    "against": "torch/bfloat16",
    "overrides": ("context_bound=inclusive", "rope_theta=1"),
    "lossless_prompts": 3,
    "served_output": "",
    "claims": ("dds8=3.5", "eval/streak=1"),
    "training_log": "/log.jsonl",
    "training_sequences": "/seqs",
    "training_rows": 8,
    "trained_states": "fla/bfloat16",
    "history": "/h.parquet",
    "step": "/s.py:step",
    "server_timeout": 7.0,
    "chat_template_kwargs": {"enable_thinking": False},
    "layers": "all",
    "device": "cpu",
    "dtype": "bfloat16",
    "backend": "torch",
    "seed": 3,
}


def parsed(command) -> RunConfig:
    """What the command line of a verb amounts to."""
    assert command.arguments[:3] == (sys.executable, "-m", "dflash_diag")
    verb, *options = command.arguments[3:]
    found = typer.main.get_command(cli.app).commands[verb].make_context(verb, options).params
    return RunConfig.read({k: v for k, v in found.items() if k in RunConfig.model_fields})


def test_a_report_is_told_everything(tmp_path):
    config = RunConfig.read(CONFIG).model_copy(update={"capture": "/c"})
    found = parsed(commands.report(config, Path("/out"), tmp_path))
    decided = dict.fromkeys(commands.ONE_TEXT)
    assert found.model_dump(exclude=set(decided)) == config.model_copy(
        update={"out": "/out"}
    ).model_dump(exclude=set(decided))
    defaults = RunConfig().model_dump(include=set(decided))
    assert found.model_dump(include=set(decided)) == defaults


def test_a_capture_is_told_what_it_takes(tmp_path):
    config = RunConfig.read({**CONFIG, "server": "http://me:secret@host:1", "server_model": "m"})
    command = commands.capture(config, Path("/out"), tmp_path)
    found = parsed(command)
    assert found.server == "http://me:secret@host:1"
    taken = {name: getattr(config, name) for name in commands.CAPTURED}
    assert {name: getattr(found, name) for name in taken} == taken
    assert found.claims == ()


def test_shards_come_before_the_report(tmp_path):
    config = RunConfig.read(CONFIG).model_copy(update={"capture": "/c"})
    parts, merge, report = commands.report_in_parts(config, Path("/out"), tmp_path, 2)
    assert [one.arguments[-3:] for one in parts] == [
        ("dflash_diag.shards", "0", "2"), ("dflash_diag.shards", "1", "2")
    ]  # fmt: skip
    assert merge[0].arguments[-2:] == ("merge", "2")
    assert json.loads(parts[0].given)["out"] == "/out"
    assert report == [commands.report(config, Path("/out"), tmp_path)]
    assert commands.report_in_parts(config, Path("/out"), tmp_path, 1) == [report]


# --- the webhook ----------------------------------------------------------------------------------


@pytest.fixture
def short_pauses(monkeypatch):
    monkeypatch.setattr(webhook, "_FIRST_PAUSE_S", 0.01)


@pytest.mark.allow_hosts("127.0.0.1")
def test_a_receiver_gets_the_object(short_pauses):
    with receiver(200) as (address, got):
        assert Webhook(f"http://me:secret@{address}/hook?key=1").tell({"name": "a"}) == ""
    ((path, headers, value),) = got
    assert (path, value) == ("/hook?key=1", {"name": "a"})
    assert headers["Authorization"] == "Basic bWU6c2VjcmV0"
    assert headers["Content-Type"] == "application/json"


@pytest.mark.allow_hosts("127.0.0.1")
@pytest.mark.parametrize(
    ("statuses", "said", "asked"),
    [
        ((503, 429, 204), "", 3),
        ((503,), "status 503, 3 times", 3),
        ((404,), "status 404", 1),
        ((302,), "status 302", 1),
    ],
)
def test_what_may_pass_is_tried_again_and_not_for_ever(short_pauses, statuses, said, asked):
    with receiver(*statuses) as (address, got):
        assert Webhook(f"http://{address}/").tell({}) == said
    assert len(got) == asked


@pytest.mark.allow_hosts("127.0.0.1")
def test_a_receiver_that_hangs_or_is_not_there(short_pauses):
    with receiver(200, pause=5) as (address, _):
        hook = Webhook(f"http://{address}/", timeout=0.1)
        assert hook.tell({}) == "no answer within 0.1 s, 3 times"
    assert hook.tell({}) == "not reached (ConnectError), 3 times"


@pytest.mark.parametrize("url", ["ftp://x/", "http://", "nonsense", "http://me:secret@host:port/"])
def test_no_address(url):
    with pytest.raises(BadInput) as error:
        Webhook(url)
    assert "secret" not in str(error.value)


def test_the_address_may_come_from_the_environment(monkeypatch):
    monkeypatch.delenv(webhook.VARIABLE, raising=False)
    assert webhook_of("") is None
    monkeypatch.setenv(webhook.VARIABLE, "https://me:secret@hooks.example/T/B")
    assert repr(webhook_of("")) == "Webhook(hooks.example)"
    assert webhook_of("http://other/").host == "other"
