"""A closed loop of raw HTTP/1.1 requests: one connection for each in flight, as little client work as possible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools
import numpy as np
import uvloop


@dataclass(slots=True)
class Answer:
    """One reply: which request it answers, its status (0: the connection broke), its body and its time."""

    index: int
    status: int
    body: bytes
    json_length: int | None
    seconds: float


@dataclass
class Result:
    """All answers of one run and the time that the run took."""

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def per_s(self) -> float:
        """Good answers a second."""
        return sum(a.status == 200 for a in self.answers) / self.seconds

    def latency_ms(self, percentile: float) -> float:
        """That percentile of the good answers' times."""
        times = [a.seconds for a in self.answers if a.status == 200]
        return float(np.percentile(times, percentile) * 1e3) if times else float("nan")


def post(path: str, body: bytes, json_length: int | None = None) -> bytes:
    """The bytes of one request."""
    kind = "application/json" if json_length is None else "application/octet-stream"
    extra = "" if json_length is None else f"Inference-Header-Content-Length: {json_length}\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{extra}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def run(
    port: int, requests: list[bytes], concurrency: int, *, count: int | None = None, seconds: float | None = None
) -> Result:
    """Sends the requests in turn, from the first again after the last, until `count` or `seconds` is reached."""
    return uvloop.run(_run(port, requests, concurrency, count, seconds))


async def _run(port: int, requests: list[bytes], concurrency: int, count: int | None, seconds: float | None) -> Result:
    result, started = Result(), time.perf_counter()
    numbers = iter(range(count if count is not None else 1 << 60))

    def following() -> int | None:
        late = seconds is not None and time.perf_counter() - started >= seconds
        return None if late else next(numbers, None)

    async def one() -> None:
        loop = asyncio.get_running_loop()
        while (first := following()) is not None:
            connection = _Connection(requests, first, following, result.answers)
            try:
                await loop.create_connection(lambda made=connection: made, "127.0.0.1", port)
            except OSError:
                result.answers.append(Answer(first, 0, b"", None, 0.0))
                continue
            await connection.done

    await asyncio.gather(*(one() for _ in range(min(concurrency, count or concurrency))))
    result.seconds = time.perf_counter() - started
    return result


class _Connection(asyncio.Protocol):
    """Sends one request after another, each when the one before is answered."""

    def __init__(
        self, requests: list[bytes], first: int, following: Callable[[], int | None], answers: list[Answer]
    ) -> None:
        self._requests, self._following, self._answers = requests, following, answers
        self._index: int | None = first
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._json_length: int | None = None
        self._started = time.perf_counter()
        self._transport.write(self._requests[self._index % len(self._requests)])

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"inference-header-content-length":
            self._json_length = int(value)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        seconds, status = time.perf_counter() - self._started, self._parser.get_status_code()
        self._answers.append(Answer(self._index, status, b"".join(self._body), self._json_length, seconds))
        following = self._following()
        if following is None or not self._parser.should_keep_alive():
            self._index = None
            self._transport.close()
            return
        self._index = following
        asyncio.get_running_loop().call_soon(self._send)

    def connection_lost(self, error: Exception | None) -> None:
        if self._index is not None:
            self._answers.append(Answer(self._index, 0, b"", None, time.perf_counter() - self._started))
        self.done.set_result(None)
