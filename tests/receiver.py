"""A web server of this machine that takes JSON and answers as it is told."""

from __future__ import annotations

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread


@contextmanager
def receiver(*statuses: int, pause=0.0):
    """A server that answers one status after another, the last one for ever; what it got."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            length = int(self.headers["Content-Length"])
            got.append((self.path, dict(self.headers), json.loads(self.rfile.read(length))))
            if pause:
                stop.wait(pause)
            self.send_response(statuses[min(len(got), len(statuses)) - 1])
            self.end_headers()

        def log_message(self, *_):
            pass

    stop = Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", got
    finally:
        stop.set()
        server.shutdown()
        server.server_close()
        thread.join()
