"""A server for tests: it speaks three dialects, and does to each request what its script says."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Write = Callable[[Sequence[int], int], list[int]]


class FaultyServer:
    """Serves ``write(prompt_ids, n)`` on 127.0.0.1 while it is entered.

    Parameters
    ----------
    dialect
        ``sglang``, ``vllm``, ``ids-in`` (takes ids, gives text) or ``text``.
    write
        The continuation, as token ids.
    encode, decode
        Between text and ids.
    port
        0 takes a free one.
    """

    def __init__(self, dialect: str, write: Write, *, encode=None, decode=None, port=0, **facts):
        self.dialect, self.write, self.encode, self.decode = dialect, write, encode, decode
        self.port = port
        self.facts = {"model": "tiny", "version": "1.2", "precision": "float32", **facts}
        self.script: list[Any] = []
        """What happens to the next completions; when it is used up all goes well."""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    def __enter__(self) -> FaultyServer:
        handler = type("Handler", (_Handler,), {"server_of_test": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", self.port), handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join(5)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def page(self, path: str) -> dict[str, Any] | None:
        """What a GET gives."""
        owner = self.dialect if self.dialect in ("sglang", "vllm") else "someone"
        if path == "/v1/models":
            names = self.facts["model"].split(",")
            return {"data": [{"id": name, "owned_by": owner} for name in names]}
        if path == "/server_info" and self.dialect == "sglang":
            return {"version": self.facts["version"], "dtype": self.facts["precision"]}
        if path == "/version" and self.dialect == "vllm":
            return {"version": self.facts["version"]}
        return None

    def completion(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and answer of a POST to which nothing is done."""
        if path == "/generate" and self.dialect == "sglang":
            settings = body["sampling_params"]
            assert settings["temperature"] == 0
            assert settings["ignore_eos"] is False
            prompt = body["input_ids"]
            ids = self.write(prompt, settings["max_new_tokens"])
            about = {"finish_reason": {"type": self.reason(ids, settings["max_new_tokens"])}}
            about |= {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
            return 200, {"text": "", "output_ids": ids, "meta_info": about}
        if path != "/v1/completions" or self.dialect == "sglang":
            return 404, {"detail": "Not Found"}
        assert body["temperature"] == 0
        prompt = body["prompt"]
        if isinstance(prompt, list) == (self.dialect == "text"):
            return 400, {"error": {"message": "prompt has the wrong type"}}
        prompt = self.encode(prompt) if isinstance(prompt, str) else prompt
        ids = self.write(prompt, body["max_tokens"])
        choice = {"index": 0, "finish_reason": self.reason(ids, body["max_tokens"])}
        choice["text"] = self.decode(ids) if self.decode else ""
        if self.dialect == "vllm":
            assert body["return_token_ids"] is True
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        return 200, {"model": body["model"], "choices": [choice], "usage": usage}

    def reason(self, ids: Sequence[int], asked: int) -> str:
        return "length" if len(ids) >= asked else "stop"


class _Handler(BaseHTTPRequestHandler):
    """One request. A script's entry is a status, a name below, or a change of the answer."""

    server_of_test: FaultyServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # an answer goes out in two pieces

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        page = self.server_of_test.page(self.path.partition("?")[0])
        self.answer(404 if page is None else 200, page or {"detail": "Not Found"})

    def do_POST(self) -> None:
        test = self.server_of_test
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        test.asked.append(body)
        test.headers.append(dict(self.headers))
        test.paths.append(self.path)
        status, value = test.completion(self.path.partition("?")[0], body)
        what = test.script.pop(0) if test.script and status == 200 else None
        if what is None:
            self.answer(status, value)
        elif isinstance(what, int):
            self.answer(what, {"error": {"message": "not now"}})
        elif isinstance(what, tuple):
            self.answer(what[0], {"detail": "busy"}, {"Retry-After": what[1]})
        elif callable(what):
            self.answer(200, what(value))
        else:
            getattr(self, what)(value)

    def answer(self, status: int, value: Any, more: dict[str, str] | None = None) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **(more or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def cut(self, value: Any) -> None:
        """Half of the answer, and the connection is gone."""
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def reset(self, value: Any) -> None:
        """The connection is torn down before anything is said."""
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True

    def garbage(self, value: Any) -> None:
        self.answer(200, b'{"choices": [')

    def hang(self, value: Any) -> None:
        """Nothing for longer than an attempt may last."""
        time.sleep(1.5)
        self.close_connection = True

    def trickle(self, value: Any) -> None:
        """A byte now and then, so that no single wait is long."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            for _ in range(20):
                self.wfile.write(b" ")
                time.sleep(0.1)
        except OSError:
            pass
        self.close_connection = True
