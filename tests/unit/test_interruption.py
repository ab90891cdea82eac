"""Runs that are killed, that meet another one at work, or that find the disk full.

The long form, with a table of every kill, is ``tests/benchmarks/interruption.py``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

import killing
import pytest

ONE_PAGE = ["02_acceptance"]


@pytest.fixture(scope="module")
def spawner():
    with killing.Spawner(disks=True) as made:
        yield made


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return killing.write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def undisturbed(spawner, world, tmp_path_factory):
    """Stages and, of each that is asked for, how long it takes and what it leaves."""
    found = killing.stages(world, tmp_path_factory.mktemp("out"), pages=ONE_PAGE)
    known = {}

    def run(name):
        stage = found[name]
        if name not in known:
            start = time.monotonic()
            code = stage.start(spawner).wait()
            assert code == 0, stage.said()
            seconds = time.monotonic() - start
            known[name] = (seconds, killing.kept(stage), killing.pages(stage))
        shutil.rmtree(stage.out, ignore_errors=True)
        return stage, *known[name]

    return run


def assert_resumes(stage, spawner, numbers, pages):
    assert stage.start(spawner).wait() == 0, stage.said()
    assert killing.differences(killing.kept(stage), numbers) == []
    assert killing.pages(stage) == pages


def last_line(stage) -> str:
    return stage.said().strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["capture", "score", "watch"])
def test_a_rerun_after_a_kill_at_any_moment_ends_with_the_same_numbers(name, undisturbed, spawner):
    stage, seconds, numbers, pages = undisturbed(name)
    draw = random.Random(name)
    for number in (signal.SIGKILL, signal.SIGTERM):
        running = stage.start(spawner)
        time.sleep(draw.random() * 0.8 * seconds)
        running.kill(number)
        code = running.wait()
        # A run that was faster than the first one may have ended.
        assert code in ((-9, 0) if number == signal.SIGKILL else (3, 0)), stage.said()
        if code == 3:
            assert last_line(stage).startswith("stopped: ")
    assert_resumes(stage, spawner, numbers, pages)


@pytest.mark.parametrize("name", ["capture", "score", "watch"])
def test_a_kill_at_any_change_of_a_name_on_disk_leaves_no_half_result(name, undisturbed, spawner):
    stage, _, numbers, pages = undisturbed(name)
    draw, code, at = random.Random(name), -9, 0
    while code == -9:  # each run gets further than the last, until one gets through
        at += 1 if name == "watch" else draw.randint(1, 3)
        code = stage.start(spawner, die_at=at * draw.choice((1, -1))).wait()
    assert code == 0, stage.said()
    assert_resumes(stage, spawner, numbers, pages)


def test_a_report_resumes_where_it_was_killed(undisturbed, spawner):
    stage, _, numbers, pages = undisturbed("report")
    for number in (signal.SIGKILL, signal.SIGINT):
        before = len(list((stage.out / "results").glob("*")))
        running = stage.start(spawner)
        killing.until(lambda before=before: len(results_in(stage)) > before + 3)
        running.kill(number)
        assert running.wait() == (-9 if number == signal.SIGKILL else 3), stage.said()
        assert not (stage.out / "index.html").exists()
    assert stage.start(spawner, largest=80_000).wait() == 2, stage.said()
    assert "files may not grow that large" in last_line(stage)
    made = {path: path.stat().st_mtime_ns for path in results_in(stage)}
    assert_resumes(stage, spawner, numbers, pages)
    assert made == {path: path.stat().st_mtime_ns for path in made}  # read, not made again


def results_in(stage) -> list[Path]:
    return list((stage.left / "results").glob("[!.]*/result.json"))


@pytest.mark.parametrize("name", ["capture", "score", "watch"])
def test_a_second_process_in_the_same_folder_is_told_and_harms_nothing(name, undisturbed, spawner):
    stage, _, numbers, pages = undisturbed(name)
    first = stage.start(spawner)
    at_work = stage.out.parent / ".capture.partial" if name == "capture" else stage.out
    killing.until(at_work.exists)
    first.kill(signal.SIGSTOP)
    try:
        assert stage.start(spawner).wait() == 2
        assert "error: another" in last_line(stage)
        assert str(stage.out) in last_line(stage)
    finally:
        first.kill(signal.SIGCONT)
    assert first.wait() == 0
    assert killing.kept(stage) == numbers
    assert_resumes(stage, spawner, numbers, pages)


def test_many_at_once_leave_what_one_leaves(undisturbed, spawner):
    stage, _, numbers, pages = undisturbed("score")
    running = [stage.start(spawner) for _ in range(3)]
    codes = sorted(one.wait() for one in running)
    assert codes[0] == 0
    assert set(codes) <= {0, 2}
    assert killing.kept(stage) == numbers
    assert_resumes(stage, spawner, numbers, pages)


@pytest.mark.parametrize("how", ["a run", "a capture"])
def test_what_a_killed_process_left_goes_when_it_is_old(how, tmp_path):
    old, young, other = (
        tmp_path / name
        for name in ("results/.claims.fit.0123abcd", ".a.json.0123abce", ".gitignore")
    )
    (old / "frame").mkdir(parents=True)
    young.write_text("")
    other.write_text("")
    for path in (old, other):
        os.utime(path, (0, 0))
    with beginning(how, tmp_path):
        assert not old.exists()
    assert young.exists()
    assert other.exists()


def beginning(how, out):
    """What each kind of work begins with."""
    from dflash_diag import storage
    from dflash_diag.config import RunConfig
    from dflash_diag.runs import Run

    config = RunConfig(out=str(out))
    return storage.kept_alone(out) if how == "a capture" else Run(config, [], config).alone()


# --- full disks -----------------------------------------------------------------------------------


@pytest.fixture
def on_disk(spawner, world, tmp_path):
    """Stages on a small disk of their own, and what gives it so many bytes more than it holds."""
    place = Path(tempfile.mkdtemp())  # pytest could not clear its own folder of a mounted disk
    if not spawner.disk(place, 4096):
        place.rmdir()
        pytest.skip("no disk can be mounted here: that takes root, or a namespace of one's own")
    found = killing.stages(world, place, logs=tmp_path, pages=ONE_PAGE, root=spawner.root)

    def room(size: int) -> None:
        facts = os.statvfs(spawner.root / place.relative_to("/"))
        held = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
        assert spawner.disk(place, max(4096, held + size))

    try:
        yield found, room
    finally:
        place.rmdir()  # which ends the disk


def assert_full(stage, code) -> None:
    assert code == 2, stage.said()
    assert last_line(stage).startswith("error: cannot write")
    assert "disk is full" in last_line(stage)
    assert "Traceback" not in stage.said()


def whole(stage) -> dict[Path, bytes]:
    """What has been made and can be read, by path."""
    found = [*results_in(stage), *stage.left.glob("captures/*/manifest.json")]
    found += stage.left.glob("runs/*/summary.json" if stage.name == "watch" else "*.html")
    return {path: path.read_bytes() for path in found}


@pytest.mark.parametrize(
    ("name", "rooms"),
    [
        ("capture", (0, 24_000, 64_000)),
        ("score", (0, 24_000, 64_000)),
        ("watch", (0, 50_000, 50_000)),
        ("report", (1_200_000,)),
    ],
)
def test_a_full_disk_is_one_line_and_a_roomy_one_completes(
    name, rooms, undisturbed, spawner, on_disk
):
    _, _, numbers, pages = undisturbed(name)
    stages, room = on_disk
    stage = stages[name]
    for size in rooms:
        before, rows = whole(stage), history(stage)
        room(size)
        assert_full(stage, stage.start(spawner).wait())
        assert whole(stage).items() >= before.items()
        assert set(history(stage)) >= set(rows)
    room(64 * 2**20)
    assert_resumes(stage, spawner, numbers, pages)
    if name == "report":
        assert_outlives(stage, spawner, room)


def history(stage) -> list[str]:
    from dflash_diag.history import read_history

    return [one.run_id for one in read_history(stage.left / "history.parquet")]


def assert_outlives(stage, spawner, room):
    """What was made is still there, the pages as they were, when there is no room for another."""
    before = whole(stage)
    other = dataclasses.replace(stage, arguments=(*stage.arguments, "--seed", "1"))
    room(8192)
    assert_full(other, other.start(spawner).wait())
    after = whole(stage)
    assert after.keys() == before.keys()
    for path, content in after.items():
        if path.suffix == ".html":
            assert content == before[path]
        else:
            assert json.loads(content)


@pytest.mark.parametrize("name", ["capture", "score"])
def test_a_limit_of_a_files_size_is_one_line(name, undisturbed, spawner):
    stage, _, numbers, pages = undisturbed(name)
    for largest in (1500, 6000, 12000):
        code = stage.start(spawner, largest=largest).wait()
        assert code == 2, stage.said()
        assert "files may not grow that large" in last_line(stage)
    assert_resumes(stage, spawner, numbers, pages)
