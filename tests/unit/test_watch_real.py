"""A watch over real checkpoints of a tiny target: opened, captured and scored for real."""

from __future__ import annotations

import filecmp
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

import quick_report
import tiny_world

from dflash_diag import cli
from dflash_diag.capture import make_capture
from dflash_diag.history import read_history
from dflash_diag.prompts import read_prompts


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tiny_world.write_world(tmp_path_factory.mktemp("world"))
    shutil.move(folder / "drafter", folder / "checkpoints" / "step_200")
    tiny_world.write_drafter(folder / "checkpoints" / "step_1000", seed=3)
    return folder


@pytest.fixture
def watch(world, tmp_path, monkeypatch, capsys):
    from dflash_diag.watch import commands

    monkeypatch.setattr(commands, "report", commands.report)
    monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "silent")
    quick_report.install()

    def call(*more, folder=world / "checkpoints"):
        given = ["watch", folder, "--target", world / "target", "--once"]
        given += ["--prompts", world / "prompts.jsonl", "--reference", world / "reference"]
        given += ["--max-new-tokens", "12", "--settle", "0.2", "--out", tmp_path / "out", *more]
        code = cli.run([str(one) for one in given])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_real_checkpoints(watch, world, tmp_path):
    half = world / "checkpoints" / "step_300"
    shutil.copytree(world / "checkpoints" / "step_200", half)
    content = (half / "model.safetensors").read_bytes()
    (half / "model.safetensors").write_bytes(content[: len(content) // 2])
    try:
        code, out, err = watch("--json", tmp_path / "watch.json")
        again = watch()
    finally:
        shutil.rmtree(half)
    assert code == 0, err
    names = [line.split(";")[0] for line in out.splitlines()]
    assert names == ["✓ PASS step_200", "✓ PASS step_1000"]
    (unreadable,) = [line for line in err.splitlines() if line.startswith("unreadable")]
    assert "step_300/model.safetensors is truncated or corrupted" in unreadable
    rows = read_history(tmp_path / "out" / "history.parquet")
    assert [(row.name, row.step, row.n_prompts) for row in rows] == [
        ("step_200", 200, 3), ("step_1000", 1000, 3)
    ]  # fmt: skip
    assert rows[0].capture == rows[1].capture
    # The later one was shown the earlier one, for its trend.
    past = [tmp_path / "out" / row.out / "history.parquet" for row in rows]
    assert [read_history(path) for path in past] == [[], rows[:1]]
    assert all(row.tau_walked == sum(row.tokens) / sum(row.rounds) for row in rows)
    assert len(list((tmp_path / "out" / "captures").glob("*/manifest.json"))) == 1
    found = json.loads((tmp_path / "watch.json").read_text())
    assert [one["name"] for one in found["checkpoints"]] == ["step_200", "step_1000"]
    assert [(one["name"], one["stage"]) for one in found["pending"]] == [("step_300", "unreadable")]
    assert again == (0, "", "")


def test_bad_inputs_are_told_before_anything_is_made(watch, tmp_path):
    code, out, err = watch("--target", tmp_path / "nowhere")
    assert (code, out) == (2, "")
    assert "no such folder" in err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def cluster(monkeypatch):
    """The address of a Ray cluster that lasts as long as a test."""
    pytest.importorskip("ray", reason='Ray is not installed (pip install "dflash-diag[ray]")')
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be left in the home folder
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    start += [f"--port={port}", "--num-cpus=2", "--num-gpus=0", "--include-dashboard=false"]
    start += ["--include-log-monitor=false", "--no-monitor", "--disable-usage-stats"]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:  # its own services must come up within 15 s, which not every busy machine grants
            pytest.skip(f"Ray does not start here: {''.join(said[-1:]).strip()}")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.stdout.close()
        process.wait()


@pytest.mark.enable_socket
def test_a_cluster_gives_what_this_machine_gives(watch, world, tmp_path, cluster):
    capture = make_capture(
        str(world / "target"), read_prompts(world / "prompts.jsonl"), tmp_path / "capture",
        max_new_tokens=12, layers="taps", taps=[0, 2], silent=True,
    )  # fmt: skip
    shutil.copytree(world / "checkpoints" / "step_200", tmp_path / "checkpoints" / "step_200")
    same = ["--capture", capture.path]
    ray = ["--executor", "ray", "--ray-address", cluster, "--shards", "2"]
    assert watch(*same, folder=tmp_path / "checkpoints")[0] == 0
    (tmp_path / "out").rename(tmp_path / "local")
    code, out, err = watch(*same, *ray, folder=tmp_path / "checkpoints")
    assert (code, len(out.splitlines())) == (0, 1), err
    here, there = (read_history(tmp_path / name / "history.parquet") for name in ("local", "out"))
    assert [row.run_id for row in here] == [row.run_id for row in there]
    one, other = (tmp_path / name / here[0].out / "scores" for name in ("local", "out"))
    names = sorted(str(path.relative_to(one)) for path in one.glob("*/*"))
    assert len(names) == 6
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])
