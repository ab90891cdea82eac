"""Names, texts and a server that would like to be markup or scripts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest_socket
from serving import FaultyServer

HOSTILE = "<img src=x onerror=alert(1)>"
"""A name."""
SERVED = {
    "model": "m<script>alert(5)</script>",
    "version": "<img src=x onerror=alert(6)>",
    "precision": "</p><b onclick=alert(7)>",
}
"""What a server says of itself."""
WRITTEN = "<i/onload=1>"
"""What it writes after the last prompt; after the others, what the target would."""


def capture_from_a_server(folder: Path) -> None:
    """A capture of the tiny world, ``captured/``, whose continuations a server wrote."""
    from dflash_diag.capture import make_capture
    from dflash_diag.decoding import greedy
    from dflash_diag.prompts import read_prompts
    from dflash_diag.servers import Server
    from dflash_diag.targets import load_target

    target, prompts = load_target(folder / "target"), read_prompts(folder / "prompts.jsonl")
    letters = target.tokenizer(WRITTEN)["input_ids"]
    *sent, last = (target.encode(one) for one in prompts)
    made = zip(sent, greedy(target, sent, len(letters)), strict=True)
    answers = {tuple(ids): one.ids for ids, one in made} | {tuple(last): letters}
    forbidden = socket.socket
    pytest_socket.enable_socket()
    try:
        with FaultyServer("sglang", lambda ids, n: answers[tuple(ids)][:n], **SERVED) as server:
            make_capture(
                target,
                prompts,
                folder / "captured",
                max_new_tokens=len(letters),
                taps=[0, 2],
                reference=Server(server.url, timeout=30),
                silent=True,
            )
    finally:
        socket.socket = forbidden
