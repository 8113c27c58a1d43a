"""Servers of Python's own library that stand in for others, in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Writes no log; `answer` sends a body."""

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving_http(handler: type[BaseHTTPRequestHandler], kind: type[HTTPServer] = ThreadingHTTPServer) -> Iterator[str]:
    """The server's URL. It ends however the test does: left alone, its thread would spin on the closed socket."""
    with kind(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
