"""No call in the package waits for somebody else without an end, but for those listed here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dflash_diag"

NO_END = {
    "cli/lab.py: started.wait()": "a person works in JupyterLab for as long as it takes",
    "lab_server.py: self.process.wait()": "the same",
    "ahead.py: sys.stdin.readline()": "whoever started the process writes it, or ends",
    "ahead.py: os.read(sys.stdin.fileno(), 1)": "waits for just that end",
    "shards.py: sys.stdin.read()": "whoever started the process writes it, or ends",
    "watch/identity.py: sys.stdin.read()": "whoever started the process writes it, or ends",
    "watch/webhook.py: self._waiting.get()": "a daemon thread, which ends with the process",
    "watch/watching.py: future.result()": "it is done",
    "executors.py: task.exception()": "it is done",
    "executors.py: task.result()": "it is done",
    "executors.py: self._pool.shutdown(wait=True, cancel_futures=True)": (
        "each command ends within its limit, and within GRACE_S and GONE_S when it is told to"
    ),
    "executors.py: self._ray.shutdown()": "of this process alone; Ray ends its own after seconds",
    "report.py: ThreadPoolExecutor(os.cpu_count())": "each notebook ends, see START_S and CELL_S",
    "report.py: pool.map(lambda name: _execute_in_thread(name, run), NOTEBOOKS)": "the same",
    "scoring.py: ThreadPoolExecutor(": "threads that compute, one prompt after another",
    "scoring.py: pool.map(": "the same",
    "scoring.py: pool.shutdown(": "the same: those that have not begun are called off",
    "servers.py: state.outcome.exception()": "it is done",
    "servers.py: httpx.Client(": "each request has a limit of its own",
}
"""Calls that wait without a limit of their own, as they begin in the source, and why they may."""

WITHOUT_ARGUMENTS = {"wait", "join", "result", "exception", "acquire", "get", "communicate", "recv"}
"""Methods that wait for ever when they are given nothing; ``text.join`` and ``dict.get`` are."""
WITHOUT_LIMIT = {
    "as_completed",
    "check_call",
    "check_output",
    "create_connection",
    "execute_notebook",
    "FileLock",
    "map",
    "shutdown",
    "urlopen",
    "wait_for",
}
"""What waits for ever unless it has a time-out by name, wherever it comes from."""
OF_MODULES = {
    "httpx": {"Client", "get", "post", "stream"},
    "subprocess": {"call", "run"},
}
"""The same for names that are common."""
ALWAYS = {"sys.stdin.read", "sys.stdin.readline", "os.read", "os.waitpid", "os.wait", "input"}
RAY = {"init", "get", "wait", "nodes", "shutdown"}
NAMES = WITHOUT_ARGUMENTS.union(WITHOUT_LIMIT, RAY, *OF_MODULES.values())
NAMES |= {one.rpartition(".")[2] for one in ALWAYS}
UNKNOWN = {"aiohttp", "asyncio", "ftplib", "http", "multiprocessing", "requests", "select"}
UNKNOWN |= {"selectors", "smtplib", "socketserver", "telnetlib", "urllib.request", "urllib3"}
"""Modules whose calls nobody has looked at here."""
LIMITS = {"timeout", "execution_timeout", "limit"}


def waits(source: str) -> Iterator[str]:
    """Calls that may wait without an end, as they stand in the source."""
    tree = ast.parse(source)
    limited = set(_limited(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [one.name for one in node.names]
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else modules
            yield from (ast.unparse(node) for one in modules if _is_of(one, UNKNOWN))
        elif isinstance(node, ast.With | ast.AsyncWith):
            # To leave such a block is to wait for the process, or for the threads.
            entered = [one.context_expr for one in node.items]
            for one in entered:
                if isinstance(one, ast.Call) and _last(one.func) in ("Popen", "ThreadPoolExecutor"):
                    yield ast.unparse(one)
        elif isinstance(node, ast.Call) and node not in limited and _waits(node):
            yield ast.unparse(node)


def _limited(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs under `dflash_diag.deadlines.within`: its arguments, and functions named there."""
    nodes = list(ast.walk(tree))
    functions = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Call) and _last(node.func) == "within":
            for part in (inner for one in node.args for inner in ast.walk(one)):
                yield part
                if isinstance(part, ast.Name | ast.Attribute) and _last(part) in functions:
                    yield from ast.walk(functions[_last(part)])


def _waits(node: ast.Call) -> bool:
    name = _last(node.func)
    if name not in NAMES:
        return False
    given, whole = {one.arg for one in node.keywords}, ast.unparse(node.func)
    if whole in ALWAYS:
        return True
    of = whole.removesuffix(f".{name}").rsplit(".", 1)[-1]
    if of in ("ray", "_ray"):
        return name in RAY
    if name in OF_MODULES.get(of, ()) or name in WITHOUT_LIMIT:
        return not given & LIMITS and (name != "map" or "pool" in of)
    bare = not node.args and not given
    return isinstance(node.func, ast.Attribute) and name in WITHOUT_ARGUMENTS and bare


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_of(module: str, names: set[str]) -> bool:
    return any(module == one or module.startswith(f"{one}.") for one in names)


def test_every_wait_has_an_end_or_a_reason():
    found = [
        f"{path.relative_to(PACKAGE).as_posix()}: {call}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for call in waits(path.read_text())
    ]
    assert [one for one in found if not one.startswith(tuple(NO_END))] == []
    assert [one for one in NO_END if not any(call.startswith(one) for call in found)] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("process.wait()", True),
        ("process.wait(5)", False),
        ("process.communicate()", True),
        ("process.communicate(text, timeout=1)", False),
        ("subprocess.run(command, check=True)", True),
        ("subprocess.run(command, timeout=9)", False),
        ("with subprocess.Popen(command) as process: pass", True),
        ("urllib.request.urlopen(url)", True),
        ("import urllib.request", True),
        ("from requests import get", True),
        ("httpx.post(url)", True),
        ("httpx.post(url, timeout=3)", False),
        ("within(3, lambda: httpx.post(url))", False),
        ("def ask():\n    httpx.post(url)\nwithin(3, ask)", False),
        ("def ask():\n    httpx.post(url)\nask()", True),
        ("ray.init('auto')", True),
        ("thread.join()", True),
        ("thread.join(3)", False),
        ("', '.join(names)", False),
        ("found.get('key')", False),
        ("queue.get()", True),
        ("lock.acquire()", True),
        ("FileLock(path)", True),
        ("FileLock(path, timeout=0)", False),
        ("wait_for(jobs)", True),
        ("future.result()", True),
        ("run.result('doctor.causes')", False),
        ("map(str, names)", False),
        ("pool.map(str, names)", True),
        ("papermill.execute_notebook(a, b)", True),
    ],
)
def test_what_counts_as_a_wait(source, found):
    assert bool(list(waits(source))) == found
