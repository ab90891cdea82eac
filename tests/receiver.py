"""A web server of this machine that takes JSON and answers as it is told."""

from __future__ import annotations

import json
import socket
from contextlib import contextmanager, suppress
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


@contextmanager
def never_answering(bytes_a_second: float = 0.0):
    """A server that takes connections and reads, and never gets to the end of an answer's head."""
    stop = Event()

    def serve(connection):
        with connection, suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Endless: ")
            while not stop.wait(1 / bytes_a_second if bytes_a_second else None):
                connection.sendall(b"x")

    def accept():
        while not stop.is_set():
            with suppress(TimeoutError):
                connection = listener.accept()[0]
                threads.append(Thread(target=serve, args=(connection,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        threads = [Thread(target=accept)]
        threads[0].start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            for thread in threads:
                thread.join()
