"""Futures of train requests: they know whether anybody has looked at how they ended, so that no error is lost."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from guerdon.core import TrainReport
from guerdon.errors import Cancelled

T = TypeVar("T")

log = logging.getLogger(__name__)


class _Ended(Protocol):
    train_id: str

    @property
    def was_seen(self) -> bool: ...

    def cancelled(self) -> bool: ...

    def exception(self) -> BaseException | None: ...


class Failures:
    """The failed train requests of one client, until somebody has looked at each."""

    def __init__(self) -> None:
        self._failed: deque[tuple[_Ended, BaseException]] = deque()

    def add(self, future: _Ended, error: BaseException) -> None:
        """Says on the log that the request failed, and keeps it for the next call."""
        log.error("train request %s failed: %s", future.train_id, str(error))
        if not isinstance(error, Cancelled):  # there is no next call
            self._failed.append((future, error))

    def raise_unseen(self) -> None:
        """Raises the error of the first failed request whose future nobody has looked at."""
        while True:
            try:
                future, error = self._failed.popleft()
            except IndexError:  # there is none left, or another thread has taken it
                return
            if not future.was_seen:
                if not future.cancelled():
                    future.exception()
                error.add_note(
                    f"raised by a later call, which was not made: train request {future.train_id} had failed, and "
                    "nobody had looked at its future"
                )
                raise error


class TrainFuture(Future[T], Generic[T]):
    """The outcome of one train request; `train_id` is the name under which the server knows it."""

    def __init__(self, train_id: str, failures: Failures) -> None:
        super().__init__()
        self.train_id = train_id
        self._failures = failures
        self._lookers: list[None] = []

    @property
    def was_seen(self) -> bool:
        """Whether somebody has asked for the outcome, or waits for it."""
        return bool(self._lookers)

    def result(self, timeout: float | None = None) -> T:
        """The report; raises what the request failed with, or TimeoutError."""
        with self._look():
            return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the request failed with, None where it did not; raises TimeoutError."""
        with self._look():
            return super().exception(timeout)

    def set_exception(self, exception: BaseException | None) -> None:
        """Notes the failure first: whoever waits for the future may make the next call at once."""
        if exception is not None and not self.done():
            self._failures.add(self, exception)
        super().set_exception(exception)

    @contextmanager
    def _look(self) -> Iterator[None]:
        self._lookers.append(None)
        try:
            yield
        except (TimeoutError, KeyboardInterrupt):  # a look that saw nothing
            self._lookers.pop()
            raise


class AsyncTrainFuture(asyncio.Future[TrainReport]):
    """`TrainFuture` for an event loop: to be awaited. Cancelling it takes nothing back that was sent."""

    def __init__(self, train_id: str) -> None:
        super().__init__()
        self.train_id = train_id
        self.was_seen = False

    def __await__(self) -> Generator[Any, None, TrainReport]:
        try:
            return (yield from super().__await__())
        finally:
            self._look()

    def result(self) -> TrainReport:
        """The report; raises what the request failed with."""
        self._look()
        return super().result()

    def exception(self) -> BaseException | None:
        """What the request failed with, None where it did not."""
        self._look()
        return super().exception()

    def _look(self) -> None:
        self.was_seen |= self.done() and not self.cancelled()
