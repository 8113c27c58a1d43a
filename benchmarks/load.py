"""Raw HTTP/1.1 requests on kept connections: the transport of benchmarks, with as little client work as possible.

The loops are those of load_generator.py; a closed loop keeps requests in flight, an open one sends each at its time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import httptools
import numpy as np
import uvloop

from load_generator import Extent, LoadGenerator

_MAX_CONNECTIONS = 20_000


@dataclass(slots=True)
class Answer:
    """The reply to request `index`; status 0 if it was not sent or the connection broke.

    `seconds` count from when it was due, so that a delay of this client counts as the server's.
    """

    index: int
    status: int
    body: bytes
    json_length: int | None
    seconds: float


@dataclass
class Result:
    """The answers of a run, and its duration."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        """Returns successful answers per second."""
        return sum(a.status == 200 for a in self.answers) / self.seconds

    def latency_ms(self, percentile: float) -> float:
        """Returns a percentile of the successful answers' times."""
        times = [a.seconds for a in self.answers if a.status == 200]
        return float(np.percentile(times, percentile) * 1e3) if times else float("nan")


def post(path: str, body: bytes, json_length: int | None = None) -> bytes:
    """Returns the bytes of a request."""
    kind = "application/json" if json_length is None else "application/octet-stream"
    extra = "" if json_length is None else f"Inference-Header-Content-Length: {json_length}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def run(
    port: int, requests: list[bytes], concurrency: int, *, count: int | None = None, seconds: float | None = None
) -> Result:
    """Sends the requests in a cycle, `concurrency` at once, until `count` or `seconds` is reached."""

    async def measure() -> Result:
        generator = _RawLoad(port, requests)
        await generator.closed(concurrency, Extent(seconds, count))
        return generator.finish()

    return uvloop.run(measure())


def run_plan(port: int, plan: Sequence[tuple[float, bytes]]) -> Result:
    """Sends each request (seconds when it is due, bytes) at its time; waits for all answers."""

    async def measure() -> Result:
        generator = _RawLoad(port, [request for _, request in plan])
        await generator.open(due_s for due_s, _ in plan)
        return generator.finish()

    return uvloop.run(measure())


class _RawLoad(LoadGenerator):
    def __init__(self, port: int, requests: list[bytes]) -> None:
        super().__init__(_MAX_CONNECTIONS)
        self._port, self._requests, self._result = port, requests, Result()
        self._idle: list[_Connection] = []

    def finish(self) -> Result:
        """Closes the connections and returns the answers."""
        self._result.seconds = self.now_s()
        for connection in self._idle:
            connection.transport.close()
        return self._result

    def skip(self, index: int, due_s: float) -> None:
        self._result.answers.append(Answer(index, 0, b"", None, 0.0))

    async def send(self, index: int, due_s: float | None) -> bool:
        now_s = self.now_s()
        began_s = now_s if due_s is None else min(due_s, now_s)  # uvloop's timers may fire a millisecond early
        answer = Answer(index, 0, b"", None, 0.0)
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            await connection.ask(self._requests[index % len(self._requests)], answer)
        except OSError:
            pass
        answer.seconds = self.now_s() - began_s
        self._result.answers.append(answer)
        return answer.status != 0

    async def _connect(self) -> _Connection:
        _, made = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._idle), "127.0.0.1", self._port
        )
        return made


class _Connection(asyncio.Protocol):
    """Sends one request after another; stands in `idle` in between."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Fills in the answer; leaves its status 0 if the connection breaks."""
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._answer = answer
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"inference-header-content-length":
            self._answer.json_length = int(value)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._answer.status, self._answer.body = self._parser.get_status_code(), b"".join(self._body)
        if self._parser.should_keep_alive():
            self._idle.append(self)
        else:
            self.transport.close()
        self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        self._finish()

    def _finish(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
