"""A hand-written HTTP/1.1 connection: it detects surplus answers, and can misbehave as a soak needs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field

import httptools

_TCP_REPAIR = 19
"""Linux: a socket closed in this state sends nothing, like a host that lost power."""


class Broken(Exception):
    """The connection was closed before the answer."""


@dataclass
class Answer:
    """A complete answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def kind(self) -> str:
        """The error class that the answer names, else its status."""
        return self.headers.get("guerdon-error", str(self.status))

    @property
    def json_length(self) -> int | None:
        """The length of the JSON before binary tensors; None if all of the body is JSON."""
        length = self.headers.get("inference-header-content-length")
        return None if length is None else int(length)


class Connection(asyncio.Protocol):
    """Sends one request after another; `extra` has bytes that came without a request."""

    def __init__(self) -> None:
        self.extra = b""
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[Answer] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()

    @classmethod
    async def open(cls, port: int, *, buffer_bytes: int | None = None) -> Connection:
        """Connects; `buffer_bytes` roughly bounds what the kernel buffers of an unread answer."""
        made = socket.socket()
        if buffer_bytes is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        made.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(made, ("127.0.0.1", port))
        except BaseException:
            made.close()
            raise
        _, protocol = await loop.create_connection(cls, sock=made)
        protocol.idle_since = loop.time()
        return protocol

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, data: bytes) -> None:
        """Sends raw bytes, of a request or of anything."""
        if not self.is_open:
            raise Broken("closed before the request")
        assert self._transport is not None
        self._transport.write(data)

    def expect(self) -> asyncio.Future[Answer]:
        """Returns the next answer; raises Broken."""
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._waiting = asyncio.get_running_loop().create_future()
        self._waiting.add_done_callback(_seen)
        if not self.is_open:
            self._waiting.set_exception(Broken("closed before the request"))
        return self._waiting

    async def ask(self, request: bytes, timeout_s: float) -> Answer:
        """Sends the request, and returns its answer; raises Broken or TimeoutError."""
        waiting = self.expect()
        self.send(request)
        async with asyncio.timeout(timeout_s):
            return await waiting

    async def dribble(self, request: bytes, pieces: int, pause_s: float) -> None:
        """Sends the request in pieces with pauses between."""
        size = max(1, -(-len(request) // pieces))
        for start in range(0, len(request), size):
            self.send(request[start : start + size])
            await asyncio.sleep(pause_s)

    def pause(self) -> None:
        """Stops reading."""
        if self.is_open:
            self._transport.pause_reading()  # type: ignore[union-attr]

    def resume(self) -> None:
        """Resumes reading."""
        if self.is_open:
            self._transport.resume_reading()  # type: ignore[union-attr]

    def cut(self) -> None:
        """Closes the connection at once, with a reset."""
        if self._transport is not None:
            self._transport.abort()

    def vanish(self) -> bool:
        """Drops it silently, so that it stays half open at the server; returns False if the system forbids it."""
        if not self.is_open:
            return False
        try:
            made = self._transport.get_extra_info("socket")  # type: ignore[union-attr]
            made.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        except OSError:
            return False
        finally:
            self.cut()
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():
            self.extra += data
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"no HTTP: {e}: {data[:80]!r}")
            self.cut()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self.idle_since = asyncio.get_running_loop().time()
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
        assert self._waiting is not None
        with contextlib.suppress(asyncio.InvalidStateError):
            self._waiting.set_result(self._answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the connection ended: {error}")

    def _fail(self, text: str) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(Broken(text))


def _seen(waiting: asyncio.Future[Answer]) -> None:
    """Ignores an outcome that nobody awaits."""
    if not waiting.cancelled():
        waiting.exception()


class Pool:
    """Connections to one port, each used by one request at a time, most recently used first."""

    _REST_S = 5.0

    def __init__(self, port: int) -> None:
        self.port = port
        self._idle: list[Connection] = []

    async def take(self) -> Connection:
        """Returns an idle connection, or a new one; closes those that were idle for long, as the server might."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < self._REST_S:
                return connection
            connection.cut()
        return await Connection.open(self.port)

    def give(self, connection: Connection) -> None:
        """Returns a connection to the pool."""
        if connection.is_open:
            self._idle.append(connection)

    def close(self) -> None:
        """Closes the idle connections."""
        while self._idle:
            self._idle.pop().cut()


def post(path: str, body: bytes, key: str = "", json_length: int | None = None, **headers: str) -> bytes:
    """Returns the bytes of a POST; `headers` as keyword arguments, with `_` for `-`."""
    lines = [f"POST {path} HTTP/1.1", "Host: 127.0.0.1"]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if json_length is not None:
        lines.append(f"Inference-Header-Content-Length: {json_length}")
    lines.append(f"Content-Type: application/{'json' if json_length is None else 'octet-stream'}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if "Content_Length" not in headers:
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def get(path: str, key: str = "") -> bytes:
    """Returns the bytes of a GET."""
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{authorization}\r\n".encode()
