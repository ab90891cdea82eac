"""A watched folder: checkpoints appear, grow, are replaced, break, vanish; the watch is stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import watched
from receiver import never_answering, receiver

from dflash_diag import cli
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput, OutputError
from dflash_diag.executors import Local
from dflash_diag.history import read_history
from dflash_diag.watch import watching as module_of_watching
from dflash_diag.watch.regression import Rule
from dflash_diag.watch.watching import Settings, Watching
from dflash_diag.watch.webhook import MOST, Webhook

GOOD = [[3, 3], [3, 4], [2, 3], [4, 3]]
WORSE = [[1, 2], [2, 2], [1, 1], [2, 3]]


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    from dflash_diag.watch import commands, identity

    for module, name in ((identity, "command"), (commands, "report_in_parts")):
        monkeypatch.setattr(module, name, getattr(module, name))
    watched.install()


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "checkpoints"
    made.mkdir()
    return made


@pytest.fixture
def watching(folder, tmp_path):
    """Makes a watch; ``(kind, name)`` of all its news with `run`."""

    def make(jobs=1, webhook=None, **changes) -> Watching:
        given = {"where": str(folder), "out": tmp_path / "out", "settle": 0.2, "every": 0.1}
        given |= {"once": True, "rule": Rule(draws=2000)} | changes
        config = RunConfig(capture=str(tmp_path / "capture"))
        return Watching(config, Settings(**given), Local(jobs), webhook)

    return make


def run(watch: Watching) -> list[tuple[str, str]]:
    return [(one.kind, one.name) for one in watch.news()]


def until(watch: Watching, enough) -> list[tuple[str, str]]:
    """News of a watch without end, up to the first that is enough; fails after 20 s."""
    news, end = [], time.monotonic() + 20
    with closing(watch.news()) as told:
        for one in told:
            news.append((one.kind, one.name))
            if enough(news):
                return news
            assert time.monotonic() < end, news
    raise AssertionError(news)


def test_each_checkpoint_is_measured_once(watching, folder, tmp_path):
    for step in (900, 1000, 20):
        watched.write(folder / f"step_{step}.pt", [*GOOD, [step % 7 + 1]], step=step)
    (folder / "notes.txt").write_text("not a checkpoint")
    (folder / "optimizer.pt").write_text("nor is this")
    assert run(watching()) == [
        (kind, name)
        for name in ("step_20", "step_900", "step_1000")
        for kind in ("started", "finished")
    ]
    rows = read_history(tmp_path / "out" / "history.parquet")
    assert [(row.name, row.step, row.n_prompts) for row in rows] == [
        ("step_20", 20, 5), ("step_900", 900, 5), ("step_1000", 1000, 5)
    ]  # fmt: skip
    assert all((tmp_path / "out" / row.out / "index.html").is_file() for row in rows)
    assert run(watching()) == []
    assert len(read_history(tmp_path / "out" / "history.parquet")) == 3


def test_again_measures_again(watching, folder, tmp_path):
    watched.write(folder / "a.pt", GOOD)
    run(watching())
    assert run(watching(again=True)) == [("started", "a"), ("finished", "a")]
    assert len(read_history(tmp_path / "out" / "history.parquet")) == 1


def test_a_file_that_grows_is_left_alone_until_it_has_stopped(watching, folder):
    whole = json.dumps({"rounds": GOOD}).encode()

    def grow():
        with (folder / "slow.pt").open("wb", buffering=0) as file:
            for i in range(0, len(whole), 4):
                file.write(whole[i : i + 4])
                time.sleep(0.08)

    writer = threading.Thread(target=grow)
    writer.start()
    while not (folder / "slow.pt").exists():
        time.sleep(0.01)
    assert run(watching(settle=0.3)) == [("growing", "slow")]
    assert until(watching(settle=0.3, once=False), lambda news: len(news) == 2) == [
        ("started", "slow"), ("finished", "slow")
    ]  # fmt: skip
    assert not writer.is_alive()
    writer.join()


def test_checkpoints_that_appear_are_found(watching, folder):
    watched.write(folder / "step_1.pt", GOOD)

    def enough(news):
        if news == [("started", "step_1"), ("finished", "step_1")]:
            part = watched.write(folder / ".step_2.pt", WORSE)
            part.rename(folder / "step_2.pt")
        return ("finished", "step_2") in news

    assert len(until(watching(once=False), enough)) == 4


def test_a_replaced_checkpoint_is_a_new_one(watching, folder, tmp_path):
    watched.write(folder / "latest.pt", GOOD)
    run(watching())
    watched.write(folder / "latest.pt", WORSE)
    found = watching()
    assert run(found) == [("started", "latest"), ("finished", "latest")]
    rows = read_history(tmp_path / "out" / "history.parquet")
    assert [row.tau_walked for row in rows] == [25 / 8, 14 / 8]
    assert rows[0].out != rows[1].out
    assert found.newest() == rows[1]
    assert found.regression(rows[1]).verdict.name == "FAIL"


def test_a_checkpoint_replaced_while_it_is_measured_counts_for_nothing(watching, folder, tmp_path):
    watched.write(folder / "latest.pt", WORSE, do="slow")

    def enough(news):
        if news[-1] == ("started", "latest") and len(news) == 1:
            time.sleep(0.3)
            watched.write(folder / "latest.pt", GOOD)
        return ("finished", "latest") in news

    assert until(watching(once=False), enough) == [
        ("started", "latest"), ("growing", "latest"), ("started", "latest"), ("finished", "latest")
    ]  # fmt: skip
    (row,) = read_history(tmp_path / "out" / "history.parquet")
    assert row.tau_walked == 25 / 8
    assert [path.name for path in (tmp_path / "out" / "runs").iterdir()] == [row.run_id]


def test_the_page_over_all_is_there_from_the_start_and_up_to_date_at_each_news(
    watching, folder, tmp_path
):
    page = tmp_path / "out" / "index.html"
    run(watching())
    assert "No checkpoint has been measured yet" in page.read_text()
    watched.write(folder / "step_1.pt", GOOD * 7, step=1)
    watched.write(folder / "step_2.pt", WORSE * 7, step=2)
    (folder / "step_3.pt").write_text("garbage")
    seen = {}
    for one in watching().news():
        seen[one.kind, one.name] = page.read_text()
    assert "it is truncated or corrupted" in seen["unreadable", "step_3"]
    assert "Still to be measured: step_2." in seen["finished", "step_1"]
    last = seen["finished", "step_2"]
    assert "<h1>step_2 is worse than step_1</h1>" in last
    assert "Still to be measured" not in last
    assert page.read_text() == last
    for row in read_history(tmp_path / "out" / "history.parquet"):
        assert f'<a href="{row.out}/index.html">{row.name}</a>' in last


def test_a_corrupt_one_is_told_of_once_and_tried_again_when_it_changes(watching, folder):
    watched.write(folder / "step_2.pt", GOOD)
    (folder / "step_1.pt").write_text('{"rounds": [[1, ')
    first = watching()
    assert run(first) == [
        ("unreadable", "step_1"), ("started", "step_2"), ("finished", "step_2")
    ]  # fmt: skip
    assert first.state.seen[str(folder / "step_1.pt")].error == "it is truncated or corrupted"
    assert run(watching()) == []
    watched.write(folder / "step_1.pt", WORSE)
    assert run(watching()) == [("started", "step_1"), ("finished", "step_1")]


def test_a_failed_report_is_tried_once_more(watching, folder, tmp_path):
    watched.write(folder / "a.pt", GOOD, do="fail once")
    watched.write(folder / "b.pt", GOOD, do="fail")
    watch = watching()
    assert run(watch) == [
        ("started", "a"), ("failed", "a"), ("started", "a"), ("finished", "a"),
        ("started", "b"), ("failed", "b"), ("started", "b"), ("failed", "b"),
    ]  # fmt: skip
    failed = watch.state.seen[str(folder / "b.pt")]
    assert (failed.stage, failed.error) == ("failed", "02_acceptance, cell 3: out of memory")
    log = (tmp_path / "out" / "logs" / "b.log").read_text()
    assert log.count("Traceback and all that") == 2
    pending = watch.to_json()["pending"]
    assert pending == [{"name": "b", "stage": "failed", "error": failed.error}]
    assert run(watching()) == []
    assert run(watching(again=True))[-1] == ("failed", "b")


def test_a_full_disk_ends_the_watch_and_is_no_fault_of_the_checkpoint(watching, folder):
    watched.write(folder / "a.pt", GOOD)
    watched.write(folder / "b.pt", GOOD * 2, do="full")
    (folder / "full").touch()
    for _ in range(3):  # no number of reruns makes it one that failed
        with pytest.raises(OutputError, match="cannot write .*: the disk is full; free some space"):
            run(watching())
    (folder / "full").unlink()
    assert run(watching()) == [("started", "b"), ("finished", "b")]


def test_one_that_vanishes_is_no_crash(watching, folder):
    watched.write(folder / "a.pt", GOOD, do="slow")
    watched.write(folder / "b.pt", GOOD)

    def enough(news):
        if news[-1] == ("started", "a"):
            (folder / "a.pt").unlink()
        return ("finished", "b") in news

    assert until(watching(once=False), enough) == [
        ("started", "a"), ("gone", "a"), ("started", "b"), ("finished", "b")
    ]  # fmt: skip
    (folder / "b.pt").unlink()
    assert run(watching()) == []


def running_reports(out: Path) -> list[str]:
    """Reports in a folder that are being made."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            line = (process / "cmdline").read_bytes().decode("utf-8", "replace")
            found += [line] if process.name.isdigit() and f"report\0{out}" in line else []
    return found


