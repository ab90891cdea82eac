"""``transformers serve`` on this machine: its text, turned into tokens, is the target's own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_gguf
import tiny_world

from dflash_diag import cli
from dflash_diag.bundle import Capture
from dflash_diag.capture import make_capture
from dflash_diag.prompts import read_prompts
from dflash_diag.references import check_reference
from dflash_diag.targets import load_target

pytestmark = pytest.mark.allow_hosts("127.0.0.1")

G = 16


@pytest.fixture
def world(tmp_path) -> Path:
    tiny_world.write_target(tmp_path / "target", ascii_only=True)
    tiny_world.write_prompts(tmp_path / "prompts.jsonl")
    llama = tiny_gguf.make_llama(ascii_only=True)
    # No merge of letters: what is generated token by token must be the one way to write its text.
    only = {"tokenizer.ggml.merges": ["Ġ Ġ"]}
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf", llama, **only)
    chat = [{"id": f"c{i}", "messages": [{"role": "user", "content": f"{i}?"}]} for i in range(3)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, chat)))
    return tmp_path


@pytest.fixture
def address(world):
    """Where the target is served, or will be as soon as it is loaded."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = shutil.which("transformers", path=str(Path(sys.executable).parent))
    command = [program, "serve", "--host", "127.0.0.1", "--port", port]
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
    compare_served(world, address, world / "target", world / "target", "prompts.jsonl")
    # It loads a llama in GGUF only as the folder that the same weights make.
    saved = load_target(world / "tiny.gguf").save(world / "saved")
    compare_served(world, address, world / "tiny.gguf", saved, "chat.jsonl")


def compare_served(world, address, target, served_as, prompts):
    out, prompts = world / f"from {served_as.name}", world / prompts
    arguments = ["capture", "--target", target, "--prompts", prompts]
    arguments += ["--max-new-tokens", G, "--out", out, "--server", f"{address}/v1"]
    arguments += ["--server-model", served_as, "--server-timeout", 60]
    assert cli.run([str(one) for one in arguments]) == 0, (world / "serve.log").read_text()
    served = Capture.load(out)
    own = make_capture(
        target, read_prompts(prompts), world / f"own {prompts.stem}", max_new_tokens=G, silent=True
    )
    for i in range(len(own)):
        assert served.tokens(i).tolist() == own.tokens(i).tolist()
    assert {p.origin for p in served.prompts} == {"text"}
    assert served.reference["dialect"] == "openai-text"
    assert served.reference["model"] == served_as.name
    assert [row["kind"] for row in check_reference(served)["rows"]] == [""] * len(own)
