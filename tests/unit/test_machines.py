"""Two machines, one folder: the second is refused while the first lives, and goes on if it died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from dflash_diag import machines, storage
from dflash_diag.errors import OutputError

OTHER = """if True:
    import sys
    from pathlib import Path
    from dflash_diag import machines, storage
    machines.BEAT_S, machines.platform.node = 0.02, lambda: "node-b"
    with storage.kept_alone(sys.argv[1]):
        print("at work", flush=True)
        sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(machines, "BEAT_S", 0.05)
    monkeypatch.setattr(machines, "DEAD_S", 1.0)


@contextmanager
def other_machine(out, tmp_path):
    """A process at work in a folder whose locks are nowhere that we can see."""
    locks = tmp_path / "its tmp"
    locks.mkdir()
    command, pipe = [sys.executable, "-c", OTHER, str(out)], subprocess.PIPE
    environment = os.environ | {"TMPDIR": str(locks)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True) as process:
        assert process.stdout.readline() == "at work\n"
        yield process
        if process.poll() is None:
            process.communicate(timeout=30)


def test_another_machine_at_work_is_named(tmp_path):
    out = tmp_path / "results" / "out"
    with other_machine(out, tmp_path) as other:
        start = time.monotonic()
        with pytest.raises(OutputError) as error, storage.kept_alone(out):
            pass
        assert time.monotonic() - start < machines.DEAD_S
        said = f"another machine, node-b, is writing to {out} (process {other.pid}); wait for it"
        assert str(error.value).startswith(said)
        assert not out.exists()
    with storage.kept_alone(out):  # it has ended
        assert machines.file_of(out).is_file()
    assert list(out.parent.iterdir()) == []


def test_one_that_was_killed_is_waited_for_and_then_no_more(tmp_path):
    out = tmp_path / "out"
    with other_machine(out, tmp_path) as other:
        other.send_signal(signal.SIGKILL)
        other.wait(30)
    start = time.monotonic()
    with storage.kept_alone(out):
        assert time.monotonic() - start >= machines.DEAD_S
    assert not machines.file_of(out).exists()


def test_what_was_killed_here_costs_no_time(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "DEAD_S", 60.0)
    kept = machines.kept_off(tmp_path / "out")
    kept.__enter__()
    left = machines.file_of(tmp_path / "out").read_text()
    start = time.monotonic()
    with machines.kept_off(tmp_path / "out"):
        assert time.monotonic() - start < 5
        while machines.file_of(tmp_path / "out").read_text() == left:
            time.sleep(0.01)
    kept.__exit__(None, None, None)


@pytest.mark.parametrize("left", ["", "nonsense\n"])
def test_a_file_of_nobody_is_removed_when_it_does_not_change(tmp_path, left, monkeypatch):
    monkeypatch.setattr(machines, "DEAD_S", 0.2)
    machines.file_of(tmp_path / "out").write_text(left)
    with machines.kept_off(tmp_path / "out"):
        assert machines.file_of(tmp_path / "out").read_text().startswith(machines.platform.node())


@pytest.mark.parametrize("parent", ["/proc", "/dev/null"])
def test_where_nothing_can_be_written_nothing_is_kept_off(parent):
    with machines.kept_off(machines.Path(parent) / "out"):
        pass
