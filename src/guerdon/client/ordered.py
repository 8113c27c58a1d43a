"""Sessions whose calls go in the order in which they are made, as the calls of a model that learns must."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from guerdon.client.addresses import Address
from guerdon.client.futures import Failures
from guerdon.client.progress import Progress
from guerdon.client.retry import RetryPolicy
from guerdon.client.session import AsyncSession, Call, Session
from guerdon.client.spans import carried
from guerdon.client.turnstile import Turnstile
from guerdon.client.workers import end
from guerdon.errors import Cancelled

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Turn:
    """A call that waits for those before it: what it does, and the future of its result."""

    task: Callable[[], Any] | None
    future: Future[Any]
    is_waiting: bool = True


class OrderedSession(Session):
    """A session of threads. A call that goes alone waits for all before it, and all after it wait for it."""

    def __init__(self, addresses: list[Address], policy: RetryPolicy, max_in_flight: int) -> None:
        super().__init__(addresses, policy, max_in_flight)
        self.failures = Failures()
        self.progress = Progress()
        self._turns: Turnstile[_Turn] = Turnstile()
        self._turns_lock = threading.Lock()

    def in_turn(self, task: Callable[[], T], future: Future[T], *, alone: bool) -> None:
        """Has `task` done by a worker when its turn comes, with the outcome in `future`.

        Raises Cancelled after `close`, and the error of an earlier train request that nobody has looked at.
        """
        self.failures.raise_unseen()
        turn = _Turn(carried(task), future)
        with self._turns_lock:
            if self._closed.is_set():
                raise Cancelled("the client is closed")
            ready = _called(self._turns.arrive(turn, alone=alone))
        self._begin(ready)
        future.add_done_callback(lambda _: self._leave(turn))

    def close(self) -> None:
        """Ends all calls with Cancelled, also those whose turn has not come."""
        if os.getpid() != self.pid:
            return
        with self._turns_lock:
            self._closed.set()
            waiting = _called(self._turns.clear())
        super().close()
        for turn in waiting:
            _cancel(turn.future)

    def _leave(self, turn: _Turn) -> None:
        with self._turns_lock:
            was_waiting, turn.task = turn.is_waiting, None  # the future, which keeps the turn, may be kept for long
            ready = _called(self._turns.leave(turn))
        if was_waiting:  # cancelled, and nobody else will wake those who wait for it
            turn.future.set_running_or_notify_cancel()
        self._begin(ready)

    def _begin(self, turns: list[_Turn]) -> None:
        for turn in turns:
            if (task := turn.task) is None:  # it has just left
                continue
            try:
                self.workers.submit(task, future=turn.future)
            except Cancelled:
                _cancel(turn.future)


class AsyncOrderedSession(AsyncSession):
    """A session of one event loop, in the same order."""

    def __init__(self, addresses: list[Address], policy: RetryPolicy, max_in_flight: int) -> None:
        super().__init__(addresses, policy, max_in_flight)
        self.failures = Failures()
        self.progress = Progress()
        self._turns: Turnstile[asyncio.Future[None]] = Turnstile()
        self._tasks: set[asyncio.Task[Any]] = set()  # the loop itself would let them be collected

    def in_turn(self, call: Call[T], *, alone: bool, is_wanted: Callable[[], bool] = lambda: True) -> asyncio.Task[T]:
        """The task of the call, whose place in the order is taken at once; it is dropped if not wanted by then.

        Raises the error of an earlier train request that nobody has looked at.
        """
        self.failures.raise_unseen()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def perform() -> T:
            await turn
            if not is_wanted():
                raise asyncio.CancelledError
            return await self.run(call)

        def leave(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            _open(self._turns.leave(turn))

        task = asyncio.create_task(perform())
        self._tasks.add(task)
        task.add_done_callback(leave)
        _open(self._turns.arrive(turn, alone=alone))
        return task


def _called(turns: list[_Turn]) -> list[_Turn]:
    """The same turns, whose futures are from now on ended by those who have them."""
    for turn in turns:
        turn.is_waiting = False
    return turns


def _cancel(future: Future[Any]) -> None:
    """Ends a future whose task nobody has begun."""
    if future.set_running_or_notify_cancel():
        end(future, error=Cancelled("the client was closed before the answer"))


def _open(turns: list[asyncio.Future[None]]) -> None:
    for turn in turns:
        if not turn.done():  # its task was cancelled, and is about to leave
            turn.set_result(None)
