"""JupyterLab on one folder: on this machine's own address, quiet, and ended with its kernels."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dflash_diag.deadlines import killed
from dflash_diag.errors import BadInput, DiagError

HOST = "127.0.0.1"
PORT, PORTS = 8888, 50
"""Where it listens unless told otherwise, and how many ports from there on are tried."""
START_S, STOP_S = 120.0, 20.0
"""Seconds that it may take to answer, and to end its kernels."""
QUIET = (
    "--LabApp.news_url=None",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.extension_manager=readonly",
    "--Application.log_level=ERROR",
)
"""It asks nothing of the network and logs nothing but errors; a file in ``jupyter/`` beside this
module keeps it from asking who opens it whether it may."""


@dataclass(frozen=True)
class Server:
    """A JupyterLab that answers."""

    process: subprocess.Popen[bytes]
    url: str
    """Address of the notebook that it opens, with the token that lets its holder in."""

    def wait(self) -> None:
        """Until it ends: somebody chose *File, Shut Down*.

        Raises
        ------
        DiagError
            It ended otherwise.
        """
        code = self.process.wait()  # as long as somebody works in it
        if code:
            raise DiagError(f"JupyterLab ended with code {code}")


@contextmanager
def serving(folder: Path, first: str, *, port: int = 0, browser: bool = True) -> Iterator[Server]:
    """Run JupyterLab on a folder until the end of the block.

    Parameters
    ----------
    first
        Notebook of the folder that it opens.
    port
        Where to listen; 0: the first free port from `PORT` on.
    browser
        Whether to open a browser.

    Raises
    ------
    BadInput
        JupyterLab is not installed, or the port is taken.
    DiagError
        It ends before it answers.
    """
    if find_spec("jupyterlab") is None:
        raise BadInput("JupyterLab is not installed", do="pip install jupyterlab")
    import zmq

    number, token = _free_port(port), os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    path = f"/lab/tree/{first}"
    command = [
        *(sys.executable, "-m", "jupyterlab", *QUIET),
        *(f"--ServerApp.root_dir={folder}", f"--LabApp.default_url={path}"),
        *(f"--ServerApp.ip={HOST}", f"--ServerApp.port={number}", "--ServerApp.port_retries=0"),
        # Who starts it as root, in a container say, means to; no other machine can reach it.
        "--ServerApp.allow_root=True",
        *(["--KernelManager.transport_encryption=auto"] if zmq.has("curve") else []),
        *([] if browser else ["--no-browser"]),
    ]
    process = subprocess.Popen(
        command,
        env=_environment(token),
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for this process, which then ends that one
    )
    try:
        _wait_for(process, number)
        yield Server(process, f"http://{HOST}:{number}{path}?token={token}")
    finally:
        _end(process, number, token)


def _free_port(wanted: int) -> int:
    for port in [wanted] if wanted else range(PORT, PORT + PORTS):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind((HOST, port))
            except (OSError, OverflowError):
                continue
            return port
    tried = f"port {wanted}" if wanted else f"ports {PORT} to {PORT + PORTS - 1}"
    raise BadInput(f"{tried} cannot be used", "a free one below 65536", "give another --port")


def _environment(token: str) -> dict[str, str]:
    """Of the server: the token, our settings, and this very package in sight of its kernels."""
    package = Path(__file__).resolve().parent
    first = {"PYTHONPATH": package.parent, "JUPYTER_CONFIG_PATH": package / "jupyter"}
    known = {name: os.environ.get(name) for name in first}
    paths = {
        name: os.pathsep.join(filter(None, [str(path), known[name]]))
        for name, path in first.items()
    }
    return {**os.environ, "JUPYTER_TOKEN": token, **paths}


def _wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while process.poll() is None:
        with socket.socket() as one:
            one.settimeout(1.0)
            if one.connect_ex((HOST, port)) == 0:
                return
        if time.monotonic() > until:
            raise DiagError(f"JupyterLab did not answer within {START_S:.0f} s")
        time.sleep(0.1)
    raise DiagError(f"JupyterLab ended with code {process.returncode} before it answered")


def _end(process: subprocess.Popen[bytes], port: int, token: str) -> None:
    """Ask it to end its kernels and itself, as its own menu does."""
    import httpx

    address, own = f"http://{HOST}:{port}/api/shutdown", {"Authorization": f"token {token}"}
    try:
        httpx.post(address, headers=own, timeout=STOP_S, trust_env=False)
    except httpx.HTTPError:  # it does not answer yet, or no more
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        killed(process)
