"""A pool of threads that never keeps the interpreter from ending."""

from __future__ import annotations

import itertools
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from guerdon.errors import Cancelled

_Item = tuple[float, int, "Future[Any] | None", "Callable[[], Any] | None"]


class Workers:
    """Daemon threads, one more with each task up to `max_threads`; tasks of higher priority go first.

    The standard library's pool runs all that is queued before the interpreter ends, which for requests that wait
    on a slow server is a trainer that hangs at its exit.
    """

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._queue: queue.PriorityQueue[_Item] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._is_closed = False
        self._running: set[Future[Any]] = set()

    def submit(self, task: Callable[[], Any], priority: int = 0, future: Future[Any] | None = None) -> Future[Any]:
        """The future of the task's result, `future` where it is given; raises Cancelled after `close`."""
        if future is None:
            future = Future()
        with self._lock:
            if self._is_closed:
                raise Cancelled("the client is closed")
            self._queue.put((-priority, next(self._numbers), future, task))
            if self._num_threads < self._max_threads:
                self._num_threads += 1
                threading.Thread(target=self._work, name="guerdon-client", daemon=True).start()
        return future

    def close(self) -> None:
        """Ends every unfinished future with Cancelled, and the threads as soon as they come back."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        error = "the client was closed before the answer"
        with suppress(queue.Empty):
            while True:
                _, _, future, _ = self._queue.get_nowait()
                if future is not None and future.set_running_or_notify_cancel():
                    end(future, error=Cancelled(error))
        for _ in range(self._num_threads):
            self._queue.put((-float("inf"), next(self._numbers), None, None))
        for future in list(self._running):
            end(future, error=Cancelled(error))

    def _work(self) -> None:
        while True:
            _, _, future, task = self._queue.get()
            if future is None or task is None:
                return
            if not future.set_running_or_notify_cancel():  # which wakes those who wait for a cancelled one
                continue
            self._running.add(future)
            try:
                result = task()
            except BaseException as e:
                _clear(e)
                end(future, error=e)
            else:
                end(future, result)
            self._running.discard(future)
            del future, task  # an idle thread keeps no request alive


def _clear(error: BaseException) -> None:
    """Lets go of what the frames of an error hold, such as the request: a failed future may be kept for long."""
    seen: set[int] = set()
    part: BaseException | None = error
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        traceback.clear_frames(part.__traceback__)
        part = part.__cause__ or part.__context__


def end(future: Future[Any], result: Any = None, error: BaseException | None = None) -> None:
    """Gives the future its outcome, unless it has one."""
    with suppress(InvalidStateError):  # ended by `close` in the meantime
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