def test_the_same_content_under_another_name_is_the_same_run(watching, folder):
    watched.write(folder / "step_1.pt", GOOD)
    run(watching())
    shutil.copy(folder / "step_1.pt", folder / "latest.pt")
    watch = watching()
    assert run(watch) == [("same", "latest")]
    assert watch.newest().name == "step_1"
    assert run(watching()) == []


def test_several_at_a_time(watching, folder):
    for name in "abc":
        watched.write(folder / f"{name}.pt", [*GOOD, [ord(name)]], do="slow")
    news = run(watching(jobs=3))
    assert [kind for kind, _ in news[:3]] == ["started"] * 3
    assert {kind for kind, _ in news[3:]} == {"finished"}
    assert {name for _, name in news[3:]} == set("abc")


def test_a_checkpoint_that_was_done_before_its_predecessor_is_told_of_again(watching, folder):
    watched.write(folder / "step_1.pt", GOOD, do="slow")
    watched.write(folder / "step_2.pt", WORSE)
    told = [one for one in watching(jobs=2).news() if one.kind == "finished"]
    assert [one.name for one in told] == ["step_2", "step_1", "step_2"]
    assert "worse than" not in told[0].text
    assert "worse than step_1" in told[2].text


def test_two_watches_do_not_share_a_folder(watching, folder):
    watched.write(folder / "a.pt", GOOD)
    with closing(watching().news()) as first:
        assert next(first).kind == "started"
        with pytest.raises(OutputError, match="another watch is at work in"):
            run(watching())


