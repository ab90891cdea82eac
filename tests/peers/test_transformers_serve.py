"""``transformers serve`` on this machine: its text, turned into tokens, is the target's own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag import cli
from dflash_diag.bundle import Capture
from dflash_diag.capture import make_capture
from dflash_diag.prompts import read_prompts
from dflash_diag.references import check_reference

pytestmark = pytest.mark.allow_hosts("127.0.0.1")

G = 16


@pytest.fixture
def world(tmp_path) -> Path:
    tiny_world.write_target(tmp_path / "target", ascii_only=True)
    tiny_world.write_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


@pytest.fixture
def address(world):
    """Where the target is served, or will be as soon as it is loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = shutil.which("transformers", path=str(Path(sys.executable).parent))
    command = [program, "serve", world / "target", "--host", "127.0.0.1", "--port", port]
    command += ["--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (world / "serve.log").open("wb") as log:
        server = subprocess.Popen(
            [str(one) for one in command], stdout=log, stderr=log, env=environment
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(10)


def test_the_served_text_is_the_targets_own(world, address):
    name = str(world / "target")
    arguments = ["capture", "--target", name, "--prompts", world / "prompts.jsonl"]
    arguments += ["--max-new-tokens", G, "--out", world / "served"]
    arguments += ["--server", f"{address}/v1", "--server-model", name, "--server-timeout", 60]
    assert cli.run([str(one) for one in arguments]) == 0, (world / "serve.log").read_text()
    served = Capture.load(world / "served")
    own = make_capture(
        name, read_prompts(world / "prompts.jsonl"), world / "own", max_new_tokens=G, silent=True
    )
    for i in range(len(own)):
        assert served.tokens(i).tolist() == own.tokens(i).tolist()
    assert {p.origin for p in served.prompts} == {"text"}
    assert served.reference["dialect"] == "openai-text"
    assert served.reference["model"] == "target"
    assert [row["kind"] for row in check_reference(served)["rows"]] == [""] * len(own)
