"""Every wait for somebody else has an end."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest
from receiver import never_answering

from dflash_diag import history, lab_server, report, storage
from dflash_diag.deadlines import within
from dflash_diag.errors import DiagError, OutputError
from dflash_diag.executors import Command, execute
from dflash_diag.servers import Asked, Server, ServerError
from dflash_diag.watch import webhook
from dflash_diag.watch.webhook import Webhook
from tests.unit.test_history import a_row

ASKED = Asked("p", (1, 2), "ab", 4, 320, frozenset())


def test_what_comes_in_time_comes_as_it_is():
    assert within(60.0, lambda: 1) == 1
    with pytest.raises(KeyError):
        within(60.0, lambda: {}["a"])


def test_what_does_not_is_left_behind():
    never = Event()
    try:
        with pytest.raises(TimeoutError):
            within(0.05, never.wait)
    finally:
        never.set()


@pytest.mark.enable_socket
@pytest.mark.parametrize("bytes_a_second", [0.0, 20.0])
def test_a_server_that_never_answers(bytes_a_second, monkeypatch):
    monkeypatch.setattr("dflash_diag.servers._CONNECT_S", 0.2)
    start = time.monotonic()
    with (
        never_answering(bytes_a_second) as address,
        Server(f"http://{address}", timeout=1.0) as one,
    ):
        with pytest.raises(ServerError, match="is not ready"):
            one.open(ASKED)
        assert time.monotonic() - start < 8


@pytest.mark.enable_socket
@pytest.mark.parametrize("bytes_a_second", [0.0, 20.0])
def test_a_webhook_that_never_answers(bytes_a_second, monkeypatch):
    monkeypatch.setattr(webhook, "_FIRST_PAUSE_S", 0.01)
    start = time.monotonic()
    with never_answering(bytes_a_second) as address:
        said = Webhook(f"http://{address}/", timeout=0.2).tell({})
        assert time.monotonic() - start < 8
    assert said == "no answer within 0.2 s, 3 times"


def test_a_command_that_hangs_is_ended(tmp_path):
    hang = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    start = time.monotonic()
    ended = execute(Command(hang, str(tmp_path / "log"), limit=0.2))
    assert time.monotonic() - start < 20
    assert ended.code != 0
    assert ended.reason == "it had not ended after 0.2 s"


def test_a_history_that_somebody_holds(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "WAIT_S", 0.1)
    path = tmp_path / "history.parquet"
    with held(path), pytest.raises(OutputError, match="another process has been writing"):
        history.append(path, a_row())
    assert len(history.append(path, a_row())) == 1


def test_a_measurement_ahead_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "WAIT_S", 0.1)
    path = tmp_path / "alignment.json"
    with held(path):
        assert storage.kept_json(path, lambda: {"made": "here"}) == {"made": "here"}


def test_what_two_ask_for_at_once_is_made_once(tmp_path):
    made = []

    def make():
        made.append("here")
        time.sleep(0.3)
        return made

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(storage.kept_json, tmp_path / "found.json", make) for _ in range(2)]
        assert [one.result() for one in asked] == [["here"], ["here"]]


HOLD = """if True:
    import sys
    from dflash_diag import storage
    with storage.alone(sys.argv[1], timeout=30):
        print("held", flush=True)
        sys.stdin.read()
"""


@contextmanager
def held(path: Path):
    """Another process holds the lock of a path."""
    command, pipe = [sys.executable, "-c", HOLD, str(path)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield
        process.communicate(timeout=30)


def test_a_cell_that_hangs_and_a_kernel_that_dies(tmp_path, monkeypatch):
    """Both end a report with one line, and leave the notebook of before."""
    import nbformat

    from dflash_diag import paths

    class Run:
        out = tmp_path / "out"

    monkeypatch.setattr(report, "CELL_S", 2)
    monkeypatch.setattr(report, "notebook_parameters", lambda *_: {})
    monkeypatch.setattr(paths, "notebooks_dir", lambda: tmp_path)
    made = storage.atomic_write(Run.out / "notebooks" / "a.ipynb", "of before")
    for code, said in {
        "import time; time.sleep(600)": "a: a cell has not ended after 2 s",
        "import os; os._exit(1)": "a: its kernel died",
    }.items():
        parameters = nbformat.v4.new_code_cell("a = 1", metadata={"tags": ["parameters"]})
        cells = [parameters, nbformat.v4.new_code_cell(code)]
        kernel = {"kernelspec": {"name": "python3", "language": "python", "display_name": "p"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), tmp_path / "a.ipynb")
        with pytest.raises(DiagError, match=said):
            report.execute("a", Run())
        assert made.read_text() == "of before"
        assert [path.name for path in made.parent.iterdir()] == ["a.ipynb"]


@pytest.mark.enable_socket
def test_a_lab_that_never_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(lab_server, "START_S", 0.3)
    monkeypatch.setattr(lab_server, "STOP_S", 1.0)
    monkeypatch.setattr(lab_server.sys, "executable", "/bin/false")
    with pytest.raises(DiagError, match="JupyterLab"), lab_server.serving(tmp_path, "a"):
        pass