def test_a_lost_history_is_read_again_from_the_runs(watching, folder, tmp_path):
    watched.write(folder / "a.pt", GOOD)
    run(watching())
    history = tmp_path / "out" / "history.parquet"
    before = read_history(history)
    history.write_bytes(b"broken")
    with pytest.raises(BadInput, match=r"history.parquet is not a history, or damaged"):
        watching()
    history.unlink()
    assert run(watching()) == [("finished", "a")]
    assert [row.run_id for row in read_history(history)] == [row.run_id for row in before]


def test_other_inputs_make_other_runs(watching, folder, tmp_path):
    watched.write(folder / "a.pt", GOOD)
    watch = watching()
    run(watch)
    seen = json.loads((tmp_path / "out" / "watch.json").read_text())["seen"]
    assert {one["stage"] for one in seen.values()} == {"done"}
    (tmp_path / "capture").write_text("now it is there")
    # The stand-in names its runs by the checkpoint alone, so it is looked at and found done.
    again = watching()
    assert {one.stage for one in again.state.seen.values()} == {"settling"}
    assert run(again) == []


def test_links_lead_to_the_report(watching, folder, tmp_path):
    watched.write(folder / "a.pt", GOOD)
    local = watching()
    run(local)
    page = local.to_json()["checkpoints"][0]["page"]
    assert Path(page.removeprefix("file://")).read_text() == "<p>report</p>"
    served = watching(page_url="https://ci.example/drafters/")
    row = served.rows[0]
    assert served.page(row) == f"https://ci.example/drafters/{row.out}/index.html"


