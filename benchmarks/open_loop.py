"""Requests at given times, whatever comes of those before: what a server gets whose clients do not wait for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httptools

_CONNECTIONS = 20_000
"""Bound on those open at once; beyond it a request is told as not sent."""


@dataclass(slots=True)
class Sent:
    """One request: whose it is, when it was due, counted from the first, its status (0: none) and its seconds.

    The seconds count from when it was due, so that a generator that is late counts as the server's; or from when it
    was sent, where a timer was early.
    """

    client: str
    due_s: float
    status: int
    seconds: float


async def send(port: int, plan: list[tuple[float, str, bytes]]) -> list[Sent]:
    """Sends each request of the plan (when it is due in seconds, its client, its bytes), and waits for all answers."""
    started = time.perf_counter()
    idle: list[_Connection] = []
    sent: list[Sent] = []
    waiting: list[asyncio.Future[int]] = []
    num_open = 0

    async def opened(request: bytes, answer: asyncio.Future[int]) -> None:
        nonlocal num_open
        num_open += 1
        try:
            _, made = await asyncio.get_running_loop().create_connection(lambda: _Connection(idle), "127.0.0.1", port)
            made.ask(request, answer)
        except OSError:
            answer.set_result(0)

    tasks = set()
    for due, client, request in plan:
        if (wait := due - (time.perf_counter() - started)) > 0:
            await asyncio.sleep(wait)
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        begun = min(due, time.perf_counter() - started)  # uvloop's timers are exact to a millisecond only

        def told(answer: asyncio.Future[int], client: str = client, due: float = due, begun: float = begun) -> None:
            sent.append(Sent(client, due, answer.result(), time.perf_counter() - started - begun))

        answer.add_done_callback(told)
        waiting.append(answer)
        if idle:
            idle.pop().ask(request, answer)
        elif num_open < _CONNECTIONS:
            tasks.add(asyncio.create_task(opened(request, answer)))
        else:
            answer.set_result(0)
    await asyncio.gather(*tasks, *waiting)
    for connection in idle:
        connection.close()
    await asyncio.sleep(0)
    return sent


class _Connection(asyncio.Protocol):
    """One request after another; between them it is idle."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._answer: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def ask(self, request: bytes, answer: asyncio.Future[int]) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._answer = answer
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        answer, self._answer = self._answer, None
        answer.set_result(self._parser.get_status_code())
        if self._parser.should_keep_alive():
            self._idle.append(self)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(0)

    def close(self) -> None:
        self._transport.close()
