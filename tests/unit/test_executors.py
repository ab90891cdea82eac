"""Commands on this machine: how they end, what they say, and that none is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from dflash_diag import deadlines, executors
from dflash_diag.errors import BadInput
from dflash_diag.executors import Command, Local, executor


@pytest.fixture
def python(tmp_path):
    def make(code: str, **more) -> Command:
        return Command((sys.executable, "-S", "-c", code), str(tmp_path / "logs" / "log"), **more)

    return make


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_how_a_command_ends(python, tmp_path):
    with Local(1) as local:
        code = "import sys; print(sys.stdin.read()); print('error: no\\n', file=sys.stderr); "
        ended = local.submit(python(code + "sys.exit(2)", given="in")).result()
        assert (ended.code, ended.output, ended.last_line) == (2, "in\n", "error: no")
        assert ended.reason == "no"
        quiet = local.submit(python("import os; os.kill(os.getpid(), 9)")).result()
        assert (quiet.code, quiet.last_line, quiet.reason) == (-9, "", "ended with code -9")
    assert (tmp_path / "logs" / "log").read_text() == "error: no\n\n"


def test_a_lot_of_output_is_no_deadlock(python):
    code = "import sys; sys.stdout.write('x' * 10**6); sys.stderr.write('y\\n' * 10**6)"
    with Local(1) as local:
        ended = local.submit(python(code, given="z" * 10**6)).result()
    assert (ended.code, len(ended.output), ended.last_line) == (0, 10**6, "y")


def test_commands_wait_for_their_turn(python, tmp_path):
    code = f"import os, time; p = {str(tmp_path)!r} + f'/{{os.getpid()}}'; open(p, 'w'); "
    code += f"print(len(os.listdir({str(tmp_path)!r}))); time.sleep(0.2); os.unlink(p)"
    with Local(2) as local:
        running = [local.submit(python(code)) for _ in range(5)]
        seen = [int(one.result().output) for one in running]
    assert max(seen) <= 3  # two, and the folder of logs


def test_leaving_stops_what_runs_with_its_children(python):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "sys.stderr.write(f'{child.pid}\\n'); sys.stderr.flush(); time.sleep(60)"
    )
    command = python(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{code}")
    started = time.monotonic()
    before = executors.GRACE_S
    executors.GRACE_S = 0.3
    try:
        with Local(1) as local:
            running, waiting = local.submit(command), local.submit(command)
            log = Path(command.log)
            while not (log.exists() and log.read_text().endswith("\n")):
                time.sleep(0.01)
            child = int(log.read_text())
            assert alive(child)
    finally:
        executors.GRACE_S = before
    assert running.result().code == -9
    assert waiting.cancelled()
    while alive(child):
        time.sleep(0.01)
        assert time.monotonic() - started < 10


def test_a_command_ends_with_who_started_it(python, tmp_path):
    hang = "import time; time.sleep(600)"
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {hang}"
    listen = "from dflash_diag import deadlines; deadlines.GRACE_S = 0.2; "
    listen += "deadlines.end_with_starter(); import os, sys; assert not os.getenv('{}'); "
    listen = listen.format(deadlines.STARTER) + "sys.stderr.write(f'{os.getpid()}\\n'); "
    commands = [python(f"{listen}{code}") for code in (hang, deaf)]
    start = "import sys, threading; from dflash_diag.executors import Command, execute\n"
    start += f"for arguments in {[one.arguments for one in commands]}:\n"
    start += f"    command = Command(arguments, {commands[0].log!r})\n"
    start += "    threading.Thread(target=execute, args=(command,)).start()"
    root = str(Path(executors.__file__).parents[1])
    starter = subprocess.Popen([sys.executable, "-S", "-c", start], cwd=root)
    log, end = Path(commands[0].log), time.monotonic() + 20
    while not log.exists() or log.read_text().count("\n") < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    started = [int(line) for line in log.read_text().split()]
    assert all(map(alive, started))
    starter.kill()
    starter.wait(20)
    while any(map(alive, started)):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_where_nothing_can_be_logged_is_said(python):
    ended = executors.execute(replace(python("pass"), log="/dev/null/log"))
    assert ended.could_not_write
    assert ended.reason.startswith("cannot write /dev/null/log: ")


def test_cores_are_shared(python, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    show = python("import os; print(os.environ.get('OMP_NUM_THREADS'), os.environ['MORE'])")
    show = Command(show.arguments, show.log, environment={"MORE": "yes"})
    for at_once, threads in ((1, "None"), (3, "2")):
        with Local(at_once) as local:
            assert local.submit(show).result().output == f"{threads} yes\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with Local(3) as local:
        assert local.submit(show).result().output == "5 yes\n"


def test_this_very_package_is_used(tmp_path):
    command = Command.python("dflash_diag", "--help", log=tmp_path / "log")
    with Local(1) as local:
        ended = local.submit(command).result()
    assert ended.code == 0
    assert "watch" in ended.output
    root = command.environment["PYTHONPATH"].split(os.pathsep)[0]
    assert (Path(root) / "dflash_diag" / "executors.py").samefile(executors.__file__)


def test_a_cluster_that_never_answers(monkeypatch):
    never = Event()
    ray = SimpleNamespace(init=lambda *_, **__: never.wait(60), nodes=list)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(executors, "RAY_S", 0.1)
    with pytest.raises(BadInput, match="no Ray cluster answers at head:6379"):
        executor("ray", address="head:6379")
    never.set()


def test_bad_names(monkeypatch):
    with pytest.raises(BadInput, match=r"--executor slurm; expected local or ray"):
        executor("slurm")
    with pytest.raises(BadInput, match="--jobs -1"):
        executor("local", jobs=-1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r'Ray is not installed; pip install "dflash-diag\[ray\]"'):
        executor("ray")