@pytest.mark.allow_hosts("127.0.0.1")
def test_somebody_is_told(watching, folder, tmp_path):
    watched.write(folder / "step_1.pt", GOOD * 7, step=1)
    watched.write(folder / "step_2.pt", WORSE * 7, step=2)
    with receiver(200) as (address, got):
        hook = Webhook(f"http://me:secret@{address}/T/B/key")
        told = list(watching(webhook=hook, page_url="https://ci.example").news())
    first, second = (value for _, _, value in got)
    assert [one["name"] for one in (first, second)] == ["step_1", "step_2"]
    assert first["regression"] is None
    assert second["regression"]["verdict"] == "FAIL"
    assert second["tau"]["value"] == 14 / 8
    assert second["page"] == f"https://ci.example/runs/{second['run_id']}/index.html"
    assert second["text"] == next(one.text for one in reversed(told) if one.kind == "finished")
    watched.write(folder / "step_3.pt", GOOD, step=3)
    (*_, last) = watching(webhook=hook).news()  # nobody listens any more
    assert (last.kind, last.text) == (
        "untold", "127.0.0.1 was not told: not reached (ConnectError), 3 times"
    )  # fmt: skip
    kept = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(b"secret" in path.read_bytes() or b"key" in path.read_bytes() for path in kept)


@pytest.mark.allow_hosts("127.0.0.1")
def test_who_does_not_answer_holds_nothing_up(watching, folder, monkeypatch):
    monkeypatch.setattr(module_of_watching, "LAST_S", 0.2)
    for step in range(4):
        watched.write(folder / f"step_{step}.pt", GOOD * (step + 1), step=step)
    with never_answering() as address:
        start = time.monotonic()
        told = run(watching(webhook=Webhook(f"http://{address}/", timeout=60)))
        assert time.monotonic() - start < 50
    names = [f"step_{step}" for step in range(4)]
    assert [name for kind, name in told if kind == "finished"] == names
    assert told[-4:] == [("untold", name) for name in names]


@pytest.mark.allow_hosts("127.0.0.1")
def test_messages_that_cannot_be_sent_do_not_pile_up():
    with never_answering() as address:
        hook = Webhook(f"http://{address}/", timeout=20)
        posts = [hook.post({}) for _ in range(MOST + 2)]
        assert posts[-1].result(0) == f"{MOST} messages are waiting already"
        assert not posts[0].done()


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(folder, tmp_path, capsys):
    def call(*more):
        given = ["watch", folder, "--capture", tmp_path / "capture", "--out", tmp_path / "out"]
        given += ["--settle", "0.2", "--every", "0.1", *more]
        code = cli.run([str(one) for one in given])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_a_regression_is_the_exit_code(command, folder, tmp_path):
    many = 7
    watched.write(folder / "step_1.pt", GOOD * many, step=1)
    code, out, _ = command("--once", "--fail-on", "fail")
    assert code == 0
    assert out.startswith("✓ PASS step_1; tau 3.12 [3.02, 3.23]; file:///")
    watched.write(folder / "step_2.pt", WORSE * many, step=2)
    code, out, err = command("--once", "--fail-on", "fail", "--json", tmp_path / "w.json")
    assert code == 1
    assert "step_2" in out
    assert "✗ worse than step_1 (-1.38 [" in out
    assert "--fail-on met: step_2 is worse than step_1 (-1.38" in err
    found = json.loads((tmp_path / "w.json").read_text())
    assert (found["newest"], found["regression"]["verdict"]) == ("step_2", "FAIL")
    assert [one["regression"] is None for one in found["checkpoints"]] == [True, False]
    # The same question has the same answer, though nothing is left to do.
    assert command("--once", "--fail-on", "fail")[:2] == (1, "")
    assert command("--once")[0] == 0
    assert command("--once", "--fail-on", "fail", "--margin", "2")[0] == 0
    assert command("--once", "--fail-on", "warn", "--margin", "2")[0] == 1
    assert command("--once", "--fail-on", "fail", "--regression", "reference")[0] == 1


