"""HTTP connections: limits on bytes and time around the application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import ssl
import struct
from collections.abc import Collection
from typing import Any

import httptools
import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from guerdon.server.front.holders import Held, Holders
from guerdon.server.front.http_request import CONNECTION
from guerdon.server.logs import failure
from guerdon.settings.config import LimitsConfig

log = logging.getLogger(__name__)

_MOST_HEAD_BYTES = 65_536
_MOST_HEADERS = 256
_CHUNK_FRAMING_BYTES = 16
"""Bytes around a chunk's data that every chunk may have."""

_LINGER_S = 1.0
"""Time for a refused client to read why, while the rest of its bytes are discarded: closing at once may reset it."""

_BACKLOG = 4096
_ACCEPT_AGAIN_S = 0.1
_SWEEP_S = 1.0
_LOG_EVERY_S = 60.0
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large", 503: b"Unavailable"}

_VANISHED_S = 120
"""After so long a host that no longer answers loses its connections."""

_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _VANISHED_S * 1000}


class _Refused(Exception):
    """The connection itself answers, and closes."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Early(Exception):
    """Pipelining: a request came before the answer to the previous one."""


class HttpServer:
    """The connections of one listener.

    `clients` are the keys' holders, who share the connections; if there are any, a connection that has shown no key
    yet may be idle no longer than a head may take.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: LimitsConfig,
        tls: ssl.SSLContext | None,
        max_connections: int,
        clients: Collection[str],
    ) -> None:
        self.limits = limits
        self.has_keys = bool(clients)
        self.holders = Holders(max_connections, clients)
        self.most_unread_bytes = max(limits.max_bodies_mb, limits.max_body_mb) << 20
        self.state = ServerState()
        self.settings = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False
        )
        self.settings.load()
        self._tls = tls
        self._handshakes: set[asyncio.Task[None]] = set()
        self._logged_at = -math.inf
        timeouts = (limits.header_timeout_s, limits.read_timeout_s, limits.write_timeout_s, limits.idle_timeout_s)
        self._sweep_s = min(_SWEEP_S, min(timeouts) / 4)

    @property
    def connections(self) -> set[HttpConnection]:
        """All open connections, including those about to close."""
        return self.state.connections  # type: ignore[return-value]

    async def start(self, listener: socket.socket) -> None:
        """Starts to accept connections."""
        loop = asyncio.get_running_loop()
        self._listener = listener
        self._accepting: asyncio.Server | asyncio.Task[None]
        if self._tls is None:
            self._accepting = await loop.create_server(lambda: HttpConnection(self), sock=listener, backlog=_BACKLOG)
        else:
            listener.setblocking(False)
            self._accepting = loop.create_task(self._accept(self._tls))
        self._sweeping = loop.create_task(self._sweep())

    async def stop(self, grace_s: float) -> None:
        """Stops accepting, gives pending answers `grace_s` seconds to be sent, and closes all connections."""
        if isinstance(self._accepting, asyncio.Task):
            self._accepting.cancel()
        else:
            self._accepting.close()
        for task in self._handshakes:
            task.cancel()
        for connection in list(self.connections):
            connection.shutdown()
        await self._wait_for_end(grace_s)
        for task in list(self.state.tasks):
            task.cancel()
        await self._wait_for_end(grace_s if self.state.tasks else 0)
        self._sweeping.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the event loop closes their sockets
        self._listener.close()

    async def _accept(self, tls: ssl.SSLContext) -> None:
        """Accepts TLS connections; unlike `create_server`, counts unfinished handshakes."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, came_from = await loop.sock_accept(self._listener)
            except OSError as e:  # out of files, or the client has left
                log.warning("cannot accept a connection: %s", e.strerror)
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            held = self.holders.add(came_from[0], accepted.close, loop.time())
            if held is None:
                accepted.close()
                continue
            task = loop.create_task(self._handshake(accepted, came_from[0], tls, held))
            held.end = task.cancel
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _handshake(self, accepted: socket.socket, came_from: str, tls: ssl.SSLContext, held: Held) -> None:
        timeout_s = self.limits.header_timeout_s
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: HttpConnection(self, held),
                accepted,
                ssl=tls,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_LINGER_S,
            )
        except asyncio.CancelledError:
            self.holders.remove(held)
            raise
        except OSError as e:  # an ssl.SSLError is one
            self.holders.remove(held)
            accepted.close()
            level, now = logging.DEBUG, asyncio.get_running_loop().time()
            if now - self._logged_at > _LOG_EVERY_S:  # else anyone who connects could fill the log
                level, self._logged_at = logging.INFO, now
            why = getattr(e, "reason", None) or type(e).__name__
            log.log(level, "TLS handshake with %s failed: %s", came_from, why)

    async def _wait_for_end(self, timeout_s: float) -> None:
        ends = asyncio.get_running_loop().time() + timeout_s
        while (self.connections or self.state.tasks) and asyncio.get_running_loop().time() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def _sweep(self) -> None:
        """Ends connections that timed out; one look a second costs less than timers that hardly ever fire."""
        while True:
            await asyncio.sleep(self._sweep_s)
            now = asyncio.get_running_loop().time()
            try:
                for connection in list(self.connections):
                    connection.check_time(now)
                self._bound_unread()
            except Exception as e:  # one broken connection must not end the sweep
                failure(log, logging.ERROR, "the sweep over the connections failed", error=e)

    def _bound_unread(self) -> None:
        """Resets connections, largest first, if unread answers take more memory than bodies may."""
        unread = sum(connection.num_unread for connection in self.connections)
        if unread <= self.most_unread_bytes:
            return
        for connection in sorted(self.connections, key=lambda connection: -connection.num_unread):
            _break_off(connection.transport)
            unread -= connection.num_unread
            if unread <= self.most_unread_bytes:
                return


class HttpConnection(HttpToolsProtocol):
    """uvicorn's connection, with limits.

    It answers one request at a time: if a second comes before the answer to the first, the connection ends with that
    answer, and the client sends the second again.
    """

    transport: asyncio.Transport

    def __init__(self, server: HttpServer, held: Held | None = None) -> None:
        super().__init__(server.settings, server.state, {})
        self._server = server
        self._held = held
        self._limits = server.limits
        self._time = self.loop.time
        self._limit_s = server.limits.header_timeout_s
        self._limit_starts = self._time()
        """Start of the current time limit `_limit_s`; math.inf while the application works."""
        self._is_in_head = False
        self._is_in_body = False
        self._ignores_input = False
        self._is_lingering = False
        self._num_head = 0
        self._num_silent = 0
        """Bytes received of a head, or those around a body's chunks: extensions, trailers and longer sizes."""
        self._skipped_body = b""
        """The header that frames a body which the parser skips because of an Upgrade; empty if it skips none."""
        self._is_repeating = False
        """Whether the parser reads a head again, which was handled already."""
        self._is_known = not server.has_keys
        """Whether a valid key was shown here."""
        self.num_unread = 0
        """Bytes of answers that wait to be sent, as last counted."""
        self._unread_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Counts the connection, and refuses it if there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        _keep_alive(self.transport)
        server = self._server
        if self._held is not None:  # counted when it was accepted, before the handshake
            self._held.end = self._make_way
            server.holders.expect(self._held, self._limit_starts)
            return
        self._held = server.holders.add((self.client or ("",))[0], self._make_way, self._limit_starts)
        if self._held is not None:
            server.holders.expect(self._held, self._limit_starts)
        else:
            log.debug("more than %d connections", server.holders.total)
            self._refuse(503, "this server has as many connections as it takes; try again")
            if len(server.connections) > 2 * server.holders.total:
                self.transport.abort()  # too many even to tell them all

    def admit(self, name: str) -> None:
        """Assigns the connection to the client whose key was shown; raises Overloaded if it may have no more."""
        self._server.holders.admit(self._held, name)
        self._is_known = True

    def _make_way(self) -> None:
        """Closes while idle, to make room for another connection."""
        self._ignores_input = True
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cleans up; the running request learns that the client has left."""
        self._ignores_input = True
        self._server.holders.remove(self._held)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, which calls the `on_...` below."""
        if self._ignores_input:
            return
        self._num_silent += len(data)
        try:
            try:
                self.parser.feed_data(data)
                rest = None
            except httptools.HttpParserUpgrade as e:
                rest = data[e.args[0] :]
            if rest is not None:
                self._ignore_upgrade(rest)
        except httptools.HttpParserError as e:
            malformed = _Refused(400, "Invalid HTTP request received.")
            self._stop_reading(e.__context__ if isinstance(e.__context__, _Refused) else malformed)
        else:
            if self._num_silent > _MOST_HEAD_BYTES:
                status, what = (400, "chunk extensions and trailers have") if self._is_in_body else (431, "head has")
                self._stop_reading(_Refused(status, f"the request's {what} more than {_MOST_HEAD_BYTES} bytes"))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Feeds a new parser with what follows an Upgrade, which is ignored (RFC 9110, section 7.8)."""
        if self.scope["method"] == "CONNECT":
            self._ignores_input = True  # what follows is not HTTP
            return
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if self._skipped_body:
            self._is_repeating = True
            self.parser.feed_data(b"POST * HTTP/1.1\r\n%s\r\n\r\n" % self._skipped_body)
            self._is_repeating, self._skipped_body = False, b""
        self.parser.feed_data(rest)

    def on_message_begin(self) -> None:
        """Called at a request's first byte."""
        if self._is_repeating:
            return
        if self.cycle is not None and (not self.cycle.response_complete or self.flow.write_paused):
            raise _Early  # an unsent answer would hold up the next, which no limit counts
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        self._is_in_head, self._num_head = True, 0
        self._limit_starts, self._limit_s = self._time(), self._limits.header_timeout_s

    def on_url(self, url: bytes) -> None:
        """Called with a part of the request's target."""
        if self._is_repeating:
            return
        self._num_head += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with a header; trailers are ignored, since the request was accepted without them."""
        if not self._is_in_head:
            return
        self._num_head += len(name) + len(value) + 4
        if len(self.headers) >= _MOST_HEADERS:
            raise _Refused(431, f"the request has more than {_MOST_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when a head is complete: starts the application on the request."""
        if self._is_repeating:
            return
        framing = self._check_head()
        is_tunnel = self.parser.get_method() == b"CONNECT"
        if self.parser.should_upgrade() and not is_tunnel:
            self._skipped_body = framing
        self._is_in_head, self._is_in_body, self._num_silent = False, True, 0
        self._limit_starts = math.inf
        self._server.holders.work(self._held)
        super().on_headers_complete()
        if is_tunnel:
            self.cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        """Called with a chunk's size."""
        self._num_silent -= _CHUNK_FRAMING_BYTES

    def on_body(self, body: bytes) -> None:
        """Called with a part of a body."""
        self._num_silent -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called when a request is complete."""
        if self._skipped_body:
            return
        self._is_in_body, self._num_silent = False, 0
        super().on_message_complete()
        self._await_next()

    def on_response_complete(self) -> None:
        """Called when an answer is written."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self._await_next()

    def shutdown(self) -> None:
        """Closes the connection once it owes no answer."""
        self._ignores_input = self._ignores_input or self.cycle is None or self.cycle.response_complete
        super().shutdown()

    def break_off(self) -> None:
        """Resets the connection: its client does not read."""
        _break_off(self.transport)

    def check_time(self, now: float) -> None:
        """Ends the connection if it has timed out."""
        unread = self.transport.get_write_buffer_size()
        if unread != self.num_unread or not unread:
            self.num_unread, self._unread_since = unread, now
        elif now - self._unread_since > self._limits.write_timeout_s:
            _break_off(self.transport)
            return
        if now - self._limit_starts <= self._limit_s or self.transport.is_closing():
            return
        if self._is_in_head and not self._is_lingering:
            self._refuse(408, f"the head of the request did not come within {self._limit_s:g} s")
        else:
            self.transport.close()

    def _await_next(self) -> None:
        """Starts the wait for the next request, or for the rest of one that is answered already."""
        if self.cycle.response_complete:
            limits = self._limits
            self._server.holders.wait(self._held)
            self._limit_starts = self._time()
            rests = self._is_known and not self._is_in_body
            self._limit_s = limits.idle_timeout_s if rests else limits.header_timeout_s

    def _check_head(self) -> bytes:
        """Returns the header that frames the body, empty if there is none.

        Refuses heads that another parser might read differently (smuggling).
        """
        if self._num_head > _MOST_HEAD_BYTES:
            raise _Refused(431, f"the request's head has more than {_MOST_HEAD_BYTES} bytes")
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Refused(400, f"this server speaks HTTP/1.1, not {version}")
        seen: dict[bytes, bytes] = {}
        for name, value in self.headers:
            if name in (b"host", b"content-length", b"transfer-encoding"):
                if name in seen:
                    raise _Refused(400, f"the header {name.decode()} comes twice")
                seen[name] = value
        if version == "1.1" and b"host" not in seen:
            raise _Refused(400, "the header Host is missing; HTTP/1.1 needs it")
        scheme, is_absolute, rest = self.url.partition(b"://")
        if is_absolute and b"/" not in scheme and rest.partition(b"/")[0].lower() != seen.get(b"host", b"").lower():
            raise _Refused(400, "the request's target names another host than the header Host")
        coding = seen.get(b"transfer-encoding")
        if coding is None:
            length = seen.get(b"content-length", b"").strip(b" \t")
            return b"Content-Length: " + length if length.strip(b"0") else b""
        if coding.strip().lower() != b"chunked" or b"content-length" in seen or version == "1.0":
            raise _Refused(400, "Transfer-Encoding can only be `chunked`, in HTTP/1.1, and without Content-Length")
        return b"Transfer-Encoding: chunked"

    def _stop_reading(self, refused: _Refused) -> None:
        """Reads no more of the connection after a malformed or early request; answers if it still can."""
        self._ignores_input = True
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not self._is_in_body and not self.flow.write_paused):
            self._refuse(refused.status, str(refused))
        elif cycle.response_complete:
            self.transport.close()  # the request has its answer
        elif self._is_in_body and not cycle.response_started:
            cycle.disconnected = True  # cancels the application's work; no answer is sent
            cycle.message_event.set()
            self._refuse(refused.status, str(refused))
        else:
            cycle.keep_alive = False

    def _refuse(self, status: int, text: str) -> None:
        """Answers with an error in the usual form, without the application, and ends the connection."""
        kind = b"Overloaded" if status == 503 else b"InvalidRequest"
        body = orjson.dumps({"error": text})
        more = b"guerdon-error: %s\r\n" % kind + (b"retry-after: 1\r\n" if status == 503 else b"")
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\nconnection: close\r\n" % (status, _PHRASES[status])
        self.transport.write(b"%s%scontent-length: %d\r\n\r\n%s" % (head, more, len(body), body))
        self._ignores_input = self._is_lingering = True
        self._limit_starts, self._limit_s = self._time(), _LINGER_S
        if self.transport.can_write_eof():
            self.transport.write_eof()


def _keep_alive(transport: asyncio.BaseTransport) -> None:
    """Makes the system end the connection once the host at its other end has vanished."""
    found: Any = transport.get_extra_info("socket")
    if found is None:
        return
    with contextlib.suppress(OSError):  # not a TCP socket, or gone already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):  # not all systems have all
                found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _break_off(transport: asyncio.Transport) -> None:
    """Resets the connection: drops unsent data, also in the system's buffers."""
    found: Any = transport.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is gone already
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()