@pytest.mark.allow_hosts("127.0.0.1")
def test_without_once_a_regression_ends_the_watch(command, folder):
    watched.write(folder / "step_1.pt", GOOD * 7, step=1)
    watched.write(folder / "step_2.pt", WORSE * 7, step=2)
    watched.write(folder / "step_3.pt", GOOD * 7, step=3)
    timer = threading.Timer(3, watched.write, (folder / "step_4.pt", WORSE * 7), {"step": 4})
    timer.start()
    with receiver(200) as (address, got):
        code, out, _ = command("--fail-on", "fail", "--webhook", f"http://{address}/")
    assert code == 1
    # step_2 was worse as well, but by then it was not the newest any more.
    assert [line.split(";")[0] for line in out.splitlines()] == [
        f"✓ PASS step_{i}" for i in (1, 2, 3, 4)
    ]
    assert [value["name"] for _, _, value in got][-1] == "step_4"


def test_what_could_not_be_measured_is_no_success(command, folder):
    (folder / "step_1.pt").write_text("garbage")
    code, out, err = command("--once", "--fail-on", "fail")
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "unreadable: step_1: it is truncated or corrupted",
        "--fail-on met: step_1 was not measured: it is truncated or corrupted",
    ]
    assert command("--once")[0] == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--regression", "first"],
            "--regression first; expected one of previous, best, reference",
        ),
        (["--margin", "-1"], "--margin -1"),
        (["--settle", "-1"], "--settle -1; expected seconds"),
        (["--jobs", "-1"], "--jobs -1"),
        (["--executor", "slurm"], "--executor slurm; expected local or ray"),
        (["--webhook", "nonsense"], "--webhook names no host"),
        (["--fail-on", "often"], "--fail-on often"),
    ],
)
def test_bad_options_are_one_line(command, tmp_path, options, said):
    code, out, err = command("--once", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
    assert not (tmp_path / "out").exists()


def test_no_folder(command, folder, tmp_path):
    folder.rmdir()
    code, _, err = command("--once")
    assert code == 2
    assert f"{folder} is no folder" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stopped_watch_leaves_nothing_running_and_resumes(folder, tmp_path, how):
    watched.write(folder / "a.pt", GOOD)
    watched.write(folder / "b.pt", GOOD * 2, do="hang once")
    code = "import sys, watched; watched.install(); from dflash_diag import cli; cli.main()"
    arguments = [sys.executable, "-c", code, "watch", folder, "--capture", tmp_path / "capture"]
    arguments += ["--out", tmp_path / "out", "--settle", "0.2", "--every", "0.2"]
    paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [str(one) for one in arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.startswith("started: b"):
            break
    tried = tmp_path / "out" / "runs"
    while not list(tried.glob("b-*/tried")):
        time.sleep(0.02)
    assert running_reports(tmp_path / "out")
    process.send_signal(how)
    out, err = process.communicate(timeout=20)
    assert out.startswith("✓ PASS a;")
    if how == signal.SIGKILL:
        end = time.monotonic() + 20
        while running_reports(tmp_path / "out"):  # they notice by themselves
            assert time.monotonic() < end
            time.sleep(0.05)
    else:
        assert process.returncode == 3
        assert err.strip() == "stopped: interrupted; resume with the same command"
        assert not running_reports(tmp_path / "out")
    done = subprocess.run(
        [str(one) for one in [*arguments, "--once"]],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split(";")[0]) == (0, "✓ PASS b")
    assert "a" not in [line.split(": ")[1] for line in done.stderr.splitlines()]
